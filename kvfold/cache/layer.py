# SPDX-License-Identifier: Apache-2.0
"""The layer that transformers writes to and kvfold's attention reads from."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvfold.attention.attend import (
    attend_and_maximize,
    attend_and_sum,
    attend_and_watch_row,
    attend_to_view,
)
from kvfold.attention.handshake import changed
from kvfold.attention.mask import valid_columns
from kvfold.cache.barrier import is_too_much
from kvfold.cache.decode import evict_after_token, evict_one, evicts_one, predicted_slot
from kvfold.cache.encode import encode_due
from kvfold.cache.model_binding import ModelBinding
from kvfold.cache.observe import check_positions, observation_at, observation_of
from kvfold.cache.phase import ReconstructionForward
from kvfold.cache.prefill import end_prefill, end_with, size_and_evict
from kvfold.cache.refit import add_repeated, attention_to_text
from kvfold.cache.rounds import note_token
from kvfold.cache.state import LayerState
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.kernels.full_precision import any_cast, full_precision, is_cast
from kvfold.kernels.single_query import attend_single
from kvfold.methods.stages.when import Hold, Once, Rounds
from kvfold.observers.call import AttentionCall
from kvfold.observers.column_sums import ColumnSquares, ColumnSums
from kvfold.observers.reconstruction import ContextReconstruction
from kvfold.observers.stored import OutputNorms
from kvfold.store.dense import DenseStore
from kvfold.store.sequence import LogicalSequence


class CompressedLayer(CacheLayerMixin):
    """A full-attention layer: logical lengths outwards, a `LayerState` inside.

    `update` stores, `attend` attends and observes, `finish` lets an evictor change the state.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, state: LayerState, binding: ModelBinding) -> None:
        self._bind(state, binding)
        self.shared, self.caches_latents = state.plan.shared, state.plan.caches_latents
        self.is_initialized = False

    # --- transformers' side -----------------------------------------------------------------

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return None if self.state.store is None else self.state.store.keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return None if self.state.store is None else self.state.store.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.state.plan.ranks.check_heads(key_states.shape[1])
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores new entries `[B, H, S, D]`; returns the raw keys and values stored.

        Raises KvfoldError for entries of torch.autocast that the store's dtype would round.
        """
        if any_cast() and is_cast(key_states):
            with torch.autocast(key_states.device.type, enabled=False):
                return self.update(*self._in_one_dtype(key_states, value_states))
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.state.append(key_states, value_states)

    def reset(self) -> None:
        self.state.reset()
        self.is_initialized = False

    def get_seq_length(self) -> int:
        return self.state.sequence.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.state.sequence.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises KvfoldError if these tokens cannot be dropped."""
        if tokens_to_remove > 0:
            raise KvfoldError(
                f"crop takes minus the number of tokens to drop, not {tokens_to_remove}"
            )
        state = self.state
        if state.seen + tokens_to_remove < 0:
            raise KvfoldError(f"cannot drop {-tokens_to_remove} tokens of {state.seen}")
        if tokens_to_remove and state.store and state.seen + tokens_to_remove < state.evicted_at:
            raise KvfoldError(
                f"cannot take back {-tokens_to_remove} tokens: older entries were evicted, encoded "
                "or scored since, as those tokens came; generate tokens that may be cropped "
                "inside `with cache.frozen():`"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens; raises KvfoldError past an eviction."""
        self.check_crop(tokens_to_remove)
        self.state.crop(-tokens_to_remove)

    @full_precision
    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state.index(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def _in_one_dtype(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of torch.autocast, where RoPE leaves keys wider, in the store's dtype.

        That of a new store holds both, and what the model gives without autocast.
        """
        dtype, store = torch.promote_types(keys.dtype, values.dtype), self.state.store
        stored = self.state.plan.rotation.model.dtype if store is None else store.keys.dtype
        wide = torch.promote_types(dtype, stored)
        if store is not None and wide != stored:
            self.binding.answered()  # nothing was stored: outside, the cache goes on
            raise KvfoldError(
                f"this cache holds {stored}, which cannot hold the {dtype} that the model gives "
                "under this torch.autocast: leave it, or read the text under it too"
            )
        return keys.to(wide), values.to(wide)

    def copied(self, state: LayerState, binding: ModelBinding) -> CompressedLayer:
        """A copy with another state and binding."""
        other = copy.copy(self)
        other._bind(state, binding)
        return other

    def _bind(self, state: LayerState, binding: ModelBinding) -> None:
        self.state, self.binding = state, binding

    def note_restored(self) -> None:
        """Notes that the layer's state was read from a file."""
        self.dtype, self.device = self.state.stored().keys.dtype, self.state.stored().keys.device
        self.is_initialized = True

    # --- attention's side -------------------------------------------------------------------

    def view(self) -> Any:
        """View of the store, for attention."""
        return self.state.stored().view()

    def is_source_of(self, key: Tensor) -> bool:
        """True if keys `[B, H, T, D]` match the store in all but the number of heads (latents)."""
        if self.state.store is None:
            return False
        stored = self.state.store.keys
        same = (stored.shape[0], stored.shape[2]) == (key.shape[0], key.shape[2])
        return same and stored.shape[1] != key.shape[1]

    def attend(
        self,
        module: nn.Module,
        kind: str,
        call: AttentionCall,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Attention output `[B, S, Hq, Dv]` over the store, and weights if stock gives any.

        Observes what the method needs, and evicts when due. Raises UnsupportedModel for another
        model, for a mask that does not cover all columns seen, and as `check_positions`.
        """
        state, binding = self.state, self.binding
        if binding.modules and id(module) not in binding.modules:
            raise binding.refusal()
        if mask is not None:
            if mask.shape[-1] != state.sequence.seen:
                raise changed(module)
            state.sequence.note_mask(valid_columns(mask))
        if state.phase.ended is not None:
            self.leave_out_ended()
        needs = state.plan.stages.needs
        if needs.rotated_back:
            check_positions(state, call.query.shape[2], options.get("position_ids"))
        weights, logits = None, call.logits
        plain = mask is None and logits.get("softcap") is None and logits.get("sink_logits") is None
        alone = plain and call.query.shape[2] == 1
        store, seen, phase = state.store, state.sequence.seen, state.phase
        assert store is not None
        repeating = phase.repeating
        if repeating is not None and repeating.scored is None:
            add_repeated(state, call, repeating, self._counted(call))
        if state.surplus == 1 and evicts_one(state, call.query.shape[2]):
            assert isinstance(store, DenseStore)
            merge = state.plan.stages.merge
            predicted = None if merge is None else predicted_slot(state, call, merge)
            out, call = attend_and_watch_row(call, store, seen, mask, predicted)
        elif repeating is not None and repeating.scored is not None:
            scored = repeating.scored.to(call.query.device)
            out, call = self._attend_and_maximize(call, repeating, scored, mask)
        elif ColumnSums in needs.by_kind and not phase.frozen:
            squares = ColumnSquares in needs
            counted = self._counted(call)
            out, call = attend_and_sum(call, store, seen, mask, counted=counted, squares=squares)
        elif kind == "sdpa" and alone and isinstance(store, DenseStore) and store.shows_all:
            # Entries were evicted: there is no stock result to match bit for bit.
            out = attend_single(call.query, call.key, call.value, logits["scale"])
        else:
            out, weights = attend_to_view(
                module, kind, call, store.view(), seen, mask, options, store.holes
            )
        leaving = state.barrier.leaving
        if call.row is None:
            self.finish(call)
        else:
            leaving.arrived.append((state, call))
        last = state.plan.layer == state.plan.layers - 1
        if leaving.arrived and (last or is_too_much(leaving.arrived)):
            evict_one(dict(leaving.take()))
        if last:  # after an error above, the layers no longer hold the same tokens
            binding.answered()
        return out, weights

    def leave_out_ended(self) -> None:
        """Notes that what rows have read since their end is padding."""
        ended = self.state.phase.ended
        if ended is not None:
            self.state.sequence.hide(ended.to(self.device))

    def _attend_and_maximize(
        self,
        call: AttentionCall,
        repeating: ReconstructionForward,
        scored: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, AttentionCall]:
        """Output `[B, S, Hq, Dv]` of a forward that repeats the text, and its column maxima."""
        state = self.state
        weights, counted = repeating.row_weights.get(state.plan.layer), self._counted(call)
        text = attention_to_text(state, call, repeating)
        out, call = attend_and_maximize(
            call,
            state.stored(),
            state.seen,
            mask,
            counted=counted,
            scored=scored,
            row_weights=weights,
            norms=None if weights is None else state.observers[OutputNorms].of(state, call),
            rms=repeating.rms,
            part=text,
        )
        add_repeated(state, call, repeating, counted, text, out)
        return out, call

    def attend_as_guest(
        self,
        module: nn.Module,
        kind: str,
        call: AttentionCall,
        view: Any,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of another layer to `view` of this layer's entries; observes nothing."""
        return attend_to_view(module, kind, call, view, self.state.seen, mask, options)

    def finish(self, call: AttentionCall) -> None:
        """Observes a call after the layer has attended, and evicts or encodes what is due."""
        state, phase, stages = self.state, self.state.phase, self.state.plan.stages
        if phase.layerwise:
            columns = torch.arange(state.sequence.seen, device=call.query.device)
            phase.note_observed(observation_at(state, call, columns.repeat(len(call.query), 1)))
        elif call.maxima is not None and phase.repeating is not None:
            state.observers[ContextReconstruction].add(state, call.maxima, phase.repeating.text)
        if phase.layerwise or phase.frozen:
            return
        for each in state.observers.of_forwards:
            each.read(state, call)
        step = phase.step(state.sequence.seen, call.query.shape[2])
        if step != "decode":
            state.observers.read_piece(state, call)
        if step == "prefill":
            state.observers.window.prompt.add(call, state.sequence)
        elif step == "prefill end":
            end_with(state, call)
        elif isinstance(stages.when, Hold) and stages.score is not None:
            evict_after_token(state, call)
        elif isinstance(stages.when, Rounds):
            note_token(state, call)
            if stages.encode is not None and not state.stored().is_dense:
                encode_due(state, decoding=True)
        elif isinstance(stages.when, Once) and state.next_round is not None:
            state.end_round()
            size_and_evict(state, observation_of(state, call))
        elif stages.encode is not None and not state.stored().is_dense:
            encode_due(state, decoding=True)

    def _counted(self, call: AttentionCall) -> Tensor | None:
        """Bool mask `[B, S]` of the call's queries that are tokens; None: all."""
        valid = self.state.sequence.valid
        return None if valid is None else valid[:, -call.query.shape[2] :]

    # --- prefills that end outside of a forward ---------------------------------------------

    def adopt(self, columns: Tensor, valid: Tensor) -> None:
        """Sets `columns [B, T]` of the entries just stored; `valid [B, N]` are its tokens."""
        state = self.state
        whole = None if bool(valid.all()) else valid
        state.put(state.stored(), LogicalSequence(valid.shape[1], whole))
        state.begin_eviction()
        state.settle()
        if columns.shape[1] < valid.shape[1]:
            state.dense_store().place(columns[:, None])
            state.stay()

    @full_precision
    def end_reading(self) -> None:
        """Evicts after a `reading()` block, by its window queries.

        Raises KvfoldError if a crop dropped all of these, and UnsupportedModel for latents.
        """
        state = self.state
        window = state.observers.window.prompt
        call = window.attended
        if call is None or state.store is None:
            return
        if call.key.shape[1] != state.store.keys.shape[1]:
            raise UnsupportedModel(
                "this model's cache holds latents, whose keys exist only inside a forward: name "
                "the turn's length, `with cache.reading(until=tokens):`, so that its last forward "
                "can compress"
            )
        if window.lost:
            raise KvfoldError(
                "the last queries of this turn, by which its entries are scored, were taken back: "
                "read at least one more token before the `cache.reading()` block ends"
            )
        state.observers.last_piece(state)
        end_prefill(state, observation_at(state, call, window.columns))
