# SPDX-License-Identifier: Apache-2.0
"""What a cache holds now, counted from the tensors it owns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """`kept[l][b][h]` entries of the compressible layers, and bytes.

    A prompt was compressed at its end, or, where `per_chunk` is not None, after each piece of at
    most so many tokens, which is an approximation. `seen` is the logical length, padding included;
    `seen_per_row` leaves padding out. `nbytes` sums every tensor of the compressible layers: keys
    and values, positions, state (score sums, remembered queries, padding), and slack for tokens to
    come. `nbytes_full` is what transformers' own cache would hold for them. `other_layers` are left
    as they are, outside all these numbers.
    `protected` tokens of each row are kept beside the budget. `errors[l]` are a budget-free
    method's relative errors of the layer's output: predicted and, if it was asked to, measured.
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
    nbytes_full: int
    other_layers: dict[int, str]
    forced_over_budget: bool
    errors: list[list[float]]

    @property
    def nbytes(self) -> int:
        """All bytes of the compressible layers."""
        return self.kv_bytes + self.position_bytes + self.state_bytes + self.slack_bytes

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

    def __str__(self) -> str:
        lines = [
            f"{self.method}, budget {self.budget}",
            f"seen {self.seen} tokens, kept {self.kept_fraction:.1%} of the entries",
            f"bytes {self.nbytes:,} of {self.nbytes_full:,} ({self.ratio:.1%}): "
            f"keys and values {self.kv_bytes:,}, positions {self.position_bytes:,}, "
            f"state {self.state_bytes:,}, slack {self.slack_bytes:,}",
        ]
        if self.per_chunk is not None:
            lines.append(f"compressed after every {self.per_chunk} tokens of the prompt")
        if self.forced_over_budget:
            lines.append("the budget came out below the forced set, which was kept")
        if any(self.protected):
            lines.append(f"protected beside the budget: {max(self.protected)} tokens")
        for index, layer in enumerate(self.kept):
            flat = [count for row in layer for count in row]
            low, high = (min(flat), max(flat)) if flat else (0, 0)
            line = f"layer {index:3d}  kept {low}" + (f" to {high}" if high > low else "")
            names = zip(("predicted", "measured"), self.errors[index], strict=False)
            lines.append(line + "".join(f"  {name} error {error:.3f}" for name, error in names))
        lines += [f"layer {index}: {kind}, as it is" for index, kind in self.other_layers.items()]
        return "\n".join(lines)
