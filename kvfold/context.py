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
from kvfold.errors import KvfoldError
from kvfold.frame import Frame, token_ids
from kvfold.generate import Compress, read_per_chunk, read_turn
from kvfold.method import Method
from kvfold.stats import Stats


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
    compress: Compress = "at_end",
    protect: Sequence[tuple[int, int]] = (),
    seed: int = 0,
) -> Context:
    """Reads `document` as the opening of a user's message and compresses it.

    `prefill_chunk` and `compress` are as for `generate`, the rest as for `CompressedCache`; both
    also say what is raised.
    """
    cache = CompressedCache(model, method, budget, tokenizer=tokenizer, protect=protect, seed=seed)
    if cache.method.stages().decode == "once":
        raise KvfoldError(
            f"{cache.method} compresses at the first generated token, but what is generated for a "
            "question is taken back: choose a variant that compresses when the prompt ends"
        )
    frame = Frame.of(tokenizer)
    ids = token_ids(tokenizer, frame.before + document).to(model.device)
    if compress == "per_chunk":
        read_per_chunk(model, cache, ids, None, prefill_chunk)
    else:
        read_turn(model, cache, ids, None, ids.shape[1], prefill_chunk or ids.shape[1])
    return Context(model, tokenizer, cache, frame)
