# SPDX-License-Identifier: Apache-2.0
"""Requests that come, wait, are preempted and aborted at random are answered as alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm import LLM

from kvfold.serve.vllm.evictions.asked import EVICT
from tests_vllm.evicting import (
    ORDINARY,
    Asked,
    Truth,
    engine,
    in_use,
    pool,
    sampling,
    scheduler,
    without_room,
)

KINDS = (
    ORDINARY,
    Asked("snapkv", 0.25, 32),
    Asked("adakv", 0.25),
    Asked("rkv", 0.3, 32),
    Asked("pyramidkv", 0.3),
    Asked("snapkv", 64, 32),
)
NEW, ABORTED, STEPS = 96, 0.03, 6000


@dataclass(frozen=True)
class Request:
    """A prompt, what is evicted of it, and how many tokens follow."""

    prompt: list[int]
    asked: Asked
    new: int


@dataclass
class Seen:
    """What became of requests, by number.

    `lost` are the tokens that a request had written when it last lost its blocks.
    """

    answers: dict[int, list[int]] = field(default_factory=dict)
    about: dict[int, Any] = field(default_factory=dict)
    lost: dict[int, list[int]] = field(default_factory=dict)
    preempted: set[tuple[int, int]] = field(default_factory=set)
    waited: bool = False
    most: int = 0  # blocks in use


def arrivals(rng: random.Random, count: int) -> list[Request]:
    """Half of the prompts begin alike."""
    shared, found = rng.sample(range(5, 2000), 200), []
    for _ in range(count):
        beginning = shared[: rng.randrange(32, 200)] if rng.random() < 0.5 else []
        tokens = beginning + rng.sample(range(5, 2000), rng.randrange(30, 400))
        found.append(Request(list(dict.fromkeys(tokens)), rng.choice(KINDS), rng.randrange(8, NEW)))
    return found


def served(llm: LLM, requests: list[Request], rng: random.Random) -> Seen:
    """Serves requests that come a few at a time; some are aborted."""
    core, seen, live, coming = llm.llm_engine, Seen(), set(), iter(enumerate(requests))
    left = len(requests)
    for _ in range(STEPS):
        for _ in range(min(rng.randrange(4), left)):
            number, one = next(coming)
            how = sampling(one.asked, one.new)
            core.add_request(str(number), {"prompt_token_ids": one.prompt}, how)
            live.add(number)
            left -= 1
        if len(requests) > 1 and live and rng.random() < ABORTED:
            number = rng.choice(sorted(live))
            core.abort_request([str(number)])
            live.discard(number)
        for output in core.step():
            number = int(output.request_id)
            if output.finished and number in live:
                live.discard(number)
                seen.answers[number] = list(output.outputs[0].token_ids)
                seen.about[number] = (output.kv_transfer_params or {}).get(EVICT, {})
        _note(llm, seen)
        if not left and not live:
            core.step()  # tells the workers who has ended
            return seen
    pytest.fail(f"{len(live)} requests have no answer after {STEPS} steps")


def _note(llm: LLM, seen: Seen) -> None:
    for request in scheduler(llm).requests.values():
        number, times = int(request.request_id.split("-")[0]), request.num_preemptions
        if times and (number, times) not in seen.preempted:
            seen.preempted.add((number, times))
            seen.lost[number] = list(request.output_token_ids)
    seen.waited |= bool(without_room(llm))
    seen.most = max(seen.most, in_use(llm))


def alone(truth: Truth, one: Request, lost: list[int]) -> list[int]:
    """The answer in process, after the tokens that were read anew."""
    rest = one.new - len(lost)
    return lost + (truth.answer(one.prompt + lost, one.asked, rest) if rest else [])


@pytest.fixture(scope="module", params=[400, 60], ids="{} blocks".format)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with engine(
        num_gpu_blocks_override=request.param, max_num_seqs=64, max_num_batched_tokens=512
    ) as started:
        yield started


@pytest.mark.parametrize("seed, count", [(1, 1), (2, 16), (3, 64), (4, 40)])
def test_each_request_is_answered_as_alone(llm, seed, count):
    rng = random.Random(seed)
    requests = arrivals(rng, count)
    llm.reset_prefix_cache()
    seen = served(llm, requests, rng)
    small, truth = pool(llm).num_gpu_blocks == 60, Truth()
    assert in_use(llm) == 0
    assert seen.most < pool(llm).num_gpu_blocks
    assert not small or count < 40 or (seen.preempted and seen.waited)
    assert len(seen.answers) > count // 2
    for number, given in seen.answers.items():
        anew = seen.about[number].get("read_anew", 0)
        lost = seen.lost[number] if anew else []
        assert given == alone(truth, requests[number], lost), number
