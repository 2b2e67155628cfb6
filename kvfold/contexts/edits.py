# SPDX-License-Identifier: Apache-2.0
"""Edits of a compressed document: a span dropped or replaced, text appended, documents joined.

An edit makes a new context; the old one stays, and both hold their entries until one is let go.
Two modes:

- `"splice"` keeps the entries of the text behind a span and moves them. They were computed with the
  old span in view: what is dropped is not attended to any more, but its traces remain.
- `"reread"` reads and compresses the edited document anew, which forgets for certain.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from kvfold.cache.cache import CompressedCache
from kvfold.cache.edits import dropped, joined
from kvfold.cache.edits import replaced as spliced
from kvfold.cache.renumber import Renumbering
from kvfold.cache.spans import Span, opening_length, span_of
from kvfold.contexts.document import CompressedDocument
from kvfold.errors import KvfoldError
from kvfold.generation.length import check_length
from kvfold.generation.reading import read_per_chunk, read_turn
from kvfold.hf.chat_template import token_ids
from kvfold.hf.template_arguments import date_told
from kvfold.hf.user_text import content

Mode = Literal["splice", "reread"]
Document = TypeVar("Document", bound=CompressedDocument)


def replaced(
    context: Document, span: Span, text: str, mode: Mode, prefill_chunk: int | None = None
) -> Document:
    """A context whose document has `text` in place of a span; empty text drops the span.

    `prefill_chunk`: tokens per forward where the document is read again; None: all at once. Raises
    KvfoldError for a span that is not in the document, for another mode, for a document that
    becomes too long for the model, and with `"splice"` as `CompressedCache.replace` and `drop`.
    """
    _check(context)
    (start, stop), opening, length = span_of(span), opening_of(context), context.ids.shape[1]
    if start < opening or stop > length:
        raise KvfoldError(
            f"the document is tokens {opening} to {length}, behind the chat template's opening: "
            f"tokens {start} to {stop} cannot be edited"
        )
    new = new_tokens(context, text) if text else context.ids[:, :0]
    ids = torch.cat([context.ids[:, :start], new, context.ids[:, stop:]], 1)
    check_length(context.model, ids.shape[1], ids.shape[1] <= length)
    if mode == "reread":
        cache = _reread(context.cache, (start, stop), new.shape[1], ids, prefill_chunk)
    elif mode == "splice":
        cache = spliced(context.cache, span, new) if text else dropped(context.cache, span)
    else:
        raise KvfoldError(f'mode is "splice" or "reread", not {mode!r}')
    return replace(context, cache=cache, ids=ids, level=None)


@torch.no_grad()
def appended(
    context: Document, text: str, allow_longer: bool, prefill_chunk: int | None = None
) -> Document:
    """A context with `text` behind its document, read as one more turn of it.

    Methods with forwards of their own (KVzip, PyramidInfer) keep all of it. Raises KvfoldError for
    an empty text, and for a document that becomes too long for the model.
    """
    _check(context)
    new = new_tokens(context, text)
    if not new.shape[1]:
        raise KvfoldError("there is nothing to append: the text is empty")
    ids = torch.cat([context.ids, new], 1)
    check_length(context.model, ids.shape[1], allow_longer)
    cache = copy.deepcopy(context.cache)
    read_turn(context.model, cache, ids, chunk=prefill_chunk)
    return replace(context, cache=cache, ids=ids, level=None)


def join(contexts: Sequence[Document], *, allow_longer: bool = False) -> Document:
    """One context with all documents, in order, none of which has read another.

    Each was compressed alone, so that a library of documents is read once and joined as needed.
    The chat template's opening is that of the first, and text appended later spends its budget.
    `allow_longer`: also beyond the model's trained length.

    Raises KvfoldError for fewer than two contexts, for contexts of different models or templates,
    for methods that sum attention or move keys to other positions, for a whole that is too long for
    the model, and for entries that cannot be moved; see `kvfold.cache.edits.Edits`.
    """
    listed = isinstance(contexts, Sequence) and all(
        isinstance(c, CompressedDocument) for c in contexts
    )
    if not listed or len(contexts) < 2:
        raise KvfoldError("give a list of at least two contexts to join: join([one, other])")
    first, *others = contexts
    cache, parts = first.cache, [first.ids]
    for each in contexts:
        _check(each)
    openings = [0, *(_shared_opening(first, other) for other in others)]
    total = sum(each.ids.shape[1] for each in contexts) - sum(openings)
    check_length(first.model, total, allow_longer)
    for other, opening in zip(others, openings[1:], strict=True):
        cache = joined(cache, other.cache, opening)
        parts.append(other.ids[:, opening:])
    return replace(first, cache=cache, ids=torch.cat(parts, 1), level=None)


def _check(context: CompressedDocument) -> None:
    """Raises KvfoldError unless the context's cache has read the context's tokens."""
    context.check()
    read = context.cache.phase.history.whole()
    if read is not None and not read.equal(context.ids[:, : read.shape[1]].to(read)):
        raise KvfoldError("the cache of this context was edited itself: edit the context only")


def _shared_opening(first: CompressedDocument, other: CompressedDocument) -> int:
    """Tokens of `other` before its document, where `first` begins with the same template.

    Raises KvfoldError where it does not.
    """
    opening = opening_of(other)
    alike = opening_length(first.ids[0], other.ids[0, :opening])
    if other.model is not first.model or other.frame != first.frame or alike < opening - 1:
        raise KvfoldError(
            "contexts of one model and one chat template, with one system message and the same "
            f"arguments, can be joined only{date_told(first.tokenizer)}"
        )
    return opening


def opening_of(context: CompressedDocument) -> int:
    """Tokens of a context before its document."""
    opening = token_ids(context.tokenizer, context.frame.before)[0]
    return opening_length(context.ids[0], opening)


def new_tokens(context: CompressedDocument, text: str) -> Tensor:
    """Token ids `[1, m]` of `text` as a part of the document."""
    return token_ids(context.tokenizer, content(text, False)).to(context.ids)


def _reread(
    cache: CompressedCache, span: Span, new: int, ids: Tensor, chunk: int | None
) -> CompressedCache:
    """A cache like `cache` that has read `ids [1, N]`, in which `new` tokens replace a span."""
    state = cache.states[0]
    by = Renumbering.of_replaced(state.sequence, 1, *span, new)
    fresh = CompressedCache(
        state.plan.rotation.model,
        cache.method,
        cache.budget,
        tokenizer=cache.binding.tokenizer,
        protect=[place for each in cache.protect for place in by.spans(each)],
        seed=cache.seed,
        keep_scores=state.plan.keep_scores,
    )
    fresh.binding.put_frame(cache.binding.frame)
    if cache.per_chunk is None:
        read_turn(state.plan.rotation.model, fresh, ids, chunk=chunk)
    else:
        read_per_chunk(state.plan.rotation.model, fresh, ids, chunk=cache.per_chunk)
    return fresh
