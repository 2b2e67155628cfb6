# SPDX-License-Identifier: Apache-2.0
"""Edits of a cache: tokens dropped, moved, or replaced, without reading what follows again.

Entries before an edit stay as they are, those after it take new positions in closed form. In the
first layer this equals reading the edited text; deeper entries were computed while the old tokens
were in view, and remember them: what is dropped is out of sight, not forgotten.

A span `(start, stop)` counts a row's tokens, as in `protect`. An edit raises KvfoldError, and
changes nothing, for a span that is not in every row or whose entries were all evicted; inside a
prefill or a `frozen()` block; for encoded entries, and for sliding windows and recurrent layers;
UnsupportedModel for keys that cannot be rotated, and for images whose positions are not their
columns (M-RoPE).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache import setup
from kvfold.cache.barrier import Barrier
from kvfold.cache.history import History
from kvfold.cache.open_forward import OpenForward
from kvfold.cache.parts import CacheParts
from kvfold.cache.phase import Phase
from kvfold.cache.renumber import Inserted, Renumbering, renumbered
from kvfold.cache.spans import Span, span_of, whole_number
from kvfold.cache.state import LayerState
from kvfold.errors import KvfoldError
from kvfold.hf.models import read_tokens, text_config
from kvfold.observers.column_sums import ColumnSums

C = TypeVar("C", bound=CacheParts)

REREAD = "make a new cache and read the edited text"
LEAVES_NONE = "an edit leaves at least one token: cache.reset() empties a cache"


def take_from(cache: C, other: C) -> None:
    """Turns `cache` into `other`, which is not used any more."""
    names = "layers", "phase", "binding", "protect"
    cache.take(**{name: getattr(other, name) for name in names})


def dropped(cache: C, *spans: Span) -> C:
    """A copy of `cache` without spans."""
    if not spans:
        raise KvfoldError("name at least one span to drop")
    latest, *others = sorted((_checked(cache, span) for span in spans), reverse=True)
    sequence, rows = cache.states[0].sequence, cache.rows
    by = Renumbering.of_replaced(sequence, rows, *latest, 0)
    for start, stop in others:
        if stop > latest[0]:
            raise KvfoldError(f"tokens {start} to {stop} overlap {latest[0]} to {latest[1]}")
        latest = start, stop
        by = by.then(Renumbering.of_replaced(by.sequence, rows, start, stop, 0))
    if not bool((by.tokens >= 0).any()):
        raise KvfoldError(LEAVES_NONE)
    return _copy(cache, by)


def moved(cache: C, span: Span, to: int) -> C:
    """A copy of `cache` with a span before token `to`."""
    to, seen = whole_number(to), cache.get_seq_length()
    start, stop = _checked(cache, span, to)
    _check_no_padding(cache, "moves")
    if not (0 <= to <= start or stop <= to <= seen):
        raise KvfoldError(
            f"tokens {start} to {stop} cannot be put before token {to}: name one outside of them, "
            f"from 0 to {seen}"
        )
    return _copy(cache, Renumbering.of_moved(cache.rows, seen, start, stop, to))


@torch.no_grad()
def replaced(cache: C, span: Span, ids: Tensor) -> C:
    """A copy of `cache` with tokens `ids [B, m]` in place of a span."""
    start, stop = _checked(cache, span)
    _check_no_padding(cache, "replaces")
    whole = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.dtype == torch.bool)
    if not whole or ids.dim() != 2 or len(ids) != cache.rows or not ids.shape[1]:
        raise KvfoldError(
            f"the new tokens are a tensor of ids [{cache.rows}, m], at least one for each row: use "
            "cache.drop to leave the span out"
        )
    model, sequence = model_of(cache), cache.states[0].sequence
    known = text_config(model).vocab_size
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= known:
        wrong = low if low < 0 else high
        raise KvfoldError(f"ids of this model's tokens are from 0 to {known - 1}, not {wrong}")
    check_replaceable(cache)
    rest = Renumbering.of_replaced(sequence, cache.rows, start, sequence.seen, 0)
    reader = _copy(cache, rest)
    with reader.frozen():
        read_tokens(model, ids.to(model.device), reader, None)
    by = Renumbering.of_replaced(sequence, cache.rows, start, stop, ids.shape[1])
    edited = _copy(cache, by, New(reader.states, ids, start))
    _check_bound(edited)
    return edited


def joined(first: C, second: C, skip: int) -> C:
    """A cache of one row with the tokens of `first`, and of `second` without the first `skip`.

    The two have not read each other. It goes on with the method and budget of `first`. Raises
    KvfoldError as an edit does.
    """
    for cache in (first, second):
        check_editable(cache)
        if cache.method.stages().positions != "original":
            raise KvfoldError(
                f"{cache.method} moves keys to other positions than their tokens', and joined "
                "entries keep those of their tokens: compress by another method"
            )
        check_replaceable(cache)
    own, ids = first.states[0].sequence, second.phase.history.whole()
    by = Renumbering.of_replaced(second.states[0].sequence, 1, 0, skip, own.seen)
    states = [renumbered(state, by) for state in second.states]
    new = states[0].seen - own.seen
    room = Renumbering.of_replaced(own, 1, own.seen, own.seen, new)
    new_tokens = New(states, None if ids is None else ids[:, skip:], own.seen)
    whole = _copy(first, room, new_tokens, [p for span in second.protect for p in by.spans(span)])
    for state in whole.states:
        state.end_turn()
    return whole


class New(NamedTuple):
    """Tokens of the columns from `first` on: states that hold them, and ids `[B, m]` if known."""

    states: Sequence[LayerState]
    ids: Tensor | None
    first: int

    def of_layer(self, layer: int) -> Inserted:
        """The tokens' entries in a compressed layer."""
        state = self.states[layer]
        store = state.stored()
        columns = store.columns
        return Inserted(*store.dense(), columns.masked_fill(columns < self.first, -1), store.bias)


def model_of(cache: CacheParts) -> PreTrainedModel:
    """The model of a cache."""
    return cache.states[0].plan.rotation.model


def check_editable(cache: CacheParts) -> None:
    """Raises KvfoldError for a cache that cannot be edited now, or never."""
    phase = cache.phase
    open_, seen = cache.forward.begun, cache.get_seq_length()
    if cache.broke_off or (open_ is not None and seen > open_):
        raise KvfoldError(f"the last forward of this cache failed: {REREAD}")
    if phase.in_prefill(seen) or phase.frozen or phase.own_size is not None:
        raise KvfoldError(
            "a cache is edited between turns, and this one is inside a prefill, a frozen block, or "
            "a chat over a context: edit it before, or afterwards"
        )
    if len(cache.compressed_layers) < len(cache.layers):
        raise KvfoldError(
            f"{cache.binding.name} has sliding windows or recurrent layers, whose states cannot "
            f"let go of single tokens: {REREAD}"
        )
    encode = cache.method.stages().encode
    if encode is not None and not (encode.raw or encode.standalone):
        raise KvfoldError(
            f"{cache.method} encodes keys, which cannot be rotated to other positions: {REREAD}"
        )
    cache.binding.check_images(phase.history.complete(seen), REREAD)
    cache.binding.check_model()
    for state in cache.states:
        state.plan.rotation.check(REREAD)


def holds(cache: CacheParts, span: Span) -> bool:
    """True if an entry of a span is left, in any layer and KV head."""
    start, stop = span
    gone = [((at := state.positions()) < start) | (at >= stop) for state in cache.states]
    return not all(cache.ranks.all(each.all()) for each in gone)


def _checked(cache: CacheParts, span: Span, to: int | None = None) -> Span:
    """The span, as whole numbers, of a cache that may be edited and holds some of its entries.

    Raises KvfoldError for another, and where the span, or token `to` before which it goes, is one
    of re-indexed sinks: these are the first tokens of a text.
    """
    check_editable(cache)
    start, stop = span_of(span)
    stages, first = cache.states[0].plan.stages, start if to is None else min(start, to)
    if stages.positions == "reindex" and first < stages.forced.sinks:
        raise KvfoldError(
            f"{cache.method} moves the keys of the first {stages.forced.sinks} tokens, which "
            f"cannot be edited: {REREAD}"
        )
    rows = cache.states[0].seen_per_row().tolist() if cache.rows else [0]
    if stop > min(rows):
        raise KvfoldError(f"tokens {start} to {stop} are not in a row of {min(rows)} tokens")
    if stop - start == min(rows):
        raise KvfoldError(LEAVES_NONE)
    if not holds(cache, (start, stop)):
        raise KvfoldError(
            f"nothing is left of tokens {start} to {stop}, which were evicted: there is nothing to "
            "edit"
        )
    return start, stop


def check_replaceable(cache: CacheParts) -> None:
    """Raises KvfoldError where numbers of a method are unknown for tokens that were read apart."""
    if cache.reads_logits:
        raise KvfoldError(
            f"{cache.method} scores each token by the text before it, and tokens that were read "
            f"apart have another: {REREAD}"
        )
    if ColumnSums in cache.states[0].needs:
        raise KvfoldError(
            f"{cache.method} sums the attention that tokens receive, and what tokens that were "
            f"read apart give each other is not known: {REREAD}"
        )


def _check_bound(edited: CacheParts) -> None:
    """Raises KvfoldError where tokens until the next eviction would pass `max_cache_tokens`."""
    most, first = edited.max_cache_tokens, edited.states[0]
    if most is None:
        return
    left = 1 if first.next_round is None else max(1, first.next_round - first.seen)
    device = first.stored().keys.device
    counts = [(state.columns() >= 0).sum(-1).to(device) for state in edited.states]
    entries = torch.stack(counts).double().mean((0, 2)).max() + left
    if not edited.ranks.all(entries <= most):
        raise KvfoldError(
            f"with the new tokens the cache would grow to {int(entries.ceil())} entries until the "
            f"next eviction, max_cache_tokens is {most}: replace the span by fewer tokens"
        )


def _check_no_padding(cache: CacheParts, what: str) -> None:
    if cache.states[0].sequence.valid is not None:
        raise KvfoldError(
            f"a batch with padding {what} no tokens, as its rows begin in different columns: edit "
            "the rows alone, or drop tokens"
        )


def _copy(cache: C, by: Renumbering, new: New | None = None, protect: Sequence[Span] = ()) -> C:
    """A copy of `cache` with its entries renumbered, and new ones in the columns left free.

    `protect` are further spans of the result.
    """
    spans = (*(place for span in cache.protect for place in by.spans(span)), *protect)
    binding, phase = copy.deepcopy(cache.binding), _phase(cache.phase, by, new)
    barrier: Barrier[LayerState] = Barrier()
    stages = setup.stages_of(cache.method, spans, cache.ranks, cache.fits)
    layers = []
    for index, layer in enumerate(cache.compressed_layers):
        state = renumbered(layer.state, by, None if new is None else new.of_layer(index))
        state = replace(state, plan=state.plan.by(stages), phase=phase, barrier=barrier)
        layers.append(layer.copied(state, binding))
    return cache.copied(
        layers=layers, protect=spans, binding=binding, phase=phase, forward=OpenForward()
    )


def _phase(phase: Phase, by: Renumbering, new: New | None) -> Phase:
    """The phase of an edited cache."""
    known, prefix = phase.history.whole(), phase.prefix
    if known is not None:
        known = by.ids(known) if new is None else by.ids(known, new.ids, new.first)
    if prefix is not None:
        prefix = prefix.new_tensor([by.first_tokens(count) for count in prefix.tolist()])
    count = by.counts.__getitem__
    logs = {kind: log.renumbered(by.ids, count) for kind, log in phase.logs.items()}
    return replace(phase, history=History(known), prefix=prefix, until=0, logs=logs)
