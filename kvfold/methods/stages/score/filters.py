# SPDX-License-Identifier: Apache-2.0
"""Scores by fitted filters, one direction for each KV head (Q-Filters)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from kvfold.fitted.numbers import Fitted

if TYPE_CHECKING:
    from kvfold.methods.observation import Observation


@dataclass(frozen=True, eq=False)
class Filters(Fitted):
    """Directions `[L, H, D]` in which the queries of each KV head lie, after RoPE.

    The larger a key's product with its filter, the larger the logits that it can expect. Filters
    published for kvpress point the other way.
    """

    method: ClassVar[str] = "qfilter"
    command: ClassVar[str] = "kvfold fit MODEL TEXTS --scorer qfilter"
    bundled: ClassVar[str] = "filters.safetensors"
    axes: ClassVar[dict[str, str]] = {"filters": "LHD"}
    filters: Tensor

    def of_layer(self, layer: int, heads: slice | None = None) -> LayerFilters:
        """The filters of one layer, of its KV heads `heads` (None: all)."""
        return LayerFilters(self.filters[layer, heads or slice(None)])


@dataclass(frozen=True, eq=False)
class LayerFilters:
    """Filters `[H, D]` of one layer."""

    filters: Tensor

    def of(self, observation: Observation) -> Tensor:
        """Products `[B, H, T]`, float32, of an observation's keys with the filters."""
        keys = observation.keys.float()
        return (keys @ self.filters[..., None].to(keys.device)).squeeze(-1)

    def __deepcopy__(self, memo: Any) -> LayerFilters:
        return self
