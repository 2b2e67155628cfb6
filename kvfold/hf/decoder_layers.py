# SPDX-License-Identifier: Apache-2.0
"""A decoder's layers, run one by one."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.errors import UnsupportedModel
from kvfold.hf.models import text_config
from kvfold.hf.stock_layers import is_compressible, stock_layers


class DecoderLayers:
    """A decoder's layers, to be run one by one.

    Raises UnsupportedModel if the result differs from the model's own forward.
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
        self, index: int, hidden: Tensor, real: Tensor, positions: Tensor, cache: Cache | None
    ) -> Tensor:
        """Output of one causal layer over `hidden [B, S, hidden]` at `positions [B, S]`.

        `real [B, S]` is False at padding.
        """
        out = self.decoder.layers[index](
            hidden,
            attention_mask=self._mask(real, hidden.dtype),
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
            position_embeddings=self.decoder.rotary_emb(hidden, positions),
        )
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def _mask(self, real: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Additive mask `[B, 1, S, S]`; None if SDPA's causal mask suffices."""
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
                positions = torch.arange(ids.shape[1], device=ids.device)[None]
                hidden = self.run(index, hidden, torch.ones_like(ids).bool(), positions, None)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise UnsupportedModel(self._reason()) from problem
        if not torch.allclose(hidden, expected[len(self.decoder.layers) - 1], atol=1e-4):
            raise UnsupportedModel(self._reason())

    def _reason(self) -> str:
        return (
            f"the layers of {self.name} do not give the model's own result when they are run one "
            "by one, so tokens cannot be pruned between them"
        )
