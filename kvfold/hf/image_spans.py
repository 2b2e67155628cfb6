# SPDX-License-Identifier: Apache-2.0
"""Tokens of images, videos and sound in a prompt."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.errors import KvfoldError
from kvfold.hf import rope_deltas
from kvfold.hf.arguments import checked_arguments

# Settings of composite configurations that name the token of an image's, video's or sound's part.
TOKENS = tuple(
    f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index")
)


@checked_arguments
def image_spans(model: PreTrainedModel, input_ids: Tensor) -> list[tuple[int, int]]:
    """Spans `(start, stop)` of a prompt's image, video and audio tokens, for `protect=` and `fair`.

    `input_ids`, `[N]` or `[1, N]`, come from the processor, without padding; an image whose tokens
    are parted by others (rows of tiles) has several spans. Raises KvfoldError for several rows, and
    for a model without a token for them.
    """
    named = placeholder_tokens(model)
    if not named:
        raise KvfoldError(f"{type(model).__name__} has no token for images or sound")
    if input_ids.dim() > 2 or (input_ids.dim() == 2 and len(input_ids) != 1):
        raise KvfoldError("spans are of one prompt: give input_ids of one row, without padding")
    row = input_ids.flatten()
    image = torch.isin(row, torch.tensor(named, device=row.device))
    edge = torch.zeros(1, dtype=torch.bool, device=row.device)
    changes = torch.diff(torch.cat([edge, image, edge]).int()).nonzero()[:, 0].tolist()
    return list(zip(changes[::2], changes[1::2], strict=True))


def tokens_off_columns(model: PreTrainedModel) -> list[int]:
    """Ids of tokens after which M-RoPE's positions are other than columns; none in most models."""
    return placeholder_tokens(model) if rope_deltas.holders(model) else []


def placeholder_tokens(model: PreTrainedModel) -> list[int]:
    """Ids of the tokens of images, videos and sound."""
    named = {getattr(model.config, name, None) for name in TOKENS}
    return sorted(each for each in named if each is not None)
