# SPDX-License-Identifier: Apache-2.0
"""What one layer of the cache holds: entries, where they stood, and what was observed of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvfold.cache.columns import Logical
from kvfold.cache.model_binding import Owner
from kvfold.cache.phase import Plan, Turn
from kvfold.cache.query_window import Attended, LastQueries
from kvfold.errors import KvfoldError
from kvfold.hf.rotation import Rotation
from kvfold.methods.observation import Observation
from kvfold.store.dense import DenseStore
from kvfold.store.ragged import SegmentStore
from kvfold.store.reindexed_sinks import MovingSinks

# What a layer keeps about its entries [B, H, T], in their order.
PER_ENTRY = ("sums", "squares", "rebuilding")


class Held(CacheLayerMixin):
    """A full-attention layer's state: logical lengths outwards, kept entries inwards."""

    is_croppable = True
    is_sliding = False

    def __init__(self, plan: Plan, turn: Turn, owner: Owner, rotation: Rotation) -> None:
        self.plan, self.turn, self.owner, self.rotation = plan, turn, owner, rotation
        self.reset()

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return None if self.store is None else self.store.keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return None if self.store is None else self.store.values

    def reset(self) -> None:
        """Forgets everything."""
        self.store: DenseStore | SegmentStore | None = None
        self.is_initialized = False
        self.logical = Logical()
        self.turns = 0
        # Tokens seen at the last change that no crop undoes: an eviction, an encoding, a score sum.
        self.evicted_at = 0
        self.settled = 0  # tokens seen when the layer was last brought to its budget
        self.sums: Tensor | None = None  # [B, H, T], attention received so far
        self.squares: Tensor | None = None  # [B, H, T], the same, squared
        self.rebuilding: Tensor | None = None  # [B, H, T], most attention while repeating the text
        self.capacity: Tensor | None = None  # [B], entries to hold while decoding
        # A capacity, its least and its most; what asks for them asks the device only once.
        self._asked: tuple[Tensor | None, int, int] = (None, 0, 0)
        self.merging: Tensor | None = None  # [B, H], what the compensation remembers
        self.surplus: int | None = None  # entries above capacity; None: not as many in all heads
        self.error: Tensor | None = None  # [B, 1 or 2], of its output: predicted, measured
        self.late = False  # compresses at the first generated token
        self.over_budget = False  # the forced set was larger than the budget
        self.last_queries = LastQueries(self.plan.stages.needs.window)
        self.sinks: MovingSinks | None = None

    def stored(self) -> DenseStore | SegmentStore:
        """The store of a layer that has been written to."""
        assert self.store is not None
        return self.store

    @property
    def seen(self) -> int:
        """Columns of the logical sequence."""
        return self.logical.seen

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens; raises KvfoldError past an eviction."""
        self.check_crop(tokens_to_remove)
        count = -tokens_to_remove
        if count == 0 or self.store is None:
            return
        self.store.crop(count)
        self.logical.crop(count)
        self.last_queries.crop(self.seen)
        self.settled = min(self.settled, self.seen)
        self.surplus = None if self.surplus is None else self.surplus - count
        self._per_entry(lambda x: x[..., : self.stored().length].clone())
        self.settle_sinks()

    def note_eviction(self) -> None:
        """Entries have just left: nothing older comes back, and re-indexed sinks move from now."""
        self.evicted_at = self.settled = self.seen
        self.let_sinks_move()

    def let_sinks_move(self) -> None:
        """Remembers re-indexed sinks as given, which they still are in the store."""
        stages = self.plan.stages
        if stages.positions == "reindex" and self.sinks is None:
            store = self.stored()
            assert isinstance(store, DenseStore)
            self.sinks = MovingSinks(store, self._first_slots(), stages.forced.sinks, self.rotation)

    def settle_sinks(self) -> None:
        """Moves re-indexed sinks to where all that is stored puts them."""
        if self.sinks is not None and isinstance(self.store, DenseStore):
            self.sinks.follow(self.store, self._first_slots(), self._evicted_per_row())

    def return_sinks(self) -> None:
        """Puts re-indexed sinks back as they were given, until more entries have left."""
        if self.sinks is not None and isinstance(self.store, DenseStore):
            self.sinks.restore(self.store, self._first_slots())
            self.sinks = None

    def keys_as_given(self) -> Tensor:
        """Stored keys `[B, H, T, D]` before any sink was moved."""
        store = self.stored()
        if self.sinks is None or not isinstance(store, DenseStore):
            return store.keys
        return self.sinks.as_given(store, self._first_slots())

    def _first_slots(self) -> Tensor | None:
        """The slot of each row's first token `[B, H, 1]`; None without padding, where it is 0."""
        if self.logical.valid is None:
            return None
        return (self.columns() >= 0).byte().argmax(-1, keepdim=True)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises KvfoldError where tokens cannot be taken back."""
        if tokens_to_remove > 0:
            raise KvfoldError(
                f"crop takes minus the number of tokens to drop, not {tokens_to_remove}"
            )
        if tokens_to_remove and self.store and self.seen + tokens_to_remove < self.evicted_at:
            raise KvfoldError(
                f"cannot take back {-tokens_to_remove} tokens: older entries were evicted, encoded "
                "or scored since, as those tokens came; generate inside `with cache.frozen():` "
                "what is to be taken back"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._index(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._index(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._index(lambda x: x[indices.to(x.device)])

    def _index(self, rows: Callable[[Tensor], Tensor]) -> None:
        if self.store is None:
            return
        longest = self.store.length
        self.store.index(rows)
        # The longest segment may be gone: shorter ones are filled up on the left.
        gone = longest - self.store.length
        self._per_entry(lambda x: rows(x[..., gone:]))
        self.logical.index(rows)
        self.last_queries.index(rows)
        for name in ("capacity", "merging", "error"):
            if getattr(self, name) is not None:
                setattr(self, name, rows(getattr(self, name)))
        if self.sinks is not None:
            self.sinks.index(rows)

    def _per_entry(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in PER_ENTRY:
            if getattr(self, name) is not None:
                setattr(self, name, change(getattr(self, name)))

    def columns(self) -> Tensor:
        """Logical columns of the stored entries `[B, H, T]`, −1 for padding."""
        return self.logical.real(self.stored().positions)

    def places(self) -> Tensor:
        """Each stored entry's number among its row's tokens `[B, H, T]`, −1 for padding."""
        return self.logical.places(self.columns())

    def later(self) -> int:
        """The most entries that a head stores of what came after the layer was last compressed."""
        held = self.capacity is not None and self.plan.stages.decode == "hold"
        if held and not self.turn.frozen:
            return 0
        return int((self.columns() >= self.settled).sum(-1).max())

    def seen_per_row(self) -> Tensor:
        """Tokens seen by each row `[B]`, padding left out."""
        keys = self.stored().keys
        return self.logical.per_row(len(keys), keys.device)

    def _evicted_per_row(self) -> Tensor:
        """Tokens seen but not stored `[B]`, where all heads store the same."""
        store = self.stored()
        if self.logical.valid is None and isinstance(store, DenseStore):
            return self.seen_per_row() - (store.length - store.dead)
        return self.seen_per_row() - (self.columns()[:, 0] >= 0).sum(-1)

    def capacities(self) -> tuple[int, int]:
        """The least and the most entries that a row holds while decoding; 0 if none is set."""
        if self._asked[0] is not self.capacity:
            rows = [0] if self.capacity is None else self.capacity.tolist()
            self._asked = self.capacity, min(rows), max(rows)
        return self._asked[1:]

    def state_bytes(self) -> int:
        """Bytes of all tensors beside the store."""
        tensors = [getattr(self, name) for name in (*PER_ENTRY, "capacity", "merging", "error")]
        tensors.append(self.logical.valid)
        if self.sinks is not None:
            tensors.append(self.sinks.given)
        held = sum(t.numel() * t.element_size() for t in tensors if t is not None)
        return held + self.last_queries.nbytes()

    # --- observe ----------------------------------------------------------------------------

    def _add_moments(self, sums: Tensor, squares: Tensor | None) -> None:
        self.evicted_at = self.seen
        self.sums = self._added(sums, self.sums)
        if squares is not None:
            self.squares = self._added(squares, self.squares)

    def _added(self, new: Tensor, old: Tensor | None) -> Tensor:
        new = self._per_stored_head(new)
        if old is not None:
            new[..., : old.shape[-1]].add_(old)
        return new

    def _add_maxima(self, maxima: Tensor) -> None:
        """Of the text's entries only: what repeats it is taken back."""
        assert self.turn.repeating is not None
        maxima = self._per_stored_head(maxima)[..., : self.turn.repeating.text]
        old = self.rebuilding
        self.rebuilding = maxima.clone() if old is None else torch.maximum(old, maxima)

    def _per_stored_head(self, scores: Tensor) -> Tensor:
        """Mean over the attention heads that one stored head serves (several for latents)."""
        if scores.shape[1] == self.stored().keys.shape[1]:
            return scores
        return scores.unflatten(1, (self.stored().keys.shape[1], -1)).mean(2)

    def _observation(self, attended: Attended) -> Observation:
        if attended.row is not None and self.plan.stages.needs.window <= 1:
            return self._observe(attended, None)
        query, columns = self.last_queries.joined(attended, self.logical)
        return self._observe(attended._replace(query=query), columns)

    def _observe(self, attended: Attended, query_columns: Tensor | None) -> Observation:
        store = self.stored()
        latents = attended.key.shape[1] // store.keys.shape[1]
        keys, values = (attended.key, attended.value) if latents > 1 else store.dense()

        def per_head(entries: Tensor | None) -> Tensor | None:
            if entries is None or latents == 1:
                return entries
            return entries.repeat_interleave(latents, 1)

        places = self.places()
        return Observation(
            keys,
            values,
            places if latents == 1 else places.repeat_interleave(latents, 1),
            attended.query,
            None if query_columns is None else self.logical.places(query_columns),
            attended.row,
            column_sums=per_head(self.sums),
            column_squares=per_head(self.squares),
            rebuilding=per_head(self.rebuilding),
            seen=self.seen_per_row(),
            layer=self.plan.layer,
            layers=self.plan.layers,
            scale=attended.scale,
            softcap=attended.softcap,
            sinks=attended.sinks,
            seed=self._draw(),
        )

    def _draw(self) -> int:
        """The seed of what is drawn now."""
        return hash((self.plan.seed, self.plan.layer, self.turns)) % 2**31
