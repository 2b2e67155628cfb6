# SPDX-License-Identifier: Apache-2.0
"""Rows of a file that are read where they lie."""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

from kvfold.kernels.native.library import call, library


def read_rows(descriptor: int, offsets: Tensor, out: Tensor) -> bool:
    """Fills `out [n, bytes]`, uint8, from `offsets [n]`, int64; False if the file ends before."""
    if library() is not None and sys.platform != "win32":
        return call("read_rows", descriptor, offsets, out, *out.shape, torch.get_num_threads()) == 0
    size, rows = out.shape[1], out.numpy()
    for row, offset in enumerate(offsets.tolist()):
        if hasattr(os, "pread"):
            found = os.pread(descriptor, size, offset)
        else:  # Windows
            os.lseek(descriptor, offset, os.SEEK_SET)
            found = os.read(descriptor, size)
        if len(found) < size:
            return False
        rows[row] = memoryview(found)
    return True
