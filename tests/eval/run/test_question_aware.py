# SPDX-License-Identifier: Apache-2.0
"""A question that is compressed with its context."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvfold
from kvfold.eval.run import question_agnostic, question_aware, shared_reading
from kvfold.eval.run.question_aware import run_by_itself
from kvfold.eval.tasks import Question, tasks
from kvfold.generation.reading import read_turn
from tests.helpers.evaluation import (
    PLAIN,
    Setting,
    equal,
    positions,
    record,
    transcript,
    watched,
)


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


@pytest.mark.slow
def test_a_question_that_is_compressed_with_its_context_keeps_other_entries(monkeypatch):
    model, tokenizer = kvfold.bundled_model()
    made: list[kvfold.CompressedCache] = []

    def making(*arguments: Any, **options: Any) -> kvfold.CompressedCache:
        made.append(kvfold.CompressedCache(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(shared_reading, "CompressedCache", making)
    found = watched(monkeypatch)
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. " * 6
    numbers = {"quick-table": 1234567, "old-river": 7654321}
    needles = [f"One of the special magic numbers for {k} is: {n}. " for k, n in numbers.items()]
    context = f"{noise}{needles[0]}{noise}{needles[1]}{noise}"
    setting, kept = Setting(model, model, tokenizer), []
    for key in numbers:
        question = Question(f"\nThe special magic number for {key}?", ("1",), 2, "", PLAIN)
        sample = replace(record("niah_magic", context=context), questions=(question,))
        setting.outcome(sample, "snapkv:window=16", "0.1", question_aware=True)
        prompt = setting.prompt(sample)
        ids = torch.cat([prompt.ids, prompt.question_ids(question)], 1)
        alone = kvfold.CompressedCache(model, "snapkv:window=16", 0.1)
        read_turn(model, alone, ids, None, ids.shape[1], ids.shape[1])
        # What was generated comes on top.
        kept.append(positions(made[-1], ids.shape[1]))
        assert kept[-1] == positions(alone, ids.shape[1])
        setting.outcome(sample, "snapkv:window=16", "0.1")
    assert kept[0] != kept[1]
    assert equal(found[0][1], found[1][1])


@pytest.mark.parametrize("ends", [False, True])
def test_two_turns_while_decoding_go_on_with_one_compressed_cache(setting, ends, monkeypatch):
    sample = record("mt_bench", 2, conversation=True, context="")
    before, _ = transcript(setting, sample, [])
    first = setting.greedy(before, 6)
    said = first
    if ends:
        # The first answer ends with its third token, which the template brings again.
        end = first[2]
        assert end not in first[:2]
        for model in (setting.model, setting.plain):
            monkeypatch.setattr(model.generation_config, "eos_token_id", end)
        said = first[:2]
    _, after = transcript(setting, sample, said)
    second = setting.greedy(after, 6)
    full = setting.outcome(sample)
    assert full.answers[0].ended == ("end" if ends else "limit")
    assert full.answers[0].tokens == (3 if ends else 6)
    assert [a.prediction for a in full.answers] == [
        setting.text(first[:3] if ends else first),
        setting.text(second),
    ]
    assert full.answers[0].scores == {}
    # The last token was not read any more.
    assert full.held.seen == after.shape[1] + len(second) - 1
    small = setting.outcome(sample, "snapkv:window=8", "12")
    spoken = sum(answer.tokens - (answer.ended == "end") for answer in small.answers)
    _, asked = transcript(setting, sample, [])
    # What ended the last answer, or its last token, was not read any more.
    last = small.answers[1].ended == "limit"
    assert small.held.seen == asked.shape[1] + spoken - last
    assert small.held.kept < 0.8 and small.answers[1] != full.answers[1]
    assert "own answers" in setting.error(sample, history="gold")


def test_a_task_of_decoding_is_compressed_with_its_question_whatever_was_asked(setting):
    assert {tasks()[name].phase for name in ("gsm8k", "math500", "mt_bench")} == {"decode"}
    sample = record("gsm8k", context="")
    for protocol in (False, True):
        outcome = setting.outcome(sample, "snapkv:window=8", "12", question_aware=protocol)
        read = setting.prompt(sample).ids.shape[1] + outcome.answers[0].tokens - 1
        assert outcome.held.seen > read


def test_operations_are_those_of_all_questions_as_seconds_are(setting):
    sample = record(questions=2)
    cell = setting.cell("kv_retrieval", "knorm", "0.5", question_aware=True)
    both, *alone = (
        setting.outcome_in(replace(sample, questions=asked), cell).prefill_operations
        for asked in (sample.questions, sample.questions[:1], sample.questions[1:])
    )
    assert both == sum(alone) > 0


@pytest.mark.parametrize("spec", ["full", "knorm", "snapkv:window=8"])
def test_operations_of_a_sample_by_itself_are_those_of_a_shared_reading(setting, spec):
    sample = record(questions=2)
    budget = None if spec == "full" else "0.5"
    cell = setting.cell("kv_retrieval", spec, budget, question_aware=True)
    shared, task = setting.outcome_in(sample, cell), tasks()["kv_retrieval"]
    alone = run_by_itself(setting.model, setting.prompt(sample), cell, task)
    assert alone.prefill_operations == shared.prefill_operations
    # The step after a shared reading attends to one more token.
    config = setting.model.config
    width = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    assert shared.step_operations - alone.step_operations == 4 * width
    assert alone.answers == shared.answers


def test_operations_are_known_of_methods_that_read_by_themselves(setting):
    full, pruned = (
        setting.outcome(record(), spec, question_aware=True)
        for spec in ("full", "pyramidinfer:least=0.2,least_context=8")
    )
    assert pruned.prefill_operations > 0
    assert 0 < pruned.step_operations < full.step_operations


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "aware"), [("full", True), ("pyramidinfer", True), ("full", False)]
)
def test_scoring_is_no_part_of_the_time_that_answers_take(setting, spec, aware, monkeypatch):
    run = question_aware if aware else question_agnostic
    real, scoring, took = time.perf_counter, run.scored_answer, [0]

    def slowly(*arguments: Any) -> Any:
        took[0] += 1000
        return scoring(*arguments)

    monkeypatch.setattr(run, "scored_answer", slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: real() + took[0])
    outcome = setting.outcome(record(questions=2), spec, question_aware=aware)
    assert took[0] == 2000 and outcome.answer_seconds < 1000 > outcome.prefill_seconds


def test_a_last_answer_that_is_too_short_to_measure_leaves_the_step_of_the_one_before(setting):
    first, last = record(questions=2).questions
    sample = replace(record(questions=2), questions=(first, replace(last, max_new_tokens=1)))
    alone = setting.outcome(replace(sample, questions=(first,)), question_aware=True)
    outcome = setting.outcome(sample, question_aware=True)
    assert outcome.step_operations == alone.step_operations > 0
