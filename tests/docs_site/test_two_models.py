# SPDX-License-Identifier: Apache-2.0
"""The page of two models follows from its records, and these from the published samples."""

from __future__ import annotations

from statistics import fmean

import pytest

from docs.generate import compact_samples, made
from docs.generate import two_models as pages
from kvfold.eval.run.run_folder import RECORDS
from kvfold.evidence.grouped import grouped
from kvfold.report.load import load_results


def test_the_page_and_its_pictures_are_made_of_the_records(tmp_path):
    cells, page = pages.found(), pages.PUBLISHED / "README.md"
    assert page.read_text("utf-8") == made.with_parts(page, "two_models", pages.parts(cells))
    for name, model in pages.MODELS.items():
        pages.draw(cells, model, tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").read_bytes() == (
            pages.PUBLISHED / f"{name}.svg"
        ).read_bytes()


@pytest.mark.parametrize("name", pages.MODELS)
def test_scores_are_means_of_the_published_samples(name):
    scores = grouped(
        (tuple(row[key] for key in ("task", "question_aware", "method", "budget")), row["score"])
        for row in compact_samples.read(pages.PUBLISHED / f"{name}.csv.gz")
    )
    own = [
        one
        for one in load_results([pages.PUBLISHED / RECORDS])
        if one.cell.subject.name == pages.MODELS[name]
    ]
    assert len(own) == len(scores) > 0
    for one in own:
        aware = str(int(one.cell.protocol.question_aware))
        found = scores[one.cell.task, aware, one.cell.method, one.cell.budget or ""]
        assert one.samples == len(found)
        assert one.score.value == pytest.approx(100 * fmean(map(float, found)))


def test_a_task_that_the_full_cache_fails_is_in_italics():
    cells = pages.found()
    line = next(one for one in pages.table(cells, False).splitlines() if one.startswith("| full"))
    written = [part.strip() for part in line.split("|")[2:-1]]
    assert len(written) == 6
    for text in written:
        value = float(text.strip("*").split()[0])
        assert text.startswith("*") == (value < pages.TELLING)
