# SPDX-License-Identifier: Apache-2.0
"""`kvfold.fit_filters`: the directions of each KV head's queries, for `qfilter`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.fitted.fitting.queries import check_inputs, layers_read, noted
from kvfold.fitted.of_model import Fit
from kvfold.hf.arguments import checked_arguments
from kvfold.methods.stages.score.filters import Filters

LEAST_TEXTS = 2  # one for each half


@dataclass(frozen=True)
class FilterFit(Fit):
    """Fitted filters: their file, and how much they depend on the texts.

    `agreement` is the mean cosine, over KV heads, of the filters of every other text with those of
    the rest, and `least_agreement` that of the head where it is lowest.
    """

    agreement: float
    least_agreement: float

    @property
    def report(self) -> str:
        """The fit's measurements, in words."""
        return (
            f"filters of half of the passages beside those of the others: cosine "
            f"{self.agreement:.3f}, lowest {self.least_agreement:.3f}"
        )


@checked_arguments
def fit_filters(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    out: str | Path,
    *,
    note: Callable[[str], None] = lambda line: None,
) -> FilterFit:
    """Fits the filters of `qfilter:file=…`, one direction for each layer and KV head.

    A filter is the first right singular vector of the queries `[T, D]` after RoPE, not centred,
    with the sign of their mean; heads of a group give their mean. Each text is read once, and then
    gone: products of queries are added up. `note` is called with a line of progress after each.

    Raises KvfoldError for fewer than two texts, for a text of less than 64 tokens or beyond the
    model's trained length, and if no file can be written to `out`; UnsupportedModel for a model
    that caches latents.
    Source: Godey et al., section 3 (arXiv 2503.02812).
    """
    check_inputs(model, tokenizer, texts, LEAST_TEXTS, out)
    halves: list[QuerySums | None] = [None, None]
    for number, text in enumerate(noted(texts, note)):
        read = list(layers_read(model, tokenizer, text))
        sums = QuerySums.of([layer.queries for layer in read])
        before = halves[number % 2]
        halves[number % 2] = sums if before is None else before + sums
    heads = read[0].keys.shape[0]
    first, second = halves
    assert first is not None and second is not None
    alike = torch.cosine_similarity(first.filters(heads), second.filters(heads), dim=-1)
    filters = Filters((first + second).filters(heads).float())
    measured = {"agreement": float(alike.mean()), "least_agreement": float(alike.min())}
    return FilterFit.written(out, filters, model, texts, Filters.method, measured)


@dataclass(frozen=True)
class QuerySums:
    """Sums over queries q: `squares [L, Hq, D, D]` of q·qᵀ, `total [L, Hq, D]` of q; float64."""

    squares: Tensor
    total: Tensor

    @classmethod
    def of(cls, layers: Sequence[Tensor]) -> QuerySums:
        """Sums over the queries `[Hq, T, D]` of each layer."""
        queries = [layer.double().cpu() for layer in layers]
        return cls(
            torch.stack([each.mT @ each for each in queries]),
            torch.stack([each.sum(1) for each in queries]),
        )

    def __add__(self, other: QuerySums) -> QuerySums:
        return QuerySums(self.squares + other.squares, self.total + other.total)

    def filters(self, heads: int) -> Tensor:
        """Filters `[L, heads, D]`: the mean over each group of its query heads' directions."""
        direction = torch.linalg.eigh(self.squares).eigenvectors[..., -1]
        mean = (direction * self.total).sum(-1, keepdim=True)
        signed = direction * torch.where(mean < 0, -1.0, 1.0)
        grouped: Tensor = signed.unflatten(1, (heads, -1))
        return grouped.mean(2)
