# SPDX-License-Identifier: Apache-2.0
"""Assisted decoding: the prompt is compressed first, and drafts are checked on the frozen cache.

transformers then sees the prompt's last token and the answer only. So drafts are made from the
answer alone, whether by an assistant model or by prompt lookup.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.hf.recurrent import restarts
from kvfold.hf.versions import check_assisted

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")

# Settings that read the prompt's ids, and the value of each that does nothing.
READS_PROMPT = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "watermarking_config": None,
    "min_length": 0,
}


def check_assistable(model: PreTrainedModel, cache: CompressedCache, settings: Any) -> None:
    """Raises KvfoldError for a bounded answer, and for `settings` that read the prompt.

    Also for recurrent layers, and as `check_assisted`.
    """
    check_assisted()
    bound = cache.max_cache_tokens
    if bound is not None or cache.method.stages().rounds:
        what = f"max_cache_tokens={bound} bounds the answer"
        raise KvfoldError(
            f"{what if bound else f'{cache.method} evicts in rounds'}, and assisted decoding "
            "freezes the cache while it checks its drafts: choose one of them"
        )
    for name, neutral in READS_PROMPT.items():
        given = getattr(settings, name, None)
        if given is not None and given != neutral:
            raise KvfoldError(
                f"{name}={given} reads the prompt, of which assisted decoding shows transformers "
                "the last token only: leave out one of them"
            )
    if restarts(model):
        raise KvfoldError(
            f"recurrent layers of {type(model).__name__} begin anew in a forward of several "
            "tokens, by which assisted decoding checks its drafts: leave it out"
        )


def after_prompt(options: dict[str, Any], prompt: Tensor, new: int) -> dict[str, Any]:
    """Options of `generate` for at most `new` tokens after `prompt [1, N]`, which it does not see.

    The caller's processors and criteria are given the prompt too.
    """
    made = {name: value for name, value in options.items() if name != "max_length"}
    processors = [_Processor(each, prompt) for each in options.get("logits_processor") or []]
    criteria = [_Criterion(each, prompt) for each in options.get("stopping_criteria") or []]
    own = {"logits_processor": processors, "stopping_criteria": criteria}
    return made | own | {"max_new_tokens": new}


class _AfterPrompt:
    def __init__(self, inner: Any, prompt: Tensor) -> None:
        self.inner, self.prompt = inner, prompt

    def whole(self, ids: Tensor) -> Tensor:
        """The prompt before `ids [B, n]`."""
        return torch.cat([self.prompt.expand(len(ids), -1), ids], 1)


class _Processor(_AfterPrompt):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return self.inner(self.whole(input_ids), scores)


class _Criterion(_AfterPrompt):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return self.inner(self.whole(input_ids), scores, **kwargs)
