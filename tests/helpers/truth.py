# SPDX-License-Identifier: Apache-2.0
"""The truth: transformers' own cache keeps everything, evicted entries are hidden by a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import kvfold

NAME = "masked_dense"
# Changes the keys `[B, H, N, D]` of an attention call, given which are gone `[B, H, N]`.
Move = Callable[[Tensor, Tensor], Tensor]


def stock_cache(model: PreTrainedModel) -> DynamicCache:
    """What transformers itself would use."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


class Reader:
    """Feeds one model and one cache, piece by piece; with a `mask` token 0 is padding."""

    def __init__(self, model: PreTrainedModel, cache: Cache, mask: Tensor | None = None) -> None:
        self.model, self.cache, self.mask = model, cache, mask
        self.started = False

    @torch.no_grad()
    def __call__(self, ids: Tensor, **inputs: Tensor) -> Tensor:
        """Logits `[B, S, V]` of the new tokens `ids [B, S]`; `inputs` go with them (images)."""
        padding: dict[str, Tensor] = {}
        if self.mask is not None:
            if self.started:
                self.mask = torch.cat([self.mask, (ids > 0).long()], 1)
            positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            padding = {"attention_mask": self.mask, "position_ids": positions}
        self.started = True
        inputs = padding | inputs
        return self.model(ids, past_key_values=self.cache, use_cache=True, **inputs).logits


class MaskedDense(Reader):
    """A model with everything stored, and attention that cannot see what `hide` was told of."""

    def __init__(
        self, model: PreTrainedModel, mask: Tensor | None = None, move: Move | None = None
    ) -> None:
        super().__init__(model, stock_cache(model), mask)
        model.set_attn_implementation(NAME)
        config = model.config.get_text_config(decoder=True)
        length = getattr(config, "max_position_embeddings", torch.inf)
        self.own = [i for i, layer in enumerate(self.cache.layers) if _holds_all(layer, length)]
        self.stored: dict[int, Tensor] = {}
        self.bias: dict[int, Tensor] = {}
        self.move = move

    def hide(self, cache: kvfold.CompressedCache) -> None:
        """From now on every entry seen so far is hidden, except those that `cache` still stores."""
        seen = cache.get_seq_length()
        for place, index in enumerate(self.own):
            positions = cache.positions(place)
            stored = torch.zeros(len(positions), len(positions[0]), seen, dtype=torch.bool)
            for row, heads in enumerate(positions):
                for head, kept in enumerate(heads):
                    stored[row, head, kept] = True
            self.stored[index] = stored

    def give_biases(self, cache: kvfold.CompressedCache, of_layers: list[Tensor]) -> None:
        """Adds a bias `[B, H, N]` of each column to its logits, in each layer that `cache` has."""
        assert len(of_layers) == len(cache.states)
        self.bias = dict(zip(self.own, of_layers, strict=True))

    def gone(self, module: Any, heads: int, columns: int) -> Tensor | None:
        """Which of a layer's columns were evicted `[B, H, N]`, or None."""
        stored = self.stored.get(self._index(module))
        return None if stored is None else _widened(~stored, heads, columns)

    def added(self, module: Any, heads: int, columns: int) -> Tensor | None:
        """The bias of a layer's columns `[B, H, N]`, or None."""
        bias = self.bias.get(self._index(module))
        return None if bias is None else _widened(bias, heads, columns)

    def _index(self, module: Any) -> int:
        if getattr(module, "is_kv_shared_layer", False) and not module.is_sliding:
            return self.own[-1]
        return int(module.layer_idx)

    def __call__(self, ids: Tensor, **inputs: Tensor) -> Tensor:
        global _running
        _running = self
        try:
            return super().__call__(ids, **inputs)
        finally:
            _running = None


def _holds_all(layer: Any, length: float) -> bool:
    """True if a layer holds the keys of all tokens of a text of the trained `length`."""
    return type(layer) is DynamicLayer or getattr(layer, "sliding_window", 0) >= length


def _widened(numbers: Tensor, heads: int, columns: int) -> Tensor:
    """Numbers `[B, H, N]` of as many heads and columns, 0 for newer ones."""
    wide = nn.functional.pad(numbers, (0, columns - numbers.shape[-1]))
    return wide.expand(-1, heads, -1)


_running: MaskedDense | None = None


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Softmax attention in float64, from scratch."""
    heads, columns = key.shape[1:3]
    groups = query.shape[1] // heads
    if attention_mask is None:  # of an image's patches, all see all
        attention_mask = query.new_zeros(1, 1, 1, columns)
    allowed = attention_mask > torch.finfo(attention_mask.dtype).min / 2
    running = _running if getattr(module, "layer_idx", None) is not None else None
    gone = running.gone(module, heads, columns) if running else None
    if gone is not None:
        allowed = allowed & ~gone.repeat_interleave(groups, 1)[:, :, None]
        if running.move is not None:
            key = running.move(key, gone)
    keys = key.double().repeat_interleave(groups, 1)
    values = value.double().repeat_interleave(groups, 1)
    logits = torch.einsum("bhsd,bhnd->bhsn", query.double(), keys) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    bias = running.added(module, heads, columns) if running else None
    if bias is not None:
        logits = logits + bias.double().repeat_interleave(groups, 1)[:, :, None]
    logits = logits.masked_fill(~allowed, -torch.inf)
    # A row that may see nothing (padding) has no finite peak and answers with zeros.
    peak = logits.amax(-1, keepdim=True).clamp(min=-1e300)
    sink = torch.zeros_like(peak)
    if s_aux is not None:
        learned = s_aux.double().view(1, -1, 1, 1)
        peak = torch.maximum(peak, learned)
        sink = (learned - peak).exp()
    weights = (logits - peak).exp()
    total = (weights.sum(-1, keepdim=True) + sink).clamp(min=1e-300)
    out = torch.einsum("bhsn,bhnd->bhsd", weights / total, values)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def rotated(keys: Tensor, by: Tensor) -> Tensor:
    """Llama's rotation, written out: keys `[B, H, N, D]` by `by [B, 1, N]` positions."""
    half = keys.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = by.double()[..., None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = keys[..., :half].double(), keys[..., half:].double()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class ExactRope(nn.Module):
    """Llama's cosines and sines in float64, which transformers takes in float32."""

    attention_scaling = 1.0

    def __init__(self, half: int) -> None:
        super().__init__()
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        self.register_buffer("inv_freq", frequency)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = (position_ids[..., None].double() * self.inv_freq).repeat(1, 1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def with_exact_rope(model: PreTrainedModel) -> PreTrainedModel:
    """The same float64 model, whose cosines are float64 too."""
    decoder = model.get_decoder()
    decoder.rotary_emb = ExactRope(len(decoder.rotary_emb.inv_freq))
    return model


def sinks_moved_up(keys: Tensor, gone: Tensor) -> Tensor:
    """Each row's first four tokens follow the rest: by as many positions as were evicted."""
    columns = torch.arange(keys.shape[2])
    padding = (~gone[:, 0]).long().argmax(-1)  # sinks stay: all that is gone before is padding
    evicted = gone[:, 0].sum(-1) - padding
    sink = (columns >= padding[:, None]) & (columns < padding[:, None] + 4)
    return rotated(keys, (sink * evicted[:, None])[:, None])


def kept_moved_up(keys: Tensor, gone: Tensor) -> Tensor:
    """Each head's entries up to the last that is gone stand right before the others, without gaps.

    Padding may only be on the left.
    """
    after = gone.flip(-1).cumsum(-1).flip(-1)
    return rotated(keys, after * ~gone)


# How the truth moves keys, by the stage's name.
MOVES = {"original": None, "reindex": sinks_moved_up, "consecutive": kept_moved_up}


def worst(a: Tensor, b: Tensor, mask: Tensor | None = None) -> float:
    """The largest difference, NaN if there is one, where `mask` says that there are tokens."""
    difference = (a.double() - b.double()).abs()
    return (difference if mask is None else difference[mask.bool()]).max().item()
