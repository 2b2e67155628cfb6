# SPDX-License-Identifier: Apache-2.0
"""Attention to segments of different lengths (varlen), without padding: nine ways.

`dispatch.segments_path` chooses. Reference: `reference.attend_with_column_sums` on each segment
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.kernels.dispatch import SegmentPath, segments_path
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.native import attention as native
from kvfold.kernels.packing import PackedKeys, PackedValues, not_both_packed
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.recalled import attend_to_recalled
from kvfold.kernels.segment_parts import (
    attended,
    hidden_slots,
    hidden_too,
    joined,
    merged,
    newest_of,
    softmax,
    tails,
)
from kvfold.kernels.views import BLOCK, Flat, PartView, RaggedView

try:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn
except ImportError:  # torch before 2.10
    AuxRequest = varlen_attn = None  # type: ignore[assignment, misc]

QUERIES = 128  # of one block
# query [·, H, G, D], keys, values → output [·, H, G, Dv], and the log-sum-exp [·, H, G]
_flash_on_cpu = torch._scaled_dot_product_flash_attention_for_cpu


def attend_to_segments(
    query: Tensor, stored: RaggedView, mask: Tensor | None, **options: Unpack[LogitOptions]
) -> Tensor:
    """Attention output `[B, Hq, S, Dv]` of `query [B, Hq, S, D]`.

    `mask`, bool or additive `[B, 1 or Hq, S, n]`, covers the last n entries of every segment. None:
    causal, the queries being the last S entries of every segment. Rows that see nothing are 0.
    """
    if mask is not None and query.shape[2] == 1:
        planned = segments_path(query, stored, masked=False, **options) == "planned"
        if planned and _is_of_tails(mask, stored.keys):
            return _planned(query, stored, mask, options)
        shown = mask if mask.dtype == torch.bool else mask == 0
        mask = None if bool(shown.all()) else mask
    path = segments_path(query, stored, masked=mask is not None, **options)
    return PATHS[path](query, stored, mask, options)


def _is_of_tails(mask: Tensor, keys: PartView) -> bool:
    """True if a mask is alike for all heads, and of entries that are raw in every segment."""
    return mask.shape[1] == 1 and mask.shape[-1] <= keys.tail.shape[2] - max(keys.gaps)


def _blocks(
    query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions
) -> Tensor:
    """Segment by segment in blocks of queries, which takes every case.

    Output `[B, Hq, S, Dv]` of queries that see what `mask` shows; None: causal.
    """
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
                # Causal: the last `queries` slots are those of the queries themselves.
                slot = torch.arange(queries, device=logits.device)
                later = slot > slot[start : start + logits.shape[1], None]
                logits[..., logits.shape[-1] - queries :].masked_fill_(later, -torch.inf)
            weights = softmax(logits, None if sink_logits is None else sink_logits[share])
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


def _mix(weights: Tensor, values: list[Tensor]) -> Tensor:
    """Sum `[G, S, Dv]` over all pieces of `values [n, Dv]`, weighted `[G, S, T]`."""
    parts = weights.flatten(0, 1).split([len(piece) for piece in values], -1)
    mixed = parts[0] @ values[0]
    for part, piece in zip(parts[1:], values[1:], strict=True):
        mixed = torch.addmm(mixed, part, piece)
    return mixed.view(*weights.shape[:2], -1)


def _each(query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions) -> Tensor:
    """A step over raw segments on a CPU: segment by segment, then all tails.

    Output `[B, Hq, 1, Dv]`, of parts that are joined by their log-sum-exps.
    """
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


def _raw(query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions) -> Tensor:
    """A step over raw segments on a CPU, in one call of C++, with softcap and sink logits."""
    keys, values = stored.keys, stored.values
    old_keys, old_values = keys.encoded, values.encoded
    assert isinstance(old_keys, Flat) and isinstance(old_values, Flat)
    rows = query.reshape(len(keys.gaps), -1, query.shape[-1])
    out, total = native.attend_to_raw(
        rows,
        keys.tail,
        values.tail,
        keys.gaps,
        (old_keys, old_values),
        options["scale"],
        options.get("softcap"),
    )
    sink_logits = options.get("sink_logits")
    if sink_logits is not None:
        # Sink logits take a share of the weight, and have no values.
        sinks = sink_logits.float().view(-1, total.shape[1]).repeat(len(query), 1)
        out *= (total - sinks).sigmoid()[..., None]
    return out.to(query.dtype).view(*query.shape[:3], -1)


def _even(query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions) -> Tensor:
    """A step over segments of one length, raw or encoded, as batched products."""
    grouped = (query * options["scale"]).reshape(len(stored.keys.gaps), -1, query.shape[-1])
    joined = torch.cat(_products(grouped, stored.keys), -1)
    if stored.bias is not None:
        joined = joined + torch.cat(stored.bias.rectangles(), 1).transpose(1, 2)
    weights = softmax(joined, None).to(query.dtype)
    values = stored.values.rectangles()
    of_old, *of_new = weights.split([piece.shape[1] for piece in values], -1)
    mixed = of_old @ values[0]
    for of_piece, piece in zip(of_new, values[1:], strict=True):
        mixed = torch.baddbmm(mixed, of_piece, piece)
    return mixed.view(*query.shape[:3], -1)


def _products(query: Tensor, keys: PartView) -> list[Tensor]:
    """Products `[R, G, ·]` of `query [R, G, D]` with keys of R segments of one length."""
    if isinstance(keys.encoded, RotatedKeys) and keys.encoded.even:
        return [keys.encoded.products(query), query @ keys.newest.transpose(1, 2)]
    return [query @ piece.transpose(1, 2) for piece in keys.rectangles()]


def _packed(
    query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions
) -> Tensor:
    """A step over packed keys and values in one launch; they are not unpacked.

    Entries whose key or value is still raw are few at any length: plain torch attends to them.
    """
    keys, values = stored.keys.encoded, stored.values.encoded
    assert isinstance(keys, PackedKeys) and isinstance(values, PackedValues)
    scale, softcap = options["scale"], options.get("softcap")
    rows = query.reshape(len(stored.keys.gaps), -1, query.shape[-1])
    old = native.attend_to_packed(rows, keys, values, scale, softcap)
    new_keys, new_values, gaps = not_both_packed(stored.keys, keys, stored.values, values)
    hidden = None
    if any(gaps):
        hidden = hidden_slots(gaps, new_keys.shape[1], torch.float32, query.device)[:, None]
    hidden = hidden_too(hidden, mask, new_keys)
    new = attended(rows, new_keys, new_values, hidden, scale, softcap)
    return joined(query, old, new, options.get("sink_logits"))


def _per_token(
    query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions
) -> Tensor:
    """A step over entries that were quantized one by one, of segments of any length.

    Kernels read the codes, plain torch whole and newest entries.
    """
    keys, values = stored.keys.encoded, stored.values.encoded
    assert isinstance(keys, RotatedKeys) and isinstance(values, TokenValues)
    scale, softcap = options["scale"], options.get("softcap")
    rows = query.reshape(len(keys.lengths), -1, query.shape[-1])
    old = native.attend_to_per_token(rows, keys, values, scale, softcap)
    of_keys, of_values, hidden = newest_of(stored)
    hidden = hidden_too(hidden, mask, of_keys)
    if hidden is not None:
        hidden = F.pad(hidden, (keys.whole.lengths[0], 0))
    raw = keys.raw_before(of_keys), values.raw_before(of_values)
    newest = attended(rows, *raw, hidden, scale, softcap)
    return joined(query, old, newest, options.get("sink_logits"))


def _planned(
    query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions
) -> Tensor:
    """A step over entries of any kind on a GPU, in one launch of Triton."""
    from kvfold.kernels.planned import attend_to_view

    return attend_to_view(query, stored, mask, **options)


def _rows(query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions) -> Tensor:
    """A step over raw segments on a GPU without Triton, with sink logits.

    One launch of torch's `varlen_attn` reads all but the tails.
    """
    keys, values = stored.keys.encoded, stored.values.encoded
    assert isinstance(keys, Flat) and isinstance(values, Flat)
    rows = query.reshape(len(keys.lengths), -1, query.shape[-1])
    flat = keys.rows, values.rows, keys.starts, max(keys.lengths)
    old = attend_to_rows_varlen(rows, *flat, options["scale"])
    of_keys, of_values, hidden = newest_of(stored)
    hidden = hidden_too(hidden, mask, of_keys)
    newest = attended(rows, of_keys, of_values, hidden, options["scale"], None)
    return joined(query, old, newest, options.get("sink_logits"))


# Ways in which a mask of the newest entries may hide some.
MASKED = ("packed", "per token", "planned", "rows")


def attend_to_room(
    query: Tensor,
    stored: RaggedView,
    visible: Tensor,
    *,
    padded: bool,
    **options: Unpack[LogitOptions],
) -> Tensor:
    """As `attend_to_segments`, for one query; some of the last slots have no entry yet.

    Bool `visible [B, 1, 1, n]` covers the last n slots, and is not read by the host. The numbers
    that it hides are finite. `padded`: it hides more than the slots without an entry.
    """
    path = segments_path(query, stored, masked=padded, **options)
    return PATHS[path if path in MASKED else "blocks"](query, stored, visible, options)


def attend_to_rows_varlen(
    query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Torch's `varlen_attn`: output `[R, G, D]` and log-sum-exp `[R, G]`, float32, of R segments.

    query `[R, G, D]`, keys and values `[n, D]` in half precision on a GPU, D a multiple of 8.
    Segment i is the rows from `starts[i]` to `starts[i + 1] − 1`; starts `[R + 1]`, int32. The
    longest segment has `longest` entries. An empty segment gives 0 and −inf.
    """
    # To varlen_attn a segment is a sequence: one query with G heads, keys with one head.
    one_each = torch.arange(query.shape[0] + 1, dtype=starts.dtype, device=starts.device)
    out, lse = varlen_attn(
        query.contiguous(),
        keys[:, None],
        values[:, None],
        one_each,
        starts,
        1,
        longest,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        enable_gqa=True,
    )
    # Torch documents a log-sum-exp [R, G] but returns [G, R], with +inf for empty segments.
    empty = (starts.diff() == 0)[:, None]
    return out.masked_fill(empty[..., None], 0.0), lse.T.masked_fill(empty, -float("inf"))


PATHS: dict[SegmentPath, Callable[[Tensor, RaggedView, Tensor | None, LogitOptions], Tensor]] = {
    "blocks": _blocks,
    "each": _each,
    "even": _even,
    "packed": _packed,
    "per token": _per_token,
    "planned": _planned,
    "raw": _raw,
    "recalled": attend_to_recalled,
    "rows": _rows,
}
