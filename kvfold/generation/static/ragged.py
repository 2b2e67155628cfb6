# SPDX-License-Identifier: Apache-2.0
"""A layer with a ragged store while a compiled graph decodes."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvfold.cache.layer import CompressedLayer
from kvfold.generation.static.layer import StaticLayer
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.ragged import attend_to_segments
from kvfold.observers.call import AttentionCall
from kvfold.store.ragged import RaggedStore

# CUDA graphs cannot replay an operation with side effects; older versions of torch lack the tag.
UNSAFE: dict[str, Any] = (
    {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
)
_next_number = count()
_decoding: WeakValueDictionary[int, StaticRagged] = WeakValueDictionary()


class StaticRagged(StaticLayer):
    """Eager decoding of one layer, as one custom operation that is opaque to the graph.

    Tensors inside a graph have one size for all heads, and would take the memory that different
    lengths or encoded entries have freed.
    """

    def __init__(self, layer: CompressedLayer) -> None:
        super().__init__()
        self.layer = layer
        number = next(_next_number)
        _decoding[number] = self
        # Both are read on the CPU, at every step.
        self.number, self.seen = torch.tensor(number), torch.tensor(layer.state.seen)
        self.newest: tuple[Tensor, Tensor] | None = None
        newest = self._newest_tokens()
        # New tokens are no padding but in rows that have ended, whose output nobody reads.
        self.padded = newest is not None and not bool(newest.all())

    @property
    def store(self) -> RaggedStore:
        """The layer's store."""
        return self.layer.state.ragged_store()

    def _take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Holds one new entry per head `[B, H, 1, D]` until attention stores it."""
        self.newest = keys, values
        self.seen.add_(1)
        return self.newest

    def _attend(self, query: Tensor, options: LogitOptions) -> Tensor:
        assert self.newest is not None
        keys, values = self.newest
        self.newest = None
        scale, softcap, sinks = options["scale"], options.get("softcap"), options.get("sink_logits")
        out: Tensor = _decode_segments(self.number, query, keys, values, scale, softcap, sinks)
        return out

    def step(self, call: AttentionCall) -> Tensor:
        """Eager step with a query `[B, Hq, 1, D]` and one new entry per head `[B, H, 1, D]`.

        Stores, attends, and lets the layer evict and encode; returns the output `[B, Hq, 1, Dv]`.
        """
        layer = self.layer
        # An error from here on leaves keys without their values, or one layer of a pair alone.
        layer.binding.asked()
        keys, values = layer.update(call.key, call.value)
        layer.leave_out_ended()
        stored = self.store.segments()
        tokens = self._newest_tokens() if self.padded else None
        mask = None if tokens is None else tokens[:, None, None]
        out = attend_to_segments(call.query, stored, mask, **call.logits)
        layer.finish(call._replace(key=keys, value=values))
        layer.binding.answered()
        return out

    def _newest_tokens(self) -> Tensor | None:
        """Bool mask `[B, n]` of the columns since the last compression; False at padding."""
        tokens, (new, _) = self.layer.state.sequence.tokens(), self.store.new
        return None if tokens is None else tokens[:, self.layer.state.seen - new :]

    def hand_back(self, layer: CompressedLayer) -> None:
        layer.state.sequence.note_mask(layer.state.sequence.tokens())
        layer.leave_out_ended()

    def nbytes(self, counted: set[int]) -> int:
        return sum(self.store.nbytes(counted))

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """Columns of the logical sequence, as a tensor."""
        return self.seen.clone()


@torch.library.custom_op(
    "kvfold::decode_segments",
    mutates_args=(),
    schema="(Tensor number, Tensor query, Tensor keys, Tensor values, float scale, "
    "float? softcap, Tensor? sink_logits) -> Tensor",
    **UNSAFE,
)
def _decode_segments(
    number: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """`StaticRagged.step` of layer `number`, a tensor so that one graph serves all layers."""
    options: LogitOptions = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits}
    return _decoding[int(number)].step(AttentionCall(query, keys, values, options))


@_decode_segments.register_fake
def _output(number: Tensor, query: Tensor, *args: Tensor | float | None) -> Tensor:
    values = args[1]
    assert isinstance(values, Tensor)
    return query.new_empty(*query.shape[:3], values.shape[-1])
