# SPDX-License-Identifier: Apache-2.0
"""`CacheParts`: what functions of a cache read, and the blocks in which its tokens come."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from torch import Tensor
from transformers.cache_utils import Cache

from kvfold.budget import Budget
from kvfold.cache.fits import Fits
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.model_binding import ModelBinding
from kvfold.cache.open_forward import OpenForward
from kvfold.cache.phase import Phase
from kvfold.cache.spans import Span
from kvfold.cache.state import LayerState
from kvfold.cache.tensor_parallel import Ranks
from kvfold.hf.stock_layers import layer_lengths
from kvfold.methods.base import Method


class CacheParts(Cache):
    """A cache's layers, what they share, and how they compress.

    `CompressedCache` makes them; a copy takes other ones by `copied`.
    """

    method: Method
    budget: Budget | None
    max_cache_tokens: int | None
    protect: tuple[Span, ...]
    ranks: Ranks
    fits: Fits
    phase: Phase
    binding: ModelBinding
    forward: OpenForward
    reads_logits: bool
    per_chunk: int | None = None  # tokens after which a prompt was compressed, each time
    _before_freezing: tuple[int, dict[int, Any]] | None = None

    def copied(self, **parts: Any) -> Self:
        """A copy that shares all but these parts."""
        other = copy.copy(self)
        other.take(**parts)
        return other

    def take(self, **parts: Any) -> None:
        """Takes parts in place of its own."""
        for name, part in parts.items():
            setattr(self, name, part)

    @property
    def compressed_layers(self) -> list[CompressedLayer]:
        """The layers that kvfold compresses, in order."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def states(self) -> list[LayerState]:
        """States of the compressed layers, in order."""
        return [layer.state for layer in self.compressed_layers]

    @property
    def rows(self) -> int:
        """Rows B of the batch; 0 before the first token."""
        store = self.states[0].store
        return 0 if store is None else store.keys.shape[0]

    def tokens_read(self) -> Tensor | None:
        """Bool mask `[B, seen]` of the columns that are no padding; None: all."""
        return self.states[0].sequence.tokens()

    def positions(self, layer: int) -> list[list[Tensor]]:
        """Columns stored by compressible layer `layer`, ascending: `[B][H]` of 1-D int64 tensors.

        Columns are those of the attention mask: padding counts, and is never listed itself.
        """
        own = self.states[layer]
        if own.store is None:
            return []
        return [[head[head >= 0] for head in row] for row in own.columns()]

    def other_layers(self) -> dict[int, Any]:
        """The layers that stay transformers' own: sliding windows and recurrent states."""
        return {i: x for i, x in enumerate(self.layers) if not isinstance(x, CompressedLayer)}

    @property
    def broke_off(self) -> bool:
        """True if a forward failed between layers, which no longer hold the same tokens."""
        return self.forward.states_moved or not self.is_level()

    def is_level(self) -> bool:
        """True if all layers have stored, and attended to, the same tokens."""
        return not self.binding.waiting and len(layer_lengths(self)) == 1

    # --- blocks -----------------------------------------------------------------------------

    @contextmanager
    def reading(self, until: int | None = None) -> Iterator[None]:
        """Joins several forwards into one prefill: nothing is compressed until the block ends.

        With `until`, the number of columns at which the prefill is complete, the forward that
        reaches it compresses, even after the block. After an error inside the block nothing is
        compressed.
        """
        self.phase.reading, self.phase.until = until is None, until or 0
        try:
            yield
        except BaseException:
            self.phase.until, self.phase.before_refit = 0, None
            raise
        finally:
            self.phase.end_reading()
        with self.phase.refitting():
            for layer in self.compressed_layers if until is None else []:
                layer.end_reading()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Evicts nothing inside the block, so that its tokens can be cropped afterwards."""
        before, self.phase.frozen = self.phase.frozen, True
        outer = self._before_freezing
        if outer is None:
            self._before_freezing = (self.get_seq_length(), copy.deepcopy(self.other_layers()))
            self.phase.freeze(True)
        try:
            yield
        finally:
            self.phase.frozen, self._before_freezing = before, outer
            if not before:
                self.phase.freeze(False)
                for layer in self.other_layers().values():
                    layer.record_past = False

    def _saved_at(self, length: int) -> dict[int, Any] | None:
        """Copies of the other layers, made when a `frozen()` block began at `length`; else None."""
        at, saved = self._before_freezing or (-1, None)
        return saved if at == length else None
