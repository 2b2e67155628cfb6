# SPDX-License-Identifier: Apache-2.0
"""The page on the check beside scores: its numbers follow from the records."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest

from docs.generate import check_page
from docs.results.check import measure as evidence
from kvfold.errors import KvfoldError
from kvfold.eval.run.sample_result import sample_digest
from kvfold.eval.tasks import SampleRequest, tasks
from kvfold.hf.chat_template import token_count
from kvfold.loading import load


@pytest.fixture
def bench() -> ModuleType:
    return check_page


def measured(bench: ModuleType, *values: tuple[float, float], **known: Any) -> list[Any]:
    """Cells with such a mean KL and points lost."""
    where = {"task": "a", "length": 1024, "question_aware": False} | known
    return [
        bench.Cell(
            method=f"m{number}", budget="0.2", prompts=40, kept=0.2, mean_kl=kl, p99_kl=kl,
            agreement=1.0, score=90.0 - lost, lost=lost, **where,
        )
        for number, (kl, lost) in enumerate(values)
    ]  # fmt: skip


def test_the_rank_correlation_is_spearmans(bench):
    # Ranks of the KL 1 2 3 4 5, of the loss 1 2 3 5 4: 1 − 6·2 / (5·24) = 0.9.
    cells = measured(bench, (0.01, 0), (0.02, 1), (0.4, 5), (2, 90), (3, 80))
    value, low, high = bench.spearman(cells)
    assert value == pytest.approx(0.9)
    assert low < value <= high <= 1


def test_a_row_counts_cells_on_both_sides_of_the_certificates_kl(bench):
    cells = measured(bench, (0.01, 0), (0.05, 1), (0.4, 5), (2, 90), (3, 80))
    (row,) = [line for line in bench.text(cells, []).splitlines() if line.startswith("| `a`")][:1]
    assert row.startswith("| `a` | 1024 | before it is known | 40 | 5 of 5 | 0.90 (")
    assert row.endswith(" |  | 0.5 (2) | 58.3 (3) |")


def test_budgets_of_a_method_are_drawn_together(bench):
    """Cells of two methods: no interval. Of many, each with two alike budgets: wider than cells."""
    few = measured(bench, (0.01, 0), (0.02, 1), (0.4, 5), (2, 90))
    few = [cell.model_copy(update={"method": f"m{n % 2}"}) for n, cell in enumerate(few)]
    assert "| 4 of 2 | 1.00 |" in bench.text(few, [])
    values = [(n, (7 * n) % 10) for n in range(10)]
    alone = measured(bench, *values)
    twice = [*alone, *(cell.model_copy(update={"budget": "0.3"}) for cell in alone)]
    assert bench.spearman(twice) == pytest.approx(bench.spearman(alone))


def test_cells_that_lose_nearly_everything_are_ranked_alone(bench):
    cells = measured(bench, (0.01, 0), (1, 95), (2, 90), (3, 92), (4, 91), (5, 89))
    # Ranks of the KL 1 2 3 4, of the loss 4 1 3 2: 1 − 6·14 / (4·15) = −0.4.
    assert "| −0.40 (4) |" in bench.text(cells, [])


def test_all_tasks_are_means_of_the_cells_that_every_task_has(bench):
    one = measured(bench, (0.01, 0), (1.0, 10), (2.0, 30))
    other = measured(bench, (0.03, 2), (3.0, 30), task="b")
    aware = measured(bench, (0.03, 2), (3.0, 30), question_aware=True)
    found = bench.pooled([*one, *other, *aware])
    assert [(cell.method, cell.mean_kl, cell.lost, cell.prompts) for cell in found] == [
        ("m0", pytest.approx(0.02), 1, 80),
        ("m1", pytest.approx(2.0), 20, 80),
    ]


def test_a_certificate_holds_up_to_two_points(bench):
    cells = measured(bench, (0.01, 0), (1.0, 10), (2.0, 30))
    where = {"task": "a", "length": 1024, "question_aware": False, "budget": "0.2"}
    certified = [
        bench.Certified(method=method, split=split, lost=lost, **where)
        for split, (method, lost) in enumerate((("m0", -1), ("m0", 2), ("m1", 2.5), ("m0", 0)))
    ]
    *_, row, _, worst, _, _ = bench.text(cells, certified).splitlines()
    assert row.endswith("| 20 | 2 of 3 | 1 of 2 | 4 | 75.0% | 2.5 |")
    assert worst == "`a`, 1024, before it is known, not always: `m1` 0%."
    *_, row, _, _ = bench.text(cells, []).splitlines()
    assert row.endswith("| 20 | 0 of 3 |  | 0 |  |  |")


def test_written_records_are_read_again(bench, tmp_path):
    cells = measured(bench, (0.0123456789, 0), (1.0, 10), (2.0, 30))
    bench.write(cells, [], tmp_path)
    again, _ = bench.load(tmp_path)
    assert again[0].mean_kl == 0.012346 and again[1:] == cells[1:]
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    bench.write(again, [], tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written


@pytest.mark.whole
def test_the_published_page_is_that_of_the_records(bench):
    assert (bench.OUT / bench.PAGE).read_text(encoding="utf-8") == bench.text(*bench.load())


@pytest.mark.slow
def test_prompts_are_drawn_again_from_published_rows(tmp_path):
    """Digests tell that they are the samples that were scored; another haystack is refused."""
    _, tokenizer = load("bundled")
    book, other = tmp_path / "book.txt", tmp_path / "other.txt"
    book.write_text("The sea was calm that day. " * 200)
    other.write_text("The hills were green that day. " * 200)
    request = SampleRequest(
        samples=3, count=partial(token_count, tokenizer), haystack=book, length=512
    )
    task = "ruler_niah_single_2"
    known = {"task": task, "length": "512", "question_aware": "0", "turn": "0", "error": ""}
    rows = [
        known
        | {"method": method, "budget": budget, "index": str(sample.index), "score": score}
        | {"text": sample_digest(sample)}
        for sample in tasks()[task].samples(request)
        for method, budget, score in (("full", "", "1.0"), ("knorm", "0.2", "0.0"))
    ]
    ((work, of),) = evidence.scored(tokenizer, book, rows).items()
    assert work == (task, 512, False)
    assert of.scores == {("full", None): [100.0] * 3, ("knorm", "0.2"): [0.0] * 3}
    assert [prompt.where for prompt in of.prompts] == [f"{task} {index}" for index in range(3)]
    # A method that lacks a sample is not compared.
    assert ("knorm", "0.2") not in evidence.scored(tokenizer, book, rows[:-1])[work].scores
    with pytest.raises(KvfoldError, match="another book"):
        evidence.scored(tokenizer, other, rows)
