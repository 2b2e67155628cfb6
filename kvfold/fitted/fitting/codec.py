# SPDX-License-Identifier: Apache-2.0
"""`kvfold.fit_codec`: the principal directions of a model's keys and values, for `codec="kvtc"`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.codecs.basis import Basis
from kvfold.errors import UnsupportedModel
from kvfold.fitted.fitting.error_costs import error_costs
from kvfold.fitted.fitting.queries import LayerRead, check_inputs, layers_read
from kvfold.fitted.of_model import Fit
from kvfold.hf.arguments import checked_arguments

LEAST_TEXTS = 2  # one to fit, one to report on
HELD_OUT = 6  # every sixth text is reported on
SINKS = 4  # first tokens of a text, whose keys and values are like no others
MOST_NUMBERS = 6144  # of the layers of one block: a covariance of 300 MB
ENERGY = 0.998  # of keys and values in their metrics, in the directions kept, if more than
FEW = 1024
LEAST = 0.1  # of all heads' mean cost, which each head's cost is raised by
SIDES = ("key", "value")


@dataclass(frozen=True)
class CodecFit(Fit):
    """A fitted basis: its file, and how much of held-out keys and values it can hold.

    `ranks` are the directions of keys and of values, `left_out` the parts of their energy, as the
    codec weighs it, that lie in no direction; of `texts`, those held out are `held_out`.
    """

    held_out: int
    ranks: tuple[int, int]
    left_out: tuple[float, float]

    @property
    def report(self) -> str:
        """The fit's measurements, in words."""
        (keys, values), (of_keys, of_values) = self.left_out, self.ranks
        return (
            f"{of_keys} directions of keys and {of_values} of values leave out {keys:.1%} and "
            f"{values:.1%} of {self.held_out} held-out passages"
        )


@checked_arguments
def fit_codec(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    out: str | Path,
    *,
    note: Callable[[str], None] = lambda line: None,
) -> CodecFit:
    """Fits the basis of `codec="kvtc:file=…"`: directions of keys before RoPE, and of values.

    Keys and values are measured by what errors in them cost the predictions of later tokens. Each
    text is read, and its end once more on its beginning's cache, and then gone: products are added
    up. Every sixth text is held out. `note` is called with a line of progress after each.

    Raises KvfoldError for fewer than two texts, for a text of less than 64 tokens or beyond the
    model's trained length, and if no file can be written to `out`; UnsupportedModel for a model
    that caches latents, whose keys cannot be rotated back, or whose layers differ in their KV
    heads.
    Source: Staniszewski and Łańcucki, section 3 (arXiv 2511.01815); the metrics are kvfold's.
    """
    check_inputs(model, tokenizer, texts, LEAST_TEXTS, out)
    apart = set(range(HELD_OUT - 1, len(texts), HELD_OUT)) or {len(texts) - 1}
    held_out = [text for number, text in enumerate(texts) if number in apart]
    fitted = [text for number, text in enumerate(texts) if number not in apart]
    sums: Sums | None = None
    for number, text in enumerate(fitted):
        layers = list(layers_read(model, tokenizer, text))
        sums = sums or Sums.like(layers)
        sums.add(layers)
        rotations = {each.rotation.layer: each.rotation for each in layers}
        del layers  # their queries are large
        sums.costs += error_costs(model, tokenizer, text, rotations, SINKS)
        note(f"{number + 1} of {len(texts)} passages")
    assert sums is not None
    note("principal directions")
    basis = sums.basis()
    energy = torch.zeros(2, 2, dtype=torch.float64)
    for number, text in enumerate(held_out, len(fitted) + 1):
        energy += _energy(basis, list(layers_read(model, tokenizer, text)))
        note(f"{number} of {len(texts)} passages")
    keys, values = (1 - energy[:, 0] / energy[:, 1]).clamp(min=0).tolist()
    ranks = basis.key_directions.shape[-1], basis.value_directions.shape[-1]
    measured = {"ranks": ranks, "left_out": (keys, values), "held_out": len(held_out)}
    return CodecFit.written(out, basis, model, texts, Basis.method, measured)


@dataclass
class Sums:
    """Sums over tokens, float64; of keys `[0]` and values `[1]`.

    Args:
        totals: `[2, L·H·D]`.
        products: `[2, blocks, p, p]` of the numbers of each block of layers.
        costs: of errors `[2, L, H, D, D]`.
        tokens: their number.
    """

    totals: Tensor
    products: Tensor
    costs: Tensor
    tokens: int = 0

    @classmethod
    def like(cls, layers: Sequence[LayerRead]) -> Sums:
        """No tokens yet, of a model with such layers.

        Raises UnsupportedModel for layers that differ in their KV heads.
        """
        shapes = {(*each.keys.shape[::2], *each.values.shape[::2]) for each in layers}
        heads, size, *of_values = shapes.pop()
        if shapes or of_values != [heads, size]:
            raise UnsupportedModel(
                "the layers, or keys and values, differ in their heads, and one basis is for all: "
                'save contexts of this model with codec="zstd"'
            )
        count = len(layers)
        together = next(
            n
            for n in range(count, 0, -1)
            if count % n == 0 and (n == 1 or n * heads * size <= MOST_NUMBERS)
        )
        block = together * heads * size
        return cls(
            torch.zeros(2, count * heads * size, dtype=torch.float64),
            torch.zeros(2, count // together, block, block, dtype=torch.float64),
            torch.zeros(2, count, heads, size, size, dtype=torch.float64),
        )

    def add(self, layers: Sequence[LayerRead]) -> None:
        """Adds the tokens of a text."""
        for side, numbers in enumerate(_numbers(layers)):
            self.totals[side] += numbers.double().sum(0)
            for block, part in enumerate(numbers.split(self.products.shape[-1], -1)):
                self.products[side, block] += part.T @ part
        self.tokens += layers[0].keys.shape[1] - SINKS

    def basis(self) -> Basis:
        """The basis of all tokens so far."""
        found = dict[str, Tensor]()
        for side, name in enumerate(SIDES):
            metrics = _metrics(self.costs[side])
            means = self.totals[side] / self.tokens
            blocks = len(self.products[side])
            parts = metrics.flatten(0, 1).chunk(blocks), means.view(blocks, -1)
            measured = torch.stack(
                [
                    _measured(products / self.tokens - of_block.outer(of_block), own)
                    for products, own, of_block in zip(self.products[side], *parts, strict=True)
                ]
            )
            found |= {
                f"{name}_means": means.view(metrics.shape[:3]).float(),
                f"{name}_metrics": metrics.float(),
                f"{name}_directions": _directions(measured).half(),
                f"{name}_head_directions": _of_heads(measured, metrics.shape[:3]),
            }
        return Basis(**found)


def _metrics(costs: Tensor) -> Tensor:
    """Square roots `[L, H, D, D]` of costs, in units of about their mean.

    Each channel's cost is first raised by its head's mean: other texts need other channels.
    """
    means = costs.diagonal(dim1=-2, dim2=-1).mean(-1)
    even = means + LEAST * means.mean() + torch.finfo(torch.float32).tiny
    raised = costs + even[..., None, None] * torch.eye(costs.shape[-1], dtype=costs.dtype)
    values, vectors = torch.linalg.eigh(raised / even.mean())
    roots: Tensor = (vectors * values.sqrt()[..., None, :]) @ vectors.mT
    return roots


def _measured(covariance: Tensor, metrics: Tensor) -> Tensor:
    """Covariance `[p, p]`, float32, of the numbers of heads in their metrics `[heads, D, D]`."""
    size = metrics.shape[-1]
    rows = metrics @ covariance.unflatten(0, (-1, size))  # [heads, D, p]
    both: Tensor = (metrics @ rows.flatten(0, 1).mT.unflatten(0, (-1, size))).flatten(0, 1)
    return both.float()


def _directions(covariances: Tensor) -> Tensor:
    """The directions `[blocks, p, R]` that hold `ENERGY` of each block, and at least a `FEW`."""
    values, vectors = torch.linalg.eigh(covariances)
    held: Tensor = values.flip(-1).clamp(min=0).cumsum(-1)
    rank = int((held < ENERGY * held[:, -1:]).sum(-1).max()) + 1
    directions: Tensor = vectors.flip(-1)[..., : max(rank, FEW)]
    return directions


def _of_heads(covariances: Tensor, shape: Sequence[int]) -> Tensor:
    """All directions `[L, H, D, D]` of each KV head alone."""
    layers, heads, size = shape
    parts = covariances.unflatten(1, (-1, size)).unflatten(3, (-1, size))
    own = parts.diagonal(dim1=1, dim2=3).movedim(-1, 1)  # [blocks, heads of a block, D, D]
    directions: Tensor = torch.linalg.eigh(own).eigenvectors.flip(-1)
    return directions.reshape(layers, heads, size, size)


def _numbers(layers: Sequence[LayerRead]) -> Iterator[Tensor]:
    """Keys before RoPE, and values, of a text behind its sinks: `[n, L·H·D]`, float32."""
    keys = [each.unrotated(each.keys) for each in layers]
    for entries in (keys, [each.values.float() for each in layers]):
        yield torch.cat([e[:, SINKS:].transpose(0, 1).flatten(1).cpu() for e in entries], -1)


def _energy(basis: Basis, layers: Sequence[LayerRead]) -> Tensor:
    """Energies `[2, 2]` of keys and of values of a text: in the directions, and all."""
    found = []
    for transform, numbers in zip((basis.keys, basis.values), _numbers(layers), strict=True):
        heads = numbers.split(transform.means.shape[-1], -1)
        inside = sum(float(each.square().sum()) for each in transform.forward(heads, "joint"))
        whole = sum(float(each.square().sum()) for each in transform.measured(heads))
        found.append([inside, whole])
    return torch.tensor(found, dtype=torch.float64)
