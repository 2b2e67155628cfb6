# SPDX-License-Identifier: Apache-2.0
"""Entropy coding of integer streams, near the entropy of each.

Streams whose mean magnitudes are alike share a table of frequencies. A stream of large numbers is
written as two: n = 255·high + low.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvfold.codecs import ans
from kvfold.codecs.ans import TOTAL, Numbers
from kvfold.errors import ContextFileError

PEAK, BASE = 127, 255  # the largest magnitude in a table, and the numbers of such a table
MOST = PEAK * BASE + PEAK  # the largest magnitude of a symbol
FINENESS = 3  # tables for each doubling of the mean magnitude
MOST_TABLES = 255  # whose numbers fit into bytes
FEW = 2**18  # symbols that do not outweigh so many tables: there is one for each doubling


DTYPES = {
    "tables": torch.uint8,
    "wide": torch.int32,
    "peaks": torch.uint8,
    "frequencies": torch.int16,
    "states": torch.int32,
    "words": torch.int16,
}


@dataclass(frozen=True)
class CodedStreams:
    """Integer streams as bytes.

    Args:
        tables: one more than the number of each stream's table, uint8; streams of zeros have 0.
            Behind them, those of the high parts.
        wide: streams that have a high part, int32.
        peaks: largest magnitude of each table, uint8.
        frequencies: of all tables' numbers from -peak to peak, int16.
        states, words: of `ans`, int32 and int16, without signs.
    """

    tables: Tensor
    wide: Tensor
    peaks: Tensor
    frequencies: Tensor
    states: Tensor
    words: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in vars(self).values())


@dataclass(frozen=True)
class Tabulated:
    """Streams `[streams + wide]`, the table of each (0: none), and the tables' counts."""

    streams: list[Numbers]
    wide: list[int]
    tables: Numbers
    counts: list[Numbers]

    @property
    def parts(self) -> list[Numbers]:
        """The symbols of each table, from 0 on."""
        found = []
        for number, counts in enumerate(self.counts, 1):
            own = [self.streams[i] for i in np.flatnonzero(self.tables == number)]
            found.append(np.concatenate(own) + len(counts) // 2)
        return found


def encode(streams: Sequence[Tensor]) -> CodedStreams:
    """Codes 1-D streams of whole numbers up to `MOST` in magnitude."""
    plan = _planned(streams)
    frequencies = [_frequencies(counts) for counts in plan.counts]
    states, words = ans.encode(plan.parts, frequencies)
    stored = np.concatenate([np.zeros(0, np.int64), *frequencies])
    return CodedStreams(
        torch.from_numpy(plan.tables.astype(np.uint8)),
        torch.tensor(plan.wide, dtype=torch.int32),
        torch.tensor([len(each) // 2 for each in plan.counts], dtype=torch.uint8),
        torch.from_numpy(stored.astype(np.int16)),
        torch.from_numpy(states.view(np.int32)),
        torch.from_numpy(words.view(np.int16)),
    )


def expected_bytes(streams: Sequence[Tensor]) -> float:
    """About the bytes that `encode` takes, without coding."""
    plan = _planned(streams)
    bits = [-float(counts @ np.log2(_frequencies(counts) / TOTAL)) for counts in plan.counts]
    tables = sum(2 * len(counts) + 1 for counts in plan.counts)
    lanes = len(ans.Lanes.of([int(counts.sum()) for counts in plan.counts]).part)
    return sum(bits) / 8 + len(plan.tables) + 4 * len(plan.wide) + tables + 4 * lanes


def decode(coded: CodedStreams, counts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Each stream that is not all zero, by its number, int16; `counts` are the streams' lengths.

    Raises ContextFileError for streams that do not fit the counts.
    """
    if any(part.dim() != 1 or part.dtype != DTYPES[name] for name, part in vars(coded).items()):
        raise ContextFileError("the streams of the codec are damaged: they have another shape")
    wide, of_stream = coded.wide.tolist(), coded.tables.numpy()
    once = len(set(wide)) == len(wide) and set(wide) <= set(range(len(counts)))
    if len(of_stream) != len(counts) + len(wide) or not once:
        raise ContextFileError("the streams of the codec do not fit the context's entries")
    lengths = [*counts, *(counts[i] for i in wide)]
    tables = list(_tables(coded))
    owners = [np.flatnonzero(of_stream == number).tolist() for number in range(1, len(tables) + 1)]
    of_table = [sum(lengths[i] for i in own) for own in owners]
    states, words = coded.states.numpy().view(np.uint32), coded.words.numpy().view(np.uint16)
    parts = ans.decode(of_table, tables, states, words)
    found = dict[int, Tensor]()
    for own, part, table in zip(owners, parts, tables, strict=True):
        symbols = torch.from_numpy(part).to(torch.int16) - len(table) // 2
        found |= zip(own, symbols.split([lengths[i] for i in own]), strict=True)
    for high, low in enumerate(wide, len(counts)):
        if high in found:
            found[low] = found[high] * BASE + found.get(low, 0)
            del found[high]
    yield from found.items()


def _tables(coded: CodedStreams) -> Iterator[Numbers]:
    """The frequencies of each table; raises ContextFileError for others than `encode` writes."""
    sizes = [2 * peak + 1 for peak in coded.peaks.tolist()]
    if (
        len(sizes) > MOST_TABLES
        or len(coded.frequencies) != sum(sizes)
        or int(coded.tables.numpy().max(initial=0)) > len(sizes)
    ):
        raise ContextFileError("the tables of a coded stream are damaged")
    for table in coded.frequencies.split(sizes):
        wide = table.numpy().astype(np.int64)
        if wide.min() < 1 or wide.sum() != TOTAL:
            raise ContextFileError("the tables of a coded stream are damaged")
        yield wide


def _planned(streams: Sequence[Tensor]) -> Tabulated:
    numbers = [stream.to(torch.int16).numpy() for stream in streams]
    wide = [i for i, each in enumerate(numbers) if np.abs(each).max(initial=0) > PEAK]
    highs = [np.rint(numbers[i] / BASE).astype(np.int16) for i in wide]
    for i, high in zip(wide, highs, strict=True):
        numbers[i] = numbers[i] - BASE * high
    numbers += highs
    fineness = FINENESS if sum(map(len, numbers)) >= FEW else 1
    levels = np.array([_level(each, fineness) for each in numbers])
    tables, counts = np.zeros(len(numbers), np.int64), list[Numbers]()
    for level in np.unique(levels[np.isfinite(levels)]):
        of_level = levels == level
        own = np.concatenate([numbers[i] for i in np.flatnonzero(of_level)])
        peak = int(np.abs(own).max())
        counts.append(np.bincount(own + peak, minlength=2 * peak + 1))
        tables[of_level] = len(counts)
    return Tabulated(numbers, wide, tables, counts)


def _level(stream: Numbers, fineness: int) -> float:
    """The doublings of a stream's mean magnitude, in steps of 1/`fineness`; infinite for zeros."""
    total = int(np.abs(stream).sum(dtype=np.int64))
    return float(np.rint(fineness * np.log2(total / len(stream)))) if total else -np.inf


def _frequencies(counts: Numbers) -> Numbers:
    """Counts scaled to the sum `TOTAL`, and at least 1."""
    scaled: Numbers = counts * (TOTAL - len(counts)) // counts.sum() + 1
    scaled[scaled.argmax()] += TOTAL - scaled.sum()
    return scaled
