# SPDX-License-Identifier: Apache-2.0
"""A step over entries that were quantized one by one, of segments of any length."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.segments.parts import attended, joined, kernels, tails
from kvfold.kernels.views import RaggedView


def attend(query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions) -> Tensor:
    """Output `[B, Hq, 1, Dv]`: kernels over codes, plain torch over whole and newest entries."""
    keys, values = stored.keys.encoded, stored.values.encoded
    assert isinstance(keys, RotatedKeys) and isinstance(values, TokenValues)
    scale, softcap = options["scale"], options.get("softcap")
    rows = query.reshape(len(keys.lengths), -1, query.shape[-1])
    old = kernels(query).attend_to_per_token(rows, keys, values, scale, softcap)
    of_keys, of_values, hidden = _newest(stored)
    if hidden is not None:
        hidden = F.pad(hidden, (keys.whole.lengths[0], 0))
    raw = keys.raw_before(of_keys), values.raw_before(of_values)
    newest = attended(rows, *raw, hidden, scale, softcap)
    return joined(query, old, newest, options.get("sink_logits"))


def _newest(stored: RaggedView) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tail keys and values `[B·H, n, D]`, and an additive mask if segments' lengths differ."""
    if len(set(stored.keys.gaps)) == 1:
        return stored.keys.newest, stored.values.newest, None
    keys, values, hidden = tails(stored)
    return (
        keys.flatten(0, 1),
        values.flatten(0, 1),
        None if hidden is None else hidden.flatten(0, 1),
    )
