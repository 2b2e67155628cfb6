# SPDX-License-Identifier: Apache-2.0
"""A really trained model, in float32 and float64, and a real text: one of each for all tests.

`REAL` names another model's folder or hub id, or another model that `make real` makes; `REAL_TEXT`
names a book, else the text is the reference of the language that Python ships.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from kvfold.loading import Loading, load
from real_model.models import SMOLLM2, named

transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def folder() -> str:
    """Where the model is."""
    name = os.environ.get("REAL") or SMOLLM2.name
    made = named(name)
    if made is None:
        return name
    if not made.folder.is_dir():
        pytest.skip(f"there is no model in {made.folder}: `make real REAL={made.name}` makes it")
    return str(made.folder)


@pytest.fixture(scope="session")
def loaded(folder: str) -> Any:
    model, tokenizer = load(folder, Loading(dtype="float32", device="cpu"))
    return model, tokenizer


@pytest.fixture(scope="session")
def model(loaded: Any) -> Any:
    return loaded[0]


@pytest.fixture(scope="session")
def tokenizer(loaded: Any) -> Any:
    return loaded[1]


@pytest.fixture(scope="session")
def full_layers(model: Any) -> list[int]:
    """Numbers of the layers that attend to the whole past, which kvfold compresses."""
    kinds = getattr(model.config, "layer_types", None)
    kinds = kinds or ["full_attention"] * model.config.num_hidden_layers
    return [at for at, kind in enumerate(kinds) if kind == "full_attention"]


@pytest.fixture(scope="session")
def slides(model: Any, full_layers: list[int]) -> bool:
    """True if some layers see a window only."""
    return len(full_layers) < model.config.num_hidden_layers


@pytest.fixture(scope="session")
def exact(model: Any) -> Any:
    """The model in float64, its norms too, which transformers computes in float32."""
    made = copy.deepcopy(model).double()
    for parent in list(made.modules()):
        for name, norm in parent.named_children():
            if type(norm).__name__.endswith("RMSNorm"):
                setattr(parent, name, float64_norm(norm))
    return made


def float64_norm(norm: Any) -> nn.Module:
    """The same norm without a detour through float32."""
    of_gemma = type(norm).__name__.startswith("Gemma")  # whose weights are those beside 1
    epsilon = norm.eps if of_gemma else norm.variance_epsilon
    made = nn.RMSNorm(norm.weight.shape, epsilon, dtype=torch.float64)
    made.weight = nn.Parameter(1 + norm.weight) if of_gemma else norm.weight
    sample = torch.randn(norm.weight.shape, dtype=torch.float64)
    torch.testing.assert_close(made(sample), norm(sample), rtol=1e-5, atol=1e-5)
    return made


@pytest.fixture(scope="session")
def truth(exact: Any) -> Any:
    """The same weights, for attention written out."""
    shared = {id(weight): weight for weight in (*exact.parameters(), *exact.buffers())}
    return copy.deepcopy(exact, shared)


@pytest.fixture(scope="session")
def text() -> str:
    book = os.environ.get("REAL_TEXT")
    if book:
        return Path(book).read_text(encoding="utf-8")
    return "\n\n".join(topics.values())


@pytest.fixture(scope="session")
def ids(tokenizer: Any, text: str) -> torch.Tensor:
    """The text's first tokens `[1, 2000]`."""
    found = tokenizer(text[:40_000], add_special_tokens=False, return_tensors="pt").input_ids
    assert found.shape[1] >= 2000, "the text is too short"
    return found[:, :2000]
