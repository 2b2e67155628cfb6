# SPDX-License-Identifier: Apache-2.0
"""A prefill's tensors as an engine holds them, and its RoPE by frequencies, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.logits import LogitOptions
from kvfold.methods.observation import Observation

# One tensor with layers as its first axis, or one tensor for each layer
Layers = Tensor | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embedding: pair i of a key is turned by position · `frequencies [P]`.

    The first 2·P numbers of a key are turned, the others stay (partial RoPE). Pairs are number i
    and number i + P, as in Llama; with `interleaved`, number 2·i and the next one, as in GLM. For
    scaled RoPE (llama3, YaRN) give the scaled frequencies, which transformers' models hold as
    `rotary_emb.inv_freq`; frequencies that change with the length (dynamic NTK, LongRoPE) do not
    fit. Raises KvfoldError for frequencies that are not one row of finite numbers.
    """

    frequencies: Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.frequencies.dim() != 1 or not bool(self.frequencies.isfinite().all()):
            raise KvfoldError("a Rope takes one finite frequency for each rotary pair, [P]")

    @classmethod
    def plain(cls, head_size: int, theta: float = 10000.0) -> Rope:
        """RoPE without scaling: frequencies theta^(−2i / `head_size`)."""
        powers = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
        return cls(1.0 / theta**powers)

    def __call__(self, keys: Tensor, shift: Tensor) -> Tensor:
        """Keys `[B, H, n, D]` turned forward by `shift` positions: `[B]`, `[B, n]`, `[B, H, n]`."""
        if shift.dim() == 1:
            shift = shift[:, None].expand(-1, keys.shape[2])
        if shift.dim() == 2:
            shift = shift[:, None]
        frequencies = self.frequencies.to(keys.device, torch.float32)
        angles = shift[..., None].float() * frequencies
        size = 2 * len(frequencies)
        turning, still = keys[..., :size].float(), keys[..., size:].float()
        if self.interleaved:
            first, second = turning.unflatten(-1, (-1, 2)).unbind(-1)
        else:
            first, second = turning.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        turned = first * cos - second * sin, second * cos + first * sin
        joined = torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)
        return torch.cat([joined, still], -1).to(keys.dtype)


# One for all layers, or one for each, None for a layer without RoPE
Ropes = Rope | Sequence[Rope | None]


def rope_of(ropes: Ropes | None, layer: int) -> Rope | None:
    """The RoPE of a layer; None if it has none."""
    return ropes if ropes is None or isinstance(ropes, Rope) else ropes[layer]


def check_ropes(ropes: Ropes | None, layers: int) -> None:
    """Raises KvfoldError unless this is one Rope, or a Rope or None for each of the `layers`."""
    if ropes is None or isinstance(ropes, Rope):
        return
    if len(ropes) != layers:
        raise KvfoldError(
            f"rope of {len(ropes)} layers, keys of {layers}: give one Rope for all layers, or for "
            "each layer its Rope, and None where it has none"
        )
    for layer, rope in enumerate(ropes):
        if not isinstance(rope, Rope | None):
            raise KvfoldError(
                f"rope of layer {layer} is a {type(rope).__name__}: give Rope(frequencies), or "
                "None for a layer without RoPE"
            )


@dataclass(frozen=True, eq=False)
class Prefill:
    """The tensors of one row when its prompt has been read: one for each layer, nothing is copied.

    Keys and queries are as attention reads them, after RoPE. Raises KvfoldError for shapes that do
    not fit one another.
    """

    keys: Layers  # [L, H, T, D]
    values: Layers  # [L, H, T, Dv]
    queries: Layers | None = None  # [L, Hq, W, D], of the last W tokens
    rope: Ropes | None = None  # of keys and queries; a sequence: of each layer
    token_ids: Tensor | None = None  # [T]
    output_weights: Layers | None = None  # [L, Dm, Hq·Dv], W_o
    sink_logits: Layers | None = None  # [L, Hq], in the softmax's denominator (GPT-OSS)
    scale: float | None = None  # of the logits; None: 1/√D
    softcap: float | None = None  # c: logits x become c · tanh(x / c)

    def __post_init__(self) -> None:
        if not len(self.keys):
            raise KvfoldError(
                "keys of no layer: give [L, H, T, D], or one [H, T, D] for each layer"
            )
        for name in ("values", "queries", "output_weights", "sink_logits"):
            given = getattr(self, name)
            if given is not None and len(given) != self.layers:
                raise KvfoldError(f"{name} of {len(given)} layers, keys of {self.layers}")
        check_ropes(self.rope, self.layers)
        for layer in range(self.layers):
            self._check(layer)
        ids = self.token_ids
        if ids is not None and tuple(ids.shape) != (self.tokens,):
            raise KvfoldError(f"token_ids {list(ids.shape)} of {self.tokens} tokens: give [T]")

    @property
    def layers(self) -> int:
        """Number of layers L."""
        return len(self.keys)

    @property
    def heads(self) -> int:
        """KV heads H of a layer."""
        return self.keys[0].shape[0]

    @property
    def tokens(self) -> int:
        """Tokens T."""
        return self.keys[0].shape[1]

    @property
    def window(self) -> int:
        """Queries W of each layer, 0 without any."""
        return 0 if self.queries is None else self.queries[0].shape[1]

    def queries_of(self, layer: int) -> Tensor:
        """Queries `[1, Hq, W, D]` of a layer; of no token where none were given."""
        if self.queries is None:
            return self.keys[layer][None, :, :0]
        return self.queries[layer][None]

    def rope_of(self, layer: int) -> Rope | None:
        """The layer's RoPE; None if it has none, or if none was given."""
        return rope_of(self.rope, layer)

    def logits_of(self, layer: int) -> LogitOptions:
        """The layer's rule from products to logits."""
        size = self.keys[layer].shape[-1]
        return LogitOptions(
            scale=size**-0.5 if self.scale is None else self.scale,
            softcap=self.softcap,
            sink_logits=None if self.sink_logits is None else self.sink_logits[layer],
        )

    def observed(self, layer: int, queries: int) -> Observation:
        """Observation of a layer by its last `queries`, or fewer if fewer were given."""
        keys, given = self.keys[layer][None], self.queries_of(layer)[:, :, -queries:]
        positions = torch.arange(self.tokens, device=keys.device)
        return Observation(
            keys,
            self.values[layer][None],
            positions.expand(1, self.heads, -1),
            given,
            positions[None, self.tokens - given.shape[2] :],
            **self.logits_of(layer),
        )

    def _check(self, layer: int) -> None:
        keys, values = self.keys[layer], self.values[layer]
        shape = (self.heads, self.tokens)
        if keys.dim() != 3 or keys.shape[:2] != shape or not keys.is_floating_point():
            raise KvfoldError(
                f"keys of layer {layer} are {keys.dtype} {list(keys.shape)}: every layer wants "
                f"floating-point [H, T, D], and layer 0 has H = {shape[0]}, T = {shape[1]}"
            )
        if values.dim() != 3 or values.shape[:2] != shape:
            raise KvfoldError(
                f"values of layer {layer} are {list(values.shape)}, and its keys {list(keys.shape)}"
            )
        if self.queries is None:
            return
        queries = self.queries[layer]
        fits = queries.dim() == 3 and queries.shape[2] == keys.shape[2]
        if not fits or queries.shape[0] % self.heads or queries.shape[1] > self.tokens:
            raise KvfoldError(
                f"queries of layer {layer} are {list(queries.shape)}, and its keys "
                f"{list(keys.shape)}: give [Hq, W, D] of the last W tokens, Hq a multiple of H"
            )


def split_heads(flat: Tensor, head_size: int) -> Tensor:
    """View `[…, H, T, D]` of entries `[…, T, H·D]`, as engines store a token's heads side by side.

    Raises KvfoldError if the last axis is not a multiple of `head_size`.
    """
    if flat.shape[-1] % head_size:
        raise KvfoldError(f"{flat.shape[-1]} numbers of a token are no heads of size {head_size}")
    return torch.movedim(flat.unflatten(-1, (-1, head_size)), -2, -3)
