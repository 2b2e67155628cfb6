# SPDX-License-Identifier: Apache-2.0
"""Checks of padding that a cache cannot handle, before any layer stores a token of the forward.

transformers asks a cache for the mask's sizes, and then, in the same thread, the attention
implementation for the mask itself. The first call announces the forward (`announce`), the second,
which has the padding, checks it (`check_announced`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attention.mask import visible
from kvfold.errors import KvfoldError

ON_THE_LEFT = (
    "padding to the right of tokens: eviction and answers go by the last tokens of a row, so pad "
    'on the left (tokenizer.padding_side = "left")'
)


@dataclass(frozen=True)
class ColumnsRead:
    """The columns that a cache has read; the first `settled` ones before entries last changed.

    Entries have changed where some were evicted, encoded or scored.
    """

    tokens: Tensor  # bool [B, n], False at padding
    settled: int

    def contradicted(self, mask: Tensor) -> Tensor:
        """Columns `[B, ≤ n]`, true where `mask [B, N]` may not say otherwise than when read.

        It may behind all tokens of a row, in columns that are not settled.
        """
        shared = min(self.tokens.shape[1], mask.shape[1])
        was, now = self.tokens[:, :shared], mask[:, :shared].to(self.tokens.device)
        moves = (was & now).flip(-1).cumsum(-1).flip(-1) > 0  # a token that stays one follows
        columns = torch.arange(shared, device=was.device)
        return (was != now) & (moves | (columns < self.settled))

    def contradiction(self, row: int, column: int) -> str:
        """The contradiction of a mask in a column, in words, and what to do."""
        where = f"row {row}, column {column}"
        if not self.tokens[row, column]:
            return (
                f"the attention mask takes {where} for a token, but it was read as padding, as "
                "kvfold.generate reads what follows a row's EOS: give a mask that is 0 there"
            )
        return (
            f"the attention mask takes {where} for padding, but it was read as a token: give a "
            "mask that is 1 there. If it follows the EOS of a row that ended while others went on, "
            "generate with kvfold.generate, which reads it as padding"
        )


@dataclass(frozen=True)
class Padding:
    """Rules for the padding of a forward of `new` tokens, behind which a text has `columns`.

    Full-attention layers ignore padding between tokens, but it takes room in a sliding window and
    changes a recurrent state. `slides`: true if the model `name` has such layers; `recurrent`: true
    if it has recurrent ones, which see padding in masks `[B, N]` and forwards of several tokens
    only. `read` gives what was read before, None for nothing. `uneven` tells whether heads keep
    unequal numbers of entries. `frozen`: true if nothing is evicted, and new tokens may be cropped.
    """

    name: str
    new: int
    columns: int
    slides: bool
    recurrent: bool
    read: Callable[[], ColumnsRead | None]
    uneven: Callable[[], bool]
    frozen: bool

    def check(self, mask: Tensor) -> None:
        """Raises KvfoldError for forbidden padding; `mask [B, N]`, bool, over all columns."""
        self.check_width(mask)
        if self.new > 1:
            if bool(_ends(mask)[:, mask.shape[1] - self.new :].any()):
                raise KvfoldError(ON_THE_LEFT)
            self._check_read(mask)
        elif not bool(mask.all()):
            # Rows that have ended read padding, which `generate` takes for tokens.
            self._check_read(mask, hidden_only=True)
            self._check_states(mask)
        self.check_windows(mask)

    def check_width(self, mask: Tensor) -> None:
        """Raises KvfoldError for a mask `[..., N]` of fewer or more columns than the text.

        transformers takes columns that it lacks for padding, and ignores those beyond.
        """
        given = mask.shape[-1]
        if given != self.columns:
            raise KvfoldError(
                f"attention_mask has {given} columns and needs {self.columns}: "
                f"{self.columns - self.new} that the cache has read, evicted ones included, and "
                f"{self.new} new"
            )

    def check_whole(self, mask: Tensor) -> None:
        """Raises KvfoldError for a caller's mask `[B, Hq or 1, S, N]` that a cache cannot follow.

        What it hides from the last token of a row is taken for padding, as in the model's masks.
        """
        shown, older = visible(mask), mask.shape[-1] - self.new
        tokens = shown[:, :, -1].any(1)
        if self.frozen:
            self._check_read(tokens[:, :older])
        elif bool((shown.any(2).any(1) & ~tokens).any()):
            raise KvfoldError(
                "the attention mask hides columns from the last token of a row that others see, as "
                "where a row holds several texts: kvfold would take them for padding, so read each "
                "text in a row, or with a cache, of its own"
            )
        else:
            self.check(tokens)
        self._check_states(tokens)
        unlike = shown[..., :older] != tokens[:, None, None, :older]
        if self.uneven() and bool((unlike & tokens[:, None, older:, None]).any()):
            raise KvfoldError(
                "the attention mask hides older tokens from some of the new ones, and heads that "
                "keep different numbers of entries show them to all: leave these columns visible, "
                "or choose a method that keeps as many in each head"
            )

    def _check_states(self, mask: Tensor) -> None:
        """Raises KvfoldError for padding before a row's tokens that recurrent layers cannot see."""
        older = mask.shape[1] - self.new
        begins = ~mask[:, :older].any(-1) & ~mask[:, older:].all(-1)
        if self.recurrent and bool(begins.any()):
            raise KvfoldError(
                f"recurrent layers of {self.name} take padding for tokens in a forward of one "
                "column, and where the attention mask is not [B, N]: read two columns or more at "
                "once, with a mask [B, N]"
            )

    def _check_read(self, mask: Tensor, hidden_only: bool = False) -> None:
        read = self.read()
        if read is None:
            return
        contradicted = read.contradicted(mask)
        if hidden_only:
            contradicted &= read.tokens[:, : contradicted.shape[1]]
        found = contradicted.nonzero()
        if len(found):
            raise KvfoldError(read.contradiction(*found[0].tolist()))

    def check_windows(self, mask: Tensor) -> None:
        """Raises KvfoldError for padding between tokens that layers would count as tokens."""
        if self.slides and bool((_ends(mask).any(-1) & mask[:, -self.new :].any(-1)).any()):
            if mask.shape[1] == self.new:  # a first prompt
                raise KvfoldError(ON_THE_LEFT)
            raise KvfoldError(
                f"{self.name} has sliding windows or recurrent layers, which count padding between "
                "a row's tokens as tokens: read later turns of several rows without padding, or "
                "each row with a cache of its own"
            )


def _ends(mask: Tensor) -> Tensor:
    """Bool mask `[B, N − 1]` of the tokens that padding follows."""
    return mask[:, :-1] & ~mask[:, 1:]


class _Announced(threading.local):
    padding: Callable[[], Padding] | None = None


_announced = _Announced()


def announce(padding: Callable[[], Padding]) -> None:
    """Announces the forward of the next mask made in this thread, whose rules `padding` gives."""
    _announced.padding = padding


def forget_announced() -> None:
    """Withdraws an announcement, once the forward's mask must have been made."""
    _announced.padding = None


def check_announced(mask: Tensor | None) -> None:
    """Checks the announced forward's padding `[B, N]`; raises KvfoldError as `Padding.check`."""
    padding, _announced.padding = _announced.padding, None
    if padding is not None and mask is not None:
        padding().check(mask)
