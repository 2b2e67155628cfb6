# SPDX-License-Identifier: Apache-2.0
"""Part of a context's positions that each layer holds, in whole pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvfold.contexts.files.header import Header
from kvfold.errors import KvfoldError
from kvfold.serve.vllm.export import EntryCounts

# Environment variable with the parts of all layers, as in "1,1,0.5,0.25".
VARIABLE = "KVFOLD_VLLM_PARTS"
BLOCK = 32  # entries of a page: the fewest of vLLM's CPU kernels


def skipped(count: int, part: float, block: int) -> int:
    """Leading positions, of `count`, that a layer with `part` of a context lacks: whole pages."""
    return int((1 - part) * count) // block * block


@dataclass(frozen=True)
class Parts:
    """Parts in (0, 1] of all layers, and `block`, the entries of a page."""

    layers: tuple[float, ...]
    block: int

    @classmethod
    def of(cls, text: str, block: int) -> Parts:
        """From the variable's text; raises KvfoldError for anything but numbers in (0, 1]."""
        return cls(parse_parts(text), block)

    def check_layers(self, layers: int) -> None:
        """Raises KvfoldError unless there is a part for each of so many layers."""
        if layers != len(self.layers):
            raise KvfoldError(
                f"{len(self.layers)} parts are named, and there are {layers} layers: name a part "
                "for each"
            )

    def level(self, header: Header) -> EntryCounts:
        """The largest counts for which every layer keeps enough entries.

        Raises KvfoldError for another number of layers, and UnevenContext.
        """
        self.check_layers(len(header.layers))
        least = [min(layer.kept) for layer in header.layers]
        most = min(int(kept / part) for kept, part in zip(least, self.layers, strict=True))
        for count in range(most, 0, -1):
            sizes = tuple(count - skipped(count, part, self.block) for part in self.layers)
            if all(size <= kept for size, kept in zip(sizes, least, strict=True)):
                return EntryCounts.checked(header, count, sizes)
        return EntryCounts.checked(header, 0, (0,) * len(least))


def block_size(arguments: Sequence[str]) -> int:
    """Entries of a page, by vLLM's arguments; BLOCK where they do not say.

    Raises KvfoldError for anything but a whole number above 0.
    """
    for word, after in pairwise([*arguments, ""]):
        name, _, value = word.partition("=")
        if name == "--block-size":
            given = value or after
            if not given.isdecimal() or int(given) == 0:
                raise KvfoldError(f"--block-size is a number of entries, not {given!r}")
            return int(given)
    return BLOCK


def parse_parts(text: str) -> tuple[float, ...]:
    """Parts from a text like "1,0.5"; raises KvfoldError for anything but numbers in (0, 1]."""
    try:
        parts = tuple(float(word) for word in text.split(","))
    except ValueError:
        parts = ()
    if not parts or not all(0 < part <= 1 for part in parts):
        raise KvfoldError(
            f"parts {text!r}: name the part of every layer, above 0 and up to 1, as in "
            '"1,1,0.5,0.25"'
        )
    return parts
