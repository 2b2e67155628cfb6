# SPDX-License-Identifier: Apache-2.0
"""Attention to segments of different lengths (varlen), without padding.

Reference: `reference.attend_with_column_sums` on each segment alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.kernels.dispatch import Path, packed_path, rows_path
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.native.attention import reads_packed
from kvfold.kernels.packing import PackedKeys, PackedValues, not_both_packed
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.varlen import attend_to_rows_varlen
from kvfold.kernels.views import BLOCK, Flat, PartView, RaggedView

QUERIES = 128  # of one block

# query [·, H, G, D], keys, values → output [·, H, G, Dv], and the log-sum-exp [·, H, G]
_flash_on_cpu = torch._scaled_dot_product_flash_attention_for_cpu


def attend_to_segments(
    query: Tensor,
    stored: RaggedView,
    mask: Tensor | None,
    **options: Unpack[LogitOptions],
) -> Tensor:
    """Attention output `[B, Hq, S, Dv]` of `query [B, Hq, S, D]`.

    `mask`, bool or additive `[B, 1 or Hq, S, n]`, covers the last n entries of every segment. None:
    causal, the queries being the last S entries of every segment. Rows that see nothing are 0.
    Entries with a bias take plain torch, on a GPU too.
    """
    scale, softcap = options["scale"], options.get("softcap")
    plain = softcap is None and options.get("sink_logits") is None
    if query.shape[2] == 1 and mask is not None and _sees_everything(mask):
        mask = None
    flat = isinstance(stored.keys.encoded, Flat) and isinstance(stored.values.encoded, Flat)
    single = query.shape[2] == 1 and mask is None
    if flat and single and max(stored.keys.gaps) < stored.keys.tail.shape[2]:
        path = rows_path(query, stored.values.tail, softcap=softcap)
        if path != "torch" and stored.bias is None:
            return _one_step_of_rows(query, stored, path, options)
        same = query.shape[-1] == stored.values.tail.shape[-1]
        if plain and same and query.device.type == "cpu":
            return _one_step(query, stored, scale)
    even = single and stored.keys.even and stored.values.even
    if single and stored.bias is None:
        packed = _both_packed(stored)
        alone = None if packed is not None else _both_alone(stored)
        if packed is not None or alone is not None:
            size = stored.values.tail.shape[-1]
            path = packed_path(query, value_size=size)
            known = path == "triton" or (path == "native" and (not packed or reads_packed(*packed)))
            if packed is not None and known:
                return _one_step_of_packed(query, stored, packed, path, options)
            if alone is not None and known:
                return _one_step_of_per_token(query, stored, alone, path, options)
    if even and plain:
        return _one_step_even(query, stored, scale)
    return _in_blocks(query, stored, mask, options)


def _sees_everything(mask: Tensor) -> bool:
    return bool((mask if mask.dtype == torch.bool else mask == 0).all())


def _one_step(query: Tensor, stored: RaggedView, scale: float) -> Tensor:
    """Output `[B, Hq, 1, Dv]` over raw entries on a CPU: segment by segment, then all tails."""
    batch, query_heads, _, size = query.shape
    segments = len(stored.keys.gaps)
    grouped = query.reshape(segments, 1, -1, size)
    old_keys, old_values = stored.keys.encoded, stored.values.encoded
    assert isinstance(old_keys, Flat) and isinstance(old_values, Flat)
    # Torch's kernel gives each thread whole heads, so equal shares of a segment pose as heads: one
    # or more for every thread, of whole blocks.
    shares = min(BLOCK, 1 << (torch.get_num_threads() - 1).bit_length())
    rows = grouped.expand(-1, shares, -1, -1) if shares > 1 else grouped
    old = zip(rows.split(1), old_keys.in_shares(shares), old_values.in_shares(shares), strict=True)
    if stored.bias is None:
        parts = [
            _flash_on_cpu(*each, scale=scale) if each[1].numel() else _nothing(each[0])
            for each in old
        ]
    else:
        parts = _biased_parts(old, stored.bias, shares, scale)
    keys, values, hidden = _tails(stored)
    of_tails = grouped.view(batch, -1, *grouped.shape[2:])
    new = _flash_on_cpu(of_tails, keys, values, attn_mask=hidden, scale=scale)
    # Parts of each segment along axis 1: its shares, then its tail.
    old_outs, old_totals = zip(*parts, strict=True)
    new_outs, new_totals = new[0].flatten(0, 1)[:, None], new[1].flatten(0, 1)[:, None]
    outs = torch.cat([torch.cat(old_outs), new_outs], 1)
    totals = torch.cat([torch.cat(old_totals), new_totals], 1)
    return _merged(outs, totals).view(batch, query_heads, 1, -1)


def _biased_parts(
    old: Iterable[tuple[Tensor, Tensor, Tensor]], bias: PartView, shares: int, scale: float
) -> list[tuple[Tensor, Tensor]]:
    """Outputs and log-sum-exps of queries over shares of `old` segments whose entries have a bias.

    Each is a query, keys and values `[1, shares, ·, D]`.
    """
    assert isinstance(bias.encoded, Flat)
    biases = bias.encoded.in_shares(shares)  # [1, shares, n, 1]
    return [
        _flash_on_cpu(*each, attn_mask=of_each.transpose(-1, -2).to(each[0].dtype), scale=scale)
        if of_each.numel()
        else _nothing(each[0])
        for each, of_each in zip(old, biases, strict=True)
    ]


def _one_step_even(query: Tensor, stored: RaggedView, scale: float) -> Tensor:
    """Output `[B, Hq, 1, Dv]` over segments of one length, as batched products."""
    batch, query_heads, _, size = query.shape
    grouped = (query * scale).reshape(len(stored.keys.gaps), -1, size)
    joined = torch.cat(_products_even(grouped, stored.keys), -1)
    if stored.bias is not None:
        joined = joined + torch.cat(stored.bias.rectangles(), 1).transpose(1, 2)
    weights = _softmax(joined, None).to(query.dtype)
    values = stored.values.rectangles()
    of_old, *of_new = weights.split([piece.shape[1] for piece in values], -1)
    mixed = of_old @ values[0]
    for of_piece, piece in zip(of_new, values[1:], strict=True):
        mixed = torch.baddbmm(mixed, of_piece, piece)
    return mixed.view(batch, query_heads, 1, -1)


def _products_even(query: Tensor, keys: PartView) -> list[Tensor]:
    """Products `[R, G, ·]` of `query [R, G, D]` with keys of R segments of one length."""
    if isinstance(keys.encoded, RotatedKeys) and keys.encoded.even:
        return [keys.encoded.products(query), query @ keys.newest.transpose(1, 2)]
    return [query @ piece.transpose(1, 2) for piece in keys.rectangles()]


def _nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    """Output of `query [1, P, G, D]` over no entry, zeros, and its log-sum-exp, −∞."""
    return torch.zeros_like(query), query.new_full(query.shape[:3], -torch.inf)


def _one_step_of_rows(
    query: Tensor, stored: RaggedView, path: Path, options: LogitOptions
) -> Tensor:
    """As `_one_step`, all segments in one launch on a GPU, with softcap and sink logits."""
    scale, softcap = options["scale"], options.get("softcap")
    batch, _, _, size = query.shape
    keys, values = stored.keys.encoded, stored.values.encoded
    assert isinstance(keys, Flat) and isinstance(values, Flat)
    rows = query.reshape(len(keys.lengths), -1, size)
    if path == "triton":
        from kvfold.kernels.triton.ragged import attend_to_rows

        out, total = attend_to_rows(
            rows, keys.rows, values.rows, keys.starts, scale, softcap, splits=keys.splits
        )
    else:
        longest = max(keys.lengths)
        out, total = attend_to_rows_varlen(
            rows, keys.rows, values.rows, keys.starts, longest, scale
        )
    tail = _attended(rows.unflatten(0, (batch, -1)), *_tails(stored), scale, softcap)
    newest = tail[0].flatten(0, 1), tail[1].flatten(0, 1)
    return _joined(query, (out, total), newest, options.get("sink_logits"))


@cache
def _kernels(path: Path) -> ModuleType:
    """The package of a path that reads quantized entries."""
    return import_module(f"kvfold.kernels.{'triton' if path == 'triton' else 'native.attention'}")


def _both_packed(stored: RaggedView) -> tuple[PackedKeys, PackedValues] | None:
    """Packed keys and packed values; None unless both are packed."""
    keys, values = stored.keys.encoded, stored.values.encoded
    if isinstance(keys, PackedKeys) and isinstance(values, PackedValues):
        return keys, values
    return None


def _both_alone(stored: RaggedView) -> tuple[RotatedKeys, TokenValues] | None:
    """Keys and values that were quantized one by one; None unless all segments have raw ones too.

    Whole entries are as many in each segment. None for keys beside means, which kernels do not add.
    """
    keys, values = stored.keys.encoded, stored.values.encoded
    if not isinstance(keys, RotatedKeys) or not isinstance(values, TokenValues):
        return None
    if keys.means is not None:
        return None
    same = stored.keys.gaps == stored.values.gaps
    evenly_whole = len({*keys.whole.lengths, *values.whole.lengths}) == 1
    newest = max(stored.keys.gaps) < stored.keys.tail.shape[2]
    return (keys, values) if same and evenly_whole and newest else None


def _one_step_of_packed(
    query: Tensor,
    stored: RaggedView,
    packed: tuple[PackedKeys, PackedValues],
    path: Path,
    options: LogitOptions,
) -> Tensor:
    """Output `[B, Hq, 1, Dv]` over packed entries in one launch; they are not unpacked.

    Entries whose key or value is still raw are few at any length: plain torch attends to them.
    """
    keys, values = packed
    scale, softcap = options["scale"], options.get("softcap")
    rows = query.reshape(len(stored.keys.gaps), -1, query.shape[-1])
    old = _kernels(path).attend_to_packed(rows, keys, values, scale, softcap)
    new_keys, new_values, gaps = not_both_packed(stored.keys, keys, stored.values, values)
    hidden = None
    if any(gaps):
        width = new_keys.shape[1]
        hidden = _hidden(gaps, _room(width), torch.float32, query.device)[:, None, :width]
    new = _attended(rows, new_keys, new_values, hidden, scale, softcap)
    return _joined(query, old, new, options.get("sink_logits"))


def _one_step_of_per_token(
    query: Tensor,
    stored: RaggedView,
    alone: tuple[RotatedKeys, TokenValues],
    path: Path,
    options: LogitOptions,
) -> Tensor:
    """As `_one_step_of_packed`, over entries that were quantized one by one, of any length."""
    keys, values = alone
    scale, softcap = options["scale"], options.get("softcap")
    rows = query.reshape(len(keys.lengths), -1, query.shape[-1])
    old = _kernels(path).attend_to_per_token(rows, keys, values, scale, softcap)
    of_keys, of_values, hidden = _newest(stored)
    if hidden is not None:
        hidden = F.pad(hidden, (keys.whole.lengths[0], 0))
    raw = keys.raw_before(of_keys), values.raw_before(of_values)
    newest = _attended(rows, *raw, hidden, scale, softcap)
    return _joined(query, old, newest, options.get("sink_logits"))


def _joined(
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
    merged = _merged(torch.stack(outs, 1), torch.stack(totals, 1))
    return merged.to(query.dtype).view(*query.shape[:3], -1)


def _attended(
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


def _newest(stored: RaggedView) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tail keys and values `[B·H, n, D]`, and an additive mask if segments' lengths differ."""
    if len(set(stored.keys.gaps)) == 1:
        return stored.keys.newest, stored.values.newest, None
    keys, values, hidden = _tails(stored)
    return (
        keys.flatten(0, 1),
        values.flatten(0, 1),
        None if hidden is None else hidden.flatten(0, 1),
    )


def _tails(stored: RaggedView) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tail keys and values `[B, H, T, D]`, and an additive mask: padding on the left, biases."""
    keys, values, gaps = stored.keys.tail, stored.values.tail, stored.keys.gaps
    bias = None if stored.bias is None else stored.bias.tail.transpose(2, 3).to(keys.dtype)
    if max(gaps) == 0:
        return keys, values, bias
    width = keys.shape[2]
    hidden = _hidden(gaps, _room(width), keys.dtype, keys.device)
    hidden = hidden.view(*keys.shape[:2], 1, -1)[..., :width]
    return keys, values, hidden if bias is None else hidden + bias


def _room(width: int) -> int:
    """Width of a mask that serves a block of steps: a new one is copied to the device."""
    return -(-width // BLOCK) * BLOCK


@lru_cache(maxsize=128)
def _hidden(gaps: tuple[int, ...], width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask `[B·H, width]` of tails that begin with `gaps` entries that are none."""
    first = torch.tensor(gaps, device=device)[:, None]
    shown = torch.zeros((), dtype=dtype, device=device)
    return shown.where(torch.arange(width, device=device) >= first, -torch.inf)


def _merged(outs: Tensor, totals: Tensor) -> Tensor:
    """Output `[·, G, Dv]` from P parts' outputs `[·, P, G, Dv]` and log-sum-exps `[·, P, G]`."""
    # The mean stays in the precision of the log-sum-exps until it is complete.
    return (outs * totals.softmax(1)[..., None]).sum(1).to(outs.dtype)


def _in_blocks(
    query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions
) -> Tensor:
    """Output `[B, Hq, S, Dv]`, segment by segment in blocks of queries: takes every case."""
    batch, query_heads, queries, size = query.shape
    segments = len(stored.keys.gaps)
    groups = query_heads * batch // segments
    softcap, sink_logits = options.get("softcap"), options.get("sink_logits")
    grouped = (query * options["scale"]).reshape(segments, groups, queries, size)
    out = query.new_empty(segments, groups, queries, stored.values.tail.shape[-1])
    pieces = zip(stored.keys.all_pieces(), stored.values.all_pieces(), strict=True)
    biases = None if stored.bias is None else stored.bias.all_pieces()
    for i, (keys, values) in enumerate(pieces):
        row, head = divmod(i, segments // batch)
        share = slice(head * groups, (head + 1) * groups)
        for start in range(0, queries, QUERIES):
            block = grouped[i, :, start : start + QUERIES].reshape(-1, size)
            logits = torch.cat([block @ piece.T for piece in keys], -1).unflatten(0, (groups, -1))
            if softcap is not None:
                logits = torch.tanh(logits / softcap) * softcap
            if biases is not None:
                logits = logits + torch.cat(biases[i])[:, 0]
            if mask is not None:
                of_row = mask[row, share if mask.shape[1] > 1 else slice(0, 1)]
                _hide(logits, of_row[:, start : start + QUERIES])
            elif queries > 1:
                _hide_later(logits, queries, start)
            weights = _softmax(logits, None if sink_logits is None else sink_logits[share])
            out[i, :, start : start + QUERIES] = _mix(weights.to(query.dtype), values)
    return out.view(batch, query_heads, queries, -1)


def _hide(logits: Tensor, mask: Tensor) -> None:
    """Applies a mask `[1 or G, S, n]` to the last n slots of `logits [G, S, T]`, in place."""
    width = mask.shape[-1]
    if width == 0:
        return
    part = logits[..., logits.shape[-1] - width :]
    if mask.dtype == torch.bool:
        part.masked_fill_(~mask, -torch.inf)
    else:
        part.add_(mask)


def _hide_later(logits: Tensor, queries: int, start: int) -> None:
    """Causal mask in place for a block of queries from `start` on; the last `queries` slots."""
    slot = torch.arange(queries, device=logits.device)
    later = slot > slot[start : start + logits.shape[1], None]
    logits[..., logits.shape[-1] - queries :].masked_fill_(later, -torch.inf)


def _softmax(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Weights of `logits [G, S, T]`; sink logits `[G]` join the denominator only."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sink_logits is None:
        return logits.softmax(-1).nan_to_num_(0.0)
    extra = sink_logits.to(logits.dtype).view(-1, 1, 1).expand(-1, logits.shape[1], 1)
    return torch.cat([logits, extra], -1).softmax(-1)[..., :-1]


def _mix(weights: Tensor, values: list[Tensor]) -> Tensor:
    """Sum `[G, S, Dv]` over all pieces of `values [n, Dv]`, weighted `[G, S, T]`."""
    parts = weights.flatten(0, 1).split([len(piece) for piece in values], -1)
    mixed = parts[0] @ values[0]
    for part, piece in zip(parts[1:], values[1:], strict=True):
        mixed = torch.addmm(mixed, part, piece)
    return mixed.view(*weights.shape[:2], -1)
