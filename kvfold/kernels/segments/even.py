# SPDX-License-Identifier: Apache-2.0
"""A step over segments of one length, raw or encoded, as batched products."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.per_token import RotatedKeys
from kvfold.kernels.segments.parts import softmax
from kvfold.kernels.views import PartView, RaggedView


def attend(query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions) -> Tensor:
    """Output `[B, Hq, 1, Dv]` over segments of one length."""
    grouped = (query * options["scale"]).reshape(len(stored.keys.gaps), -1, query.shape[-1])
    joined = torch.cat(_products_even(grouped, stored.keys), -1)
    if stored.bias is not None:
        joined = joined + torch.cat(stored.bias.rectangles(), 1).transpose(1, 2)
    weights = softmax(joined, None).to(query.dtype)
    values = stored.values.rectangles()
    of_old, *of_new = weights.split([piece.shape[1] for piece in values], -1)
    mixed = of_old @ values[0]
    for of_piece, piece in zip(of_new, values[1:], strict=True):
        mixed = torch.baddbmm(mixed, of_piece, piece)
    return mixed.view(*query.shape[:3], -1)


def _products_even(query: Tensor, keys: PartView) -> list[Tensor]:
    """Products `[R, G, ·]` of `query [R, G, D]` with keys of R segments of one length."""
    if isinstance(keys.encoded, RotatedKeys) and keys.encoded.even:
        return [keys.encoded.products(query), query @ keys.newest.transpose(1, 2)]
    return [query @ piece.transpose(1, 2) for piece in keys.rectangles()]
