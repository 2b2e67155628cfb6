# SPDX-License-Identifier: Apache-2.0
"""What is planned: methods, budgets and digests."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kvfold
from kvfold.budget import Budget
from kvfold.errors import BudgetError, KvfoldError
from kvfold.eval.run.cell import EvalProtocol, EvaluatedModel
from kvfold.eval.run.plan import TaskSamples, contenders, streams, written
from kvfold.eval.run.sample_result import sample_digest
from kvfold.eval.tasks import SampleRequest, UnreadableSample, tasks
from tests.helpers.evaluation import record


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
        replace(sample, questions=(replace(first, metadata={"metric": "exact"}), second)),
        replace(sample, conversation=True),
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


@pytest.mark.parametrize("task", ["kv_retrieval", "ruler_niah_single_1"])
def test_rows_that_are_read_have_no_length(task, tmp_path):
    (tmp_path / f"{task.removeprefix('ruler_')}.jsonl").write_text("{}")
    request = SampleRequest(samples=1, length=2000, count=len)
    for data, length in ((None, 2000), (str(tmp_path), None)):
        assert TaskSamples.of(tasks()[task], replace(request, data=data)).length == length


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
