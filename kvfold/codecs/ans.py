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
from kvfold.kernels.native.library import call, library

BITS = 14  # of a table's sum
TOTAL = 1 << BITS
WORD = 16  # bits that a state gives away or takes at once
LEAST = 1 << WORD  # of a state
SYMBOLS = 256  # most of a table
MOST_LANES, FEWEST_STEPS = 1024, 2048  # a lane takes four bytes, a step as long as some symbols

Numbers = NDArray[np.integer]

EARLY = "a coded stream is damaged: it ends early"


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
    decoded = _decoded_by_numpy if library() is None else _decoded_natively
    parts, taken, left = decoded(lanes, counts, tables, states, words)
    if taken != len(words) or bool((left != LEAST).any()):
        raise ContextFileError("a coded stream is damaged: it does not end where it began")
    return parts


def _decoded_by_numpy(
    lanes: Lanes, counts: Sequence[int], tables: Sequence[Numbers], states: Numbers, words: Numbers
) -> tuple[list[Numbers], int, Numbers]:
    """Symbols of parts, the number of words that were read, and the states that are left."""
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
            raise ContextFileError(EARLY)
        own[low] = own[low] << WORD | found
        taken += len(low)
    return lanes.parts(made, counts), taken, state


def _decoded_natively(
    lanes: Lanes, counts: Sequence[int], tables: Sequence[Numbers], states: Numbers, words: Numbers
) -> tuple[list[Numbers], int, Numbers]:
    """As `_decoded_by_numpy`, in C++."""
    ends = np.cumsum(counts, dtype=np.int64)
    begin = (ends - counts)[lanes.part] + lanes.begin
    symbol = np.concatenate([np.zeros(0, np.uint8), *map(_symbols, tables)])
    frequency = np.zeros((len(tables), SYMBOLS), np.uint32)
    for row, table in zip(frequency, tables, strict=True):
        row[: len(table)] = table
    start = np.cumsum(frequency, 1, dtype=np.uint32) - frequency
    state, made = states.astype(np.uint32), np.zeros(int(ends[-1]) if counts else 0, np.uint8)
    taken = call(
        "decode_lanes",
        *(np.append(words, np.uint16(0)), len(words), state),
        *(np.array(lanes.active, np.int64), len(lanes.active), lanes.part.astype(np.int64)),
        *(begin.astype(np.int64), symbol, frequency, start, BITS, made),
    )
    if taken < 0:
        raise ContextFileError(EARLY)
    return np.split(made, ends[:-1]) if counts else [], taken, state


def _symbols(table: Numbers) -> Numbers:
    """The symbol of each slot of a table."""
    return np.repeat(np.arange(len(table), dtype=np.uint8), table)


def _by_slot(tables: Sequence[Numbers]) -> tuple[Numbers, Numbers, Numbers]:
    """Symbols, frequencies and slots since the symbol's first, of each slot of each table."""
    slots = len(tables) * TOTAL
    symbol, frequency = np.zeros(slots, np.uint8), np.zeros(slots, np.uint16)
    offset = np.zeros(slots, np.uint16)
    for number, table in enumerate(tables):
        own = slice(number * TOTAL, (number + 1) * TOTAL)
        symbol[own] = _symbols(table)
        frequency[own] = np.repeat(table, table)
        offset[own] = np.arange(TOTAL) - np.repeat(np.cumsum(table) - table, table)
    return symbol, frequency, offset
