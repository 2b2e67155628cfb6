# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids in the model's chat template, with the tokens of their spans."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.cache.spans import Span
from kvfold.checks.prompts import CheckPrompt, PromptMessage
from kvfold.errors import KvfoldError
from kvfold.hf.chat_template import PromptFrame, conversation
from kvfold.hf.user_text import Content, segment_ids, segments
from kvfold.inspect.inspected_text import text_of_tokens, tokens_within

SYSTEM = "system"
LEAST = 2  # tokens that are left without a span
ELSEWHERE = "\ue000"  # a text that no template holds


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids `ids [1, N]` of a prompt, up to where the answer begins.

    The first `context` tokens are compressed before the rest is read; None: all of them, together.
    `spans` are half-open ranges of tokens. `seed` is that of random methods. `group` names the
    prompts whose loss is bounded together with its own.
    """

    where: str
    ids: Tensor
    context: int | None
    spans: dict[str, Span]
    seed: int = 0
    group: str | None = None

    @property
    def digest(self) -> str:
        """Hash of the tokens, the part that is compressed, and the spans."""
        said = repr((self.ids.tolist(), self.context, sorted(self.spans.items()), self.seed))
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()

    def without(self, span: Span) -> EncodedPrompt:
        """The prompt without the tokens of a span."""
        ids = torch.cat([self.ids[:, : span[0]], self.ids[:, span[1] :]], 1)
        context = None if self.context is None else self.context - (span[1] - span[0])
        return EncodedPrompt(self.where, ids, context, {}, self.seed)


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: CheckPrompt, question_aware: bool, seed: int
) -> EncodedPrompt:
    """A prompt's tokens; a context is compressed alone unless `question_aware`.

    Raises KvfoldError for messages without a chat template, and for a span that is not found once
    in what is compressed.
    """
    try:
        made = _encode(tokenizer, prompt, question_aware, seed)
    except KvfoldError as refused:
        raise KvfoldError(f"{prompt.where}: {refused}") from refused
    return replace(made, group=prompt.group)


def _encode(
    tokenizer: PreTrainedTokenizerBase, prompt: CheckPrompt, question_aware: bool, seed: int
) -> EncodedPrompt:
    groups, base = _groups(tokenizer, prompt)
    parts = [segment_ids(tokenizer, group) for group in groups]
    ids = torch.tensor([list(itertools.chain.from_iterable(parts))], dtype=torch.long)
    context = None if len(groups) == 1 or question_aware else len(parts[0])
    if not prompt.spans and prompt.system is None:
        return EncodedPrompt(prompt.where, ids, context, {}, seed)
    pieces: list[str] = []
    for group, own in zip(groups, parts, strict=True):
        pieces += text_of_tokens(tokenizer, group, torch.tensor([own]))
    spans = {}
    if prompt.system is not None:
        system = prompt.system.strip()  # as many templates do
        begin = "".join(pieces).find(system, _system_begins(tokenizer, prompt))
        spans[SYSTEM] = _tokens_of(pieces, begin, system)
    for name, span in prompt.spans.items():
        spans[name] = _located(pieces, span, base, prompt)
        if spans[name][1] > (context or len(pieces)):
            raise KvfoldError(f"the span {name!r} is in the question, which is not compressed")
    for name, (start, stop) in spans.items():
        # Its effect is measured on a prompt without it, which must have tokens to read.
        if (context or len(pieces)) - (stop - start) < LEAST:
            raise KvfoldError(f"the span {name!r} is the whole prompt: name a part of it")
    return EncodedPrompt(prompt.where, ids, context, spans, seed)


def distinct(prompts: Iterable[EncodedPrompt]) -> list[EncodedPrompt]:
    """Prompts without repetitions: of equal tokens, the first, with the spans of all.

    Raises KvfoldError for a span of the same name at another place of the same tokens, and for a
    prompt of two groups.
    """
    found: dict[tuple[tuple[int, ...], int | None], EncodedPrompt] = {}
    for prompt in prompts:
        key = tuple(prompt.ids[0].tolist()), prompt.context
        first = found.get(key, prompt)
        if first.group != prompt.group:
            raise KvfoldError(
                f"{prompt.where} is the same prompt as {first.where}, which is in another group"
            )
        for name, span in prompt.spans.items():
            if first.spans.get(name, span) != span:
                raise KvfoldError(
                    f"{prompt.where}: the span {name!r} is at another place than in {first.where}, "
                    "which is the same prompt: give it another name"
                )
        found[key] = replace(first, spans=prompt.spans | first.spans)
    return list(found.values())


def encode_attack(
    tokenizer: PreTrainedTokenizerBase, system: str, attack: str, question_aware: bool, seed: int
) -> EncodedPrompt:
    """A system text and a message that attacks it; compressed up to that unless `question_aware`.

    Raises KvfoldError without a chat template, and for an attack that says nothing.
    """
    if not attack.strip():
        raise KvfoldError("an attack is empty: it is a message that asks for the system text")
    messages = (
        PromptMessage(role="system", content=system),
        PromptMessage(role="user", content=attack),
    )
    whole = encode(tokenizer, CheckPrompt(messages=messages, where="attack"), True, seed)
    if question_aware:
        return whole
    (group,), _ = _groups(tokenizer, CheckPrompt(messages=messages))
    pieces = text_of_tokens(tokenizer, group, whole.ids)
    context, _ = _tokens_of(pieces, "".join(pieces).rfind(attack), attack)
    return EncodedPrompt(whole.where, whole.ids, context, whole.spans, seed)


def _groups(tokenizer: PreTrainedTokenizerBase, prompt: CheckPrompt) -> tuple[list[list[str]], int]:
    """Segments that are read together, and the character at which the user's text begins."""
    if prompt.messages:
        if not tokenizer.chat_template:
            raise KvfoldError(
                "the tokenizer has no chat template for messages: give prompts, or contexts and "
                "questions, as plain texts"
            )
        return [conversation(tokenizer, [(m.role, m.content) for m in prompt.messages])], 0
    frame = PromptFrame.of(tokenizer)
    if prompt.prompt is not None:
        whole = segments(tokenizer, frame.before, Content(prompt.prompt), frame.after)
        return [whole], len(frame.before)
    assert prompt.context is not None and prompt.question is not None
    opening = segments(tokenizer, frame.before, Content(prompt.context))
    question = Content(prompt.question)
    return [opening, segments(tokenizer, frame.separator, question, frame.after)], len(frame.before)


def _system_begins(tokenizer: PreTrainedTokenizerBase, prompt: CheckPrompt) -> int:
    """The character at which the template puts the system message, which may repeat its words."""
    said = [(m.role, m.content) for m in prompt.messages]
    said[0] = said[0][0], ELSEWHERE
    return max("".join(conversation(tokenizer, said)).find(ELSEWHERE), 0)


def _located(
    pieces: Sequence[str], span: str | tuple[int, int], base: int, prompt: CheckPrompt
) -> Span:
    """Tokens of a span of a prompt that begins at `base`: of its text, which must occur once, or of
    characters.
    """
    text = "".join(pieces)
    if isinstance(span, str):
        end = base + len(prompt.prompt) if prompt.prompt else len(text)
        found = text.count(span, base, end)
        if found != 1:
            raise KvfoldError(
                f"the span {span[:40]!r} occurs {found} times in the prompt, not once"
            )
        return _tokens_of(pieces, text.find(span, base, end), span)
    start, stop = span
    if not 0 <= start < stop <= len(prompt.prompt or prompt.context or ""):
        raise KvfoldError(f"the span {span} is no range of characters of the prompt")
    return _tokens_of(pieces, base + start, text[base + start : base + stop])


def _tokens_of(pieces: Sequence[str], begin: int, part: str) -> Span:
    """Range of the tokens that hold characters of `part`, which begins at `begin`."""
    if begin < 0:
        raise KvfoldError(f"the chat template changes {part[:40]!r}, which is not found again")
    return tokens_within(pieces, begin, begin + len(part))
