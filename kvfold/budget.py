# SPDX-License-Identifier: Apache-2.0
"""Budgets of a cache: the number of entries to keep, as exact integer counts."""

from __future__ import annotations

import math
import numbers
import operator
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal

from kvfold.errors import BudgetError

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}

# A number and a unit
SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)\s*")

# A float64 represents every whole number below this.
MOST = 2**53


@dataclass(frozen=True)
class Budget:
    """Number of entries that a cache keeps; an entry is one token of one KV head in one layer.

    Made with `tokens`, `ratio` or `bytes`, or from a plain value with `of`. Raises BudgetError for
    amounts that are not finite, not positive or too large, and for a ratio above 1.
    """

    kind: Literal["tokens", "ratio", "bytes"]
    amount: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "amount", _plain(self.amount))
        # First, as an int this long may not become a float or a text.
        if self.amount <= -MOST:
            raise BudgetError("a budget must be positive")
        if self.amount >= MOST:
            raise BudgetError(
                f"a budget of {MOST:,} or more is more than can be counted: choose a smaller one"
            )
        if math.isnan(self.amount):
            raise BudgetError("a budget is a number, not nan")
        if self.kind != "ratio" and self.amount != int(self.amount):
            raise BudgetError(f"{self.kind} are counted in whole numbers, not {self.amount}")
        if not self.amount > 0:
            raise BudgetError(f"a budget must be positive, not {self.amount}")
        if self.kind == "ratio" and self.amount > 1:
            raise BudgetError(
                f"a ratio is the part kept, at most 1.0, not {self.amount}; for tokens give an int"
            )

    @classmethod
    def tokens(cls, count: int) -> Budget:
        """A mean of `count` entries per layer and KV head, sinks and recent window included."""
        return cls("tokens", count)

    @classmethod
    def ratio(cls, kept: float) -> Budget:
        """A mean of `floor(kept × tokens seen)` entries per layer and KV head."""
        return cls("ratio", kept)

    @classmethod
    def bytes(cls, size: int | str) -> Budget:
        """Size of the whole cache, all rows and layers: bytes, or a text such as "2GiB".

        Raises BudgetError for a text that is not a size.
        """
        amount = _read_size(size) if isinstance(size, str) else _plain(size)
        return cls("bytes", math.floor(amount) if abs(amount) < MOST else amount)

    @classmethod
    def of(cls, value: Budget | float | str) -> Budget:
        """A budget from an int (tokens), a float in (0, 1] (ratio), "512", "0.2", "20%" or "2GiB".

        Numbers may be numpy scalars or tensors of one element. Raises BudgetError for other values.
        """
        if isinstance(value, Budget):
            return value
        if not isinstance(value, str):
            number = _plain(value)
            return cls.tokens(number) if isinstance(number, int) else cls.ratio(number)
        text = value.strip()
        if re.fullmatch(r"-?\d+", text):
            return cls("tokens", _read_whole(text))
        if re.fullmatch(r"-?\d*\.\d+|\d+\.", text):
            return cls.ratio(float(text))
        if re.fullmatch(r"-?(\d+\.?\d*|\.\d+)\s*%", text):
            return cls.ratio(float(Decimal(text[:-1]) / 100))
        size = SIZE.fullmatch(text)
        if size is None or size[2].upper() not in UNITS:
            raise BudgetError(
                f"cannot read {value!r} as a budget: write 512 for tokens, 0.2 or 20% for a part "
                "of them, 512MiB for bytes"
            )
        return cls.bytes(text)

    def for_each(self, rows: int) -> Budget:
        """This budget for each of `rows` rows: a budget in bytes is that of all rows together."""
        return replace(self, amount=self.amount * rows) if self.kind == "bytes" else self

    def per_layer(self, seen: int, entry_bytes: int, layers: int, heads: int, rows: int) -> int:
        """Entries per KV head of one row, summed over `layers` compressed layers.

        Args:
            seen: tokens of the row, without padding.
            entry_bytes: bytes of one entry (key and value of one KV head) in its store.
            layers: number of compressed layers.
            heads: H, KV heads; only a budget in bytes depends on them.
            rows: B, rows that share a budget in bytes.
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


def _plain(value: Any) -> int | float:
    """A Python, numpy or torch number as an int or float; raises BudgetError for others."""
    truth = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    if not truth and getattr(value, "ndim", 0) == 0:
        try:
            return operator.index(value)
        except TypeError:
            pass
        if isinstance(value, numbers.Real) or hasattr(value, "ndim"):
            try:
                few_bits = getattr(value, "itemsize", 8) < 8  # of which 0.2 stays 0.2
                return float(f"{float(value):.6g}") if few_bits else float(value)
            except OverflowError:
                return math.inf
            except (TypeError, ValueError, RuntimeError):
                pass
    raise BudgetError(f"a budget is an int, a float or a text, not {value!r}")


def _read_whole(digits: str) -> int | float:
    """The whole number that `digits` spell; infinity for more of them than Python reads."""
    try:
        return int(digits)
    except ValueError:
        return math.inf


def _read_size(text: str) -> float:
    """The bytes of a text such as "2GiB"; raises BudgetError for a text that is not a size."""
    match = SIZE.fullmatch(text)
    if not match or match[2].upper() not in UNITS:
        raise BudgetError(f"cannot read {text!r} as a size: write for example 512MiB or 2GB")
    return float(match[1]) * UNITS[match[2].upper()]
