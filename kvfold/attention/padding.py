# SPDX-License-Identifier: Apache-2.0
"""Padding that a cache cannot take, refused before any layer stores a token of the forward.

transformers asks a cache for the sizes of a mask, and then, in the same thread and with the
padding at hand, its attention implementation for the mask itself: the first announces what the
second checks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import KvfoldError

ON_THE_LEFT = (
    "padding to the right of tokens: the last tokens of a row decide what is kept of it, and the "
    'last column what it is answered, so pad on the left (tokenizer.padding_side = "left")'
)


def check_last(mask: Tensor) -> None:
    """Raises KvfoldError where a row of `mask [B, N]`, a prompt to be answered, ends in padding."""
    if not bool(mask[:, -1].all()):
        raise KvfoldError(ON_THE_LEFT)


@dataclass(frozen=True)
class Padding:
    """What padding a forward of `new` tokens may have.

    Columns inside a row that are padding are no tokens to layers that attend to everything, but
    take room in a sliding window and change a recurrent state: `slides` says that the model `name`
    has such layers.
    """

    name: str
    new: int
    slides: bool

    def check(self, mask: Tensor) -> None:
        """`mask [B, N]`, bool, of all tokens seen and the new ones; raises KvfoldError."""
        if self.new == 1 and not self.slides:
            return
        ends = mask[:, :-1] & ~mask[:, 1:]  # tokens that padding follows
        if self.new > 1 and bool(ends[:, mask.shape[1] - self.new :].any()):
            raise KvfoldError(ON_THE_LEFT)
        if self.slides and bool((ends.any(-1) & mask[:, -self.new :].any(-1)).any()):
            raise KvfoldError(
                f"{self.name} has sliding windows or recurrent layers, which count padding between "
                "a row's tokens as tokens: read later turns of several rows without padding, or "
                "each row with a cache of its own"
            )


class _Announced(threading.local):
    padding: Padding | None = None


_announced = _Announced()


def announce(padding: Padding) -> None:
    """The next mask made in this thread is of this forward."""
    _announced.padding = padding


def forget_announced() -> None:
    """Its mask is made by now: the next one is of another forward."""
    _announced.padding = None


def check_announced(mask: Tensor | None) -> None:
    """Checks the padding `[B, N]` of which a mask is about to be made, if it was announced."""
    padding, _announced.padding = _announced.padding, None
    if padding is not None and mask is not None:
        padding.check(mask)


def leading_padding(model: Any, input_ids: Tensor) -> Tensor:
    """The mask `[B, N]` of ids that come without one: pad tokens before the first other token."""
    config = model.generation_config
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    pad = config.pad_token_id
    if pad is None or pad in (*eos, config.bos_token_id):
        return torch.ones_like(input_ids)
    return ((input_ids != pad).cumsum(-1) > 0).long()
