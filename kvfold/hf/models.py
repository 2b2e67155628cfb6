# SPDX-License-Identifier: Apache-2.0
"""Facts about a model, and its own forward and `generate`."""

from __future__ import annotations

import copy
import inspect
import itertools
import weakref
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.errors import UnsupportedModel
from kvfold.hf import rope_deltas
from kvfold.hf.forward_hooks import ToldOfForwards
from kvfold.hf.recurrent import restarts
from kvfold.hf.versions import CACHE, CACHE_NAMES, INSTALLED, TELLS_CACHE_FROM, given_cache

# Model types whose `generate` starts over with a cache of its own past this configured length.
DROPS_CACHE = ("phi3", "phimoe", "phi4_multimodal", "phi4mm")
# Model types that drop the positions that their `generate` counts.
COUNT_THEMSELVES = ("kosmos-2.5",)


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the decoder that generates text."""
    return model.config.get_text_config(decoder=True)


def takes_cache(model: PreTrainedModel) -> bool:
    """True if the model's forward takes a cache; other models' `generate` drops it (Evolla)."""
    return not inspect.signature(type(model).forward).parameters.keys().isdisjoint(CACHE_NAMES)


def shares_entries(model: PreTrainedModel) -> bool:
    """True if later layers attend to the keys and values of an earlier one."""
    return bool(getattr(text_config(model), "num_kv_shared_layers", 0))


def kv_heads(model: PreTrainedModel) -> int | None:
    """KV heads of a layer, as the configuration says; None if it does not."""
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None)
    heads = getattr(config, "num_attention_heads", None) if heads is None else heads
    return heads if isinstance(heads, int) else None


def caches_latents(model: PreTrainedModel) -> bool:
    """True if the cache holds latents, whose keys exist only inside a forward (MLA)."""
    return hasattr(text_config(model), "kv_lora_rank")


def dropping_length(model: PreTrainedModel) -> int | None:
    """Tokens from which on the model's `generate` drops a user's cache, or None.

    Raises UnsupportedModel if that would go unnoticed.
    """
    config = text_config(model)
    limit: int | None = getattr(config, "original_max_position_embeddings", None)
    if config.model_type not in DROPS_CACHE or limit is None:
        return None
    if limit >= config.max_position_embeddings:
        return None
    if INSTALLED < TELLS_CACHE_FROM:
        raise UnsupportedModel(
            f"generate() of {type(model).__name__} silently drops a cache past {limit} tokens, "
            f"which kvfold can only notice from transformers {TELLS_CACHE_FROM} on: update it"
        )
    return limit


def trained_length(model: PreTrainedModel) -> int | None:
    """Tokens of the longest text the model was trained for, or None where it does not say.

    Configurations name the length after RoPE scaling, except with YaRN, linear and dynamic scaling,
    whose factor multiplies the named length (vLLM `config/model.py`). Layer types with RoPE
    settings of their own (Gemma 3) name the length after scaling.
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


def attention_module(model: PreTrainedModel, layer: int) -> nn.Module | None:
    """The attention module of a layer."""
    for module in _with_index(model, layer):
        if "Attention" in type(module).__name__:
            return module
    return None


def _with_index(model: PreTrainedModel, layer: int) -> Iterator[nn.Module]:
    """Modules that call themselves a layer's, those in its place in the decoder first."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    place = list(layers)[layer : layer + 1] if isinstance(layers, nn.ModuleList) else []
    for module in itertools.chain(*(each.modules() for each in (*place, decoder))):
        if getattr(module, "layer_idx", None) == layer:
            yield module


def layer_device(model: PreTrainedModel, layer: int) -> torch.device:
    """Device of a layer's weights."""
    for module in _with_index(model, layer):
        weight: Tensor | None = next(module.parameters(), None)
        if weight is not None:
            return weight.device
    return model.device


def full_weight(weight: Tensor) -> Tensor:
    """The whole of a weight that ranks may share; a collective call on all of them.

    A plain tensor, which of a quantized weight stays the same.
    """
    own = _samplable(weight)
    full: Tensor = own.full_tensor() if hasattr(own, "full_tensor") else own
    return full


def _samplable(weight: Tensor) -> Tensor:
    """A plain tensor that stays the same for a quantized weight; other weights as they are.

    bitsandbytes packs 4-bit codes anew in the first forward on a CPU: these are put back in order.
    torchao's weights are no plain tensors: theirs are the numbers that they stand for.
    """
    plain, state = weight.detach(), getattr(weight, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        from bitsandbytes import functional

        inverse: Any = functional._convert_weight_packed_for_cpu_inverse
        codes: Tensor = inverse(weight.data, copy.copy(state))[0]  # it changes the state
        return codes
    kind = type(plain)
    if kind in (Tensor, nn.Parameter) or not kind.__module__.startswith("torchao."):
        return plain
    return plain.dequantize()


def stock_generate(model: Any, **options: Any) -> Any:
    """The `generate` of the model's class, also where the model was given another.

    It counts positions by the `rope_deltas` of the cache that it continues.
    """
    cache = given_cache(options)
    if isinstance(cache, ToldOfForwards) and cache.get_seq_length() > 0:
        rope_deltas.put(rope_deltas.holders(model), cache.rope_deltas)
    return type(model).generate(model, **options)


def is_counted_by_generate(model: PreTrainedModel) -> bool:
    """True if `generate` counts positions from 0 and gives them to the model's forward.

    Without them, some models count from another number (RoBERTa), or anew in each forward (Bamba).
    False for those that count images their own way (Qwen2-VL), and for `COUNT_THEMSELVES`.
    """
    count = "_prepare_position_ids_for_generation"
    own = getattr(type(model), count, None) is not getattr(GenerationMixin, count, None)
    if own or model.config.model_type in COUNT_THEMSELVES:
        return False
    return "position_ids" in inspect.signature(model.forward).parameters


@torch.no_grad()
def read_tokens(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: Cache,
    mask: Tensor | None,
    *,
    at_once: bool = False,
) -> None:
    """A forward that only fills the cache; `mask [B, N]` covers everything read so far.

    Models whose recurrent layers would begin anew go on token by token, unless `at_once`.
    """
    for _ in _pieces_read(model, input_ids, cache, mask, 1, at_once):
        pass


def read_logits(
    model: PreTrainedModel, input_ids: Tensor, cache: Cache, mask: Tensor | None, count: int
) -> Tensor:
    """Reads tokens as `read_tokens`; logits `[B, count, V]` after the last `count` of them."""
    return torch.cat([*_pieces_read(model, input_ids, cache, mask, count, False)], 1)[:, -count:]


def _pieces_read(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: Cache,
    mask: Tensor | None,
    count: int,
    at_once: bool,
) -> Iterator[Tensor]:
    """Logits `[B, n, V]` after up to `count` last tokens of each forward."""
    seen, new = cache.get_seq_length(), input_ids.shape[1]
    one_by_one = seen > 0 and not at_once and restarts(model)
    for piece in input_ids.split(1 if one_by_one else new, 1):
        seen += piece.shape[1]
        yield _read_piece(model, piece, cache, None if mask is None else mask[:, :seen], count)


def _read_piece(
    model: PreTrainedModel, input_ids: Tensor, cache: Cache, mask: Tensor | None, count: int
) -> Tensor:
    """Logits of one forward, at the positions that `generate` would give."""
    new, position_ids = input_ids.shape[1], {}
    if mask is not None:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -new:]
        position_ids["position_ids"] = positions + rope_deltas.offset(cache)
    elif is_counted_by_generate(model):
        seen = cache.get_seq_length()
        position_ids["position_ids"] = torch.arange(seen, seen + new, device=input_ids.device)[None]
    out = model(
        input_ids=input_ids,
        attention_mask=mask,
        **position_ids,
        use_cache=True,
        logits_to_keep=min(count, new),
        **{CACHE: cache},
    )
    logits: Tensor = out.logits
    return logits


class LayerOfModel:
    """Layer `layer` of a model that is not kept alive; copies share it, and files leave it out."""

    def __init__(self, model: PreTrainedModel, layer: int) -> None:
        self._reference: weakref.ref[PreTrainedModel] | None = weakref.ref(model)
        self.layer = layer

    def __getstate__(self) -> dict[str, Any]:
        return {"_reference": None, "layer": self.layer}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def model(self) -> PreTrainedModel:
        """The model; raises UnsupportedModel if it is gone."""
        model = None if self._reference is None else self._reference()
        if model is None:
            raise UnsupportedModel("the model of this cache is gone")
        return model

    @property
    def attention(self) -> nn.Module | None:
        """The layer's attention module; None if the model file names none."""
        return attention_module(self.model, self.layer)
