# SPDX-License-Identifier: Apache-2.0
"""Attention to parts of segments, and how their outputs are joined."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.kernels.gather import as_added
from kvfold.kernels.views import BLOCK, RaggedView


def attended(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Output `[…, G, Dv]` of `query […, G, D]`, and log-sum-exp `[…, G]`, float32."""
    # Products of queries and keys may exceed float16 before they are scaled.
    logits = (query * scale @ keys.transpose(-1, -2)).float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if hidden is not None:
        logits = logits + hidden
    return logits.softmax(-1) @ values.float(), logits.logsumexp(-1)


def joined(
    query: Tensor,
    old: tuple[Tensor, Tensor],
    newest: tuple[Tensor, Tensor],
    sink_logits: Tensor | None,
) -> Tensor:
    """Output `[B, Hq, 1, Dv]` over all entries, joined from those over `old` and `newest` ones.

    Both are an output `[R, G, Dv]` and the log-sum-exp `[R, G]` of its logits, for R segments.
    """
    outs, totals = [old[0].float(), newest[0]], [old[1], newest[1]]
    if sink_logits is not None:
        # Sink logits take a share of the weight, and have no values.
        outs.append(torch.zeros_like(newest[0]))
        groups = newest[1].shape[1]
        totals.append(sink_logits.float().view(-1, groups).repeat(len(query), 1))
    whole = merged(torch.stack(outs, 1), torch.stack(totals, 1))
    return whole.to(query.dtype).view(*query.shape[:3], -1)


def merged(outs: Tensor, totals: Tensor) -> Tensor:
    """Output `[·, G, Dv]` from P parts' outputs `[·, P, G, Dv]` and log-sum-exps `[·, P, G]`."""
    # The mean stays in the precision of the log-sum-exps until it is complete.
    return (outs * totals.softmax(1)[..., None]).sum(1).to(outs.dtype)


def tails(stored: RaggedView) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tail keys and values `[B, H, T, D]`, and an additive mask: padding on the left, biases."""
    keys, values, gaps = stored.keys.tail, stored.values.tail, stored.keys.gaps
    bias = None if stored.bias is None else stored.bias.tail.transpose(2, 3).to(keys.dtype)
    if max(gaps) == 0:
        return keys, values, bias
    hidden = hidden_slots(gaps, keys.shape[2], keys.dtype, keys.device)
    hidden = hidden.view(*keys.shape[:2], 1, -1)
    return keys, values, hidden if bias is None else hidden + bias


def newest_of(stored: RaggedView) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tail keys and values `[B·H, n, D]`, and an additive mask if segments' lengths differ."""
    if len(set(stored.keys.gaps)) == 1:
        return stored.keys.newest, stored.values.newest, None
    keys, values, hidden = tails(stored)
    return (
        keys.flatten(0, 1),
        values.flatten(0, 1),
        None if hidden is None else hidden.flatten(0, 1),
    )


def hidden_slots(
    gaps: tuple[int, ...], width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Additive mask `[B·H, width]` of tails that begin with `gaps` entries that are none."""
    # One that serves a block of steps, as each is copied to the device.
    return _hidden(gaps, -(-width // BLOCK) * BLOCK, dtype, device)[:, :width]


@lru_cache(maxsize=128)
def _hidden(gaps: tuple[int, ...], width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    first = torch.tensor(gaps, device=device)[:, None]
    shown = torch.zeros((), dtype=dtype, device=device)
    return shown.where(torch.arange(width, device=device) >= first, -torch.inf)


def hidden_too(hidden: Tensor | None, mask: Tensor | None, newest: Tensor) -> Tensor | None:
    """Additive mask `hidden [R, 1, n]` of `newest [R, n, D]`, and what `mask` hides of them.

    Bool `mask [B, 1, 1, m]` covers the last m entries; None hides none.
    """
    if mask is None:
        return hidden
    added = as_added(~shown_slots(mask, *newest.shape[:2]), torch.float32)[:, None]
    return added if hidden is None else hidden + added


def shown_slots(mask: Tensor, segments: int, slots: int) -> Tensor:
    """Bool mask `[segments, slots]` of the last slots; `mask [B, 1, 1, m]` covers the last m."""
    shown = mask[:, 0, 0, -slots:].repeat_interleave(segments // len(mask), 0)
    return F.pad(shown, (slots - shown.shape[1], 0), value=True)


def softmax(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Weights of `logits [G, S, T]`; sink logits `[G]` join the denominator only."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sink_logits is None:
        return logits.softmax(-1).nan_to_num_(0.0)
    extra = sink_logits.to(logits.dtype).view(-1, 1, 1).expand(-1, logits.shape[1], 1)
    return torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
