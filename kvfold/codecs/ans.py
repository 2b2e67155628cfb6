# SPDX-License-Identifier: Apache-2.0
"""Range asymmetric numeral systems: symbols of known frequencies, near their entropy.

Symbols are cut into lanes, each with a state of its own, and all lanes take one step at a time, as
vectors. Source: Duda, section 4 (arXiv 1311.2540); Giesen (arXiv 1402.3392).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import ContextFileError

BITS = 14  # of a table's sum
TOTAL = 1 << BITS
WORD = 16  # bits that a state gives away or takes at once
LEAST = 1 << WORD  # of a state
MOST_LANES, FEWEST_STEPS = 1024, 2048  # a lane takes four bytes, a step as long as some symbols

Numbers = NDArray[np.integer]


@dataclass(frozen=True)
class Lanes:
    """A cut of symbols into lanes of up to `steps` symbols, the longest first.

    Args:
        part: the part of the symbols that each lane belongs to.
        begin: each lane's first symbol in its part.
        active: lanes that are as long as each step `[steps]`.
    """

    part: Numbers
    begin: Numbers
    active: list[int]

    @classmethod
    def of(cls, counts: Sequence[int]) -> Lanes:
        """Lanes of parts with `counts` symbols."""
        steps = max(FEWEST_STEPS, -(-sum(counts) // MOST_LANES))
        of_part = [np.arange(0, count, steps) for count in counts]
        part = np.repeat(np.arange(len(counts)), [len(each) for each in of_part])
        begin = np.concatenate([np.zeros(0, np.int64), *of_part]).astype(np.int64)
        lengths = np.minimum(np.array(counts, np.int64)[part] - begin, steps)
        order = np.argsort(-lengths, kind="stable")
        longest = int(lengths.max(initial=0))
        active = len(lengths) - np.searchsorted(np.sort(lengths), np.arange(longest), "right")
        return cls(part[order], begin[order], active.tolist())

    def rows(self, parts: Sequence[Numbers]) -> Numbers:
        """Symbols `[steps, lanes]` of parts; 0 behind a lane's end."""
        made = np.zeros((len(self.part), len(self.active)), np.int64)
        for row, part, begin in zip(made, self.part, self.begin, strict=True):
            own = parts[part][begin : begin + len(row)]
            row[: len(own)] = own
        return np.ascontiguousarray(made.T)

    def parts(self, rows: Numbers, counts: Sequence[int]) -> list[Numbers]:
        """Parts of symbols `[steps, lanes]`."""
        made = [np.zeros(count, rows.dtype) for count in counts]
        for row, part, begin in zip(
            np.ascontiguousarray(rows.T), self.part, self.begin, strict=True
        ):
            own = made[part][begin : begin + len(row)]
            own[:] = row[: len(own)]
        return made


def encode(parts: Sequence[Numbers], tables: Sequence[Numbers]) -> tuple[Numbers, Numbers]:
    """States `[lanes]` and words, both unsigned, of symbols.

    `tables` are the frequencies of each part's symbols: at least 1, of sum `TOTAL`.
    """
    lanes = Lanes.of([len(part) for part in parts])
    frequencies = np.concatenate([np.zeros(0, np.int64), *tables]).astype(np.int64)
    starts = np.concatenate([np.zeros(0, np.int64), *(np.cumsum(each) - each for each in tables)])
    first = np.cumsum([0, *(len(each) for each in tables)])[lanes.part]
    symbols, words = lanes.rows(parts) + first, list[Numbers]()
    states = np.full(len(lanes.part), LEAST, np.int64)
    for count, row in zip(reversed(lanes.active), symbols[::-1], strict=True):
        state, at = states[:count], row[:count]
        frequency = frequencies[at]
        full = np.flatnonzero(state >= frequency << (2 * WORD - BITS))
        words.append(state[full] & (LEAST - 1))
        state[full] >>= WORD
        state[:] = (state // frequency << BITS) + state % frequency + starts[at]
    found = np.concatenate([np.zeros(0, np.int64), *reversed(words)])
    return states.astype(np.uint32), found.astype(np.uint16)


def decode(
    counts: Sequence[int], tables: Sequence[Numbers], states: Numbers, words: Numbers
) -> list[Numbers]:
    """Symbols of parts with `counts`, uint8; raises ContextFileError for other states and words."""
    lanes = Lanes.of(counts)
    if len(states) != len(lanes.part):
        raise ContextFileError("a coded stream is damaged: it has another length")
    symbol, frequency, offset = _by_slot(tables)
    base, state, taken = lanes.part * TOTAL, states.astype(np.int64), 0
    made = np.zeros((len(lanes.active), len(state)), np.uint8)
    for row, count in zip(made, lanes.active, strict=True):
        own = state[:count]
        at = base[:count] + (own & (TOTAL - 1))
        symbol.take(at, out=row[:count])
        own >>= BITS
        own *= frequency.take(at)
        own += offset.take(at)
        low = np.flatnonzero(own < LEAST)
        found = words[taken : taken + len(low)]
        if len(found) != len(low):
            raise ContextFileError("a coded stream is damaged: it ends early")
        own[low] = own[low] << WORD | found
        taken += len(low)
    if taken != len(words) or bool((state != LEAST).any()):
        raise ContextFileError("a coded stream is damaged: it does not end where it began")
    return lanes.parts(made, counts)


def _by_slot(tables: Sequence[Numbers]) -> tuple[Numbers, Numbers, Numbers]:
    """Symbols, frequencies and slots since the symbol's first, of each slot of each table."""
    slots = len(tables) * TOTAL
    symbol, frequency = np.zeros(slots, np.uint8), np.zeros(slots, np.uint16)
    offset = np.zeros(slots, np.uint16)
    for number, table in enumerate(tables):
        own = slice(number * TOTAL, (number + 1) * TOTAL)
        symbol[own] = np.repeat(np.arange(len(table)), table)
        frequency[own] = np.repeat(table, table)
        offset[own] = np.arange(TOTAL) - np.repeat(np.cumsum(table) - table, table)
    return symbol, frequency, offset
