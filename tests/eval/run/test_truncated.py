# SPDX-License-Identifier: Apache-2.0
"""The truncated baseline, and prompts that are cut in the middle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvfold.errors import KvfoldError
from kvfold.eval.tasks import Question
from tests.helpers.evaluation import Setting, cut_in_the_middle, record, words


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [60, 61, 90, 127])
def test_the_middle_is_cut_as_on_the_whole_prompts_tokens(setting, limit):
    sample = record("longbench_qasper", count=40, new=6)
    prompt = setting.prompt(sample)
    asked = prompt.question_ids(sample.questions[0])
    whole = torch.cat([prompt.ids, asked], 1)
    assert asked.shape[1] < limit // 2 and whole.shape[1] > 127
    shorter = prompt.within(limit + 6, "middle")
    read = torch.cat([shorter.ids, asked], 1)
    assert read.tolist() == [cut_in_the_middle(whole, limit)]
    assert shorter.left_out == whole.shape[1] - limit
    outcome = setting.outcome(sample, max_length=limit + 6)
    assert outcome.answers[0].prediction == setting.text(setting.greedy(read, 6))
    assert (outcome.tokens, outcome.left_out) == (limit, shorter.left_out)
    assert outcome.held.seen == shorter.ids.shape[1]


def test_what_just_fits_is_not_cut_and_a_header_never_is(setting):
    sample = record("longbench_qasper")
    prompt = setting.prompt(sample)
    fits = prompt.ids.shape[1] + prompt.tokens_after()[1]
    assert prompt.within(fits, "middle") is prompt
    assert prompt.within(fits - 1, "middle").left_out == 1
    header = setting.ids(prompt.frame.before)
    assert prompt.opening == header.shape[1] > 0
    for room in (0, 1, prompt.opening, prompt.opening + 1):
        kept = prompt.truncated(room).ids
        assert kept.shape[1] == max(room, prompt.opening)
        assert torch.equal(kept[:, : prompt.opening], header)
    with pytest.raises(KvfoldError, match="a question takes"):
        prompt.within(prompt.tokens_after()[1] + prompt.opening, "middle")


def test_the_longest_question_and_every_turn_must_fit(setting):
    asked = [Question(words(n), (), new) for n, new in ((4, 2), (9, 5), (6, 9))]
    sizes = [setting.prompt(record()).question_ids(q).shape[1] for q in asked]
    news = [q.max_new_tokens for q in asked]
    single = replace(record("shared_kv"), questions=tuple(asked))
    most = max(zip(sizes, news, strict=True), key=sum)
    assert setting.prompt(single).tokens_after() == (most[0], sum(most))
    turns = setting.prompt(replace(single, conversation=True))
    assert turns.frame.between != turns.frame.separator
    sizes = [turns.question_ids(q, turn == 0).shape[1] for turn, q in enumerate(asked)]
    assert turns.tokens_after() == (sum(sizes), sum(sizes) + sum(news))


def test_a_generated_sample_is_never_cut(setting):
    sample = record("kv_retrieval")
    prompt = setting.prompt(sample)
    takes = prompt.ids.shape[1] + prompt.tokens_after()[1]
    said = setting.error(sample, max_length=takes - 1)
    assert f"takes {takes} tokens" in said and f"{takes - 1} are the limit" in said
    assert setting.outcome(sample, max_length=takes).left_out == 0


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("budget", ["0.3", "31", "9216B"])
def test_the_cut_baseline_is_a_plain_cache_on_what_the_budget_pays_for(setting, budget, together):
    sample = record("kv_retrieval")
    prompt = setting.prompt(sample)
    asked = prompt.question_ids(sample.questions[0])
    count, after = prompt.ids.shape[1], asked.shape[1] if together else 0
    # A token takes keys and values of 3 layers, 2 heads and 8 numbers of 4 bytes.
    paid = {
        "0.3": math.floor(0.3 * (count + after)),
        "31": 31,
        "9216B": 9216 // (2 * 3 * 2 * 8 * 4),
    }
    room = paid[budget] - after
    assert prompt.opening < room < count
    head = room // 2
    kept = torch.cat([prompt.ids[:, :head], prompt.ids[:, count - (room - head) :]], 1)
    outcome = setting.outcome(sample, "cut", budget, question_aware=together)
    answer = setting.greedy(torch.cat([kept, asked], 1), 6)
    assert outcome.answers[0].prediction == setting.text(answer)
    # The sample is whole; what was left away is the method's doing.
    assert (outcome.tokens, outcome.left_out) == (count + asked.shape[1], 0)
    # With the question in the prompt, that is part of what is compressed.
    read = count + after
    assert outcome.held.seen == read
    assert outcome.held.kept == pytest.approx((room + after) / read)
    assert outcome.held.nbytes_full == read * 2 * 3 * 2 * 8 * 4
