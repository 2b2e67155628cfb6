# SPDX-License-Identifier: Apache-2.0
"""Prompts to check on: texts, JSONL rows, or folders of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from kvfold.checks.result import EVERYTHING
from kvfold.errors import KvfoldError
from kvfold.eval.tasks import source

TEXTS, ROWS = (".txt", ".md"), ".jsonl"
FORMS = '"prompt", or "context" and "question", or "messages"'
Filled = Annotated[str, Field(min_length=1)]


class PromptMessage(BaseModel, frozen=True):
    """A message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: Filled


class CheckPrompt(BaseModel, frozen=True):
    """One prompt: a user's message, a context with a question about it, or a chat so far.

    `spans` are named parts whose retention is measured: a text as it stands in the prompt, or
    offsets `(start, stop)` of characters in `prompt` or `context`. Prompts of a named `group` have
    a bound of their own. `where` names the source in messages. Other fields of a row are ignored.
    """

    prompt: Filled | None = None
    context: Filled | None = None
    question: Filled | None = None
    messages: tuple[PromptMessage, ...] = ()
    spans: dict[str, Filled | tuple[int, int]] = {}
    group: Filled | None = None
    where: str = Field(default="", exclude=True)

    def form(self) -> str | None:
        """The reason why this is no prompt; None if it is one."""
        pair = self.context is not None, self.question is not None
        given = [self.prompt is not None, any(pair), bool(self.messages)]
        if sum(given) != 1 or pair[0] != pair[1]:
            return f"give {FORMS}"
        if self.messages and self.messages[-1].role != "user":
            return "the last message is the user's, which the model is to answer"
        offsets = any(not isinstance(span, str) for span in self.spans.values())
        if self.messages and offsets:
            return "spans of messages are texts"
        if self.group == EVERYTHING:
            return f"the group {EVERYTHING!r} is that of prompts that name none: name it otherwise"
        return None

    @property
    def system(self) -> str | None:
        """Text of the system message, if there is one that says something."""
        first = self.messages[0] if self.messages else None
        system = first is not None and first.role == "system" and first.content.strip()
        return first.content if first is not None and system else None


def prompts_of(given: str | Path | Sequence[str | Mapping[str, Any]]) -> list[CheckPrompt]:
    """Prompts of a file or folder, or from texts and rows; each distinct one once.

    Raises KvfoldError for the first that cannot be read, and where there are none.
    """
    if isinstance(given, str | Path):
        found = list(_of_path(Path(given)))
    else:
        alone = isinstance(given, Mapping) or not isinstance(given, Iterable)
        listed: list[Any] = [given] if alone else list(given)
        if not all(isinstance(one, str | Mapping) for one in listed):
            raise KvfoldError("prompts are a file, a folder, or a list of texts and rows")
        rows = ({"prompt": one} if isinstance(one, str) else dict(one) for one in listed)
        found = [_of_row(f"prompt {number}", row) for number, row in enumerate(rows, 1)]
    if not found:
        raise KvfoldError("there are no prompts")
    distinct: dict[str, CheckPrompt] = {}
    for one in found:
        distinct.setdefault(one.model_dump_json(), one)
    return list(distinct.values())


def _of_path(path: Path) -> Iterator[CheckPrompt]:
    """Prompts of a text file (one), of a JSONL file (one a row), or of all those in a folder."""
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in (*TEXTS, ROWS))
        if not files:
            raise KvfoldError(f"the folder {path} holds no prompts: no .txt, .md or .jsonl file")
        for each in files:
            yield from _of_path(each)
    elif not path.is_file():
        raise KvfoldError(f"there is no such file or folder: {path}")
    elif path.suffix == ROWS:
        yield from _of_lines(path)
    elif path.suffix in TEXTS:
        yield CheckPrompt(prompt=_text(path), where=str(path))
    else:
        raise KvfoldError(
            f"{path} is in no known format: prompts are .txt or .md files, one prompt in each, a "
            ".jsonl file with one in each line, or a folder of them"
        )


def _text(path: Path) -> str:
    """The prompt of a text file, without white space around it; KvfoldError for none."""
    text = source.text(path).strip()
    if not text:
        raise KvfoldError(f"{path} is empty")
    return text


def _of_lines(path: Path) -> Iterator[CheckPrompt]:
    empty = True
    for where, row in source.lines(path):
        empty = False
        if isinstance(row, str):
            raise KvfoldError(f"{where}: {row}")
        yield _of_row(where, row)
    if empty:
        raise KvfoldError(f"{path} is empty")


def _of_row(where: str, row: dict[str, Any]) -> CheckPrompt:
    try:
        made = CheckPrompt.model_validate(row | {"where": where})
    except ValidationError as problem:
        raise KvfoldError(f"{where}: {source.first_problem(problem)}") from None
    reason = made.form()
    if reason is not None:
        raise KvfoldError(f"{where}: {reason}")
    return made
