# SPDX-License-Identifier: Apache-2.0
"""`kvfold.generate`: reads the prompt (whole, in pieces, or its new part), then generates."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.cache.history import History
from kvfold.errors import KvfoldError
from kvfold.generation.assisted import ASSISTED, after_prompt, check_assistable
from kvfold.generation.inputs import (
    check_given,
    check_pieces,
    check_read_ahead,
    check_settings,
    check_windows,
    later_features,
    leading_padding,
)
from kvfold.generation.layerwise import prefill_layerwise
from kvfold.generation.length import check_prompt
from kvfold.generation.pieces import (
    before_padding,
    check_chunk,
    check_padding,
    check_per_chunk,
    forward_ends,
    piece_ends,
    piece_of,
    without_lone_columns,
)
from kvfold.generation.reconstruct import reconstruct
from kvfold.generation.resume import IdsRead, Resumption, Reuse, past_switch, resumption
from kvfold.generation.static.decode import NEW_TOKENS, check_compiled, decode_compiled
from kvfold.hf.arguments import checked_arguments
from kvfold.hf.lookups import check_answer, check_tokens
from kvfold.hf.models import read_tokens, stock_generate
from kvfold.hf.recurrent import restarts
from kvfold.hf.stock_layers import has_recurrent
from kvfold.hf.versions import CACHE, check_assisted

# Time of a prompt's compression
Compress = Literal["at_end", "per_chunk"]


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
        compile: decode by one compiled graph (`decode_compiled`); the result is the same.
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
    where `reuse` would take back an eviction; where `compress`, `compile` or a piecewise reading do
    not go with the method or the options. Raises UnsupportedModel where the model would drop the
    cache, or cannot be compiled.
    """
    check_given(input_ids, cache, attention_mask, options)
    assert input_ids is not None and cache is not None
    chunk = piece_of(prefill_chunk, input_ids.shape[1])
    if attention_mask is None:
        attention_mask = leading_padding(model, input_ids)
    check_compress(compress)
    per_chunk = compress == "per_chunk"
    check_prompt(model, cache, attention_mask, prefill_chunk if per_chunk else None, allow_longer)
    if per_chunk:
        check_per_chunk(cache.method, prefill_chunk)
    assisted = any(options.get(name) for name in ASSISTED)
    settings = settings_of(model, options)
    check_settings(settings, options)
    check_tokens(model, input_ids)
    check_answer(model, attention_mask, _new_tokens(settings, input_ids.shape[1]))
    if compile and assisted:
        raise KvfoldError("compile=True does not go with assisted decoding: choose one of them")
    if compile:
        check_compiled(model, cache, options)
    new = _new_tokens(settings, input_ids.shape[1])
    resumed = resumption(cache, input_ids, attention_mask, reuse)
    resumed = past_switch(model, resumed, input_ids.shape[1], new)
    check_windows(resumed, attention_mask)
    if assisted:
        return _assisted(model, input_ids, resumed, attention_mask, chunk, settings, options)
    rows = max(settings.num_beams or 1, settings.num_return_sequences or 1)
    stop = _read_ahead(model, resumed, input_ids.shape[1], new, chunk, rows, per_chunk)
    stop = max(stop, before_padding(attention_mask, resumed.seen))
    check_padding(attention_mask, resumed.seen, stop, chunk, per_chunk)
    if stop > resumed.seen:
        check_read_ahead(model, resumed, settings, options, attention_mask[:, resumed.seen : stop])
    try:
        with cache.binding.turn(resumed.seen):
            resumed.go_back()
            if stop > resumed.seen and per_chunk:
                read_per_chunk(model, cache, input_ids[:, :stop], attention_mask, chunk)
                cache.phase.until = input_ids.shape[1]  # a piece of one token is no decode step
            elif stop > resumed.seen:
                ids, total = input_ids[:, :stop], input_ids.shape[1]
                read_turn(model, cache, ids, attention_mask, total, chunk)
            if rows > 1 and cache.get_seq_length() > 0:
                cache.batch_repeat_interleave(rows)
            with later_features(model, resumed, input_ids, options):
                noting = IdsRead(cache, input_ids.shape[1], settings)
                return _decode(model, noting, input_ids, attention_mask, compile, options)
    finally:
        cache.phase.until = 0  # else the next prompt would go on where this one failed


def _read_ahead(
    model: PreTrainedModel,
    resumed: Resumption,
    total: int,
    new: int,
    chunk: int,
    rows: int,
    per_chunk: bool,
) -> int:
    """The columns to read before `model.generate` reads the rest.

    `new` tokens are generated at most, in `rows` rows of each prompt (beams, or answers).
    """
    cache, seen = resumed.cache, resumed.seen
    stop = seen
    if resumed.own_forwards:
        stop = total - 1
        check_pieces(cache.method, chunk, stop)
    elif cache.binding.rope is not None and cache.binding.rope.switch_before(total + new) > seen:
        stop = total - 1  # else `generate` would drop the cache, or mix frequencies
    elif restarts(model) and (seen > 0 or chunk < total):
        stop = total - 1  # token by token
    elif per_chunk:
        stop = [seen, *piece_ends(seen, total, chunk)][-2]
    elif chunk < total - seen:
        stop = total - chunk
    elif rows > 1 and seen > 0:
        # Rows are multiplied after reading all but the last token, so that this is read once.
        stop = total - 1
    return stop


def _decode(
    model: PreTrainedModel,
    noting: IdsRead,
    input_ids: Tensor,
    mask: Tensor,
    compile: bool,
    options: dict[str, Any],
) -> Any:
    """`model.generate` for the rest of the prompt and the new tokens."""
    cache, processors = noting.cache, [noting, *(options.get("logits_processor") or [])]
    options = options | {"logits_processor": processors}
    cache.cannot_be_dropped = True
    try:
        if compile:
            return decode_compiled(model, cache, input_ids, mask, options)
        return stock_generate(
            model, input_ids=input_ids, attention_mask=mask, **{CACHE: cache}, **options
        )
    finally:
        cache.cannot_be_dropped, cache.phase.ended = False, None
        cache.phase.history = cache.phase.history.compact()


def read_turn(
    model: PreTrainedModel,
    cache: CompressedCache,
    input_ids: Tensor,
    mask: Tensor | None,
    until: int,
    chunk: int,
) -> None:
    """Reads the unseen part of `input_ids [B, N]`, a prefill that ends at `until` columns.

    A method with a reconstruction runs it at the end of `input_ids`, and ends the prefill there.
    """
    seen, stop = cache.get_seq_length(), input_ids.shape[1]
    if cache.method.stages().token_pruning is not None and seen == 0:
        check_pieces(cache.method, chunk, stop)
        prefill_layerwise(model, cache, input_ids, None if mask is None else mask[:, :stop])
        cache.phase.history = History(input_ids).compact()
        return
    if cache.reconstruction is None:
        with cache.reading(until=until):
            _read(model, input_ids, cache, mask, seen, stop, chunk)
        return
    with cache.reading():
        read_on(model, cache, input_ids, mask, chunk)


def read_on(
    model: PreTrainedModel,
    cache: CompressedCache,
    input_ids: Tensor,
    mask: Tensor | None,
    chunk: int,
) -> None:
    """Reads the unseen part of `input_ids [B, N]`, inside a `reading()` block that ends it later.

    Runs the method's reconstruction, if it has one.
    """
    stop = input_ids.shape[1]
    _read(model, input_ids, cache, mask, cache.get_seq_length(), stop, chunk)
    if cache.reconstruction is not None:
        reconstruct(model, cache, input_ids, None if mask is None else mask[:, :stop])


def read_per_chunk(
    model: PreTrainedModel,
    cache: CompressedCache,
    input_ids: Tensor,
    mask: Tensor | None,
    chunk: int | None,
) -> None:
    """Reads the unseen part of `input_ids [B, N]`, and compresses after each piece.

    Pieces are of equal length, and of at most `chunk` tokens. Raises KvfoldError for methods that
    must see a prompt as a whole.
    """
    chunk = check_per_chunk(cache.method, chunk)
    start, total = cache.get_seq_length(), input_ids.shape[1]
    ends = _behind_switch(cache, start, total, piece_ends(start, total, chunk))
    for begin, end in pairwise([start, *ends]):
        _forward_ends(model, cache, mask, begin, end, chunk)  # raises before anything is read
    for end in ends:
        with cache.reading(until=end):
            _read(model, input_ids, cache, mask, start, end, chunk)
        start = end
    cache.per_chunk = chunk


def _read(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: CompressedCache,
    mask: Tensor | None,
    start: int,
    stop: int,
    chunk: int,
) -> None:
    """Fills the cache with columns `start` to `stop`, at most `chunk` at a time.

    Raises KvfoldError as `_forward_ends`, before anything is read.
    """
    ends = _forward_ends(model, cache, mask, start, stop, chunk)
    for begin, end in pairwise([start, *ends]):
        covered = None if mask is None else mask[:, :end]
        padded = covered if covered is not None and bool((covered == 0).any()) else None
        read_tokens(model, input_ids[:, begin:end], cache, padded)


def _forward_ends(
    model: PreTrainedModel,
    cache: CompressedCache,
    mask: Tensor | None,
    start: int,
    stop: int,
    chunk: int,
) -> list[int]:
    """Ends of the forwards that read columns `start` to `stop`, at most `chunk` at a time.

    Raises KvfoldError for padding where tokens are read one by one, and as `without_lone_columns`
    where layers are recurrent.
    """
    check_chunk(chunk)
    ends = _behind_switch(cache, start, stop, forward_ends(mask, start, stop, chunk))
    if mask is None or not has_recurrent(cache.layers):
        return ends
    one_by_one = start or chunk
    if restarts(model) and not bool(mask[:, one_by_one:stop].all()):
        raise KvfoldError(
            f"{type(model).__name__} reads token by token after the first piece, and would not "
            "skip padding there: leave out prefill_chunk="
        )
    return without_lone_columns(ends, mask, start)


def _behind_switch(cache: CompressedCache, start: int, stop: int, ends: list[int]) -> list[int]:
    """Ends of pieces of a text that begins anew, the first of them behind where RoPE changes."""
    rope = cache.binding.rope
    switch = 0 if rope is None or start else rope.switch_before(stop)
    return [end for end in ends if end > switch]


def check_compress(when: str) -> None:
    """Raises KvfoldError for a time of compression that there is not."""
    if when not in get_args(Compress):
        raise KvfoldError(f'compress is "at_end" or "per_chunk", not {when!r}')


def settings_of(model: PreTrainedModel, options: dict[str, Any]) -> Any:
    """The generation settings that this call will run under; the model's where none is given."""
    base = options.get("generation_config") or model.generation_config
    given = {name: value for name, value in base.to_dict().items() if value is not None}
    named = {name: value for name, value in options.items() if name in base.to_dict()}
    return type(base).from_dict(model.generation_config.to_dict() | given | named)


def _new_tokens(settings: Any, total: int) -> int:
    """Most tokens that `generate` may produce after a prompt of `total`."""
    if settings.max_new_tokens is not None:
        return int(settings.max_new_tokens)
    return NEW_TOKENS if settings.max_length is None else max(0, int(settings.max_length) - total)


def _assisted(
    model: PreTrainedModel,
    input_ids: Tensor,
    resumed: Resumption,
    mask: Tensor,
    chunk: int,
    settings: Any,
    options: dict[str, Any],
) -> Any:
    """Reads all but one token, compresses, and lets the assistant work on the frozen cache."""
    cache, last = resumed.cache, input_ids.shape[1] - 1
    check_assisted()
    check_assistable(cache, settings)
    if restarts(model):
        raise KvfoldError(
            f"recurrent layers of {type(model).__name__} begin anew in a forward of several "
            "tokens, by which assisted decoding checks its drafts: leave it out"
        )
    check_read_ahead(model, resumed, settings, options, mask[:, resumed.seen : last])
    check_padding(mask, resumed.seen, last, chunk)
    if resumed.own_forwards:
        check_pieces(cache.method, chunk, last)
    with cache.binding.turn(resumed.seen):
        resumed.go_back()
        read_turn(model, cache, input_ids[:, :last], mask, last, chunk)
        options = after_prompt(options, input_ids[:, :last], _new_tokens(settings, last + 1))
        with cache.frozen():
            out = stock_generate(
                model,
                input_ids=input_ids[:, -1:],
                attention_mask=mask,
                **{CACHE: cache},
                **options,
            )
    new = out if isinstance(out, Tensor) else out.sequences
    whole = torch.cat([input_ids[:, :-1], new], 1)
    cache.phase.history = History(whole[:, : cache.get_seq_length()]).compact()
    if isinstance(out, Tensor):
        return whole
    out.sequences = whole
    return out
