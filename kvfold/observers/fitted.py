# SPDX-License-Identifier: Apache-2.0
"""Observations that were fitted for the model before: a scorer of entries, numbers of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor

from kvfold.observers.base import Layer, Need, Observer, V
from kvfold.observers.call import AttentionCall


class FileOfNumbers(Protocol):
    """A file of one `kind` of fitted numbers; "none": the bundled model's."""

    @property
    def kind(self) -> Any:
        """The class of its content."""

    @property
    def file(self) -> str:
        """Its path."""


class Known(Observer[V]):
    """A value that does not change while a text is read."""

    def __init__(self, value: V) -> None:
        super().__init__()
        self.value = value

    def fresh(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def of(self, layer: Layer, call: AttentionCall | None) -> V:
        return self.value


class ScoredOnce:
    """A layer's fitted scorer, which keeps its last scores: sizes and the choice ask for them."""

    def __init__(self, scorer: Any) -> None:
        self._scorer, self._keys = scorer, None
        self._scores: Tensor | None = None

    def __call__(self, observation: Any) -> Tensor:
        """Scores `[B, H, T]`, float32, of an observation's entries."""
        if self._scores is None or self._keys is not observation.keys:
            self._keys, self._scores = observation.keys, self._scorer.of(observation)
        return self._scores


class OfFittedScorer(Known[Callable[[Any], Tensor]]):
    """A layer's scorer."""

    def of(self, layer: Layer, call: AttentionCall | None) -> Callable[[Any], Tensor]:
        return ScoredOnce(self.value)


@dataclass(frozen=True)
class EntryScorer(Need[Callable[[Any], Tensor]]):
    """A fitted scorer of entries, for `observation.learned_scores()`."""

    words: ClassVar[str] = "a fitted scorer"
    keyword: ClassVar[str] = "scorer"
    field: ClassVar[str] = "scorer"

    file: FileOfNumbers

    def observer(self, fitted: Any = None) -> OfFittedScorer:
        return OfFittedScorer(fitted)

    def joined(self, other: EntryScorer) -> EntryScorer:
        return self

    @classmethod
    def of_ranks(cls, value: Any, join: Callable[..., Tensor], seen: Any) -> Any:
        # Each rank scores its own heads.
        return partial(_joined_scores, value, join, seen)


def _joined_scores(scorer: Any, join: Callable[..., Tensor], seen: Any, joined: Any) -> Tensor:
    return join(scorer(seen))


@dataclass(frozen=True)
class HeadNumbers(Need[Tensor]):
    """`[H]`: fitted numbers of this layer's KV heads."""

    words: ClassVar[str] = "fitted scores of heads"
    keyword: ClassVar[str] = "fitted_heads"
    field: ClassVar[str] = "fitted_heads"

    file: FileOfNumbers

    def observer(self, fitted: Any = None) -> Known[Tensor]:
        return Known(fitted)

    def joined(self, other: HeadNumbers) -> HeadNumbers:
        return self
