# SPDX-License-Identifier: Apache-2.0
"""Decode attention over raw entries, and over quantized ones, decoded a few at a time.

Reference: plain attention over them, over `PackedKeys.rows` and `PackedValues.rows`, or over
`RotatedKeys.decoded` and `TokenValues.decoded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvfold.kernels.codebook import centroids
from kvfold.kernels.native.library import call, note_operations
from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.views import Flat, int64_of, starts_of

PART = 2048  # entries of a segment that a thread attends to at a time
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as of attention.cpp
CODES = 16  # of a table


def attend_to_packed(
    query: Tensor,
    keys: PackedKeys,
    values: PackedValues,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention output `[R, G, Dv]` of `query [R, G, D]`, and log-sum-exp `[R, G]`, float32.

    Attends to the entries of R segments whose key and value are both packed; a segment without
    any gives 0 and −inf. The output has the query's dtype. Needs scales of both in one dtype of
    `NUMBERS`.
    """
    of_keys, of_values = keys.lengths, values.lengths
    lengths = tuple(map(min, of_keys, of_values))
    value_size = values.scale.rows.shape[1] * values.group
    out, totals = _room(query, value_size)
    call(
        "attend_to_packed",
        query.float().contiguous(),
        *keys.tensors(),
        *values.tensors(),
        starts_of(tuple(of_keys)),
        starts_of(tuple(of_values)),
        int64_of(lengths),
        out,
        totals,
        NUMBERS[keys.scale.rows.dtype],
        *query.shape,
        value_size,
        *(keys.bits, values.bits, keys.group, values.group),
        *_options(scale, softcap),
    )
    _note(query, value_size, lengths)
    return out.to(query.dtype), totals


def attend_to_per_token(
    query: Tensor,
    keys: RotatedKeys,
    values: TokenValues,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As `attend_to_packed`, to the quantized entries of R segments; no key is rotated back."""
    lengths = tuple(keys.codes.lengths)
    out, totals = _room(query, values.size)
    call(
        "attend_to_per_token",
        keys.asked(query).float().contiguous(),  # under autocast it is shorter
        *(keys.codes.rows, keys.scales.rows, _table(keys.bits)),
        *(values.codes.rows, values.scales.rows),
        *(starts_of(lengths), int64_of(lengths), out, totals),
        *query.shape,
        values.size,
        *(keys.bits, values.bits),
        *_options(scale, softcap),
    )
    _note(query, values.size, lengths)
    return out.to(query.dtype), totals


def find_cold(
    query: Tensor,
    keys: RotatedKeys,
    places: Flat,
    counts: list[int],
    old: list[int],
    new: tuple[int, ...],
) -> tuple[Tensor, list[int]]:
    """Numbers of the rows that `query [R, G, D]` reads, int64, and how many of each segment.

    These are its hot rows, then the `counts` of highest product with their codes, ascending: see
    `attend_to_rows`. Hot ones stand at `places` among all, `old` are in the first piece, and
    segment i's newer ones begin at row `new[i]` of the second.
    """
    lengths = keys.codes.lengths
    read = [a + b for a, b in zip(places.lengths, counts, strict=True)]
    at = torch.empty(sum(read), dtype=torch.int64, device="cpu")
    hot, starts = tuple(places.lengths), starts_of(tuple(lengths))
    call(
        "find_cold",
        keys.asked(query).float().contiguous(),
        *(keys.codes.rows, keys.scales.rows, _table(keys.bits)),
        *(starts, int64_of(tuple(lengths)), starts_of(hot), int64_of(hot), places.rows),
        *(int64_of(tuple(counts)), starts_of(tuple(old)), int64_of(tuple(old)), int64_of(new)),
        *(starts_of(tuple(read)), at, *query.shape, keys.bits, PART, torch.get_num_threads()),
    )
    note_operations(query.shape[1] * query.shape[2] * sum(lengths))
    return at, read


def attend_to_rows(
    query: Tensor,
    keys: tuple[Tensor, Tensor, Tensor],
    values: tuple[Tensor, Tensor, Tensor],
    at: Tensor,
    lengths: list[int],
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As `attend_to_packed`, to raw rows of three pieces `[·, D]` and `[·, Dv]`.

    Segment i reads the next `lengths[i]` numbers of `at`: a piece, shifted by 48 bits, and a row.
    """
    size, of_segments = values[0].shape[1], tuple(lengths)
    out, totals = _room(query, size)
    call(
        "attend_to_rows",
        query.float().contiguous(),
        *(*keys, *values, at, starts_of(of_segments), int64_of(of_segments), out, totals),
        *(NUMBERS[keys[0].dtype], *query.shape, size, *_options(scale, softcap)),
    )
    _note(query, size, lengths)
    return out.to(query.dtype), totals


def attend_to_raw(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    gaps: tuple[int, ...],
    old: tuple[Flat, Flat],
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As `attend_to_packed`, to raw entries: R segments of each of `old`, then tails.

    Of the tails `keys [B, H, T, D]` and `values [B, H, T, Dv]` segment i reads all slots but the
    first `gaps[i]`. All are of one dtype of `NUMBERS`; no segment is empty.
    """
    _, group, width = query.shape
    slots, size = values.shape[2:]
    (keys, key_room), (values, value_room) = _in_rows(keys), _in_rows(values)
    lengths = tuple(old[0].lengths)
    out = torch.empty(len(gaps), group, size, dtype=torch.float32, device="cpu")
    totals = torch.empty(len(gaps), group, dtype=torch.float32, device="cpu")
    call(  # with few calls of Python: a step comes here in every layer
        "attend_to_raw",
        query.float().contiguous(),
        *(old[0].rows, old[1].rows, starts_of(lengths), int64_of(lengths)),
        *(keys.data_ptr(), values.data_ptr(), int64_of(gaps), out, totals, NUMBERS[keys.dtype]),
        *(len(gaps), group, width, size),
        *(key_room, value_room, slots),
        *(float(scale), float(softcap or 0.0), PART, torch.get_num_threads()),
    )
    read = sum(lengths) + slots * len(gaps) - sum(gaps)
    note_operations(group * (width + size) * read)
    return out, totals


def _in_rows(tails: Tensor) -> tuple[Tensor, int]:
    """Tails `[B, H, T, D]` whose rows follow one another, and rows from one tail to the next."""
    batch, heads, slots, size = tails.shape
    of_batch, of_head, of_slot, of_number = tails.stride()
    if heads == 1:
        of_head = of_batch  # torch leaves the stride of a single head open
    together = batch == 1 or of_batch == heads * of_head
    if together and (of_slot, of_number) == (size, 1) and of_head % size == 0:
        return tails, of_head // size
    return tails.clone(memory_format=torch.contiguous_format), slots


def _room(query: Tensor, value_size: int) -> tuple[Tensor, Tensor]:
    """Uninitialized output `[R, G, Dv]` and log-sum-exp `[R, G]`, float32."""
    out = torch.empty(*query.shape[:2], value_size, dtype=torch.float32, device="cpu")
    return out, torch.empty_like(out[..., 0])


def _options(scale: float, softcap: float | None) -> tuple[float, float, int, int]:
    return float(scale), float(softcap or 0.0), PART, torch.get_num_threads()


def _note(query: Tensor, value_size: int, lengths: Sequence[int]) -> None:
    """Notes the products with keys and with values of `query [R, G, D]`."""
    _, group, size = query.shape
    note_operations(group * (size + value_size) * sum(lengths))


@lru_cache(maxsize=8)
def _table(bits: int) -> Tensor:
    """Centroids `[16]` of codes, zeros behind them; of FP8 keys none is looked up."""
    table = torch.zeros(CODES, dtype=torch.float32, device="cpu")
    if bits < 8:
        table[: 2**bits] = centroids(bits, torch.float32, table.device)
    return table
