# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for NVIDIA GPUs, each with the meaning of a plain-torch function.

Triton is optional: only `kernels/dispatch.py` decides to import this package.
"""

from kvfold.kernels.triton.column_sums import column_moments, column_sums
from kvfold.kernels.triton.gather import gather_rows
from kvfold.kernels.triton.per_token import attend_to_per_token
from kvfold.kernels.triton.quantize import pack_keys, pack_values
from kvfold.kernels.triton.quantized import attend_to_packed
from kvfold.kernels.triton.ragged import attend_to_rows
from kvfold.kernels.triton.splits import Splits

__all__ = [
    "Splits",
    "attend_to_packed",
    "attend_to_per_token",
    "attend_to_rows",
    "column_moments",
    "column_sums",
    "gather_rows",
    "pack_keys",
    "pack_values",
]
