# SPDX-License-Identifier: Apache-2.0
"""Numbers that `kvfold fit` fits for one model, and the files in which methods find them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from kvfold.errors import ScorerFileError
from kvfold.kernels.query_moments import QueryMoments


class FileName(str):
    """An option that names a file, "none" for no file; a server refuses it from clients."""


NO_FILE = FileName("none")


def named(file: str) -> str | None:
    """The file that an option names; None for no file."""
    return None if file == NO_FILE else file


@dataclass(frozen=True, eq=False)
class Fitted:
    """Numbers of one model, for each of its layers and KV heads.

    The fields of a subclass are tensors, and those of its files. `method` reads them,
    `command` fits them, and `bundled` is the file of the bundled model. `tables` are suffixes of
    text files that are read too, for a kind of one tensor `[L, H]`. `axes` has a letter for each
    axis of each tensor, which is of one size: D channels of a key, V of a value.
    """

    method: ClassVar[str]
    command: ClassVar[str]
    bundled: ClassVar[str]
    tables: ClassVar[tuple[str, ...]] = ()
    axes: ClassVar[dict[str, str]]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by their names."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    @property
    def numbers(self) -> int:
        """Numbers in all tensors."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by the letters of `axes`."""
        pairs = (
            zip(self.axes[name], each.shape, strict=True) for name, each in self.tensors.items()
        )
        return {letter: size for pair in pairs for letter, size in pair}

    def problem(self) -> str | None:
        """The fault of shapes or numbers that no fit gives, in words; None without any."""
        sizes = dict[str, int]()
        for name, tensor in self.tensors.items():
            if not (tensor.is_floating_point() and bool(tensor.isfinite().all())):
                return f"{name} has other than finite numbers"
            shape, axes = list(tensor.shape), self.axes[name]
            alike = len(shape) == len(axes) and all(
                sizes.setdefault(letter, size) == size
                for letter, size in zip(axes, shape, strict=True)
            )
            if not alike:
                return f"{name} has the shape {shape}"
        return None

    def check_entries(self, shapes: Iterable[tuple[int, int, int]]) -> None:
        """Raises ScorerFileError unless this is of entries of such shapes.

        Each has the KV heads of a layer, and the channels of a key and of a value.
        """
        for key, value in {each[1:] for each in shapes}:  # layers are mostly alike
            if not self.fits(key, value):
                raise ScorerFileError(
                    f"a file for {self.method} is not of keys and values of {key} and {value} "
                    f"channels, as this model has: `{self.command} --out FILE` makes one"
                )

    def fits(self, key: int, value: int) -> bool:
        """True if this may be of entries with so many channels."""
        return (self.sizes.get("D", key), self.sizes.get("V", value)) == (key, value)

    def check(self, file: str, layers: int, heads: int | None) -> None:
        """Raises ScorerFileError, naming the `file`, unless this is of as many layers and heads.

        None: layers differ in their KV heads, and only layers are compared.
        """
        of_layers, of_heads = next(iter(self.tensors.values())).shape[:2]
        if of_layers != layers or heads not in (None, of_heads):
            raise ScorerFileError(
                f"{file} is of {of_layers} layers of {of_heads} KV heads, and {layers} layers of "
                f"{heads or 'other'} are compressed: `{self.command} --out FILE` makes one"
            )

    def __deepcopy__(self, memo: Any) -> Any:
        return self


@dataclass(frozen=True)
class FittedFile:
    """A file of one `kind` of fitted numbers; "none": the one that ships with the bundled model."""

    kind: type[Fitted]
    file: str


class ScoredEntries(Protocol):
    """A fitted scorer's view of an observation: `values [B, H, T, Dv]`, un-rotated keys."""

    @property
    def values(self) -> Tensor: ...

    def unrotated(self) -> Tensor: ...


class LayerScores(Protocol):
    """A fitted scorer of one layer."""

    def of(self, observation: ScoredEntries) -> Tensor:
        """Scores `[B, H, T]`, float32, of an observation's entries."""


class FittedHeads(Protocol):
    """Fitted numbers `[L, H]` of KV heads."""

    heads: Tensor

    def of_layer(self, layer: int, heads: slice | None = None) -> Tensor:
        """Numbers `[H]` of one layer, of its KV heads `heads` (None: all)."""


class FittedMoments(Protocol):
    """Fitted moments of queries of all layers."""

    def of_layer(self, layer: int, heads: slice | None = None) -> QueryMoments:
        """Moments of one row, in one layer, of its KV heads `heads` (None: all)."""


class FittedScorer(Protocol):
    """A fitted scorer of all layers."""

    def of_layer(self, layer: int, heads: slice | None = None) -> LayerScores:
        """The scorer of one layer, of its KV heads `heads` (None: all)."""
