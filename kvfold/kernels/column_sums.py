# SPDX-License-Identifier: Apache-2.0
"""Attention with column sums (H2O, D2O): `dispatch` chooses the kernel.

Reference: `reference.attend_with_moments`.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from kvfold.kernels import query_blocks
from kvfold.kernels.dispatch import columns_in_cpp, columns_path
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.native import columns as native
from kvfold.kernels.swapped_qk import causal_attention, column_sums_from_two_flash_passes


def attend_with_moments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    counted: Tensor | None = None,
    squares: bool = False,
    **options: Unpack[LogitOptions],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `reference.attend_with_moments`; the sums of squares are None without `squares`."""
    scale = options["scale"]
    if columns_in_cpp(query, key, value, mask, **options):
        return native.column_moments(
            query, key, value, mask, scale=scale, counted=counted, squares=squares
        )
    path = columns_path(query, value, masked=mask is not None, squares=squares, **options)
    if path == "flash":
        out, sums = column_sums_from_two_flash_passes(
            query, key, value, scale=scale, counted=counted
        )
        return out, sums, None
    if path == "triton":
        from kvfold.kernels.triton.column_sums import column_moments, column_sums

        out, lse = causal_attention(query, key, value, scale)
        if squares:
            return out, *column_moments(query, key, lse, scale=scale, counted=counted)
        return out, column_sums(query, key, lse, scale=scale, counted=counted), None
    return query_blocks.attend_with_moments(
        query, key, value, mask, counted=counted, squares=squares, **options
    )
