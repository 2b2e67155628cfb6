# SPDX-License-Identifier: Apache-2.0
"""Prompts: a sample as token ids in a chat template, truncated to the length limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.errors import KvfoldError
from kvfold.eval.tasks import Question, TaskSample
from kvfold.hf.chat_template import PromptFrame, token_count, token_ids
from kvfold.hf.user_text import Content, own_tokens


@dataclass(frozen=True)
class SamplePrompt:
    """Token ids `ids [1, N]` of a sample's context in its chat template.

    The first `opening` tokens belong to the template and are never truncated; `left_out` is the
    number of context tokens truncated.
    """

    sample: TaskSample
    tokenizer: PreTrainedTokenizerBase
    frame: PromptFrame
    ids: Tensor
    opening: int
    left_out: int = 0

    @classmethod
    def of(
        cls, sample: TaskSample, tokenizer: PreTrainedTokenizerBase, *, always_bos: bool = False
    ) -> SamplePrompt:
        """The whole context, in the chat template if the benchmark uses one.

        Others begin with the BOS token if the tokenizer adds it to a text; with `always_bos`, if it
        has one.
        """
        bos = tokenizer.bos_token if always_bos or own_tokens(tokenizer)[0] else None
        frame = PromptFrame(bos or "", "", "", "")
        if sample.chat:
            # A question's text starts with its own separator from the context.
            frame = replace(PromptFrame.of(tokenizer), separator="")
        # Special tokens spelt in a benchmark's text are plain text, as in `kvfold.compress`.
        ids = token_ids(tokenizer, frame.before, Content(sample.context))
        return cls(sample, tokenizer, frame, ids, token_count(tokenizer, frame.before))

    @property
    def tokens(self) -> int:
        """Number of tokens of the context and the first question."""
        asked = [self.question_ids(question).shape[1] for question in self.sample.questions[:1]]
        return self.ids.shape[1] + sum(asked)

    def question_ids(self, question: Question, first: bool = True) -> Tensor:
        """Token ids `[1, S]` of a question and its answer's prefix.

        `first` is false for later turns of a conversation. Raises KvfoldError for these if the
        chat template has no second turn.
        """
        opening = self.frame.separator if first else self.frame.between
        if opening is None:
            raise KvfoldError("the tokenizer's chat template has no second turn")
        text, prefix = Content(question.text), Content(question.answer_prefix)
        return token_ids(self.tokenizer, opening, text, self.frame.after, prefix)

    def tokens_after(self) -> tuple[int, int]:
        """Most tokens after the context: of a question, and of a question with its answer.

        For a conversation, both are sums over the turns.
        """
        taken = []
        for turn, question in enumerate(self.sample.questions):
            first = turn == 0 or not self.sample.conversation
            asked = self.question_ids(question, first).shape[1]
            taken.append((asked, asked + question.max_new_tokens))
        if self.sample.conversation:
            return sum(asked for asked, _ in taken), sum(whole for _, whole in taken)
        return max(taken, key=lambda sizes: sizes[1], default=(0, 0))

    def options(self, ends: Sequence[int]) -> dict[str, Any]:
        """Options of `generate` for this sample; `ends` are the model's end tokens."""
        if not self.sample.nonempty:
            return {}
        stops = [token_ids(self.tokenizer, stop)[0, -1].item() for stop in self.sample.stop]
        return {"begin_suppress_tokens": [*ends, *stops]}

    def within(self, limit: int, truncation: str) -> SamplePrompt:
        """The prompt truncated in the middle, so that prompt plus answer take `limit` tokens.

        As in LongBench, equal parts of the beginning and the end (with the question) are kept.
        Raises KvfoldError if the prompt is too long and `truncation` is "none", or if the question
        and its answer exceed the limit alone.
        """
        asked, whole = self.tokens_after()
        length = self.ids.shape[1]
        if length + whole <= limit:
            return self
        if truncation == "none":
            raise KvfoldError(
                f"takes {length + whole} tokens with its answer, {limit} are the limit: make it "
                "shorter, or raise the limit if the model can read more"
            )
        room = limit - whole
        if room <= self.opening:
            raise KvfoldError(f"a question takes {whole} of {limit} tokens with its answer")
        return self.truncated(room, head=(room + asked) // 2)

    def truncated(self, room: int, head: int | None = None) -> SamplePrompt:
        """The context's first `head` tokens (default: half) and its last ones, `room` in all."""
        length = self.ids.shape[1]
        room = max(room, self.opening)
        if length <= room:
            return self
        head = min(room, max(self.opening, room // 2 if head is None else head))
        ids = torch.cat([self.ids[:, :head], self.ids[:, length - (room - head) :]], 1)
        return replace(self, ids=ids, left_out=self.left_out + length - room)
