# SPDX-License-Identifier: Apache-2.0
"""Requests that ask wrongly fail alone; those that vLLM has no blocks for wait, or fail alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from vllm import LLM

from kvfold.serve.vllm.evictions.asked import EVICT
from tests_vllm.evicting import (
    Asked,
    Truth,
    engine,
    generated,
    in_use,
    sampling,
    text,
    without_room,
)

PROMPT = text(1, 300)
SNAPKV = Asked("snapkv", 0.25)
BLOCKS = 40


class Lines(logging.Handler):
    """Errors that the connector logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler, logger = Lines(), logging.getLogger("vllm.kvfold")
    logger.addHandler(handler)
    yield handler.found
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine(num_gpu_blocks_override=BLOCKS) as started:
        yield started


WRONG: dict[str, tuple[Any, str]] = {
    "a text": ("snapkv", "takes a method, its budget"),
    "no method": ({"budget": 0.25}, "takes a method, its budget"),
    "more": ({"method": "snapkv", "budget": 0.25, "rate": 1}, "takes a method, its budget"),
    "a number as method": ({"method": 3, "budget": 0.25}, "a method is a text"),
    "an unknown method": ({"method": "snapcv", "budget": 0.25}, "snapcv"),
    "no budget": ({"method": "snapkv"}, "snapkv + pages needs a budget"),
    "a budget too many": ({"method": "simlayerkv", "budget": 0.25}, "takes no budget"),
    "a budget below the window": ({"method": "snapkv", "budget": 5}, "raise it to at least 32"),
    "a budget below a page": ({"method": "knorm", "budget": 5}, "raise the budget"),
    "a budget of nothing": ({"method": "snapkv", "budget": 0}, "must be positive"),
    "an unreadable budget": ({"method": "snapkv", "budget": [1]}, "budget"),
    "every 0": ({"method": "snapkv", "budget": 0.25, "every": 0}, "above 0, not 0"),
    "every half": ({"method": "snapkv", "budget": 0.25, "every": 0.5}, "above 0, not 0.5"),
    "rounds of sums": ({"method": "h2o:decode=append", "budget": 0.25, "every": 32}, "every"),
    "no pages": ({"method": "streaming_llm", "budget": 0.25}, "pages"),
    "other pages": ({"method": "snapkv + pages:size=16", "budget": 0.25}, "pages:size=32"),
    "own forwards": ({"method": "kvzip", "budget": 0.25}, "runs forwards of its own"),
    "coded entries": ({"method": "snapkv + kivi", "budget": 0.25}, "pages"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_request_that_asks_wrongly_fails_alone(llm, truth, lines, case):
    given, why = WRONG[case]
    wrong = sampling(extra_args={"kv_transfer_params": {EVICT: given}})
    outputs = generated(llm, [PROMPT] * 3, [wrong, sampling(), sampling(SNAPKV)])
    failed, plain, fine = (output.outputs[0] for output in outputs)
    assert failed.finish_reason == "error" and list(failed.token_ids) == []
    assert list(plain.token_ids) == truth.answer(PROMPT)
    assert list(fine.token_ids) == truth.answer(PROMPT, SNAPKV)
    assert len(lines) == 1 and why in lines[0]
    assert in_use(llm) == 0


def test_a_prompt_that_never_has_room_for_its_targets_fails_alone(llm, truth, lines):
    long = text(2, 900)
    hopeless, fine = Asked("snapkv", 0.9), Asked("snapkv", 0.3)
    outputs = generated(
        llm, [long, long, PROMPT], [sampling(hopeless), sampling(fine), sampling(SNAPKV)]
    )
    failed, other, last = (output.outputs[0] for output in outputs)
    assert failed.finish_reason == "error" and list(failed.token_ids) == []
    assert list(other.token_ids) == truth.answer(long, fine)
    assert list(last.token_ids) == truth.answer(PROMPT, SNAPKV)
    (line,) = lines
    assert f"take 55 blocks, and vLLM has {BLOCKS - 1}" in line
    assert in_use(llm) == 0


def test_requests_without_room_wait_and_may_be_aborted_there(llm, truth):
    llm.reset_prefix_cache()
    prompts = [text(seed, 640) for seed in (3, 4, 5)]  # 21 blocks each, and 5 targets
    core = llm.llm_engine
    for name, prompt in zip("abc", prompts, strict=True):
        core.add_request(name, {"prompt_token_ids": prompt}, sampling(SNAPKV, 60))
    finished, aborted = {}, False
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        if not aborted and "b" in without_room(llm):
            core.abort_request(["b"])
            aborted = True
    assert aborted
    for name, prompt in (("a", prompts[0]), ("c", prompts[2])):
        assert finished[name] == truth.answer(prompt, SNAPKV, 60)
    assert in_use(llm) == 0
