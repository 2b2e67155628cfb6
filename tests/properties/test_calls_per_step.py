# SPDX-License-Identifier: Apache-2.0
"""Python calls of one decode step, per layer and beside the layers: counted, not timed."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Cache, DynamicCache, LlamaConfig

import kvfold
from benchmarks import calls_per_step
from kvfold.kernels import dispatch

# Older transformers make up to three calls more in `Cache.update`.
COUNTED_WITH = Version("5.23.0")
STOCK = 8  # calls per layer of transformers' own cache and SDPA attention, as first counted

# The most calls per layer, those of the stock path among them.
LIMITS = {
    "snapkv": 15,
    "snapkv + every": 16,
    "knorm": 15,
    "adakv": 33,
    "h2o": 32,
    "tova": 32,
    "d2o": 76,
    "kivi": 101,  # in C++ one call, of many arguments
}


def model_of(layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config).eval()


MODELS = {layers: model_of(layers) for layers in (3, 6)}


@torch.no_grad()
def calls_of_a_step(layers: int, spec: str | None, rows: int = 1) -> int:
    """Python functions that are called in one decode step after prompts of 300 tokens."""
    model = MODELS[layers]
    cache: Cache = DynamicCache() if spec is None else compressed(model, spec)
    ids = torch.randint(5, 64, (1, 310), generator=torch.Generator().manual_seed(0))
    ids = ids.expand(rows, -1)
    model(ids[:, :300], past_key_values=cache)
    for token in ids[:, 300:304].split(1, 1):
        model(token, past_key_values=cache)
    count = 0

    def counting(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # what it finalizes would be counted
    sys.setprofile(counting)
    try:
        model(ids[:, 304:305], past_key_values=cache)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def compressed(model: Any, spec: str) -> kvfold.CompressedCache:
    method = kvfold.parse(spec)
    return kvfold.CompressedCache(model, method, 0.25 if method.takes_budget else None)


def calls_per_layer(spec: str | None) -> float:
    few, many = sorted(MODELS)
    calls_of_a_step(few, spec)  # fills what functions remember, so that neither count has it
    return (calls_of_a_step(many, spec) - calls_of_a_step(few, spec)) / (many - few)


@pytest.mark.skipif(
    Version(transformers.__version__) < COUNTED_WITH, reason=f"counted with {COUNTED_WITH}"
)
@pytest.mark.parametrize("spec", LIMITS)
def test_a_decode_step_takes_few_calls(spec: str, record_property: Any) -> None:
    given = "kivi:group=8" if spec == "kivi" else spec
    calls = calls_per_layer(given) - calls_per_layer(None) + STOCK
    record_property("calls per layer", calls)
    print(f"{spec}: {calls:.0f} calls per layer")
    assert calls <= LIMITS[spec]


# The most calls inside kvfold of a whole step, beside those of its layers.
BESIDE = {"snapkv": 22, "adakv": 22, "h2o": 41, "d2o": 37}


@pytest.mark.parametrize("method", BESIDE)
def test_a_decode_step_takes_few_calls_beside_its_layers(method: str) -> None:
    _, beside = calls_per_step.total(calls_per_step.per_step(method))
    assert beside <= BESIDE[method]


# The most operations in a layer's step, over stock transformers': with C++ on a CPU, and without.
OPERATIONS = {
    "native": {"snapkv": 1.03, "adakv": 1.07, "h2o": 1.07, "d2o": 1.49},
    "torch": {"snapkv": 1.03, "h2o": 1.19, "d2o": 1.66},
}


def operations_per_layer(method: str) -> float:
    return calls_per_step.total(calls_per_step.per_step(method, calls_per_step.operations))[0]


@pytest.mark.skipif(
    Version(transformers.__version__) < COUNTED_WITH, reason=f"counted with {COUNTED_WITH}"
)
@pytest.mark.parametrize(
    ("path", "method"), [(path, method) for path, most in OPERATIONS.items() for method in most]
)
def test_a_decode_step_takes_few_operations(
    path: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "torch":
        monkeypatch.setattr(dispatch, "library", lambda: None)
    elif dispatch.library() is None:
        pytest.skip("no C++ compiler")
    ours, stock = operations_per_layer(method), operations_per_layer(calls_per_step.STOCK)
    assert 0 < stock < ours <= OPERATIONS[path][method] * stock


QUANTIZED = ["kivi:group=8", "snapkv + kivi:group=8", "adakv + kivi:group=8", "adakv + turboquant"]


@pytest.mark.cases(2)
@pytest.mark.parametrize("spec", [*QUANTIZED, "adakv"])
def test_calls_do_not_grow_with_the_batch(spec: str) -> None:
    """Steps of a GPU take as long as Python takes to launch them."""
    for rows in (2, 16):
        calls_of_a_step(3, spec, rows)  # fills what functions remember
    assert calls_of_a_step(3, spec, 16) == calls_of_a_step(3, spec, 2)


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def operations_of_a_step(spec: str, rows: int) -> int:
    """Operations of one decode step after prompts of 300 tokens."""
    model, ids = MODELS[3], torch.arange(5, 45).repeat(8)[None, :305].expand(rows, -1)
    cache = compressed(model, spec)
    model(ids[:, :300], past_key_values=cache)
    for token in ids[:, 300:304].split(1, 1):
        model(token, past_key_values=cache)
    with Operations() as counting:
        model(ids[:, 304:], past_key_values=cache)
    return counting.count


@pytest.mark.parametrize("spec", QUANTIZED)
def test_operations_do_not_grow_with_the_batch(spec: str) -> None:
    """Nor with the KV heads: none loops over segments."""
    operations_of_a_step(spec, 2)  # fills what functions remember
    assert operations_of_a_step(spec, 16) == operations_of_a_step(spec, 2)
