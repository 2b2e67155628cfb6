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
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvfold.cache.cache import CompressedCache
from kvfold.cache.edits import dropped, joined
from kvfold.cache.edits import replaced as spliced
from kvfold.cache.renumber import Renumbering
from kvfold.cache.spans import Span
from kvfold.errors import KvfoldError
from kvfold.generation.generate import read_per_chunk, read_turn
from kvfold.hf.chat_template import token_ids
from kvfold.hf.user_text import content

if TYPE_CHECKING:
    from kvfold.contexts.context import Context

Mode = Literal["splice", "reread"]


def replaced(context: Context, span: Span, text: str, mode: Mode) -> Context:
    """A context whose document has `text` in place of a span; empty text drops the span.

    Raises KvfoldError for a span of the chat template's opening, for another mode, and with
    `"splice"` as `CompressedCache.replace` and `drop`.
    """
    context.check()
    opening, (start, stop) = opening_of(context), span
    if start < opening:
        raise KvfoldError(
            f"the first {opening} tokens are the chat template's, and the document begins behind "
            f"them: tokens {start} to {stop} cannot be edited"
        )
    new = new_tokens(context, text) if text else context.ids[:, :0]
    ids = torch.cat([context.ids[:, :start], new, context.ids[:, stop:]], 1)
    if mode == "reread":
        cache = _reread(context.cache, span, new.shape[1], ids)
    elif mode == "splice":
        cache = spliced(context.cache, span, new) if text else dropped(context.cache, span)
    else:
        raise KvfoldError(f'mode is "splice" or "reread", not {mode!r}')
    return replace(context, cache=cache, ids=ids)


@torch.no_grad()
def appended(context: Context, text: str) -> Context:
    """A context with `text` behind its document, read as one more turn of it.

    Raises KvfoldError for an empty text, and as the model's reading does.
    """
    context.check()
    new = new_tokens(context, text)
    if not new.shape[1]:
        raise KvfoldError("there is nothing to append: the text is empty")
    cache = copy.deepcopy(context.cache, {id(context.tokenizer): context.tokenizer})
    ids = torch.cat([context.ids, new], 1)
    read_turn(context.model, cache, ids, None, ids.shape[1], ids.shape[1])
    return replace(context, cache=cache, ids=ids)


def join(contexts: Sequence[Context]) -> Context:
    """One context with all documents, in order, none of which has read another.

    Each was compressed alone, so that a library of documents is read once and joined as needed.
    The chat template's opening is that of the first; later questions spend the first one's budget.

    Raises KvfoldError for fewer than two contexts, for contexts of different models or templates,
    and for entries that cannot be moved; see `kvfold.cache.edits.Edits`.
    """
    if len(contexts) < 2:
        raise KvfoldError("give at least two contexts to join")
    first, *others = contexts
    cache, parts = first.cache, [first.ids]
    for each in contexts:
        each.check()
    for other in others:
        opening = opening_of(other)
        same = torch.equal(other.ids[:, :opening], first.ids[:, :opening])
        if other.model is not first.model or not same or other.frame != first.frame:
            raise KvfoldError("contexts of one model and one chat template can be joined only")
        cache = joined(cache, other.cache, opening)
        parts.append(other.ids[:, opening:])
    return replace(first, cache=cache, ids=torch.cat(parts, 1))


def opening_of(context: Context) -> int:
    """Tokens of a context before its document."""
    return token_ids(context.tokenizer, context.frame.before).shape[1]


def new_tokens(context: Context, text: str) -> Tensor:
    """Token ids `[1, m]` of `text` as a part of the document."""
    return token_ids(context.tokenizer, content(text, False)).to(context.ids)


def _reread(cache: CompressedCache, span: Span, new: int, ids: Tensor) -> CompressedCache:
    """A cache like `cache` that has read `ids [1, N]`, in which `new` tokens replace a span."""
    state = cache.states[0]
    by = Renumbering.of_replaced(state.sequence, 1, *span, new)
    fresh = CompressedCache(
        state.rotation.model,
        cache.method,
        cache.budget,
        tokenizer=cache.tokenizer,
        protect=[place for each in cache.protect for place in by.spans(each)],
        seed=cache.seed,
        keep_scores=state.plan.keep_scores,
    )
    model, length = state.rotation.model, ids.shape[1]
    if cache.per_chunk is None:
        read_turn(model, fresh, ids, None, length, length)
    else:
        read_per_chunk(model, fresh, ids, None, cache.per_chunk)
    return fresh
