# SPDX-License-Identifier: Apache-2.0
"""A decoder's layers, run one by one."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.errors import UnsupportedModel
from kvfold.hf.models import text_config
from kvfold.hf.stock_layers import is_compressible, stock_layers
from kvfold.hf.versions import CACHE


class DecoderLayers:
    """A decoder's layers, to be run one by one.

    Copies share the model. Raises UnsupportedModel if the result differs from the model's own
    forward.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_structure(model)
        self.model, self.decoder = model, model.get_decoder()
        self._check()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def embed(self, input_ids: Tensor) -> Tensor:
        """The first layer's input `[B, N, hidden]`."""
        embedded: Tensor = self.decoder.embed_tokens(input_ids)
        return embedded

    def run(
        self, index: int, hidden: Tensor, real: Tensor, positions: Tensor, cache: Cache | None
    ) -> Tensor:
        """Output of one causal layer over `hidden [B, S, hidden]` at `positions [B, S]`.

        `real [B, T]` is False at padding; its last S columns are those of `hidden`, the others
        those that the cache has seen.
        """
        out = self.decoder.layers[index](
            hidden,
            attention_mask=self._mask(real, hidden),
            position_ids=positions,
            use_cache=cache is not None,
            position_embeddings=self.decoder.rotary_emb(hidden, positions),
            **{CACHE: cache},
        )
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def _mask(self, real: Tensor, hidden: Tensor) -> Tensor | None:
        """Additive mask `[B, 1, S, T]`; None if SDPA's causal mask suffices."""
        eager = text_config(self.model)._attn_implementation.endswith("eager")
        new, seen = hidden.shape[1], real.shape[1]
        if bool(real.all()) and not eager and new == seen:
            return None
        causal = torch.ones(new, seen, dtype=torch.bool, device=real.device).tril(seen - new)
        visible = causal & real[:, None, None]
        least = torch.finfo(hidden.dtype).min
        return torch.zeros_like(visible, dtype=hidden.dtype).masked_fill(~visible, least)

    @torch.no_grad()
    def _check(self) -> None:
        """Compares the last layer's input with that of the model's own forward."""
        ids = (
            torch.arange(3, 11, device=self.model.device)[None] % text_config(self.model).vocab_size
        )
        last = len(self.decoder.layers) - 1
        expected = self.decoder(ids, use_cache=False, output_hidden_states=True).hidden_states
        try:
            hidden = self.embed(ids)
            for index in range(last):
                positions = torch.arange(ids.shape[1], device=ids.device)[None]
                hidden = self.run(index, hidden, torch.ones_like(ids).bool(), positions, None)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError) as problem:
            raise UnsupportedModel(self._reason()) from problem
        if not torch.allclose(hidden, expected[last], atol=1e-4):
            raise UnsupportedModel(self._reason())

    def _reason(self) -> str:
        return (
            f"the layers of {type(self.model).__name__} do not give the model's own result when "
            "they are run one by one, so tokens cannot be pruned, and entries not refitted, "
            "between them"
        )


def check_structure(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel for a decoder whose layers cannot be run one by one."""
    decoder, parts = model.get_decoder(), ("embed_tokens", "layers", "rotary_emb")
    own = all(is_compressible(layer) for layer in stock_layers(model))
    if not own or not all(hasattr(decoder, part) for part in parts):
        raise UnsupportedModel(
            f"kvfold cannot run the layers of {type(model).__name__} one by one (some slide, are "
            "recurrent, or have unknown names), so tokens cannot be pruned, and entries not "
            "refitted, between them: leave on_policy out, or use another method"
        )
