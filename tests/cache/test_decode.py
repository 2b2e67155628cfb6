# SPDX-License-Identifier: Apache-2.0
"""One token comes and one entry of each head goes: nothing is moved, and nothing else changes."""

import dataclasses
from typing import ClassVar

import pytest
import torch

import kvfold
from kvfold.cache import decode
from kvfold.cache import layer as layer_module
from kvfold.errors import KvfoldError
from kvfold.observers.base import Need, Needs, Observer
from kvfold.store.dense import DenseStore
from tests.helpers.budgets import HOLDING
from tests.helpers.models import build


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SLOT = torch.tensor([[[0], [3], [7]], [[1], [1], [2]]])


def test_what_leaves_keeps_its_place_and_counts_as_slack():
    keys, values = noise(2, 3, 8, 4).float(), noise(2, 3, 8, 4, seed=1).float()
    store = DenseStore(keys, values)
    whole = sum(store.nbytes(set()))
    store.keep(torch.arange(8).expand(2, 3, 8))
    before = store.view()
    store.drop(SLOT)
    assert (before >= 0).all()
    assert torch.equal(store.columns.gather(2, SLOT), torch.full_like(SLOT, -1))
    assert (store.columns >= 0).sum(-1).eq(7).all()
    kv, positions, slack = store.nbytes(set())
    assert kv == 2 * 3 * 7 * 4 * 4 * 2
    # Where each came from, and what is hidden.
    assert kv + slack + positions == whole + 2 * 4 * 2 * 3 * (8 + 12)


@pytest.mark.cases(1)
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
    assert all(dead) == (stages.merge is None or stages.merge.one is not None)
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


@pytest.mark.cases(1)
@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])  # gpt_oss: eager, always with a mask
@pytest.mark.parametrize("expected", [None, 0], ids=["nothing", "what never leaves"])
def test_what_is_foreseen_changes_nothing(expected, family, monkeypatch):
    """Whether products come with attention, are made afterwards, or came for another entry."""
    model, hits = build(family, dtype=torch.float32), []
    ids = torch.randint(5, 190, (1, 130), generator=torch.Generator().manual_seed(5))
    known = decode._merge_inputs

    def foreseen(*args):
        found = known(*args)
        hits.extend(each.products is not None for each in found)
        return found

    def run():
        cache = kvfold.CompressedCache(model, "d2o", 0.6)
        model(ids[:, :90], past_key_values=cache)
        logits = [model(i, past_key_values=cache).logits for i in ids[:, 90:].split(1, 1)]
        return torch.cat(logits, 1), cache

    monkeypatch.setattr(decode, "_merge_inputs", foreseen)
    logits, cache = run()
    assert any(hits) and not all(hits)
    hits.clear()
    monkeypatch.setattr(layer_module, "predicted_slot", lambda *_: expected)
    other_logits, other = run()
    assert not any(hits)
    torch.testing.assert_close(logits, other_logits, rtol=0, atol=1e-5)
    assert columns(cache) == columns(other)


@pytest.mark.cases(1)
@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("layers_waiting", [4, 2, 1])
@pytest.mark.parametrize("spec", ["tova", "h2o", "roco", "d2o", "local_window"])
def test_layers_let_go_of_the_same_together_and_one_by_one(spec, layers_waiting, monkeypatch):
    model, sizes = build("llama", dtype=torch.float64), []
    kvfold.CompressedCache(model, spec, 0.35)  # a model's first cache is tried out
    together = layer_module.evict_one
    ids = torch.randint(5, 190, (2, 130), generator=torch.Generator().manual_seed(5))

    def too_much(leaving):
        return len(leaving) >= layers_waiting

    monkeypatch.setattr(layer_module, "is_too_much", too_much)
    monkeypatch.setattr(layer_module, "evict_one", lambda x: sizes.append(len(x)) or together(x))

    def run():
        cache = kvfold.CompressedCache(model, spec, 0.35)
        model(ids[:, :90], past_key_values=cache)
        for token in ids[:, 90:].split(1, 1):
            model(token, past_key_values=cache)
        assert not cache.states[0].barrier.leaving.arrived
        return columns(cache)

    kept = run()
    assert sizes == [layers_waiting] * (40 * 4 // layers_waiting)
    monkeypatch.setattr(layer_module, "evicts_one", lambda *_: False)
    assert run() == kept


@pytest.mark.cases(1)
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


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "spec",
    ["h2o", "tova", "roco", "streaming_llm", "d2o", "knorm:skip_layers=none + every:interval=1"],
)
def test_protected_tokens_that_outgrow_the_size_all_stay(spec):
    """The span is of tokens to come, and larger than what the prompt leaves."""
    model, span = build("llama", torch.float64), range(22, 40)
    cache = kvfold.CompressedCache(model, spec, 0.5, protect=[(span.start, span.stop)])
    ids = torch.arange(3, 23)[None]
    kvfold.generate(model, ids, cache=cache, max_new_tokens=30, do_sample=False)
    for layer in range(len(cache.states)):
        for head in cache.positions(layer)[0]:
            assert set(span) <= set(head.tolist())
    assert cache.stats().forced_over_budget


def test_rows_shorter_than_the_sinks_keep_what_they_keep_alone():
    model = build("llama", torch.float64)
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    options = {"max_new_tokens": 6, "do_sample": False}

    def kept(rows, mask):
        cache = kvfold.CompressedCache(model, "d2o", 0.9)
        kvfold.generate(model, rows, cache=cache, attention_mask=mask, **options)
        return [cache.positions(layer)[0] for layer in range(len(cache.states))]

    together = kept(ids, (ids > 0).long())
    for mine, alone in zip(together, kept(ids[:1, 2:], torch.ones(1, 3)), strict=True):
        assert [(head - 2).tolist() for head in mine] == [head.tolist() for head in alone]


class CountsQueries(Observer[int]):
    """An observer of a method of one's own."""

    def __init__(self):
        super().__init__()
        self.queries = 0

    def read(self, layer, call):
        self.queries += call.query.shape[2]


@dataclasses.dataclass(frozen=True)
class QueriesRead(Need[int]):
    beyond_attention: ClassVar[bool] = False

    def observer(self, fitted=None):
        return CountsQueries()


@dataclasses.dataclass(frozen=True)
class Counting(kvfold.Method):
    """A method that has the queries counted, too."""

    spec: str

    def stages(self):
        own = kvfold.parse(self.spec).stages()
        needs = Needs(*own.needs.observed, QueriesRead(), only_attention=own.needs.only_attention)
        return dataclasses.replace(own, needs=needs)


@pytest.mark.parametrize("spec", ["tova", "h2o", "d2o", "keydiff", "keydiff + every:interval=4"])
def test_an_observer_sees_every_forward_however_entries_leave(spec):
    model, ids = build("llama"), torch.arange(3, 63)[None]
    cache = kvfold.CompressedCache(model, Counting(spec), 20)
    with torch.no_grad():
        for piece in ids.split([40, *[1] * 20], 1):
            model(piece, past_key_values=cache)
    noted = [state.observers[QueriesRead].queries for state in cache.states]
    assert noted == [60] * len(cache.states)
    with pytest.raises(KvfoldError, match=r"at every step|after every 4 tokens"):
        kvfold.generate(model, ids, cache=cache, compile=True, max_new_tokens=2)
