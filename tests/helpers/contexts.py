# SPDX-License-Identifier: Apache-2.0
"""Contexts of a tiny model: a document, methods of every kind of store, and what is stored."""

from __future__ import annotations

from typing import Any

import torch

from kvfold.store.dense import DenseStore
from kvfold.store.ragged import RaggedStore
from tests.helpers.models import build
from tests.helpers.tokenizers import WORDS

DOCUMENT = " ".join(WORDS[i % 7] if i % 5 else WORDS[i % 9] for i in range(150))
QUESTION = "the sky is"
KIVI = "kivi:bits=4,group=8,residual=32"
# Specification, budget, store of the last layer.
KINDS = {
    "full": (None, DenseStore),
    "snapkv": (40, DenseStore),
    "h2o": (60, DenseStore),
    "d2o": (60, DenseStore),
    "d2o:similarity=independent": (60, DenseStore),
    "streaming_llm": (40, DenseStore),
    "kvzip": (40, RaggedStore),
    "adakv": (40, RaggedStore),
    KIVI: (None, RaggedStore),
    f"snapkv + {KIVI}": (80, RaggedStore),
    "think": (None, RaggedStore),
    "minicache": (None, RaggedStore),
    "streaming_llm_original:decode=append + minicache": (40, RaggedStore),
    "dbudgetkv": (None, DenseStore),
    "auto": (None, RaggedStore),
}


def new_model(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model = build(family, dtype, vocab_size=12, **changes)
    # Answers of words only, which are the same tokens when they are read again.
    model.generation_config.suppress_tokens = [0, 1, 2]
    return model


def state(layer: Any) -> dict[str, Any]:
    """Everything that a compressed layer holds, tensors and numbers."""
    store = layer.stored()
    held: dict[str, Any] = {
        f"store.{name}.{i}": tensor
        for name, tensors in store.named().items()
        for i, tensor in enumerate(tensors)
    }
    skipped = {
        "plan",
        "phase",
        "waiting",
        "rotation",
        "store",
        "query_window",
        "reindexed",
        "logical",
    }
    skipped |= {"_capacities", "_ends"}  # derived from the capacity
    held |= {name: value for name, value in vars(layer).items() if name not in skipped}
    held |= {"seen": layer.sequence.seen, "valid": layer.sequence.valid}
    held |= {"given": None if layer.reindexed is None else layer.reindexed.given}
    held |= {"sinks": None if layer.reindexed is None else layer.reindexed.count}
    held |= {"queries": layer.query_window.attended, "dead": getattr(store, "dead", None)}
    return held
