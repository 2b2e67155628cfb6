# SPDX-License-Identifier: Apache-2.0
"""A model whose attention is written out, and each method's rule as a loop over its entries."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import kvfold
from tests.helpers.models import VOCABULARY, build, continuation
from tests.helpers.truth import Reader

LAYERS, WINDOW, SINKS = 4, 8, 4
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
QUERY_HEADS = {8: 8, 2: 6, 1: 8}  # by the number of KV heads
HEADS = pytest.mark.parametrize("heads", QUERY_HEADS, ids=["G1", "G3", "G8"])
ALONE, PADDED = (64,), (64, 53, 24)
BATCHES = pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
SHAPES = pytest.mark.parametrize(
    ("heads", "lengths"),
    [(8, PADDED), (2, ALONE), (2, PADDED), (1, PADDED)],
    ids=["G1-padded", "G3-alone", "G3-padded", "G8-padded"],
)

PIECES = pytest.mark.parametrize("chunk", [None, 17], ids=["whole", "pieces"])


class Head:
    """One KV head: entries in the order they came, and what attention each received."""

    def __init__(self, size: int, group: int) -> None:
        self.positions: list[int] = []
        self.keys = self.values = torch.zeros(0, size, dtype=torch.float64)
        self.sums = self.squares = self.queries = torch.zeros(0, dtype=torch.float64)
        self.rows = torch.zeros(group, 0, 0, dtype=torch.float64)  # [G, S, T], the newest forward's
        self.threshold: Any = None

    def __len__(self) -> int:
        return len(self.positions)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, first: int, scale: float, window: float
    ) -> Tensor:
        """Outputs `[G, S, D]` of queries `[G, S, D]` over all entries, the new ones among them.

        A query sees the newest `window` tokens, itself included.
        """
        self.positions += range(first, first + len(key))
        self.keys, self.values = torch.cat([self.keys, key]), torch.cat([self.values, value])
        age = torch.arange(first, first + len(key))[:, None] - torch.tensor(self.positions)
        visible = (age >= 0) & (age < window)
        logits = (query @ self.keys.T * scale).masked_fill(~visible, -torch.inf)
        self.rows = logits.softmax(-1)
        row, none = self.rows.mean(0), torch.zeros(len(key), dtype=torch.float64)
        self.sums = torch.cat([self.sums, none]) + row.sum(0)
        self.squares = torch.cat([self.squares, none]) + row.square().sum(0)
        self.queries = torch.cat([self.queries, none]) + visible.sum(0)
        return self.rows @ self.values

    def keep(self, slots: list[int]) -> None:
        """Only the entries in these slots stay."""
        slots = sorted(slots)
        self.positions = [self.positions[i] for i in slots]
        for name in ("keys", "values", "sums", "squares", "queries"):
            setattr(self, name, getattr(self, name)[slots])


class Layer:
    """The KV heads of a layer, and the queries `[Hq, S, D]` of the newest forward."""

    def __init__(self) -> None:
        self.heads: list[Head] = []

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, first: int, scale: float, window: float
    ) -> Tensor:
        group = len(query) // len(key)
        self.heads = self.heads or [Head(key.shape[-1], group) for _ in key]
        self.query, self.scale = query, scale
        parts = zip(self.heads, query.split(group), key, value, strict=True)
        return torch.cat([head.attend(q, k, v, first, scale, window) for head, q, k, v in parts])


class ByHand:
    """Reads one prompt without padding; transformers holds no cache for it.

    `layers` see all tokens, and `every` has the sliding ones too. `logits [S, V]` are those of the
    newest forward.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        model.set_attn_implementation("by_hand")
        self.model, self.seen = model, 0
        self.every = [Layer() for _ in range(model.config.num_hidden_layers)]

    @property
    def layers(self) -> list[Layer]:
        kinds = getattr(self.model.config, "layer_types", None)
        if not kinds:
            return self.every
        pairs = zip(self.every, kinds, strict=True)
        return [layer for layer, kind in pairs if kind != "sliding_attention"]

    def __deepcopy__(self, memo: dict[int, Any]) -> ByHand:
        twin = ByHand(self.model)
        twin.seen, twin.every = self.seen, copy.deepcopy(self.every, memo)
        twin.logits = self.logits
        return twin

    @torch.no_grad()
    def __call__(self, ids: Tensor, **inputs: Any) -> ByHand:
        global _running
        _running = self
        places = torch.arange(self.seen, self.seen + ids.shape[1])[None]
        self.logits = self.model(ids, position_ids=places, use_cache=False, **inputs).logits[0]
        self.seen += ids.shape[1]
        return self


_running: ByHand | None = None


def by_hand(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **how: Any
) -> tuple[Tensor, None]:
    """Attention of the one row that `_running` reads."""
    layer, window = _running.every[module.layer_idx], how.get("sliding_window") or math.inf
    out = layer.attend(query[0], key[0], value[0], _running.seen, scaling, window)
    return out.transpose(0, 1)[None], None


AttentionInterface.register("by_hand", by_hand)
AttentionMaskInterface.register("by_hand", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@cache
def model_with(heads: int, role: str, **changes: Any) -> PreTrainedModel:
    """One model for kvfold, an equal one for the loops."""
    asked = QUERY_HEADS[heads]
    sizes = {"num_attention_heads": asked, "num_key_value_heads": heads, "hidden_size": 8 * asked}
    return build("llama", torch.float64, **sizes, **changes)


def distinct_prompts(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Left-padded ids and their mask `[B, N]`: each token once, for no two keys of equal norm."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(VOCABULARY - 3, generator=generator) + 3 for _ in lengths])
    longest = max(lengths)
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    return ids[:, :longest] * mask, mask


def rows_of(ids: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """The prompts `[1, n]` of a batch without their padding."""
    return [ids[row : row + 1, ids.shape[1] - n :] for row, n in enumerate(lengths)]


@cache
def prompt_read(heads: int, lengths: tuple[int, ...], row: int, **changes: Any) -> ByHand:
    """A prompt of the batch, read alone. Copy it before anything is taken out of it."""
    ids = rows_of(distinct_prompts(lengths)[0], lengths)[row]
    return ByHand(model_with(heads, "truth", **changes))(ids)


def read_by_kvfold(
    spec: str,
    budget: float | None,
    heads: int,
    lengths: tuple[int, ...],
    chunk: int | None = None,
    **changes: Any,
) -> Reader:
    """The same prompts, read by kvfold at once, or `chunk` tokens at a time."""
    ids, mask = distinct_prompts(lengths)
    model = model_with(heads, "kvfold", **changes)
    reader = Reader(
        model, kvfold.CompressedCache(model, spec, budget), mask if len(lengths) > 1 else None
    )
    if chunk is None:
        reader(ids)
    else:
        pieces = {"prefill_chunk": chunk, "max_new_tokens": 1, "do_sample": False}
        kvfold.generate(model, ids, cache=reader.cache, attention_mask=mask, **pieces)
    return reader


def assert_holds(cache: kvfold.CompressedCache, expected: list[ByHand]) -> None:
    """Each row's positions, keys and values are those that the loops left of it."""
    stored, left = [], []
    for index, own in enumerate(cache.states):
        positions, columns, entries = cache.positions(index), own.columns(), own.stored().dense()
        for row, one in enumerate(expected):
            padding = cache.get_seq_length() - one.seen
            for h, head in enumerate(one.layers[index].heads):
                found = (positions[row][h] - padding).tolist()
                assert found == head.positions, f"row {row}, layer {index}, head {h}"
                real = columns[row, h] >= 0
                stored += [part[row, h][real] for part in entries]
                left += [head.keys, head.values]
    torch.testing.assert_close(torch.cat(stored), torch.cat(left), **CLOSE)


def best(scores: Any, count: int) -> list[int]:
    """Places of the `count` highest; of equal ones the earlier."""
    scores = [float(score) for score in scores]
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: max(0, count)]


# A method by hand: what stays of each head of all layers, given their attention.
Keep = Callable[[list[Layer]], list[list[list[int]]]]


def evict(one: ByHand, keep: Keep) -> ByHand:
    kept = keep(one.layers)
    for layer, of_heads in zip(one.layers, kept, strict=True):
        for head, slots in zip(layer.heads, of_heads, strict=True):
            head.keep(slots)
    return one


def assert_prefill(
    spec: str,
    budget: float | None,
    heads: int,
    lengths: tuple[int, ...],
    keep: Keep,
    chunk: int | None = None,
    **changes: Any,
) -> kvfold.CompressedCache:
    """After the prompt the cache holds what `keep` leaves of it, and that is not everything."""
    held = read_by_kvfold(spec, budget, heads, lengths, chunk, **changes).cache
    expected = [
        evict(copy.deepcopy(prompt_read(heads, lengths, row, **changes)), keep)
        for row in range(len(lengths))
    ]
    assert any(len(head) < 64 for layer in expected[0].layers for head in layer.heads)
    assert_holds(held, expected)
    return held


def assert_steps(
    spec: str,
    budget: float,
    heads: int,
    lengths: tuple[int, ...],
    change: Callable[[ByHand], None],
    count: int = 3,
) -> None:
    """So it is after the prompt and after each of `count` generated tokens; `change` evicts."""
    reader = read_by_kvfold(spec, budget, heads, lengths)
    expected = [copy.deepcopy(prompt_read(heads, lengths, row)) for row in range(len(lengths))]
    steps = continuation(len(lengths), count).split(1, 1)
    for step in range(count + 1):
        for row, one in enumerate(expected):
            if step:
                one(steps[step - 1][row : row + 1])
            change(one)
        if step:
            reader(steps[step - 1])
        assert_holds(reader.cache, expected)


def per_head(choose: Callable[[Head], list[int]]) -> Keep:
    return lambda layers: [[choose(head) for head in layer.heads] for layer in layers]


def newest(head: Head, count: int) -> list[int]:
    return list(range(max(0, len(head) - count), len(head)))


def before_rope(head: Head) -> Tensor:
    """The head's keys `[T, D]`, each pair of channels turned back by its token's angle."""
    half = head.keys.shape[1] // 2
    angles = torch.tensor(
        [[at * 10000.0 ** (-i / half) for i in range(half)] for at in head.positions]
    ).double()
    first, second = head.keys.split(half, 1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos + second * sin, second * cos - first * sin], 1)


def pooled(scores: list[float], kernel: int, pooling: str) -> list[float]:
    near = [scores[max(0, i - kernel // 2) : i + kernel // 2 + 1] for i in range(len(scores))]
    return [max(part) if pooling == "max" else sum(part) / kernel for part in near]


def votes(head: Head, kernel: int = 7, pooling: str = "max", pool_first: bool = False) -> list:
    """Attention of the last WINDOW queries to each entry before them."""
    of_queries = head.rows[:, -WINDOW:, :-WINDOW].sum(1).tolist()
    if pool_first:
        of_queries = [pooled(row, kernel, pooling) for row in of_queries]
    mean = [sum(column) / len(column) for column in zip(*of_queries, strict=True)]
    return mean if pool_first else pooled(mean, kernel, pooling)


def with_window(head: Head, count: int, **options: Any) -> list[int]:
    return best(votes(head, **options), count - WINDOW) + newest(head, WINDOW)


def rounded(shares: list[Fraction | float], total: int, most: int) -> list[int]:
    """By largest remainder; what exceeds `most` goes to the next layers."""
    counts = [math.floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    for i in range(len(counts) - 1):
        over = max(0, counts[i] - most)
        counts[i], counts[i + 1] = counts[i] - over, counts[i + 1] + over
    return counts


def pyramid(tokens: int, budget: int, beta: int, layers: int = LAYERS) -> list[int]:
    """The paper's arithmetic sequence, the window on top."""
    base = budget - WINDOW
    top = Fraction(base, beta)
    bottom = 2 * base - top
    shares = [bottom - layer * (bottom - top) / (layers - 1) for layer in range(layers)]
    return [n + WINDOW for n in rounded(shares, base * layers, tokens - WINDOW)]


def adaptive(scores: list[list[float]], mean: int, floor: float) -> list[int]:
    """Each head's share of its layer's best, after its first `int(floor · mean)`."""
    least = [min(int(floor * mean), len(row)) for row in scores]
    left = [
        (-score, head, place)
        for head, row in enumerate(scores)
        for place, score in enumerate(sorted(row, reverse=True)[least[head] :])
    ]
    won = [head for _, head, _ in sorted(left)[: len(scores) * mean - sum(least)]]
    return [least[head] + won.count(head) for head in range(len(scores))]


def h2o(head: Head, budget: int, recent: float = 0.5, mean: bool = False) -> list[int]:
    last = int(recent * budget)
    scores = head.sums / head.queries if mean else head.sums
    return best(scores[: len(head) - last], budget - last) + newest(head, last)


def first_and_newest(head: Head, budget: int) -> list[int]:
    if len(head) <= budget:
        return list(range(len(head)))
    return list(range(SINKS)) + newest(head, budget - SINKS)


def rows_of_layer(layer: Layer) -> Tensor:
    """Attention `[Hq, S, T]` of all query heads."""
    return torch.cat([head.rows for head in layer.heads])


def d2o_kept(head: Head, size: int, recent: float) -> list[int]:
    last = min(int(recent * size), size - SINKS)
    scores = head.sums.clone()
    scores[:SINKS] = torch.inf
    return best(scores[: len(head) - last], size - last) + newest(head, last)


def nearest(head: Head, kept: list[int]) -> list[tuple[int, float, int]]:
    """Each evicted slot, its highest cosine with a kept key, and that key's slot."""
    kept = sorted(kept)
    gone = [i for i in range(len(head)) if i not in kept]
    unit = head.keys / head.keys.norm(dim=-1, keepdim=True)
    cosines = unit[gone] @ unit[kept].T
    return [
        (i, max(row), kept[row.index(max(row))])
        for i, row in zip(gone, cosines.tolist(), strict=True)
    ]


def moved(threshold: float | None, mean: float, beta: float) -> float:
    return mean if threshold is None else beta * mean + (1 - beta) * threshold


def merge(head: Head, joins: list[tuple[int, float, int]], official: bool) -> None:
    """Equation 12, or the released code's weights, which do not add up to 1."""
    before = {name: getattr(head, name).clone() for name in ("keys", "values")}
    for j in {j for _, _, j in joins}:
        evicted = [(i, u) for i, u, near in joins if near == j]
        own = 1.0 if official else math.e
        weights = [u if official else math.exp(u) for _, u in evicted]
        whole = 1 + len(evicted) if official else own + sum(weights)
        for name, old in before.items():
            mixed = own * old[j] + sum(
                w * old[i] for w, (i, _) in zip(weights, evicted, strict=True)
            )
            getattr(head, name)[j] = mixed / whole


def merge_evicted(head: Head, kept: list[int], beta: float = 0.7) -> None:
    """What goes joins what it resembles, if it reaches the head's threshold."""
    found = nearest(head, kept)
    head.threshold = moved(head.threshold, sum(u for _, u, _ in found) / len(found), beta)
    merge(head, [f for f in found if f[1] >= head.threshold - 1e-12], official=False)
    head.keep(kept)


def d2o_step(layer: Layer, size: int) -> None:
    for head in layer.heads:
        if len(head) > size:
            merge_evicted(head, d2o_kept(head, size, recent=0.25))


def cam_step(one: ByHand, budget: int, targets: int) -> None:
    """The newest that leaves adds p times its value, shared out, to the kept ones after it."""
    for head in (head for layer in one.layers for head in layer.heads):
        kept = sorted(first_and_newest(head, budget))
        gone = [i for i in range(len(head)) if i not in kept]
        for i in gone[-1:]:
            after = [j for j in kept if j > i][:targets]
            chance = min(1.0, float(head.sums[i] / head.sums[after].mean()))
            head.values[after] += chance * head.values[i] / len(after)
        head.keep(kept)
