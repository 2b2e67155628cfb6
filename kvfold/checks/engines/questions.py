# SPDX-License-Identifier: Apache-2.0
"""Prompts as the messages that an endpoint is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvfold.checks.engines.result import AgreementLimits
from kvfold.checks.groups import too_few
from kvfold.checks.prompts import CheckPrompt
from kvfold.checks.result import EVERYTHING, sha256
from kvfold.errors import KvfoldError
from kvfold.evidence.grouped import grouped
from kvfold.hf.chat_template import SEPARATOR


@dataclass(frozen=True)
class ChatQuestion:
    """Messages of the prompt `where`; the losses of its `group` are bounded together."""

    where: str
    messages: tuple[Mapping[str, str], ...]
    group: str | None

    @property
    def digest(self) -> str:
        """Hash of the messages."""
        said = json.dumps(self.messages).encode()
        return hashlib.blake2b(said, digest_size=8).hexdigest()


def questions_of(given: Iterable[CheckPrompt]) -> list[ChatQuestion]:
    """Prompts as messages, each distinct one once; a context and its question are one message.

    Raises KvfoldError for a prompt of two groups.
    """
    found: dict[str, ChatQuestion] = {}
    for prompt in given:
        made = ChatQuestion(prompt.where, _messages(prompt), prompt.group)
        first = found.setdefault(made.digest, made)
        if first.group != made.group:
            raise KvfoldError(
                f"{made.where} is the same prompt as {first.where}, which is in another group"
            )
    return list(found.values())


def check_number(questions: Sequence[ChatQuestion], limits: AgreementLimits) -> None:
    """Raises KvfoldError if so few prompts cannot confirm the limit, with the number that can."""
    groups = grouped((question.group or EVERYTHING, question) for question in questions)
    for name, of in groups.items():
        group = None if list(groups) == [EVERYTHING] else name
        reason = too_few(len(of), limits.differing, limits.error / len(groups), group)
        if reason:
            raise KvfoldError(reason)


def digest_of(questions: Iterable[ChatQuestion]) -> str:
    """Hash of all prompts and their groups."""
    return sha256(" ".join(f"{each.digest} {each.group or ''}" for each in questions))


def _messages(prompt: CheckPrompt) -> tuple[Mapping[str, str], ...]:
    if prompt.messages:
        return tuple({"role": each.role, "content": each.content} for each in prompt.messages)
    parts = [prompt.prompt, prompt.context, prompt.question]
    text = SEPARATOR.join(part for part in parts if part is not None)
    return ({"role": "user", "content": text},)
