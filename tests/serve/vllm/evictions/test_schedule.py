# SPDX-License-Identifier: Apache-2.0
"""`EvictionSchedule`: which blocks are taken and given back, and when evictions are ordered."""

from __future__ import annotations

import pytest

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.evictions.asked import AskedEviction, Shape
from kvfold.serve.vllm.evictions.schedule import EvictionCounts, EvictionDone, EvictionSchedule
from tests.helpers.vllm_pool import FakeRequest, Manager, request_of

BLOCK = 16
SHAPE = Shape(layers=4, heads=4, entry_bytes=64, block=BLOCK)
HALF = {"method": "snapkv:window=8", "budget": 0.5}  # 100 tokens: 50 of each head, 3 blocks
ROUNDS = HALF | {"every": 10}


def schedule_of(count: int = 40, default: AskedEviction | None = None) -> EvictionSchedule:
    schedule = EvictionSchedule(default, SHAPE)
    schedule.manager = Manager(count)
    return schedule


def free(schedule: EvictionSchedule) -> int:
    return schedule.manager.block_pool.get_num_free_blocks()


def admit(schedule: EvictionSchedule, request: FakeRequest) -> None:
    """A request arrives, gets the blocks of its prompt, and reads it in a step."""
    schedule.arrived(request, plain=True)
    schedule.check(request)
    assert not schedule.waits(request)
    schedule.manager.hold(request, request.num_tokens, BLOCK)
    schedule.admitted(request)
    assert schedule.preempted(set()) == []
    assert schedule.orders({request.request_id: request.num_tokens}) == {}


def write(schedule: EvictionSchedule, request: FakeRequest, computed: int) -> None:
    """The request has read so many tokens, and writes one more."""
    request.num_computed_tokens = computed
    new = max(0, computed + 1 - request.num_tokens)
    request.all_token_ids += [7] * new
    request.num_output_tokens += new
    schedule.manager.hold(request, computed + 1, BLOCK)


def ids(schedule: EvictionSchedule, request: FakeRequest) -> list[int]:
    return [block.block_id for block in schedule.manager.tables[request.request_id]]


def test_admission_takes_the_targets():
    schedule, request = schedule_of(40), request_of("a", 100, BLOCK, **HALF)
    admit(schedule, request)
    assert free(schedule) == 40 - 7 - 3
    assert schedule.requests == {"a": request}


def test_an_ordinary_request_takes_none():
    schedule, request = schedule_of(), request_of("a", 100, BLOCK)
    admit(schedule, request)
    assert free(schedule) == 40 - 7 and schedule.requests == {}
    assert schedule.ended(request) is None


def test_what_is_evicted_by_default_and_not_of_a_context():
    default = AskedEviction.of(HALF, BLOCK)
    schedule = schedule_of(default=default)
    admit(schedule, request_of("a", 100, BLOCK))
    assert set(schedule.requests) == {"a"}
    of_context = request_of("b", 100, BLOCK)
    schedule.arrived(of_context, plain=False)
    schedule.admitted(of_context)
    pooling = request_of("c", 100, BLOCK)
    pooling.sampling_params = None
    schedule.arrived(pooling, plain=True)
    schedule.admitted(pooling)
    assert set(schedule.requests) == {"a"}


def test_a_context_is_not_evicted_from():
    schedule, request = schedule_of(), request_of("a", 100, BLOCK, **HALF)
    schedule.arrived(request, plain=False)
    with pytest.raises(KvfoldError, match="a context was compressed already"):
        schedule.check(request)


def test_a_request_that_asks_wrongly_is_refused_until_it_ends():
    schedule, request = schedule_of(), request_of("a", 100, BLOCK, method="kvzip", budget=0.5)
    schedule.arrived(request, plain=True)
    for _ in range(2):
        with pytest.raises(KvfoldError, match="forwards of its own"):
            schedule.check(request)
    assert schedule.ended(request) is None
    schedule.check(request)


@pytest.mark.parametrize("there, waits", [(9, True), (10, False)])
def test_a_request_waits_for_its_prompts_blocks_and_its_targets(there, waits):
    schedule, request = schedule_of(), request_of("a", 100, BLOCK, **HALF)
    schedule.arrived(request, plain=True)
    schedule.manager.block_pool.get_new_blocks(40 - there)
    schedule.check(request)
    assert schedule.waits(request) is waits


@pytest.mark.parametrize("there, refused", [(9, True), (10, False)])
def test_one_that_never_has_room_is_refused(there, refused):
    schedule, request = schedule_of(there), request_of("a", 100, BLOCK, **HALF)
    schedule.arrived(request, plain=True)
    if refused:
        with pytest.raises(KvfoldError, match="take 10 blocks, and vLLM has 9"):
            schedule.check(request)
    else:
        schedule.check(request)


def test_an_eviction_is_ordered_when_the_prompt_was_read():
    schedule, request = schedule_of(), request_of("a", 100, BLOCK, **HALF)
    admit(schedule, request)
    targets = [block.block_id for block in schedule._evicting["a"].targets]
    request.num_computed_tokens = 64
    assert schedule.orders({"a": 36}) == {}
    write(schedule, request, 100)
    assert schedule.orders({"b": 1}) == {}
    order = schedule.orders({"a": 1})["a"]
    assert (order.tokens, order.first, order.ids) == (100, 0, None)
    assert order.blocks == ids(schedule, request)[:7] and order.targets == targets
    write(schedule, request, 101)
    assert schedule.orders({"a": 1}) == {}


def test_token_ids_go_with_an_order_where_they_are_read():
    schedule = schedule_of()
    admit(schedule, request := request_of("a", 100, BLOCK, method="random", budget=0.5))
    write(schedule, request, 100)
    (order,) = schedule.orders({"a": 1}).values()
    assert order.eviction.policy.needs.token_ids is (order.ids is not None)


def test_what_was_copied_is_freed_and_no_more():
    schedule, request = schedule_of(), request_of("a", 100, BLOCK, **HALF)
    admit(schedule, request)
    write(schedule, request, 100)
    schedule.orders({"a": 1})
    before = ids(schedule, request)
    schedule.copied({"a": EvictionDone(0, 6, 2), "gone": EvictionDone(0, 3, 1)})
    assert ids(schedule, request) == [0] * 6 + before[6:]
    assert free(schedule) == 40 - 1 - 2  # the last block, and 2 of 3 targets
    schedule.manager.give_back(request)
    about = schedule.ended(request)
    assert about == {
        "method": "snapkv:window=8 + pages:size=16",
        "evictions": 1,
        "read_anew": 0,
        "blocks_evicted": 4,
    }
    assert free(schedule) == 40
    assert schedule.take_counts() == EvictionCounts(evictions=1, blocks_evicted=4)
    assert schedule.take_counts() == EvictionCounts()


def test_rounds_keep_their_targets_and_come_in_time():
    schedule, request = schedule_of(), request_of("a", 100, BLOCK, **ROUNDS)
    admit(schedule, request)
    found = {}
    for computed in range(100, 135):
        write(schedule, request, computed)
        for order in schedule.orders({"a": 1}).values():
            found[computed] = (order.tokens, order.first, len(order.blocks))
            schedule.copied({"a": EvictionDone(0, order.tokens // BLOCK, 2)})
    assert found == {100: (100, 0, 7), 110: (110, 6, 1), 120: (120, 6, 2), 130: (130, 7, 2)}
    assert ids(schedule, request)[:8] == [0] * 8 and ids(schedule, request)[8]
    assert free(schedule) == 40 - 1 - 3


def test_two_orders_may_come_before_the_first_was_copied():
    schedule, request = schedule_of(), request_of("a", 100, BLOCK, **ROUNDS | {"every": 1})
    admit(schedule, request)
    write(schedule, request, 100)
    first = schedule.orders({"a": 1})["a"]
    write(schedule, request, 101)
    second = schedule.orders({"a": 1})["a"]
    assert (first.tokens, second.tokens) == (100, 101)
    assert first.blocks == second.blocks and first.first == second.first == 0
    schedule.copied({"a": EvictionDone(0, 6, 3)})
    schedule.copied({"a": EvictionDone(0, 6, 3)})
    assert free(schedule) == 40 - 1 - 3
    schedule.manager.give_back(request)
    assert schedule.ended(request)["evictions"] == 2
    assert free(schedule) == 40


def test_queries_are_kept_of_the_last_tokens_before_an_eviction():
    schedule, request = schedule_of(), request_of("a", 100, BLOCK, **ROUNDS)
    admit(schedule, request)
    found = {}
    for computed, scheduled in [(0, 64), (64, 28), (92, 1), (93, 7)]:
        request.num_computed_tokens = computed
        found[computed] = schedule.watched({"a": scheduled})
    assert found == {0: {}, 64: {}, 92: {"a": 8}, 93: {"a": 8}}


@pytest.mark.parametrize("copied", [False, True])
def test_a_preempted_request_gives_all_back_and_is_read_anew(copied):
    schedule, request = schedule_of(), request_of("a", 100, BLOCK, **HALF)
    admit(schedule, request)
    write(schedule, request, 100)
    schedule.orders({"a": 1})
    if copied:
        schedule.copied({"a": EvictionDone(0, 6, 2)})
    schedule.manager.give_back(request)
    request.num_computed_tokens = 0
    assert schedule.preempted({"a", "other"}) == ["a"]
    assert free(schedule) == 40 and schedule.requests == {}
    schedule.copied({"a": EvictionDone(0, 6, 2)})  # the output of a step that was under way
    assert free(schedule) == 40
    schedule.manager.hold(request, request.num_tokens, BLOCK)
    schedule.admitted(request)
    assert schedule.orders({"a": 1}) == {}
    write(schedule, request, request.num_tokens)
    assert schedule.orders({"a": 1})["a"].tokens == 101
    schedule.manager.give_back(request)
    assert schedule.ended(request)["read_anew"] == 1
    assert free(schedule) == 40


def test_one_that_ends_before_its_eviction_gives_its_targets_back():
    schedule, request = schedule_of(), request_of("a", 100, BLOCK, **HALF)
    admit(schedule, request)
    schedule.manager.give_back(request)
    assert schedule.ended(request)["evictions"] == 0
    assert free(schedule) == 40


@pytest.mark.parametrize("window, found", [(1, 6), (4, 6), (5, 5), (20, 5), (21, 4), (100, 0)])
def test_the_prefix_cache_finds_nothing_of_the_window(window, found):
    request = request_of("a", 100, BLOCK, method=f"snapkv:window={window}", budget=0.9999)
    before = list(request.block_hashes)
    schedule_of().arrived(request, plain=True)
    assert [old == new for old, new in zip(before, request.block_hashes, strict=True)] == [
        number < found for number in range(6)
    ]


def test_without_a_window_it_finds_the_whole_prompt():
    request = request_of("a", 100, BLOCK, method="knorm", budget=0.5)
    before = list(request.block_hashes)
    schedule_of().arrived(request, plain=True)
    assert request.block_hashes == before


@pytest.mark.parametrize("tokens", [95, 96, 100])
def test_blocks_after_an_eviction_are_never_shared(tokens):
    """vLLM hashes a block that the first answer token fills before it is read."""
    requests = [request_of(name, tokens, BLOCK, method="knorm", budget=0.5) for name in "ab"]
    last = tokens // BLOCK - 1
    for request in requests:
        admit(schedule_of(), request)
    first, second = (request.block_hashes for request in requests)
    assert len(first) == last + 1 and first[:last] == second[:last]
    assert first[last] != second[last]  # hashes of later blocks follow from this one


def test_one_that_stayed_whole_is_read_anew_too():
    schedule, request = schedule_of(), request_of("a", 10, BLOCK, **HALF)
    admit(schedule, request)
    assert schedule.requests == {} and free(schedule) == 40 - 1
    write(schedule, request, 40)
    schedule.manager.give_back(request)
    request.num_computed_tokens = 0
    before = list(request.block_hashes)
    assert schedule.preempted({"a"}) == ["a"]
    assert schedule.take_counts().read_anew == 1
    window = request.num_tokens - 8
    assert request.block_hashes[: window // BLOCK] == before[: window // BLOCK]
    assert schedule.ended(request)["read_anew"] == 1


def test_one_that_is_admitted_in_the_step_of_its_preemption_keeps_its_targets():
    schedule, request = schedule_of(), request_of("a", 100, BLOCK, **HALF)
    admit(schedule, request)
    write(schedule, request, 100)
    schedule.orders({"a": 1})
    schedule.manager.give_back(request)
    request.num_computed_tokens = 0
    schedule.manager.hold(request, request.num_tokens, BLOCK)
    schedule.admitted(request)
    assert schedule.preempted({"a"}) == ["a"] and set(schedule.requests) == {"a"}
    schedule.copied({"a": EvictionDone(0, 6, 2)})  # of the admission before
    write(schedule, request, request.num_tokens)
    assert schedule.orders({"a": 1})["a"].admission == 1
    schedule.manager.give_back(request)
    assert schedule.ended(request)["read_anew"] == 1 and free(schedule) == 40


def test_what_a_preempted_request_wrote_is_not_shared_either():
    schedule, request = schedule_of(), request_of("a", 100, BLOCK, method="knorm", budget=0.5)
    admit(schedule, request)
    write(schedule, request, 100)
    schedule.orders({"a": 1})
    request.block_hashes += [bytes([100 + number]) * 32 for number in range(3)]
    before = list(request.block_hashes)
    schedule.preempted({"a"})
    assert [old == new for old, new in zip(before, request.block_hashes, strict=True)] == [
        number < 6 for number in range(9)
    ]
