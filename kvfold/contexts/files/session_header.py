# SPDX-License-Identifier: Apache-2.0
"""A session's part of a context file's header."""

from __future__ import annotations

from typing import Literal

from kvfold.contexts.files.bounds import Count, Strict
from kvfold.hf.header import HeaderPart


class SessionItem(HeaderPart):
    """A message of a session; see `contexts/session.py`."""

    id: str
    role: Literal["user", "tool", "assistant"]
    start: Strict
    stop: Strict


class SessionHeader(HeaderPart):
    """Messages, queued drops and counts of a session."""

    items: list[SessionItem]
    queued: tuple[str, ...]
    numbered: Count
    turns: Count
    compactions: Count

    def contradiction(self, seen: int) -> str | None:
        """The first thing that no session of `seen` tokens has; None if there is none."""
        ids = [each.id for each in self.items]
        places = [0, *(place for each in self.items for place in (each.start, each.stop)), seen]
        if places != sorted(places):
            return f"its messages do not follow each other within its {seen} tokens"
        if len(set(ids)) < len(ids):
            return "two of its messages have the same id"
        unknown = sorted(set(self.queued) - set(ids))
        return f"it drops a message {unknown[0]!r} that it does not have" if unknown else None
