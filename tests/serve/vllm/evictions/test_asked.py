# SPDX-License-Identifier: Apache-2.0
"""What requests ask to evict, and blocks, against what really stays of random rows."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from kvfold.bundled import FOLDER
from kvfold.errors import BudgetError, KvfoldError
from kvfold.methods.base import Method, Needs, Stages, register
from kvfold.observers.stored import TokenIds
from kvfold.policies.row_policy import RowPolicy
from kvfold.serve.vllm.evictions.asked import AskedEviction, Shape
from kvfold.serve.vllm.export import Paged
from tests.helpers.registry import registry_restored
from tests.helpers.rows import SIZE, RandomRow

BLOCK = 16
METHODS = (
    "snapkv:window=8",
    "snapkv:window=8 + adakv",
    "pyramidkv:window=8",
    "pyramidkv:window=8 + adakv",
    "pyramidkv_official:window=8",
    "knorm",
    "knorm:skip_layers=0",
    "keydiff",
    "rkv:window=8",
    "chunkkv:window=8,length=5",
    "lagkv:sinks=4,lag=16",
    "random",
    f"snapkv:window=8 + curve:file={FOLDER}/curve.safetensors",
)
ONCE = ("h2o:decode=append", "simlayerkv:window=20,threshold=0.3", "expected_attention")
BUDGETS = (0.1, 0.3, 0.7, 0.95, 1.0, 24, 60, 130, "20KiB")


def test_a_request_names_a_method_a_budget_and_rounds():
    found = AskedEviction.of({"method": "snapkv", "budget": "25%", "every": 48}, BLOCK)
    assert found.method == "snapkv + every:interval=48 + pages:size=16"
    assert (found.budget.kind, found.budget.amount, found.every) == ("ratio", 0.25, 48)


def test_pages_of_the_engines_size_may_be_named():
    spec = "snapkv + pages:size=16"
    assert AskedEviction.of({"method": spec, "budget": 64}, BLOCK).method == spec


def test_a_method_with_rounds_of_its_own_keeps_them():
    assert AskedEviction.of({"method": "rkv", "budget": 64}, BLOCK).every == 128
    assert AskedEviction.of({"method": "rkv", "budget": 64, "every": 5}, BLOCK).every == 5


REFUSED = [
    (None, "takes a method, its budget"),
    ({"method": "a" * 100_000, "budget": 0.5}, "at most 500 characters, not 100000"),
    ("snapkv", "takes a method, its budget"),
    ({}, "takes a method, its budget"),
    ({"budget": 0.5}, "takes a method, its budget"),
    ({"method": "snapkv", "budget": 0.5, "rate": 3}, "takes a method, its budget"),
    ({"method": ["snapkv"], "budget": 0.5}, "a method is a text"),
    ({"method": "snapcv", "budget": 0.5}, "snapcv"),
    ({"method": "snapkv:windows=8", "budget": 0.5}, "windows"),
    ({"method": "snapkv", "budget": 0.5, "every": 0}, "above 0, not 0"),
    ({"method": "snapkv", "budget": 0.5, "every": -1}, "above 0, not -1"),
    ({"method": "snapkv", "budget": 0.5, "every": "32"}, "above 0, not '32'"),
    ({"method": "snapkv", "budget": 0.5, "every": True}, "not True"),
    ({"method": "snapkv", "budget": 0.5, "every": 2.0}, "above 0, not 2.0"),
    ({"method": "snapkv + pages:size=32", "budget": 0.5}, "take pages:size=16"),
    ({"method": "h2o:decode=append", "budget": 0.5, "every": 32}, "leave every out"),
    ({"method": "triattention:prompt=counted", "budget": 0.5}, "take another method"),
    ({"method": "simlayerkv:when=first_decode"}, "waits for the first generated token"),
    ({"method": "kvzip", "budget": 0.5}, "runs forwards of its own"),
    ({"method": "streaming_llm", "budget": 0.5}, "pages"),
    ({"method": "full"}, "evicts nothing itself"),
    ({"method": "kivi"}, "evicts nothing itself"),
    ({"method": "criticalkv", "budget": 0.5}, "reads weights of the model"),
    ({"method": "finch", "budget": 0.5}, "finch"),
    ({"method": f"zap_threshold:file={FOLDER}/scorer.safetensors"}, "sizes anew in each round"),
]


@pytest.mark.parametrize("given, why", REFUSED, ids=str)
def test_what_is_refused(given, why):
    with pytest.raises(KvfoldError, match=why):
        AskedEviction.of(given, BLOCK)


@pytest.mark.parametrize(
    "given, why",
    [
        ({"method": "snapkv"}, "needs a budget"),
        ({"method": "simlayerkv", "budget": 0.5}, "takes no budget"),
        ({"method": "snapkv", "budget": 31}, "raise it to at least 32"),
        ({"method": "snapkv", "budget": 0}, "must be positive"),
        ({"method": "snapkv", "budget": 1.5}, "at most 1.0"),
        ({"method": "snapkv", "budget": "much"}, "cannot read 'much'"),
        ({"method": "snapkv", "budget": [64]}, "budget"),
    ],
    ids=str,
)
def test_budgets_that_are_refused(given, why):
    with pytest.raises(BudgetError, match=why):
        AskedEviction.of(given, BLOCK)


def test_rounds_of_a_method_that_reads_token_ids_are_refused():
    """vLLM samples the last token while it makes the next step."""

    @dataclass(frozen=True)
    class ByIds(Method):
        def stages(self) -> Stages:
            return Stages(
                needs=Needs(TokenIds()), score=lambda seen: seen[TokenIds][:, None].float()
            )

    with registry_restored():
        register("by_ids", paper="")(ByIds)
        once = {"method": "by_ids", "budget": 0.5}
        assert AskedEviction.of(once, BLOCK).policy.needs.token_ids
        with pytest.raises(KvfoldError, match="vLLM may not know the last ones"):
            AskedEviction.of(once | {"every": 32}, BLOCK)


def test_queries_that_are_read():
    snapkv = AskedEviction.of({"method": "snapkv:window=8", "budget": 0.5}, BLOCK)
    assert [snapkv.queries(tokens) for tokens in (3, 8, 100)] == [3, 8, 8]
    everything = AskedEviction.of({"method": "expected_attention", "budget": 0.5}, BLOCK)
    assert everything.queries(100) == 100
    assert AskedEviction.of({"method": "knorm", "budget": 0.5}, BLOCK).queries(100) == 0


def test_a_request_names_no_file_of_the_server():
    given = {"method": f"snapkv + curve:file={FOLDER}/curve.safetensors", "budget": 0.5}
    assert AskedEviction.within(given, Paged(BLOCK)).method.startswith("snapkv + curve:file=")
    with pytest.raises(KvfoldError, match="reads a file of the server"):
        AskedEviction.of_request(given, Paged(BLOCK))
    plain = {"method": "snapkv", "budget": 0.5}
    assert AskedEviction.of_request(plain, Paged(BLOCK)).method == "snapkv + pages:size=16"


def test_a_budget_of_tokens_below_a_page_fails_before_its_first_round():
    shape = Shape(layers=2, heads=2, entry_bytes=64, block=32)
    few = AskedEviction.of({"method": "knorm", "budget": 15, "every": 32}, 32)
    with pytest.raises(BudgetError, match="less than a page of 32 in some layer"):
        few.blocks(5, shape)


def test_blocks_by_hand():
    shape = Shape(layers=4, heads=4, entry_bytes=64, block=16)
    half = AskedEviction.of({"method": "snapkv:window=8", "budget": 0.5}, BLOCK)
    # 50 entries of each of 4 heads fill 12 pages.
    assert half.blocks(100, shape) == 3
    # No whole block, and everything stays.
    assert half.blocks(15, shape) == 0
    assert replace(half, budget=half.budget.tokens(100)).blocks(100, shape) == 0
    assert replace(half, budget=half.budget.tokens(99)).blocks(100, shape) == 6


def needed(eviction: AskedEviction, row: RandomRow, rounds: int, ranks: int) -> list[int]:
    """Blocks after the prompt and after each round, where something has been evicted."""
    policy, found = RowPolicy(eviction.policy, eviction.budget), []
    kept = policy.prompt(row.prefill(eviction.policy)).indices
    evicted = any(len(head) < row.seen for layer in kept for head in layer)
    row.keep(kept)
    for number in range(1 + rounds):
        if number:
            row.read(eviction.every)
            slots = policy.round(row.stored(eviction.policy))
            if slots is not None:
                evicted = True
                row.keep(slots)
        if evicted:
            found.append(row.blocks(BLOCK, ranks))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("every", [None, 5, 24], ids=str)
@pytest.mark.parametrize("method", [*METHODS, *ONCE])
def test_targets_hold_what_is_kept(method, every, ranks):
    if method in ONCE and every is not None:
        pytest.skip("no rounds")
    rng = random.Random(0)
    shape = Shape(layers=4, heads=4, entry_bytes=2 * SIZE * 4, block=BLOCK, ranks=ranks)
    compared = 0
    for seed in range(14):
        budget, tokens = rng.choice(BUDGETS), rng.randrange(1, 150)
        given = {"method": method, "budget": budget, "every": every}
        if method.startswith("simlayerkv"):
            del given["budget"]
        eviction = AskedEviction.of(given, BLOCK)
        rounds = 0 if eviction.every is None else 6
        most = tokens + rounds * (eviction.every or 0)
        row = RandomRow.of(shape.layers, shape.heads, tokens, most, seed)
        try:
            found = needed(eviction, row, rounds, ranks)
        except BudgetError:
            continue  # below a page, or the forced entries
        if found:
            there = eviction.blocks(tokens, shape)
            assert max(found) <= there, (budget, tokens)
            compared += 1
    assert compared > 3


@pytest.mark.parametrize("tokens, expected", [(20, 0), (40, 0), (70, 1)])
def test_a_part_that_fills_no_page_lets_nothing_leave(tokens: int, expected: int) -> None:
    shape = Shape(layers=2, heads=2, entry_bytes=64, block=32)
    asked = AskedEviction.of({"method": "knorm", "budget": 0.25}, 32)
    assert asked.blocks(tokens, shape) == expected
    few = AskedEviction.of({"method": "knorm", "budget": 15}, 32)
    with pytest.raises(BudgetError, match="less than a page of 32 in some layer"):
        few.blocks(tokens, shape)
