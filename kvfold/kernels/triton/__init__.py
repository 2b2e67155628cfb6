# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for NVIDIA GPUs, each with the meaning of a plain-torch function.

Triton is optional: only `kernels/dispatch.py` decides to import this package.
"""

from kvfold.kernels.triton.attention import Rectangle, Segments, attend
from kvfold.kernels.triton.column_sums import column_moments, column_sums
from kvfold.kernels.triton.gather import gather_rows
from kvfold.kernels.triton.plan import LaunchPlan, Room, plan_for
from kvfold.kernels.triton.quantize import pack_keys, pack_values

__all__ = [
    "LaunchPlan",
    "Rectangle",
    "Room",
    "Segments",
    "attend",
    "column_moments",
    "column_sums",
    "gather_rows",
    "pack_keys",
    "pack_values",
    "plan_for",
]
