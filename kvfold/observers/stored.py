# SPDX-License-Identifier: Apache-2.0
"""Observations that are read off what a layer stores, when entries are scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvfold.errors import IllegalComposition
from kvfold.kernels.gather import pick
from kvfold.observers.base import Layer, Need, Needs, Observer, filled_up
from kvfold.observers.call import AttentionCall

OutputNorm = Literal["l2", "l1"]
# values [B, H, T, Dv] → norms [B, Hq, T] of what each query head adds to the model's dimension
ProjectedNorms = Callable[[Tensor], Tensor]


class OfTokenIds(Observer[Tensor]):
    """Ids of the stored entries' tokens."""

    def of(self, layer: Layer, call: AttentionCall | None) -> Tensor:
        columns, ids = layer.columns(), layer.token_ids()
        if ids is None:
            return torch.full_like(columns, -1)
        return pick(ids[:, None].expand(-1, columns.shape[1], -1), columns, -1)


@dataclass(frozen=True)
class TokenIds(Need[Tensor]):
    """`[B, H, T]`: each entry's token; −1 for padding, for holes, and where it is unknown."""

    empty: ClassVar[float | None] = -1
    reads_ids: ClassVar[bool] = True
    words: ClassVar[str] = "token ids"
    keyword: ClassVar[str] = "token_ids"
    field: ClassVar[str] = "token_ids"

    def observer(self, fitted: object = None) -> OfTokenIds:
        return OfTokenIds()


class OfKeyPositions(Observer[Tensor]):
    """Positions to which RoPE has rotated the stored keys."""

    def of(self, layer: Layer, call: AttentionCall | None) -> Tensor:
        return layer.key_positions()


@dataclass(frozen=True)
class KeysBeforeRope(Need[Tensor]):
    """`[B, H, T]`: the positions to which each key is rotated, for `observation.unrotated()`."""

    empty: ClassVar[float | None] = 0
    words: ClassVar[str] = "keys before RoPE"
    keyword: ClassVar[str] = "unrotated"
    field: ClassVar[str] = "key_positions"

    def observer(self, fitted: object = None) -> OfKeyPositions:
        return OfKeyPositions()

    def rotates_back(self, needs: Needs) -> bool:
        return True


class OfProjectedNorms(Observer[ProjectedNorms]):
    """Norms of values as the layer's W_o projects them."""

    def __init__(self, norm: OutputNorm) -> None:
        super().__init__()
        self.norm: OutputNorm = norm

    def fresh(self) -> OfProjectedNorms:
        return OfProjectedNorms(self.norm)

    def of(self, layer: Layer, call: AttentionCall | None) -> ProjectedNorms | None:
        if call is None:
            return None
        return partial(layer.plan.projection.norms, kind=self.norm, query_heads=call.query.shape[1])


@dataclass(frozen=True)
class OutputNorms(Need[ProjectedNorms]):
    """Norms of values, projected into the model's dimension: see `observation.output_norms()`."""

    words: ClassVar[str] = "norms of projected values"
    keyword: ClassVar[str] = "output_norms"
    field: ClassVar[str] = "norms_of_outputs"

    norm: OutputNorm = "l2"

    def observer(self, fitted: object = None) -> OfProjectedNorms:
        return OfProjectedNorms(self.norm)

    def joined(self, other: OutputNorms) -> OutputNorms:
        if self != other:
            raise IllegalComposition(
                "one method reads L1 norms of projected values, the other L2 norms: use one of them"
            )
        return self


class KeptScores(Observer[Tensor]):
    """Scores `[B, H, ≤ T]`, float32, of the entries that an eviction kept; NaN for none."""

    empties: ClassVar[dict[str, float]] = {"scores": torch.nan}

    @property
    def scores(self) -> Tensor | None:
        """Those of the last eviction."""
        return self.numbers.get("scores")

    def set(self, scores: Tensor) -> None:
        """Takes the scores of all stored entries `[B, H, T]`."""
        self.numbers = {"scores": scores}

    def of(self, layer: Layer, call: AttentionCall | None) -> Tensor:
        store = layer.stored()
        if self.scores is None:
            device = store.keys.device
            return torch.zeros(store.columns.shape, dtype=torch.float32, device=device)
        return filled_up(self.scores.nan_to_num(0), store.length, 0)


@dataclass(frozen=True)
class PreviousScores(Need[Tensor]):
    """`[B, H, T]`: scores at the method's last eviction; 0 for entries that it did not score."""

    empty: ClassVar[float | None] = 0
    words: ClassVar[str] = "its last scores"
    keyword: ClassVar[str] = "previous_scores"
    field: ClassVar[str] = "previous_scores"

    def observer(self, fitted: object = None) -> KeptScores:
        return KeptScores()


class KeyMoves(Observer[Tensor]):
    """Positions `[B, H, ≤ T]`, int32, by which stored keys were moved."""

    empties: ClassVar[dict[str, float]] = {"moves": 0}

    @property
    def moves(self) -> Tensor | None:
        """None if no key was."""
        return self.numbers.get("moves")

    def set(self, moves: Tensor | None) -> None:
        """Takes the moves of all stored keys."""
        self.numbers = {} if moves is None else {"moves": moves}
