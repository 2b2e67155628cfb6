# SPDX-License-Identifier: Apache-2.0
"""`kvfold.generate`: reads the prompt (whole, in pieces, or its new part), then generates."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.generation.assisted import after_prompt
from kvfold.generation.reading import read_per_chunk, read_turn
from kvfold.generation.request import Compress, How, Request
from kvfold.generation.resume import IdsRead, Reuse
from kvfold.generation.static.captured import decode_captured
from kvfold.generation.static.decode import decode_compiled
from kvfold.hf.arguments import checked_arguments
from kvfold.hf.models import stock_generate
from kvfold.hf.versions import CACHE


@checked_arguments
@torch.no_grad()
def generate(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    *,
    cache: CompressedCache | None = None,
    attention_mask: Tensor | None = None,
    prefill_chunk: int | None = None,
    compress: Compress = "at_end",
    compile: bool = False,
    capture: bool = False,
    allow_longer: bool = False,
    reuse: Reuse | None = None,
    **options: Any,
) -> Any:
    """`model.generate` with a compressed cache, in the order that is right for every model.

    Args:
        input_ids: the whole conversation so far `[B, N]`, beginning with what the cache has read.
        cache: a fresh one, or one that goes on from an earlier turn.
        attention_mask: `[B, N]`, 0 at padding, which stands before a turn's tokens, and after the
            EOS of a row that ended while others went on; without one, leading pad tokens are
            padding.
        prefill_chunk: read the prompt in pieces of at most this many tokens; with
            `compress="at_end"` the result is the same, and the whole prompt is held until then.
        compress: "per_chunk" brings every layer back to the budget after each piece, as if it were
            a turn. Memory is then that of a piece and of what is kept, and the result is an
            approximation, which `stats()` says.
        compile: decode by compiled graphs (`decode_compiled`); the result is the same.
        capture: decode by one step that is captured on a GPU and replayed (`decode_captured`), in
            less time than a compiled one takes to make; elsewhere the same steps run uncaptured.
        allow_longer: read a prompt that is longer than the texts the model was trained on. Tokens
            that are generated past that length are transformers' matter, which warns of them.
        reuse: "prefix" takes back what the cache read beyond the prefix it shares with `input_ids`.
        options: everything `model.generate` takes but `inputs_embeds`; images, and other tensors
            for the model's forward, must reach it with the whole prompt, in one piece.

    Assisted decoding compresses before it reads the prompt's last token, so that its answers may
    differ from those without it where entries are evicted. Its drafts are made from the answer
    alone, and settings that read the prompt (a repetition penalty) are refused.

    Returns what `model.generate` returns, prompt included. Raises KvfoldError without ids or cache;
    for a prompt that is too long for the model; where the cache has read something else than the
    beginning of `input_ids` (the first column that differs is named); where there is no new token;
    where `reuse` would take back an eviction; where `compress`, `compile`, `capture` or a piecewise
    reading do not go with the method or the options. Raises UnsupportedModel where the model would
    drop the cache, or cannot be compiled or captured.
    """
    how = How(prefill_chunk, compress, compile, capture, allow_longer, reuse)
    request = Request.of(model, cache, input_ids, attention_mask, how, options)
    read = request.cache
    try:
        with read.binding.turn(request.resumed.seen):
            request.resumed.go_back()
            _read_ahead(request)
            return _assisted(request) if request.assisted else _decode(request)
    finally:
        read.phase.complete_at(0)  # else the next prompt would go on where this one failed


def _read_ahead(request: Request) -> None:
    """Reads the prompt but for what `model.generate` reads, once for all rows of a prompt."""
    model, cache, mask, how = request.model, request.cache, request.mask, request.how
    ids, total = request.input_ids[:, : request.stop], request.input_ids.shape[1]
    if request.stop > request.resumed.seen and how.per_chunk:
        read_per_chunk(model, cache, ids, mask, how.prefill_chunk)
        cache.phase.complete_at(total)  # a piece of one token is no decode step
    elif request.stop > request.resumed.seen:
        until = request.stop if request.assisted else total
        read_turn(model, cache, ids, mask, until, how.prefill_chunk)
    if request.rows > 1 and cache.get_seq_length() > 0:
        cache.batch_repeat_interleave(request.rows)


def _decode(request: Request) -> Any:
    """`model.generate` for the rest of the prompt and the new tokens."""
    cache, options, ids = request.cache, request.options, request.input_ids
    noting = IdsRead(cache, ids.shape[1], request.settings)
    processors = [noting, *(options.get("logits_processor") or [])]
    options = options | {"logits_processor": processors, CACHE: cache}
    generate = stock_generate
    if request.how.compile or request.how.capture:
        by_graph = decode_compiled if request.how.compile else decode_captured
        generate = partial(by_graph, request.new)
    cache.take(cannot_be_dropped=True)
    try:
        return generate(request.model, input_ids=ids, attention_mask=request.mask, **options)
    except ValueError as error:
        if not request.features:
            raise
        raise KvfoldError(
            f"{request.features}: {error}. A later turn takes what belongs to its own tokens: "
            "leave out what has been read"
        ) from error
    finally:
        cache.take(cannot_be_dropped=False)
        cache.phase.note_ended(None)
        cache.phase.compact()


def _assisted(request: Request) -> Any:
    """Lets the assistant work on the frozen cache, which has read all but the last token."""
    model, cache, ids = request.model, request.cache, request.input_ids
    last = ids.shape[1] - 1
    options = after_prompt(request.options, ids[:, :last], request.new)
    with cache.frozen():
        out = stock_generate(
            model, input_ids=ids[:, -1:], attention_mask=request.mask, **{CACHE: cache}, **options
        )
    new = out if isinstance(out, Tensor) else out.sequences
    whole = torch.cat([ids[:, :-1], new], 1)
    cache.phase.note_ids(whole[:, : cache.get_seq_length()])
    cache.phase.compact()
    if isinstance(out, Tensor):
        return whole
    out.sequences = whole
    return out
