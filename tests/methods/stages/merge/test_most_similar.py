# SPDX-License-Identifier: Apache-2.0
"""Merging what is evicted against plain loops over rows, heads and entries, in float64."""

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold import IllegalComposition, KvfoldError, parse
from kvfold.methods.stages.merge import most_similar as similar
from kvfold.methods.stages.merge import value_spread as spread
from kvfold.methods.stages.merge.base import Eviction
from kvfold.methods.stages.merge.most_similar import evicted_slots, merge_similar
from kvfold.methods.stages.merge.value_spread import spread_values

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
HEADS = pytest.mark.parametrize("heads", [1, 2, 8])
# (tokens stored, entries kept) of each row: alone; full, padded, nearly everything kept.
ROWS = pytest.mark.parametrize("rows", [[(40, 12)], [(40, 12), (25, 7), (31, 30)]])
SEEDS = st.integers(0, 10_000)


def evict(rows, heads=2, seed=0, width=8, dtype=torch.float32, **options):
    """Left-padded rows with loud nonsense as padding; head h keeps h mod 2 fewer."""
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, stored, most = len(rows), max(r[0] for r in rows), max(r[1] for r in rows)
    positions = torch.full((batch, heads, stored), -1)
    slots = torch.full((batch, heads, most), -1)
    for b, (tokens, kept) in enumerate(rows):
        for h in range(heads):
            known = sorted(rng.sample(range(3 * tokens), tokens))
            positions[b, h, stored - tokens :] = torch.tensor(known)
            count = max(0, kept - h % 2)
            chosen = sorted(rng.sample(range(stored - tokens, stored), count))
            slots[b, h, most - count :] = torch.tensor(chosen, dtype=torch.long)
    padding = (positions < 0)[..., None]
    keys = torch.randn(batch, heads, stored, width, generator=noise).masked_fill(padding, 50.0)
    values = torch.randn(batch, heads, stored, width - 3, generator=noise).masked_fill(padding, 9e9)
    sums = torch.rand(batch, heads, stored, generator=noise).masked_fill(padding[..., 0], 7.0)
    keys, values = keys.to(dtype), values.to(dtype)
    return Eviction(keys, values, positions, slots, sums, **options)


def each_head(eviction):
    """Row, head, kept slots and evicted slots of every head."""
    for b, h in torch.cartesian_prod(*(torch.arange(n) for n in eviction.slots.shape[:2])).tolist():
        kept = [s for s in eviction.slots[b, h].tolist() if s >= 0]
        real = [s for s, p in enumerate(eviction.positions[b, h].tolist()) if p >= 0]
        yield b, h, kept, [s for s in real if s not in kept]


def some_rows(eviction, order):
    """The rows of a batch in another order, or some of them."""
    parts = {f.name: getattr(eviction, f.name) for f in dataclasses.fields(eviction)}
    return Eviction(**{k: v[order] if torch.is_tensor(v) else v for k, v in parts.items()})


def alone(eviction, row):
    """One row without its padding and holes, as far as its heads allow."""
    one = some_rows(eviction, [row])
    padding = int((one.positions < 0).sum(-1).min())
    holes = int((one.slots < 0).sum(-1).min())
    slots = one.slots[..., holes:]
    return dataclasses.replace(
        one,
        keys=one.keys[:, :, padding:],
        values=one.values[:, :, padding:],
        positions=one.positions[..., padding:],
        slots=torch.where(slots < 0, -1, slots - padding),
        column_sums=one.column_sums[..., padding:],
    )


def kept_entries(entries, eviction):
    """What an eviction keeps `[B, H, K, D]` as it was, 0 in holes."""
    holes = (eviction.slots < 0)[..., None]
    index = eviction.slots.clamp(min=0)[..., None].expand(-1, -1, -1, entries.shape[-1])
    return entries.gather(2, index).masked_fill(holes, 0.0)


def without_holes(entries, eviction):
    return entries.masked_fill((eviction.slots < 0)[..., None], 0.0)


# --- which entries go --------------------------------------------------------------------------


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


# --- D2O ---------------------------------------------------------------------------------------


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


def assert_rows_are_their_own(eviction, merge):
    batch = merge(eviction)
    turned = merge(some_rows(eviction, [2, 0, 3, 1]))
    for row in range(4):
        one = alone(eviction, row)
        single = merge(one)
        for part in (0, 1):
            whole = without_holes(batch[part], eviction)
            torch.testing.assert_close(
                without_holes(turned[part], some_rows(eviction, [2, 0, 3, 1]))[
                    [2, 0, 3, 1].index(row)
                ],
                whole[row],
                **CLOSE,
            )
            width = one.slots.shape[-1]
            torch.testing.assert_close(
                without_holes(single[part], one)[0], whole[row, :, -width:], **CLOSE
            )
        if batch[2] is not None:
            after = batch[2][row]
            if single[2] is None:
                assert after.isnan().all()
            else:
                torch.testing.assert_close(single[2][0], after, equal_nan=True)


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


# --- CaM ---------------------------------------------------------------------------------------


def naive_cam(eviction, targets=32, newest=0, merged=None):
    """Kept values and the chance p of each evicted entry `(row, head, slot)`.

    `merged` says of each whether it is spread; without it the expectation is.
    """
    values = eviction.values.double()
    out, chances = kept_entries(values, eviction), {}
    for b, h, kept, gone in each_head(eviction):
        holes = len(eviction.slots[b, h]) - len(kept)
        place, received = eviction.positions[b, h].tolist(), eviction.column_sums[b, h].tolist()
        for slot in gone[-newest:] if newest else gone:
            after = [j for j, k in enumerate(kept) if place[k] > place[slot]][:targets]
            if not after:
                continue
            mean = sum(received[kept[j]] for j in after) / len(after)
            p = 0.0 if received[slot] == 0 else 1.0
            if mean > 0:
                p = min(1.0, received[slot] / mean)
            chances[b, h, slot] = p
            share = p if merged is None else float(merged[b, h, slot])
            for j in after:
                out[b, h, holes + j] += share * values[b, h, slot] / len(after)
    return out, chances


@HEADS
@ROWS
@pytest.mark.parametrize("targets", [1, 4, 32])
@pytest.mark.parametrize("newest", [0, 1, 3])
def test_spreading_is_the_loop_over_evicted_entries(rows, heads, targets, newest):
    eviction = evict(rows, heads)
    keys, values, state = spread_values(
        eviction, targets=targets, newest=newest, deterministic=True
    )
    expected, _ = naive_cam(eviction, targets, newest)
    assert state is None
    assert torch.equal(without_holes(keys, eviction), kept_entries(eviction.keys, eviction))
    torch.testing.assert_close(without_holes(values, eviction).double(), expected, **CLOSE)


@HEADS
@pytest.mark.parametrize("targets", [1, 4, 32])
def test_one_value_that_leaves_while_decoding(heads, targets):
    eviction = evict([(20, 19), (14, 13)], heads)
    eviction = dataclasses.replace(eviction, slots=eviction.slots[:, :1].expand(-1, heads, -1))
    _, values, _ = spread_values(eviction, targets=targets, deterministic=True)
    expected, _ = naive_cam(eviction, targets)
    torch.testing.assert_close(without_holes(values, eviction).double(), expected, **CLOSE)


@pytest.mark.parametrize("place", range(6))
def test_every_place_of_the_one_that_leaves(place):
    eviction = evict([(6, 6)], heads=1)
    slots = torch.tensor([[[s for s in range(6) if s != place]]])
    eviction = dataclasses.replace(eviction, slots=slots)
    _, values, _ = spread_values(eviction, targets=3, deterministic=True)
    torch.testing.assert_close(values.double(), naive_cam(eviction, 3)[0], **CLOSE)
    gain = (values - kept_entries(eviction.values, eviction)).sum(2)
    chance = naive_cam(eviction, 3)[1].get((0, 0, place), 0.0)
    torch.testing.assert_close(gain, chance * eviction.values[:, :, place], rtol=1e-4, atol=1e-5)


def received(sums):
    """The first entry leaves; all received `sums`; a value of 1 leaves, zeros stay."""
    count = len(sums)
    values = torch.zeros(1, 1, count, 1)
    values[0, 0, 0] = 1.0
    return Eviction(
        torch.randn(1, 1, count, 4),
        values,
        torch.arange(count).view(1, 1, -1),
        torch.arange(1, count).view(1, 1, -1),
        torch.tensor(sums).view(1, 1, -1),
    )


def test_cam_golden_vector():
    _, values, _ = spread_values(
        received([0.2, 0.1, 0.3, 0.5, 0.3, 9.0]), targets=4, deterministic=True
    )
    assert values.flatten().tolist() == pytest.approx([1 / 6] * 4 + [0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("sums", "chance"),
    [
        ([0.0, 0.0, 0.0], 0.0),
        ([0.1, 0.0, 0.0], 1.0),
        ([5.0, 1.0, 1.0], 1.0),
        ([0.0, 1.0, 1.0], 0.0),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_chances_at_their_ends_are_certain(sums, chance, deterministic):
    _, values, _ = spread_values(received(sums), deterministic=deterministic)
    assert values.flatten().tolist() == pytest.approx([chance / 2] * 2)


@given(SEEDS, st.integers(2, 30), st.data())
@settings(max_examples=30, deadline=None)
def test_each_draw_spreads_an_entry_wholly_or_not(seed, tokens, data):
    kept = data.draw(st.integers(1, tokens - 1))
    eviction = evict([(tokens, kept)], heads=2, seed=seed)
    eviction = dataclasses.replace(eviction, seed=seed)
    _, values, _ = spread_values(eviction, targets=4)
    chances = naive_cam(eviction, 4)[1]
    merged = {}
    for (b, h, slot), p in chances.items():
        place = eviction.positions[b, h, slot].view(1, 1, 1).expand(1, 2, 1)
        merged[b, h, slot] = spread._uniform(seed, place)[0, h, 0].item() < p
    expected, _ = naive_cam(eviction, 4, merged=merged)
    torch.testing.assert_close(without_holes(values, eviction).double(), expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [5, 29])
def test_the_mean_of_many_draws_is_the_deterministic_result(kept):
    eviction = evict([(30, kept)], heads=1)
    eviction.column_sums[eviction.column_sums > 0.5] /= 4  # chances far from 0 and 1
    draws, total = 1500, 0.0
    for seed in range(draws):
        total = total + spread_values(dataclasses.replace(eviction, seed=seed), targets=4)[1]
    exact = spread_values(eviction, targets=4, deterministic=True)[1]
    torch.testing.assert_close(total / draws, exact, rtol=0.0, atol=0.06)


def test_draws_are_fixed_by_seed_head_and_position_and_uniform():
    places = torch.arange(4000).expand(1, 8, -1)
    drawn = spread._uniform(3, places)
    assert torch.equal(drawn, spread._uniform(3, places))
    assert torch.equal(drawn[:, :, 1000:], spread._uniform(3, places[:, :, 1000:]))
    assert drawn.min() >= 0 and drawn.max() < 1
    many = torch.cat([spread._uniform(seed, places[:, :2, :50]) for seed in range(300)]).flatten(1)
    for x in (drawn.flatten(), many.flatten()):
        even = torch.linspace(0, 1, x.numel(), dtype=x.dtype)
        assert (x.sort().values - even).abs().max() < 1.95 / math.sqrt(x.numel())
    # Neither heads, nor positions, nor seeds in a row follow each other.
    for table in (drawn[0], drawn[0].T[:8], many.T[:8]):
        correlation = table.corrcoef() - torch.eye(8, dtype=table.dtype)
        assert correlation.abs().max() < 5 / math.sqrt(table.shape[1])


def test_a_row_spreads_as_it_does_alone_and_in_any_order():
    eviction = evict([(40, 12), (25, 7), (31, 30), (10, 10)], heads=3, seed=1)
    eviction = dataclasses.replace(eviction, seed=5)
    for options in ({}, {"newest": 1}, {"deterministic": True}):
        assert_rows_are_their_own(eviction, lambda e, o=options: spread_values(e, **o))


@given(SEEDS, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_what_gains_nothing_is_unchanged_bit_for_bit(seed, dtype, one):
    eviction = evict([(30, 29 if one else 12)], heads=1, seed=seed, dtype=dtype)
    gone = [slot for *_, evicted in each_head(eviction) for slot in evicted]
    eviction.column_sums[:, :, gone[::2]] = 0.0
    _, values, _ = spread_values(eviction, targets=2, deterministic=True)
    was = kept_entries(eviction.values, eviction)
    still = (naive_cam(eviction, 2)[0] == was.double()).all(-1)
    assert torch.equal(values[still], was[still])
    eviction.column_sums[:, :, gone] = 0.0
    assert torch.equal(spread_values(eviction, targets=2)[1], was)


# --- the methods that merge --------------------------------------------------------------------


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
    assert parse("knorm + merge:rule=d2o").stages().merge is merge_similar
    assert parse("knorm + merge:rule=cam").stages().merge is spread_values
    assert parse("knorm + cam").stages().needs.column_sums
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
