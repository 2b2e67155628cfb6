# SPDX-License-Identifier: Apache-2.0
"""Prompts that are read and answered together, as left-padded batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.checks.encoded import EncodedPrompt
from kvfold.eval.run.prompt_batch import left_padded

T = TypeVar("T")
# Limits of a batch: rows, columns of all rows, and the longest prompt over the shortest.
ROWS, COLUMNS, RATIO = 8, 16384, 1.25


class PaddedIds(NamedTuple):
    """Token ids `ids [B, N]`, and the mask `[B, N]` that is 0 at padding."""

    ids: Tensor
    mask: Tensor

    @classmethod
    def of(cls, pieces: Sequence[Tensor], device: torch.device) -> PaddedIds:
        """Pieces `[1, n]`, padded on their left."""
        return cls(*left_padded(pieces, device))

    @property
    def padding(self) -> Tensor | None:
        """The mask `[B, N]`; None if nothing is padded."""
        return None if bool(self.mask.all()) else self.mask

    def followed_by(self, other: PaddedIds) -> PaddedIds:
        """The columns of both."""
        return PaddedIds(*(torch.cat(pair, 1) for pair in zip(self, other, strict=True)))


def rows_of(model: PreTrainedModel) -> int:
    """Most prompts of a batch.

    Sliding windows and recurrent layers take no padding between a row's tokens, such as that
    before a question.
    """
    return 1 if CompressedCache(model, "full").other_layers() else ROWS


def batched(
    items: Sequence[T], prompt_of: Callable[[T], EncodedPrompt], rows: int = ROWS
) -> list[tuple[T, ...]]:
    """The items in batches of at most `rows` prompts, of similar length, compressed alike."""

    def order(item: T) -> tuple[bool, int]:
        prompt = prompt_of(item)
        return prompt.context is None, prompt.ids.shape[1]

    found: list[list[T]] = []
    for item in sorted(items, key=order):
        if found and _fits(found[-1], rows, order(item), order(found[-1][0])):
            found[-1].append(item)
        else:
            found.append([item])
    return [tuple(batch) for batch in found]


def _fits(batch: Sequence[T], most: int, own: tuple[bool, int], first: tuple[bool, int]) -> bool:
    """True if an item may join a batch of at most `most` rows whose shortest is `first`."""
    rows, longest = len(batch) + 1, own[1]
    small = rows <= most and rows * longest <= COLUMNS
    return small and own[0] == first[0] and longest <= RATIO * first[1]
