# SPDX-License-Identifier: Apache-2.0
"""Results of a cell: what was cut, failed or could not be run is counted."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import math
from pathlib import Path

import pytest

from kvfold.eval.run.cell_result import PERPLEXITY, cell_result
from kvfold.eval.run.run_folder import samples_file, summarize
from kvfold.eval.run.sample_result import SampleResult
from kvfold.eval.tasks import tasks
from tests.helpers.eval_results import cell, lines, scored, text
from tests.helpers.evaluation import HELD, outcome

COMPACT = Path(__file__).parents[3] / "docs" / "generate" / "compact_samples.py"


def test_a_record_counts_what_was_cut_failed_and_could_not_be_run():
    small, full = cell(method="snapkv", budget="0.25"), cell()
    held = HELD.model_copy(update={"kept": 0.3, "kept_per_layer": (0.2, 0.4), "nbytes": 4})
    cut = scored(0.0, left_out=7, held=held)
    broken = cut.answers[0].model_copy(
        update={"failed": {"substring": "no number"}, "ended": "limit"}
    )
    ours = lines(
        small,
        [scored(1.0), cut, cut.model_copy(update={"answers": (broken,)}), "too long", "too long"],
    )
    base = lines(full, [scored(1.0), scored(1.0), "died", scored(0.0), scored(1.0)])
    found = cell_result(tasks()["kv_retrieval"], small, ours[::-1], base)
    assert (found.samples, found.questions, found.truncated, found.at_limit) == (3, 3, 2, 1)
    assert found.errors == {"too long": 2} and found.failed == {"no number": 1}
    assert found.metric == "substring" and not found.lower_is_better
    assert found.score.value == pytest.approx(100 / 3)
    assert found.difference.samples == 2 and found.difference.value == -50
    assert (found.kept_nominal, found.kept) == (0.25, pytest.approx((0.5 + 0.3 + 0.3) / 3))
    assert found.kept_per_layer == pytest.approx((0.8 / 3, 1.4 / 3))
    assert found.bytes_ratio == pytest.approx((10 + 4 + 4) / 60)
    assert (found.prefill_seconds, found.seconds_per_token, found.answer_tokens) == (1, 1, 1)
    by_itself = cell_result(tasks()["kv_retrieval"], full, base, base)
    assert by_itself.difference is None and by_itself.errors == {"died": 1}


def test_an_answer_that_another_metric_cannot_parse_has_not_failed():
    """As gsm8k's "The answer is 5.", which is right by its own metric and has no "####"."""
    task, of = tasks()["gsm8k"], cell("gsm8k")
    answer = scored(1.0).answers[0]
    scores = dict.fromkeys(task.metrics, 1.0)
    other = answer.model_copy(update={"scores": scores, "failed": {"strict_match": 'no "####"'}})
    own = other.model_copy(update={"failed": {task.metric: "no number", "strict_match": "no"}})
    outcomes = [scored(1.0).model_copy(update={"answers": (each,)}) for each in (other, own)]
    found = cell_result(task, of, lines(of, outcomes), [])
    assert found.metric == task.metric and found.failed == {"no number": 1}


def test_a_record_names_its_haystack():
    of = cell("niah_magic")
    made = lines(of, [outcome(1.0)], haystack=["book.txt"])
    answers = (
        made[0]
        .outcome.answers[0]
        .model_copy(update={"scores": dict.fromkeys(tasks()["niah_magic"].metrics, 1.0)})
    )
    made[0] = made[0].model_copy(
        update={"outcome": made[0].outcome.model_copy(update={"answers": (answers,)})}
    )
    assert cell_result(tasks()["niah_magic"], of, made, made).haystack == "book.txt"
    assert cell_result(tasks()["kv_retrieval"], cell(), [], []).haystack is None


def test_a_record_without_any_outcome_has_no_score():
    found = cell_result(tasks()["kv_retrieval"], cell(), lines(cell(), ["a", "b"]), [])
    assert (found.score, found.difference, found.kept, found.nbytes, found.by) == (
        None, None, None, None, {}
    )  # fmt: skip
    assert (found.samples, found.errors) == (0, {"a": 1, "b": 1})


def test_perplexitys_record_is_better_when_lower_and_against_the_full_caches():
    small, full = cell("continuation", "snapkv", "64"), cell("continuation")
    ours = lines(small, [text(2.0, 10), text(1.0, 30)])
    base = lines(full, [text(1.5, 10), text(1.0, 30)])
    found, _ = summarize([*ours, *base])
    assert found.lower_is_better and found.metric == PERPLEXITY
    assert found.score.value == pytest.approx(math.exp(50 / 40))
    assert found.difference.value == pytest.approx(math.exp(50 / 40) - math.exp(45 / 40))
    assert (found.difference.worse, found.difference.better) == (1, 0)
    assert found.kept_nominal is None


def test_a_sample_that_was_written_twice_counts_once():
    once = lines(cell(), [scored(1.0), scored(0.0)])
    again = lines(cell(), [scored(0.0), scored(0.0)])
    (found,) = summarize([*once, *again])
    assert (found.samples, found.score.value) == (2, 50)


def test_samples_and_records_survive_their_files():
    made = lines(cell(), [scored(0.1 + 0.2), "no"], depth=[1 / 3, None])
    again = [SampleResult.model_validate_json(each.model_dump_json()) for each in made]
    assert again == made and again[0].cell in {cell()}
    (found,) = summarize(made)
    assert type(found).model_validate_json(found.model_dump_json()) == found


@pytest.mark.skipif(not COMPACT.exists(), reason="benchmarks are not in this copy")
def test_published_samples_are_short_and_the_same_again(tmp_path):
    spec = importlib.util.spec_from_file_location("compact_samples", COMPACT)
    compact = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compact)
    said = scored(0.5)
    long = said.answers[0].model_copy(update={"prediction": "blah " * 100})
    of = cell(method="snapkv", budget="0.2")
    samples_file(tmp_path).add(
        lines(of, [said.model_copy(update={"answers": (long,)}), "too long"])
    )
    for name in ("a.gz", "b.gz"):
        compact.main(tmp_path, tmp_path / name)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    first, second = csv.DictReader(
        io.StringIO(gzip.decompress((tmp_path / "a.gz").read_bytes()).decode())
    )
    assert (first["method"], first["score"], second["error"]) == ("snapkv", "0.5", "too long")
    assert first["prediction"] == ("blah " * 100)[:200]
    assert float(first["kept"]) == pytest.approx(said.held.kept, abs=1e-5)
