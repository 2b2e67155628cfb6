# SPDX-License-Identifier: Apache-2.0
"""Resumption: a prompt continues what a cache has read, or the prefix that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.cache.continuation import check_prompt, parting
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.hf.models import text_config

# Use of a cache that has read another text: None refuses, "prefix" goes back to the shared prefix
Reuse = Literal["prefix"]


@dataclass(frozen=True)
class Resumption:
    """The column at which a cache resumes; `go_back` brings it there."""

    cache: CompressedCache
    seen: int  # columns read before it
    own_forwards: bool  # True if the method's own forwards read the prompt then

    def go_back(self) -> None:
        """Crops the cache to `seen` columns."""
        beyond = self.cache.get_seq_length() - self.seen
        if beyond and not self.seen:
            self.cache.reset()
        elif beyond:
            self.cache.crop(-beyond)


def resumption(
    cache: CompressedCache, input_ids: Tensor, mask: Tensor, reuse: Reuse | None = None
) -> Resumption:
    """Checks that `input_ids [B, N]` begin with what the cache has read; changes nothing.

    `mask [B, N]` is 0 at padding. With `reuse="prefix"` the cache is to go back to the prefix they
    share, or to start anew if they share none, or if the method's own forwards read more. Raises
    KvfoldError as `generate` does.
    """
    if reuse not in (None, "prefix"):
        raise KvfoldError(f'reuse is "prefix" or left out, not {reuse!r}')
    total, seen = input_ids.shape[1], cache.get_seq_length()
    if seen == 0:
        return Resumption(cache, 0, cache.runs_own_forwards)
    if reuse == "prefix":
        separator = parting(cache, input_ids, mask)
        shared = min(seen, total - 1, seen if separator is None else separator.column)
        return _prefix(cache, shared)
    check_prompt(cache, input_ids, mask, total)
    return Resumption(cache, seen, cache.runs_own_forwards)


def _prefix(cache: CompressedCache, shared: int) -> Resumption:
    """Resumption at `shared` columns, or anew; KvfoldError if the cache cannot go back there."""
    stages, seen = cache.method.stages(), cache.get_seq_length()
    reads_by_itself = stages.runs_own_forwards
    if shared and (shared == seen or not reads_by_itself):
        cache.check_crop(shared - seen)
        return Resumption(cache, shared, cache.runs_own_forwards)
    if cache.phase.frozen or cache.phase.reading:
        raise KvfoldError(
            "the cache cannot start anew inside `with cache.frozen():` or `cache.reading():`"
        )
    return Resumption(cache, 0, reads_by_itself)


def past_switch(model: PreTrainedModel, resumed: Resumption, total: int, new: int) -> Resumption:
    """The resumption, or one from the beginning where RoPE changes behind the tokens read before.

    For a prompt of `total` tokens and `new` ones. Raises UnsupportedModel where these pass the
    change, and where a text that was evicted from, or whose images were read, would begin anew.
    """
    cache, rope = resumed.cache, resumed.cache.binding.rope
    if rope is None:
        return resumed
    rope.check(0, total + new, 0)
    switch = rope.switch_before(total + new)
    if switch and total - 1 <= switch and resumed.seen <= switch:
        raise UnsupportedModel(
            f"{rope.name} changes its rotary frequencies at {switch} tokens, and keys in a cache "
            f"do not follow: this prompt of {total} tokens would pass that length while "
            f"generating {new}; use a longer prompt or fewer new tokens"
        )
    read_in = cache.binding.read_in(resumed.seen)
    if not resumed.seen or not rope.changes_between(read_in, total + new):
        return resumed
    if cache.phase.frozen or cache.phase.reading or text_config(model) is not model.config:
        rope.check(resumed.seen, total + new, read_in)
    try:
        cache.check_crop(-cache.get_seq_length())
    except KvfoldError:
        rope.check(resumed.seen, total + new, read_in)
    return Resumption(cache, 0, cache.method.stages().runs_own_forwards)


class IdsRead:
    """A logits processor that changes nothing: after each forward it notes the ids read.

    Rows that have generated an EOS after a prompt of `prompt` columns read padding from then on,
    which it notes too.
    """

    def __init__(self, cache: CompressedCache, prompt: int, settings: Any) -> None:
        """The processor of a call under these generation settings.

        Beams go on after an end, and sliding windows count padding: no row ends for them.
        """
        self.cache, self.prompt, eos = cache, prompt, settings.eos_token_id
        if eos is None or (settings.num_beams or 1) > 1 or cache.other_layers():
            eos = []
        self.eos = torch.tensor([eos] if isinstance(eos, int) else list(eos), dtype=torch.long)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        phase, answer = self.cache.phase, input_ids[:, self.prompt :]
        phase.note_ids(input_ids)
        if len(self.eos) and len(answer) > 1:
            self.eos = self.eos.to(answer.device)
            ended = torch.isin(answer, self.eos).cumsum(-1) > 0
            ended = F.pad(ended, (self.prompt + 1, 0))
            phase.note_ended(ended if bool(ended.any()) else None)
        return scores
