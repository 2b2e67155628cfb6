# SPDX-License-Identifier: Apache-2.0
"""Turns of random tokens, each going on from the last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvfold
from kvfold import CompressedCache
from tests.helpers.models import continuation, prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def turn(model: PreTrainedModel, cache: CompressedCache, ids: Tensor, **options: Any) -> Tensor:
    """The conversation `[B, N]` after one more answer."""
    out: Tensor = kvfold.generate(model, ids, cache=cache, **(GREEDY | options))
    return out


def two_padded_turns(
    model: PreTrainedModel, cache: CompressedCache, lengths: tuple[int, ...], **options: Any
) -> Tensor:
    """Logits `[2·n, B, V]`, on the CPU, of two greedy turns on a padded batch of prompts."""
    ids, mask = (each.to(model.device) for each in prompts(lengths))
    found = list[Tensor]()
    for number in range(2):
        made = kvfold.generate(
            model,
            ids,
            cache=cache,
            attention_mask=mask,
            output_logits=True,
            return_dict_in_generate=True,
            **(GREEDY | options),
        )
        found += [logits.cpu() for logits in made.logits]
        more = continuation(len(ids), 5, seed=number).to(model.device)
        ids = torch.cat([made.sequences, more], 1)
        mask = torch.cat([mask, mask.new_ones(len(mask), ids.shape[1] - mask.shape[1])], 1)
    return torch.stack(found)


def changed(ids: Tensor, row: int, column: int) -> Tensor:
    """`ids [B, N]` with another token in one place."""
    other = ids.clone()
    other[row, column] = 3 if ids[row, column] != 3 else 4
    return other


def on(ids: Tensor, length: int = 7) -> Tensor:
    """A conversation that goes on with another message."""
    return torch.cat([ids, continuation(len(ids), length, seed=9)], 1)
