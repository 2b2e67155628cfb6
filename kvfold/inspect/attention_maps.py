# SPDX-License-Identifier: Apache-2.0
"""What each layer attends to while a model reads a text, measured block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.generation.generate import read_turn
from kvfold.inspect.downsample import membership
from kvfold.kernels.query_blocks import AttentionBlocks
from kvfold.methods.base import Measured, Method, Stages
from kvfold.methods.observation import Needs, Observation
from kvfold.methods.stages.allocate.density import column_variance
from kvfold.methods.stages.allocate.lazy import mass_of_last_query
from kvfold.methods.stages.allocate.norm_cut import norm_cut
from kvfold.methods.stages.score.position import recency

CELLS = 96  # queries and entries are pooled into at most so many spans each
SINKS, WINDOW = 4, 1024  # SimLayerKV, section 5; its sinks are DBudgetKV's as well
MOST = 0.9  # of the attention, in "the entries that hold most of it"
# Parts of the norm that may be lost, four decades in even steps.
THRESHOLDS = tuple(10 ** (step / 20 - 4) for step in range(81))


@dataclass(frozen=True)
class Attention:
    """What one layer attended to while it read N tokens.

    `index` is the layer's in the model. `cells [C, C]`: the part of a query's attention that goes
    to a span of entries, mean over the queries of a span and over heads; `pool.cuts` says where
    spans begin.
    `entropy [Hq]` in nats, mean over queries. `holders [H]`: the fewest entries that received
    `MOST` of all attention. `variance [H]` of the column sums (D2O). `edges [N]`: each query's
    attention to the sinks and to the `window` tokens that end with it, mean over heads; `lazy` the
    last one's, as SimLayerKV computes it. `kept [len(THRESHOLDS)]`: entries per head that keep the
    last query's norm to within each threshold (DBudgetKV, no layer frozen).
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
    """SimLayerKV's window, but at most an eighth of the text: a longer one would hide it all."""
    return max(1, min(WINDOW, tokens // 8))


def watch(
    model: PreTrainedModel,
    input_ids: Tensor,
    seen: Callable[[], None] = lambda: None,
) -> list[Attention]:
    """Every compressible layer's attention over `input_ids [1, N]`; `seen` is called after each.

    The model runs once and nothing of it is kept; at no time is there a matrix of N × N.
    Raises UnsupportedModel for a model whose attention kvfold cannot see.
    """
    found: list[Attention] = []

    def see(observed: Observation) -> None:
        found.append(measure(observed, indices[observed.layer]))
        seen()

    cache = CompressedCache(model, _Watching(input_ids.shape[1], see))
    own = [(i, layer) for i, layer in enumerate(cache.layers) if layer in cache.compressed_layers]
    indices = [index for index, _ in own]
    length = input_ids.shape[1]
    read_turn(model, cache, input_ids, None, until=length, chunk=length)
    return found


def measure(seen: Observation, index: int) -> Attention:
    """The statistics of one row's layer whose queries were all observed, with its column sums."""
    assert seen.queries is not None and seen.column_sums is not None
    tokens = seen.positions.shape[2]
    window = lazy_window(tokens)
    cells, entropy, edges = _through_blocks(seen, window)
    lazy = mass_of_last_query(seen, sinks=SINKS, window=window)
    cut = partial(norm_cut, seen, sinks=SINKS, keep_layers=())
    return Attention(
        index,
        cells.float().cpu(),
        entropy.float().cpu(),
        holders(seen.column_sums[0], MOST).cpu(),
        column_variance(seen)[0].cpu(),
        edges.float().cpu(),
        float(lazy[0]),
        torch.cat([cut(threshold=part).cpu() for part in THRESHOLDS]),
    )


def holders(received: Tensor, part: float) -> Tensor:
    """The fewest entries `[H]` that hold `part` of what all `received [H, N]`."""
    running = received.double().sort(dim=-1, descending=True).values.cumsum(-1)
    return (running < part * running[:, -1:]).sum(-1) + 1


def _through_blocks(seen: Observation, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cells `[C, C]`, entropy `[Hq]` and edges `[N]`, from one pass over blocks of queries."""
    assert seen.queries is not None
    heads, tokens = seen.queries.shape[1:3]
    # Their products with values are not wanted: one column of anything will do.
    blocks = AttentionBlocks(
        seen.queries, seen.keys, seen.keys[..., :1], None, seen.scale, seen.softcap, seen.sinks
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
        edges[at.start : at.end] += _at_edges(rows, at.start, window)
    queries = spans.sum(0)[:, None]
    return cells / (queries * heads), entropy / tokens, edges / heads


def _at_edges(rows: Tensor, start: int, window: int) -> Tensor:
    """Attention `[S]` of queries `start`, `start + 1`, … to sinks and window; rows `[S, T]`."""
    first = max(SINKS, start - window + 1)
    near = rows[:, first:]
    entries = torch.arange(first, first + near.shape[1], device=rows.device)
    queries = torch.arange(start, start + len(rows), device=rows.device)
    inside = entries > queries[:, None] - window
    return rows[:, :SINKS].sum(-1) + (near * inside).sum(-1)


@dataclass(frozen=True)
class _Watching(Method):
    """Keeps every entry, and shows what each layer observed to `see`."""

    name: ClassVar[str] = "watching"
    takes_budget: ClassVar[bool] = False
    queries: int
    see: Callable[[Observation], None]

    def stages(self) -> Stages:
        needs = Needs(window=self.queries, column_sums=True)
        return Stages(needs=needs, score=recency, allocate=Measured(self._everything))

    def _everything(self, seen: Observation) -> Tensor:
        self.see(seen)
        return (seen.positions >= 0).sum(-1).amax(-1)
