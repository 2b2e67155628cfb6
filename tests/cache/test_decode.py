# SPDX-License-Identifier: Apache-2.0
"""One token comes and one entry of each head goes: nothing is moved, and nothing else changes."""

import dataclasses
import itertools

import pytest
import torch

import kvfold
from kvfold.cache import decode
from kvfold.cache import layer as layer_module
from kvfold.cache.waiting import Waiting
from kvfold.kernels.gather import take
from kvfold.kernels.single_query import (
    FEW,
    attend_beside,
    attend_single,
    attend_with_row,
    mean_of_heads,
)
from kvfold.methods.stages.merge.base import Eviction, Leaving
from kvfold.methods.stages.merge.most_similar import merge_one, merge_similar
from kvfold.store.dense import DenseStore
from tests.helpers.budgets import HOLDING
from tests.helpers.models import build

SCALE = 0.4


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- picking entries ------------------------------------------------------------------------

LAYOUTS = {
    "as it is": lambda x: x.contiguous(),
    "with room behind": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], 2)[:, :, :7],
    "as models hand it out": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "numbers apart": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
    "one for all heads": lambda x: x[:, :1].expand(-1, 3, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_entries_are_picked_whatever_their_strides(layout):
    entries = LAYOUTS[layout](noise(2, 3, 7, 4))
    slots = torch.randint(-1, 7, (2, 3, 9), generator=torch.Generator().manual_seed(1))
    got = take(entries, slots)
    assert got.shape == (2, 3, 9, 4)
    for b, h, k in itertools.product(range(2), range(3), range(9)):
        if slots[b, h, k] >= 0:
            assert torch.equal(got[b, h, k], entries[b, h, slots[b, h, k]])
    got.zero_()  # a copy
    assert entries.abs().min() > 0


def test_holes_may_be_picked_out_of_nothing():
    assert take(torch.zeros(1, 2, 0, 4), torch.full((1, 2, 3), -1)).shape == (1, 2, 3, 4)


# --- one row of attention -------------------------------------------------------------------


def naive_row(query, key, value, seen, softcap, sinks):
    """Output and weights, one query head at a time; `seen [B, Hq, T]` adds to the logits."""
    out, weights = query.new_zeros(*query.shape[:2], value.shape[-1]), []
    groups = query.shape[1] // key.shape[1]
    for b, h in itertools.product(range(query.shape[0]), range(query.shape[1])):
        logits = torch.stack([SCALE * (query[b, h, 0] * k).sum() for k in key[b, h // groups]])
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        powers = (logits + seen[b, h]).exp()
        total = powers.sum() + (sinks[h].exp() if sinks is not None else 0)
        weights.append(powers / total)
        out[b, h] = sum(w * v for w, v in zip(weights[-1], value[b, h // groups], strict=True))
    return out, torch.stack(weights).view(*query.shape[:2], -1)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kind", ["none", "per row", "per head", "per query head"])
def test_a_row_is_that_of_plain_attention(groups, softcap, with_sinks, kind):
    batch, heads, stored = 2, 3, 11
    query = noise(batch, heads * groups, 1, 6, seed=1)
    key, value = noise(batch, heads, stored, 6, seed=2), noise(batch, heads, stored, 5, seed=3)
    sinks = noise(heads * groups, seed=4) if with_sinks else None
    by = {"per row": (1, 1), "per head": (heads, 1)}.get(kind, (heads, groups))
    hidden = noise(batch, *by, stored, seed=5) > 0.5
    hidden[..., 3] = False  # something is always seen
    added = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, -torch.inf)
    mask = None if kind == "none" else added
    seen = torch.zeros_like(added) if mask is None else mask
    seen = seen.expand(batch, heads, groups, stored).flatten(1, 2)
    out, row = attend_with_row(query, key, value, mask, scale=SCALE, softcap=softcap, sinks=sinks)
    expected, weights = naive_row(query, key, value, seen, softcap, sinks)
    torch.testing.assert_close(out[:, :, 0], expected)
    torch.testing.assert_close(row[:, :, 0], weights)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("with_holes", [False, True])
def test_beside_a_row_keys_are_multiplied_with_another_one(groups, with_sinks, with_holes):
    query, key, value = noise(2, 3 * groups, 1, 6, seed=1), noise(2, 3, 11, 6), noise(2, 3, 11, 5)
    other, sinks = noise(2, 3, 1, 6, seed=2), noise(3 * groups, seed=4) if with_sinks else None
    hidden = torch.zeros(2, 3, 1, 11, dtype=query.dtype)
    hidden[:, 1, :, 4] = -torch.inf if with_holes else 0
    expected = attend_with_row(query, key, value, hidden, scale=SCALE, sinks=sinks)
    out, row, products = attend_beside(
        query, key, value, hidden if with_holes else None, other, scale=SCALE, sinks=sinks
    )
    torch.testing.assert_close((out, row), expected)
    naive = (key * other).sum(-1) + hidden[:, :, 0]
    torch.testing.assert_close(products, naive)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [1, 2, FEW, 2 * FEW])
def test_a_single_query_attends_to_everything(groups, dtype):
    query = noise(2, 3 * groups, 1, 6, seed=1)
    key, value = noise(2, 3, 11, 6, seed=2), noise(2, 3, 11, 5, seed=3)
    nothing = torch.zeros(2, 3 * groups, 11, dtype=query.dtype)
    expected, _ = naive_row(query, key, value, nothing, None, None)
    got = attend_single(query.to(dtype), key.to(dtype), value.to(dtype), SCALE)
    torch.testing.assert_close(got[:, :, 0], expected.to(dtype))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_means_over_heads_are_no_part_of_the_row(groups):
    """Also where each head is a group of its own: sums are added up in them."""
    row = noise(2, 6, 1, 7)
    before = row.clone()
    mean = mean_of_heads(row, groups)
    torch.testing.assert_close(mean, row[:, :, 0].unflatten(1, (groups, -1)).mean(2))
    mean.add_(1)
    assert torch.equal(row, before)


# --- merging one entry ----------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["softmax", "average", "official"])
@pytest.mark.parametrize("on", ["keys", "values"])
@pytest.mark.parametrize("decide", ["head", "head_mean"])
def test_one_entry_is_merged_as_in_an_eviction(weights, on, decide):
    options = {"weights": weights, "on": on, "decide": decide, "beta": 0.3}
    batch, heads, stored = 2, 4, 12
    keys, values = noise(batch, heads, stored, 5).float(), noise(batch, heads, stored, 6, seed=1)
    positions = torch.arange(stored).repeat(batch, heads, 1)
    positions[1, :, 0] = positions[0, :, 4] = -1  # padding, and an entry that is gone
    state = None
    merged = 0
    for step in range(20):
        if step == 3:
            state[1, 2] = torch.nan  # as if this head had not evicted yet
        slot = torch.randint(5, stored, (batch, heads, 1), generator=torch.manual_seed(step))
        stay = [
            [s for s in range(stored) if positions[b, h, s] >= 0 and s != slot[b, h, 0]]
            for b, h in itertools.product(range(batch), range(heads))
        ]
        slots = torch.tensor(stay).view(batch, heads, -1)
        kept_keys, kept_values, expected = merge_similar(
            Eviction(keys, values, positions, slots, state=state), **options
        )
        hidden = torch.zeros(positions.shape).masked_fill(positions < 0, -torch.inf)
        hidden.scatter_(2, slot, -torch.inf)
        leaving = Leaving(keys, values, hidden, slot, state)
        (change,) = merge_one([leaving], **options)
        compared = keys if on == "keys" else values
        norms, products = compared.norm(dim=-1), (compared @ take(compared, slot).mT)[..., 0]
        for known in ({"norms": norms}, {"norms": norms, "products": products.float()}):
            (given,) = merge_one([dataclasses.replace(leaving, **known)], **options)
            for name in ("slot", "keys", "values", "state"):
                found, computed = getattr(given, name), getattr(change, name)
                # Similarities are float32, whatever is weighed by them.
                torch.testing.assert_close(found, computed, rtol=1e-6, atol=1e-6)
            changed = given.keys if on == "keys" else given.values
            torch.testing.assert_close(given.norms, changed.norm(dim=-1).float())
        state = change.state
        torch.testing.assert_close(state, expected)
        merged += int((take(keys, change.slot) != change.keys).any(-1).sum())
        keys, values = keys.clone(), values.clone()
        for rows, new in ((keys, change.keys), (values, change.values)):
            rows.scatter_(2, change.slot[..., None].expand_as(new), new)
        torch.testing.assert_close(take(keys, slots), kept_keys)
        # Shares are of float32 similarities even of float64 values.
        torch.testing.assert_close(take(values, slots), kept_values, rtol=0, atol=1e-6)
    assert 0 < merged < 20 * batch * heads


@pytest.mark.parametrize("decide", ["head", "head_mean"])
def test_entries_of_several_layers_are_merged_as_those_of_each(decide):
    """Of other lengths; the first layers have no thresholds yet, or none of one head."""
    states = [None, torch.tensor([[0.3, torch.nan]] * 3), torch.full((3, 2), 0.1)]
    layers = []
    for seed, (stored, state) in enumerate(zip((7, 12, 7), states, strict=True)):
        keys, values = noise(3, 2, stored, 5, seed=seed).float(), noise(3, 2, stored, 5).float()
        slot = torch.tensor([[[1], [seed]]] * 3)
        hidden = torch.zeros(3, 2, stored).scatter_(2, slot, -torch.inf)
        layers.append(Leaving(keys, values, hidden, slot, state))
    alone = [change for layer in layers for change in merge_one([layer], decide=decide)]
    for got, expected in zip(merge_one(layers, decide=decide), alone, strict=True):
        assert torch.equal(got.slot, expected.slot)
        for name in ("keys", "values", "state"):
            torch.testing.assert_close(getattr(got, name), getattr(expected, name))


SLOT = torch.tensor([[[0], [3], [7]], [[1], [1], [2]]])
NORMED = {
    "an entry comes": lambda store: store.append(noise(2, 3, 1, 4), noise(2, 3, 1, 5), 8),
    "entries come": lambda store: store.append(noise(2, 3, 30, 4), noise(2, 3, 30, 5), 8),
    "one is changed": lambda store: store.change(SLOT, noise(2, 3, 1, 4), noise(2, 3, 1, 5)),
    "one of a known norm is changed": lambda store: store.change(
        SLOT, noise(2, 3, 1, 4), noise(2, 3, 1, 5), noise(2, 3, 1, 4).norm(dim=-1).float()
    ),
    "one leaves": lambda store: store.drop(torch.full((2, 3, 1), 4)),
    "some stay": lambda store: store.keep(torch.tensor([1, 3, 6]).expand(2, 3, 3)),
    "all are replaced": lambda store: store.replace(noise(2, 3, 8, 4), noise(2, 3, 8, 5)),
    "the last go": lambda store: store.crop(3),
    "rows are picked": lambda store: store.index(lambda x: x[[1, 1, 0]]),
}


@pytest.mark.parametrize("what", NORMED)
def test_norms_are_those_of_what_is_stored(what):
    store = DenseStore(noise(2, 3, 8, 4, seed=1), noise(2, 3, 8, 5, seed=2))
    before = sum(store.nbytes(set()))

    def newest(one):
        return one.keys[:, :, -1:].norm(dim=-1).float()

    assert store.norms("keys", newest(store)).shape == (2, 3, 8)
    assert sum(store.nbytes(set())) == before + 4 * 2 * 3 * (8 + 12)
    NORMED[what](store)
    for one in (store, store.fork()):
        torch.testing.assert_close(one.norms("keys", newest(one)), one.keys.norm(dim=-1).float())


# --- what is gone but still there -----------------------------------------------------------


def test_what_leaves_keeps_its_place_and_counts_as_slack():
    keys, values = noise(2, 3, 8, 4).float(), noise(2, 3, 8, 4, seed=1).float()
    store = DenseStore(keys, values)
    whole = sum(store.nbytes(set()))
    store.keep(torch.arange(8).expand(2, 3, 8))
    before = store.view()
    store.drop(SLOT)
    assert (before >= 0).all()
    assert torch.equal(store.positions.gather(2, SLOT), torch.full_like(SLOT, -1))
    assert (store.positions >= 0).sum(-1).eq(7).all()
    kv, positions, slack = store.nbytes(set())
    assert kv == 2 * 3 * 7 * 4 * 4 * 2
    # Where each came from, and what is hidden.
    assert kv + slack + positions == whole + 2 * 4 * 2 * 3 * (8 + 12)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("lengths", [(90,), (90, 71, 40)], ids=["alone", "padded"])
@pytest.mark.parametrize("spec", HOLDING)
def test_long_decoding_keeps_what_evicting_with_a_copy_keeps(spec, lengths, monkeypatch):
    """150 tokens: what is gone is left out twice on the way; then a turn, and a question."""
    model = build("llama", dtype=torch.float64)
    ids = torch.randint(5, 190, (len(lengths), 90), generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[0] * (90 - n) + [1] * n for n in lengths])
    later = torch.randint(5, 190, (len(lengths), 162), generator=torch.Generator().manual_seed(4))

    def run():
        cache = kvfold.CompressedCache(model, spec, 0.4)
        seen, logits = mask, []

        def forward(new):
            nonlocal seen
            seen = torch.cat([seen, torch.ones_like(new)], 1) if cache.get_seq_length() else mask
            places = (seen.cumsum(-1) - 1).clamp(min=0)[:, -new.shape[1] :]
            out = model(new, attention_mask=seen, position_ids=places, past_key_values=cache)
            logits.append(out.logits[:, -1])

        forward(ids)
        for token in later[:, :150].split(1, 1):
            forward(token)
        held = cache.stats(), [layer.store.dead for layer in cache.states]
        forward(later[:, 150:160])
        for token in later[:, 160:].split(1, 1):
            forward(token)
        return torch.stack(logits), held, cache

    logits, (held, dead), cache = run()
    stages = kvfold.parse(spec).stages()
    assert all(dead) == (stages.merge is None or stages.merge_one is not None)
    monkeypatch.setattr(layer_module, "evicts_one", lambda *_: False)
    expected, (expected_held, _), copied = run()
    assert held.kept == expected_held.kept and held.kv_bytes == expected_held.kv_bytes
    for layer in range(len(cache.states)):
        both = zip(cache.positions(layer), copied.positions(layer), strict=True)
        assert all(torch.equal(a, b) for rows in both for a, b in zip(*rows, strict=True))
    # Similarities are float32, and what is merged by them is merged again.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def columns(cache):
    """Those that are kept, by layer, row and head."""
    return [
        [[head.tolist() for head in row] for row in cache.positions(layer)]
        for layer in range(len(cache.states))
    ]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("expected", [None, 0], ids=["nothing", "what never leaves"])
def test_what_is_foreseen_changes_nothing(expected, monkeypatch):
    """Whether products come with attention, are made afterwards, or came for another entry."""
    model, hits = build("llama", dtype=torch.float32), []
    ids = torch.randint(5, 190, (1, 130), generator=torch.Generator().manual_seed(5))
    known = decode._products

    def foreseen(*args):
        found = known(*args)
        hits.extend(each is not None for each in found)
        return found

    def run():
        cache = kvfold.CompressedCache(model, "d2o", 0.6)
        model(ids[:, :90], past_key_values=cache)
        logits = [model(i, past_key_values=cache).logits for i in ids[:, 90:].split(1, 1)]
        return torch.cat(logits, 1), cache

    monkeypatch.setattr(decode, "_products", foreseen)
    logits, cache = run()
    assert any(hits) and not all(hits)
    hits.clear()
    monkeypatch.setattr(layer_module, "predicted_slot", lambda *_: expected)
    other_logits, other = run()
    assert not any(hits)
    torch.testing.assert_close(logits, other_logits, rtol=0, atol=1e-5)
    assert columns(cache) == columns(other)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("layers_waiting", [4, 2, 1])
@pytest.mark.parametrize("spec", ["tova", "h2o", "roco", "d2o", "local_window"])
def test_layers_let_go_of_the_same_together_and_one_by_one(spec, layers_waiting, monkeypatch):
    model, sizes = build("llama", dtype=torch.float64), []
    kvfold.CompressedCache(model, spec, 0.35)  # a model's first cache is tried out
    together = layer_module.evict_one
    ids = torch.randint(5, 190, (2, 130), generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(Waiting, "is_too_much", lambda self: len(self.evicting) >= layers_waiting)
    monkeypatch.setattr(layer_module, "evict_one", lambda x: sizes.append(len(x)) or together(x))

    def run():
        cache = kvfold.CompressedCache(model, spec, 0.35)
        model(ids[:, :90], past_key_values=cache)
        for token in ids[:, 90:].split(1, 1):
            model(token, past_key_values=cache)
        assert not cache.states[0].waiting.evicting
        return columns(cache)

    kept = run()
    assert sizes == [layers_waiting] * (40 * 4 // layers_waiting)
    monkeypatch.setattr(layer_module, "evicts_one", lambda *_: False)
    assert run() == kept


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("spec", ["h2o:recent=0.9", "d2o:recent=0.9", "streaming_llm_original"])
def test_a_turn_of_one_token_that_evicts_nothing_leaves_no_gaps_among_the_recent(spec, monkeypatch):
    """It raises the capacity, so that what is recent reaches over what has left before."""
    model = build("llama", dtype=torch.float64)
    ids = torch.randint(5, 190, (1, 90), generator=torch.Generator().manual_seed(7))

    def run():
        cache = kvfold.CompressedCache(model, spec, 0.5)
        model(ids[:, :30], past_key_values=cache)
        for token in ids[:, 30:42].split(1, 1):
            model(token, past_key_values=cache)
        with cache.reading(until=43):
            model(ids[:, 42:43], past_key_values=cache)
        dead = [layer.store.dead for layer in cache.states]
        for token in ids[:, 43:].split(1, 1):
            model(token, past_key_values=cache)
        return cache, dead

    cache, dead = run()
    assert not any(dead)
    monkeypatch.setattr(layer_module, "evicts_one", lambda *_: False)
    copied, _ = run()
    for layer in range(len(cache.states)):
        both = zip(cache.positions(layer), copied.positions(layer), strict=True)
        assert all(torch.equal(a, b) for rows in both for a, b in zip(*rows, strict=True))
