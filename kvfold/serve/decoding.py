# SPDX-License-Identifier: Apache-2.0
"""Events of one answer: its start, its text in pieces, and its finish reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.serve.response_schemas import Reason


@dataclass(frozen=True)
class AnswerStarted:
    """First event of an answer: `prompt` tokens accepted, `cached` of them from a context."""

    prompt: int
    cached: int


@dataclass(frozen=True)
class AnswerFinished:
    """Last event of an answer: `tokens` generated, the finish reason, and the tokens of its text.

    `said` may be fewer than were generated: a stop string is no part of an answer.
    """

    tokens: int
    reason: Reason
    said: Sequence[int]


class StrippedText:
    """Strips white space from both ends of a text that comes in pieces, as `Context.ask` does."""

    def __init__(self) -> None:
        self._begun, self._held = False, ""

    def of(self, piece: str) -> str:
        """Text to send after this piece; white space at its end waits for the next one."""
        text = self._held + piece
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._begun |= bool(shown)
        self._held = text[len(shown) :]
        return shown
