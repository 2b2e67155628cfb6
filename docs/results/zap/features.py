# SPDX-License-Identifier: Apache-2.0
"""The gain of a fitted scorer from more features.

`python -m docs.results.zap.features MODEL TEXT.md ...`

Ridge regression as in `kvfold fit`, on passages that it would draw: from what a cache stores of an
entry, from the input of the attention module (KVzap's features), from both, from what is stored of
the entry and its neighbours, and with random projections. Passages that chose the penalty are not
reported on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.fitted.fitting.features import PROJECTIONS, Features, RidgeSums
from kvfold.fitted.fitting.passages import drawn
from kvfold.fitted.fitting.scorer import BUDGETS, PENALTIES, HeldOut, compare, mean_of, parts_of
from kvfold.fitted.fitting.target import ScoredText, scored, target_method
from kvfold.loading import Loading, load

# A text's stored entries and inputs [L, T, D_model] → features [L, H, T, F], the last of them 1.
Kind = Callable[[ScoredText, Tensor], Tensor]
Read = tuple[ScoredText, Tensor]


def stored(text: ScoredText, inputs: Tensor) -> Tensor:
    """Un-rotated key, value and their norms."""
    return text.features


def inputs_alone(text: ScoredText, inputs: Tensor) -> Tensor:
    """Input of the attention module, and its norm."""
    made = torch.cat([inputs, inputs.norm(dim=-1, keepdim=True)], -1)[:, None]
    return torch.cat([made.expand(-1, text.features.shape[1], -1, -1), text.features[..., -1:]], -1)


def both(text: ScoredText, inputs: Tensor) -> Tensor:
    """Input of the attention module, and what is stored."""
    return torch.cat([inputs_alone(text, inputs)[..., :-1], text.features], -1)


def neighbours(text: ScoredText, inputs: Tensor) -> Tensor:
    """Stored features of the entry, of the one before and of the one behind."""
    own = text.features[..., :-1]
    return torch.cat([own.roll(1, 2), own.roll(-1, 2), text.features], -1)


KINDS: dict[str, Kind] = {
    "stored": stored,
    "attention input": inputs_alone,
    "attention input and stored": both,
    "stored, with neighbours": neighbours,
}


def read(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, passages: Sequence[str]
) -> Iterator[Read]:
    """Each passage's entries with KVzip's scores, and the inputs of all attention modules."""
    method, taken = target_method("kvzip"), list[list[Tensor]]()

    def take(layer: int) -> Callable[..., None]:
        return lambda module, given, named: taken[layer].append(named["hidden_states"][0].float())

    attention = [each.self_attn for each in model.get_decoder().layers]
    hooks = [
        module.register_forward_pre_hook(take(layer), with_kwargs=True)
        for layer, module in enumerate(attention)
    ]
    for passage in passages:
        taken[:] = [[] for _ in attention]
        text = scored(model, tokenizer, passage, method)
        tokens = text.features.shape[2]  # what is repeated comes behind them
        yield text, torch.stack([torch.cat(each)[:tokens] for each in taken])
    for hook in hooks:
        hook.remove()


def fitted(kind: Kind, projections: int, parts: tuple[list[Read], ...]) -> HeldOut:
    """The comparison on the passages of the report, with the penalty that others chose."""

    def made(part: list[Read]) -> Iterator[ScoredText]:
        return (replace(text, features=kind(text, inputs)) for text, inputs in part)

    learned, choosing, reporting = parts
    features = Features.of_first(next(made(learned)), seed=0)
    layers, heads, size = features.scales.shape
    sums = RidgeSums.empty(layers * heads, size + max(PROJECTIONS))
    for text in made(learned):
        targets = text.targets
        for layer in range(layers):
            sums.add(layer * heads, features.of_layer(text, layer), targets[layer])
    chosen = torch.arange(size + projections)

    def compared(penalty: float, part: list[Read]) -> HeldOut:
        weights = sums.solve(chosen, penalty, free=size - 1).unflatten(0, (layers, heads))
        return mean_of(
            [compare(features.expected(text, weights, chosen), text) for text in made(part)]
        )

    best = max(PENALTIES, key=lambda penalty: compared(penalty, choosing).mean_overlap)
    return compared(best, reporting)


def main(
    model: str,
    texts: list[Path],
    passages: Annotated[int, typer.Option()] = 24,
    words: Annotated[int, typer.Option()] = 400,
) -> None:
    """Prints a row for each kind of features."""
    network, tokenizer = load(model, Loading())
    made = drawn([path.read_text(encoding="utf-8") for path in texts], passages, words, 0)
    with torch.no_grad():
        parts = tuple(list(read(network, tokenizer, part)) for part in parts_of(made))
        table = Table("features", "projections", *map(str, BUDGETS), "mass", "squared error")
        for (name, kind), projections in itertools.product(KINDS.items(), (0, max(PROJECTIONS))):
            held_out = fitted(kind, projections, parts)
            overlaps = [f"{held_out.overlap[part]:.3f}" for part in BUDGETS]
            mass = f"{held_out.mass[BUDGETS[-1]]:.3f}"
            table.add_row(name, str(projections), *overlaps, mass, f"{held_out.loss:.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
