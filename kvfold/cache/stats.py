# SPDX-License-Identifier: Apache-2.0
"""`Stats`: entries and bytes of a cache, counted from the tensors it owns."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count, islice

from kvfold.kernels.cold_bytes import ColdBytes

OVER_BUDGET = "the budget leaves no room beside the forced set, so a ratio evicts nothing of a row"


@dataclass(frozen=True, repr=False)
class Stats:
    """Entries and bytes of a cache: prints in a few lines, layer by layer with `details()`.

    `kept[l][b][h]` entries of the compressible layers, and bytes.

    A prompt was compressed at its end, or, where `per_chunk` is not None, after each piece of at
    most so many tokens, which is an approximation. `seen` is the logical length, padding included;
    `seen_per_row` leaves padding out. `nbytes` sums every tensor of the compressible layers: keys
    and values, positions, state (score sums, remembered queries, padding), and slack for tokens to
    come. `nbytes_full` is what transformers' own cache would hold for them. `other_layers` are left
    as they are: sliding windows and recurrent states, outside all these numbers. `other_bytes` are
    theirs, and `id_bytes` of the ids of the tokens read, 4 each in host memory.
    `inexact` says why a method keeps another number of entries than its budget, where it does.
    `protected` tokens of each row are kept beside the budget. `errors[l]` are a budget-free
    method's relative errors of the layer's output: predicted and, if it was asked to, measured.
    `refits[l]` are a refit's relative errors of the layer's output on held-out reference queries
    with the kept entries as they were, and refitted; the heads whose values a guard held back; and
    the entries without weight. These are means over rows.
    `later` are a KV head's entries that came after the last compression, on average; `budget` does
    not bound them, but `later_budget` entries do where a chat has one. `cold` bytes of recall are
    not in `nbytes`: in host memory, in a context file, and those that queries have read so far.
    """

    method: str
    budget: str
    per_chunk: int | None
    seen: int
    seen_per_row: list[int]
    protected: list[int]
    kept: list[list[list[int]]]
    kv_bytes: int
    position_bytes: int
    state_bytes: int
    slack_bytes: int
    id_bytes: int
    nbytes_full: int
    other_layers: dict[int, str]
    other_bytes: int
    forced_over_budget: bool
    inexact: str
    errors: list[list[float]]
    later: float = 0
    later_budget: int | None = None
    refits: list[list[float]] = field(default_factory=list)
    cold: ColdBytes = field(default_factory=ColdBytes)

    @property
    def nbytes(self) -> int:
        """All bytes of the compressible layers."""
        return self.kv_bytes + self.position_bytes + self.state_bytes + self.slack_bytes

    @property
    def layers(self) -> list[int]:
        """The model's numbers of the compressible layers, in the order of `kept`."""
        own = (layer for layer in count() if layer not in self.other_layers)
        return list(islice(own, len(self.kept)))

    @property
    def ratio(self) -> float:
        """`nbytes / nbytes_full`."""
        return self.nbytes / self.nbytes_full if self.nbytes_full else 1.0

    @property
    def kept_fraction(self) -> float:
        """Entries stored over entries seen."""
        stored = sum(count for layer in self.kept for row in layer for count in row)
        heads = len(self.kept[0][0]) if self.kept and self.kept[0] else 0
        seen = sum(self.seen_per_row) * len(self.kept) * heads
        return stored / seen if seen else 1.0

    @property
    def mean_kept(self) -> float:
        """Entries per layer, row and KV head."""
        counts = [count for layer in self.kept for row in layer for count in row]
        return sum(counts) / len(counts) if counts else 0.0

    def __repr__(self) -> str:
        return (
            f"Stats(method={self.method!r}, budget={self.budget!r}, seen={self.seen}, "
            f"kept_fraction={self.kept_fraction:.3g}, nbytes={self.nbytes}, "
            f"nbytes_full={self.nbytes_full})"
        )

    def __str__(self) -> str:
        lines = [
            f"{self.method}, budget {self.budget}",
            f"seen {self.seen:,} tokens, kept {self.kept_fraction:.1%} of the entries"
            f"{self._per_head()}",
            f"bytes {self.nbytes:,} of {self.nbytes_full:,} ({self.ratio:.1%}){self._of_others()}",
        ]
        if self.later and (self.budget != "none" or self.later_budget is not None):
            lines.append(self._later())
        if any(self.cold):
            lines.append(self._cold())
        if self.per_chunk is not None:
            lines.append(f"compressed after every {self.per_chunk} tokens of the prompt")
        if self.forced_over_budget:
            lines.append(OVER_BUDGET)
        if self.inexact and self.kept_fraction < 1:
            lines.append(
                f"{self.mean_kept - self.later:,.1f} entries per layer and KV head are kept where "
                f"the budget is {self.budget}: {self.inexact}"
            )
        if any(self.refits):
            lines.append(self._refitted())
        if any(self.protected):
            lines.append(f"protected beside the budget: {max(self.protected)} tokens")
        return "\n".join(lines)

    def details(self) -> str:
        """The printed lines, with bytes by purpose and a line for each layer."""
        lines = [
            str(self),
            f"keys and values {self.kv_bytes:,} bytes, positions {self.position_bytes:,}, "
            f"state {self.state_bytes:,}, slack {self.slack_bytes:,}; beside them token ids, "
            f"{self.id_bytes:,}",
        ]
        for index, (number, layer) in enumerate(zip(self.layers, self.kept, strict=True)):
            line = f"layer {number:3d}  kept {_range([n for row in layer for n in row])}"
            names = zip(("predicted", "measured"), self.errors[index], strict=False)
            lines.append(line + "".join(f"  {name} error {error:.3f}" for name, error in names))
        lines += [f"layer {index}: {kind}, as it is" for index, kind in self.other_layers.items()]
        return "\n".join(lines)

    def _of_others(self) -> str:
        """Bytes of the layers that are left as they are; empty before the first token."""
        if not (self.kept and self.other_layers):
            return ""
        return f", beside {self.other_bytes:,} of {len(self.other_layers)} other layers"

    def _refitted(self) -> str:
        """Line about the refit: mean errors over layers, and sums of what was held back."""
        layers = [layer for layer in self.refits if layer]
        before, after = (sum(layer[i] for layer in layers) / len(layers) for i in (0, 1))
        guarded, dead = (sum(layer[i] for layer in layers) for i in (2, 3))
        return (
            f"refitted: error of held-out outputs {before:.3f} to {after:.3f}, values held back in "
            f"{guarded:g} heads, {dead:g} entries without weight"
        )

    def _cold(self) -> str:
        """Line about the entries that stay outside of these bytes."""
        of_file = f" and {self.cold.filed:,} in the file" if self.cold.filed else ""
        return (
            f"cold beside them {self.cold.host:,} bytes in host memory{of_file}, of which queries "
            f"have read {self.cold.read:,}"
        )

    def _later(self) -> str:
        """Line about the entries after the last compression and their bound."""
        before = self.mean_kept - self.later
        bound = "which no budget bounds"
        if self.later_budget is not None:
            bound = f"whose own budget is {self.later_budget:,}"
        added = f"{self.later:,.0f} added after it"
        return f"of these {before:,.0f} of the compressed text, {added}, {bound}"

    def _per_head(self) -> str:
        """Range of entries per layer and KV head; empty before the first token."""
        counts = [count for layer in self.kept for row in layer for count in row]
        return f", {_range(counts)} per layer and KV head" if counts else ""


def _range(counts: list[int]) -> str:
    """Text of the smallest and the largest count, or of the one count."""
    low, high = min(counts, default=0), max(counts, default=0)
    return f"{low:,} to {high:,}" if high > low else f"{low:,}"
