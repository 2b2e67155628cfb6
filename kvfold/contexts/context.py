# SPDX-License-Identifier: Apache-2.0
"""Compress a document once, ask many questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.cache.stats import Stats
from kvfold.contexts.bounded_chat import BoundedChat
from kvfold.contexts.chat import Chat
from kvfold.errors import KvfoldError
from kvfold.generation.generate import Compress, read_per_chunk, read_turn
from kvfold.generation.length import check_length, reach
from kvfold.hf.chat_template import Frame, token_ids
from kvfold.hf.user_text import content
from kvfold.methods.base import Method


@dataclass(frozen=True, repr=False)
class Context:
    """A compressed document; every question sees it alone, never an earlier question.

    `ids [1, N]` are the tokens that were read, those before the document included.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: CompressedCache
    frame: Frame
    ids: Tensor

    def __repr__(self) -> str:
        model, cache = type(self.model).__name__, self.cache
        budget = "" if cache.budget is None else f", budget={str(cache.budget)!r}"
        return (
            f"Context(model={model}, method={str(cache.method)!r}{budget}, "
            f"tokens={self.ids.shape[1]}, nbytes={self.stats().nbytes})"
        )

    def check(self) -> None:
        """Raises KvfoldError where the cache was used for something else."""
        seen, known = self.cache.get_seq_length(), self.ids.shape[1]
        if seen != known:
            raise KvfoldError(
                f"the cache of this context has read {seen} tokens, and the context has {known}: "
                "leave its cache alone, and use ctx.chat() for later turns"
            )

    def ask(self, question: str, **options: Any) -> str:
        """The model's answer; `options` are those of `Chat.ask`.

        Any number of threads may ask at the same time: each costs its question and its answer.
        """
        return self.chat().ask(question, **options, keep=False)

    def stream(self, question: str, **options: Any) -> Iterator[str]:
        """The answer in pieces, as they come; `options` are those of `Chat.stream`."""
        return self.chat().stream(question, **options, keep=False)

    def chat(self, budget: Budget | float | str | None = None) -> Chat:
        """Several turns, of which each sees those before it; they share what this context holds.

        With a `budget`, a number of tokens, its own turns hold no more; see `BoundedChat`.
        """
        return Chat(self) if budget is None else BoundedChat(self, budget)

    def stats(self) -> Stats:
        """What the compressed document takes."""
        return self.cache.stats()

    def save(self, path: str | Path) -> None:
        """Writes a file that `kvfold.load` reads; raises what `contexts/files/write.py` says."""
        from kvfold.contexts.files.write import save

        save(self, path)


def compress(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: str,
    method: Method | str = "snapkv",
    budget: Budget | float | str | None = None,
    *,
    prefill_chunk: int | None = None,
    compress: Compress = "at_end",
    protect: Sequence[tuple[int, int]] = (),
    seed: int = 0,
    special_tokens: bool = False,
    allow_longer: bool = False,
) -> Context:
    """Reads `document` as the opening of a user's message and compresses it.

    What is spelled like a special token in it is text, unless `special_tokens` says that it is
    meant. It is at most as long as the texts the model was trained on, unless `allow_longer`.
    `prefill_chunk` and `compress` are as for `generate`, the rest as for `CompressedCache`;
    both also say what is raised.
    """
    cache = CompressedCache(model, method, budget, tokenizer=tokenizer, protect=protect, seed=seed)
    check_reusable(cache.method)
    frame = Frame.of(tokenizer)
    if cache.reconstruction is not None:
        frame = frame.opened_with(cache.reconstruction.instruction)
    read = content(document, special_tokens)
    ids = token_ids(tokenizer, frame.before, read).to(model.device)
    piece = prefill_chunk if compress == "per_chunk" else None
    check_length(model, reach(cache, ids.shape[1], piece), allow_longer)
    if compress == "per_chunk":
        read_per_chunk(model, cache, ids, None, prefill_chunk)
    else:
        read_turn(model, cache, ids, None, ids.shape[1], prefill_chunk or ids.shape[1])
    return Context(model, tokenizer, cache, frame, ids)


def check_reusable(method: Method) -> None:
    """Raises KvfoldError for a method that compresses only while a question is answered."""
    if method.stages().decode == "once":
        raise KvfoldError(
            f"{method} compresses at the first generated token, but what is generated for a "
            "question is taken back: choose a variant that compresses when the prompt ends"
        )
