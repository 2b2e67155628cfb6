# SPDX-License-Identifier: Apache-2.0
"""Engines of their own: what is evicted by default, and a stock vLLM to compare with.

vLLM holds one connector per process, so that each engine ends before the next one starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from vllm import LLM
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.evictions.asked import EVICT
from kvfold.serve.vllm.head_pages.plugin import register
from tests_vllm.evicting import (
    ORDINARY,
    Asked,
    Truth,
    answers,
    attention,
    choose_anew,
    engine,
    generated,
    in_use,
    sampling,
    text,
)

PROMPTS = [text(seed, tokens) for seed, tokens in enumerate((500, 77, 300, 20))]
CPU = AttentionBackendEnum.CPU_ATTN


@contextmanager
def stock() -> Iterator[None]:
    """vLLM's own attention, though the plug-in is installed."""
    CPU.clear_override()
    choose_anew()
    try:
        yield
    finally:
        register()
        choose_anew()


def logprobs(llm: LLM) -> list[list[dict[int, float]]]:
    """Tokens and logprobs of ordinary requests in a batch of their own."""
    llm.reset_prefix_cache()
    outputs = generated(llm, PROMPTS, [sampling(new=40, logprobs=5)] * len(PROMPTS))
    return [
        [
            {token: each.logprob for token, each in step.items()}
            for step in output.outputs[0].logprobs
        ]
        for output in outputs
    ]


def test_ordinary_requests_are_answered_bit_for_bit_as_by_a_stock_vllm():
    with engine() as ours:
        assert attention(ours) == {"CPUHeadPagesAttention"}
        before = logprobs(ours)
        generated(ours, PROMPTS, [sampling(Asked("adakv", 64, 32), 70)] * len(PROMPTS))
        after = logprobs(ours)
    with stock(), engine(connector=False) as plain:
        assert attention(plain) == {"CPUAttentionBackendImpl"}
        expected = logprobs(plain)
    assert before == expected
    assert after == expected


def test_two_ranks_evict_as_one():
    truth = Truth()
    kinds = (
        Asked("snapkv", 0.25),
        Asked("adakv", 0.25, 32),
        Asked("pyramidkv + adakv", 0.3, 32),
        Asked("expected_attention", 0.3),
        ORDINARY,
    )
    requests = [(PROMPTS[2 * (each % 2)], asked) for each, asked in enumerate(kinds)]
    expected = [truth.answer(prompt, asked, 70) for prompt, asked in requests]
    with engine(tensor_parallel_size=2) as two:
        for _ in range(2):
            assert answers(two, requests, 70) == expected
            assert in_use(two) == 0


def test_metrics_say_what_was_evicted():
    """The sums of what answers say, in vLLM's own counters."""
    with engine(disable_log_stats=False) as started:
        outputs = generated(started, PROMPTS, [sampling(Asked("knorm", 64, 32), 70)] * len(PROMPTS))
        said = [output.kv_transfer_params[EVICT] for output in outputs]
        found = {metric.name: metric for metric in started.get_metrics()}
    for name in ("evictions", "blocks_evicted", "read_anew"):
        assert found[f"vllm:kvfold_{name}"].value == sum(each.get(name, 0) for each in said)
    assert found["vllm:kvfold_blocks_evicted"].value > 10


def test_what_is_evicted_by_default():
    truth, prompt = Truth(), PROMPTS[2]
    other = Asked("knorm", 0.5)
    with engine(extra={"evict": {"method": "adakv", "budget": 0.25, "every": 32}}) as started:
        requests = [(prompt, ORDINARY), (text(6, 400), ORDINARY), (prompt, other)]
        default = Asked("adakv", 0.25, 32)
        expected = [
            truth.answer(prompt, default if asked is ORDINARY else asked, 80)
            for prompt, asked in requests
        ]
        assert expected[0] != truth.answer(prompt, new=80)
        for _ in range(2):
            assert answers(started, requests, 80) == expected
        assert in_use(started) == 0


@pytest.mark.parametrize(
    "evict", [{"method": "kvzip", "budget": 0.3}, {"method": "snapkv"}, {"budget": 0.3}], ids=str
)
def test_an_engine_with_a_wrong_default_does_not_start(evict):
    with pytest.raises((RuntimeError, ValueError)), engine(extra={"evict": evict}):
        pytest.fail("it has started")


def test_a_second_engine_of_a_process_does_not_start():
    with engine(), pytest.raises(KvfoldError, match="end the other vLLM first"), engine():
        pytest.fail("it has started")
