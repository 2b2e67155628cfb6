# SPDX-License-Identifier: Apache-2.0
"""Samples that are answered together get the answers that each gets alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvfold.eval.run import job
from kvfold.eval.run import plan as planning
from kvfold.eval.run.job import EvalJob
from kvfold.eval.run.plan import contenders
from tests.helpers.evaluation import Setting, record, wanted

METHODS = ["snapkv:window=8", "adakv:window=8", "h2o", "kvzip", "knorm", "kivi:group=8,residual=8"]


@pytest.fixture(scope="module")
def setting() -> Setting:
    made = Setting.new()
    made.model.double()
    return made


@pytest.fixture
def samples():
    """Contexts, questions and answers of different lengths."""
    made = {i: record(count=20 + i, index=i, questions=2, new=6 + i) for i in range(3)}
    return {i: _with_longer_questions(sample, i) for i, sample in made.items()}


def _with_longer_questions(sample, times):
    longer = [replace(each, text=each.text + " Say it." * times) for each in sample.questions]
    return replace(sample, questions=tuple(longer))


@pytest.fixture
def in_one_piece(monkeypatch):
    """Fails where a batch is run sample by sample."""

    def refuse(*args):
        raise AssertionError("the batch was run in parts")

    monkeypatch.setattr(job, "_in_parts", refuse)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("methods", [METHODS[:1], METHODS], ids=len)
def test_rows_of_a_batch_answer_as_alone(setting, samples, methods, aware, in_one_piece):
    found = contenders(methods, ["0.5", "20", "30KB"])
    cells = tuple(
        setting.cell("kv_retrieval", method, budget, question_aware=aware)
        for method, budget in found
        if method != "random"  # draws for the whole batch
    )
    together = setting.lines(EvalJob(samples, cells))
    alone = [line for i in samples for line in setting.run(samples[i], *cells)]
    assert len(together) == len(alone) == 3 * len(cells)
    own = {(line.cell, line.text): line.outcome for line in alone}
    for line in together:
        before = own[line.cell, line.text]
        assert line.outcome is not None and before is not None, (line.error, line.cell)
        assert line.outcome.answers == before.answers, line.cell
        assert line.outcome.tokens == before.tokens
        assert line.outcome.held.seen == before.held.seen
        assert line.outcome.held.kept == pytest.approx(before.held.kept)
        # Padding of the batch is counted too.
        assert line.outcome.held.nbytes == pytest.approx(before.held.nbytes, rel=0.2)
    assert len({line.outcome.answers[0].prediction for line in together}) > 6
    assert {answer.tokens for line in together for answer in line.outcome.answers} >= {6, 7, 8}
    by_bytes = [line.outcome.held.kept for line in together if line.cell.budget == "30000B"]
    assert min(by_bytes) > 0.1 and max(by_bytes) < 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("aware", [False, True])
def test_a_row_ends_where_it_would_end_alone(setting, samples, aware, monkeypatch):
    cell = setting.cell("kv_retrieval", "snapkv:window=8", "0.5", question_aware=aware)
    free = [setting.run(sample, cell)[0].outcome.answers[0] for sample in samples.values()]
    # The second row's third token ends all answers; the last row's fourth letter is a stop string.
    third = setting.tokenizer(free[1].prediction, add_special_tokens=False).input_ids[2]
    monkeypatch.setattr(setting.model.generation_config, "eos_token_id", third)
    stop = free[2].prediction.strip()[3:5]
    stopped = {i: replace(sample, stop=(stop,)) for i, sample in samples.items()}
    together = setting.lines(EvalJob(stopped, (cell,)))
    for line, sample in zip(together, stopped.values(), strict=True):
        (alone,) = setting.run(sample, cell)
        assert line.outcome.answers == alone.outcome.answers
    assert {answer.ended for line in together for answer in line.outcome.answers} > {"limit"}


def test_one_sample_that_fails_leaves_the_others(setting, samples):
    samples[1] = replace(
        samples[1], questions=(replace(samples[1].questions[0], max_new_tokens=9000),) * 2
    )
    cell = setting.cell("kv_retrieval", "snapkv:window=8", "0.5")
    found = setting.lines(EvalJob(samples, (cell,)))
    assert [line.error is None for line in sorted(found, key=lambda line: line.index)] == [
        True,
        False,
        True,
    ]


def test_a_plan_makes_batches_of_samples_that_lack_the_same_cells(setting, samples):
    more = [record(index=i) for i in range(5)]
    plan = replace(setting.plan([("full", None), ("knorm", "0.5")], wanted(more)), batch_size=2)
    assert [list(job.samples) for job in plan.jobs({})] == [[0, 1], [2, 3], [4]]
    first = next(iter(plan.jobs({})))
    done = {
        (line.cell, line.index): line.text
        for line in setting.lines(replace(first, cells=first.cells[:1]))
    }
    left = list(plan.jobs(done))
    assert sorted((list(job.samples), len(job.cells)) for job in left) == [
        ([0, 1], 1),
        ([2, 3], 2),
        ([4], 2),
    ]
    turns = [replace(sample, conversation=True, task="conversation_kv") for sample in more]
    plan = replace(setting.plan([("full", None)], wanted(turns)), batch_size=2)
    assert [len(job.samples) for job in plan.jobs({})] == [1] * 5


def test_methods_that_one_reading_serves_are_a_job(setting, samples):
    methods = ["snapkv", "pyramidkv", "h2o", "d2o", "kvzip"]
    plan = setting.plan(contenders(methods, ["0.5", "20"]), wanted([samples[0]]))
    jobs = [{(cell.method, cell.budget) for cell in job.cells} for job in plan.jobs({})]
    assert [sorted({method for method, _ in job}) for job in jobs] == [
        ["d2o", "full", "h2o", "kvzip", "pyramidkv", "random", "snapkv", "streaming_llm"],
        ["cut"],
        ["cut"],
    ]
    assert sum(len(job.cells) for job in plan.jobs({})) == len(plan.cells())


@pytest.mark.slow
def test_many_results_are_several_jobs_and_each_is_in_one(setting, monkeypatch):
    monkeypatch.setattr(planning, "MOST_RESULTS", 5)
    plan = replace(
        setting.plan(
            contenders(["snapkv", "knorm"], ["0.5", "20"]), wanted([record(), record(index=1)])
        ),
        batch_size=2,
    )
    jobs = [(cell, index) for job in plan.jobs({}) for cell in job.cells for index in job.samples]
    assert len(jobs) == len(set(jobs)) == plan.total
    assert {len(job.cells) for job in plan.jobs({})} == {1, 2}


@pytest.mark.parametrize("aware", [False, True])
def test_answers_are_cut_where_the_protocol_says_so(setting, samples, aware):
    cells = [
        setting.cell("kv_retrieval", "knorm", "0.5", question_aware=aware, answer_tokens=limit)
        for limit in (None, 1, 3, 50)
    ]
    whole, *shorter = [setting.outcome_in(samples[0], cell).answers for cell in cells]
    for limit, answers in zip((1, 3, 50), shorter, strict=True):
        for answer, before in zip(answers, whole, strict=True):
            assert answer.tokens == min(limit, before.tokens) and answer.ended == "limit"
            assert before.prediction.startswith(answer.prediction)


def test_answers_that_are_compressed_while_they_grow_may_pass_the_benchmarks_limit(setting):
    sample = record("gsm8k", count=20, new=6)
    own, longer = (
        setting.outcome_in(sample, setting.cell("gsm8k", "h2o", "20", answer_tokens=limit))
        for limit in (None, 40)
    )
    assert [answer.tokens for answer in own.answers] == [6] * len(own.answers)
    for answer, before in zip(longer.answers, own.answers, strict=True):
        assert answer.tokens == 40 and answer.prediction.startswith(before.prediction)
