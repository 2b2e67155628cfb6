# SPDX-License-Identifier: Apache-2.0
"""Attention statistics of each layer during one prefill, computed over blocks of queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.generation.reading import read_turn
from kvfold.kernels.query_blocks import AttentionBlocks
from kvfold.methods.base import Measured, Method, Stages
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.density import column_variance
from kvfold.methods.stages.allocate.lazy import mass_of_last_query
from kvfold.methods.stages.allocate.norm_cut import norm_cut
from kvfold.methods.stages.score.position import recency
from kvfold.observers.base import Needs
from kvfold.observers.column_sums import ColumnSums
from kvfold.observers.last_queries import LastQueries

CELLS = 96  # spans that queries, and entries, are pooled into, at most
SINKS, WINDOW = 4, 1024  # SimLayerKV, section 5; its sinks are DBudgetKV's as well
MOST = 0.9  # share of the attention mass that `holders` counts entries for
# Fractions of the norm that may be lost: four decades, 20 steps each (DBudgetKV).
THRESHOLDS = tuple(10 ** (step / 20 - 4) for step in range(81))


@dataclass(frozen=True)
class LayerAttention:
    """Attention statistics of one layer over a prefill of N tokens.

    index: the layer's index in the model.
    cells: `[C, C]`, attention mass from a span of queries to a span of entries, mean over the
        span's queries and over heads; `downsample.cuts` gives the spans.
    entropy: `[Hq]`, in nats, mean over queries.
    holders: `[H]`, fewest entries that receive `MOST` of the attention mass.
    variance: `[H]`, variance of the column sums (D2O).
    edges: `[N]`, each query's attention mass on the sinks and on the window that ends with it,
        mean over heads.
    lazy: the last query's mass on sinks and window, as SimLayerKV computes it.
    kept: `[len(THRESHOLDS)]`, entries per head that keep the norm of the last query's attention
        within each threshold (DBudgetKV, no layer frozen).
    """

    index: int
    cells: Tensor
    entropy: Tensor
    holders: Tensor
    variance: Tensor
    edges: Tensor
    lazy: float
    kept: Tensor


def lazy_window(tokens: int) -> int:
    """SimLayerKV's window in tokens, but at most N / 8: it would cover all of a short text."""
    return max(1, min(WINDOW, tokens // 8))


def watch_attention(
    model: PreTrainedModel, input_ids: Tensor, seen: Callable[[], None] = lambda: None
) -> list[LayerAttention]:
    """Statistics of every compressible layer over `input_ids [1, N]`; `seen()` is called per layer.

    One prefill with a full cache, which is then dropped; no N × N matrix is ever built. Raises
    UnsupportedModel for a model whose attention kvfold cannot observe.
    """
    found: list[LayerAttention] = []

    def see(observed: Observation) -> None:
        found.append(layer_attention(observed, indices[observed.layer]))
        seen()

    cache = CompressedCache(model, _ObserveAll(input_ids.shape[1], see))
    own = [(i, layer) for i, layer in enumerate(cache.layers) if layer in cache.compressed_layers]
    indices = [index for index, _ in own]
    read_turn(model, cache, input_ids)
    return found


def layer_attention(seen: Observation, index: int) -> LayerAttention:
    """Statistics of layer `index`, from a one-row observation of all queries and column sums."""
    assert seen.queries is not None and seen.get(ColumnSums) is not None
    window = lazy_window(seen.positions.shape[2])
    cells, entropy, edges = _blockwise_statistics(seen, window)
    lazy = mass_of_last_query(seen, sinks=SINKS, window=window)
    cut = partial(norm_cut, seen, sinks=SINKS, keep_layers=())
    return LayerAttention(
        index,
        cells.float().cpu(),
        entropy.float().cpu(),
        holders(seen[ColumnSums][0], MOST).cpu(),
        column_variance(seen)[0].cpu(),
        edges.float().cpu(),
        float(lazy[0]),
        torch.cat([cut(threshold=part).cpu() for part in THRESHOLDS]),
    )


def holders(received: Tensor, part: float) -> Tensor:
    """Fewest entries `[H]` whose sum is at least `part` of the total of `received [H, N]`."""
    running = received.double().sort(dim=-1, descending=True).values.cumsum(-1)
    return (running < part * running[:, -1:]).sum(-1) + 1


def _blockwise_statistics(seen: Observation, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cells `[C, C]`, entropy `[Hq]` and edges `[N]` in one pass over blocks of queries."""
    assert seen.queries is not None
    heads, tokens = seen.queries.shape[1:3]
    # The attention output is not needed: one column stands in for the values.
    blocks = AttentionBlocks(
        seen.queries,
        seen.keys,
        seen.keys[..., :1],
        None,
        scale=seen.scale,
        softcap=seen.softcap,
        sink_logits=seen.sink_logits,
    )
    like: dict[str, Any] = {"device": seen.keys.device, "dtype": torch.float32}
    spans = membership(tokens, CELLS).to(**like)
    cells = torch.zeros(spans.shape[1], spans.shape[1], **like)
    entropy, edges = torch.zeros(heads, **like), torch.zeros(tokens, **like)
    for at, weights in blocks:
        of_heads = weights.float().view(blocks.groups, -1, at.seen)
        own = slice(at.head * blocks.groups, (at.head + 1) * blocks.groups)
        entropy[own] += torch.special.entr(of_heads).sum((1, 2))
        rows = of_heads.sum(0)
        cells += spans[at.start : at.end].T @ (rows @ spans[: at.seen])
        edges[at.start : at.end] += _sink_and_window_mass(rows, at.start, window)
    queries = spans.sum(0)[:, None]
    return cells / (queries * heads), entropy / tokens, edges / heads


def _sink_and_window_mass(rows: Tensor, start: int, window: int) -> Tensor:
    """Mass `[S]` on sinks and window, of attention `rows [S, T]` whose first query is `start`."""
    first = max(SINKS, start - window + 1)
    near = rows[:, first:]
    entries = torch.arange(first, first + near.shape[1], device=rows.device)
    queries = torch.arange(start, start + len(rows), device=rows.device)
    inside = entries > queries[:, None] - window
    return rows[:, :SINKS].sum(-1) + (near * inside).sum(-1)


@dataclass(frozen=True)
class _ObserveAll(Method):
    """A method that keeps every entry and passes each layer's observation to `see`."""

    name: ClassVar[str] = "watching"
    takes_budget: ClassVar[bool] = False
    queries: int
    see: Callable[[Observation], None]

    def stages(self) -> Stages:
        needs = Needs(LastQueries(self.queries), ColumnSums())
        return Stages(needs=needs, score=recency, allocate=Measured(self._everything))

    def _everything(self, seen: Observation) -> Tensor:
        self.see(seen)
        return (seen.positions >= 0).sum(-1).amax(-1)


def cuts(tokens: int, most: int) -> list[int]:
    """Boundaries of at most `most` near-equal spans over `tokens`: C + 1 numbers from 0 to N."""
    count = min(tokens, most)
    return [tokens * i // count for i in range(count + 1)]


def membership(tokens: int, most: int) -> Tensor:
    """One-hot span of each token, `[N, C]`."""
    ends = torch.tensor(cuts(tokens, most)[1:])
    span = torch.bucketize(torch.arange(tokens), ends, right=True)
    return torch.nn.functional.one_hot(span, len(ends))


def means(values: Tensor, most: int) -> Tensor:
    """Means `[C]` of `values [N]` over at most `most` spans."""
    spans = [values[a:b] for a, b in pairwise(cuts(len(values), most))]
    return torch.stack([span.mean() for span in spans])
