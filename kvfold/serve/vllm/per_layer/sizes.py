# SPDX-License-Identifier: Apache-2.0
"""Part of a context's positions that each layer holds, in whole pages."""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.contexts.files.format import Header
from kvfold.errors import KvfoldError
from kvfold.serve.vllm.equalize import EntryCounts

# Environment variable with the parts of all layers, as in "1,1,0.5,0.25".
VARIABLE = "KVFOLD_VLLM_PARTS"


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

    def level(self, header: Header) -> EntryCounts:
        """The largest counts for which every layer keeps enough entries.

        Raises KvfoldError for another number of layers, and what `EntryCounts.checked` raises.
        """
        if len(header.layers) != len(self.layers):
            raise KvfoldError(
                f"{VARIABLE} names {len(self.layers)} layers, and the context has "
                f"{len(header.layers)}"
            )
        least = [min(layer.kept) for layer in header.layers]
        most = min(int(kept / part) for kept, part in zip(least, self.layers, strict=True))
        for count in range(most, 0, -1):
            sizes = tuple(count - skipped(count, part, self.block) for part in self.layers)
            if all(size <= kept for size, kept in zip(sizes, least, strict=True)):
                return EntryCounts.checked(header, count, sizes)
        return EntryCounts.checked(header, 0, (0,) * len(least))


def parse_parts(text: str) -> tuple[float, ...]:
    """Parts from a text like "1,0.5"; raises KvfoldError for anything but numbers in (0, 1]."""
    try:
        parts = tuple(float(word) for word in text.split(","))
    except ValueError:
        parts = ()
    if not parts or not all(0 < part <= 1 for part in parts):
        raise KvfoldError(
            f"{VARIABLE}={text!r}: name the part of every layer, above 0 and up to 1, as in "
            '"1,1,0.5,0.25"'
        )
    return parts
