# SPDX-License-Identifier: Apache-2.0
"""`CacheParts`: what functions of a cache read, and the blocks in which its tokens come."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Self

from torch import Tensor
from transformers.cache_utils import Cache

from kvfold.budget import Budget
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.model_binding import ModelBinding
from kvfold.cache.open_forward import OpenForward
from kvfold.cache.phase import Phase
from kvfold.cache.spans import Span
from kvfold.cache.state import LayerState
from kvfold.cache.tensor_parallel import Ranks
from kvfold.errors import UnsupportedModel
from kvfold.fitted.fits import Fits
from kvfold.hf.stock_layers import layer_lengths
from kvfold.methods.base import Method

_SEEN = attrgetter("sequence.seen")


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
    compressed_layers: list[CompressedLayer]  # in order; the others stay transformers' own
    states: list[LayerState]  # of the compressed layers
    _before_freezing: tuple[int, dict[int, Any]] | None = None

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self._note_layers()

    def copied(self, **parts: Any) -> Self:
        """A copy that shares all but these parts."""
        other = copy.copy(self)
        other.take(**parts)
        return other

    def take(self, **parts: Any) -> None:
        """Takes parts in place of its own."""
        for name, part in parts.items():
            setattr(self, name, part)
        if "layers" in parts:
            self._note_layers()

    def _note_layers(self) -> None:
        own = [layer for layer in self.layers if isinstance(layer, CompressedLayer)]
        self.compressed_layers, self.states = own, [layer.state for layer in own]

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
        return not self.binding.waiting and len(self._lengths()) == 1

    def common_length(self) -> int:
        """Tokens that each layer has; UnsupportedModel if a failed forward left them unlike."""
        lengths = self._lengths()
        if len(lengths) > 1:
            raise UnsupportedModel(
                f"the layers of this cache hold {min(lengths)} to {max(lengths)} tokens: the last "
                "forward failed, or single layers were cropped; make a new cache"
            )
        return lengths.pop()

    def _lengths(self) -> set[int]:
        """Numbers of tokens that layers with keys hold."""
        lengths = set(map(_SEEN, self.states))
        if len(self.states) < len(self.layers):
            lengths |= layer_lengths(self.other_layers().values())
        return lengths

    # --- blocks -----------------------------------------------------------------------------

    @contextmanager
    def reading(self, until: int | None = None) -> Iterator[None]:
        """Joins several forwards into one prefill: nothing is compressed until the block ends.

        With `until`, the number of columns at which the prefill is complete, the forward that
        reaches it compresses, even after the block. After an error inside the block nothing is
        compressed.
        """
        self.phase.begin_reading(until)
        try:
            yield
        except BaseException:
            self.phase.complete_at(0)
            self.phase.refit_by(None)
            raise
        finally:
            self.phase.end_reading()
        with self.phase.refitting():
            for layer in self.compressed_layers if until is None else []:
                layer.end_reading()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Evicts nothing inside the block, so that its tokens can be cropped afterwards."""
        before, outer = self.phase.frozen, self._before_freezing
        self.phase.freeze(True)
        if outer is None:
            self._before_freezing = (self.get_seq_length(), copy.deepcopy(self.other_layers()))
            self.phase.note_block(True)
        try:
            yield
        finally:
            self.phase.freeze(before)
            self._before_freezing = outer
            if not before:
                self.phase.note_block(False)
                for layer in self.other_layers().values():
                    layer.record_past = False

    def _saved_at(self, length: int) -> dict[int, Any] | None:
        """Copies of the other layers, made when a `frozen()` block began at `length`; else None."""
        at, saved = self._before_freezing or (-1, None)
        return saved if at == length else None
