# SPDX-License-Identifier: Apache-2.0
"""Rows of a file that are read where they lie."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from kvfold.kernels.native.library import call, library


def available() -> bool:
    """True if the library is there and this system reads at an offset."""
    return library() is not None and sys.platform != "win32"


def read_rows(descriptor: int, offsets: Tensor, out: Tensor) -> bool:
    """Fills `out [n, bytes]`, uint8, from `offsets [n]`, int64; False if the file ends before.

    Needs `available()`.
    """
    return call("read_rows", descriptor, offsets, out, *out.shape, torch.get_num_threads()) == 0
