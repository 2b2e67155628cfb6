# SPDX-License-Identifier: Apache-2.0
"""The text around a document and a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.errors import KvfoldError
from kvfold.hf.template_arguments import check_named, check_spelled, json_arguments
from kvfold.hf.user_text import ids_of, segments

# Between a document and the question about it.
SEPARATOR = "\n\n"
NONCHARACTER = "\ufdd0"
# An invisible character, in a message's place
MARK = "\u2063"


@dataclass(frozen=True)
class PromptFrame:
    """Texts of a chat template before a user's message, and between it and the answer.

    `between` stands between an answer and the user's next message; None: the template has no such.
    `separator` separates a document from the question about it. `answered` stands in place of
    `after` before an earlier answer; None: nothing of `after` is left out there. `system` is the
    system message in `before`, and `arguments` are the template's own, such as `enable_thinking`.
    """

    before: str
    after: str
    between: str | None
    separator: str = SEPARATOR
    answered: str | None = None
    system: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        special_tokens: bool = False,
    ) -> PromptFrame:
        """The tokenizer's chat template, or its first token and a line break where it has none.

        A system message that the template would move to a later turn stays where it is first.

        Raises KvfoldError for a template that does not show a user's message exactly once, or
        refuses or drops a `system` message; as `json_arguments`; and for control tokens spelled in
        either, unless `special_tokens`.
        """
        arguments = {} if arguments is None else arguments
        check_named(arguments)
        if not tokenizer.chat_template:
            if system is not None or arguments:
                raise KvfoldError(
                    "this tokenizer has no chat template: leave out the system message and the "
                    "template's arguments"
                )
            return cls(tokenizer.bos_token or "", "\n", "\n\n")
        given = json_arguments(tokenizer, arguments)
        if not special_tokens:
            check_spelled(tokenizer, system, given)
        first = [] if system is None else [("system", system)]
        mark = _absent_from(f"{system}{given}", MARK)
        template = _Template(tokenizer, given)
        before, after = template.around_user(first, mark)
        turns = template.turns(first, mark)
        if system is not None:
            template.check_shown()
            if turns and turns[0] != before:
                turns = template.turns([], mark)
        between, answered = (turns[2], turns[1]) if len(turns) == 4 else (None, after)
        left_out = after.startswith(answered) and answered != after
        shorter = answered if left_out else None
        return cls(before, after, between, answered=shorter, system=system, arguments=given)

    def opened_with(self, instruction: str) -> PromptFrame:
        """The same with an instruction before the document."""
        return replace(self, before=self.before + instruction)

    def earlier(self, tokenizer: PreTrainedTokenizerBase, answer: str) -> str:
        """The part of an earlier answer that the template leaves: Qwen3's leaves no reasoning.

        The whole answer where the template leaves no end of it, or refuses it as a text.
        """
        if not tokenizer.chat_template or self.between is None:
            return answer
        mark = _absent_from(f"{answer}{self.arguments}", MARK)
        said = [("user", mark), ("assistant", answer), ("user", mark)]
        try:
            pieces = _Template(tokenizer, self.arguments).split(said, mark)
        except TemplateError:
            return answer
        opening = self.after if self.answered is None else self.answered
        middle = pieces[1] if len(pieces) == 3 else ""
        if not (middle.startswith(opening) and middle.endswith(self.between)):
            return answer
        shown = middle[len(opening) : len(middle) - len(self.between)].strip()
        whole = answer.strip()
        return shown if shown != whole and whole.endswith(shown) else answer

    def is_of(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None,
        arguments: Mapping[str, Any] | None,
    ) -> bool:
        """True if a system message and arguments, where given, are those of this frame.

        Others are the same if the template makes the same of them.
        """
        system = self.system if system is None else system
        arguments = self.arguments if arguments is None else arguments
        if (system, dict(arguments)) == (self.system, dict(self.arguments)):
            return True
        try:
            other = PromptFrame.of(tokenizer, system, arguments)
        except KvfoldError:
            return False
        made, own = (
            (frame.before, frame.after, frame.between, frame.answered) for frame in (other, self)
        )
        return made == own


def conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[tuple[str, str]],
    arguments: Mapping[str, Any] | None = None,
) -> list[str]:
    """Segments of the chat template with messages `(role, text)`, up to where the answer begins.

    The template is given every text with a mark at each cut, so that whatever it does with them
    the cuts stay where they are. Raises KvfoldError if none of several templates is the default, or
    if it refuses the messages, as some do a system message.
    """
    template = _Template(tokenizer, arguments or {})
    mark = _absent_from("".join(text for _, text in messages) + str(template.arguments))
    marked = [(role, mark.join(segments(tokenizer, text))) for role, text in messages]
    try:
        return template.split(marked, mark)
    except TemplateError as problem:
        template.check_arguments(problem)
        roles = ", ".join(role for role, _ in messages)
        raise KvfoldError(f"the chat template refuses messages of {roles}: {problem}") from problem


def check_same(
    tokenizer: PreTrainedTokenizerBase,
    frame: PromptFrame,
    system: str | None,
    arguments: Mapping[str, Any] | None,
) -> None:
    """Raises KvfoldError for another system message, or other arguments, than the text's.

    Those that the template does not read are named.
    """
    if arguments is not None:
        check_named(arguments)
    if arguments is not None and arguments != frame.arguments and tokenizer.chat_template:
        arguments = json_arguments(tokenizer, arguments)
    if frame.is_of(tokenizer, system, arguments):
        return
    if not frame.is_of(tokenizer, system, None):
        held = "another" if frame.system is not None else "no"
        raise KvfoldError(
            f"the text was compressed with {held} system message, which its entries have read: "
            "leave the message out, or compress the text with it"
        )
    made = ", ".join(f"{name}={value!r}" for name, value in frame.arguments.items()) or "none"
    raise KvfoldError(
        f"the text was compressed with other arguments of the chat template ({made:.200}): give "
        "the same, or compress the text with these"
    )


@dataclass(frozen=True)
class _Template:
    """A tokenizer's chat template with arguments of its own."""

    tokenizer: PreTrainedTokenizerBase
    arguments: Mapping[str, Any]

    def check_shown(self) -> None:
        """Raises KvfoldError for a template that drops system messages."""
        mark = _absent_from(str(self.arguments), MARK)
        if len(self.split([("system", mark), ("user", "a")], mark)) < 2:
            raise KvfoldError(
                "this chat template drops system messages: leave it out, or say it in the text"
            )

    def around_user(self, first: list[tuple[str, str]], mark: str) -> tuple[str, str]:
        """Texts of the chat template before a user's message and after it.

        Raises KvfoldError if it does not show the message exactly once.
        """
        try:
            pieces = self.split([*first, ("user", mark)], mark)
        except TemplateError as problem:
            if first and self._times_shown(self._takes_parts()) == 1:
                raise KvfoldError(
                    f"the chat template refuses a system message ({problem}): leave it out, or say "
                    "it in the text"
                ) from problem
            self.check_arguments(problem)
            found = f"refuses a user's message ({problem})"
        else:
            if len(pieces) == 2:
                return pieces[0], pieces[1]
            found = f"shows a user's message {len(pieces) - 1} times"
        raise KvfoldError(
            f"the chat template {found}, so a document has no single place in it: set "
            "tokenizer.chat_template to one that shows each message once, or to None for none"
        )

    def check_arguments(self, problem: TemplateError) -> None:
        """Raises KvfoldError if a user's message has that `problem` with these arguments only."""
        shown, alone = (
            each._times_shown(each._takes_parts()) for each in (self, _Template(self.tokenizer, {}))
        )
        if shown != 1 and alone == 1:
            raise KvfoldError(
                f"the chat template refuses its arguments {', '.join(self.arguments)} ({problem}): "
                "give them as it reads them, or leave them out"
            ) from problem

    def turns(self, first: list[tuple[str, str]], mark: str) -> list[str]:
        """Texts around the messages of two turns after `first`; empty if the template has none."""
        said = [(role, mark) for role in ("user", "assistant", "user")]
        try:
            return self.split([*first, *said], mark)
        except TemplateError:
            return []

    def split(self, messages: Sequence[tuple[str, str]], mark: str) -> list[str]:
        """The chat template with these messages, split at `mark`."""
        return self._rendered(messages, self._takes_parts()).split(mark)

    def _takes_parts(self) -> bool:
        """True if the chat template shows a message only as a list of parts, as LLaVA's does."""
        return self._times_shown(False) != 1 and self._times_shown(True) == 1

    def _times_shown(self, in_parts: bool) -> int:
        mark = _absent_from(str(self.arguments), MARK)
        try:
            return self._rendered([("user", mark)], in_parts).count(mark)
        except TemplateError:
            return 0

    def _rendered(self, messages: Sequence[tuple[str, str]], in_parts: bool) -> str:
        """The chat template with these messages, each as a text or as a list of one part.

        Raises KvfoldError if none of several templates is the default, and TemplateError if the
        template refuses messages or arguments, or fails on them.
        """
        templates: Any = self.tokenizer.chat_template
        if isinstance(templates, dict) and "default" not in templates:
            raise KvfoldError(
                f"the tokenizer has the chat templates {', '.join(templates)} and none named "
                "default: choose one, as "
                f"tokenizer.chat_template = tokenizer.chat_template[{min(templates)!r}]"
            )
        given: list[dict[str, Any]] = [
            {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}
            for role, text in messages
        ]
        try:
            made = self.tokenizer.apply_chat_template(
                given, tokenize=False, add_generation_prompt=True, **self.arguments
            )
        except TemplateError:
            raise
        except Exception as problem:  # a template is a program, and arguments may be of any kind
            raise TemplateError(str(problem) or type(problem).__name__) from problem
        return str(made)


def _absent_from(text: str, mark: str = NONCHARACTER) -> str:
    """A character, once or several times, that is not in the text."""
    made = mark
    while made in text:
        made += mark
    return made


def token_count(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Number of tokens of `text`, without special tokens of the tokenizer's own."""
    return len(tokenizer(text, add_special_tokens=False).input_ids)


def token_ids(tokenizer: PreTrainedTokenizerBase, *pieces: str) -> Tensor:
    """Ids `[1, N]` of the pieces joined, without special tokens of the tokenizer's own.

    Control tokens that a `Content` among them spells stay text; see `hf/user_text.py` for what is
    raised.
    """
    return torch.tensor([ids_of(tokenizer, *pieces)], dtype=torch.long)
