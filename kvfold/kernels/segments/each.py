# SPDX-License-Identifier: Apache-2.0
"""A step over raw segments on a CPU: segment by segment, then all tails."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.segments.parts import merged, tails
from kvfold.kernels.views import BLOCK, Flat, RaggedView

# query [·, H, G, D], keys, values → output [·, H, G, Dv], and the log-sum-exp [·, H, G]
_flash_on_cpu = torch._scaled_dot_product_flash_attention_for_cpu


def attend(query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions) -> Tensor:
    """Output `[B, Hq, 1, Dv]`, of parts that are joined by their log-sum-exps."""
    segments, scale = len(stored.keys.gaps), options["scale"]
    grouped = query.reshape(segments, 1, -1, query.shape[-1])
    # Torch's kernel gives each thread whole heads, so equal shares of a segment pose as heads: one
    # or more for every thread, of whole blocks.
    shares = min(BLOCK, 1 << (torch.get_num_threads() - 1).bit_length())
    rows = (grouped.expand(-1, shares, -1, -1) if shares > 1 else grouped).split(1)
    old_keys, old_values = stored.keys.encoded, stored.values.encoded
    assert isinstance(old_keys, Flat) and isinstance(old_values, Flat)
    biases: Sequence[Tensor | None] = [None] * segments
    if stored.bias is not None:
        assert isinstance(stored.bias.encoded, Flat)
        biases = stored.bias.encoded.in_shares(shares)
    old = zip(rows, old_keys.in_shares(shares), old_values.in_shares(shares), biases, strict=True)
    parts: list[tuple[Tensor, Tensor]] = []
    for row, keys, values, bias in old:
        if keys.numel():
            added = None if bias is None else bias.transpose(-1, -2).to(row.dtype)
            parts.append(_flash_on_cpu(row, keys, values, attn_mask=added, scale=scale))
        else:
            parts.append((torch.zeros_like(row), row.new_full(row.shape[:3], -torch.inf)))
    keys, values, hidden = tails(stored)
    of_tails = grouped.view(len(query), -1, *grouped.shape[2:])
    new = _flash_on_cpu(of_tails, keys, values, attn_mask=hidden, scale=scale)
    # Parts of each segment along axis 1: its shares, then its tail.
    old_outs, old_totals = zip(*parts, strict=True)
    new_outs, new_totals = new[0].flatten(0, 1)[:, None], new[1].flatten(0, 1)[:, None]
    outs = torch.cat([torch.cat(old_outs), new_outs], 1)
    totals = torch.cat([torch.cat(old_totals), new_totals], 1)
    return merged(outs, totals).view(*query.shape[:3], -1)
