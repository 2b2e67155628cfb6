# SPDX-License-Identifier: Apache-2.0
"""Contexts of a tiny model: a document, methods of every kind of store, and what is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import kvfold
from kvfold.cache.layer import CompressedLayer
from kvfold.contexts.files.format import CHECKSUM, CODED, FORMAT, HEADER, VERSION
from kvfold.hf.header import digest, digest_of
from kvfold.observers.chunk_sums import ChunkSumsNeed
from kvfold.store.dense import DenseStore
from kvfold.store.ragged import RaggedStore
from tests.helpers.models import build
from tests.helpers.tokenizers import WORDS

DOCUMENT = " ".join(WORDS[i % 7] if i % 5 else WORDS[i % 9] for i in range(150))
QUESTION = "the sky is"
KIVI = "kivi:bits=4,group=8,residual=32"
TURBO = "turboquant:residual=8"
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
    TURBO: (None, RaggedStore),
    f"adakv + {TURBO}": (80, RaggedStore),
    "recall:residual=8,read=0.2": (None, RaggedStore),
    "recall:residual=8,cold=4": (None, RaggedStore),
    "snapkv + recall:residual=8,read=0.2": (40, RaggedStore),
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
        "barrier",
        "reports",
        "rotation",
        "projection",
        "store",
        "observers",
        "reindexed",
        "sequence",  # its fields are held below
    }
    skipped |= {"_capacities", "_ends"}  # derived from the capacity
    held |= {name: value for name, value in vars(layer).items() if name not in skipped}
    held |= {"seen": layer.sequence.seen, "valid": layer.sequence.valid}
    held |= layer.reports
    held |= {"given": None if layer.reindexed is None else layer.reindexed.given}
    held |= {"sinks": None if layer.reindexed is None else layer.reindexed.count}
    observers, heads = layer.observers, store.keys.shape[1]
    held |= {"queries": observers.window.prompt.attended, "dead": getattr(store, "dead", None)}
    chunks = observers.get(ChunkSumsNeed)
    held |= {} if chunks is None else {"chunks": chunks.chunks.waiting}
    held |= {name: numbers for name, (numbers, _) in observers.numbers().items()}
    if len(store.keys) == 1:
        by_head, whole = observers.save(heads)
        held |= whole | {name: torch.stack(of_heads) for name, of_heads in by_head.items()}
    return held


def compressed(model: Any, tokenizer: Any, spec: str, **options: Any) -> kvfold.Context:
    return kvfold.compress(model, tokenizer, DOCUMENT, spec, KINDS[spec][0], **options)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and bool(
            ((one == other) | (one.isnan() & other.isnan())).all()
        )
    return bool(one == other)


def assert_same(one: kvfold.CompressedCache, other: kvfold.CompressedCache) -> None:
    """Bit for bit."""
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        if not isinstance(mine, CompressedLayer):
            continue
        a, b = state(mine.state), state(theirs.state)
        assert a.keys() == b.keys()
        differing = [name for name in a if not same(a[name], b[name])]
        assert not differing
    assert same(one.phase.prefix, other.phase.prefix)
    assert (one.method, one.budget, one.protect) == (other.method, other.budget, other.protect)
    assert (one.seed, one.per_chunk) == (other.seed, other.per_chunk)


def contents(saved: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file."""
    with safe_open(saved, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()[HEADER])


def forged(path: Path, saved: Path, name: str, tensor: Tensor) -> Path:
    """A copy of a file with another tensor of that name, and its checksum."""
    tensors, header = contents(saved)
    text = json.dumps(header | {"checksums": header["checksums"] | {name: digest_of(tensor)}})
    version = CODED if header.get("codec") else VERSION
    found = {FORMAT: version, HEADER: text, CHECKSUM: digest(version + text)}
    save_file(tensors | {name: tensor}, path, found)
    return path


def rewritten(path: Path, saved: Path, version: str = VERSION, **changes: Any) -> Path:
    """A copy of a file whose header says something else, with the right checksum."""
    tensors, header = contents(saved)
    text = json.dumps(header | changes)
    found = {FORMAT: version, HEADER: text, CHECKSUM: digest(version + text)}
    save_file(tensors, path, found)
    return path
