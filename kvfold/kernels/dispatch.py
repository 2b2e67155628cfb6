# SPDX-License-Identifier: Apache-2.0
"""Which path a call takes: Triton, torch's own GPU kernels, or plain torch, which always works."""

from __future__ import annotations

import inspect
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from kvfold.kernels.swapped_qk import COLUMNS

Path = Literal["triton", "varlen", "flash", "torch"]
HALF = (torch.float16, torch.bfloat16)
KNOWN = (torch.float32, *HALF)
# Bytes of a row: programs hold whole rows in shared memory, and flash kernels know no larger heads.
LARGEST = 512
# Triton runs on a CPU where it was told so before it was imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def triton_available(tensor: Tensor) -> bool:
    """Whether Triton is installed, and runs where `tensor` is: on a GPU, or interpreted."""
    interpreted = INTERPRETED and tensor.device.type == "cpu"
    return (tensor.is_cuda or interpreted) and _installed("triton")


def varlen_available(tensor: Tensor) -> bool:
    """Whether torch's `varlen_attn` knows grouped queries, and takes such tensors."""
    return _on_gpu_in_half(tensor) and _varlen_groups()


def rows_path(query: Tensor, values: Tensor, *, softcap: float | None, masked: bool) -> Path:
    """For `query [B, Hq, S, D]` over segments of plain entries, values `[…, Dv]`.

    Sinks and other entries join the result through its log-sum-exp: they do not matter here.
    """
    single = query.shape[2] == 1 and not masked
    on_cpu = query.device.type == "cpu" and not INTERPRETED
    if on_cpu or not single or not _fits(query, values.shape[-1]):
        return "torch"
    if triton_available(query):
        return "triton"
    same = query.shape[-1] == values.shape[-1] and query.shape[-1] % 8 == 0
    return "varlen" if softcap is None and same and varlen_available(query) else "torch"


def packed_path(query: Tensor, *, value_size: int, masked: bool) -> Path:
    """As `rows_path`, over segments of packed entries."""
    single = query.shape[2] == 1 and not masked
    fits = single and _fits(query, value_size)
    return "triton" if fits and triton_available(query) else "torch"


def pack_path(rows: Tensor, group: int) -> Path:
    """For packing `rows [n, D]` in groups of this many numbers."""
    known = rows.dtype in KNOWN and group & (group - 1) == 0
    return "triton" if known and triton_available(rows) else "torch"


def columns_path(
    query: Tensor,
    value: Tensor,
    *,
    softcap: float | None,
    sinks: Tensor | None,
    masked: bool,
    squares: bool,
) -> Path:
    """For `query [B, Hq, S, D]` and value `[B, H, T, Dv]`; a mask is more than causality.

    Triton needs each query's log-sum-exp: `swapped_qk.causal_attention` has it with the output.
    """
    size = query.shape[-1]
    known = softcap is None and sinks is None and not masked and _on_gpu_in_half(query)
    if not known or size != value.shape[-1] or size % 8 or not _fits(query, size):
        return "torch"
    if triton_available(query):
        return "triton"
    return "flash" if not squares and _fits(query, size + COLUMNS) else "torch"


def gather_path(keys: Tensor) -> Path:
    """For copying kept entries of keys and values `[B, H, T, D]`."""
    return "triton" if triton_available(keys) else "torch"


def _fits(query: Tensor, value_size: int) -> bool:
    row = max(query.shape[-1], value_size) * query.dtype.itemsize
    return query.dtype in KNOWN and row <= LARGEST


def _on_gpu_in_half(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in HALF


@cache
def _installed(name: str) -> bool:
    return find_spec(name) is not None


@cache
def _varlen_groups() -> bool:
    try:
        varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return False
    return "enable_gqa" in inspect.signature(varlen_attn).parameters
