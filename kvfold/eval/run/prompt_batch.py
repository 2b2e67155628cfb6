# SPDX-License-Identifier: Apache-2.0
"""Prompts of several samples as one left-padded batch, and the answers that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.contexts.answer import GREEDY, AnswerStream, NumbersOnly, Reply, end_tokens
from kvfold.contexts.chat import discard
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.tasks import Question
from kvfold.generation.generate import generate
from kvfold.generation.reading import read_on
from kvfold.measure.cost import Cost, ForwardCost


@dataclass(frozen=True)
class PromptBatch:
    """Token ids `ids [B, N]` of samples, and the mask `[B, N]` that is 0 at padding."""

    prompts: tuple[SamplePrompt, ...]
    ids: Tensor
    mask: Tensor

    @classmethod
    def of(cls, prompts: Sequence[SamplePrompt], device: torch.device) -> PromptBatch:
        """The samples' contexts."""
        ids, mask = left_padded([prompt.ids for prompt in prompts], device)
        return cls(tuple(prompts), ids, mask)

    @classmethod
    def with_questions(
        cls, prompts: Sequence[SamplePrompt], questions: Sequence[Question], device: torch.device
    ) -> PromptBatch:
        """The samples' contexts, each followed by its question, for prefills of both.

        Padded together: padding after a context would lie inside the prompt.
        """
        pairs = zip(prompts, questions, strict=True)
        pieces = [torch.cat([each.ids, each.question_ids(asked)], 1) for each, asked in pairs]
        ids, mask = left_padded(pieces, device)
        return cls(tuple(prompts), ids, mask)

    @property
    def padding(self) -> Tensor | None:
        """The mask `[B, N]`; None if nothing is padded."""
        return None if bool(self.mask.all()) else self.mask

    def asking(self, number: int) -> tuple[PromptBatch, list[Question]]:
        """The batch followed by each sample's question `number`, and these questions."""
        questions = [prompt.sample.questions[number] for prompt in self.prompts]
        pieces = [p.question_ids(q) for p, q in zip(self.prompts, questions, strict=True)]
        return self.followed_by(*left_padded(pieces, self.ids.device)), questions

    def followed_by(self, ids: Tensor, mask: Tensor | None = None) -> PromptBatch:
        """The batch followed by `ids [B, n]`; `mask [B, n]` is 0 at padding."""
        mask = torch.ones_like(ids) if mask is None else mask
        masks = torch.cat([self.mask, mask], 1)
        return replace(self, ids=torch.cat([self.ids, ids], 1), mask=masks)


class BatchAnswers:
    """Stopping criterion for `generate` that ends each row at its stop string, end token or limit.

    `length` is the number of columns before the answers, `limits [B]` their most tokens.
    """

    def __init__(self, model: PreTrainedModel, batch: PromptBatch, limits: Sequence[int]) -> None:
        self.length, self.ends = batch.ids.shape[1], end_tokens(model)
        self.streams = [
            AnswerStream(each.tokenizer, self.length, each.sample.stop, discard, Event())
            for each in batch.prompts
        ]
        self.limits = tuple(limits)
        self.ids: list[list[int] | None] = [None] * len(batch.prompts)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """True `[B]` for rows whose answer has ended; called after each token with all ids."""
        for row, stream in enumerate(self.streams):
            if self.ids[row] is None:
                stopped = bool(stream(input_ids[row : row + 1], scores))
                said: list[int] = input_ids[row, self.length :].tolist()
                if stopped or said[-1] in self.ends or len(said) >= self.limits[row]:
                    self.ids[row] = said
        return torch.tensor([ids is not None for ids in self.ids], device=input_ids.device)

    @property
    def ended(self) -> bool:
        """True if no answer goes on."""
        return all(ids is not None for ids in self.ids)

    def replies(self, input_ids: Tensor) -> list[Reply]:
        """Every row's answer, from all ids `[B, N]`."""
        found = []
        for row, stream in enumerate(self.streams):
            ids = self.ids[row]
            said = input_ids[row, self.length :].tolist() if ids is None else ids
            stream.finish(said)
            found.append(stream.reply(said, self.ends))
        return found


def all_but_last(model: PreTrainedModel, cache: CompressedCache, batch: PromptBatch) -> None:
    """Reads the batch but for its last token, in a prefill that stays open."""
    read_on(model, cache, batch.ids[:, :-1], batch.padding)


def first_token(model: PreTrainedModel, cache: CompressedCache, batch: PromptBatch) -> PromptBatch:
    """Reads what is unread; returns the batch with each answer's first token.

    Where the text was repeated (KVzip), the batch is returned as it is: the prefill ends before
    the last token.
    """
    if cache.reconstruction is not None:
        return batch
    return batch.followed_by(_generate(model, cache, batch, 1, [], begins=True)[:, -1:])


class Answered(NamedTuple):
    """Every row's answer, and the cost of one decode step of all rows, if there was one."""

    replies: list[Reply]
    step: Cost | None


def replies(
    model: PreTrainedModel,
    cache: CompressedCache,
    asked: PromptBatch,
    begun: PromptBatch,
    limits: Sequence[int],
) -> Answered:
    """Greedy answers to `asked`, at most `limits [B]` tokens; `begun` has their first, if known."""
    answers, ids, cost = BatchAnswers(model, asked, limits), begun.ids, None
    new = max(limits)
    given = ids.shape[1] - asked.ids.shape[1]
    if given:
        answers(ids, None)
    if new > given and not answers.ended:
        with ForwardCost(model.device, token=1) as step:
            ids = _generate(model, cache, begun, new - given, [answers, step], begins=not given)
        cost = step.cost
    return Answered(answers.replies(ids), cost)


def limits_of(questions: Sequence[Question]) -> list[int]:
    """Most tokens of each question's answer."""
    return [question.max_new_tokens for question in questions]


def _generate(
    model: PreTrainedModel,
    cache: CompressedCache,
    batch: PromptBatch,
    new: int,
    criteria: list[Any],
    begins: bool,
) -> Tensor:
    """Ids `[B, N]` after at most `new` tokens; `begins` if these are the first of the answers."""
    ends = end_tokens(model)
    options = batch.prompts[0].options(ends) if begins else {}
    if ends:
        options["pad_token_id"] = ends[0]
    ids: Tensor = generate(
        model,
        batch.ids,
        cache=cache,
        attention_mask=batch.mask,
        max_new_tokens=new,
        stopping_criteria=criteria,
        logits_processor=[NumbersOnly()],
        **GREEDY,
        **options,
    )
    return ids


def left_padded(pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids `[B, N]` of pieces `[1, n]`, with zeros on their left, and the mask `[B, N]`."""
    length = max(piece.shape[1] for piece in pieces)
    padded = [F.pad(piece, (length - piece.shape[1], 0)) for piece in pieces]
    masks = [F.pad(torch.ones_like(piece), (length - piece.shape[1], 0)) for piece in pieces]
    return torch.cat(padded).to(device), torch.cat(masks).to(device)
