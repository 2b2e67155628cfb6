# SPDX-License-Identifier: Apache-2.0
"""docs/answering-long.md: its tables and pictures are those of the records."""

from __future__ import annotations

import pytest
import torch

import kvfold
from docs.generate import long_page as pages
from docs.generate.made import with_part
from docs.results.long import measure_kl as measure
from docs.results.long import measure_run
from kvfold.bench.models import BenchModel
from kvfold.checks.batches import PaddedIds
from tests.helpers.models import build, prompts
from tests.helpers.truth import Reader


def test_the_published_tables_and_pictures_are_those_of_the_records(tmp_path):
    text, rows = pages.PAGE.read_text(encoding="utf-8"), pages.load_distances()
    for name, made in pages.tables().items():
        assert with_part(text, pages.BEGIN.format(name), made) == text
    pages.draw(pages.load("entries.jsonl"), tmp_path / pages.PICTURE)
    pages.draw_kl(rows, tmp_path / pages.KL_PICTURE)
    for name in (pages.PICTURE, pages.KL_PICTURE):
        assert (tmp_path / name).read_bytes() == (pages.OUT / name).read_bytes()


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "method",
    ["knorm", "h2o:decode=append", "scissorhands:window=6,recent=2", "rkv:window=4", "keydiff"],
)
def test_distances_of_answers_are_those_of_rows_that_are_read_token_by_token(method, monkeypatch):
    """Beside torch's own divergence, and two caches of each row alone."""
    monkeypatch.setattr(measure, "INTERVAL", 16)
    model, (ids, mask) = build("llama", torch.float64), prompts((20, 13))
    answers = measure.Answers.of(model, PaddedIds(ids, mask), 70)
    kl, agrees = measure.measured(model, answers, method, 24)
    assert kl[:, :32].max() < 1e-5 < 1e-2 < kl[:, 32:].max()
    for row, length in enumerate((20, 13)):
        in_rounds = f"{method} + every:interval=16,prompt=kept"
        full, evicting = (
            Reader(model, kvfold.CompressedCache(model, name, budget))
            for name, budget in (("full", None), (in_rounds, 24))
        )
        for reader in (full, evicting):
            reader(ids[row : row + 1, 20 - length :])
        for step, token in enumerate(answers.ids[row : row + 1].split(1, 1)):
            one, other = (reader(token)[0, -1] for reader in (full, evicting))
            expected = torch.nn.functional.kl_div(
                other.log_softmax(-1), one.log_softmax(-1), reduction="sum", log_target=True
            )
            assert abs(float(expected - kl[row, step])) < 1e-4
            assert bool(one.argmax() == other.argmax()) == bool(agrees[row, step])


def test_means_begin_after_the_first_eviction():
    row = pages.AnswerDistance(
        model="m", answer="a", method="knorm", budget=256, interval=128, tokens=1024,
        kl=(0.0,) * 6 + (0.5,) * 10, agrees=(1.0,) * 6 + (0.75,) * 10,
    )  # fmt: skip
    other = row.model_copy(update={"answer": "b", "kl": (0.0,) * 6 + (0.4,) * 10})
    assert pages.kl_table([row, other]) == (
        ["method", "KL at 256, n = 2", "same token"],
        [["`knorm`", "0.450 (0.000 to 1.085)", "75.0%"]],  # 0.05 · t of one degree, 12.706
    )


def test_methods_are_told_apart_on_the_same_answers():
    """Answers differ more than methods: the differences of one method hold zero, of one not."""

    def rows(method: str, *kl: float) -> list:
        return [
            pages.AnswerDistance(
                model="m", answer=f"{n}", method=method, budget=256, interval=128, tokens=1024,
                kl=(0.0,) * 6 + (each,) * 10, agrees=(1.0,) * 16,
            )
            for n, each in enumerate(kl)
        ]  # fmt: skip

    every = [*rows("b", 0.2, 0.3, 1.1), *rows("c", 0.0, 0.3, 1.2), *rows("a", 0.1, 0.2, 1.0)]
    assert pages.ranked(every) == ["a", "c", "b"]
    told = "Lowest KL at 256 entries: `a`, which 3 answers do not tell apart from `c`."
    assert pages.alike(every) == told
    assert pages.alike(rows("a", 0.1)) == "Lowest KL at 256 entries: `a`."


def test_bytes_are_counted_where_they_are_most():
    """A round after every 10 tokens; the marks themselves come right after one."""
    subject = BenchModel.of("tiny", "float32", 0)
    runs = [
        measure_run.long_run(subject, method, budget, 20, 60, 20)
        for method, budget in (("knorm + every:interval=10", 15), ("knorm", 15), ("full", None))
    ]
    in_rounds, appending, full = runs
    assert [run.flat for run in runs] == [True, False, False]
    assert [mark.entries for mark in in_rounds.marks] == [15, 15, 15]
    assert [mark.entries for mark in appending.marks] == [35, 55, 75]
    assert [mark.entries for mark in full.marks] == [40, 60, 80]
    entry = full.marks[-1].most_bytes / 80
    assert 24 < in_rounds.marks[-1].most_bytes / entry < 30
    assert in_rounds.late_over_early is None


def test_a_long_enough_answer_is_set_against_a_young_one():
    subject = BenchModel.of("tiny", "float32", 0)
    made = measure_run.long_run(subject, "knorm + every:interval=2", 15, 20, 60, 20)
    assert made.late_ms is not None and made.late_ms > 0
    assert made.late_over_early is not None and 0.2 < made.late_over_early < 5
