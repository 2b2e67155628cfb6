# SPDX-License-Identifier: Apache-2.0
"""Allocation by given parts of layers or heads: from a file by hand, or profiled (LU-KV)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.fitted.numbers import Fitted, FittedFile
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import ROUNDING, largest_remainder
from kvfold.reading import read_text, stable_path

FAINTEST = 1e-9  # weight of a head of part 0, beside 1: it takes what all others have no room for


@dataclass(frozen=True, eq=False)
class Curve(Fitted):
    """Parts of the entries that heads keep: `parts [R, L, H]` at the `budgets [R]`, ascending.

    `[R, L, 1]` are parts of layers, the same for all heads.
    """

    method: ClassVar[str] = "curve"
    command: ClassVar[str] = "kvfold fit MODEL TEXTS --scorer curve"
    bundled: ClassVar[str] = "curve.safetensors"
    axes: ClassVar[dict[str, str]] = {"budgets": "R", "parts": "RLH"}
    budgets: Tensor
    parts: Tensor

    @property
    def per_head(self) -> bool:
        """True if heads of a layer may differ."""
        return self.parts.shape[2] > 1

    def at(self, budget: float) -> Tensor:
        """Parts `[L, H]`, float64, at a `budget`; between two rows interpolated, else the nearest.

        Only their proportions matter.
        """
        budgets, parts = self.budgets.double(), self.parts.double()
        above = int((budgets < budget).sum())
        if above in (0, len(budgets)):
            return parts[min(above, len(budgets) - 1)]
        low, high = budgets[above - 1], budgets[above]
        weight = (budget - low) / (high - low)
        return parts[above - 1] * (1 - weight) + parts[above] * weight

    def check(self, file: str, layers: int, heads: int | None) -> None:
        """Raises KvfoldError, naming the `file`, unless this serves a model of that shape."""
        rows, of_layers, of_heads = self.parts.shape
        problem = None
        if of_layers != layers:
            problem = f"parts of {of_layers} layers, and this model compresses {layers}"
        elif of_heads != 1 and heads is not None and of_heads != heads:
            problem = f"parts of {of_heads} KV heads, and a layer of this model has {heads}"
        elif bool((self.budgets.diff() <= 0).any()):
            problem = f"budgets of its {rows} rows that do not ascend"
        elif not bool(((self.parts >= 0) & (self.parts <= 1)).all()):
            problem = "parts that are not from 0 to 1"
        elif not bool((self.parts.flatten(1).sum(-1) > 0).all()):
            problem = "a row that keeps nothing anywhere"
        if problem is not None:
            raise KvfoldError(f"{file} has {problem}: give the part kept of each layer, or KV head")


@dataclass(frozen=True)
class PartsFile:
    """A file of parts that a user wrote, JSON or safetensors."""

    file: str

    def read(self) -> Curve:
        """Its parts; raises KvfoldError for a file that is missing or holds something else."""
        if self.file == "none":
            raise KvfoldError("sizes needs a file of parts: name it, sizes:file=FILE")
        try:
            found = _tensors(Path(self.file))
            given = found["parts"]
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as problem:
            raise KvfoldError(
                f"cannot read {self.file} as parts of layers or heads ({problem}): write a JSON "
                'list of L numbers, or of L lists of H, or {"budgets": R numbers, "parts": R such '
                "lists}; or a safetensors file with these tensors"
            ) from problem
        layers = given[:, None] if given.dim() == 1 else given
        parts = layers[None] if layers.dim() == 2 else layers
        budgets = found.get("budgets", parts.mean().view(1) if parts.numel() else parts)
        if parts.dim() != 3 or not parts.numel() or budgets.shape != parts.shape[:1]:
            raise KvfoldError(
                f"{self.file} has parts of shape {list(given.shape)}: [L], [L, H] or [R, L, H] "
                "with R budgets is wanted"
            )
        return Curve(budgets, parts)


@dataclass(frozen=True)
class LayerParts:
    """The budget of each layer: ratios up to 1, or numbers of tokens, which are ints."""

    own: tuple[float, ...]

    @property
    def file(self) -> str:
        """The name in messages, instead of a file's."""
        return f"a budget of {len(self.own)} numbers"

    @property
    def counted(self) -> bool:
        """True for numbers of tokens."""
        return all(isinstance(each, int) for each in self.own)

    @property
    def mean(self) -> float:
        """The budget of all layers together; tokens are rounded up."""
        mean = sum(self.own) / len(self.own)
        return math.ceil(mean) if self.counted else mean

    def read(self) -> Curve:
        """Their proportions, for other budgets than their mean."""
        parts = torch.tensor(self.own, dtype=torch.float64)
        parts = parts / parts.max() if self.counted else parts
        return Curve(parts.mean().view(1), parts.view(1, -1, 1))


PartsSource = FittedFile | PartsFile | LayerParts


def _tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        with stable_path(path) as place:
            return {name: each.double() for name, each in load_file(place).items()}
    given: Any = json.loads(read_text(path))
    given = given if isinstance(given, dict) else {"parts": given}
    return {name: torch.tensor(each, dtype=torch.float64) for name, each in given.items()}


def bounds(observation: Observation) -> Tensor:
    """Fewest and most entries `[B, H, 2]` that each head can keep: forced ones, and all."""
    candidates = observation.candidates
    if candidates is None:
        stored = (observation.positions >= 0).sum(-1)
        return torch.stack([torch.zeros_like(stored), stored], -1)
    return torch.stack([(candidates == torch.inf).sum(-1), (candidates > -torch.inf).sum(-1)], -1)


def by_parts(
    statistics: list[Tensor], budget: Tensor, seen: Tensor, *, parts: Curve
) -> list[Tensor]:
    """Sizes of each layer, `[B]` or `[B, H]`, in proportion to the parts at the budget.

    `statistics` are `bounds`; `budget [B]` is the mean size, possibly fractional, `seen [B]` the
    tokens. Sizes add up to the budget of all heads, rounded down once; see `proportional_within`.
    """
    rows, per_head = [], parts.per_head
    for row, (size, tokens) in enumerate(zip(budget.tolist(), seen.tolist(), strict=True)):
        weights = parts.at(size / max(1, tokens)).flatten()
        if per_head:
            least, most = torch.cat([each[row].cpu() for each in statistics]).double().unbind(-1)
        else:
            least, most = torch.zeros_like(weights), torch.full_like(weights, max(tokens, size))
        total = int(size * len(weights) + ROUNDING)
        rows.append(proportional_within(weights, total, least, most))
    sizes = torch.tensor(rows, device=seen.device).view(len(rows), len(statistics), -1)
    each_layer = (sizes if per_head else sizes[..., 0]).unbind(1)
    return [size.to(of.device) for size, of in zip(each_layer, statistics, strict=True)]


def by_own_budgets(
    statistics: list[Tensor], budget: Tensor, seen: Tensor, *, parts: Curve, own: LayerParts
) -> list[Tensor]:
    """Sizes `[B]` of each layer: its own budget, where the cache's is their mean.

    Otherwise as `by_parts`.
    """
    made = by_parts(statistics, budget, seen, parts=parts)
    for layer, amount in enumerate(own.own):
        # As `Budget.per_layer` rounds a ratio
        exact = torch.full_like(budget, amount) if own.counted else budget * (amount / own.mean)
        size = (exact + ROUNDING).floor().long().to(made[layer].device)
        mean = budget == own.mean if own.counted else budget <= seen.double() * own.mean + ROUNDING
        made[layer] = torch.where(mean.to(size.device), size, made[layer])
    return made


def proportional_within(weights: Tensor, total: int, least: Tensor, most: Tensor) -> list[int]:
    """Integers of that `total` in proportion to `weights [n]`, each from `least` to `most`.

    What a bound adds or takes is shared by the others in proportion; one largest remainder rounds
    all. A total out of the bounds' reach gives the bounds. All are float64.
    """
    total = min(max(total, int(least.sum())), int(most.sum()))
    weights = (weights / weights.max()).clamp(min=FAINTEST)
    low, high = 0.0, float((most / weights).max())
    for _ in range(128):
        middle = (low + high) / 2
        enough = float((weights * middle).clamp(least, most).sum()) >= total
        low, high = (low, middle) if enough else (middle, high)
    return largest_remainder((weights * high).clamp(least, most).tolist(), total)
