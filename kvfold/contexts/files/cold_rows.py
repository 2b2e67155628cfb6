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
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import ContextFileError
from kvfold.kernels.cold import HostRows
from kvfold.kernels.cold_bytes import ColdBytes
from kvfold.kernels.native import files as native
from kvfold.reading import opened_regular

COLD, SUMS = ".cold", ".sums"  # ends of names of cold entries, and of the sums of their blocks
BLOCK, SUM = 64, 16  # rows of a block, bytes of its sum
# By safetensors' names
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
                raise self.damaged("it was cut short")
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
            raise self.damaged("it was cut short")
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

    def damaged(self, how: str) -> ContextFileError:
        """The error for a file that is not as it was."""
        return ContextFileError(
            f"{self.path} is damaged, {how}: take another copy, or compress the document again"
        )


class FileRows:
    """Rows `[n, D]` of segments that are tensors of a file, called by their `names`."""

    def __init__(self, file: HeldFile, names: Sequence[str], sums: Sequence[Tensor]) -> None:
        """`sums` are those of `sums_of`; raises ValueError for tensors that they do not fit."""
        self._file, self._names, self._sums = file, list(names), list(sums)
        found = [file.tensor(name) for name in names]
        self._first, self.lengths = [each[0] for each in found], [each[1] for each in found]
        (self.size,), (self.dtype,) = {each[2] for each in found}, {each[3] for each in found}
        blocks = [(-(-count // BLOCK), SUM) for count in self.lengths]
        if [tuple(each.shape) for each in self._sums] != blocks:
            raise ValueError("cold entries and their sums that do not fit together")
        self._checked = [torch.zeros(count, dtype=torch.bool) for count, _ in blocks]

    @property
    def _row(self) -> int:
        return self.size * self.dtype.itemsize

    def at(self, segments: Tensor, places: Tensor) -> Tensor:
        for i in segments.unique().tolist():
            self._check(i, (places[segments == i] // BLOCK).unique())
        out = torch.empty(len(places), self._row, dtype=torch.uint8)
        offsets = torch.tensor(self._first)[segments] + places * self._row
        self._file.read_rows(offsets, out)
        return out.view(self.dtype)

    def segment(self, i: int) -> Tensor:
        places = torch.arange(self.lengths[i])
        return self.at(torch.full_like(places, i), places)

    def select(self, segments: list[int]) -> FileRows:
        return FileRows(
            self._file, [self._names[i] for i in segments], [self._sums[i] for i in segments]
        )

    def nbytes(self) -> ColdBytes:
        return ColdBytes(filed=sum(self.lengths) * self._row)

    def _check(self, i: int, blocks: Tensor) -> None:
        """Raises ContextFileError, naming the block, for one that is damaged; each is read once."""
        for block in blocks[~self._checked[i][blocks]].tolist():
            first = block * BLOCK
            rows = min(BLOCK, self.lengths[i] - first)
            found = self._file.read(self._first[i] + first * self._row, rows * self._row)
            if _sum(found) != bytes(self._sums[i][block].tolist()):
                self._file.check_unwritten()
                raise self._file.damaged(
                    f"{self._names[i]} was altered in rows {first} to {first + rows - 1}"
                )
            self._checked[i][block] = True

    def __deepcopy__(self, memo: dict[int, Any]) -> FileRows:
        return self  # it never changes, and its file stays open

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled are the rows themselves: their file may be gone where they are read again."""
        return HostRows.of, ([self.segment(i) for i in range(len(self.lengths))],)
