# SPDX-License-Identifier: Apache-2.0
"""RoPE of an engine's keys, given by its frequencies, for all layers or for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.errors import KvfoldError


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
