# SPDX-License-Identifier: Apache-2.0
"""Checks of padding that a cache cannot handle, before any layer stores a token of the forward.

transformers asks a cache for the mask's sizes, and then, in the same thread, the attention
implementation for the mask itself. The first call announces the forward (`announce`), the second,
which has the padding, checks it (`check_announced`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from kvfold.errors import KvfoldError

ON_THE_LEFT = (
    "padding to the right of tokens: eviction and answers go by the last tokens of a row, so pad "
    'on the left (tokenizer.padding_side = "left")'
)


@dataclass(frozen=True)
class Padding:
    """Rules for the padding of a forward of `new` tokens.

    Full-attention layers ignore padding between tokens, but it takes room in a sliding window and
    changes a recurrent state. `slides`: true if the model `name` has such layers.
    """

    name: str
    new: int
    slides: bool

    def check(self, mask: Tensor) -> None:
        """Raises KvfoldError for forbidden padding; `mask [B, N]`, bool, over all columns."""
        if self.new > 1 and bool(_ends(mask)[:, mask.shape[1] - self.new :].any()):
            raise KvfoldError(ON_THE_LEFT)
        self.check_windows(mask)

    def check_windows(self, mask: Tensor) -> None:
        """Raises KvfoldError for padding between tokens that layers would count as tokens."""
        if self.slides and bool((_ends(mask).any(-1) & mask[:, -self.new :].any(-1)).any()):
            raise KvfoldError(
                f"{self.name} has sliding windows or recurrent layers, which count padding between "
                "a row's tokens as tokens: read later turns of several rows without padding, or "
                "each row with a cache of its own"
            )


def _ends(mask: Tensor) -> Tensor:
    """Bool mask `[B, N − 1]` of the tokens that padding follows."""
    return mask[:, :-1] & ~mask[:, 1:]


class _Announced(threading.local):
    padding: Padding | None = None


_announced = _Announced()


def announce(padding: Padding) -> None:
    """Announces the forward of the next mask made in this thread."""
    _announced.padding = padding


def forget_announced() -> None:
    """Withdraws an announcement, once the forward's mask must have been made."""
    _announced.padding = None


def check_announced(mask: Tensor | None) -> None:
    """Checks the announced forward's padding `[B, N]`; raises KvfoldError as `Padding.check`."""
    padding, _announced.padding = _announced.padding, None
    if padding is not None and mask is not None:
        padding.check(mask)
