# SPDX-License-Identifier: Apache-2.0
"""`kvfold.enable(model, method, budget)`: plain `model.generate` with a compressed cache."""

from __future__ import annotations

import warnings
from functools import partial
from inspect import signature
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.generation.generate import generate
from kvfold.generation.inputs import BY_IDS, check_embeddings
from kvfold.generation.length import check_length
from kvfold.generation.request import settings_of
from kvfold.hf import attention
from kvfold.hf.arguments import checked_arguments
from kvfold.hf.forward_hooks import preparing
from kvfold.hf.versions import CACHE, CACHE_NAMES, given_cache
from kvfold.methods.base import Method
from kvfold.methods.layer_budgets import Given

# Options with which transformers makes a cache of its own.
CACHES = ("cache_implementation", "cache_config")
# Frames between a call of the model and a warning of its hook: torch's own.
WARNED_FROM = 6


class Enabled:
    """A model whose `generate` compresses, until `disable`, or until the `with` block ends.

    Inside another such block the model then compresses as `before`; where its attention was
    `routed` through kvfold already, it stays so, for caches made before.
    """

    def __init__(
        self, model: PreTrainedModel, routed: bool, before: CompressedGenerate | None = None
    ) -> None:
        self.model, self.routed, self.before = model, routed, before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is None and not self.routed:
            disable(self.model)
            return
        with preparing:
            _restore(self.model)
            attention.begin_batching_by(self.model)
            if self.before is not None:
                _replace(self.model, self.before)


class CompressedGenerate:
    """A model's `generate`: each call makes a cache of its own, so that threads may call at once.

    `stock` is the model's own; it answers calls that bring a cache.
    """

    def __init__(self, model: PreTrainedModel, make: dict[str, Any], read: dict[str, Any]) -> None:
        self.model, self.make, self.read = model, make, read
        self.stock: Any = model.generate
        self.hook: RemovableHandle | None = None  # while the model is enabled
        self.warned = False  # of a forward without a cache

    def __call__(self, inputs: Any = None, *others: Any, **options: Any) -> Any:
        """The result of `model.generate`. Raises as `kvfold.generate` and `CompressedCache` do."""
        options |= zip(list(signature(self.stock).parameters)[1:], others, strict=False)
        cache = given_cache(options)
        for name in CACHE_NAMES:
            options.pop(name, None)
        if cache is not None:
            return self.stock(inputs, **{CACHE: cache}, **options)
        given = [name for name in CACHES if options.get(name) is not None]
        if given or settings_of(self.model, options).use_cache is False:
            raise KvfoldError(
                f"{', '.join(given) or 'use_cache=False'} asks for another cache than kvfold's, "
                "which this model was enabled with: leave it out, or kvfold.disable(model)"
            )
        if inputs is not None:
            options["input_ids"] = inputs
        cache = CompressedCache(self.model, **self.make)
        options = self.read | options
        if options.get("inputs_embeds") is not None:
            return self._from_embeddings(cache, options)
        return generate(self.model, cache=cache, **options)

    def _from_embeddings(self, cache: CompressedCache, options: dict[str, Any]) -> Any:
        """The stock `generate`'s answer to `inputs_embeds [B, N, hidden]`, read in one piece."""
        check_embeddings(cache, options)
        own = {name: options.pop(name, None) for name in (*BY_IDS, "allow_longer")}
        check_length(self.model, options["inputs_embeds"].shape[1], bool(own["allow_longer"]))
        return self.stock(**{CACHE: cache}, **options)


@checked_arguments
def enable(
    model: PreTrainedModel,
    method: Method | str | None = None,
    budget: Given = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    prefill_chunk: int | None = None,
    every: int | None = None,
    max_cache_tokens: int | None = None,
    seed: int = 0,
) -> Enabled:
    """Routes the model's attention through kvfold, where nothing changes without our cache.

    With a `method`, plain `model.generate(**inputs)` compresses each prompt into a cache of its
    own, as in a pipeline; `return_dict_in_generate=True` returns that cache as `past_key_values`.
    Calls that bring a cache of their own stay as they are, and so do forwards, `model(...)`: the
    first one without a cache warns of that. `kvfold.disable(model)` ends it, or a `with` block
    around it.

    An attention implementation that kvfold does not build on (flash_attention_2, flex_attention)
    gives way, with a warning, to SDPA, or to eager attention where the model has no SDPA.

    `prefill_chunk` is that of `kvfold.generate`, all other options are those of `CompressedCache`.
    Raises UnsupportedModel for encoder-decoders and for models that compute attention themselves;
    KvfoldError for options without a method; and what `CompressedCache` raises.
    """
    make: dict[str, Any] = {
        "budget": budget,
        "tokenizer": tokenizer,
        "every": every,
        "max_cache_tokens": max_cache_tokens,
        "seed": seed,
    }
    routed = attention.is_enabled(model)
    if method is None:
        given = budget, tokenizer, every, max_cache_tokens, prefill_chunk
        if seed or any(option is not None for option in given):
            raise KvfoldError('name a method, too: kvfold.enable(model, "snapkv", 0.3)')
        attention.enable(model)
        return Enabled(model, routed)
    make["method"] = method
    CompressedCache(model, **make)
    before = model.__dict__.get("generate")
    with preparing:
        _restore(model)
        _replace(model, CompressedGenerate(model, make, {"prefill_chunk": prefill_chunk}))
    return Enabled(model, routed, before if isinstance(before, CompressedGenerate) else None)


@checked_arguments
def disable(model: PreTrainedModel) -> None:
    """Gives the model back its `generate`, and the attention that it was loaded with."""
    with preparing:
        _restore(model)
        attention.disable(model)


def _replace(model: Any, generate: CompressedGenerate) -> None:
    model.generate = generate
    names = tuple(signature(model.forward).parameters)
    hook = partial(_warn_without_cache, generate, names)
    generate.hook = model.register_forward_pre_hook(hook, with_kwargs=True)
    attention.begin_batching_by(model, _refuse_batching)


def _warn_without_cache(
    enabled: CompressedGenerate, names: tuple[str, ...], model: nn.Module, args: Any, kwargs: Any
) -> None:
    """Warns once of a forward over all entries, whose loss or cache says nothing of the method."""
    given = dict(zip(names, args, strict=False)) | kwargs if len(args) > 1 else kwargs
    if given_cache(given) is not None:
        return
    use_cache = given.get("use_cache")
    keeps = getattr(model.config, "use_cache", True) if use_cache is None else use_cache
    if not enabled.warned and (keeps or given.get("labels") is not None):
        enabled.warned = True
        _warn("loss" if given.get("labels") is not None else "cache")


# Runs where a graph is made.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn(result: str) -> None:
    warnings.warn(
        f"kvfold.enable compresses model.generate: the {result} of this forward is that of all "
        "entries. For the loss of a text behind a compressed context, read the context first: "
        "model(context, past_key_values=cache) with cache = kvfold.CompressedCache(model, method, "
        "budget), then model(text, past_key_values=cache, labels=text)",
        stacklevel=WARNED_FROM,
    )


def _refuse_batching(*_: Any, **__: Any) -> Any:
    raise KvfoldError(
        "continuous batching (generate_batch) pages a cache of its own and would not compress: use "
        "generate, or kvfold.disable(model) first"
    )


def _restore(model: Any) -> None:
    ours = model.__dict__.get("generate")
    if isinstance(ours, CompressedGenerate):
        del model.generate
        if ours.hook is not None:
            ours.hook.remove()
        if ours.stock != model.generate:
            model.generate = ours.stock
