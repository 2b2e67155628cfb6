# SPDX-License-Identifier: Apache-2.0
"""Read the prompt (whole, in chunks, or as the next turn), then generate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfold import compat
from kvfold.cache import CompressedCache
from kvfold.errors import KvfoldError, UnsupportedModel

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")


@torch.no_grad()
def generate(
    model: compat.PreTrainedModel,
    input_ids: Tensor,
    *,
    cache: CompressedCache,
    attention_mask: Tensor | None = None,
    prefill_chunk: int | None = None,
    **options: Any,
) -> Any:
    """`model.generate` with a compressed cache, in the order that is right for every model.

    Args:
        input_ids: the whole conversation so far `[B, N]`, with what the cache has already seen.
        cache: a fresh one, or one that goes on from an earlier turn.
        attention_mask: `[B, N]`, 0 at left padding.
        prefill_chunk: read the prompt in pieces of this many tokens; the result is the same.
        options: everything `model.generate` takes.

    Returns what `model.generate` returns, prompt included. Raises KvfoldError when the cache has
    seen more than `input_ids`, UnsupportedModel where the model would drop the cache.
    """
    if "past_key_values" in options:
        raise KvfoldError("give the cache as cache=, not as past_key_values=")
    if prefill_chunk is not None and prefill_chunk < 1:
        raise KvfoldError(f"prefill_chunk is a positive number of tokens, not {prefill_chunk}")
    total, seen = input_ids.shape[1], cache.get_seq_length()
    if seen >= total:
        raise KvfoldError(
            f"the cache has seen {seen} tokens and the prompt has {total}: pass the whole "
            "conversation, with at least one new token"
        )
    settings = _settings(model, options)
    # A lone piece of one token could not end a turn on its own, and `read_first` leaves one.
    assisted = any(options.get(name) for name in ASSISTED)
    chunk = prefill_chunk or total
    if assisted:
        return _assisted(model, input_ids, cache, attention_mask, chunk, options)
    whole = _drops(model, cache, total, settings.max_new_tokens or 20)
    rows = max(settings.num_beams or 1, settings.num_return_sequences or 1)
    if whole:
        chunk = total - 1 - seen
    if chunk < total - seen or whole or (rows > 1 and seen > 0):
        stop = total - (chunk if chunk < total - seen and not whole else 1)
        with cache.reading(until=total):
            _read(model, input_ids, cache, attention_mask, seen, stop, chunk)
        if rows > 1:
            cache.batch_repeat_interleave(rows)
    return compat.generate(
        model,
        input_ids=input_ids,
        attention_mask=attention_mask,
        past_key_values=cache,
        **options,
    )


def _read(
    model: compat.PreTrainedModel,
    input_ids: Tensor,
    cache: CompressedCache,
    mask: Tensor | None,
    start: int,
    stop: int,
    chunk: int,
) -> None:
    """Fills the cache with columns `start` to `stop`, `chunk` at a time."""
    for begin in range(start, stop, chunk):
        end = min(begin + chunk, stop)
        covered = None if mask is None else mask[:, :end]
        compat.read(model, input_ids[:, begin:end], cache, covered)


def _settings(model: compat.PreTrainedModel, options: dict[str, Any]) -> Any:
    """The generation settings that this call will run under."""
    base = options.get("generation_config") or model.generation_config
    merged = base.to_dict() | {k: v for k, v in options.items() if k in base.to_dict()}
    return type(base).from_dict(merged)


def _drops(model: compat.PreTrainedModel, cache: CompressedCache, total: int, new: int) -> bool:
    """Whether the prompt must be read before `generate`, lest it drop the cache."""
    limit = cache.dropping_length
    if limit is None:
        return False
    if total - 1 > limit:
        return True
    if total + new > limit:
        raise UnsupportedModel(
            f"{type(model).__name__} changes its rotary frequencies at {limit} tokens and then "
            f"drops every cache: this prompt of {total} tokens would pass that length while "
            f"generating {new}; use a longer prompt or fewer new tokens"
        )
    return True


def _assisted(
    model: compat.PreTrainedModel,
    input_ids: Tensor,
    cache: CompressedCache,
    mask: Tensor | None,
    chunk: int,
    options: dict[str, Any],
) -> Any:
    """Reads all but one token, compresses, and lets the assistant work on the frozen cache."""
    last = input_ids.shape[1] - 1
    with cache.reading():
        _read(model, input_ids, cache, mask, cache.get_seq_length(), last, chunk)
    full = torch.ones_like(input_ids) if mask is None else mask
    with cache.frozen():
        out = compat.generate(
            model,
            input_ids=input_ids[:, -1:],
            attention_mask=full,
            past_key_values=cache,
            **options,
        )
    if isinstance(out, Tensor):
        return torch.cat([input_ids[:, :-1], out], 1)
    out.sequences = torch.cat([input_ids[:, :-1], out.sequences], 1)
    return out
