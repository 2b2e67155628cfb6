# SPDX-License-Identifier: Apache-2.0
"""Merging what is evicted against plain loops over rows, heads and entries, in float64."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold import IllegalComposition, KvfoldError, parse
from kvfold.methods.stages.merge import most_similar as similar
from kvfold.methods.stages.merge import value_spread as spread
from kvfold.methods.stages.merge.base import Eviction
from kvfold.methods.stages.merge.most_similar import evicted_slots, merge_apart, merge_similar
from kvfold.methods.stages.merge.value_spread import spread_values
from kvfold.observers.column_sums import ColumnSums
from tests.helpers.evictions import (
    CLOSE,
    assert_rows_are_their_own,
    each_head,
    evict,
    kept_entries,
    without_holes,
)

HEADS = pytest.mark.parametrize("heads", [1, 2, 8])
# (tokens stored, entries kept) of each row: alone; full, padded, nearly everything kept.
ROWS = pytest.mark.parametrize("rows", [[(40, 12)], [(40, 12), (25, 7), (31, 30)]])
SEEDS = st.integers(0, 10_000)


@HEADS
@ROWS
def test_real_entries_that_are_not_kept_go(rows, heads):
    eviction = evict(rows, heads)
    found = evicted_slots(eviction)
    for b, h, _, gone in each_head(eviction):
        expected = [-1] * (found.shape[-1] - len(gone)) + gone
        assert found[b, h].tolist() == expected
    assert found.shape[-1] == max(len(gone) for *_, gone in each_head(eviction))


def test_one_that_goes_per_head_is_found_as_well():
    eviction = evict([(20, 19), (9, 9)], heads=1)
    found = evicted_slots(eviction)
    assert found.tolist() == [[gone or [-1]] for *_, gone in each_head(eviction)]


def naive_d2o(eviction, beta=0.7, on="keys", weights="softmax", decide="head"):
    """Equations 9 to 12 as written, one entry after the other."""
    stored = (eviction.keys if on == "keys" else eviction.values).double().tolist()
    nearest, likeness = {}, {}
    for b, h, kept, gone in each_head(eviction):
        for i, slot in enumerate(gone):
            x = stored[b][h][slot]
            cosines = [
                sum(p * q for p, q in zip(x, stored[b][h][j], strict=True))
                / (math.hypot(*x) * math.hypot(*stored[b][h][j]))
                for j in kept
            ]
            likeness[b, h, i] = max(cosines)
            nearest[b, h, i] = cosines.index(max(cosines))
    judged = dict(likeness)
    if decide == "head_mean":
        for b, h, i in judged:
            every = [u for (row, _, at), u in likeness.items() if (row, at) == (b, i)]
            judged[b, h, i] = sum(every) / len(every)
    keys, values = eviction.keys.double(), eviction.values.double()
    out_keys = kept_entries(keys, eviction)
    out_values = kept_entries(values, eviction)
    state = torch.full(eviction.slots.shape[:2], math.nan, dtype=torch.float64)
    for b, h, kept, gone in each_head(eviction):
        if not gone:
            continue
        tau = sum(judged[b, h, i] for i in range(len(gone))) / len(gone)
        if eviction.state is not None and not eviction.state[b, h].isnan():
            tau = beta * tau + (1 - beta) * eviction.state[b, h].item()
        state[b, h] = tau
        holes = len(eviction.slots[b, h]) - len(kept)
        for j, slot in enumerate(kept):
            joins = [
                i
                for i in range(len(gone))
                if nearest[b, h, i] == j and judged[b, h, i] >= tau - 1e-9
            ]
            u = [likeness[b, h, i] for i in joins]
            if not joins:
                continue
            own, others = equation_12(u)
            if weights == "average":
                own, others = 1 / (1 + len(u)), [1 / (1 + len(u))] * len(u)
            if weights == "official":
                own, others = 1 / (1 + len(u)), [x / (1 + len(u)) for x in u]
            for before, after in ((keys, out_keys), (values, out_values)):
                mixed = own * before[b, h, slot]
                for w, i in zip(others, joins, strict=True):
                    mixed = mixed + w * before[b, h, gone[i]]
                after[b, h, holes + j] = mixed
    return out_keys, out_values, state


def equation_12(u):
    total = math.e + sum(map(math.exp, u))
    return math.e / total, [math.exp(x) / total for x in u]


def assert_like_the_loops(eviction, **options):
    keys, values, state = merge_similar(eviction, **options)
    expected = naive_d2o(eviction, **options)
    assert keys.dtype == eviction.keys.dtype and values.dtype == eviction.values.dtype
    torch.testing.assert_close(without_holes(keys, eviction).double(), expected[0], **CLOSE)
    torch.testing.assert_close(without_holes(values, eviction).double(), expected[1], **CLOSE)
    assert state.dtype == torch.float32
    torch.testing.assert_close(state.double(), expected[2], equal_nan=True, **CLOSE)


@pytest.mark.slow
@HEADS
@ROWS
@pytest.mark.parametrize("weights", ["softmax", "average", "official"])
@pytest.mark.parametrize("on", ["keys", "values"])
def test_merging_is_the_loop_over_equations_9_to_12(rows, heads, weights, on):
    eviction = evict(rows, heads)
    assert_like_the_loops(eviction, weights=weights, on=on)
    state = torch.full(eviction.slots.shape[:2], 0.3)
    later = dataclasses.replace(eviction, state=state)
    assert_like_the_loops(later, beta=0.25, weights=weights, on=on)


@HEADS
def test_keys_and_values_apart_have_thresholds_of_their_own(heads):
    eviction = evict([(20, 6)], heads=heads)
    before = torch.tensor([0.1, 0.9]).expand(*eviction.slots.shape[:2], 2)
    *merged, after = merge_apart(dataclasses.replace(eviction, state=before))
    for at, on in enumerate(("keys", "values")):
        own = dataclasses.replace(eviction, state=before[..., at])
        expected = naive_d2o(own, on=on)
        kept = without_holes(merged[at], eviction)
        torch.testing.assert_close(kept.double(), expected[at], **CLOSE)
        torch.testing.assert_close(after[..., at].double(), expected[2], equal_nan=True, **CLOSE)


@ROWS
def test_float64_entries_stay_so(rows):
    assert_like_the_loops(evict(rows, dtype=torch.float64))


@pytest.mark.parametrize("rows", [[(40, 12)], [(40, 12), (25, 8)]])
@pytest.mark.parametrize("weights", ["softmax", "official"])
def test_heads_can_decide_together(rows, weights):
    eviction = evict(rows, heads=2)
    # The same number in each head, as the released code has it.
    slots = eviction.slots[:, :1].expand(-1, 2, -1)
    eviction = dataclasses.replace(eviction, slots=slots)
    assert_like_the_loops(eviction, decide="head_mean", weights=weights, beta=0.5)
    state = torch.full(slots.shape[:2], 0.4)
    later = dataclasses.replace(eviction, state=state)
    assert_like_the_loops(later, decide="head_mean", weights=weights, beta=0.5)
    *_, threshold = merge_similar(later, decide="head_mean")
    assert torch.equal(threshold[:, 0], threshold[:, 1])


@HEADS
@pytest.mark.parametrize("weights", ["softmax", "average", "official"])
@pytest.mark.parametrize("before", [None, -1.0, 0.4, 2.0])
def test_one_entry_that_leaves_while_decoding(heads, weights, before):
    eviction = evict([(20, 19), (14, 13)], heads)
    eviction = dataclasses.replace(eviction, slots=eviction.slots[:, :1].expand(-1, heads, -1))
    if before is not None:
        state = torch.full(eviction.slots.shape[:2], before)
        eviction = dataclasses.replace(eviction, state=state)
    assert_like_the_loops(eviction, weights=weights)


def pair(cosines, kept_value=1.0):
    """One kept entry, and one evicted entry per cosine with it."""
    keys = [[1.0, 0.0]] + [[c, math.sqrt(1 - c * c)] for c in cosines]
    entries = torch.tensor([[keys]])
    values = torch.zeros(1, 1, len(keys), 1)
    values[0, 0, 0] = kept_value
    return Eviction(entries, values, torch.arange(len(keys)).view(1, 1, -1), torch.tensor([[[0]]]))


def test_equation_12_golden_vector():
    assert equation_12([0.9, 0.5])[0] == pytest.approx(0.398189, abs=1e-6)
    eviction = dataclasses.replace(pair([0.9, 0.5]), state=torch.tensor([[-1.0]]))
    for value, weight in zip(range(3), [0.398189, 0.360297, 0.241514], strict=True):
        one_hot = torch.eye(3)[value].view(1, 1, 3, 1)
        _, merged, _ = merge_similar(dataclasses.replace(eviction, values=one_hot), beta=0.0)
        assert merged.item() == pytest.approx(weight, abs=1e-6)


def test_released_weights_golden_vector():
    eviction = dataclasses.replace(pair([0.9, 0.5]), state=torch.tensor([[-1.0]]))
    got = []
    for value in range(3):
        one_hot = dataclasses.replace(eviction, values=torch.eye(3)[value].view(1, 1, 3, 1))
        got.append(merge_similar(one_hot, beta=0.0, weights="official")[1].item())
    assert got == pytest.approx([1 / 3, 0.3, 0.166667], abs=1e-6)
    assert sum(got) == pytest.approx(0.8)


@pytest.mark.parametrize(("beta", "after"), [(0.7, 0.74), (0.5, 0.70)])
def test_threshold_golden_vector_and_it_moves_before_the_test(beta, after):
    eviction = dataclasses.replace(pair([0.8]), state=torch.tensor([[0.6]]))
    keys, _, state = merge_similar(eviction, beta=beta)
    assert state.item() == pytest.approx(after)
    assert keys[0, 0, 0, 1] > 0  # 0.8 reaches it
    # 0.5 reaches the old threshold of 0.45, and not the new one.
    falling = dataclasses.replace(pair([0.5, 0.9]), state=torch.tensor([[0.45]]))
    _, values, state = merge_similar(falling, beta=beta, weights="average")
    assert state.item() == pytest.approx(beta * 0.7 + (1 - beta) * 0.45)
    assert values.item() == pytest.approx(0.5)  # one entry joined, not two


def test_an_entry_like_its_kept_one_counts_as_much():
    eviction = pair([1.0])
    eviction.keys[0, 0, 1] = 3.0 * eviction.keys[0, 0, 0]
    keys, values, _ = merge_similar(eviction)
    assert keys[0, 0, 0].tolist() == pytest.approx([2.0, 0.0])
    assert values.item() == pytest.approx(0.5)


def test_equal_similarities_all_reach_their_mean():
    eviction = pair([0.7] * 49)
    _, values, state = merge_similar(eviction, weights="average")
    assert values.item() == pytest.approx(1 / 50)
    again = dataclasses.replace(eviction, state=state)
    assert merge_similar(again, weights="average")[1].item() == pytest.approx(1 / 50)


def test_of_equally_near_entries_the_earlier_takes_it():
    keys = torch.tensor([[[[1.0, 0.0], [2.0, 0.0], [4.0, 0.0]]]])
    eviction = Eviction(keys, keys, torch.arange(3).view(1, 1, 3), torch.tensor([[[0, 1]]]))
    assert merge_similar(eviction)[0].tolist() == [[[[2.5, 0.0], [2.0, 0.0]]]]


def test_a_key_of_zeros_resembles_nothing():
    eviction = pair([0.5])
    eviction.keys[0, 0, 1] = 0.0
    keys, _, state = merge_similar(eviction)
    assert state.item() == 0.0 and keys.isfinite().all()


@given(SEEDS, st.integers(2, 30), st.data(), st.sampled_from(["softmax", "average"]))
@settings(max_examples=40, deadline=None)
def test_weights_add_up_to_one_and_stay_inside_the_hull(seed, tokens, data, weights):
    kept = data.draw(st.integers(1, tokens - 1))
    eviction = evict([(tokens, kept)], heads=1, seed=seed)
    ones = dataclasses.replace(eviction, values=torch.ones_like(eviction.values))
    keys, values, _ = merge_similar(ones, weights=weights)
    torch.testing.assert_close(values, torch.ones_like(values))
    low, high = eviction.keys.amin(2, keepdim=True), eviction.keys.amax(2, keepdim=True)
    assert (keys >= low - 1e-5).all() and (keys <= high + 1e-5).all()


@given(SEEDS, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=30, deadline=None)
def test_what_nothing_joins_is_unchanged_bit_for_bit(seed, dtype):
    eviction = evict([(30, 12), (20, 5)], seed=seed, dtype=dtype)
    keys, values, _ = merge_similar(eviction)
    was_keys, was_values = (kept_entries(x, eviction) for x in (eviction.keys, eviction.values))
    joined, *_ = naive_d2o(eviction)
    still = (joined == was_keys.double()).all(-1)
    assert still.any()
    assert torch.equal(without_holes(keys, eviction)[still], was_keys[still])
    assert torch.equal(without_holes(values, eviction)[still], was_values[still])
    strict = dataclasses.replace(eviction, state=torch.full(eviction.slots.shape[:2], 1.5))
    keys, values, _ = merge_similar(strict, beta=0.0)
    assert torch.equal(without_holes(keys, eviction), was_keys)
    assert torch.equal(without_holes(values, eviction), was_values)


def test_a_row_merges_as_it_does_alone_and_in_any_order():
    eviction = evict([(40, 12), (25, 7), (31, 30), (10, 10)], heads=3)
    state = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    for given_state in (None, state):
        eviction = dataclasses.replace(eviction, state=given_state)
        assert_rows_are_their_own(eviction, merge_similar)


def test_a_head_that_evicts_nothing_keeps_its_threshold():
    eviction = evict([(12, 12), (20, 6)], heads=1)
    *_, first = merge_similar(eviction)
    assert first[0].isnan().all() and first[1].isfinite().all()
    known = dataclasses.replace(eviction, state=torch.tensor([[0.25], [0.5]]))
    assert merge_similar(known)[2][0].item() == 0.25
    # Its first eviction sets it, whenever that comes.
    later = dataclasses.replace(evict([(20, 6), (20, 6)], heads=1), state=first)
    fresh = dataclasses.replace(later, state=None)
    assert merge_similar(later)[2][0] == merge_similar(fresh)[2][0]


def test_nothing_evicted_changes_nothing():
    eviction = evict([(12, 12), (9, 9)], heads=1, state=torch.tensor([[0.1], [0.2]]))
    keys, values, state = merge_similar(eviction)
    assert torch.equal(without_holes(keys, eviction), kept_entries(eviction.keys, eviction))
    assert torch.equal(without_holes(values, eviction), kept_entries(eviction.values, eviction))
    assert state is eviction.state


@pytest.mark.parametrize("merge", [merge_similar, spread_values])
def test_heads_that_keep_nothing_lose_everything(merge):
    nothing = evict([(12, 0)])
    keys, values, state = merge(nothing)
    assert keys.shape == (1, 2, 0, 8) and values.shape == (1, 2, 0, 5) and state is None
    # Head 1 keeps one entry fewer than head 0: none.
    eviction = evict([(12, 1)])
    keys, values, state = merge(eviction)
    assert keys[:, 0].isfinite().all() and values[:, 0].isfinite().all()
    assert state is None or (state[:, 0].isfinite().all() and state[:, 1].isnan().all())


@pytest.mark.parametrize("bytes_per_tile", [1, 4000])
def test_tiles_change_nothing(bytes_per_tile, monkeypatch):
    eviction = evict([(60, 12), (45, 20)], heads=2)
    merged, spread_out = merge_similar(eviction), spread_values(eviction)
    monkeypatch.setattr(similar, "TILE_BYTES", bytes_per_tile)
    monkeypatch.setattr(spread, "TILE_BYTES", bytes_per_tile)
    for whole, tiled in (
        (merged, merge_similar(eviction)),
        (spread_out, spread_values(eviction)),
    ):
        for a, b in zip(whole[:2], tiled[:2], strict=True):
            torch.testing.assert_close(
                without_holes(a, eviction), without_holes(b, eviction), **CLOSE
            )


def test_options_reach_the_merging():
    eviction = evict([(40, 12)])
    official = parse("d2o_official").stages().merge(eviction)
    expected = merge_similar(eviction, beta=0.5, weights="official", decide="head_mean")
    assert torch.equal(official[0], expected[0])
    by_values = parse("d2o:merge=average,similarity=values").stages().merge(eviction)
    assert torch.equal(by_values[1], merge_similar(eviction, on="values", weights="average")[1])
    assert parse("d2o:merge=none").stages().merge is None
    cam = parse("cam:targets=3,newest=0,deterministic=yes").stages().merge(eviction)
    assert torch.equal(cam[1], spread_values(eviction, targets=3, deterministic=True)[1])


def test_merging_is_composed_with_a_method_that_evicts():
    assert parse("knorm + merge:rule=d2o").stages().merge.all is merge_similar
    assert parse("knorm + merge:rule=cam").stages().merge.all is spread_values
    assert parse("knorm + cam").stages().needs.get(ColumnSums) is not None
    with pytest.raises(IllegalComposition, match="compose it with a method that does"):
        parse("merge").stages()
    with pytest.raises(IllegalComposition, match="merge stage"):
        parse("d2o + merge")


@pytest.mark.parametrize(
    "spec", ["d2o:beta=1.5", "d2o:recent=-1", "d2o:sinks=-1", "cam:targets=0", "cam:newest=-1"]
)
def test_values_that_cannot_work_are_refused(spec):
    with pytest.raises(KvfoldError):
        parse(spec)
