# SPDX-License-Identifier: Apache-2.0
"""Plans of a step: every entry belongs to one program, and none is made anew while one serves."""

import gc
import weakref

import pytest
import torch

from kvfold.kernels.triton import LaunchPlan, Rectangle, Room, attend, plan_for
from kvfold.kernels.triton import plan as plan_module
from tests.helpers.gpu_inputs import DEVICE, SCALE, attended, noise
from tests.helpers.segment_kinds import assert_near, encoded, raw_beside

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter", "poison")


@pytest.mark.parametrize("size", [None, 64, 192])
def test_parts_cover_every_entry_once(size):
    keys, values = [0, 1, 64, 70, 1000, 0, 100_000], [5, 1, 64, 65, 1000, 0, 99_000]
    rooms = Room(5, (0, 5, 1, 2, 3, 5, 0)), Room(70, (0, 69, 1, 2, 70, 70, 0))
    plan = LaunchPlan.of(keys, values, rooms, "cpu", size)
    lengths = list(map(min, keys, values))
    assert plan.lengths.tolist() == lengths and plan.rooms == (5, 70)
    assert plan.gaps.tolist() == [list(room.gaps) for room in rooms]
    assert plan.key_starts.tolist() == [0, 0, 1, 65, 135, 1135, 1135]
    assert plan.value_starts.tolist() == [0, 5, 6, 70, 135, 1135, 1135]
    wanted = [n + 75 - a - b for n, a, b in zip(lengths, *(r.gaps for r in rooms), strict=True)]
    seen, programs = [0] * len(keys), list(zip(plan.segment, plan.part, strict=True))
    assert len({(int(s), int(p)) for s, p in programs}) == len(programs)
    for i, (segment, part) in enumerate(programs):
        assert plan.first[segment] <= i < plan.first[segment + 1]
        seen[segment] += min(plan.size, wanted[segment] - int(part) * plan.size)
    assert seen == wanted and plan.first[-1] == len(programs)
    if size is None:
        assert len(programs) <= 512 + len(keys)


def test_one_plan_serves_layers_and_steps_until_a_rectangle_outgrows_it():
    lengths, gaps = [100, 20], (0, 3)

    def plan(width, keys=lengths):
        return plan_for(keys, keys, (Room(0, (0, 0)), Room(width, gaps)), torch.ones(1).to(DEVICE))

    known = [plan(width) for width in range(4, 65)]
    assert all(each is known[0] for each in known)
    assert known[0].rooms == (0, 64) and plan(5, [*lengths]) is known[0]
    assert plan(65) is not known[0] and plan(65).rooms == (0, 128)
    assert plan(4, [100, 21]) is not known[0]
    for width in (1000, 4097, 70_000):
        assert width <= plan(width).rooms[1] < width * 9 / 8 + 64


def test_a_plan_lives_as_long_as_a_buffer_that_it_was_used_with():
    """Graphs have its addresses, and others may have taken its place among those that are known."""
    buffer, rooms = torch.ones(1).to(DEVICE), (Room(0, (0, 0)), Room(3, (0, 3)))
    one = weakref.ref(plan_for([987, 0], [987, 0], rooms, buffer))
    plan_module._known.cache_clear()
    gc.collect()
    assert one() is not None
    del buffer
    gc.collect()
    assert one() is None


def test_a_plan_serves_every_length_that_it_has_room_for():
    """As a tail grows, in parts that were empty at first."""
    old, keys, values = encoded("raw", (32, 32), torch.float32)
    room = Room(200, (0, 5, 190, 3, 0, 1))
    tail, *of_tail = raw_beside(room, (32, 32), 1, torch.float32)
    plan = LaunchPlan.of(*old.lengths, (Room(0, (0,) * 6), room), DEVICE, 64)
    query = noise(6, 3, 32, seed=3)
    for width in (191, 192, 200, 190):
        cut = Rectangle(tail.keys[:, :width], tail.values[:, :width])
        got = attend(query, plan, old, (None, cut), scale=SCALE)
        of_all = (
            [torch.cat([a, b[: width - gap]]) for a, b, gap in zip(x, y, room.gaps, strict=True)]
            for x, y in zip((keys, values), of_tail, strict=True)
        )
        assert_near(got, attended(query, *of_all), torch.float32)
