# SPDX-License-Identifier: Apache-2.0
"""Python calls inside kvfold of one decode step: those of each layer, and those beside the layers.

    python benchmarks/calls_per_step.py                  # snapkv, adakv, h2o, d2o
    python benchmarks/calls_per_step.py --where snapkv   # by function
    python benchmarks/calls_per_step.py --operations     # torch's operations, beside stock's

A host launches a kernel for each operation, whatever its size: where it is slower than the device,
their number is the step's time. "stock" is transformers' DynamicCache.

Counted on the shape "tiny" of `kvfold bench`, with two and with four layers: the same on every
machine. Python 3.11 counts a comprehension as a call, later versions do not.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, DynamicCache

import kvfold
from kvfold.bench.models import SHAPES, BenchModel
from kvfold.kernels.native import library as native

METHODS, STOCK = ("snapkv", "adakv", "h2o", "d2o"), "stock"
PROMPT, BUDGET, BEFORE = 512, 0.5, 3  # steps before the one that is counted
PACKAGE = str(Path(kvfold.__file__).parent)


Count = Callable[[], AbstractContextManager[Counter[str]]]


@contextmanager
def python_calls() -> Iterator[Counter[str]]:
    """Counts calls of each function of kvfold, by file and name."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found[f"{code.co_filename.removeprefix(PACKAGE)[1:]}: {code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def operations() -> Iterator[Counter[str]]:
    """Counts torch's operations, by name, and calls of kvfold's C++."""
    of_cpp, counting = native.library, _Operations()

    def noted() -> Any:
        counting.found["C++"] += 1
        return of_cpp()

    with patch.object(native, "library", noted), counting:  # each call asks for it
        yield counting.found


@torch.no_grad()
def counted(method: str, layers: int, count: Count) -> Counter[str]:
    """What `count` finds in one step of a model of `layers`."""
    with patch.dict(SHAPES, tiny=SHAPES["tiny"] | {"num_hidden_layers": layers}):
        subject = BenchModel.of("tiny", None, seed=0, device="cpu")
    cache: Cache = DynamicCache()
    if method != STOCK:
        budget = BUDGET if kvfold.parse(method).takes_budget else None
        cache = kvfold.CompressedCache(subject.model, method, budget, tokenizer=subject.tokenizer)
    prompt, *steps, last = subject.tokens(1, PROMPT + BEFORE + 1).split(
        [PROMPT, *[1] * (BEFORE + 1)], 1
    )
    for ids in (prompt, *steps):
        subject.model(ids, past_key_values=cache)
    with count() as found:
        subject.model(last, past_key_values=cache)
    return found


def per_step(method: str, count: Count = python_calls) -> dict[str, tuple[float, float]]:
    """Calls of each function for each layer, and beside the layers."""
    for layers in (2, 4):
        counted(method, layers, count)  # fills what functions remember
    two, four = counted(method, 2, count), counted(method, 4, count)
    slopes = {name: (four[name] - two[name]) / 2 for name in sorted(two | four)}
    return {name: (slope, two[name] - 2 * slope) for name, slope in slopes.items()}


def total(found: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """Calls of all functions for each layer, and beside the layers."""
    return sum(layer for layer, _ in found.values()), sum(beside for _, beside in found.values())


def row(name: str, per_layer: float, beside: float) -> str:
    """A line of the table."""
    return f"{per_layer:10g} {beside:7g}  {name}"


def main() -> None:
    """Prints the calls of each method."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("methods", nargs="*", default=METHODS)
    arguments.add_argument("--where", action="store_true", help="the calls of each function")
    arguments.add_argument("--operations", action="store_true", help="torch's, not Python's")
    given = arguments.parse_args()
    count = operations if given.operations else python_calls
    stock = total(per_step(STOCK, count))[0]
    print(f"{'per layer':>10} {'beside':>7}")
    for method in [*([STOCK] if given.operations else []), *given.methods]:
        found = per_step(method, count)
        for name, of_name in (found if given.where else {}).items():
            print(row(name, *of_name))
        layer, beside = total(found)
        over = f", {layer / stock:.2f} x stock's" if stock else ""
        print(row(f"{method}{over}", layer, beside))


if __name__ == "__main__":
    main()
