# SPDX-License-Identifier: Apache-2.0
"""The record of a session beside its cache: messages with their tokens, and counts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvfold.cache.cache import CompressedCache
from kvfold.cache.spans import Span
from kvfold.errors import KvfoldError
from kvfold.hf.user_text import content

Role = Literal["user", "tool", "assistant"]


@dataclass(frozen=True)
class Message:
    """A message to append; without an `id`, the session numbers it: "m0", "m1", and so on."""

    text: str
    role: Literal["user", "tool"] = "user"
    id: str | None = None

    @staticmethod
    def check(messages: Sequence[Message]) -> None:
        """Raises KvfoldError for no messages, and for one that no session can hold."""
        listed = isinstance(messages, list | tuple)
        if not listed or not all(isinstance(each, Message) for each in messages):
            raise KvfoldError("a turn is a list of messages: [kvfold.Message(text)]")
        if not messages:
            raise KvfoldError("a turn has at least one message")
        for each in messages:
            if each.role not in ("user", "tool"):
                raise KvfoldError(f'a message\'s role is "user" or "tool", not {each.role!r:.60}')
            if not (each.id is None or isinstance(each.id, str)):
                raise KvfoldError(f"a message's id is a text, not {each.id!r:.60}")
            content(each.id or "", False)


@dataclass(frozen=True)
class Item:
    """A message of a session: tokens `start` to `stop`, those of the chat template left out."""

    id: str
    role: Role
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Number of its tokens."""
        return self.stop - self.start

    @property
    def span(self) -> Span:
        """Its tokens."""
        return self.start, self.stop


@dataclass(frozen=True)
class SessionRecord:
    """Messages and counts of a session so far.

    Args:
        items: its messages in order.
        queued: ids of messages whose drop waits.
        numbered: the number that the next message without an id gets.
        turns: questions that were answered.
        compactions: turns whose end compressed the cache.
    """

    items: tuple[Item, ...] = ()
    queued: tuple[str, ...] = ()
    numbered: int = 0
    turns: int = 0
    compactions: int = 0

    def item(self, name: str) -> Item:
        """The message of an id; raises KvfoldError if there is none."""
        found = next((each for each in self.items if each.id == name), None)
        if found is None:
            raise KvfoldError(f"there is no message {name!r} in this session")
        return found

    def name(self, taken: Collection[str]) -> tuple[str, int]:
        """The next free number as an id, and the number after it."""
        number = self.numbered
        while (name := f"m{number}") in taken:
            number += 1
        return name, number + 1


@dataclass(frozen=True)
class Turn:
    """A turn on its way: `cache` has read a part of `ids [1, N]`, all tokens up to the answer.

    `record` is the session's, with the turn's messages; the answer will have the id `answer`.
    """

    cache: CompressedCache
    ids: Tensor
    record: SessionRecord
    answer: str
