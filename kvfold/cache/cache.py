# SPDX-License-Identifier: Apache-2.0
"""The one cache: a transformers `Cache` that stays small."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.attention.function import forget_pending, hand_out
from kvfold.attention.padding import Padding, announce, forget_announced
from kvfold.budget import Budget
from kvfold.cache import trial as rehearsal
from kvfold.cache.history import History
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.model_binding import Owner
from kvfold.cache.phase import Plan, Turn
from kvfold.cache.spans import spans_of
from kvfold.cache.stats import Stats
from kvfold.errors import BudgetError, KvfoldError, UnsupportedModel
from kvfold.hf.attention import disable, enable, is_enabled
from kvfold.hf.forward_hooks import ToldOfForwards, preparing, watch
from kvfold.hf.models import caches_latents, dropping_length, shares_entries
from kvfold.hf.parallel import ranks_of
from kvfold.hf.rotation import Rotation
from kvfold.hf.stock_layers import (
    can_crop_stock,
    crop_stock,
    is_compressible,
    layer_lengths,
    stock_layers,
)
from kvfold.methods.base import Method, parse
from kvfold.methods.observation import Rebuilding
from kvfold.store.ragged import SegmentStore


class CompressedCache(Cache, ToldOfForwards):
    """A KV cache that keeps what `method` chooses within `budget`.

    Args:
        model: the model that will use it; its attention is routed through kvfold.
        method: a `Method`, or a text such as "snapkv:window=16".
        budget: entries per layer and KV head (int), the part of the tokens seen to keep (float),
            or a size ("2GiB"); see `Budget`.
        tokenizer: the model's, for methods that let it repeat the text (KVzip).
        protect: spans `(start, stop)` of token indices that are never evicted, padding not counted;
            `kvfold.span` finds one from text.
        seed: fixes the choice of random methods.

    Raises BudgetError for a budget that is missing, superfluous, or below what must be kept;
    UnsupportedModel for a model that would be answered wrongly; KvfoldError for a bad method.

    Of a model that several processes share by its heads, each one's cache holds its own heads, and
    all must do the same at the same time; `cache/tensor_parallel.py` says what they exchange.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method | str,
        budget: Budget | float | str | None = None,
        *,
        tokenizer: Any = None,
        protect: Sequence[tuple[int, int]] = (),
        seed: int = 0,
    ) -> None:
        self.method = parse(method)
        self.seed = seed
        stages = self.method.stages()
        if stages.needs.rebuilding is not None and tokenizer is None:
            raise KvfoldError(
                f"{self.method} lets the model repeat the text, in words of its chat template: "
                "give the cache tokenizer=, and use kvfold.compress or kvfold.generate"
            )
        spans = spans_of(protect)
        self.protect = spans
        forced = replace(stages.forced, spans=stages.forced.spans + spans)
        stages = replace(stages, forced=forced, method=str(self.method))
        self.budget = checked_budget(self.method, budget, forced.least)
        layers = stock_layers(model)
        self.ranks = ranks_of(model)
        self.ranks.check_method(self.method)
        stages = self.ranks.joining(stages)
        _prepare(model)
        self.turn, self.owner = Turn(), Owner(model)
        self.dropping_length = dropping_length(model)
        shared, latents = shares_entries(model), caches_latents(model)
        own = [i for i, layer in enumerate(layers) if is_compressible(layer)]
        for place, index in enumerate(own):
            encode = stages.encode and stages.encode.of_layer(place, len(own))
            stored = replace(stages, encode=encode)
            plan = Plan(stored, self.budget, place, len(own), seed, shared, latents, self.ranks)
            rotation = Rotation(model, index)
            if stages.positions == "reindex":
                rotation.check()
            layers[index] = CompressedLayer(plan, self.turn, self.owner, rotation)
        super().__init__(layers=layers)
        self.tokenizer = tokenizer
        self._generating = False
        self._before_freezing: tuple[int, dict[int, Any]] | None = None
        self.cannot_be_dropped = False  # kvfold.generate has made sure
        self.history = History()
        self._begun: int | None = None  # columns seen before a forward that has not returned
        self._states_moved = False  # recurrent states have, in that forward
        self.per_chunk: int | None = None  # a prompt was compressed after each so many tokens

    @property
    def compressed_layers(self) -> list[CompressedLayer]:
        """The layers that kvfold compresses, in order."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def rebuilding(self) -> Rebuilding | None:
        """How the first turn's text is still to be repeated; None when it was, or need not be."""
        if any(layer.turns for layer in self.compressed_layers):
            return None
        return self.method.stages().needs.rebuilding

    @property
    def runs_own_forwards(self) -> bool:
        """Whether the first prompt, still to be read, takes more than the model's own forward."""
        pruned = self.method.stages().funnel is not None and self.get_seq_length() == 0
        return pruned or self.rebuilding is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values of one layer; returns what its attention is to see."""
        forget_pending()
        layer = self.layers[layer_idx]
        if not isinstance(layer, CompressedLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self._store(layer, layer_idx, key_states, value_states)

    @torch.compiler.disable
    def _store(
        self, layer: CompressedLayer, index: int, key_states: Tensor, value_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stores one layer's entries; never part of a graph, in which its attention would be lost.

        Raises UnsupportedModel where the last ones did not come to attention.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._store(layer, index, key_states, value_states)
        first = layer.plan.layer == 0
        if first:
            forget_announced()  # by a model whose masks are not kvfold's
        self.owner.asked(first, level=not first or layer.seen == self.compressed_layers[-1].seen)
        keys, values = layer.update(key_states, value_states)
        return hand_out(keys, values, index, layer), values

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns that the next forward's mask covers, and the first of them.

        Raises UnsupportedModel where layers hold different numbers of tokens; none is changed.
        """
        lengths = layer_lengths(self)
        if len(lengths) > 1:
            raise UnsupportedModel(
                f"the layers of this cache hold {min(lengths)} to {max(lengths)} tokens: the last "
                "forward failed, or single layers were cropped; make a new cache"
            )
        announce(Padding(self.owner.name, query_length, slides=bool(self._other_layers())))
        return super().get_mask_sizes(query_length, layer_idx)

    @torch.compiler.disable
    def forward_begins(self) -> None:
        """Raises KvfoldError where the last one failed when layers had taken in its tokens."""
        if self._states_moved:
            raise KvfoldError(
                "the last forward failed after recurrent layers had read its tokens, which they "
                "cannot give back: make a new cache, or go back with cache.crop to where a "
                "`with cache.frozen():` block began"
            )
        seen = self.get_seq_length()
        new = 0 if self._begun is None else seen - self._begun
        # Where it failed earlier than that, layers tell.
        if new > 0 and not self.owner.waiting and len(layer_lengths(self)) == 1:
            raise KvfoldError(
                f"the last forward failed after all layers had stored its {new} tokens: take them "
                f"back with cache.crop({-new}) before they are read again, or make a new cache"
            )
        self._begun = seen

    @torch.compiler.disable
    def forward_returned(self, ids: Tensor | None) -> None:
        """The tokens of the last forward count as read, by their `ids [B, S]` where it had some."""
        if ids is not None and self._begun is not None:
            self.history = self.history.plus(ids, self._begun)
        self._begun, self._states_moved = None, False

    def forward_failed(self, seen: int) -> None:
        """A forward that began at `seen` columns stored tokens before it failed."""
        self._begun = seen

    @property
    def broke_off(self) -> bool:
        """Whether a forward failed between layers, which no longer hold the same tokens."""
        return self.owner.waiting or self._states_moved or len(layer_lengths(self)) > 1

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stores what one recurrent layer's convolution goes on from."""
        self._states_moved = self._begun is not None
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stores one recurrent layer's state."""
        self._states_moved = self._begun is not None
        return super().update_recurrent_state(*args, **kwargs)

    # --- turns ------------------------------------------------------------------------------

    @contextmanager
    def reading(self, until: int | None = None) -> Iterator[None]:
        """Several forwards that make up one turn: nothing is compressed until the block ends.

        With `until`, the logical length at which the turn is complete, the forward that reaches it
        compresses, even after the block. After an error inside the block nothing is compressed.
        """
        self.turn.reading, self.turn.until = until is None, until or 0
        try:
            yield
        except BaseException:
            self.turn.until = 0
            raise
        finally:
            self.turn.reading = False
        if until is None:
            for layer in self.compressed_layers:
                layer.end_turn()

    def to_budget(self, budget: Budget | float | str) -> CompressedCache:
        """A copy in which a turn that is being read ends now, compressed to another budget.

        This cache goes on reading. Raises KvfoldError once anything is compressed.
        """
        if not self.turn.reading or any(layer.turns for layer in self.compressed_layers):
            raise KvfoldError("a cache takes another budget only while its first turn is read")
        other = copy.deepcopy(self)
        least = other.compressed_layers[0].plan.stages.forced.least
        other.budget = checked_budget(self.method, budget, least)
        for layer in other.compressed_layers:
            layer.plan = replace(layer.plan, budget=other.budget)
        with other.reading():
            pass
        return other

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Nothing is evicted inside the block, and its tokens can be cropped away afterwards."""
        before, self.turn.frozen = self.turn.frozen, True
        outer = self._before_freezing
        if outer is None:
            saved = {i: copy.deepcopy(layer) for i, layer in self._other_layers().items()}
            self._before_freezing = (self.get_seq_length(), saved)
        try:
            yield
        finally:
            self.turn.frozen, self._before_freezing = before, outer
            if not before:
                for layer in self._other_layers().values():
                    layer.record_past = False

    def _other_layers(self) -> dict[int, Any]:
        """The layers that stay transformers' own: sliding windows and recurrent states."""
        return {
            i: layer
            for i, layer in enumerate(self.layers)
            if not isinstance(layer, CompressedLayer)
        }

    def activate_past_recording(self) -> None:
        """Asked for by assisted decoding, which takes tokens back: only a frozen cache can."""
        if not self.turn.frozen:
            raise KvfoldError(
                "assisted decoding takes rejected tokens back, which a cache that evicts cannot: "
                "use kvfold.generate, which reads the prompt first and then freezes the cache"
            )
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens.

        Raises KvfoldError, and changes nothing, where entries were evicted or encoded since, and
        for models with recurrent layers, or with sliding windows that have slid, anywhere but to
        where a `frozen()` block began.
        """
        self.check_crop(tokens_to_remove)
        length = self.get_seq_length() + tokens_to_remove
        saved = self._saved_at(length)
        self.history = self.history.crop(length)
        self._states_moved &= saved is None
        for layer in self.compressed_layers:
            layer.crop(tokens_to_remove)
        for i, other in self._other_layers().items():
            if saved is None:
                crop_stock(other, tokens_to_remove)
            else:
                self.layers[i] = copy.deepcopy(saved[i])

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises KvfoldError where `crop` would."""
        for layer in self.compressed_layers:
            layer.check_crop(tokens_to_remove)
        if self._saved_at(self.get_seq_length() + tokens_to_remove) is None and not all(
            can_crop_stock(layer, tokens_to_remove) for layer in self._other_layers().values()
        ):
            raise KvfoldError(
                f"{self.owner.name} has sliding windows or recurrent layers, which have let go of "
                "older tokens: they only go back to where a `with cache.frozen():` block began"
            )

    def _saved_at(self, length: int) -> dict[int, Any] | None:
        """The other layers as a `frozen()` block that began at `length` tokens found them."""
        at, saved = self._before_freezing or (-1, None)
        return saved if at == length else None

    def reset(self) -> None:
        """Forgets everything: the cache is as new."""
        super().reset()
        self.turn.forget()
        self.history = History()
        self.per_chunk = None
        self._before_freezing = self._begun = None
        self._states_moved = False
        self.owner.answered()

    @property
    def _is_user_defined(self) -> bool:
        return self._generating

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # transformers' generate sets this when it is handed a cache, before it may drop it.
        limit = self.dropping_length
        warned = value and not self.cannot_be_dropped
        if warned and limit is not None and self.get_seq_length() <= limit:
            raise UnsupportedModel(
                f"generate() of {self.owner.name} silently drops a cache once a text passes "
                f"{limit} tokens: use kvfold.generate(model, ..., cache=cache)"
            )
        self._generating = value

    # --- rows -------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row `beam_idx[i]`."""
        super().reorder_cache(beam_idx.long())  # type: ignore[arg-type]
        self._take_along(lambda x: x.index_select(0, beam_idx.long().to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows."""
        super().batch_repeat_interleave(repeats)
        self._take_along(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows in `indices`."""
        super().batch_select_indices(indices)
        self._take_along(lambda x: x[indices.to(x.device)])

    def _take_along(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a selection along the batch axis, to what layers have in common."""
        if self.turn.prefix is not None:
            self.turn.prefix = rows(self.turn.prefix)
        self.history = self.history.index(rows)
        self.share_pairs()

    def share_pairs(self) -> None:
        """Lets paired layers, copied one after the other, share again what they have in common."""
        stores = [layer.store for layer in self.compressed_layers]
        paired = [s for s in stores if isinstance(s, SegmentStore) and s.encode.pairs]
        for first, second in zip(paired[::2], paired[1::2], strict=True):
            second.share_with(first)

    # --- what is stored ---------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows of the batch that was read; 0 before the first token."""
        store = self.compressed_layers[0].store
        return 0 if store is None else store.keys.shape[0]

    def tokens_read(self) -> Tensor | None:
        """Which columns are tokens and not padding `[B, seen]`; None: all."""
        return self.compressed_layers[0].logical.tokens()

    def positions(self, layer: int) -> list[list[Tensor]]:
        """Original positions stored by compressible layer `layer`, ascending: `[B][H]`, 1-D long.

        A position is a column of the logical sequence, as in the attention mask: in a left-padded
        batch it counts the padding before it, which is itself never listed.
        """
        own = self.compressed_layers[layer]
        if own.store is None:
            return []
        return [[head[head >= 0] for head in row] for row in own.columns()]

    def stats(self) -> Stats:
        """What is stored now: prints in a few lines, `details()` layer by layer."""
        own = self.compressed_layers
        started = [layer for layer in own if layer.store is not None]
        kept, parts, state, full = [], [0, 0, 0], 0, 0
        over, later = False, 0
        counted: set[int] = set()
        for layer in started:
            store = layer.store
            assert store is not None
            kept.append((layer.columns() >= 0).sum(-1).tolist())
            parts = [a + b for a, b in zip(parts, store.nbytes(counted), strict=True)]
            state += layer.state_bytes()
            entry = (store.keys.shape[-1] + store.values.shape[-1]) * store.keys.element_size()
            full += store.keys.shape[0] * store.keys.shape[1] * layer.seen * entry
            over |= layer.over_budget
            later = max(later, layer.later())
        if self.turn.prefix is not None:
            state += self.turn.prefix.numel() * self.turn.prefix.element_size()
        return Stats(
            method=str(self.method),
            budget="none" if self.budget is None else str(self.budget),
            per_chunk=self.per_chunk,
            seen=self.get_seq_length(),
            seen_per_row=started[0].seen_per_row().tolist() if started else [],
            kept=kept,
            kv_bytes=parts[0],
            position_bytes=parts[1],
            state_bytes=state,
            slack_bytes=parts[2],
            id_bytes=self.history.nbytes,
            nbytes_full=full,
            other_layers={
                i: type(layer).__name__
                for i, layer in enumerate(self.layers)
                if not isinstance(layer, CompressedLayer)
            },
            forced_over_budget=over,
            inexact=self.method.stages().inexact,
            later=later,
            later_budget=self.turn.own,
            protected=[] if not started else started[0].protected().tolist(),
            errors=[
                [] if layer.error is None else layer.error.mean(0).tolist() for layer in started
            ],
        )


def _prepare(model: PreTrainedModel) -> None:
    """Routes the model's attention through kvfold, and tries it out where this is its first cache.

    Raises UnsupportedModel where it would be answered wrongly; it is then as it was.
    """
    with preparing:
        known = is_enabled(model)
        enable(model)
        watch(model)
        if not rehearsal.is_due(model):
            return
        try:
            rehearsal.rehearse(model, CompressedCache(model, rehearsal.METHOD, rehearsal.BUDGET))
        except BaseException:
            if not known:
                disable(model)
            raise


def checked_budget(
    method: Method, budget: Budget | float | str | None, least: int
) -> Budget | None:
    """The budget of a method that keeps `least` entries per KV head whatever it is.

    Raises BudgetError for one that is missing, superfluous, or below that.
    """
    if method.takes_budget and budget is None:
        raise BudgetError(
            f'{method} needs a budget: the part to keep (0.2), tokens (512) or a size ("2GiB")'
        )
    if not method.takes_budget and budget is not None:
        raise BudgetError(f"{method} takes no budget: leave it out")
    if budget is None:
        return None
    made = Budget.of(budget)
    if made.kind == "tokens" and made.amount < least:
        raise BudgetError(
            f"{method} always keeps {least} entries per KV head (sinks, window, protected spans), "
            f"the budget is {int(made.amount)}: raise it to at least {least}"
        )
    return made
