# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: which request gets which pages."""

from __future__ import annotations

import pytest

from tests.helpers.vllm import WRONG, request_for


def test_a_request_gets_its_context_into_its_own_pages(scheduler_side, served_folder):
    served = served_folder.get("even")
    request = request_for(served)
    assert scheduler_side.matched(request, 0) == (40, False)
    scheduler_side.allocated(request, [[9, 4, 7]], 40)
    (load,) = scheduler_side.take().loads
    assert (load.context, load.salt, load.start) == ("even", served.salt, 0)
    assert load.slots == [*range(144, 160), *range(64, 80), *range(112, 120)]
    assert load.blocks == [9, 4, 7]
    assert scheduler_side.take().loads == []


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
    (load,) = scheduler_side.take().loads
    assert (load.start, load.slots, load.blocks) == (32, list(range(112, 120)), [7])
    assert scheduler_side.matched(request, 48) == (0, False)
    scheduler_side.allocated(request, [[9, 4, 7]], 0)
    assert scheduler_side.take().loads == []


def test_a_preempted_request_is_loaded_again(scheduler_side, served_folder):
    request = request_for(served_folder.get("even"))
    scheduler_side.matched(request, 0)
    scheduler_side.allocated(request, [[1, 2, 3]], 40)
    scheduler_side.take()
    request.num_tokens += 5
    assert scheduler_side.matched(request, 16) == (24, False)
    scheduler_side.allocated(request, [[1, 5, 6]], 24)
    (load,) = scheduler_side.take().loads
    assert load.start == 16 and load.blocks == [5, 6]


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_request_fails_and_nothing_is_computed_for_it(
    scheduler_side, served_folder, name
):
    request = request_for(served_folder.get("even"), **WRONG[name][0])
    assert scheduler_side.matched(request, 0) == (request.num_tokens, True)
    assert request.skip_reading_prefix_cache is False
    scheduler_side.allocated(request, [[1, 2, 3]], request.num_tokens)
    step = scheduler_side.take()
    assert step.refused == {"r": [1, 2, 3]} and step.loads == []
    assert scheduler_side.take().refused == {}


def test_pages_that_a_refused_request_shares_are_not_spoilt(scheduler_side, served_folder):
    request = request_for(served_folder.get("even"), kv_transfer_params=None)
    assert scheduler_side.matched(request, 32) == (request.num_tokens - 32, True)
    scheduler_side.allocated(request, [[1, 2, 3]], request.num_tokens - 32)
    assert scheduler_side.take().refused == {"r": [3]}


def test_an_ordinary_request_is_left_alone(scheduler_side):
    request = request_for(None)
    assert scheduler_side.matched(request, 0) == (0, False)
    scheduler_side.allocated(request, [[1]], 0)
    step = scheduler_side.take()
    assert step.loads == [] and step.refused == {}
