# SPDX-License-Identifier: Apache-2.0
"""What is planned, and what samples come to: formulas by hand, a bootstrap in plain python."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import binomtest

import kvfold
from kvfold.budget import Budget
from kvfold.errors import BudgetError, KvfoldError
from kvfold.eval.run.cell import EvalCell, EvalProtocol, EvaluatedModel
from kvfold.eval.run.cell_result import cell_result
from kvfold.eval.run.job import EvalJob
from kvfold.eval.run.plan import TaskSamples, contenders, streams, written
from kvfold.eval.run.run_folder import samples_file, summarize
from kvfold.eval.run.sample_result import SampleOutcome, SampleResult, ScoredAnswer, sample_digest
from kvfold.eval.run.statistics import PERPLEXITY, breakdown, difference, estimate
from kvfold.eval.tasks import SampleRequest, UnreadableSample, tasks
from tests.helpers.evaluation import HELD, outcome, record

COMPACT = Path(__file__).parents[3] / "benchmarks" / "compact_samples.py"
SUBJECT = EvaluatedModel(
    name="m", config="c", weights="w", vocabulary="v", dtype="d", attention="a"
)


def cell(task: str = "kv_retrieval", method: str = "full", budget: str | None = None) -> EvalCell:
    return EvalCell(
        subject=SUBJECT,
        task=task,
        length=None,
        seed=0,
        data=(),
        protocol=EvalProtocol(max_length=100),
        method=method,
        budget=budget,
    )


def lines(
    of: EvalCell, outcomes: list[SampleOutcome | str], **metadata: list
) -> list[SampleResult]:
    """A cell's samples; a text stands for an error."""
    found = []
    for index, one in enumerate(outcomes):
        known = {name: values[index] for name, values in metadata.items()}
        job = EvalJob(index, record(of.task, index=index, metadata=known), (of,))
        failed = isinstance(one, str)
        found.append(job.line(of, None if failed else one, one if failed else None))
    return found


def text(nll: float, tokens: int) -> SampleOutcome:
    """A hand-made outcome of a text of so many scored tokens."""
    answer = ScoredAnswer(prediction="", tokens=tokens, ended="end", weight=tokens, nll=nll)
    return outcome().model_copy(update={"answers": (answer,)})


# --- means and errors --------------------------------------------------------------------------


def test_a_mean_of_equal_samples_has_the_usual_standard_error():
    values = [1.0, 0.0, 0.25, 1.0, 0.5]
    found = estimate([outcome(value) for value in values], "m")
    assert found.value == pytest.approx(100 * statistics.mean(values))
    assert found.error == pytest.approx(100 * statistics.stdev(values) / math.sqrt(5))


def test_questions_about_one_context_are_one_sample():
    grouped = estimate([outcome(1, 0), outcome(1, 1), outcome(0, 0)], "m")
    means = [0.5, 1.0, 0.0]
    assert grouped.value == pytest.approx(100 * statistics.mean(means))
    assert grouped.error == pytest.approx(100 * statistics.stdev(means) / math.sqrt(3))


def test_weights_count_in_the_mean_and_in_its_error():
    values, weights = [0.2, 0.9, 0.4], [1.0, 3.0, 2.0]
    found = estimate([outcome(v, weights=(w,)) for v, w in zip(values, weights, strict=True)], "m")
    total = sum(weights)
    mean = sum(v * w for v, w in zip(values, weights, strict=True)) / total
    # The ratio estimator: n/(n − 1) Σ w² (x − mean)² / (Σ w)².
    squares = sum((w * (v - mean)) ** 2 for v, w in zip(values, weights, strict=True))
    assert found.value == pytest.approx(100 * mean)
    assert found.error == pytest.approx(100 * math.sqrt(1.5 * squares) / total)
    inside = estimate([outcome(0.2, 0.8, weights=(1, 3))], "m")
    assert inside.value == pytest.approx(100 * (0.2 + 3 * 0.8) / 4)
    assert inside.error is None


def test_perplexity_is_the_exponential_of_the_mean_over_tokens():
    nlls, counts = [1.0, 2.0, 1.5], [100, 50, 10]
    found = estimate([text(n, c) for n, c in zip(nlls, counts, strict=True)], PERPLEXITY)
    mean = (100 + 100 + 15) / 160
    assert found.value == pytest.approx(math.exp(mean))
    squares = sum((c * (n - mean)) ** 2 for n, c in zip(nlls, counts, strict=True))
    # d exp(x) = exp(x) dx
    assert found.error == pytest.approx(math.exp(mean) * math.sqrt(1.5 * squares) / 160)


def test_samples_that_all_scored_the_same_leave_an_interval():
    right = {i: outcome(1) for i in range(20)}
    found = estimate(list(right.values()), "m")
    # Clopper and Pearson: 20 of 20.
    least = 100 * 0.025 ** (1 / 20)
    assert (found.value, found.error, found.high) == (100, 0, 100)
    assert found.low == pytest.approx(least) == pytest.approx(83.2, abs=0.05)
    apart = difference(right, right, "m")
    assert (apart.value, apart.samples, apart.worse, apart.better) == (0, 20, 0, 0)
    assert (apart.low, apart.high) == (pytest.approx(least - 100), pytest.approx(100 - least))
    assert estimate([outcome(1)], "m").low == pytest.approx(2.5)


def test_perplexities_of_equal_texts_do_not_differ():
    """Log-likelihoods are equal to the last digit only where nothing was lost."""
    generator = random.Random(0)
    texts = {i: text(generator.random(), i + 1) for i in range(30)}
    found = difference(texts, texts, PERPLEXITY)
    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_a_difference_is_that_of_the_samples_that_both_have():
    ours = {0: outcome(0.5), 1: outcome(1.0), 2: outcome(0.0), 9: outcome(1.0)}
    full = {0: outcome(1.0), 1: outcome(1.0), 2: outcome(0.25), 3: outcome(0.0)}
    found = difference(ours, full, "m")
    assert found.value == pytest.approx(100 * (1.5 - 2.25) / 3)
    assert (found.samples, found.worse, found.better) == (3, 2, 0)
    assert difference({0: outcome(1)}, {1: outcome(1)}, "m") is None


@pytest.mark.parametrize(("right", "count"), [(0, 20), (1, 20), (19, 20), (50, 100), (3, 7)])
def test_the_interval_of_yes_and_no_is_clopper_and_pearsons(right, count):
    found = estimate([outcome(float(i < right)) for i in range(count)], "m")
    exact = binomtest(right, count).proportion_ci(method="exact")
    assert (found.low, found.high) == pytest.approx((100 * exact.low, 100 * exact.high))


@pytest.mark.parametrize("metric", ["m", PERPLEXITY])
def test_the_interval_of_many_samples_is_that_of_a_bootstrap_in_plain_python(metric):
    generator = random.Random(1)
    count = 200
    values = [
        (generator.random(), generator.random(), generator.randint(1, 5)) for _ in range(count)
    ]
    make = text if metric == PERPLEXITY else lambda a, w: outcome(a, weights=(w,))
    ours = {i: make(a, w) for i, (a, _, w) in enumerate(values)}
    full = {i: make(b, w) for i, (_, b, w) in enumerate(values)}

    def apart(rows: list[int]) -> float:
        total = sum(values[i][2] for i in rows)
        one, other = (sum(values[i][k] * values[i][2] for i in rows) / total for k in (0, 1))
        return 100 * (one - other) if metric == "m" else math.exp(one) - math.exp(other)

    drawn = sorted(apart(generator.choices(range(count), k=count)) for _ in range(1000))
    found = difference(ours, full, metric)
    width = drawn[974] - drawn[24]
    assert found.value == pytest.approx(apart(list(range(count))))
    assert found.low == pytest.approx(drawn[24], abs=0.12 * width)
    assert found.high == pytest.approx(drawn[974], abs=0.12 * width)
    assert found.low < found.value < found.high


def test_paired_samples_say_more_than_independent_ones():
    generator = random.Random(2)
    hard = [generator.random() * 0.8 for _ in range(50)]
    ours = {i: outcome(x) for i, x in enumerate(hard)}
    full = {i: outcome(x + 0.1 + 0.02 * generator.random()) for i, x in enumerate(hard)}
    found = difference(ours, full, "m")
    alone = estimate(list(ours.values()), "m")
    assert found.high < 0 and found.high - found.low < 0.6 * (alone.high - alone.low)
    assert found.worse == 50


def test_scores_are_broken_down_by_depth_and_by_turn():
    depths = [0.0, 50.0, 0.0, 50.0, None]
    answers = [(1, 0), (0, 0), (0.5, 1), (1, 0), (0, 1)]
    made = lines(cell(), [outcome(*each) for each in answers], depth=depths, words=range(5))
    found = breakdown(made, "m")
    assert set(found) == {"depth", "turn"}
    assert {k: v.value for k, v in found["depth"].items()} == {"0.0": 62.5, "50.0": 25}
    assert found["turn"]["1"].value == pytest.approx(100 * 2.5 / 5)
    assert found["turn"]["2"].value == pytest.approx(100 * 2 / 5)
    firsts = [each[0] for each in answers]
    assert found["turn"]["1"].error == pytest.approx(100 * statistics.stdev(firsts) / math.sqrt(5))
    alike = lines(cell(), [outcome(1), outcome(0)], depth=[0, 0])
    assert breakdown(alike, "m") == {}


# --- a cell's record ---------------------------------------------------------------------------


def scored(*values: float, **fields) -> SampleOutcome:
    """An outcome with the metric that kv_retrieval is scored by."""
    made = outcome(*values, **fields)
    answers = [a.model_copy(update={"scores": {"substring": a.scores["m"]}}) for a in made.answers]
    return made.model_copy(update={"answers": tuple(answers)})


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


# --- what is run -------------------------------------------------------------------------------


def test_everything_is_compared_with_the_same_four():
    found = contenders(
        ["snapkv", "simlayerkv", "full", "streaming_llm"], ["20%", "0.2", "512", "1KiB"]
    )
    budgets = ["0.2", "512", "1024B"]
    expected = [("full", None)]
    expected += [
        (name, budget) for name in ("cut", "random", "streaming_llm") for budget in budgets
    ]
    expected += [(str(kvfold.parse("snapkv")), budget) for budget in budgets]
    expected += [(str(kvfold.parse("simlayerkv")), None)]
    assert found == expected
    assert contenders([], ["8"]) == [
        ("full", None),
        ("cut", "8"),
        ("random", "8"),
        ("streaming_llm", "8"),
    ]
    assert contenders(["kivi"], []) == [("full", None), (str(kvfold.parse("kivi")), None)]


def test_methods_are_named_as_they_are_parsed():
    spec = "pyramidkv:window=8,beta=10"
    _, *_, (name, budget) = contenders([spec], ["16"])
    assert kvfold.parse(name) == kvfold.parse(spec) and budget == "16"
    both = contenders(["snapkv:window=8,kernel=5", "snapkv:kernel=5,window=8"], ["16"])
    assert len(both) == 5


@pytest.mark.parametrize(
    "given", ["512", "0.2", "20%", "1.0", "100%", "2GiB", "1.5MB", "7B", ".5", "0.00001", "33.3%"]
)
def test_a_budget_is_written_so_that_it_is_read_again(given):
    budget = Budget.of(given)
    assert Budget.of(written(budget)) == budget
    assert written(Budget.of(written(budget))) == written(budget)


@pytest.mark.parametrize(
    ("methods", "budgets", "word"),
    [
        (["snapvk"], ["0.2"], "did you mean 'snapkv'"),
        (["snapkv:windows=8"], ["0.2"], "no option 'windows'"),
        (["cut"], ["0.2"], "unknown method 'cut'"),
        (["snapkv"], [], "needs a budget"),
        (["h2o + snapkv"], ["0.2"], "both bring"),
    ],
)
def test_unknown_methods_are_refused(methods, budgets, word):
    with pytest.raises(KvfoldError, match=word):
        contenders(methods, budgets)


@pytest.mark.parametrize("budget", ["0", "-5", "1.5", "many", "0.0", "200%", "nan", ""])
def test_unknown_budgets_are_refused(budget):
    with pytest.raises(BudgetError):
        contenders(["snapkv"], [budget])


def test_a_digest_changes_with_all_that_a_score_rests_on():
    sample = record(questions=2)
    first, second = sample.questions
    changed = [
        sample,
        replace(sample, context=sample.context + " "),
        replace(sample, questions=(second, first)),
        replace(sample, questions=(first,)),
        replace(sample, questions=(replace(first, text="?"), second)),
        replace(sample, questions=(replace(first, answer_prefix="?"), second)),
        replace(sample, questions=(replace(first, answers=("another",)), second)),
        UnreadableSample("file:1", "no JSON"),
        UnreadableSample("file:1", "no object"),
    ]
    assert len({sample_digest(each) for each in changed}) == len(changed)
    assert sample_digest(sample) == sample_digest(replace(sample, metadata={"depth": 1}, index=5))
    assert sample_digest(changed[-1]) == sample_digest(replace(changed[-1], where="file:2"))


def test_what_only_compresses_prompts_is_left_out_of_a_stream():
    streamed = {name for name in ("full", "h2o", "streaming_llm", "kivi", "d2o") if streams(name)}
    assert streamed == {"full", "h2o", "streaming_llm", "kivi", "d2o"}
    assert not any(map(streams, ("cut", "random", "snapkv", "kvzip", "simlayerkv")))


def test_data_is_called_by_its_name_wherever_it_lies(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("the quick brown fox " * 200)
    request = SampleRequest(
        samples=1, length=64, count=lambda text: len(text.split()), data=str(book)
    )
    subject = EvaluatedModel(
        name="m", config="", weights="", vocabulary="", dtype="float32", attention="sdpa"
    )
    (cell,) = TaskSamples.of(tasks()["perplexity"], request).cells(
        subject, EvalProtocol(max_length=64), [("full", None)]
    )
    assert cell.data == ("book.txt",)
