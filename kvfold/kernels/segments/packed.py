# SPDX-License-Identifier: Apache-2.0
"""A step over packed entries in one launch; they are not unpacked."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.packing import PackedKeys, PackedValues, not_both_packed
from kvfold.kernels.segments.parts import attended, hidden_slots, joined, kernels
from kvfold.kernels.views import RaggedView


def attend(query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions) -> Tensor:
    """Output `[B, Hq, 1, Dv]` over packed keys and values.

    Entries whose key or value is still raw are few at any length: plain torch attends to them.
    """
    keys, values = stored.keys.encoded, stored.values.encoded
    assert isinstance(keys, PackedKeys) and isinstance(values, PackedValues)
    scale, softcap = options["scale"], options.get("softcap")
    rows = query.reshape(len(stored.keys.gaps), -1, query.shape[-1])
    old = kernels(query).attend_to_packed(rows, keys, values, scale, softcap)
    new_keys, new_values, gaps = not_both_packed(stored.keys, keys, stored.values, values)
    hidden = None
    if any(gaps):
        hidden = hidden_slots(gaps, new_keys.shape[1], torch.float32, query.device)[:, None]
    new = attended(rows, new_keys, new_values, hidden, scale, softcap)
    return joined(query, old, new, options.get("sink_logits"))
