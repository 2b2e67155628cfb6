# SPDX-License-Identifier: Apache-2.0
"""The attention interface of transformers: registration, routing, and arguments of a call.

Prompts of the model's own `generate` are checked: it goes on from any cache, whatever text that has
read.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.hf.adapters import learns_prompts, unwrapped
from kvfold.hf.forward_hooks import ToldOfForwards, preparing, unwatch
from kvfold.hf.models import takes_cache, text_config
from kvfold.hf.versions import check_version, given_cache
from kvfold.kernels.logits import LogitOptions

# The name over each delegate: "sdpa" or "flash" in a name would mean more to transformers.
NAMES = {"sdpa": "kvfold", "eager": "kvfold_eager"}

# Method of models by which `generate_batch` and the like begin.
BATCHING = "init_continuous_batching"
READ = "_prefill"  # transformers' method by which `generate` reads a prompt
# Attention implementations with which routed models were loaded
_loaded: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, str]] = weakref.WeakKeyDictionary()
AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


def register_attention(
    kind: str, function: AttentionFunction, check_padding: Callable[[Tensor | None], None]
) -> None:
    """Makes `function` known to transformers, with the mask function of its delegate.

    `check_padding` gets the padding `[B, N]` of each mask before it is made.
    """
    make = ALL_MASK_ATTENTION_FUNCTIONS[kind]

    @wraps(make)
    def mask(*args: Any, **kwargs: Any) -> Any:
        check_padding(kwargs.get("attention_mask"))
        return make(*args, **kwargs)

    AttentionInterface.register(NAMES[kind], function)
    AttentionMaskInterface.register(NAMES[kind], mask)


def stock_attention(kind: str, module: nn.Module) -> AttentionFunction:
    """The attention that the model was loaded with."""
    if kind == "sdpa":
        return sdpa_attention_forward
    eager: AttentionFunction = sys.modules[type(module).__module__].eager_attention_forward
    return eager


def enable(model: PreTrainedModel) -> None:
    """Routes the model's attention through kvfold, once; without our cache nothing changes.

    An implementation that kvfold does not build on (flash_attention_2, flex_attention) gives way,
    with a warning, to SDPA, or to eager attention where the model has no SDPA. Raises
    UnsupportedModel for a transformers outside kvfold's range, for encoder-decoders and diffusion
    models, for models that compute attention themselves, and for those whose forward takes no
    cache.
    """
    with preparing:
        if not is_enabled(model):
            _route(model)


def _route(model: PreTrainedModel) -> None:
    check_version()
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder: kvfold compresses decoders only")
    if name.endswith("ForBlockDiffusion"):
        raise UnsupportedModel(
            f"{name} denoises blocks of tokens over and over: kvfold compresses for models that "
            "generate token by token"
        )
    if learns_prompts(model):
        raise UnsupportedModel(
            f"{name} puts learned tokens or entries before each prompt (prompt or prefix tuning), "
            "which no ids stand for: kvfold takes adapters that change weights, such as LoRA"
        )
    if not any(part._can_set_attn_implementation() for part in _decoders(model)):
        raise UnsupportedModel(
            f"{name} computes attention itself instead of using transformers' attention interface, "
            "so kvfold cannot observe its attention"
        )
    if isinstance(model, PreTrainedModel) and not takes_cache(model):
        raise UnsupportedModel(
            f"{name}'s forward takes no past_key_values or cache: no cache reaches it"
        )
    loaded = text_config(model)._attn_implementation
    kind = _stand_in(model, loaded)
    if kind != loaded:
        warnings.warn(
            f"{name} was loaded with attn_implementation={loaded!r}: kvfold attends with {kind!r} "
            "instead",
            stacklevel=5,  # whoever makes the cache
        )
    before, routed = _of_decoder(model, loaded), _of_decoder(model, NAMES[kind])
    if model._can_set_attn_implementation():  # not where its encoder computes attention itself
        before[""], routed[""] = model.config._attn_implementation, NAMES[kind]
    model.set_attn_implementation(routed)
    _loaded[model] = before
    begin_batching_by(model)


def begin_batching_by(model: PreTrainedModel, begin: Callable[..., Any] | None = None) -> None:
    """Lets continuous batching begin by `begin`, until `disable`; None: as without kvfold."""
    setattr(unwrapped(model), BATCHING, begin or partial(_batch_without_kvfold, model))


def _batch_without_kvfold(model: Any, *args: Any, **options: Any) -> Any:
    """Transformers' continuous batching, under the attention that the model was loaded with.

    It pages a cache of its own, and accepts no other attention. kvfold's comes back with the next
    cache that is made, or with `kvfold.enable(model)`.
    """
    disable(model)
    return model.init_continuous_batching(*args, **options)


def _decoders(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The parts of a model, itself among them, that have the decoder's configuration."""
    own = text_config(model)
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return [part for part in parts if part.config is own]


def _of_decoder(model: PreTrainedModel, name: str) -> dict[str, str]:
    """The attention `name` for the decoder's configuration: encoders of images keep their own.

    A decoder that is not a direct part of the model shares its with all that surrounds it.
    """
    config, decoder = model.config, text_config(model)
    if decoder is config:
        return dict.fromkeys(config.sub_configs, name)
    own = [key for key in config.sub_configs if getattr(config, key, None) is decoder]
    return dict.fromkeys(own or config.sub_configs, name)


def disable(model: PreTrainedModel) -> None:
    """Gives the model back the attention implementation it was loaded with."""
    with preparing:
        vars(unwrapped(model)).pop(BATCHING, None)
        for kind, name in NAMES.items():
            if text_config(model)._attn_implementation == name:
                model.set_attn_implementation(_loaded.pop(model, kind))
        unwatch(model)
        vars(unwrapped(model)).pop(READ, None)  # of `check_prompts`


def _stand_in(model: PreTrainedModel, loaded: str) -> str:
    """The stock attention beneath kvfold's: "sdpa" or "eager"."""
    unpaged = loaded.removeprefix("paged|")
    if unpaged in NAMES:
        return unpaged
    return "sdpa" if model._supports_sdpa else "eager"


def is_enabled(model: PreTrainedModel) -> bool:
    """True if the model's attention goes through kvfold."""
    return is_routed(text_config(model))


def is_routed(config: Any) -> bool:
    """True if the model of this decoder configuration attends through kvfold now."""
    return config._attn_implementation in NAMES.values()


def attention_name(model: PreTrainedModel) -> str:
    """The attention implementation that the model was loaded with."""
    name = str(text_config(model)._attn_implementation)
    return next((stock for stock, routed in NAMES.items() if routed == name), name)


def logit_options(module: nn.Module, query: Tensor, options: dict[str, Any]) -> LogitOptions:
    """The scale of the logits (the call's, the module's, or 1/√D), softcap and sink logits."""
    scaling = options.get("scaling")
    if scaling is None:
        scaling = getattr(module, "scaling", None) or query.shape[-1] ** -0.5
    return {
        "scale": float(scaling),
        "softcap": options.get("softcap"),
        "sink_logits": options.get("s_aux"),
    }


def check_prompts(model: Any) -> None:
    """Has prompts of the model's `generate` checked, where they go on from a cache of ours."""
    inner = unwrapped(model)
    if hasattr(type(inner), READ):
        setattr(inner, READ, _CheckedRead(inner))


class _CheckedRead:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(
        self, input_ids: Tensor, config: Any, given: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache = given_cache(given)
        if isinstance(cache, ToldOfForwards):
            _check_prompt(cache, input_ids, config, given)
        return getattr(type(self.model), READ)(
            self.model, input_ids, config, given, *args, **kwargs
        )


def _check_prompt(cache: ToldOfForwards, ids: Tensor, config: Any, given: dict[str, Any]) -> None:
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
