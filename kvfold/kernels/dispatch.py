# SPDX-License-Identifier: Apache-2.0
"""The only chooser of kernels: Triton, torch's own for GPUs, C++, or plain torch otherwise."""

from __future__ import annotations

import inspect
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, Unpack

import torch
from torch import Tensor

from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.native.columns import is_causal, vector_width
from kvfold.kernels.native.library import library
from kvfold.kernels.swapped_qk import COLUMNS
from kvfold.kernels.views import NOTHING, OTHER, Form, PartView, RaggedView

Path = Literal["triton", "varlen", "flash", "native", "torch"]
# Ways of attention to segments, each a function of `kernels/ragged.py`.
SegmentPath = Literal[
    "blocks", "each", "even", "packed", "per token", "planned", "raw", "recalled", "rows"
]
HALF = (torch.float16, torch.bfloat16)
KNOWN = (torch.float32, *HALF)
# Bytes of a row: Triton programs hold whole rows in shared memory; flash kernels take no more.
LARGEST = 512
FEW = 16  # queries below which C++ that packs all keys does not pay
# Triton's interpreter runs on a CPU if this variable was set before Triton was imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def triton_available(tensor: Tensor) -> bool:
    """True if Triton is installed and runs on the device of `tensor`: a GPU, or interpreted."""
    interpreted = INTERPRETED and tensor.device.type == "cpu"
    return (tensor.is_cuda or interpreted) and _installed("triton")


def varlen_available(tensor: Tensor) -> bool:
    """True if torch's `varlen_attn` supports grouped queries and takes such tensors."""
    return _on_gpu_in_half(tensor) and _varlen_groups()


def segments_path(
    query: Tensor, stored: RaggedView, *, masked: bool, **options: Unpack[LogitOptions]
) -> SegmentPath:
    """Path for `query [B, Hq, S, D]` over segments; `masked`: more than causality hides entries."""
    keys, values, unbiased = stored.keys, stored.values, stored.bias is None
    # Asked first without a call: a step comes here in every layer.
    triton = (query.is_cuda or INTERPRETED) and not masked
    triton = triton and step_path(query, values.tail.shape[-1]) == "triton"
    if triton and _plannable(stored):
        return "planned"
    form: Form = getattr(keys.encoded, "form", OTHER)
    if form.kind == "recalled":
        return "recalled"
    if masked or query.shape[2] > 1:
        return "blocks"
    of_values: Form = getattr(values.encoded, "form", OTHER)
    kind = form.kind if form.kind == of_values.kind else "other"
    softcap, size = options.get("softcap"), values.tail.shape[-1]
    plain = softcap is None and options.get("sink_logits") is None
    newest = max(keys.gaps) < keys.tail.shape[2]  # each segment has raw entries, too
    if kind == "raw" and newest:
        if unbiased and raw_path(query, keys.tail, values.tail) == "native":
            return "raw"
        if unbiased and rows_path(query, values.tail, softcap=softcap) != "torch":
            return "rows"
        if plain and query.shape[-1] == size and query.device.type == "cpu":
            return "each"
    elif kind == "packed" and unbiased:
        path = packed_path(query)
        if path == "native" and form == of_values and form.detail in KNOWN:
            return "packed"
    elif kind == "per token" and unbiased and newest and form == of_values:
        path = packed_path(query)
        if path == "native" and keys.gaps == values.gaps:
            return "per token"
    return "even" if plain and keys.even and values.even else "blocks"


def step_path(query: Tensor, value_size: int) -> Path:
    """Path for one `query [B, Hq, 1, D]` over entries of any kind, with values `[…, Dv]`."""
    if query.shape[2] > 1 or not _fits(query, value_size) or not triton_available(query):
        return "torch"
    # The kernel has no derivative, and graphs of torch.compile hold torch's own.
    learning = query.requires_grad and torch.is_grad_enabled()
    return "torch" if learning or torch.compiler.is_compiling() else "triton"


def _plannable(stored: RaggedView) -> bool:
    """True for keys, values and biases of the kinds that Triton's kernel reads together."""
    keys, values, bias = stored.keys, stored.values, stored.bias
    form, kind = _form(keys), _form(keys).kind
    biased = bias is not None and (_form(bias).kind != kind or bias.gaps != keys.gaps)
    if kind == "other" or biased:
        return False
    if kind == "packed":
        return _form(values).kind == kind
    return form == _form(values) and keys.gaps == values.gaps


def _form(part: PartView) -> Form:
    return NOTHING if part.encoded is None else getattr(part.encoded, "form", OTHER)


def rows_path(query: Tensor, values: Tensor, *, softcap: float | None) -> Path:
    """Path for unmasked `query [B, Hq, S, D]` over segments of raw entries with values `[…, Dv]`.

    Sink logits and tail entries join the result through its log-sum-exp.
    """
    size = query.shape[-1]
    alike = size == values.shape[-1] and size % 8 == 0 and _fits(query, size)
    if query.shape[2] > 1 or softcap is not None or not alike:
        return "torch"
    return "varlen" if varlen_available(query) else "torch"


def raw_path(query: Tensor, keys: Tensor, values: Tensor) -> Path:
    """Path for one `query [B, Hq, 1, D]` over raw keys and values, all of one dtype, on a CPU."""
    known = query.dtype in KNOWN and query.dtype == keys.dtype == values.dtype
    if not known or query.device.type != "cpu" or (query.requires_grad and torch.is_grad_enabled()):
        return "torch"
    # A graph cannot hold a call of C++, and torch's own work in it is compiled.
    if torch.compiler.is_compiling() or INTERPRETED:
        return "torch"
    return "native" if library() is not None else "torch"


def row_path(query: Tensor, key: Tensor, value: Tensor, options: LogitOptions) -> Path:
    """Path for one `query [B, Hq, 1, D]` over raw entries that returns its weights, too."""
    plain = options.get("softcap") is None and options.get("sink_logits") is None
    return raw_path(query, key, value) if plain and query.dtype == torch.float32 else "torch"


def packed_path(query: Tensor) -> Path:
    """Path for unmasked `query [B, Hq, S, D]` over segments of codes, without Triton."""
    if query.shape[2] > 1 or query.dtype not in KNOWN or query.device.type != "cpu":
        return "torch"
    return "native" if library() is not None else "torch"


def pack_path(rows: Tensor, group: int) -> Path:
    """Path for packing `rows [n, D]` in groups of `group` numbers."""
    known = rows.dtype in KNOWN and group & (group - 1) == 0
    return "triton" if known and triton_available(rows) else "torch"


def columns_path(
    query: Tensor, value: Tensor, *, masked: bool, squares: bool, **options: Unpack[LogitOptions]
) -> Path:
    """Path for column sums of `query [B, Hq, S, D]` over value `[B, H, T, Dv]`, but for C++.

    `masked`: more than causality hides entries. Triton needs each query's log-sum-exp, which
    `swapped_qk.causal_attention` returns with the output.
    """
    size = query.shape[-1]
    if not _plain(**options) or masked or not _on_gpu_in_half(query):
        return "torch"
    if size != value.shape[-1] or size % 8 or not _fits(query, size):
        return "torch"
    if triton_available(query):
        return "triton"
    return "flash" if not squares and _fits(query, size + COLUMNS) else "torch"


def columns_in_cpp(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Unpack[LogitOptions]
) -> bool:
    """True if C++ observes the columns of `query [B, Hq, S, D]`, which sees all but later entries.

    Key and value are `[B, H, T, …]`, the mask `[B or 1, Hq or 1, S, T]`.
    """
    if query.dtype != torch.float32 or not FEW <= query.shape[2] <= key.shape[2]:
        return False
    if not _plain(**options):
        return False
    if raw_path(query, key, value) != "native" or value.shape[-1] % vector_width():
        return False
    return mask is None or is_causal(mask)


def gather_path(keys: Tensor) -> Path:
    """Path for copying kept entries of keys and values `[B, H, T, D]`."""
    return "triton" if triton_available(keys) else "torch"


def _fits(query: Tensor, value_size: int) -> bool:
    row = max(query.shape[-1], value_size) * query.dtype.itemsize
    return query.dtype in KNOWN and row <= LARGEST


def _plain(**options: Unpack[LogitOptions]) -> bool:
    """True if logits are products times a scale, and weights of entries add up to 1."""
    return options.get("softcap") is None and options.get("sink_logits") is None


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
