# SPDX-License-Identifier: Apache-2.0
"""A layer of heads of different lengths, or of encoded entries, while a graph decodes."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvfold.attention.call import AttentionCall
from kvfold.cache.layer import CompressedLayer
from kvfold.generation.static.layer import StaticLayer
from kvfold.kernels.quantized import Backend, attend_to_packed_segments, reads_packed
from kvfold.kernels.ragged import attend_to_segments
from kvfold.store.ragged import RaggedStore

# What changes more than its output cannot be replayed; older versions of torch have no such tag.
UNSAFE: dict[str, Any] = (
    {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
)
_next_number = count()
_decoding: WeakValueDictionary[int, StaticRagged] = WeakValueDictionary()


class StaticRagged(StaticLayer):
    """Goes on as eagerly, in one operation that the graph does not look into.

    What a graph looks into has one size for all heads, and would need back the memory that
    different lengths or encoded entries have freed. `backend` compiles what reads packed entries.
    """

    def __init__(self, layer: CompressedLayer, backend: Backend) -> None:
        super().__init__()
        self.layer, self.backend = layer, backend
        number = next(_next_number)
        _decoding[number] = self
        # Both are read on the CPU, at every step.
        self.number, self.seen = torch.tensor(number), torch.tensor(layer.state.seen)
        self.newest: tuple[Tensor, Tensor] | None = None
        newest = self._newest_tokens()
        # What comes is no padding, so that this does not change.
        self.padded = newest is not None and not bool(newest.all())

    @property
    def store(self) -> RaggedStore:
        """Where the layer's entries are."""
        return self.layer.state.ragged_store()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Leaves one entry per head `[B, H, 1, D]` for the attention that follows."""
        self.newest = key_states, value_states
        self.seen.add_(1)
        return self.newest

    def _attend(
        self, query: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        assert self.newest is not None
        keys, values = self.newest
        self.newest = None
        out: Tensor = _decode_segments(self.number, query, keys, values, scale, softcap, sinks)
        return out

    def step(self, call: AttentionCall) -> Tensor:
        """What an eager layer does with a query, and with one new entry per head `[B, H, 1, D]`."""
        layer = self.layer
        # An error from here on leaves keys without their values, or one layer of a pair alone.
        layer.binding.asked(first=False, level=True)
        keys, values = layer.update(call.key, call.value)
        stored = self.store.segments()
        tokens = self._newest_tokens() if self.padded else None
        options: dict[str, Any] = {
            "scale": call.scale,
            "softcap": call.softcap,
            "sinks": call.sinks,
        }
        if tokens is None and reads_packed(stored):
            out = attend_to_packed_segments(call.query, stored, backend=self.backend, **options)
        else:
            mask = None if tokens is None else tokens[:, None, None]
            out = attend_to_segments(call.query, stored, mask, **options)
        layer.finish(call._replace(key=keys, value=values))
        layer.binding.answered()
        return out

    def _newest_tokens(self) -> Tensor | None:
        """Which columns since the last compression are tokens `[B, n]`; None: all are."""
        tokens, (new, _) = self.layer.state.sequence.tokens(), self.store.new
        return None if tokens is None else tokens[:, self.layer.state.seen - new :]

    def hand_back(self, layer: CompressedLayer) -> None:
        layer.state.sequence.valid = layer.state.sequence.tokens()

    def nbytes(self, counted: set[int]) -> int:
        return sum(self.store.nbytes(counted))

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """Columns of the logical sequence, as a tensor."""
        return self.seen.clone()


@torch.library.custom_op(
    "kvfold::decode_segments",
    mutates_args=(),
    schema="(Tensor number, Tensor query, Tensor keys, Tensor values, float scale, "
    "float? softcap, Tensor? sinks) -> Tensor",
    **UNSAFE,
)
def _decode_segments(
    number: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`StaticRagged.step` of the layer with this number, a tensor: so one graph serves all."""
    return _decoding[int(number)].step(AttentionCall(query, keys, values, scale, softcap, sinks))


@_decode_segments.register_fake
def _output(number: Tensor, query: Tensor, *args: Tensor | float | None) -> Tensor:
    values = args[1]
    assert isinstance(values, Tensor)
    return query.new_empty(*query.shape[:3], values.shape[-1])
