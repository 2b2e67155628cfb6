# SPDX-License-Identifier: Apache-2.0
"""Texts that are streamed through a cache, and their perplexity."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvfold.eval.run.job import EvalJob
from kvfold.eval.tasks import Question
from tests.helpers.budgets import NAMED, holds
from tests.helpers.evaluation import Setting, book, surprise, words


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


def test_a_streamed_text_through_the_full_cache_is_one_plain_forward(setting):
    sample = book("perplexity")
    prompt = setting.prompt(sample)
    (answer,) = setting.outcome(sample).answers
    expected = surprise(setting, prompt.ids)
    assert answer.nll == pytest.approx(float(expected.mean()), abs=1e-4)
    assert answer.tokens == answer.weight == len(expected) == prompt.ids.shape[1] - 1


@pytest.mark.parametrize("budget", ["12", "0.25"])
def test_a_stream_that_evicts_sees_sinks_and_the_most_recent(setting, budget):
    sample = book("perplexity")
    ids = setting.prompt(sample).ids
    count = ids.shape[1]
    room = 12 if budget == "12" else count // 4
    query, key = torch.arange(count)[:, None], torch.arange(count)
    # Before token t there are `room` entries: 4 sinks, the others the last before t.
    allowed = (key <= query) & ((key < 4) | (key >= query - (room - 4)))
    outcome = setting.outcome(sample, "streaming_llm_original", budget)
    expected = float(surprise(setting, ids, allowed).mean())
    assert outcome.answers[0].nll == pytest.approx(expected, abs=1e-4)
    assert abs(expected - float(surprise(setting, ids).mean())) > 1e-2
    assert outcome.held.kept == pytest.approx(room / (count - 1))


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "streaming_llm", "h2o", "d2o", "kivi:group=8,residual=8"])
def test_texts_of_one_length_are_read_together_as_alone(setting, spec):
    long = book("perplexity")
    samples = {i: replace(long, index=i, context=long.context[40 * i :]) for i in range(3)}
    samples[3] = replace(samples[1], index=3)
    cell = setting.cell(
        "perplexity", spec, None if spec in ("full", "kivi:group=8,residual=8") else "16"
    )
    together = setting.lines(EvalJob(samples, (cell,)))
    assert [line.index for line in together] == [0, 1, 2, 3]
    for line in together:
        alone = setting.outcome_in(samples[line.index], cell)
        assert line.outcome.answers[0].nll == pytest.approx(alone.answers[0].nll, abs=1e-4)
        assert line.outcome.answers[0].tokens == alone.answers[0].tokens
        assert line.outcome.held == alone.held
    assert len({line.outcome.answers[0].nll for line in together}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["snapkv:window=8", "random", "kvzip"])
def test_a_method_that_only_compresses_prompts_says_that_it_kept_a_whole_stream(setting, spec):
    outcome = setting.outcome(book("perplexity"), spec, "16")
    assert outcome.held.kept == 1 and set(outcome.held.kept_per_layer) == {1}
    assert outcome.answers == setting.outcome(book("perplexity")).answers


@pytest.mark.slow
@pytest.mark.cases(3)
@pytest.mark.parametrize("spec", [spec for spec in NAMED if holds(spec)])
def test_a_method_that_holds_its_size_is_streamed_at_its_budget(setting, spec):
    sample = book("perplexity")
    outcome = setting.outcome(sample, spec, "16")
    assert outcome.held.kept == pytest.approx(16 / outcome.held.seen)


def test_what_cannot_be_read_as_a_stream_says_so(setting):
    sample = book("perplexity")
    length = setting.prompt(sample).ids.shape[1]
    assert f"takes {length} tokens" in setting.error(sample, max_length=length - 1)
    halves = replace(book("continuation"), questions=(Question(words(5), (), 0),))
    assert "cannot be scored" in setting.error(halves, question_aware=True)
