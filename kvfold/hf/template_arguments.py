# SPDX-License-Identifier: Apache-2.0
"""Arguments of a chat template beside messages: `enable_thinking`, tools, documents, a date."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

from kvfold.errors import KvfoldError
from kvfold.hf.user_text import Content, segments, template_text

# Parameters of `apply_chat_template` that are the template's own.
OF_TEMPLATES = {"tools", "documents"}
# Names under which a template finds the day it is used on.
DATES = ("strftime_now", "date_string")
# What transformers gives every template.
GIVEN = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}
# Marks around an answer, which are transformers' own and no variables.
ANSWERS = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")


def json_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments as JSON holds them.

    Raises KvfoldError for anything else than JSON, for names that are not the template's, and for
    those that the template does not read.
    """
    check_named(arguments)
    try:
        made: dict[str, Any] = json.loads(json.dumps(dict(arguments), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as problem:
        raise KvfoldError(
            f"arguments of a chat template are kept in files, as JSON: {problem}"
        ) from None
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    read = read_by(tokenizer) if made else set()
    for name in made:
        if (name in own and name not in OF_TEMPLATES) or name == "messages":
            raise KvfoldError(f"{name!r} is no argument of a chat template: leave it out")
        if name not in read:
            raise KvfoldError(
                f"the chat template does not read {name!r}: leave it out; it reads "
                f"{', '.join(sorted(read)) or 'no arguments'}"
            )
    return made


def check_named(arguments: Any) -> None:
    """Raises KvfoldError for anything else than names and values."""
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise KvfoldError(
            'arguments of a chat template are names and values, such as {"enable_thinking": False}'
        )


def read_by(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Arguments that the chat template reads: variables that it does not set, no special tokens.

    Raises KvfoldError for a template that is damaged.
    """
    found: set[str] = set()
    for template in template_text(tokenizer).split("\0"):
        try:
            parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
                ANSWERS.sub("", template)
            )
        except TemplateError as problem:
            raise KvfoldError(f"the chat template is damaged: {problem}") from problem
        found |= meta.find_undeclared_variables(parsed)
    return found - GIVEN - set(tokenizer.special_tokens_map)


def check_spelled(
    tokenizer: PreTrainedTokenizerBase, system: str | None, arguments: Mapping[str, Any]
) -> None:
    """Raises KvfoldError if a control token is spelled where the template writes a user's text."""
    for text in (*_texts(arguments), *(() if system is None else (system,))):
        if len(segments(tokenizer, Content(text))) > 1:
            raise KvfoldError(
                "the system message or an argument of the chat template spells a control token: "
                "leave it out, or allow control tokens with special_tokens=True"
            )


def date_told(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Words on another prefix where the chat template writes the date; else none."""
    template = "" if tokenizer is None else template_text(tokenizer)
    if DATES[0] not in template:
        return ""
    fix = f" or give it as {DATES[1]}" if DATES[1] in template else ""
    return (
        f". The chat template writes the date ({DATES[0]}), which changes the prompt from day to "
        f"day: keep the first day's text{fix}"
    )


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, names of members included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield name
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
