# SPDX-License-Identifier: Apache-2.0
"""Prompts of the model's own `generate`: it goes on from any cache, whatever text that has read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.hf.adapters import unwrapped
from kvfold.hf.forward_hooks import ToldOfForwards
from kvfold.hf.versions import given_cache

READ = "_prefill"  # transformers' method by which `generate` reads a prompt


def check_prompts(model: Any) -> None:
    """Has prompts of the model's `generate` checked, where they go on from a cache of ours."""
    inner = unwrapped(model)
    if hasattr(type(inner), READ):
        setattr(inner, READ, _CheckedRead(inner))


def leave_prompts(model: Any) -> None:
    """Undoes `check_prompts`."""
    vars(unwrapped(model)).pop(READ, None)


class _CheckedRead:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(
        self, input_ids: Tensor, config: Any, given: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache = given_cache(given)
        if isinstance(cache, ToldOfForwards):
            _check(cache, input_ids, config, given)
        return getattr(type(self.model), READ)(
            self.model, input_ids, config, given, *args, **kwargs
        )


def _check(cache: ToldOfForwards, ids: Tensor, config: Any, given: dict[str, Any]) -> None:
    """Raises KvfoldError for a mask that goes with no prompt, and as `check_prompt`.

    transformers reads `ids [B, N]` without the columns that the cache has read where the mask is
    `[B, N]`, and all of them behind a longer mask. A mask of ones may be left as its length.
    """
    mask, embeds = given.get("attention_mask"), given.get("inputs_embeds")
    total, seen = (ids if embeds is None else embeds).shape[1], cache.get_seq_length()
    columns = getattr(config, "_mask_length", None) if mask is None else mask.shape[1]
    is_new_part = embeds is None and columns == seen + total
    if columns is None or (is_new_part and not seen):
        return
    if columns != total and not is_new_part:
        later = f", or, behind the {seen} that the cache has read, new tokens and a mask of "
        raise KvfoldError(
            f"attention_mask has {columns} columns, and the prompt {total}: give the whole "
            f"conversation and a mask of its length{f'{later}{seen + total}' if seen else ''}"
        )
    cache.check_prompt(None if is_new_part or embeds is not None else ids, mask, columns)
