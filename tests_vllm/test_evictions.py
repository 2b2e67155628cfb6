# SPDX-License-Identifier: Apache-2.0
"""Evictions inside vLLM: the answers are those of `CompressedCache`, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import LLM

from kvfold.serve.vllm.evictions.asked import EVICT
from tests_vllm.evicting import (
    NEW,
    ORDINARY,
    PAGE,
    Asked,
    Truth,
    answers,
    engine,
    generated,
    in_use,
    sampling,
    text,
)

METHODS = (
    "snapkv",
    "adakv",
    "pyramidkv",
    "pyramidkv + adakv",
    "knorm",
    "rkv",
    "keydiff",
    "random",
    "expected_attention",
    "cur",
    "scissorhands",
    "h2o:decode=append",
    "chunkkv",
    "lagkv:lag=32",
    "simlayerkv:window=96,threshold=0.4",
)
ONCE = ("expected_attention", "h2o:decode=append", "simlayerkv:window=96,threshold=0.4")
ROUNDS = [method for method in METHODS if method not in ONCE]
EVERY, LONG = 32, 150
PROMPTS = [text(seed, tokens) for seed, tokens in enumerate((700, 519, 640, 331))]
SNAPKV = Asked("snapkv", 0.25)


def asked_of(method: str, every: int | None = None) -> Asked:
    return Asked(method, None if method.startswith("simlayerkv") else 0.25, every)


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine() as started:
        yield started
        assert in_use(started) == 0


def assert_as_in_process(
    llm: LLM, truth: Truth, requests: list[tuple[list[int], Asked]], new: int = NEW
) -> None:
    """Twice in one batch, the second time over the prefix cache."""
    expected = [truth.answer(prompt, asked, new) for prompt, asked in requests]
    llm.reset_prefix_cache()
    for _ in range(2):
        assert answers(llm, requests, new) == expected
        assert in_use(llm) == 0


# --- what is answered ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_alone_a_request_is_answered_as_in_process(llm, truth, method):
    assert_as_in_process(llm, truth, [(PROMPTS[0], asked_of(method))])


@pytest.mark.parametrize("method", METHODS)
def test_in_a_batch_with_ordinary_requests_too(llm, truth, method):
    evicting = [(prompt, asked_of(method)) for prompt in PROMPTS]
    ordinary = [(prompt, ORDINARY) for prompt in PROMPTS]
    mixed = [request for pair in zip(evicting, ordinary, strict=True) for request in pair]
    assert_as_in_process(llm, truth, mixed)


def test_all_methods_go_into_one_batch(llm, truth):
    assert_as_in_process(llm, truth, [(PROMPTS[1], asked_of(method)) for method in METHODS])


@pytest.mark.parametrize("method", METHODS)
def test_the_full_cache_answers_otherwise(truth, method):
    evicted = [truth.answer(prompt, asked_of(method)) for prompt in PROMPTS]
    assert evicted != [truth.answer(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("method", ROUNDS)
def test_in_rounds_the_answers_are_the_same(llm, truth, method):
    requests = [(prompt, asked_of(method, EVERY)) for prompt in PROMPTS[2:]]
    assert_as_in_process(llm, truth, [*requests, (PROMPTS[3], ORDINARY)], LONG)


@pytest.mark.parametrize("method", ROUNDS)
def test_without_rounds_the_answers_are_others(truth, method):
    rounds, once = (
        [truth.answer(prompt, asked_of(method, every), LONG) for prompt in PROMPTS[2:]]
        for every in (EVERY, None)
    )
    assert rounds != once


def test_a_budget_in_tokens_is_filled_by_the_answer(llm, truth):
    requests = [(text(9, tokens), Asked("snapkv", 64, EVERY)) for tokens in (40, 70)]
    assert_as_in_process(llm, truth, requests, LONG)
    full = [truth.answer(prompt, new=LONG) for prompt, _ in requests]
    assert [truth.answer(*request, LONG) for request in requests] != full


@pytest.mark.parametrize("tokens, budget", [(20, 0.25), (31, 0.9), (100, 400), (331, 1.0)])
def test_where_nothing_can_leave_it_is_the_full_caches_answer(llm, truth, tokens, budget):
    prompt = text(11, tokens)
    for _ in range(2):
        assert answers(llm, [(prompt, Asked("snapkv", budget))]) == [truth.answer(prompt)]


# --- shared blocks -------------------------------------------------------------------------------


def test_requests_with_a_common_prefix_do_not_meet(llm, truth):
    shared = PROMPTS[0][:320]
    tails = [[token for token in text(seed, 250) if token not in shared] for seed in range(20, 24)]
    kinds = (asked_of("snapkv", EVERY), ORDINARY, asked_of("adakv"), ORDINARY)
    requests = [(shared + tail, asked) for tail, asked in zip(tails, kinds, strict=True)]
    assert_as_in_process(llm, truth, requests, 80)
    for request in requests:
        assert answers(llm, [request], 80) == [truth.answer(*request, 80)]


def test_the_prefix_cache_leaves_the_window_to_be_read(llm, truth):
    llm.reset_prefix_cache()
    prompt, found = PROMPTS[3], []
    for _ in range(2):
        (output,) = generated(llm, [prompt], [sampling(Asked("snapkv:window=40", 0.25))])
        found.append(output.num_cached_tokens)
    assert found == [0, (len(prompt) - 40) // PAGE * PAGE]


@pytest.mark.parametrize("method", ["snapkv", "knorm"])  # knorm has no window that is kept apart
def test_blocks_of_an_evicted_requests_answer_are_never_found(llm, truth, method):
    llm.reset_prefix_cache()
    prompt, asked = PROMPTS[3], asked_of(method, EVERY)
    (given,) = answers(llm, [(prompt, asked)], LONG)
    longer = prompt + given
    (output,) = generated(llm, [longer], [sampling()])
    assert output.num_cached_tokens <= len(prompt) // PAGE * PAGE
    assert list(output.outputs[0].token_ids) == truth.answer(longer)


# --- what an answer tells ------------------------------------------------------------------------


def test_an_answer_says_what_was_evicted(llm):
    kinds = (asked_of("snapkv"), asked_of("snapkv", EVERY), ORDINARY)
    outputs = generated(llm, [PROMPTS[3]] * 3, [sampling(asked, LONG) for asked in kinds])
    once, rounds, none = (output.kv_transfer_params for output in outputs)
    # Of 331 tokens 11 stay in vLLM's block, and 71 of each head in 8 pages, which 2 blocks hold.
    about = {"method": "snapkv + pages", "evictions": 1, "blocks_evicted": 10 - 2, "read_anew": 0}
    assert once == {EVICT: about}
    about = rounds[EVICT]
    assert (about["method"], about["read_anew"]) == ("snapkv + every:interval=32 + pages", 0)
    assert about["evictions"] == 1 + (LONG - 1) // EVERY
    assert none is None


@pytest.mark.parametrize("asked", [asked_of("snapkv"), asked_of("rkv", EVERY)], ids=str)
def test_logprobs_are_those_in_process(llm, truth, asked):
    prompts = PROMPTS[2:]
    for output, prompt in zip(
        generated(llm, prompts, [sampling(asked, 60, logprobs=0)] * 2), prompts, strict=True
    ):
        assert_logprobs(output.outputs[0], truth.logprobs, prompt, asked)


def test_two_samples_of_one_prompt_evict_apart(llm, truth):
    asked = asked_of("snapkv", EVERY)
    how = sampling(asked, 70, n=2, temperature=1.0, seed=3, logprobs=0)
    (output,) = generated(llm, [PROMPTS[3]], [how])
    first, second = output.outputs
    assert list(first.token_ids) != list(second.token_ids)
    for one in (first, second):
        assert_logprobs(one, truth.logprobs, PROMPTS[3], asked)
    assert in_use(llm) == 0


def assert_logprobs(one: Any, logprobs: Any, prompt: list[int], asked: Asked) -> None:
    """Those of the tokens of a sample, within 1e-4 of those in process."""
    given = list(one.token_ids)
    told = [of[token].logprob for of, token in zip(one.logprobs, given, strict=True)]
    assert told == pytest.approx(logprobs(prompt, given, asked), abs=1e-4, rel=0)
