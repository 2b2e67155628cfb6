# SPDX-License-Identifier: Apache-2.0
"""What refits are given and make, and attention outputs of a model to compare them with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.kernels.partial_attention import attend_to_part, joined_parts
from kvfold.methods.stages.refit.base import Compaction, Refitted
from kvfold.methods.stages.refit.matching import Matching


@contextmanager
def fits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Compaction, Refitted]]]:
    """What refits were given and what they made, layer by layer."""
    found, fit = [], Matching.__call__

    def noted(self: Matching, given: Compaction) -> Refitted:
        found.append((given, fit(self, given)))
        return found[-1][1]

    with monkeypatch.context() as patch:
        patch.setattr(Matching, "__call__", noted)
        yield found


def reference_outputs(given: Compaction) -> Tensor:
    """Attention outputs `[B, n / G, Hq, Dv]` of the reference queries, over all entries."""
    of, hidden = given.references, (~given.block).long()
    block = attend_to_part(
        of.queries,
        given.keys,
        given.values,
        columns=hidden,
        until=torch.zeros_like(of.real, dtype=torch.long)[:, None],
        bias=given.bias,
        scale=given.scale,
        softcap=given.softcap,
    )
    out = joined_parts([block, of.rest]).out
    by_token = out.unflatten(2, (-1, of.groups)).transpose(1, 2)  # [B, n / G, H, G, Dv]
    return by_token.flatten(2, 3)


@contextmanager
def attention_outputs(model: Any, layer: int) -> Iterator[list[Tensor]]:
    """Attention outputs `[B, S, Hq, Dv]` of a layer's forwards of many tokens."""
    found: list[Tensor] = []
    heads = model.config.num_attention_heads

    def note(module: Any, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].shape[1] > 1:
            found.append(inputs[0].unflatten(-1, (heads, -1)).clone())

    handle = model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()
