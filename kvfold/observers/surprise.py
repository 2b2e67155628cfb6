# SPDX-License-Identifier: Apache-2.0
"""Surprise of the tokens that a cache has read: −ln p, by the model's own logits (SirLLM)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.errors import UnsupportedModel
from kvfold.kernels.gather import pick
from kvfold.observers.base import Layer, Need, Observer, Rows
from kvfold.observers.call import AttentionCall

# −ln p of the tokens read, and the logits for the token to come, in a file.
NUMBERS, LOGITS = "surprise", "surprise_logits"

PIECE = 256  # columns whose logits are in float32 at once
ROWS = 64  # most last columns whose logits are held inside a frozen block, for a crop


@dataclass(frozen=True)
class Surprise:
    """−ln p of each column read, `numbers [B, N]`, float32; 0 at padding.

    p is the probability that the model gave a token before it read it. Nothing predicts the first
    token of a prompt: it gets the largest number of that prompt, and so does a token whose
    prediction a crop or an edit took away. When another prompt begins, all numbers are multiplied
    by `decay`.

    `logits [B, n, V]` are those of the last `n` columns, for the token to come; at padding those of
    the token before it, NaN without any. `prompt` are the columns of the newest prompt, half open;
    it is `open` while it is read in pieces.
    """

    decay: float
    numbers: Tensor | None = None
    logits: Tensor | None = None
    prompt: tuple[int, int] = (0, 0)
    open: bool = False

    def __len__(self) -> int:
        """Number of columns with a number."""
        return 0 if self.numbers is None else self.numbers.shape[1]

    def begin(self, ids: Tensor, start: int, prompt: bool, more: bool) -> Surprise:
        """With the tokens `ids [B, S]` of a forward that begins at column `start`.

        The first one's number is known, the others' are NaN until `end`. `prompt`: the forward
        reads a prompt, of which `more` follows. Raises UnsupportedModel if columns before it were
        read without their logits.
        """
        self._check(start)
        numbers, began = self.numbers, self.prompt[0]
        if prompt and not self.open:
            began = start
            numbers = None if numbers is None else numbers * self.decay
        new = torch.full(ids.shape, torch.nan, dtype=torch.float32, device=ids.device)
        if self.logits is not None:
            new[:, :1] = surprise(self.logits[:, -1:].to(ids.device), ids[:, :1])
        return replace(
            self,
            numbers=new if numbers is None else torch.cat([numbers, new], 1),
            prompt=(began, start + ids.shape[1]) if prompt else self.prompt,
            open=prompt and more,
        )

    def end(self, ids: Tensor, logits: Tensor | None, tokens: Tensor | None, rows: int) -> Surprise:
        """With the `logits [B, S, V]` of the forward that began last, of which `rows` are held.

        `tokens [B, N]` is False at padding, None without any. Raises UnsupportedModel without
        logits of all tokens.
        """
        if logits is None or logits.shape[:2] != ids.shape:
            raise UnsupportedModel(
                "the model gives no logits of all tokens, by which sirllm scores them: use a "
                "causal language model, and leave return_dict and logits_to_keep out"
            )
        assert self.numbers is not None
        numbers, new, logits = self.numbers.clone(), ids.shape[1], logits.detach()
        numbers[:, 1 - new or len(self) :] = surprise(logits[:, :-1], ids[:, 1:]).to(numbers)
        held = logits[:, -rows:].clone()
        if tokens is not None:
            real = tokens[:, -new:]
            before = torch.full_like(held[:, :1], torch.nan)
            if self.logits is not None:
                before = self.logits[:, -1:].to(held)
            # Padding comes first in a forward: an earlier one has read the token before it.
            first = real & (real.cumsum(1) == 1)
            found = surprise(before, ids.gather(1, first.long().argmax(1, True)))
            numbers[:, -new:] = torch.where(first, found.to(numbers), numbers[:, -new:])
            held = torch.where(real[:, -rows:, None].to(held.device), held, before)
        return replace(self, numbers=_filled(numbers, tokens, *self.prompt), logits=held)

    def of(self, seen: int) -> Tensor:
        """Numbers `[B, seen]`; UnsupportedModel if columns were read without their logits."""
        self._check(seen)
        assert self.numbers is not None
        return self.numbers

    def prompt_tokens(self, tokens: Tensor | None, seen: int, rows: int) -> Tensor:
        """Tokens `[B]` of the prompt that ends at column `seen`; 0 if none ends there."""
        began, ended = self.prompt
        if ended != seen:
            return torch.zeros(rows, dtype=torch.long)
        return torch.full((rows,), seen - began) if tokens is None else tokens[:, began:].sum(-1)

    def crop(self, length: int) -> Surprise:
        """The surprise of the first `length` columns."""
        if self.numbers is None or len(self) <= length:
            return self
        logits = self.logits
        if logits is not None:
            left = logits.shape[1] - (len(self) - length)
            logits = logits[:, :left].clone() if left > 0 else None
        began, ended = (min(column, length) for column in self.prompt)
        return Surprise(
            self.decay,
            self.numbers[:, :length].clone(),
            logits,
            (began, ended),
            self.open and began < length,
        )

    def renumber(self, ids: Callable[[Tensor], Tensor], count: Callable[[int], int]) -> Surprise:
        """The surprise after an edit; nothing predicts the token to come.

        `ids` moves numbers `[B, N]` to their new columns, `count` gives how many of the first
        columns there are afterwards.
        """
        began, ended = map(count, self.prompt)
        return Surprise(
            self.decay, None if self.numbers is None else ids(self.numbers), None, (began, ended)
        )

    def index(self, rows: Callable[[Tensor], Tensor]) -> Surprise:
        """Applies `rows`, a selection along the batch axis."""
        numbers, logits = (None if x is None else rows(x) for x in (self.numbers, self.logits))
        return replace(self, numbers=numbers, logits=logits)

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and logits."""
        both = (x for x in (self.numbers, self.logits) if x is not None)
        return sum(x.numel() * x.element_size() for x in both)

    def _check(self, seen: int) -> None:
        if len(self) < seen:
            raise UnsupportedModel(
                "tokens were read past the model that the cache was made for, and sirllm scores "
                "tokens by its logits: call that model"
            )


class SurpriseLog:
    """The surprise of all that a cache has read, with the forward that runs."""

    def __init__(self, decay: float) -> None:
        self.known = Surprise(decay)
        self.incoming: Surprise | None = None  # with the forward that runs
        self._before: Surprise | None = None  # what a `frozen()` block began with

    @property
    def newest(self) -> Surprise:
        """With the forward that runs, if one does."""
        return self.incoming or self.known

    @property
    def waits(self) -> bool:
        """True while a forward runs, whose logits are not known."""
        return self.incoming is not None

    def begin(self, ids: Tensor, start: int, prompt: bool, more: bool) -> None:
        """A forward begins; as `Surprise.begin`."""
        self.incoming = self.known.begin(ids, start, prompt, more)

    def end(self, ids: Tensor, logits: Tensor | None, tokens: Tensor | None, frozen: bool) -> None:
        """The forward has returned; as `Surprise.end`."""
        if self.incoming is not None:
            self.known = self.incoming.end(ids, logits, tokens, ROWS if frozen else 1)

    def forget_incoming(self) -> None:
        """No forward runs."""
        self.incoming = None

    def end_reading(self) -> None:
        """The prompt is complete."""
        self.known = replace(self.known, open=False)

    def freeze(self, frozen: bool) -> None:
        """A `frozen()` block begins or ends."""
        self._before = self.known if frozen else None

    def crop(self, length: int) -> None:
        """Forgets the columns from `length` on."""
        if self._before is not None and len(self._before) == length:
            self.known = self._before
        else:
            self.known = self.known.crop(length)

    def index(self, rows: Rows) -> None:
        """Applies `rows`, a selection along the batch axis."""
        self.known = self.known.index(rows)
        self._before = None if self._before is None else self._before.index(rows)

    def renumbered(
        self, ids: Callable[[Tensor], Tensor], count: Callable[[int], int]
    ) -> SurpriseLog:
        """The log after an edit, as `Surprise.renumber`."""
        other = SurpriseLog(self.known.decay)
        other.known = self.known.renumber(ids, count)
        return other

    def reset(self) -> None:
        """As before the first token."""
        self.known, self.incoming, self._before = Surprise(self.known.decay), None, None

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and logits."""
        return self.known.nbytes

    def save(self) -> dict[str, Tensor]:
        """Tensors of a file, by name."""
        held = {NUMBERS: self.known.numbers, LOGITS: self.known.logits}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def load(self, saved: dict[str, Tensor]) -> None:
        """Takes what `save` gave."""
        if NUMBERS in saved:
            logits = saved.get(LOGITS)
            logits = None if logits is None else logits.clone()
            self.known = replace(self.known, numbers=saved[NUMBERS].clone(), logits=logits)


class OfSurprise(Observer[Tensor]):
    """Surprise of the stored entries' tokens."""

    def of(self, layer: Layer, call: AttentionCall | None) -> Tensor:
        columns, log = layer.columns(), layer.log(SurpriseNeed)
        numbers = log.newest.of(layer.seen).nan_to_num(0).to(columns.device)
        return pick(numbers[:, None].expand(-1, columns.shape[1], -1), columns, 0)


@dataclass(frozen=True)
class SurpriseNeed(Need[Tensor]):
    """`[B, H, T]`: surprise of the model at each token that it read: −ln p, by its own logits.

    0 for padding, holes, and until it is known.
    """

    empty: ClassVar[float | None] = 0
    while_reading: ClassVar[bool] = True
    reads_ids: ClassVar[bool] = True
    words: ClassVar[str] = "the logits of each token"
    keyword: ClassVar[str] = "surprise"
    field: ClassVar[str] = "surprise"

    decay: float = 1.0  # factor of all older numbers when another prompt is read

    def observer(self, fitted: object = None) -> OfSurprise:
        return OfSurprise()

    def log(self) -> SurpriseLog:
        return SurpriseLog(self.decay)

    def joined(self, other: SurpriseNeed) -> SurpriseNeed:
        return self


class OfPromptTokens(Observer[Tensor]):
    """Length of the prompt that has just ended."""

    def of(self, layer: Layer, call: AttentionCall | None) -> Tensor:
        rows, device = len(layer.stored().keys), layer.stored().keys.device
        newest = layer.log(SurpriseNeed).newest
        tokens: Tensor = newest.prompt_tokens(layer.sequence.tokens(), layer.seen, rows)
        return tokens.to(device)


@dataclass(frozen=True)
class PromptTokens(Need[Tensor]):
    """`[B]`: tokens of the prompt that has just ended, 0 in rounds; beside `SurpriseNeed`."""

    words: ClassVar[str] = "the prompt's length"
    field: ClassVar[str] = "prompt_tokens"

    def observer(self, fitted: object = None) -> OfPromptTokens:
        return OfPromptTokens()


def surprise(logits: Tensor, ids: Tensor) -> Tensor:
    """−ln p `[B, S]`, float32, of the tokens `ids [B, S]` by the `logits [B, S, V]` before each."""
    pieces = zip(logits.split(PIECE, 1), ids.to(logits.device).split(PIECE, 1), strict=True)
    found = [
        F.cross_entropy(of_piece.mT.float(), wanted, reduction="none")
        for of_piece, wanted in pieces
    ]
    return torch.cat(found, 1).clamp(0, torch.finfo(torch.float32).max)


def _filled(numbers: Tensor, tokens: Tensor | None, began: int, ended: int) -> Tensor:
    """Numbers `[B, N]` with those of the prompt's first tokens, and of tokens without any.

    The prompt's columns go from `began` to `ended`. A prompt of one token keeps its number.
    """
    seen = numbers.shape[1]
    real = torch.ones_like(numbers, dtype=torch.bool) if tokens is None else tokens
    columns = torch.arange(seen, device=numbers.device)
    inside = real & (columns >= began) & (columns < ended)
    first = inside & (inside.cumsum(-1) == 1)
    others = numbers.masked_fill(~inside | first, torch.nan).nan_to_num(-torch.inf)
    largest = others.amax(-1, keepdim=True)
    unknown = numbers.isnan() | (first & largest.isfinite())
    return torch.where(unknown, largest.clamp(min=0), numbers).masked_fill(~real, 0)
