# SPDX-License-Identifier: Apache-2.0
"""Python calls inside kvfold of one decode step: those of each layer, and those beside the layers.

    python benchmarks/calls_per_step.py                  # snapkv, adakv, h2o, d2o
    python benchmarks/calls_per_step.py --where snapkv   # by function

Counted on the shape "tiny" of `kvfold bench`, with two and with four layers: the same on every
machine. Python 3.11 counts a comprehension as a call, later versions do not.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

import kvfold
from kvfold.bench.models import SHAPES, BenchModel

METHODS = ("snapkv", "adakv", "h2o", "d2o")
PROMPT, BUDGET, BEFORE = 512, 0.5, 3  # steps before the one that is counted
PACKAGE = str(Path(kvfold.__file__).parent)


@torch.no_grad()
def calls(method: str, layers: int) -> Counter[str]:
    """Calls of each function of kvfold, by file and name, in one step of a model of `layers`."""
    with patch.dict(SHAPES, tiny=SHAPES["tiny"] | {"num_hidden_layers": layers}):
        subject = BenchModel.of("tiny", None, seed=0, device="cpu")
    budget = BUDGET if kvfold.parse(method).takes_budget else None
    cache = kvfold.CompressedCache(subject.model, method, budget, tokenizer=subject.tokenizer)
    prompt, *steps, last = subject.tokens(1, PROMPT + BEFORE + 1).split(
        [PROMPT, *[1] * (BEFORE + 1)], 1
    )
    for ids in (prompt, *steps):
        subject.model(ids, past_key_values=cache)
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found[f"{code.co_filename.removeprefix(PACKAGE)[1:]}: {code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        subject.model(last, past_key_values=cache)
    finally:
        sys.setprofile(before)
    return found


def per_step(method: str) -> dict[str, tuple[float, float]]:
    """Calls of each function for each layer, and beside the layers."""
    for layers in (2, 4):
        calls(method, layers)  # fills what functions remember
    two, four = calls(method, 2), calls(method, 4)
    slopes = {name: (four[name] - two[name]) / 2 for name in sorted(two | four)}
    return {name: (slope, two[name] - 2 * slope) for name, slope in slopes.items()}


def total(found: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """Calls of all functions for each layer, and beside the layers."""
    layer, beside = zip(*found.values(), strict=True)
    return sum(layer), sum(beside)


def row(name: str, per_layer: float, beside: float) -> str:
    """A line of the table."""
    return f"{per_layer:10g} {beside:7g}  {name}"


def main() -> None:
    """Prints the calls of each method."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("methods", nargs="*", default=METHODS)
    arguments.add_argument("--where", action="store_true", help="the calls of each function")
    given = arguments.parse_args()
    print(f"{'per layer':>10} {'beside':>7}")
    for method in given.methods:
        found = per_step(method)
        for name, counted in (found if given.where else {}).items():
            print(row(name, *counted))
        print(row(method, *total(found)))


if __name__ == "__main__":
    main()
