# SPDX-License-Identifier: Apache-2.0
"""Cold entries that stay in their context file: read by offset, each block checked when first read.

A file that is replaced or deleted keeps its readers, as these hold it open. One that is cut short
or written to meanwhile is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import ContextFileError
from kvfold.kernels.cold import HostRows
from kvfold.kernels.cold_bytes import ColdBytes
from kvfold.kernels.native import files as native
from kvfold.kernels.views import starts_of
from kvfold.reading import opened_regular

COLD, SUMS = ".cold", ".sums"  # ends of names of cold entries, and of the sums of their blocks
BLOCK, SUM = 64, 16  # rows of a block, bytes of its sum
# By safetensors' names, of which it has no public table
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


def sums_of(rows: Tensor) -> Tensor:
    """Checksums `[blocks, 16]`, uint8, of each block of `rows [n, D]`."""
    blocks = rows.cpu().split(BLOCK) if len(rows) else ()
    sums = [_sum(block.contiguous().view(torch.uint8).numpy()) for block in blocks]
    return torch.tensor(list(b"".join(sums)), dtype=torch.uint8).view(-1, SUM)


def _sum(block: Any) -> bytes:
    return hashlib.blake2b(block, digest_size=SUM).digest()


class HeldFile:
    """A safetensors file that stays open, and where its tensors begin."""

    def __init__(self, place: Path, path: Path) -> None:
        """`place` is where it can be opened now, `path` how it is called."""
        self.path, self._lock = path, threading.Lock()
        with opened_regular(place) as file:
            self._file = FileIO(os.dup(file.fileno()))
        self._written = self._last_written()
        size = int.from_bytes(self.read(0, 8), "little")
        self._first, self._header = 8 + size, json.loads(self.read(8, size))

    def tensor(self, name: str) -> tuple[int, int, int, torch.dtype]:
        """First byte, rows, numbers of a row and dtype of a tensor `[n, D]`."""
        found = self._header[name]
        (rows, size), (first, end) = found["shape"], found["data_offsets"]
        dtype = DTYPES[found["dtype"]]
        if end - first != rows * size * dtype.itemsize:
            raise ValueError(f"{name} has another size than its shape")
        return self._first + first, rows, size, dtype

    def read(self, offset: int, count: int) -> bytes:
        """So many bytes from an offset on; raises ContextFileError if there are fewer."""
        found = b""
        while len(found) < count:  # some file systems give less at once
            piece = self._piece(offset + len(found), count - len(found))
            if not piece:
                raise ContextFileError.damaged(self.path, "it was cut short")
            found += piece
        return found

    def _piece(self, offset: int, count: int) -> bytes:
        """At most so many bytes from an offset on; none at the end of the file."""
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), count, offset)
        with self._lock:  # Windows
            self._file.seek(offset)
            return self._file.read(count)

    def read_rows(self, offsets: Tensor, out: Tensor) -> None:
        """Fills `out [n, bytes]`, uint8, with what begins at `offsets [n]`.

        Raises ContextFileError for a file that was cut short, or written to since it was opened.
        """
        if not native.available():
            rows = out.numpy()
            for row, offset in enumerate(offsets.tolist()):
                rows[row] = memoryview(self.read(offset, out.shape[1]))
        elif not native.read_rows(self._file.fileno(), offsets, out):
            raise ContextFileError.damaged(self.path, "it was cut short")
        self.check_unwritten()  # last, so that no write after the check of a block is missed

    def check_unwritten(self) -> None:
        """Raises ContextFileError for a file that was written to since it was opened."""
        if self._last_written() != self._written:
            raise ContextFileError(
                f"{self.path} was written to after it was loaded, and entries are read from it: "
                "load it again"
            )

    def _last_written(self) -> tuple[int, int]:
        """Size in bytes, and nanoseconds: they stay where a file is replaced or deleted."""
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns


@dataclass(frozen=True, eq=False)
class FileRows:
    """Rows `[n, D]` of segments, each a tensor of a file.

    Args:
        names: those of the tensors.
        first: their first bytes `[segments]`.
        lengths: rows of each.
        size, dtype: numbers of a row.
        blocks: where a segment's blocks begin in `sums` and `checked`, `[segments]`.
        sums: as of `sums_of`, `[all blocks, 16]`.
        checked: whether a block was read, `[all blocks]`; selections share it.
    """

    file: HeldFile
    names: list[str]
    first: Tensor
    lengths: list[int]
    size: int
    dtype: torch.dtype
    blocks: Tensor
    sums: Tensor
    checked: Tensor

    @classmethod
    def of(cls, file: HeldFile, names: list[str], sums: Sequence[Tensor]) -> FileRows:
        """The rows of tensors called `names`, with their `sums`; raises ValueError for a misfit."""
        found = [file.tensor(name) for name in names]
        lengths = [each[1] for each in found]
        (size,), (dtype,) = {each[2] for each in found}, {each[3] for each in found}
        counts = [-(-count // BLOCK) for count in lengths]
        if [tuple(each.shape) for each in sums] != [(count, SUM) for count in counts]:
            raise ValueError("cold entries and their sums that do not fit together")
        blocks = starts_of(tuple(counts))
        checked = torch.zeros(sum(counts), dtype=torch.bool)
        first = torch.tensor([each[0] for each in found])
        copied = torch.cat([*sums])  # what is mapped changes with the file
        return cls(file, names, first, lengths, size, dtype, blocks, copied, checked)

    @property
    def _row(self) -> int:
        return self.size * self.dtype.itemsize

    def at(self, segments: Tensor, places: Tensor) -> Tensor:
        blocks = places // BLOCK
        new = ~self.checked[self.blocks[segments] + blocks]
        if new.any():
            for i, block in torch.stack([segments[new], blocks[new]], 1).unique(dim=0).tolist():
                self._check(i, block)
        out = torch.empty(len(places), self._row, dtype=torch.uint8)
        self.file.read_rows(self.first[segments] + places * self._row, out)
        return out.view(self.dtype)

    def segment(self, i: int) -> Tensor:
        places = torch.arange(self.lengths[i])
        return self.at(torch.full_like(places, i), places)

    def select(self, segments: list[int]) -> FileRows:
        return replace(
            self,
            names=[self.names[i] for i in segments],
            lengths=[self.lengths[i] for i in segments],
            first=self.first[segments],
            blocks=self.blocks[segments],
        )

    def nbytes(self) -> ColdBytes:
        return ColdBytes(filed=sum(self.lengths) * self._row)

    def _check(self, i: int, block: int) -> None:
        """Raises ContextFileError, naming the rows, for a block of segment i that is damaged."""
        first = block * BLOCK
        rows = min(BLOCK, self.lengths[i] - first)
        found = self.file.read(int(self.first[i]) + first * self._row, rows * self._row)
        at = int(self.blocks[i]) + block
        if _sum(found) != bytes(self.sums[at].tolist()):
            self.file.check_unwritten()
            where = f"{self.names[i]} was altered in rows {first} to {first + rows - 1}"
            raise ContextFileError.damaged(self.file.path, where)
        self.checked[at] = True

    def __deepcopy__(self, memo: dict[int, Any]) -> FileRows:
        return self  # but for `checked` it never changes, and threads write there the same

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled are the rows themselves: their file may be gone where they are read again."""
        return HostRows.of, ([self.segment(i) for i in range(len(self.lengths))],)
