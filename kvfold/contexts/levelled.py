# SPDX-License-Identifier: Apache-2.0
"""Contexts in the shape of an engine's pages: one set of tokens for all heads, or whole pages."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.cache.cache import CompressedCache
from kvfold.cache.fork import fork
from kvfold.contexts.answer import end_tokens
from kvfold.contexts.chat import Chat
from kvfold.contexts.document import CompressedDocument
from kvfold.contexts.files.header import LevelHeader
from kvfold.errors import KvfoldError
from kvfold.generation.reading import read_turn
from kvfold.hf.versions import CACHE
from kvfold.methods.base import Composition, Method, parts_of, with_part
from kvfold.methods.level import Level
from kvfold.methods.pages import Pages
from kvfold.methods.stages.select.one_set import Rule

Document = TypeVar("Document", bound=CompressedDocument)
# The answer whose next-token distributions are compared.
QUESTION, TOKENS = "What is this text about?", 32


def levelled(context: Document, rule: Rule, prefill_chunk: int | None) -> Document:
    """`context` with one set of tokens for all layers and heads; its text is read again.

    In forwards of `prefill_chunk` tokens; None: all at once.

    `level` of the result says how far answers moved: the mean KL, in nats, of its next tokens from
    those of `context`, along the greedy answer of `context` to `QUESTION`, up to `TOKENS` tokens.
    Raises KvfoldError for a context compressed per chunk or levelled before; and what
    `CompressedCache` raises for a method that cannot be levelled.
    """
    made = _reread(context, rule, prefill_chunk)
    cache = context.cache
    asked = Chat(context).question_ids(QUESTION, "", special_tokens=False)
    kl, tokens = distance(context, made, asked)
    counts = [count for layer in cache.stats().kept for count in layer[0]]
    own, one = sum(counts) / len(counts), made.stats().kept[0][0][0]
    header = LevelHeader(rule=rule, own=own, tokens=one, kl=kl, measured=tokens)
    return replace(context, cache=made, level=header)


def paged(context: Document, size: int, prefill_chunk: int | None) -> Document:
    """`context` with whole pages of `size` entries for each head; its text is read again.

    In forwards of `prefill_chunk` tokens; None: all at once. Raises KvfoldError as `levelled`, for
    a method that takes no pages.
    """
    return replace(context, cache=_reread(context, size, prefill_chunk))


def _reread(
    context: CompressedDocument, shape: Rule | int, prefill_chunk: int | None
) -> CompressedCache:
    """The cache of a context's text, read again by its method in this shape."""
    context.check()
    cache = context.cache
    if cache.per_chunk is not None or context.level is not None:
        how = "per chunk" if context.level is None else "to one set of tokens"
        raise KvfoldError(f"this text was compressed {how} already: compress it again")
    made = CompressedCache(
        context.model,
        reshaped(cache.method, shape),
        cache.budget,
        tokenizer=context.tokenizer,
        protect=cache.protect,
        seed=cache.seed,
    )
    made.binding.put_frame(context.frame)
    read_turn(context.model, made, context.ids, chunk=prefill_chunk)
    return made


def shaped(method: Method, shape: Rule | int) -> Method:
    """`method` levelled by a rule, or with pages of so many entries.

    Raises IllegalComposition for one that cannot.
    """
    return with_part(method, Pages(shape)) if isinstance(shape, int) else level_of(method, shape)


def reshaped(method: Method, shape: Rule | int) -> Method:
    """`method` without pages of its own, then as `shaped`."""
    own = tuple(part for part in parts_of(method) if not isinstance(part, Pages))
    return shaped(Composition(own), shape)


def level_of(method: Method, rule: Rule) -> Method:
    """`method` with one set of tokens; raises IllegalComposition for one that cannot."""
    return with_part(method, Level(rule))


@torch.no_grad()
def distance(
    context: CompressedDocument, made: CompressedCache, asked: Tensor
) -> tuple[float, int]:
    """Mean KL over the greedy answer of `context` to the tokens `asked`, and its tokens."""
    model = context.model
    caches = [fork(context.cache), fork(made)]
    pending, divergences = asked, []
    ends = end_tokens(model)
    for _ in range(TOKENS):
        ours, theirs = (
            model(pending, **{CACHE: cache}).logits[0, -1].float().log_softmax(-1)
            for cache in caches
        )
        divergences.append(float(F.kl_div(theirs, ours, reduction="sum", log_target=True)))
        pending = ours.argmax().view(1, 1)
        if int(pending) in ends:
            break
    return max(0.0, sum(divergences) / len(divergences)), len(divergences)
