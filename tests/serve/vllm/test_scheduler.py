# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: which request gets which pages."""

from __future__ import annotations

import pytest

from tests.helpers.vllm import BLOCK, WRONG, request_for


def no_blocks(name, number):
    pytest.fail(f"{name} has no pages of single heads")


def taken(scheduler_side):
    return scheduler_side.take({"r": 1}, set(), no_blocks)


def test_a_request_gets_its_context_into_its_own_pages(scheduler_side, served_folder):
    served = served_folder.get("even")
    request = request_for(served)
    assert scheduler_side.matched(request, 0) == (40, False)
    scheduler_side.allocated(request, [[9, 4, 7]], 40)
    step = taken(scheduler_side)
    (load,) = step.loads
    assert (load.context, load.salt, load.start, load.count) == ("even", served.salt, 0, 40)
    assert load.blocks == [9, 4, 7]
    assert step.laid == step.writing == {} and step.gone == []
    assert taken(scheduler_side).loads == []


@pytest.mark.parametrize("cached", [0, 16, 40, 42])
def test_loads_are_done_before_the_forward_and_leave_it_a_token(
    scheduler_side, served_folder, cached
):
    """vLLM starts other loads after it, and a prompt that is loaded whole ends the engine."""
    request = request_for(served_folder.get("even"))
    loaded, later = scheduler_side.matched(request, cached)
    assert not later
    assert cached + loaded < request.num_tokens


def test_what_is_cached_is_not_loaded_again(scheduler_side, served_folder):
    request = request_for(served_folder.get("even"))
    assert scheduler_side.matched(request, 32) == (8, False)
    scheduler_side.allocated(request, [[9, 4, 7]], 8)
    (load,) = taken(scheduler_side).loads
    assert (load.start, load.count, load.blocks) == (32, 40, [9, 4, 7])
    assert scheduler_side.matched(request, 48) == (0, False)
    scheduler_side.allocated(request, [[9, 4, 7]], 0)
    assert taken(scheduler_side).loads == []


def test_a_preempted_request_is_loaded_again(scheduler_side, served_folder):
    request = request_for(served_folder.get("even"))
    scheduler_side.matched(request, 0)
    scheduler_side.allocated(request, [[1, 2, 3]], 40)
    taken(scheduler_side)
    request.num_tokens += 5
    assert scheduler_side.matched(request, 16) == (24, False)
    scheduler_side.allocated(request, [[1, 5, 6, 8]], 24)
    (load,) = taken(scheduler_side).loads
    assert load.start == 16 and load.blocks == [1, 5, 6]


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_request_fails_and_nothing_is_computed_for_it(
    scheduler_side, served_folder, name
):
    request = request_for(served_folder.get("even"), **WRONG[name][0])
    assert scheduler_side.matched(request, 0) == (request.num_tokens, True)
    assert request.skip_reading_prefix_cache is False
    scheduler_side.allocated(request, [[1, 2, 3]], request.num_tokens)
    step = taken(scheduler_side)
    assert step.refused == {"r": [1, 2, 3]} and step.loads == []
    assert taken(scheduler_side).refused == {}


def test_pages_that_a_refused_request_shares_are_not_spoilt(scheduler_side, served_folder):
    request = request_for(served_folder.get("even"), kv_transfer_params=None)
    assert scheduler_side.matched(request, 32) == (request.num_tokens - 32, True)
    scheduler_side.allocated(request, [[1, 2, 3]], request.num_tokens - 32)
    assert taken(scheduler_side).refused == {"r": [3]}


def test_an_ordinary_request_is_left_alone(scheduler_side):
    request = request_for(None)
    assert scheduler_side.matched(request, 0) == (0, False)
    scheduler_side.allocated(request, [[1]], 0)
    step = taken(scheduler_side)
    assert step.loads == [] and step.refused == {}


# --- pages of single heads -----------------------------------------------------------------------


@pytest.fixture
def uneven(served_folder):
    served = served_folder.get("uneven")
    assert served.kept > 3 * BLOCK and served.kept % BLOCK
    return served


def scheduled(scheduler_side, served, blocks, computed, local=0):
    """The request over these blocks, in its first step after `computed` tokens."""
    request = request_for(served, num_computed_tokens=computed)
    count, _ = scheduler_side.matched(request, local)
    scheduler_side.allocated(request, [blocks], count)
    return request


def test_a_request_with_pages_is_laid_into_the_whole_blocks_of_its_context(scheduler_side, uneven):
    blocks, whole = list(range(20, 30)), uneven.kept // BLOCK
    request = scheduled(scheduler_side, uneven, blocks, uneven.kept)
    step = scheduler_side.take(
        {"r": 3, "other": 1}, set(), lambda name, number: {"r": blocks}[name][number]
    )
    own = step.laid["r"]
    assert (own.pages, own.blocks, own.replaced) == (uneven.pages, blocks[:whole], whole)
    assert step.loads[0].blocks == blocks[: whole + 1] and step.loads[0].count == uneven.kept
    # The last of the step's tokens, the third of the question.
    assert step.writing == {blocks[(uneven.kept + 2) // BLOCK]: "r"}
    request.num_computed_tokens = uneven.kept + 3
    for _ in range(2 * BLOCK):
        step = scheduler_side.take(
            {"r": 1}, set(), lambda name, number: {"r": blocks}[name][number]
        )
        assert step.writing == {blocks[request.num_computed_tokens // BLOCK]: "r"}
        assert step.laid == {} and step.loads == step.gone == []
        request.num_computed_tokens += 1


def test_pages_of_the_prefix_cache_are_laid_and_not_loaded(scheduler_side, uneven):
    whole = uneven.kept // BLOCK
    scheduled(scheduler_side, uneven, list(range(9)), uneven.kept, local=whole * BLOCK)
    step = scheduler_side.take({"r": 3}, set(), lambda name, number: number)
    assert step.loads[0].start == whole * BLOCK
    assert step.laid["r"].blocks == list(range(whole))


def test_a_request_with_pages_that_waits_writes_nowhere(scheduler_side, uneven):
    scheduled(scheduler_side, uneven, list(range(9)), uneven.kept)
    assert scheduler_side.take({"other": 1}, set(), no_blocks).writing == {}


def test_a_preempted_request_with_pages_is_laid_anew(scheduler_side, uneven):
    request = scheduled(scheduler_side, uneven, list(range(9)), uneven.kept)
    scheduler_side.take({"r": 3}, set(), lambda name, number: number)
    assert scheduler_side.take({}, set(), no_blocks).gone == []
    blocks = list(range(30, 40))
    assert scheduler_side.matched(request, 0) == (uneven.kept, False)
    scheduler_side.allocated(request, [blocks], uneven.kept)
    step = scheduler_side.take({"r": 5}, set(), lambda name, number: blocks[number])
    assert step.laid["r"].blocks == blocks[: uneven.kept // BLOCK]
    assert step.writing == {blocks[(uneven.kept + 4) // BLOCK]: "r"}


def test_a_request_with_pages_that_has_ended_is_gone_once(scheduler_side, uneven):
    request = scheduled(scheduler_side, uneven, list(range(9)), uneven.kept)
    scheduler_side.take({"r": 3}, set(), lambda name, number: number)
    scheduler_side.forget(request)
    step = scheduler_side.take({"r": 1}, set(), no_blocks)
    assert step.gone == ["r"] and step.writing == {}
    assert scheduler_side.take({}, set(), no_blocks).gone == []


def test_an_ended_request_without_pages_is_not_told(scheduler_side, served_folder):
    request = scheduled(scheduler_side, served_folder.get("even"), [1, 2, 3], 40)
    scheduler_side.forget(request)
    assert taken(scheduler_side).gone == []
