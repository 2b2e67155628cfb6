# SPDX-License-Identifier: Apache-2.0
"""A step over raw segments on a GPU: all of them in one launch, with softcap and sink logits."""

from __future__ import annotations

from torch import Tensor

from kvfold.kernels.dispatch import triton_available
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.segments.parts import attended, joined, tails
from kvfold.kernels.varlen import attend_to_rows_varlen
from kvfold.kernels.views import Flat, RaggedView


def attend(query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions) -> Tensor:
    """Output `[B, Hq, 1, Dv]`: Triton, or torch's `varlen_attn`, over all but the tails."""
    scale, softcap = options["scale"], options.get("softcap")
    keys, values = stored.keys.encoded, stored.values.encoded
    assert isinstance(keys, Flat) and isinstance(values, Flat)
    rows = query.reshape(len(keys.lengths), -1, query.shape[-1])
    if triton_available(query):
        from kvfold.kernels.triton.ragged import attend_to_rows

        out, total = attend_to_rows(
            rows, keys.rows, values.rows, keys.starts, scale, softcap, splits=keys.splits
        )
    else:
        longest = max(keys.lengths)
        out, total = attend_to_rows_varlen(
            rows, keys.rows, values.rows, keys.starts, longest, scale
        )
    tail = attended(rows.unflatten(0, (len(query), -1)), *tails(stored), scale, softcap)
    newest = tail[0].flatten(0, 1), tail[1].flatten(0, 1)
    return joined(query, (out, total), newest, options.get("sink_logits"))
