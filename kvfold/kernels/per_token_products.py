# SPDX-License-Identifier: Apache-2.0
"""Products with entries that were quantized one by one, for torch.compile; none is decoded whole.

Reference: plain products with `RotatedKeys.decoded` and `TokenValues.decoded`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.codebook import levels, runs
from kvfold.kernels.per_token import FP8


def products_with_keys(query: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Products `[R, G, n]` of queries `[R, G, D]`, rotated as the keys are, and quantized keys.

    codes `[R, n, D·bits / 8]`, scales `[R, n, 1]`, in each of R segments.
    """
    query = _wide(query)
    if bits == 8:
        parts = [codes.view(FP8).to(query.dtype)]
    else:
        parts = [levels(run, bits, query.dtype) for run in runs(codes, bits)]
    pieces = query.chunk(len(parts), -1)
    found = []
    for head in range(query.shape[1]):
        # One sum over all channels: a sum along a row costs more than what is summed up.
        of_pairs = zip(parts, pieces, strict=True)
        products = [part * piece[:, head, None] for part, piece in of_pairs]
        found.append(_total(products).sum(-1))
    return torch.stack(found, 1) * scales[:, None, :, 0]


def sum_of_values(weights: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Sums `[R, G, Dv]` of quantized values, weighted `[R, G, n]`, in each of R segments.

    codes `[R, n, Dv·bits / 8]`, scales and minima `[R, n, 2]`.
    """
    weights, scales = _wide(weights), scales[:, None].to(_wide(weights).dtype)
    scaled = weights * scales[..., 0]
    lowest = (weights * scales[..., 1]).sum(-1, keepdim=True)
    rows = [row[..., None] for row in scaled.unbind(1)]
    mixed = [
        torch.stack([(part * row).sum(1) for row in rows], 1)
        for part in (run.to(weights.dtype) for run in runs(codes, bits))
    ]
    return torch.cat(mixed, -1) + lowest


def _total(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
