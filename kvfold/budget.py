# SPDX-License-Identifier: Apache-2.0
"""How much may be kept: exact integer counts of stored entries."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from kvfold.errors import BudgetError

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}

# Up to here a float counts every whole number.
MOST = 2**53


@dataclass(frozen=True)
class Budget:
    """How many entries a cache may keep; an entry is one token of one KV head in one layer.

    Make one with `tokens`, `ratio` or `bytes`, or from a plain value with `of`.
    """

    kind: Literal["tokens", "ratio", "bytes"]
    amount: float

    def __post_init__(self) -> None:
        number = isinstance(self.amount, int | float) and not isinstance(self.amount, bool)
        if not number or not math.isfinite(self.amount):
            raise BudgetError(f"a budget is a finite number, not {self.amount!r}")
        if self.kind != "ratio" and self.amount != int(self.amount):
            raise BudgetError(f"{self.kind} are counted in whole numbers, not {self.amount}")
        if self.amount >= MOST:
            raise BudgetError(
                f"a budget of {self.amount:.3g} {self.kind} is more than can be counted"
            )
        if not self.amount > 0:
            raise BudgetError(f"a budget must be positive, not {self.amount}")
        if self.kind == "ratio" and self.amount > 1:
            raise BudgetError(
                f"a ratio is the part kept, at most 1.0, not {self.amount}; for tokens give an int"
            )

    @classmethod
    def tokens(cls, count: int) -> Budget:
        """`count` entries per layer and KV head on average, sinks and windows included."""
        return cls("tokens", count)

    @classmethod
    def ratio(cls, kept: float) -> Budget:
        """`floor(kept × tokens seen)` entries per layer and KV head on average."""
        return cls("ratio", kept)

    @classmethod
    def bytes(cls, size: int | str) -> Budget:
        """Whole-cache size, as a number of bytes or a text such as "2GiB"."""
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)\s*", str(size))
        if not match or match[2].upper() not in UNITS:
            raise BudgetError(f"cannot read {size!r} as a size: write for example 512MiB or 2GB")
        return cls("bytes", int(float(match[1]) * UNITS[match[2].upper()]))

    @classmethod
    def of(cls, value: Budget | float | str) -> Budget:
        """From an int (tokens), a float in (0, 1] (ratio), or "512", "0.2", "20%", "2GiB"."""
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise BudgetError(f"a budget is an int, a float or a text, not {value!r}")
        if isinstance(value, int):
            return cls.tokens(value)
        if isinstance(value, float):
            return cls.ratio(value)
        text = value.strip()
        if re.fullmatch(r"-?\d+", text):
            return cls.tokens(int(text))
        if re.fullmatch(r"-?\d*\.\d+|\d+\.", text):
            return cls.ratio(float(text))
        if re.fullmatch(r"-?(\d+\.?\d*|\.\d+)%", text):
            return cls.ratio(float(text[:-1]) / 100)
        return cls.bytes(text)

    def per_layer(self, seen: int, entry_bytes: int, layers: int, heads: int, rows: int) -> int:
        """Entries per KV head, summed over `layers`, that one row may keep.

        `seen` is the row's unpadded length, `entry_bytes` what one entry costs in its store.
        """
        if self.kind == "tokens":
            return int(self.amount) * layers
        if self.kind == "ratio":
            return math.floor(self.amount * seen + 1e-9) * layers
        return int(self.amount) // (rows * heads * entry_bytes)

    def __str__(self) -> str:
        if self.kind == "ratio":
            return f"{self.amount:g} of the tokens seen"
        return f"{int(self.amount)} {self.kind}"
