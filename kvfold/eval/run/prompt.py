# SPDX-License-Identifier: Apache-2.0
"""A record as tokens: the context in its frame, cut to what the model may read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.errors import KvfoldError
from kvfold.eval.tasks import Question, Record
from kvfold.hf.chat_template import Frame, token_count, token_ids
from kvfold.hf.user_text import Content


@dataclass(frozen=True)
class Prompt:
    """A sample's context `ids [1, N]`, of which `left_out` tokens were cut away before.

    `opening` of them stand before the context itself; they are never cut.
    """

    record: Record
    tokenizer: PreTrainedTokenizerBase
    frame: Frame
    ids: Tensor
    opening: int
    left_out: int = 0

    @classmethod
    def of(cls, record: Record, tokenizer: PreTrainedTokenizerBase) -> Prompt:
        """The whole context; in a chat template where the benchmark puts it into one."""
        frame = Frame(tokenizer.bos_token or "", "", "", "")
        if record.chat:
            # Questions come with the white space that parts them from the context.
            frame = replace(Frame.of(tokenizer), parting="")
        # What a benchmark spells like a special token is text, as in `kvfold.compress`.
        ids = token_ids(tokenizer, frame.before, Content(record.context))
        return cls(record, tokenizer, frame, ids, token_count(tokenizer, frame.before))

    @property
    def tokens(self) -> int:
        """Of context and first question."""
        asked = [self.asked(question).shape[1] for question in self.record.questions[:1]]
        return self.ids.shape[1] + sum(asked)

    def asked(self, question: Question, first: bool = True) -> Tensor:
        """The tokens `[1, n]` from the question to where its answer begins."""
        opening = self.frame.parting if first else self.frame.between
        if opening is None:
            raise KvfoldError("the tokenizer's chat template has no second turn")
        text, prefix = Content(question.text), Content(question.answer_prefix)
        return token_ids(self.tokenizer, opening, text, self.frame.after, prefix)

    def following(self) -> tuple[int, int]:
        """The most tokens that a question takes after the context, and it with its answer."""
        taken = [
            (self.asked(q).shape[1], self.asked(q).shape[1] + q.max_new_tokens)
            for q in self.record.questions
        ]
        if self.record.conversation:
            return sum(asked for asked, _ in taken), sum(whole for _, whole in taken)
        return max(taken, key=lambda sizes: sizes[1], default=(0, 0))

    def options(self, ends: Sequence[int]) -> dict[str, Any]:
        """Options of `generate` that the record asks for; `ends` are the model's end tokens."""
        if not self.record.nonempty:
            return {}
        stops = [token_ids(self.tokenizer, stop)[0, -1].item() for stop in self.record.stop]
        return {"begin_suppress_tokens": [*ends, *stops]}

    def within(self, limit: int, truncation: str) -> Prompt:
        """Cut in the middle, as LongBench does, so that prompt and answer take `limit` tokens.

        Half of what is left of the prompt is its beginning, half its end, the question included.
        Raises KvfoldError where a benchmark's rule forbids to cut, or the question alone is longer.
        """
        asked, whole = self.following()
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
        return self.cut(room, head=(room + asked) // 2)

    def cut(self, room: int, head: int | None = None) -> Prompt:
        """The first `head` of the context's tokens and the last ones, `room` in all."""
        length = self.ids.shape[1]
        room = max(room, self.opening)
        if length <= room:
            return self
        head = min(room, max(self.opening, room // 2 if head is None else head))
        ids = torch.cat([self.ids[:, :head], self.ids[:, length - (room - head) :]], 1)
        return replace(self, ids=ids, left_out=self.left_out + length - room)
