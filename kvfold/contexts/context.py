# SPDX-License-Identifier: Apache-2.0
"""A compressed document that answers many questions: `kvfold.compress` and `Context`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.cache.shrink import shrunk
from kvfold.cache.spans import Span, opening_length, span_in
from kvfold.contexts import edits
from kvfold.contexts.bounded_chat import BoundedChat
from kvfold.contexts.chat import Chat
from kvfold.contexts.document import CompressedDocument
from kvfold.contexts.edits import Mode
from kvfold.contexts.files.write import save
from kvfold.contexts.levelled import levelled, paged
from kvfold.errors import KvfoldError
from kvfold.generation.length import check_length, reach
from kvfold.generation.reading import read_on, read_per_chunk, read_turn
from kvfold.generation.request import Compress, check_compress
from kvfold.hf.arguments import checked_arguments
from kvfold.hf.chat_template import PromptFrame, check_same, token_ids
from kvfold.hf.lookups import check_tokens
from kvfold.hf.user_text import content
from kvfold.methods.base import Method, parse
from kvfold.methods.layer_budgets import Given
from kvfold.methods.stages.select.one_set import Rule
from kvfold.methods.stages.when import Once
from kvfold.observers.reconstruction import ContextReconstruction


class Context(CompressedDocument):
    """A compressed document; each question reads it alone, without earlier questions.

    `frame` holds the chat template parts around a question, `ids [1, N]` the tokens that were read,
    those of the template before the document included. `level` tells what `levelled` has changed.
    """

    def __repr__(self) -> str:
        model, cache = type(self.model).__name__, self.cache
        budget = "" if cache.budget is None else f", budget={str(cache.budget)!r}"
        return (
            f"Context(model={model}, method={str(cache.method)!r}{budget}, "
            f"tokens={self.ids.shape[1]}, nbytes={self.stats().nbytes})"
        )

    def ask(
        self, question: str, *, template: Mapping[str, Any] | None = None, **options: Any
    ) -> str:
        """The model's answer; `template` as for `chat`, `options` and errors as for `Chat.ask`.

        Threads may ask at the same time; each stores only its own question and answer.
        """
        return self.chat(template=template).ask(question, **options, keep=False)

    def stream(
        self, question: str, *, template: Mapping[str, Any] | None = None, **options: Any
    ) -> Iterator[str]:
        """Iterator over the answer in pieces; `options` as for `Chat.stream`."""
        return self.chat(template=template).stream(question, **options, keep=False)

    @checked_arguments
    def chat(
        self,
        budget: Budget | float | str | None = None,
        *,
        template: Mapping[str, Any] | None = None,
    ) -> Chat:
        """A chat over this context, in which each turn reads the ones before it.

        With a `budget`, its turns keep at most that many tokens; see `BoundedChat`. The arguments
        of the chat template are those of `compress`: KvfoldError for a `template` of others.
        """
        check_same(self.tokenizer, self.frame, None, template)
        return Chat(self) if budget is None else BoundedChat(self, budget)

    @checked_arguments
    def shrink(self, budget: Budget | float | str) -> Context:
        """This document with a smaller budget, entry by entry as if compressed to it at once.

        This context stays as it is. Raises BudgetError for a larger budget, and KvfoldError for a
        document that was compressed without `keep_scores=True`, or after each piece.
        """
        self.check()
        return replace(self, cache=shrunk(self.cache, budget))

    def levelled(self, rule: Rule = "mass", *, prefill_chunk: int | None = None) -> Context:
        """This document with one set of tokens for all layers and heads, for engines' pages.

        Its text is read once more, in forwards of `prefill_chunk` tokens; `rule` as of the method
        `level`. The result's `level` holds the rule, the tokens, and the mean KL to this context.
        Raises KvfoldError for a text compressed per chunk or levelled before, and for a method that
        evicts while decoding.
        """
        return levelled(self, rule, prefill_chunk)

    def paged(self, size: int = 32, *, prefill_chunk: int | None = None) -> Context:
        """This document with whole pages of `size` entries for each head, for engines' pages.

        Its text is read once more, in forwards of `prefill_chunk` tokens, by the method with
        `pages`. Raises KvfoldError for a text compressed per chunk or levelled, and for a method
        that takes no pages.
        """
        return paged(self, size, prefill_chunk)

    def span(self, part: str, occurrence: int | None = None) -> Span:
        """Token range of a `part` of the document, for its edits; errors as for `kvfold.span`.

        Tokens that the part begins or ends in are whole in it, with a space before a word in many
        tokenizers. `occurrence` says which one, from 0, where `part` occurs several times.
        """
        return _document_span(self.tokenizer, self.frame, self.ids, part, occurrence)

    def drop(
        self, span: Span, mode: Mode = "splice", *, prefill_chunk: int | None = None
    ) -> Context:
        """This document without a span, as a context of its own; see `contexts/edits.py`.

        `prefill_chunk`: tokens per forward of `mode="reread"`; None: all at once.
        """
        return edits.replaced(self, span, "", mode, prefill_chunk)

    def replace(
        self, span: Span, text: str, mode: Mode = "splice", *, prefill_chunk: int | None = None
    ) -> Context:
        """This document with `text` in place of a span; otherwise as `drop`."""
        if not (isinstance(text, str) and text):
            raise KvfoldError("replace takes a text; drop leaves the span out")
        return edits.replaced(self, span, text, mode, prefill_chunk)

    def append(
        self, text: str, allow_longer: bool = False, *, prefill_chunk: int | None = None
    ) -> Context:
        """This document and more `text`, read as its next turn; see `contexts/edits.py`.

        `allow_longer`: also beyond the model's trained length. `prefill_chunk`: tokens per forward.
        """
        return edits.appended(self, text, allow_longer, prefill_chunk)

    @checked_arguments
    def save(self, path: str | Path, *, codec: str | None = None) -> None:
        """Writes a file for `kvfold.load`; raises KvfoldError, see `contexts/files/write.py`.

        `codec` makes it smaller: "zstd" loses nothing, "kivi4" stores 4 bits a number, and
        "kvtc:file=BASIS,ratio=16" codes keys and values in a basis of the model, which
        `kvfold fit --codec kvtc` writes.
        """
        save(self, path, codec=codec)


@checked_arguments
def compress(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: str,
    method: Method | str = "kvzip",
    budget: Given = None,
    *,
    prefill_chunk: int | None = None,
    compress: Compress = "at_end",
    protect: Sequence[str | Span] = (),
    seed: int = 0,
    special_tokens: bool = False,
    allow_longer: bool = False,
    keep_scores: bool = False,
    system: str | None = None,
    template: Mapping[str, Any] | None = None,
) -> Context:
    """Reads `document` as the opening of a user's message and compresses its KV cache.

    Args:
        model: a causal LM of transformers.
        tokenizer: the model's.
        document: the text; special tokens spelled in it stay text, unless `special_tokens`.
        method: a method, or its text such as "snapkv:window=16".
        budget: entries to keep, as for `CompressedCache`; None for methods without a budget.
        prefill_chunk: tokens per forward; None: all at once.
        compress: "at_end" of the document, or "per_chunk", which bounds the memory.
        protect: parts of the document that are always kept: texts that occur in it once, or token
            ranges `(start, stop)` of all that is read, as `Context.span` gives them.
        seed: of methods that choose at random.
        special_tokens: parse special tokens spelled in the document.
        allow_longer: read a document beyond the model's trained length.
        keep_scores: keep four bytes of each entry, by which `Context.shrink` goes to a smaller
            budget, for methods whose kept entries are nested.
        system: a system message before the document, which stays whole under KVzip.
        template: arguments of the chat template, such as `{"enable_thinking": False}`.

    Raises KvfoldError for a method that compresses only while generating, for a document that is
    too long, for protected texts that it does not hold once, and for `keep_scores` of another
    method or per chunk; and what `CompressedCache` and `kvfold.generate` raise.
    """
    frame, ids = prompt(tokenizer, parse(method), document, special_tokens, system, template)
    cache = CompressedCache(
        model,
        method,
        budget,
        tokenizer=tokenizer,
        protect=_located(tokenizer, frame, ids, protect),
        seed=seed,
        keep_scores=keep_scores,
    )
    cache.binding.put_frame(frame)
    check_reusable(cache.method)
    check_compress(compress)
    if keep_scores and compress == "per_chunk":
        raise KvfoldError("scores of a document compressed per chunk rank no whole: leave one out")
    check_tokens(model, ids)
    ids = ids.to(model.device)
    piece = prefill_chunk if compress == "per_chunk" else None
    check_length(model, reach(cache, ids.shape[1], piece), allow_longer)
    if compress == "per_chunk":
        read_per_chunk(model, cache, ids, chunk=prefill_chunk)
    else:
        read_turn(model, cache, ids, chunk=prefill_chunk)
    return Context(model, tokenizer, cache, frame, ids)


def compress_each(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: str,
    method: Method | str,
    budgets: Sequence[Budget | float | str],
    *,
    prefill_chunk: int | None = None,
    seed: int = 0,
    special_tokens: bool = False,
    allow_longer: bool = False,
    keep_scores: bool = False,
    system: str | None = None,
    template: Mapping[str, Any] | None = None,
) -> Iterator[Context]:
    """One context for each of the `budgets`, in their order, from one reading of `document`.

    Each is what `compress` makes with that budget; the whole cache is held until the last one.
    Arguments and errors as for `compress`; KvfoldError without budgets.
    """
    if not budgets:
        raise KvfoldError("give at least one budget")
    caches = [
        CompressedCache(
            model, method, each, tokenizer=tokenizer, seed=seed, keep_scores=keep_scores
        )
        for each in budgets
    ]
    cache = caches[-1]
    check_reusable(cache.method)
    frame, ids = prompt(tokenizer, cache.method, document, special_tokens, system, template)
    check_tokens(model, ids)
    for made in caches:
        made.binding.put_frame(frame)
    ids = ids.to(model.device)
    check_length(model, reach(cache, ids.shape[1], None), allow_longer)
    with ExitStack() as reading:
        reading.enter_context(cache.reading())
        read_on(model, cache, ids, chunk=prefill_chunk)
        for each in budgets[:-1]:
            yield Context(model, tokenizer, cache.to_budget(each), frame, ids)
    yield Context(model, tokenizer, cache, frame, ids)


def prompt(
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    document: str,
    special_tokens: bool,
    system: str | None = None,
    template: Mapping[str, Any] | None = None,
) -> tuple[PromptFrame, Tensor]:
    """Chat template parts around a document, and the tokens `[1, N]` that `compress` reads."""
    if system is not None:
        content(system, special_tokens)
    frame = PromptFrame.of(tokenizer, system, template, special_tokens)
    reconstruction = method.stages().needs.get(ContextReconstruction)
    if reconstruction is not None:
        frame = frame.opened_with(reconstruction.instruction)
    return frame, token_ids(tokenizer, frame.before, content(document, special_tokens))


def _located(
    tokenizer: PreTrainedTokenizerBase, frame: PromptFrame, ids: Tensor, protect: Any
) -> Any:
    """Token ranges of protected parts; raises KvfoldError as `span` for texts."""
    if isinstance(protect, str) or not isinstance(protect, Iterable):
        return protect  # refused by the cache
    return [
        _document_span(tokenizer, frame, ids, part) if isinstance(part, str) else part
        for part in protect
    ]


def _document_span(
    tokenizer: PreTrainedTokenizerBase,
    frame: PromptFrame,
    ids: Tensor,
    part: str,
    occurrence: int | None = None,
) -> Span:
    """Token range in `ids [1, N]` of a part of their document, without the template before it."""
    opening = opening_length(ids[0], token_ids(tokenizer, frame.before)[0])
    start, stop = span_in(tokenizer, ids[0, opening:].tolist(), part, occurrence)
    return opening + start, opening + stop


def check_reusable(method: Method) -> None:
    """Raises KvfoldError for a method that compresses only once an answer is being generated."""
    if isinstance(method.stages().when, Once):
        raise KvfoldError(
            f"{method} compresses at the first generated token, but what is generated for a "
            "question is taken back: choose a variant that compresses when the prompt ends"
        )
