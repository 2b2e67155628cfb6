# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the version of transformers, and on how a model file is written."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import CompileConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.forwards import preparing, unwatch
from kvfold.ranks import Ranks

__all__ = ["Cache", "CacheLayerMixin", "DynamicCache", "PreTrainedModel"]

# The name over each delegate: "sdpa" or "flash" in a name would mean more to transformers.
NAMES = {"sdpa": "kvfold", "eager": "kvfold_eager"}
# Model types whose `generate` starts over with a cache of its own past this configured length.
DROPS_CACHE = ("phi3", "phimoe", "phi4_multimodal", "phi4mm")

# The first version measured to give assisted decoding the greedy tokens from a filled cache.
ASSISTED_FROM = Version("5.23.0")
# The first version measured to tell a cache that `generate` was handed it, before dropping it.
TELLS_CACHE_FROM = Version("5.23.0")

# The first version measured to share a model out so that each rank's weights know their place.
PARALLEL_FROM = Version("5.23.0")

# Layers that stay transformers' own; the last of these classes came after 5.15.
LEFT_ALONE = tuple(
    getattr(cache_utils, name)
    for name in ("DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer")
    if hasattr(cache_utils, name)
)

# What models were loaded with that go through kvfold now.
_loaded: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


def register_attention(
    kind: str, function: AttentionFunction, check_padding: Callable[[Tensor | None], None]
) -> None:
    """Makes `function` known to transformers, with the mask function of its delegate.

    `check_padding` is shown what each mask is made of: which columns are tokens `[B, N]`.
    """
    make = ALL_MASK_ATTENTION_FUNCTIONS[kind]

    @functools.wraps(make)
    def mask(*args: Any, **kwargs: Any) -> Any:
        check_padding(kwargs.get("attention_mask"))
        return make(*args, **kwargs)

    AttentionInterface.register(NAMES[kind], function)
    AttentionMaskInterface.register(NAMES[kind], mask)


def delegate(kind: str, module: nn.Module) -> AttentionFunction:
    """The attention that the model was loaded with."""
    if kind == "sdpa":
        return sdpa_attention_forward
    return sys.modules[type(module).__module__].eager_attention_forward


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the decoder that generates text."""
    return model.config.get_text_config(decoder=True)


def enable(model: PreTrainedModel) -> None:
    """Routes the model's attention through kvfold, once; without our cache nothing changes.

    An implementation that kvfold does not build on (flash_attention_2, flex_attention) gives way,
    with a warning, to SDPA, or to eager attention where the model has no SDPA. Raises
    UnsupportedModel for encoder-decoders and for models that compute attention themselves.
    """
    with preparing:
        if not is_enabled(model):
            _route(model)


def _route(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder: kvfold compresses decoders only")
    if not model._can_set_attn_implementation():
        raise UnsupportedModel(
            f"{name} computes attention itself instead of using transformers' attention interface, "
            "so kvfold cannot see what it attends to"
        )
    loaded = text_config(model)._attn_implementation
    kind = _stand_in(model, loaded)
    if kind != loaded:
        warnings.warn(
            f"{name} was loaded with attn_implementation={loaded!r}: kvfold attends with {kind!r} "
            "instead",
            stacklevel=5,  # whoever makes the cache
        )
    model.set_attn_implementation(NAMES[kind])
    _loaded[model] = loaded


def disable(model: PreTrainedModel) -> None:
    """Gives the model back the attention implementation it was loaded with."""
    with preparing:
        for kind, name in NAMES.items():
            if text_config(model)._attn_implementation == name:
                model.set_attn_implementation(_loaded.pop(model, kind))
        unwatch(model)


def _stand_in(model: PreTrainedModel, loaded: str) -> str:
    """Which of SDPA and eager attention kvfold builds on."""
    unpaged = loaded.removeprefix("paged|")
    if unpaged in NAMES:
        return unpaged
    return "sdpa" if model._supports_sdpa else "eager"


def is_enabled(model: PreTrainedModel) -> bool:
    """Whether the model's attention goes through kvfold."""
    return is_routed(text_config(model))


def is_routed(config: Any) -> bool:
    """Whether a model of this configuration, a decoder's, attends through kvfold now."""
    return config._attn_implementation in NAMES.values()


def attention_name(model: PreTrainedModel) -> str:
    """The attention implementation that the model was loaded with."""
    name = str(text_config(model)._attn_implementation)
    return next((stock for stock, routed in NAMES.items() if routed == name), name)


def stock_layers(model: PreTrainedModel) -> list[Any]:
    """The layers of transformers' own cache; raises UnsupportedModel where kvfold has no answer."""
    layers = DynamicCache(config=text_config(model)).layers
    for index, layer in enumerate(layers):
        mixed = isinstance(layer, LinearAttentionLayer) and isinstance(layer, DynamicLayer)
        if mixed or not (type(layer) is DynamicLayer or isinstance(layer, LEFT_ALONE)):
            raise UnsupportedModel(
                f"layer {index} of {type(model).__name__} caches in a {type(layer).__name__}, "
                "which kvfold does not know"
            )
    if not any(is_compressible(layer) for layer in layers):
        raise UnsupportedModel(
            f"no layer of {type(model).__name__} attends to its whole past: nothing to compress"
        )
    return layers


def is_compressible(layer: Any) -> bool:
    """Whether a stock layer holds the keys of all tokens."""
    return type(layer) is DynamicLayer


def is_recurrent(layer: Any) -> bool:
    """Whether a stock layer holds a recurrent state, which no crop takes back."""
    return isinstance(layer, LinearAttentionLayer)


def lengths(cache: Cache) -> set[int]:
    """The numbers of tokens that layers with keys hold, each once."""
    return {layer.get_seq_length() for layer in cache.layers if isinstance(layer, CacheLayerMixin)}


def can_crop(layer: Any, tokens_to_remove: int) -> bool:
    """Whether a stock layer still has what it held before its last `-tokens_to_remove` tokens."""
    if tokens_to_remove == 0:
        return True
    if is_recurrent(layer):
        return False
    window, seen = getattr(layer, "sliding_window", None), layer.get_seq_length()
    if window is None or seen < window:
        return True
    needed = min(window - 1, seen + tokens_to_remove)
    return layer.record_past and layer.keys.shape[-2] + tokens_to_remove >= needed


def crop(layer: Any, tokens_to_remove: int) -> None:
    """Crops a stock layer that can be; no tokens are what assisted decoding takes back at times."""
    if tokens_to_remove or getattr(layer, "record_past", False):
        layer.crop(tokens_to_remove)


def shares_entries(model: PreTrainedModel) -> bool:
    """Whether later layers attend to the keys and values of an earlier one."""
    return bool(getattr(text_config(model), "num_kv_shared_layers", 0))


def caches_latents(model: PreTrainedModel) -> bool:
    """Whether the cache holds latents, whose keys exist only inside a forward."""
    return hasattr(text_config(model), "kv_lora_rank")


def parallel_options() -> dict[str, Any]:
    """What lets `from_pretrained` share a model out among the processes that torchrun started.

    Nothing in a single process. Raises KvfoldError for what is missing, or too old, for it.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return {}
    if Version(transformers.__version__) < PARALLEL_FROM:
        raise KvfoldError(
            f"several ranks need transformers {PARALLEL_FROM} or newer, this is "
            f"{transformers.__version__}: update it, or use one process"
        )
    if importlib.util.find_spec("accelerate") is None:
        raise KvfoldError("several ranks need accelerate: pip install kvfold[parallel]")
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size)}


def ranks_of(model: PreTrainedModel) -> Ranks:
    """Which of the model's KV heads this process holds.

    Raises UnsupportedModel where ranks would not hold equally many heads of their own.
    """
    size, name = getattr(model, "tp_size", None) or 1, type(model).__name__
    if size == 1:
        return Ranks()
    heads = getattr(text_config(model), "num_key_value_heads", None)
    reason = None
    if Version(transformers.__version__) < PARALLEL_FROM:
        reason = f"is shared out by transformers before {PARALLEL_FROM}"
    elif torch.distributed.get_world_size() != size:
        reason = "is not shared out among all processes"
    elif caches_latents(model):
        reason = "caches latents, which every rank holds whole"
    elif any(is_recurrent(layer) for layer in stock_layers(model)):
        reason = "has recurrent layers, whose states have no KV heads"
    elif not isinstance(heads, int):
        reason = "does not say how many KV heads it has"
    elif heads % size:
        reason = f"has {heads} KV heads, not a multiple of {size}"
    if reason is not None:
        raise UnsupportedModel(
            f"{name} {reason}: {size} ranks cannot share it by its heads, load it in one process"
        )
    assert isinstance(heads, int)
    return Ranks(torch.distributed.get_rank(), size, heads)


def whole(weight: Tensor) -> Tensor:
    """A weight of which this process may hold a part; all ranks must ask for it."""
    full: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return full


def dropping_length(model: PreTrainedModel) -> int | None:
    """Tokens from which on the model's `generate` drops a user's cache, or None.

    Raises UnsupportedModel where that would go unnoticed.
    """
    config = text_config(model)
    limit = getattr(config, "original_max_position_embeddings", None)
    if config.model_type not in DROPS_CACHE or limit is None:
        return None
    if limit >= config.max_position_embeddings:
        return None
    if Version(transformers.__version__) < TELLS_CACHE_FROM:
        raise UnsupportedModel(
            f"generate() of {type(model).__name__} silently drops a cache past {limit} tokens, "
            f"which kvfold can only notice from transformers {TELLS_CACHE_FROM} on: update it"
        )
    return limit


def trained_length(model: PreTrainedModel) -> int | None:
    """Tokens of the longest text the model was trained for, or None where it does not say.

    Configurations name the length that scaling reaches, but for YaRN, linear and dynamic scaling:
    these multiply the length before it (vLLM `config/model.py`). Types of layers with settings of
    their own (Gemma 3) name what is reached.
    """
    config = text_config(model)
    length: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if length is None or rope.get("rope_type") not in ("yarn", "linear", "dynamic"):
        return length
    before = length
    if rope["rope_type"] == "yarn":
        before = rope.get("original_max_position_embeddings") or length
    return max(length, int(before * rope.get("factor", 1.0)))


def has_position_table(model: PreTrainedModel) -> bool:
    """Whether the model looks its positions up, so that there are none past its length."""
    length, tokens = trained_length(model), model.get_input_embeddings()
    tables = (m for m in model.get_decoder().children() if isinstance(m, nn.Embedding))
    # OPT's has two rows more.
    return any(t is not tokens and t.num_embeddings - (length or 0) in (0, 2) for t in tables)


def not_compiled_because(model: PreTrainedModel) -> str | None:
    """Why one graph cannot decode, or None."""
    config = text_config(model)
    if not getattr(model, "_can_compile_fullgraph", False):
        return "is not compiled as one graph by transformers"
    if shares_entries(model):
        return "lets layers share keys and values"
    if caches_latents(model):
        return "caches latents, whose keys exist only inside a forward"
    if "dynamic" in _rope_types(config):
        return "changes its rotary frequencies with the length"
    experts = any("Experts" in type(module).__name__ for module in model.modules())
    if experts and getattr(config, "_experts_implementation", None) == "eager":
        return "runs its experts one by one (experts_implementation='eager')"
    return None


def compile_config(given: CompileConfig | None) -> CompileConfig:
    """How `generate` compiles its steps, on every device; transformers' default but one graph."""
    config = CompileConfig(fullgraph=True) if given is None else copy.copy(given)
    config._compile_all_devices = True  # type: ignore[assignment]
    return config


def compiled_call(model: PreTrainedModel) -> Any:
    """The model's forward as one graph, which transformers makes once."""
    return model.get_compiled_call(compile_config(None))


def check_assisted() -> None:
    """Raises KvfoldError where transformers answers wrongly from a cache that holds a prompt."""
    if Version(transformers.__version__) < ASSISTED_FROM:
        raise KvfoldError(
            f"assisted decoding from a filled cache needs transformers {ASSISTED_FROM} or newer, "
            f"this is {transformers.__version__}: update it, or generate without an assistant"
        )


def rope_of(model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, float]]:
    """How keys are rotated: the configuration's settings, frequencies, and attention factors.

    Frequencies are those that a text begins with, where they change with its length.
    """
    parameters = getattr(text_config(model), "rope_parameters", None) or {}
    frequencies: dict[str, Tensor] = {}
    scaling: dict[str, float] = {}
    for place, module in model.get_decoder().named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            kind = name.removesuffix("inv_freq")
            if kind == name or kind.endswith("original_"):
                continue
            original = buffers.get(f"{kind}original_inv_freq")
            frequencies[f"{place}.{name}"] = buffer if original is None else original
            scaling[f"{place}.{name}"] = float(getattr(module, f"{kind}attention_scaling", 1.0))
    return dict(parameters), frequencies, scaling


def layer_device(model: PreTrainedModel, layer: int) -> torch.device:
    """Where the keys of a layer are made."""
    for module in model.get_decoder().modules():
        weight = next(module.parameters(), None)
        if getattr(module, "layer_idx", None) == layer and weight is not None:
            return weight.device
    return model.device


def _rope_types(config: Any) -> set[str | None]:
    """How rotary frequencies are made, for all types of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    return {kind.get("rope_type") for kind in kinds}


class Rotation:
    """Moves keys by a number of positions with the model file's own rotary function."""

    def __init__(self, model: PreTrainedModel, layer: int) -> None:
        self.model: weakref.ref[PreTrainedModel] | None = weakref.ref(model)
        self.layer = layer

    def __getstate__(self) -> dict[str, Any]:
        return {"model": None, "layer": self.layer}

    def __deepcopy__(self, memo: dict[int, Any]) -> Rotation:
        return self

    def check(self) -> None:
        """Raises UnsupportedModel where a rotation by a constant would be wrong."""
        model = self._model()
        config = text_config(model)
        if {"dynamic", "longrope"} & _rope_types(config):
            raise UnsupportedModel(
                f"{type(model).__name__} changes its rotary frequencies with the length, so kept "
                'keys cannot be moved: use positions="original"'
            )
        known = self._embedding() is not None and self._apply() is not None
        if hasattr(config, "kv_lora_rank") or not known or self._is_conditional():
            raise UnsupportedModel(
                f"layer {self.layer} of {type(model).__name__} has no rotary keys that could be "
                'moved for certain: use positions="original"'
            )

    def __call__(self, keys: Tensor, shift: Tensor) -> Tensor:
        """keys `[B, H, S, D]`, rotated forward by `shift [B]` positions."""
        if not getattr(self._attention(), "use_rope", True):
            return keys
        embedding, apply = self._embedding(), self._apply()
        assert embedding is not None and apply is not None
        at = shift.view(-1, 1).expand(-1, keys.shape[2])
        kinds = getattr(text_config(self._model()), "layer_types", None)
        takes_kind = "layer_type" in inspect.signature(embedding.forward).parameters
        kind = {"layer_type": kinds[self.layer]} if kinds and takes_kind else {}
        cos, sin = embedding(keys.float(), at, **kind)
        # YaRN's attention factor is already inside the stored key.
        prefix = f"{kind['layer_type']}_" if kind else ""
        factor = getattr(embedding, f"{prefix}attention_scaling", 1.0)
        cos, sin = cos / factor, sin / factor
        size = 2 * getattr(embedding, f"{prefix}inv_freq").shape[-1]
        turning, still = keys[..., :size].float(), keys[..., size:].float()
        if "k" in inspect.signature(apply).parameters:
            turned = apply(turning, turning, cos, sin)[1]
        else:
            turned = apply(turning, cos, sin, unsqueeze_dim=1)
        return torch.cat([turned, still], -1).to(keys.dtype)

    def _model(self) -> PreTrainedModel:
        model = self.model() if self.model is not None else None
        if model is None:
            raise UnsupportedModel("the model of this cache is gone")
        return model

    def _attention(self) -> nn.Module | None:
        """The attention module of this layer."""
        modules = self._model().get_decoder().modules()
        return next(
            (
                module
                for module in modules
                if getattr(module, "layer_idx", None) == self.layer
                and "Attention" in type(module).__name__
            ),
            None,
        )

    def _is_conditional(self) -> bool:
        """Whether the model file rotates under a condition that kvfold cannot ask it about."""
        module = self._attention()
        if module is None or hasattr(module, "use_rope"):
            return module is None
        source = inspect.getsource(type(module).forward).splitlines()
        calls = [line for line in source if "apply_rotary_pos_emb(" in line]
        outermost = " " * 8
        return not calls or any(line.startswith(outermost + " ") for line in calls)

    def _embedding(self) -> nn.Module | None:
        decoder = self._model().get_decoder()
        return getattr(decoder, "rotary_emb", None)

    def _apply(self) -> Callable[..., Any] | None:
        module = sys.modules[type(self._model().get_decoder()).__module__]
        return getattr(module, "apply_rotary_pos_emb", None)


class Layers:
    """A decoder's layers, to be run one by one.

    Raises UnsupportedModel where that does not give what the model's own forward gives.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.decoder = model, model.get_decoder()
        self.name = type(model).__name__
        parts = ("embed_tokens", "layers", "rotary_emb")
        own = all(is_compressible(layer) for layer in stock_layers(model))
        if not own or not all(hasattr(self.decoder, part) for part in parts):
            raise UnsupportedModel(self._reason())
        self._check()

    def embed(self, input_ids: Tensor) -> Tensor:
        """The first layer's input `[B, N, hidden]`."""
        embedded: Tensor = self.decoder.embed_tokens(input_ids)
        return embedded

    def run(
        self, index: int, hidden: Tensor, real: Tensor, places: Tensor, cache: Cache | None
    ) -> Tensor:
        """One causal layer over `hidden [B, S, hidden]`, `real [B, S]`, at `places [B, S]`."""
        out = self.decoder.layers[index](
            hidden,
            attention_mask=self._mask(real, hidden.dtype),
            position_ids=places,
            past_key_values=cache,
            use_cache=cache is not None,
            position_embeddings=self.decoder.rotary_emb(hidden, places),
        )
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def _mask(self, real: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Additive `[B, 1, S, S]`; None where SDPA's own causality is all."""
        eager = text_config(self.model)._attn_implementation.endswith("eager")
        if bool(real.all()) and not eager:
            return None
        new = real.shape[1]
        causal = torch.ones(new, new, dtype=torch.bool, device=real.device).tril()
        visible = causal & real[:, None, None]
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)

    @torch.no_grad()
    def _check(self) -> None:
        """Compares the last layer's input with that of the model's own forward."""
        ids = torch.arange(3, 11, device=self.model.device)[None]
        expected = self.decoder(ids, use_cache=False, output_hidden_states=True).hidden_states
        try:
            hidden = self.embed(ids)
            for index in range(len(self.decoder.layers) - 1):
                places = torch.arange(ids.shape[1], device=ids.device)[None]
                hidden = self.run(index, hidden, torch.ones_like(ids).bool(), places, None)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise UnsupportedModel(self._reason()) from problem
        if not torch.allclose(hidden, expected[len(self.decoder.layers) - 1], atol=1e-4):
            raise UnsupportedModel(self._reason())

    def _reason(self) -> str:
        return (
            f"the layers of {self.name} do not give the model's own result when they are run one "
            "by one, so tokens cannot be pruned between them"
        )


def softcap_of(kwargs: dict[str, Any]) -> float | None:
    """Gemma-2's logit softcap, if this call has one."""
    return kwargs.get("softcap")


def sinks_of(kwargs: dict[str, Any]) -> Tensor | None:
    """GPT-OSS's learned sink logits `[Hq]`, if this call has them."""
    return kwargs.get("s_aux")


def head_scale(module: nn.Module, query: Tensor, scaling: float | None) -> float:
    """The factor on the logits: the call's, or the usual 1/√D."""
    if scaling is not None:
        return float(scaling)
    return float(getattr(module, "scaling", None) or query.shape[-1] ** -0.5)


def generate(model: Any, **options: Any) -> Any:
    """The model's own `generate`."""
    return model.generate(**options)


@torch.no_grad()
def read(model: PreTrainedModel, input_ids: Tensor, cache: Cache, mask: Tensor | None) -> None:
    """One forward that only fills the cache; `mask [B, N]` covers everything read so far."""
    position_ids = None
    if mask is not None:
        position_ids = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    model(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=position_ids,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
