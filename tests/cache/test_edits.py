# SPDX-License-Identifier: Apache-2.0
"""Edited caches, compared with a dense cache that is edited by hand."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import KvfoldError
from kvfold.cache.edits import dropped, holds, joined
from kvfold.cache.fork import fork
from kvfold.observers.query_moments import QueryMomentsNeed
from tests.helpers.budgets import compressed
from tests.helpers.caches import ALONE, BATCHES, bits, decode, positions, same, start
from tests.helpers.models import FAMILIES, build, continuation, prompts
from tests.helpers.operations import Operations
from tests.helpers.truth import (
    MaskedDense,
    Reader,
    rotated,
    sinks_moved_up,
    stock_cache,
    with_exact_rope,
    worst,
)

METHODS = [
    "full",
    "snapkv:window=8",
    "adakv:window=8",
    "pyramidkv:window=8",
    "knorm",
    "knorm + every:interval=4",
    "snapkv:window=8 + every:interval=4",
]
SPAN = (10, 17)
FAMILIES_WITH_ROPE = ["llama", "qwen2", "qwen3", "phi3", "glm4", "olmo2", "gpt_neox", "granite"]


@pytest.fixture(scope="module")
def model() -> Any:
    return with_exact_rope(build("llama", torch.float64))


class EditedDense(MaskedDense):
    """A dense cache, some of it hidden, whose columns are put in another order by hand."""

    def edit(self, orders: list[list[int]]) -> None:
        """Row b keeps its columns `orders[b]`, in that order; positions are those of the tokens."""
        order = torch.tensor(orders)
        seen = self.cache.get_seq_length()
        tokens = torch.ones(len(orders), seen).long() if self.mask is None else self.mask
        places = tokens.cumsum(-1) - 1
        moved = tokens.gather(1, order).cumsum(-1) - 1
        by = (moved - places.gather(1, order))[:, None]
        for index, layer in enumerate(self.cache.layers):
            at = order[:, None, :, None]
            keys, values = (
                x.gather(2, at.expand(-1, x.shape[1], -1, x.shape[3]))
                for x in (layer.keys, layer.values)
            )
            layer.keys, layer.values = rotated(keys, by), values
            hidden = self.stored[index]
            self.stored[index] = hidden.gather(2, order[:, None].expand(-1, hidden.shape[1], -1))
        if self.mask is not None:
            self.mask = self.mask.gather(1, order)


def dense_of(reader: Reader, ids: Tensor, mask: Tensor | None) -> EditedDense:
    """A dense cache that has read `ids`, and hides what the reader's cache has evicted."""
    dense = EditedDense(copy.deepcopy(reader.model), mask)
    dense(ids)
    dense.hide(reader.cache)
    return dense


def without(reader: Reader, span: tuple[int, int]) -> list[list[int]]:
    """Columns of each row that stay when tokens of a span are dropped."""
    seen = reader.cache.get_seq_length()
    mask = torch.ones(reader.cache.rows, seen) if reader.mask is None else reader.mask
    places = mask.long().cumsum(-1) - 1
    inside = (places >= span[0]) & (places < span[1]) & (mask > 0)
    return [(~row).nonzero().flatten().tolist() for row in inside]


def assert_alike(reader: Reader, dense: Reader, seed: int = 5, *, steps: int = 3) -> None:
    """The same logits of a piece, and of single tokens."""
    rows = reader.cache.rows
    with reader.cache.frozen():
        piece = continuation(rows, 5, seed)
        assert worst(reader(piece), dense(piece)) < 1e-6
        for token in continuation(rows, steps, seed + 1).split(1, 1):
            assert worst(reader(token), dense(token)) < 1e-6


@pytest.mark.cases(4)
@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("spec", METHODS)
def test_a_dropped_span_is_as_if_dropped_from_a_dense_cache(model, spec, lengths):
    ids, _ = prompts(lengths)
    reader = start(model, spec, lengths)
    dense = dense_of(reader, ids, reader.mask)
    dense.edit(without(reader, SPAN))

    reader.cache.drop(SPAN)

    if reader.mask is not None:
        reader.mask = dense.mask
    assert reader.cache.get_seq_length() == ids.shape[1] - 7
    assert_alike(reader, dense)


def test_drops_add_up(model):
    ids, _ = prompts(ALONE)
    reader = start(model, "snapkv:window=8")
    dense = dense_of(reader, ids, None)
    for span in ((3, 9), (20, 31), (0, 2)):
        dense.edit(without(reader, span))
        reader.cache.drop(span)
    assert reader.cache.get_seq_length() == 64 - 6 - 11 - 2
    assert_alike(reader, dense)


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("spec", ["full", "snapkv:window=8", "adakv:window=8"])
def test_spans_that_are_dropped_together_leave_as_one_after_the_other(model, spec, lengths):
    spans = [(10, 13), (21, 24), (18, 21)]
    together, singly = start(model, spec, lengths), start(model, spec, lengths)
    together.cache.drop(*spans)
    for span in sorted(spans, reverse=True):
        singly.cache.drop(span)
    assert positions(together.cache) == positions(singly.cache)
    known = [one.cache.phase.history.whole() for one in (together, singly)]
    assert torch.equal(*known) and together.cache.get_seq_length() == max(lengths) - 9
    for one, other in zip(together.cache.states, singly.cache.states, strict=True):
        held = one.columns() >= 0
        for mine, theirs in zip(one.stored().dense(), other.stored().dense(), strict=True):
            torch.testing.assert_close(mine[held], theirs[held], atol=1e-9, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "snapkv:window=8", "adakv:window=8"])
@pytest.mark.parametrize("to", [0, 4, 30, 64])
def test_a_moved_span_is_as_if_moved_in_a_dense_cache(model, spec, to):
    ids, _ = prompts(ALONE)
    reader = start(model, spec)
    dense = dense_of(reader, ids, None)
    rest = without(reader, SPAN)[0]
    at = rest.index(to) if to < 64 else len(rest)
    dense.edit([rest[:at] + list(range(*SPAN)) + rest[at:]])

    reader.cache.move(SPAN, to)

    assert reader.cache.get_seq_length() == 64
    history = reader.cache.phase.history.whole()
    assert history.tolist() == [
        [ids[0, i].item() for i in rest[:at]]
        + ids[0, 10:17].tolist()
        + [ids[0, i].item() for i in rest[at:]]
    ]
    assert_alike(reader, dense)


@pytest.mark.parametrize("spec", ["full", "snapkv:window=8", "adakv:window=8"])
@pytest.mark.parametrize("new", [1, 7, 12])
def test_a_replaced_span_is_read_where_it_stood(model, spec, new):
    """By hand: the tokens before, the new ones after them, then the old later entries, moved."""
    ids, _ = prompts(ALONE)
    text = continuation(1, new, 9)
    reader = start(model, spec)
    dense = dense_of(reader, ids, None)
    later = EditedDense(copy.deepcopy(model))
    later.cache = copy.deepcopy(dense.cache)
    later.stored = dict(dense.stored)
    later.edit([[*range(10), *range(17, 64)]])
    dense.edit([list(range(10))])
    dense(text)
    for index, (own, moved) in enumerate(zip(dense.cache.layers, later.cache.layers, strict=True)):
        by = torch.full((1, 1, 47), new)
        own.keys = torch.cat([own.keys, rotated(moved.keys[:, :, 10:], by)], 2)
        own.values = torch.cat([own.values, moved.values[:, :, 10:]], 2)
        before, after = dense.stored[index], later.stored[index][:, :, 10:]
        stay = torch.ones(1, before.shape[1], new, dtype=torch.bool)
        dense.stored[index] = torch.cat([before, stay, after], 2)

    reader.cache.replace(SPAN, text)

    history = reader.cache.phase.history.whole()
    assert torch.equal(history.long(), torch.cat([ids[:, :10], text, ids[:, 17:]], 1))
    assert_alike(reader, dense)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["snapkv:window=8", "adakv:window=8", "knorm + every:interval=4"])
def test_after_a_drop_an_evicting_method_holds_entries_of_the_edited_text(model, spec):
    """Those of the first layer, and those before the span in every layer, as a fresh read."""
    ids, _ = prompts(ALONE)
    reader = start(model, spec)
    before = [list(state.stored().dense()) for state in reader.cache.states]
    old = positions(reader.cache)
    reader.cache.drop(SPAN)
    fresh = Reader(model, kvfold.CompressedCache(model, "full"))
    fresh(torch.cat([ids[:, :10], ids[:, 17:]], 1))
    for index, state in enumerate(reader.cache.states):
        columns, stored = state.columns()[0], state.stored().dense()
        whole = fresh.cache.states[index].stored().dense()
        for head, kept in enumerate(columns):
            at = kept[kept >= 0]
            assert at[at < 10].tolist() == [p for p in old[index][0][head] if p < 10]
            known = at if index == 0 else at[at < 10]
            for mine, was, theirs in zip(stored, before[index], whole, strict=True):
                own = mine[0, head][kept >= 0]
                expected = theirs[0, head][known]
                torch.testing.assert_close(own[: len(known)], expected, atol=1e-6, rtol=0)
                early = was[0, head][was.shape[2] - len(old[index][0][head]) :]
                assert torch.equal(own[at < 10], early[: int((at < 10).sum())])


@pytest.mark.parametrize("family", FAMILIES_WITH_ROPE)
def test_the_first_layer_is_as_if_the_rest_had_been_read_alone(family):
    """Entries of the first layer depend on their own token only."""
    tiny = FAMILIES[family](torch.float64)
    ids, _ = prompts(ALONE)
    reader = start(tiny, "full")
    before = bits(reader.cache)
    reader.cache.drop(SPAN)
    fresh = Reader(tiny, kvfold.CompressedCache(tiny, "full"))
    fresh(torch.cat([ids[:, :10], ids[:, 17:]], 1))
    for mine, theirs in zip(bits(reader.cache)[:2], bits(fresh.cache)[:2], strict=True):
        assert worst(mine, theirs) < 1e-6 * float(theirs.abs().max())
    for was, now in zip(before, bits(reader.cache), strict=True):
        assert torch.equal(was[:, :, :10], now[:, :, :10])
    for was, now in zip(before[1::2], bits(reader.cache)[1::2], strict=True):
        assert torch.equal(was[:, :, 17:], now[:, :, 10:])


def test_a_drop_at_the_end_is_a_crop(model):
    cropped, edited = start(model, "full"), start(model, "full")
    cropped.cache.crop(-7)
    edited.cache.drop((57, 64))
    assert same(bits(cropped.cache), bits(edited.cache))
    assert worst(decode(cropped)[-1], decode(edited)[-1]) == 0


class Origins:
    """The keys of each token as they were when it came, and the position that it had then."""

    def __init__(self, cache: kvfold.CompressedCache) -> None:
        self.order = list(range(cache.get_seq_length()))  # tokens by name, in the text's order
        self.came: dict[int, int] = {}
        self.keys: dict[tuple[int, int, int], Tensor] = {}  # by layer, head and token
        self.note(cache)

    def held(self, cache: kvfold.CompressedCache) -> Iterator[tuple[tuple[int, int, int], Tensor]]:
        """Layer, head and token of each entry, and its key `[D]`."""
        for index, state in enumerate(cache.states):
            columns, (keys, _) = state.columns()[0], state.stored().dense()
            for head, slot in (columns >= 0).nonzero().tolist():
                token = self.order[columns[head, slot]]
                yield (index, head, token), keys[0, head, slot].double()

    def note(self, cache: kvfold.CompressedCache) -> None:
        """Remembers what is new."""
        for place, token in enumerate(self.order):
            self.came.setdefault(token, place)
        for name, key in self.held(cache):
            self.keys.setdefault(name, key)

    def drift(self, cache: kvfold.CompressedCache) -> float:
        """Distance to one rotation of the keys as they came, relative to their norm, over all."""
        names, now = zip(*self.held(cache), strict=True)
        place = {token: at for at, token in enumerate(self.order)}
        by = torch.tensor([place[token] - self.came[token] for _, _, token in names])
        came = torch.stack([self.keys[name] for name in names])
        once = rotated(came[None, None], by[None, None])[0, 0]
        return float((torch.stack(now) - once).norm() / once.norm())


def edited_at_random(reader: Reader, edits: int) -> Origins:
    """Drops, moves and replaces spans of 3 tokens of which something is left."""
    cache, origins = reader.cache, Origins(reader.cache)
    draw = random.Random(0)
    for number in range(edits):
        order = origins.order
        start, kind = draw.randrange(len(order) - 4), ("drop", "move", "replace")[number % 3]
        while not holds(cache, (start, start + 3)):
            start = draw.randrange(len(order) - 4)
        span, rest = (start, start + 3), order[:start] + order[start + 3 :]
        if kind == "drop":
            cache.drop(span)
            origins.order = rest
        elif kind == "move":
            to = draw.randrange(len(rest) + 1)
            cache.move(span, to if to <= start else to + 3)
            origins.order = rest[:to] + order[start : start + 3] + rest[to:]
        else:
            new = draw.randrange(1, 5)
            cache.replace(span, continuation(1, new, number))
            names = [1000 * (number + 1) + i for i in range(new)]
            origins.order = order[:start] + names + order[start + 3 :]
            origins.note(cache)
    return origins


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("spec", "dtype", "limit"),
    [
        ("full", torch.float32, 1e-5),
        ("snapkv:window=8", torch.float32, 1e-5),
        ("adakv:window=8", torch.float32, 1e-5),
        ("full", torch.bfloat16, 3e-2),  # each rounds once more
    ],
)
def test_a_hundred_edits_drift_no_further_than_rounding(spec, dtype, limit):
    """Drops, moves and replacements, compared with one rotation of the keys as they came."""
    tiny = with_exact_rope(build("llama", dtype, num_hidden_layers=2))
    budget = None if spec == "full" else 80
    reader = Reader(tiny, kvfold.CompressedCache(tiny, spec, budget))
    reader(prompts((200,))[0])
    origins = edited_at_random(reader, 100)
    assert len(origins.order) == reader.cache.get_seq_length()
    assert max(origins.order) >= 1000 and origins.drift(reader.cache) < limit


def test_an_edit_rounds_moved_keys_once_in_16_bits():
    tiny = with_exact_rope(build("llama", torch.bfloat16, num_hidden_layers=2))
    reader = Reader(tiny, kvfold.CompressedCache(tiny, "full"))
    reader(prompts((200,))[0])
    origins = Origins(reader.cache)
    spans = [(start, start + 3) for start in range(10, 190, 6)]
    reader.cache.drop(*spans)
    origins.order = [p for p in range(200) if not any(a <= p < b for a, b in spans)]
    assert 0 < origins.drift(reader.cache) < 2**-9


@pytest.mark.parametrize("spec", ["full", "snapkv:window=8", "adakv:window=8"])
def test_a_drop_costs_no_hundredth_of_reading_what_follows_again(spec):
    """Elements that are written are counted too, not only matrix products."""
    tiny = build("llama")
    ids, _ = prompts((400,))
    reader = Reader(tiny, kvfold.CompressedCache(tiny, spec, None if spec == "full" else 200))
    reader(ids)
    again = Reader(tiny, stock_cache(tiny))
    again(ids[:, :10])
    with Operations() as reading:
        again(ids[:, 17:])
    with Operations() as dropping:
        reader.cache.drop(SPAN)
    assert 0 < dropping.count <= 0.01 * reading.count


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["h2o", "tova", "d2o", "knorm + every:interval=4", "streaming_llm"]
)
def test_eviction_goes_on_after_an_edit(model, spec):
    reader = start(model, spec)
    size = len(reader.cache.positions(0)[0][0])
    reader.cache.drop((60, 64))
    assert max(len(h) for row in reader.cache.positions(0) for h in row) < size
    logits = decode(reader, 20)
    assert all(bool(step.isfinite().all()) for step in logits)
    assert reader.cache.get_seq_length() == 80
    assert max(len(h) for row in reader.cache.positions(0) for h in row) <= size + 4


def test_moved_sinks_stay_where_recent_tokens_begin(model):
    """Re-indexed sinks of StreamingLLM, beside a dense cache that moves them by hand."""
    reader = start(model, "streaming_llm")
    ids, _ = prompts(ALONE)
    dense = EditedDense(copy.deepcopy(model), None, sinks_moved_up)
    dense(ids)
    dense.hide(reader.cache)
    dense.edit(without(reader, (58, 62)))
    reader.cache.drop((58, 62))
    assert_alike(reader, dense)


@pytest.mark.parametrize("skip", [0, 4])
@pytest.mark.parametrize("spec", ["full", "snapkv:window=8", "adakv:window=8", "knorm"])
def test_joined_texts_are_as_if_read_under_a_block_diagonal_mask(model, spec, skip):
    """One dense forward of both; the second's first tokens end where the first text does."""
    ids, other = prompts(ALONE)[0], continuation(1, 50, 7)
    readers = [start(model, spec), Reader(model, compressed(model, spec))]
    readers[1](other)
    whole = Reader(model, joined(readers[0].cache, readers[1].cache, skip))

    causal = torch.ones(114, 114, dtype=torch.bool).tril()
    causal[64:, :64] = False
    places = torch.cat([torch.arange(64), torch.arange(50) + 64 - skip])
    dense = MaskedDense(copy.deepcopy(model))
    dense(torch.cat([ids, other], 1), **seeing(causal, places))
    dense.hide(whole.cache)
    for index, stored in dense.stored.items():
        gone = torch.zeros(*stored.shape[:2], skip, dtype=torch.bool)
        dense.stored[index] = torch.cat([stored[:, :, :64], gone, stored[:, :, 64:]], 2)

    question = continuation(1, 6, 3)
    after = torch.ones(6, 120, dtype=torch.bool).tril(114)
    expected = dense(question, **seeing(after, torch.arange(6) + 114 - skip))
    assert worst(whole(question), expected) < 1e-6


def seeing(allowed: Tensor, places: Tensor) -> dict[str, Tensor]:
    """Inputs of a forward whose queries see what `allowed [S, N]` says, from `places [S]`."""
    hidden = torch.zeros(allowed.shape, dtype=torch.float64)
    hidden[~allowed] = torch.finfo(torch.float64).min
    return {"attention_mask": hidden[None, None], "position_ids": places[None]}


def consecutive(keys: Tensor, gone: Tensor) -> Tensor:
    """Each head's kept keys, moved up so that none is missing between them and the newest."""
    from_end = (~gone).flip(-1).long().cumsum(-1).flip(-1)
    by = keys.shape[2] - from_end - torch.arange(keys.shape[2])
    return torch.stack(
        [rotated(keys[:, h : h + 1], by[:, h : h + 1])[:, 0] for h in range(keys.shape[1])], 1
    )


@pytest.mark.parametrize("spec", ["snapkv:window=8 + reindex", "adakv:window=8 + reindex"])
def test_kept_keys_stay_at_consecutive_positions(model, spec):
    ids, _ = prompts(ALONE)
    reader = start(model, spec)
    dense = EditedDense(copy.deepcopy(model), None, consecutive)
    dense(ids)
    dense.hide(reader.cache)
    for span in ((2, 30), (20, 31)):
        dense.edit(without(reader, span))
        reader.cache.drop(span)
    assert_alike(reader, dense)


@pytest.mark.slow
def test_what_was_protected_stays_protected(model):
    cache = kvfold.CompressedCache(
        model, "knorm + every:interval=4", 24, protect=[(5, 8), (30, 34)]
    )
    reader = Reader(model, cache)
    reader(prompts(ALONE)[0])
    cache.drop((10, 17))
    assert cache.protect == ((5, 8), (23, 27))
    cache.drop((24, 25))
    assert cache.protect == ((5, 8), (23, 26))
    cache.move((6, 7), 0)
    assert cache.protect == ((0, 1), (6, 8), (23, 26))
    decode(reader, 12)
    for heads in positions(cache):
        for kept in heads[0]:
            assert {0, 6, 7, 23, 24, 25} <= set(kept)


@pytest.mark.parametrize("spec", ["snapkv:window=8", "adakv:window=8"])
def test_what_is_read_after_an_edit_is_taken_back_and_nothing_before(model, spec):
    reader = start(model, spec)
    reader.cache.drop(SPAN)
    before = positions(reader.cache)
    decode(reader, 4)
    reader.cache.crop(-4)
    assert positions(reader.cache) == before
    with pytest.raises(KvfoldError, match="cannot take back"):
        reader.cache.crop(-1)


def test_padding_between_turns_stays_where_it_is(model):
    """A turn of 20 tokens, then one of 15 behind two columns of padding."""
    ids = continuation(2, 37)
    ids[:, 20:22] = 0
    mask = (ids > 0).long()
    reader = Reader(model, kvfold.CompressedCache(model, "full"), mask[:, :20])
    dense = EditedDense(copy.deepcopy(model), mask[:, :20])
    for each in (reader, dense):
        each(ids[:, :20])
        each(ids[:, 20:])
    dense.hide(reader.cache)
    for span in ((17, 20), (15, 19)):
        dense.edit(without(reader, span))
        reader.cache.drop(span)
        reader.mask = dense.mask
    assert_alike(reader, dense)


def test_an_edit_s_copy_shares_no_observations(model):
    reader = start(model, "expected_attention + every:interval=4")
    state = reader.cache.states[0]
    count = state.observers[QueryMomentsNeed].nbytes()
    other = dropped(reader.cache, SPAN)
    Reader(model, other)(continuation(1, 9))
    assert state.observers[QueryMomentsNeed].nbytes() == count
    assert other.states[0].observers[QueryMomentsNeed] is not state.observers[QueryMomentsNeed]


def test_a_cache_whose_last_forward_failed_is_not_edited(model):
    broken = copy.deepcopy(model)
    reader = start(broken, "full")

    def fail(*_: Any) -> None:
        raise ArithmeticError

    handle = broken.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        reader(continuation(1, 5))
    handle.remove()
    with pytest.raises(KvfoldError, match="forward of this cache failed"):
        reader.cache.drop(SPAN)


def test_spans_are_whole_numbers_of_any_kind(model):
    for span in (torch.tensor([10, 17]), np.array([10, 17], np.uint8), iter((10, 17)), [10, 17]):
        reader = start(model, "full")
        reader.cache.drop(span)
        assert type(reader.cache.get_seq_length()) is int and reader.cache.get_seq_length() == 57
        reader.cache.move((2, 4), torch.tensor(8))


def test_forks_of_before_read_on_as_before(model):
    reader = start(model, "snapkv:window=8")
    question = continuation(1, 6, 3)
    expected = Reader(model, fork(reader.cache))(question)
    other = Reader(model, fork(reader.cache))
    reader.cache.drop(SPAN)
    assert torch.equal(other(question), expected)


def test_a_text_goes_on_by_its_edited_tokens(model):
    """`kvfold.generate` compares what the cache has read with the prompt that it gets."""
    reader = start(model, "snapkv:window=8")
    ids, _ = prompts(ALONE)
    reader.cache.drop(SPAN)
    text = torch.cat([ids[:, :10], ids[:, 17:], continuation(1, 4, 3)], 1)
    options = {"max_new_tokens": 3, "do_sample": False}
    with pytest.raises(KvfoldError, match="differ"):
        kvfold.generate(model, torch.cat([ids, text[:, -4:]], 1), cache=reader.cache, **options)
    assert kvfold.generate(model, text, cache=reader.cache, **options).shape[1] == text.shape[1] + 3


@pytest.mark.parametrize(
    ("spec", "edit", "message"),
    [
        ("full", lambda cache: cache.drop((60, 70)), "not in a row of 64"),
        ("full", lambda cache: cache.drop((0, 64)), "leaves at least one token"),
        ("full", lambda cache: cache.drop((5, 5)), "start below stop"),
        ("full", lambda cache: cache.drop(), "at least one span"),
        ("full", lambda cache: cache.drop((5, 9), (8, 12)), "overlap"),
        ("full", lambda cache: cache.drop((0, 9), (9, 64)), "leaves at least one token"),
        ("full", lambda cache: cache.move((5, 9), 7), "outside of them"),
        ("full", lambda cache: cache.move((5, 9), 65), "outside of them"),
        ("full", lambda cache: cache.replace((5, 9), torch.zeros(1, 0).long()), "at least one"),
        ("full", lambda cache: cache.replace((5, 9), torch.ones(2, 3).long()), r"ids \[1, m\]"),
        ("full", lambda cache: cache.replace((5, 9), torch.tensor([[5, 199]])), "from 0 to 198"),
        ("full", lambda cache: cache.replace((5, 9), torch.tensor([[-1]])), "from 0 to 198"),
        ("h2o", lambda cache: cache.replace((62, 63), torch.ones(1, 3).long()), "sums the att"),
        ("local_window", lambda cache: cache.drop((0, 3)), "evicted"),
        ("streaming_llm", lambda cache: cache.drop((2, 60)), "first 4 tokens"),
        ("streaming_llm", lambda cache: cache.move((58, 60), 1), "first 4 tokens"),
        ("full", lambda cache: cache.drop("5"), "a span is a pair"),
        ("full", lambda cache: cache.drop((5.0, 9.0)), "a span is a pair"),
        ("full", lambda cache: cache.drop((-4, 9)), "a span is a pair"),
        ("full", lambda cache: cache.move((5, 9), 2.5), "by its index"),
        ("full", lambda cache: cache.replace((5, 9), [5, 6]), "a tensor of ids"),
        ("full", lambda cache: cache.replace((5, 9), torch.ones(1, 3)), "a tensor of ids"),
        ("snapkv:window=8 + kivi:group=8", lambda cache: cache.drop(SPAN), "encodes keys"),
        ("think", lambda cache: cache.drop(SPAN), "encodes keys"),
    ],
)
def test_an_edit_that_cannot_be_is_refused_and_changes_nothing(model, spec, edit, message):
    reader = start(model, spec)
    before, held = bits(reader.cache), positions(reader.cache)
    with pytest.raises(KvfoldError, match=message):
        edit(reader.cache)
    assert same(bits(reader.cache), before) and positions(reader.cache) == held


def test_only_caches_between_turns_are_edited(model):
    cache = kvfold.CompressedCache(model, "full")
    with pytest.raises(KvfoldError, match="row of 0 tokens"):
        cache.drop((0, 1))
    reader = Reader(model, cache)
    with cache.reading():
        reader(prompts(ALONE)[0])
        with pytest.raises(KvfoldError, match="between turns"):
            cache.drop(SPAN)
    with cache.frozen(), pytest.raises(KvfoldError, match="between turns"):
        cache.drop(SPAN)
    with pytest.raises(KvfoldError, match="between turns"):
        fork(cache).drop(SPAN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "message"),
    [("gemma3", "sliding windows"), ("gpt2", "no rotary keys"), ("deepseek_v3", "no rotary keys")],
)
def test_models_whose_entries_cannot_move_are_refused(family, message):
    reader = start(FAMILIES[family](), "full")
    with pytest.raises(KvfoldError, match=message):
        reader.cache.drop(SPAN)


def test_padded_batches_drop_and_do_nothing_else(model):
    reader = start(model, "full", (64, 53, 24))
    with pytest.raises(KvfoldError, match="leaves at least one token"):
        reader.cache.drop((0, 24))
    for edit in (lambda c: c.move((2, 4), 8), lambda c: c.replace((2, 4), torch.ones(3, 2).long())):
        with pytest.raises(KvfoldError, match="batch with padding"):
            edit(reader.cache)
