# SPDX-License-Identifier: Apache-2.0
"""Compress a document once, ask many questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kvfold import compat
from kvfold.budget import Budget
from kvfold.cache import CompressedCache
from kvfold.method import Method
from kvfold.stats import Stats


@dataclass(frozen=True)
class Frame:
    """The text around a document and a question: what a chat template puts there."""

    before: str
    after: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Frame:
        """The tokenizer's chat template, or its first token and a line break where it has none."""
        if not tokenizer.chat_template:
            return cls(tokenizer.bos_token or "", "\n")
        mark = "\u2063"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
        )
        before, after = str(text).split(mark)
        return cls(before, after)


@dataclass(frozen=True)
class Context:
    """A compressed document; every question sees it alone, never an earlier question."""

    model: compat.PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: CompressedCache
    frame: Frame

    def ask(
        self, question: str, *, answer_prefix: str = "", max_new_tokens: int = 64, **options: Any
    ) -> str:
        """The model's answer, greedy unless `options` for `model.generate` say otherwise.

        `answer_prefix` are words the answer starts with; they are not part of what is returned.
        """
        text = f"\n\n{question}{self.frame.after}{answer_prefix}"
        seen = self.cache.get_seq_length()
        new = token_ids(self.tokenizer, text).to(self.model.device)
        before = torch.zeros(1, seen, dtype=new.dtype, device=new.device)
        ids = torch.cat([before, new], 1)
        options = {"do_sample": False, "max_new_tokens": max_new_tokens} | options
        with self.cache.frozen():
            out = compat.generate(
                self.model,
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self.cache,
                **options,
            )
            self.cache.crop(seen - self.cache.get_seq_length())
        answer = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return str(answer).strip()

    def stats(self) -> Stats:
        """What the compressed document takes."""
        return self.cache.stats()


def compress(
    model: compat.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: str,
    method: Method | str = "snapkv",
    budget: Budget | float | str | None = None,
    *,
    prefill_chunk: int | None = None,
    protect: Sequence[tuple[int, int]] = (),
    seed: int = 0,
) -> Context:
    """Reads `document` as the opening of a user's message and compresses it.

    `prefill_chunk` reads it in pieces of that many tokens; the rest is as for `CompressedCache`,
    which also says what is raised.
    """
    cache = CompressedCache(model, method, budget, protect=protect, seed=seed)
    frame = Frame.of(tokenizer)
    ids = token_ids(tokenizer, frame.before + document).to(model.device)
    chunk = prefill_chunk or ids.shape[1]
    with cache.reading(until=ids.shape[1]):
        for start in range(0, ids.shape[1], chunk):
            compat.read(model, ids[:, start : start + chunk], cache, None)
    return Context(model, tokenizer, cache, frame)


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Ids `[1, N]` of `text` as it stands, without special tokens of the tokenizer's own."""
    ids: torch.Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return ids
