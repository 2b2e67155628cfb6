# SPDX-License-Identifier: Apache-2.0
"""Models to measure: a named shape with random weights, or a loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from kvfold.bundled import FOLDER
from kvfold.errors import KvfoldError
from kvfold.hf.models import text_config
from kvfold.loading import Loading, device_or_usual, load

_LONG = {"max_position_embeddings": 131072, "pad_token_id": 0, "bos_token_id": 1}
_LLAMA_3 = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip


def _llama(*sizes: int, **more: Any) -> dict[str, Any]:
    """A Llama configuration of these `_SIZES`; further fields have transformers' defaults."""
    return dict(zip(_SIZES, sizes, strict=True)) | more


SHAPES = {
    "tiny": _llama(64, 128, 2, 4, 2, 16, 256),
    "small": _llama(512, 1408, 8, 8, 4, 64, 1024),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 64, 128256, tie_word_embeddings=True, **_LLAMA_3),
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 128, 32000),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128, 128256, **_LLAMA_3),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelSource(BaseModel, frozen=True):
    """Origin of a model; another process can rebuild the same one from it."""

    name: str
    dtype: str
    seed: int

    @property
    def config(self) -> dict[str, Any] | None:
        """LlamaConfig fields of a shape; None for a loaded model."""
        return _LONG | SHAPES[self.name] if self.name in SHAPES else None

    @property
    def path(self) -> str:
        """Folder or hub id of a loaded model's weights."""
        return str(FOLDER) if self.name == "bundled" else self.name


class ModelShape(BaseModel, frozen=True):
    """Sizes that determine a model's cost: dimensions, heads, parameters, bytes of the weights."""

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    parameters: int
    weight_bytes: int


@dataclass(frozen=True)
class BenchModel:
    """A model ready to be measured, and a tokenizer whose ids are in its vocabulary."""

    source: ModelSource
    model: PreTrainedModel
    tokenizer: Any

    @classmethod
    def of(cls, name: str, dtype: str | None, seed: int, device: str | None = None) -> BenchModel:
        """The model `name`: a shape, "bundled", a folder or a hub id.

        Without `dtype`, a shape is bfloat16 on a GPU and float32 on a CPU; a loaded model keeps
        its own. Without `device`, it is on a GPU where there is one.

        Raises KvfoldError for an unknown dtype and for a model that cannot be loaded.
        """
        if dtype is not None and dtype not in DTYPES:
            raise KvfoldError(f"unknown dtype {dtype!r}: choose {', '.join(DTYPES)}")
        if name in SHAPES:
            device = device_or_usual(device)
            usual = "float32" if device == "cpu" else "bfloat16"
            source = ModelSource(name=name, dtype=dtype or usual, seed=seed)
            model = random_model(source, device)
            bundled = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
            return cls(source, model, FoldedTokenizer(bundled, model.config.vocab_size))
        model, tokenizer = load(name, Loading(device=device))
        # transformers' wrapper hides the signature of `to` from type checkers.
        model.to(DTYPES[dtype] if dtype else model.dtype)  # type: ignore[arg-type]
        kind = str(model.dtype).removeprefix("torch.")
        return cls(ModelSource(name=name, dtype=kind, seed=seed), model, tokenizer)

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        config = text_config(self.model)
        heads = config.num_attention_heads
        weights = list(self.model.parameters())
        return ModelShape(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            query_heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=getattr(config, "intermediate_size", 0),
            vocabulary=config.vocab_size,
            parameters=sum(w.numel() for w in weights),
            weight_bytes=sum(w.numel() * w.element_size() for w in weights),
        )

    def tokens(self, batch: int, length: int) -> Tensor:
        """Random token ids `[batch, length]`, a function of the seed and the sizes only."""
        generator = torch.Generator().manual_seed(self.source.seed)
        size = text_config(self.model).vocab_size
        return torch.randint(3, size, (batch, length), generator=generator)


def random_model(source: ModelSource, device: str) -> PreTrainedModel:
    """A Llama of the shape `source.name` with random weights; peers rebuild it from the seed."""
    with torch.device(device):
        config = LlamaConfig(**(source.config or {}))
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[source.dtype], attn_implementation="sdpa"
        )
    fill(model, source.seed)
    model.eval()
    return model


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int) -> None:
    """Random weights of unit gain; transformers' small defaults make attention nearly uniform."""
    torch.manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if weight.dim() > 1:
            weight.normal_(0.0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5)


class FoldedTokenizer:
    """A tokenizer whose ids are taken modulo a model's vocabulary size.

    A random model has no tokenizer of its own; KVzip's repeat prompt only has to be some tokens.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary

    def __call__(self, text: str, **options: Any) -> Any:
        """The wrapped tokenizer's output with `input_ids` folded, a tensor or a list."""
        encoded = self._tokenizer(text, **options)
        ids = encoded["input_ids"]
        if isinstance(ids, Tensor):
            encoded["input_ids"] = ids % self._vocabulary
        else:
            encoded["input_ids"] = [token % self._vocabulary for token in ids]
        return encoded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
