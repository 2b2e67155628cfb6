# SPDX-License-Identifier: Apache-2.0
"""Arguments of `kvfold.generate`: checked before anything is read; a mask where none is given."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from kvfold.cache.cache import CompressedCache
from kvfold.cache.continuation import padding_rules
from kvfold.errors import KvfoldError
from kvfold.generation.assisted import ASSISTED
from kvfold.generation.resume import Resumption
from kvfold.hf import rope_deltas
from kvfold.hf.adapters import OF_A_FORWARD, unwrapped
from kvfold.hf.arguments import count_of

# Caches that a generation configuration may ask for, and transformers then makes none of.
IGNORED_CACHES = (None, "hybrid")
# Outputs of `generate` that have a row for each token of the prompt.
OF_PROMPT = ("output_attentions", "output_hidden_states")
# Options of `kvfold.generate` for which it reads the prompt by its ids.
BY_IDS = ("prefill_chunk", "compress", "compile", "reuse")


def check_given(
    input_ids: Tensor | None, cache: object, mask: Tensor | None, options: dict[str, Any]
) -> None:
    """Raises KvfoldError if cache or ids are missing or named otherwise, or ids are no prompts.

    Also for options of another type; the number of new tokens becomes an int of Python's.
    """
    if options.get("max_new_tokens") is not None:
        options["max_new_tokens"] = count_of("max_new_tokens", options["max_new_tokens"])
    if "past_key_values" in options:
        raise KvfoldError("give the cache as cache=, not as past_key_values=")
    if not isinstance(cache, CompressedCache):
        given = "is missing" if cache is None else f"is a {type(cache).__name__}"
        raise KvfoldError(
            f"cache= {given}: kvfold.generate takes a kvfold.CompressedCache(model, method, "
            "budget); without one, or with another cache, use model.generate"
        )
    if options.get("inputs_embeds") is not None:
        raise KvfoldError(
            "kvfold.generate reads input_ids, by which it knows what the cache has seen: for "
            "inputs_embeds use model.generate(inputs_embeds=..., past_key_values=cache)"
        )
    if options.get("adapter_names") is not None:
        raise KvfoldError(OF_A_FORWARD["adapter_names"])
    if input_ids is None:
        raise KvfoldError("kvfold.generate needs input_ids, the whole conversation so far `[B, N]`")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        raise KvfoldError("input_ids is a tensor `[B, N]` of whole numbers, a row for each prompt")
    if input_ids.numel() == 0:
        raise KvfoldError(f"input_ids {list(input_ids.shape)} hold no token: give a prompt")
    if mask is not None and not isinstance(mask, Tensor):
        raise KvfoldError(
            f"attention_mask is a tensor as input_ids are, not a {type(mask).__name__}"
        )
    if mask is not None and mask.shape[:2] != input_ids.shape:
        raise KvfoldError(
            f"attention_mask {list(mask.shape)} does not go with input_ids {list(input_ids.shape)}"
        )
    config, processors = options.get("generation_config"), options.get("logits_processor")
    if config is not None and not isinstance(config, GenerationConfig):
        raise KvfoldError(
            f"generation_config is a transformers.GenerationConfig, not a {type(config).__name__}: "
            "give single settings by their names"
        )
    if processors is not None and not isinstance(processors, Iterable):
        raise KvfoldError(f"logits_processor is a list of them, not a {type(processors).__name__}")


def check_embeddings(cache: CompressedCache, options: dict[str, Any]) -> None:
    """Raises KvfoldError if a prompt cannot be read as `inputs_embeds` into a fresh cache."""
    given = [name for name in BY_IDS if options.get(name)]
    reason = None
    if cache.runs_own_forwards or cache.phase.reads_ids:
        reason = f"{cache.method} reads the prompt's ids"
    elif given:
        reason = f"{', '.join(given)} needs the prompt's ids"
    elif cache.dropping_length is not None:
        reason = f"{cache.binding.name} keeps a cache only if kvfold reads the prompt's ids ahead"
    if reason is not None:
        raise KvfoldError(f"{reason}, which inputs_embeds= lacks: give input_ids")


def later_features(
    model: Any, resumed: Resumption, input_ids: Tensor, options: dict[str, Any]
) -> str:
    """Names of images or sound of a later turn; KvfoldError where the model counts earlier ones."""
    given = [
        name
        for name in (_of_forward(model, options) if resumed.seen else ())
        if name != "position_ids" and getattr(options[name], "shape", ())[:2] != input_ids.shape
    ]
    named = ", ".join(given)
    if given and rope_deltas.holders(model):
        raise KvfoldError(
            f"{named}: {type(model).__name__} counts positions from all images of a conversation, "
            "which a later turn does not hold: read the whole conversation into a fresh cache, or "
            "leave out what has been read"
        )
    return named


def check_read_ahead(
    model: Any, resumed: Resumption, settings: Any, options: dict[str, Any], ahead: Tensor
) -> None:
    """Raises KvfoldError for what cannot be read ahead: inputs of the model's forward, or padding.

    So are outputs of the prompt that the generation `settings` ask for. `ahead [B, n]` is the mask
    of the columns to be read.
    """
    asked = [name for name in OF_PROMPT if getattr(settings, name, None)]
    if asked and settings.return_dict_in_generate:
        raise KvfoldError(
            f"{asked[0]}=True gives out those of the whole prompt, most of which is read ahead of "
            "generate here: leave it out, or read the prompt in one forward"
        )
    if resumed.own_forwards and not bool(ahead.any()):
        raise KvfoldError(
            f"{resumed.cache.method} reads the prompt but for its last token, and here that is "
            "padding only: leave the padding out"
        )
    given = _of_forward(model, options)
    if not given:
        return
    if resumed.own_forwards:
        method = resumed.cache.method
        reason = f"{method} runs forwards of its own over the prompt: choose another method"
    else:
        reason = (
            "the prompt is read in pieces or ahead of the answer here: leave out prefill_chunk=, "
            'compress="per_chunk", assisted decoding and several sequences per prompt'
        )
    raise KvfoldError(
        f"{', '.join(given)} must reach the model together with the whole prompt, and {reason}"
    )


def check_windows(resumed: Resumption, mask: Tensor) -> None:
    """Raises KvfoldError for padding between tokens, `mask [B, N]`, where layers count it."""
    padding_rules(resumed.cache, mask.shape[1] - resumed.seen).check_windows(mask.bool())


def check_settings(settings: Any, options: dict[str, Any]) -> None:
    """Raises KvfoldError for what the call's generation `settings` ask for, and a cache cannot do.

    Assisted decoding is one of these unless the call's own `options` say so, as it wants one row.
    """
    cache, stop = settings.cache_implementation, settings.stop_strings
    given = {name: getattr(settings, name, None) for name in ASSISTED if not options.get(name)}
    if cache not in IGNORED_CACHES:
        given["cache_implementation"] = cache
    if stop is not None and options.get("tokenizer") is None:
        given["stop_strings (without tokenizer=)"] = stop
    found = [f"{name}={value!r}" for name, value in given.items() if value]
    if found:
        raise KvfoldError(
            f"the generation configuration sets {', '.join(found)}, which kvfold.generate does not "
            "follow: set it to None there (model.generation_config)"
        )


def leading_padding(model: Any, input_ids: Tensor) -> Tensor:
    """Mask `[B, N]` of ids without one: pad tokens before the first other token are padding."""
    config = model.generation_config
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    pad = config.pad_token_id
    if pad is None or pad in (*eos, config.bos_token_id):
        return torch.ones_like(input_ids)
    started: Tensor = (input_ids != pad).cumsum(-1) > 0
    return started.long()


def _of_forward(model: Any, options: dict[str, Any]) -> list[str]:
    """Options that are tensors for the model's forward."""
    known = inspect.signature(unwrapped(model).forward).parameters
    return [name for name, value in options.items() if name in known and _holds_tensors(value)]


def _holds_tensors(value: object) -> bool:
    each = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(item, Tensor) for item in each)
