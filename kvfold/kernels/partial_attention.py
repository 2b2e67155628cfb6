# SPDX-License-Identifier: Apache-2.0
"""Attention over a part of all entries: its output, and its mass, by which parts are joined.

Reference: `reference.attend_with_column_sums` over all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE = 2**23  # most logits of an intermediate result


class PartOutput(NamedTuple):
    """Output `[…, n, Dv]` over a part, 0 where nothing is visible, and mass `[…, n]`.

    The mass is the log-sum-exp of the part's logits, −∞ where nothing is visible.
    """

    out: Tensor
    mass: Tensor

    def at(self, *index: Any) -> PartOutput:
        """A part of it, by an index of the axes that both have."""
        return PartOutput(self.out[index], self.mass[index])


def part_logits(
    query: Tensor, keys: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Logits `[…, n, m]` of `query […, n, D]` and `keys […, m, D]`, at least float32.

    `bias […, m]` is added after the softcap.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = (query.to(wide) * scale) @ keys.to(wide).transpose(-1, -2)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits if bias is None else logits + bias[..., None, :].to(wide)


def attend_to_part(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    columns: Tensor | None = None,
    until: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float,
    softcap: float | None = None,
) -> PartOutput:
    """Attention of `query […, n, D]` over `keys […, m, D]` and values `[…, m, Dv]`.

    A query sees the entries whose `columns […, m]` are at most its `until […, n]`; None: all.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    query, keys, values = query.to(wide), keys.to(wide), values.to(wide)
    alike = softcap is None and keys.shape[-1] == values.shape[-1] and keys.shape[-2] > 0
    fused = alike and query.device.type == "cpu"
    rows = max(1, TILE // max(1, prod(keys.shape[:-1])))
    parts = []
    for start in range(0, query.shape[-2], rows):
        few, hidden = query[..., start : start + rows, :], None
        if columns is not None and until is not None:
            hidden = columns[..., None, :] > until[..., start : start + rows, None]
        if fused:
            parts.append(_fused(few, keys, values, bias, hidden, scale))
        else:
            logits = part_logits(few, keys, bias, scale, softcap)
            parts.append(_plain(logits, values, hidden))
    if not parts:
        empty = query.new_zeros(*query.shape[:-1], values.shape[-1])
        return PartOutput(empty, empty[..., 0])
    outs, masses = zip(*parts, strict=True)
    return PartOutput(torch.cat(outs, -2), torch.cat(masses, -1))


def _plain(logits: Tensor, values: Tensor, hidden: Tensor | None) -> PartOutput:
    """Output and mass of `logits […, n, m]`, which are overwritten."""
    if hidden is not None:
        logits.masked_fill_(hidden, -torch.inf)
    mass = logits.logsumexp(-1)
    finite = mass.clamp(min=torch.finfo(mass.dtype).min)
    return PartOutput(logits.sub_(finite[..., None]).exp_() @ values, mass)


def _fused(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    hidden: Tensor | None,
    scale: float,
) -> PartOutput:
    """As `_plain`, by torch's flash attention for a CPU, which returns the log-sum-exp too."""
    mask = None
    if bias is not None or hidden is not None:
        shape = *query.shape[:-1], keys.shape[-2]
        added = query.new_zeros(()) if bias is None else bias[..., None, :].to(query.dtype)
        mask = added if hidden is None else torch.where(hidden, -torch.inf, added)
        mask = mask.expand(shape).reshape(1, -1, *shape[-2:])
    queries, of_keys, of_values = (
        entries.reshape(1, -1, *entries.shape[-2:]) for entries in (query, keys, values)
    )
    out, mass = torch._scaled_dot_product_flash_attention_for_cpu(
        queries, of_keys, of_values, attn_mask=mask, scale=scale
    )
    out, mass = out.reshape(*query.shape[:-1], -1), mass.reshape(query.shape[:-1]).to(query.dtype)
    if hidden is None:
        return PartOutput(out, mass)
    blind = hidden.all(-1).expand(query.shape[:-1])
    return PartOutput(out.masked_fill(blind[..., None], 0), mass.masked_fill(blind, -torch.inf))


def largest_logits(
    query: Tensor,
    keys: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Largest logit `[…, n]` of each `query […, n, D]` over all `keys […, m, D]`."""
    rows = max(1, TILE // max(1, prod(keys.shape[:-1])))
    parts = query.split(rows, -2)
    return torch.cat([part_logits(q, keys, bias, scale, softcap).amax(-1) for q in parts], -1)


def joined_parts(parts: Sequence[PartOutput]) -> PartOutput:
    """Output and mass over several parts together."""
    masses = torch.stack([part.mass for part in parts])
    mass = masses.logsumexp(0)
    shares = (masses - mass.clamp(min=torch.finfo(mass.dtype).min)).exp()
    outs = torch.stack([part.out for part in parts])
    return PartOutput((outs * shares[..., None]).sum(0), mass)
