# SPDX-License-Identifier: Apache-2.0
"""What a whole cache keeps, against loops over full attention matrices, formula by formula."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvfold
from kvfold.bundled import FOLDER
from tests.helpers.budgets import SMALL
from tests.helpers.models import VOCABULARY, build, continuation
from tests.helpers.truth import Reader

LAYERS, WINDOW, SINKS = 4, 8, 4
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HEADS = pytest.mark.parametrize("heads", [8, 2, 1], ids=["G1", "G4", "G8"])
ALONE, PADDED = (64,), (64, 53, 24)
BATCHES = pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
SHAPES = pytest.mark.parametrize(
    ("heads", "lengths"),
    [(8, PADDED), (2, ALONE), (2, PADDED), (1, PADDED)],
    ids=["G1-padded", "G4-alone", "G4-padded", "G8-padded"],
)


# --- a model whose attention is written out, and keeps its own entries -------------------------


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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, first: int, scale: float) -> Tensor:
        """Outputs `[G, S, D]` of queries `[G, S, D]` over all entries, the new ones among them."""
        new = range(first, first + len(key))
        self.positions += new
        self.keys, self.values = torch.cat([self.keys, key]), torch.cat([self.values, value])
        visible = torch.tensor([[at <= now for at in self.positions] for now in new])
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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, first: int, scale: float) -> Tensor:
        group = len(query) // len(key)
        self.heads = self.heads or [Head(key.shape[-1], group) for _ in key]
        self.query, self.scale = query, scale
        parts = zip(self.heads, query.split(group), key, value, strict=True)
        return torch.cat([head.attend(q, k, v, first, scale) for head, q, k, v in parts])


class ByHand:
    """Reads one prompt without padding; transformers holds no cache for it."""

    def __init__(self, model: PreTrainedModel) -> None:
        model.set_attn_implementation("by_hand")
        self.model, self.seen = model, 0
        self.layers = [Layer() for _ in range(model.config.num_hidden_layers)]

    def __deepcopy__(self, memo: dict[int, Any]) -> ByHand:
        twin = ByHand(self.model)
        twin.seen, twin.layers = self.seen, copy.deepcopy(self.layers, memo)
        return twin

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> ByHand:
        global _running
        _running = self
        places = torch.arange(self.seen, self.seen + ids.shape[1])[None]
        self.model(ids, position_ids=places, use_cache=False)
        self.seen += ids.shape[1]
        return self


_running: ByHand | None = None


def by_hand(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention of the one row that `_running` reads."""
    layer = _running.layers[module.layer_idx]
    out = layer.attend(query[0], key[0], value[0], _running.seen, scaling)
    return out.transpose(0, 1)[None], None


AttentionInterface.register("by_hand", by_hand)
AttentionMaskInterface.register("by_hand", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@cache
def model_with(heads: int, role: str, **changes: Any) -> PreTrainedModel:
    """One model for kvfold, an equal one for the loops."""
    return build("llama", torch.float64, num_key_value_heads=heads, **changes)


def prompts(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
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
    ids = rows_of(prompts(lengths)[0], lengths)[row]
    return ByHand(model_with(heads, "truth", **changes))(ids)


def compressed(
    spec: str, budget: float | None, heads: int, lengths: tuple[int, ...], **changes: Any
) -> Reader:
    """The same prompts, read by kvfold."""
    ids, mask = prompts(lengths)
    model = model_with(heads, "kvfold", **changes)
    reader = Reader(
        model, kvfold.CompressedCache(model, spec, budget), mask if len(lengths) > 1 else None
    )
    reader(ids)
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
    spec: str, budget: float | None, heads: int, lengths: tuple[int, ...], keep: Keep
) -> kvfold.CompressedCache:
    """After the prompt the cache holds what `keep` leaves of it, and that is not everything."""
    held = compressed(spec, budget, heads, lengths).cache
    expected = [
        evict(copy.deepcopy(prompt_read(heads, lengths, row)), keep) for row in range(len(lengths))
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
    reader = compressed(spec, budget, heads, lengths)
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


# --- votes of a window: SnapKV, PyramidKV, AdaKV -----------------------------------------------


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


@SHAPES
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("snapkv", {}),
        ("snapkv_official", {"kernel": 5, "pooling": "avg"}),
        ("snapkv_kvpress", {"kernel": 5, "pooling": "avg", "pool_first": True}),
        ("snapkv:pool_first=true", {"pool_first": True}),
    ],
)
def test_snapkv_keeps_what_the_last_queries_vote_for(name, options, heads, lengths):
    spec = f"{name}{',' if ':' in name else ':'}window={WINDOW}"
    keep = per_head(lambda head: with_window(head, SMALL, **options))
    assert_prefill(spec, SMALL, heads, lengths, keep)


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


def pyramid(tokens: int, budget: int, beta: int) -> list[int]:
    """The paper's arithmetic sequence, the window on top."""
    base = budget - WINDOW
    top = Fraction(base, beta)
    bottom = 2 * base - top
    shares = [bottom - layer * (bottom - top) / (LAYERS - 1) for layer in range(LAYERS)]
    return [n + WINDOW for n in rounded(shares, base * LAYERS, tokens - WINDOW)]


def pyramid_of_the_code(tokens: int, budget: int, beta: int) -> list[int]:
    base = budget - WINDOW
    if tokens < budget:
        return [tokens] * LAYERS
    if tokens < 2 * base:
        return [budget] * LAYERS
    least = base // beta
    most = 2 * base - least
    if most >= tokens - WINDOW:
        most = tokens - WINDOW
        least = 2 * base - most
    step = (most - least) // (LAYERS - 1)
    return [most - step * layer + WINDOW for layer in range(LAYERS)]


def of_layers(counts: Callable[[int], list[int]]) -> Keep:
    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        sizes = counts(len(layers[0].heads[0]))
        return [
            [with_window(head, size) for head in layer.heads]
            for layer, size in zip(layers, sizes, strict=True)
        ]

    return keep


@SHAPES
@pytest.mark.parametrize("beta", [20, 3])
@pytest.mark.parametrize("name", ["pyramidkv", "pyramidkv_official"])
def test_pyramidkv_keeps_fewer_towards_the_top(name, beta, heads, lengths):
    schedule = pyramid if name == "pyramidkv" else pyramid_of_the_code
    spec = f"{name}:window={WINDOW},beta={beta}"
    keep = of_layers(lambda tokens: schedule(tokens, SMALL, beta))
    assert_prefill(spec, SMALL, heads, lengths, keep)


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


def adakv(layers: list[Layer], sizes: list[int], floor: float) -> list[list[list[int]]]:
    kept = []
    for layer, size in zip(layers, sizes, strict=True):
        scores = [votes(head) for head in layer.heads]
        counts = adaptive(scores, size - WINDOW, floor)
        kept.append([with_window(h, n + WINDOW) for h, n in zip(layer.heads, counts, strict=True)])
    return kept


@SHAPES
@pytest.mark.parametrize("floor", [0.2, 0.0, 0.7])
def test_adakv_shares_a_layer_among_its_heads(floor, heads, lengths):
    held = assert_prefill(
        f"adakv:window={WINDOW},floor={floor}",
        SMALL,
        heads,
        lengths,
        lambda layers: adakv(layers, [SMALL] * LAYERS, floor),
    )
    if heads > 1 and floor < 0.7:
        assert len({n for layer in held.stats().kept for n in layer[0]}) > 2


def blended(scores: list[list[float]], mean: int, part: float, normalize: bool) -> list[int]:
    """The released shares: what the layer's best entries say, mixed with even ones and rounded."""
    weighed = scores
    if normalize:
        held = [sum(sorted(row, reverse=True)[:mean]) / sum(row) for row in scores]
        weighed = [
            [score * share for score in row] for row, share in zip(scores, held, strict=True)
        ]
    everyone = sorted((-s, h, j) for h, row in enumerate(weighed) for j, s in enumerate(row))
    won = [h for _, h, _ in everyone[: len(scores) * mean]]
    return [round(won.count(h) * (1 - part) + int(mean * part)) for h in range(len(scores))]


@SHAPES
@pytest.mark.parametrize("part", [0.2, 0.5])
@pytest.mark.parametrize("normalize", [False, True])
def test_adakv_as_released(normalize, part, heads, lengths):
    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        kept = []
        for layer in layers:
            scores = [votes(head) for head in layer.heads]
            counts = blended(scores, SMALL - WINDOW, part, normalize)
            sized = zip(layer.heads, counts, strict=True)
            kept.append([with_window(head, count + WINDOW) for head, count in sized])
        return kept

    spec = f"adakv:window={WINDOW},rule=blend,floor={part},normalize={str(normalize).lower()}"
    assert_prefill(spec, SMALL, heads, lengths, keep)


@SHAPES
def test_adakv_shares_a_pyramid_among_its_heads(heads, lengths):
    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        return adakv(layers, pyramid(len(layers[0].heads[0]), SMALL, 20), 0.2)

    assert_prefill(f"pyramidkv:window={WINDOW} + adakv", SMALL, heads, lengths, keep)


# --- one eviction after the other: H2O, TOVA, RoCo, L2 norm, StreamingLLM ----------------------


def h2o(head: Head, budget: int, recent: float = 0.5, mean: bool = False) -> list[int]:
    last = int(recent * budget)
    scores = head.sums / head.queries if mean else head.sums
    return best(scores[: len(head) - last], budget - last) + newest(head, last)


def roco(head: Head, budget: int, recent: int = 10, share: float = 0.3) -> list[int]:
    """The lowest means go, from among the `budget - r` of lowest deviation."""
    mean = head.sums / head.queries
    deviation = (head.squares / head.queries - mean**2).clamp(min=0).sqrt()
    for age in range(1, recent + 1):
        deviation[-age] = 1e9 - age
    unstable = best(deviation, int(share * budget) + 1)
    feasible = [i for i in range(len(head)) if i not in unstable]
    stay = best(mean[feasible], budget - len(unstable))
    return unstable + [feasible[i] for i in stay]


def first_and_newest(head: Head, budget: int) -> list[int]:
    if len(head) <= budget:
        return list(range(len(head)))
    return list(range(SINKS)) + newest(head, budget - SINKS)


def knorm(head: Head, budget: int) -> list[int]:
    return best(-head.keys.norm(dim=-1), budget)


def holding(choose: Callable[[Head, int], list[int]], budget: int) -> Callable[[ByHand], None]:
    def change(one: ByHand) -> None:
        for head in (head for layer in one.layers for head in layer.heads):
            if len(head) > budget:
                head.keep(choose(head, budget))

    return change


@pytest.mark.slow
@SHAPES
@pytest.mark.parametrize(
    ("spec", "choose", "budget"),
    [
        ("h2o", h2o, SMALL),
        (
            "h2o:recent=0.2,normalize=visible_queries",
            partial(h2o, recent=0.2, mean=True),
            SMALL,
        ),
        ("roco", roco, SMALL),
        ("roco", roco, 40),  # ten of thirteen protected ones are the last
        (
            "roco:protect_recent=3,protect_std_ratio=0.7",
            partial(roco, recent=3, share=0.7),
            SMALL,
        ),
        ("streaming_llm_original", first_and_newest, SMALL),
    ],
)
def test_methods_that_evict_while_decoding(spec, choose, budget, heads, lengths):
    lengths = lengths[:2] if budget == 40 else lengths
    assert_steps(spec, budget, heads, lengths, holding(choose, budget))


@SHAPES
def test_tova_drops_what_the_newest_query_attends_to_least(heads, lengths):
    def change(one: ByHand) -> None:
        for layer in one.layers:
            row = torch.stack([head.rows[:, -1] for head in layer.heads]).flatten(0, 1).mean(0)
            for head in layer.heads:
                head.keep(best(row, SMALL))

    assert_steps("tova", SMALL, heads, lengths, change)


@SHAPES
def test_knorm_keeps_the_lowest_norms(heads, lengths):
    assert_prefill("knorm", SMALL, heads, lengths, per_head(lambda head: knorm(head, SMALL)))


# --- layers that differ: SimLayerKV, DBudgetKV -------------------------------------------------


def rows_of_layer(layer: Layer) -> Tensor:
    """Attention `[Hq, S, T]` of all query heads."""
    return torch.cat([head.rows for head in layer.heads])


def mass_of_last_query(layer: Layer) -> float:
    row = rows_of_layer(layer)[:, -1].mean(0)
    return float(row[:SINKS].sum() + row[-WINDOW:].sum())


def mass_of_last_queries(layer: Layer, last: int = 5, recent: int = 6) -> float:
    rows = rows_of_layer(layer).mean(0)
    total = 0.0
    for query in range(len(rows) - last, len(rows)):
        before = [j for j in range(query - recent, query) if j >= SINKS]
        total += float(rows[query, :SINKS].sum() + rows[query, before].sum())
    return total / last


def trimmed_if_lazy(
    layers: list[Layer], threshold: float, mass: Callable[[Layer], float]
) -> list[list[list[int]]]:
    kept = []
    for layer in layers:
        tokens = len(layer.heads[0])
        lazy = tokens > SINKS + WINDOW and mass(layer) > threshold
        size = SINKS + WINDOW if lazy else tokens
        kept.append([first_and_newest(head, size) for head in layer.heads])
    return kept


def between(masses: list[float]) -> float:
    """A threshold that half of the layers exceed."""
    ordered = sorted(masses)
    return (ordered[1] + ordered[2]) / 2


@SHAPES
@pytest.mark.parametrize(
    ("options", "mass"),
    [("", mass_of_last_query), (",when=prefill,n_last=5,recent=6", mass_of_last_queries)],
)
def test_simlayerkv_trims_lazy_layers(options, mass, heads, lengths):
    threshold = between([mass(layer) for layer in prompt_read(heads, lengths, 0).layers])
    spec = f"simlayerkv:window={WINDOW},threshold={threshold!r}{options}"
    held = assert_prefill(
        spec, None, heads, lengths, lambda layers: trimmed_if_lazy(layers, threshold, mass)
    )
    assert sorted(layer[0][0] for layer in held.stats().kept) == [12, 12, 64, 64]


@pytest.mark.parametrize(
    ("name", "threshold", "window", "spared", "lazy"),
    [
        ("llama2", 0.65, 40, None, 3),
        ("mistral", 0.8, 40, None, 1),
        ("llama3", 0.9, 56, None, 4),
        ("qwen", 0.85, 56, 3, 3),
    ],
)
def test_simlayerkv_presets_trim_at_the_published_thresholds(name, threshold, window, spared, lazy):
    def size(index: int, layer: Layer) -> int:
        row = rows_of_layer(layer)[:, -1].mean(0)
        mass = float(row[:SINKS].sum() + row[-window:].sum())
        return SINKS + window if mass > threshold and index != spared else 64

    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        return [
            [first_and_newest(head, size(index, layer)) for head in layer.heads]
            for index, layer in enumerate(layers)
        ]

    held = compressed(f"simlayerkv_{name}:window={window}", None, 2, ALONE).cache
    assert_holds(held, [evict(copy.deepcopy(prompt_read(2, ALONE, 0)), keep)])
    assert [layer[0][0] for layer in held.stats().kept].count(SINKS + window) == lazy


@SHAPES
def test_simlayerkv_prunes_lazy_layers_by_another_method_s_scores(heads, lengths):
    """As many entries of a lazy layer stay, sinks + window, but those that SnapKV votes for."""
    masses = [mass_of_last_query(layer) for layer in prompt_read(heads, lengths, 0).layers]
    threshold, size = between(masses), SINKS + WINDOW

    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        kept = []
        for layer in layers:
            tokens = len(layer.heads[0])
            lazy = tokens > size and mass_of_last_query(layer) > threshold
            count = size if lazy else tokens
            kept.append([with_window(head, count) for head in layer.heads])
        return kept

    spec = f"simlayerkv:window={WINDOW},threshold={threshold!r} + snapkv:window={WINDOW}"
    held = assert_prefill(spec, None, heads, lengths, keep)
    assert sorted(layer[0][0] for layer in held.stats().kept) == [12, 12, 64, 64]


@SHAPES
def test_simlayerkv_asks_the_first_generated_token(heads, lengths):
    step = continuation(len(lengths), 1)
    after = [
        copy.deepcopy(prompt_read(heads, lengths, row))(step[row : row + 1])
        for row in range(len(lengths))
    ]
    threshold = between([mass_of_last_query(layer) for layer in after[0].layers])
    spec = f"simlayerkv:window={WINDOW},threshold={threshold!r},when=first_decode"
    reader = compressed(spec, None, heads, lengths)
    reader(step)
    expected = [
        evict(one, lambda layers: trimmed_if_lazy(layers, threshold, mass_of_last_query))
        for one in after
    ]
    assert sorted(len(layer.heads[0]) for layer in expected[0].layers) == [12, 12, 65, 65]
    assert_holds(reader.cache, expected)


def norm_cut(rows: Tensor, order: list[list[int]], threshold: float, counted: list[int]) -> int:
    """How many of each head's `order`, least important first, may go; rows `[Hq, T]`."""
    squares, group = rows.square().tolist(), len(rows) // len(order)

    def norm(gone: int) -> float:
        left = [order[h // group][gone:] + counted for h in range(len(rows))]
        return sum(
            math.sqrt(sum(row[j] for j in slots)) for row, slots in zip(squares, left, strict=True)
        ) / len(rows)

    base = norm(0)
    return max(i for i in range(len(order[0])) if base - norm(i) <= threshold * base)


def dbudgetkv(
    layers: list[Layer], threshold: float, include_sinks: bool = False, rows: int = 1
) -> list[list[list[int]]]:
    kept = []
    for layer in layers:
        attention = rows_of_layer(layer)[:, -rows:]
        attention = attention.sum(1) / (attention != 0).sum(1).clamp(min=1)
        tokens = attention.shape[1]
        order = [list(range(SINKS, tokens)) for _ in layer.heads]
        counted = list(range(SINKS)) if include_sinks else []
        gone = norm_cut(attention, order, threshold, counted)
        kept.append([[*range(SINKS), *range(SINKS + gone, tokens)] for _ in layer.heads])
    return kept


@SHAPES
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("threshold=0.05", {"threshold": 0.05}),
        ("threshold=0.3", {"threshold": 0.3}),
        ("threshold=0.05,include_sinks=true", {"threshold": 0.05, "include_sinks": True}),
        ("threshold=0.05,rows=3", {"threshold": 0.05, "rows": 3}),
    ],
)
def test_dbudgetkv_cuts_where_the_norm_would_fall(options, named, heads, lengths):
    spec = f"dbudgetkv:{options},keep_layers=none"
    held = assert_prefill(spec, None, heads, lengths, lambda layers: dbudgetkv(layers, **named))
    assert len({layer[0][0] for layer in held.stats().kept}) > 1


@SHAPES
def test_dbudgetkv_ranks_by_attention_too(heads, lengths):
    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        kept = []
        for layer in layers:
            scores = [votes(head, kernel=1) for head in layer.heads]
            order = [best(row, len(row))[::-1] for row in scores]
            gone = norm_cut(rows_of_layer(layer)[:, -1], order, 0.2, [])
            kept.append(
                [
                    candidates[gone:] + newest(head, WINDOW)
                    for candidates, head in zip(order, layer.heads, strict=True)
                ]
            )
        return kept

    spec = "dbudgetkv:threshold=0.2,ranking=attention,keep_layers=none"
    assert_prefill(spec, None, heads, lengths, keep)


# --- merging: D2O, CaM -------------------------------------------------------------------------


def filled(parts: list[float], total: float, most: int) -> list[float]:
    """`total` in proportion to `parts`, but none above `most`."""
    full: set[int] = set()
    while True:
        open_ = [i for i in range(len(parts)) if i not in full]
        scale = (total - most * len(full)) / sum(parts[i] for i in open_)
        over = {i for i in open_ if parts[i] * scale > most}
        if not over:
            return [most if i in full else parts[i] * scale for i in range(len(parts))]
        full |= over


def d2o_sizes(layers: list[Layer], budget: int, skipped: tuple[int, ...] = ()) -> list[int]:
    """More for layers whose column sums vary little."""
    tokens = len(layers[0].heads[0])
    open_ = [i for i in range(len(layers)) if i not in skipped]
    variances = []
    for i in open_:
        of_heads = []
        for head in layers[i].heads:
            mean = float(head.sums.sum()) / tokens
            of_heads.append(sum((float(c) - mean) ** 2 for c in head.sums) / (tokens - 1))
        variances.append(sum(of_heads) / len(of_heads))
    low, high = min(variances), max(variances)
    parts = [math.exp(-(v - low) / (high - low or 1)) for v in variances]
    total = budget * len(layers) - len(skipped) * tokens
    shares = iter(rounded(filled(parts, total, tokens), total, tokens))
    return [tokens if i in skipped else next(shares) for i in range(len(layers))]


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


def nearest_value(head: Head, kept: list[int]) -> list[tuple[int, float, int]]:
    """As `nearest`, among values."""
    twin = copy.copy(head)
    twin.keys = head.values
    return nearest(twin, kept)


def d2o_independent_step(layer: Layer, size: int) -> None:
    """Keys join by keys, values by values, each past a threshold of its own."""
    for head in layer.heads:
        if len(head) <= size:
            continue
        kept = d2o_kept(head, size, recent=0.25)
        before = head.threshold or (None, None)
        after, entries = [], {}
        for name, find, old in zip(
            ("keys", "values"), (nearest, nearest_value), before, strict=True
        ):
            found, twin = find(head, kept), copy.copy(head)
            twin.keys, twin.values = head.keys.clone(), head.values.clone()
            after.append(moved(old, sum(u for _, u, _ in found) / len(found), 0.7))
            merge(twin, [f for f in found if f[1] >= after[-1] - 1e-12], official=False)
            entries[name] = getattr(twin, name)
        head.threshold, head.keys, head.values = tuple(after), entries["keys"], entries["values"]
        head.keep(kept)


def d2o_official_step(layer: Layer, size: int) -> None:
    """All heads decide together, about the mean of their i-th evicted entries."""
    if len(layer.heads[0]) <= size:
        return
    kept = [d2o_kept(head, size, recent=0.5) for head in layer.heads]
    found = [nearest(head, of_head) for head, of_head in zip(layer.heads, kept, strict=True)]
    together = [sum(u for _, u, _ in same) / len(same) for same in zip(*found, strict=True)]
    threshold = moved(layer.heads[0].threshold, sum(together) / len(together), 0.5)
    for head, of_head, evicted in zip(layer.heads, kept, found, strict=True):
        head.threshold = threshold
        reaching = zip(evicted, together, strict=True)
        merge(head, [f for f, u in reaching if u >= threshold - 1e-12], official=True)
        head.keep(of_head)


def d2o_official_sizes(layers: list[Layer], part: float) -> list[int]:
    """The released code: F is the mean of a layer's variances, brought to 0 … 1 over its heads."""
    tokens, means = len(layers[0].heads[0]), []
    for layer in layers:
        variances = [float(head.sums.var()) for head in layer.heads]
        low, high = min(variances), max(variances)
        means.append(sum((v - low) / (high - low + 1e-6) for v in variances) / len(variances))
    whole = sum(math.exp(-mean) for mean in means)
    sizes = [10**9] * len(layers)
    for index in range(2, len(layers) - 1):
        ratio = min(1.0, max(0.01, math.exp(-means[index]) / whole * len(layers) * part))
        hitters, recent = int(tokens * ratio * 0.5), int(tokens * ratio * 0.5)
        sizes[index] = hitters + recent
    return sizes


def sized_once(
    step: Callable[[Layer, int], None],
    sized: Callable[[list[Layer]], list[int]],
) -> Callable[[ByHand], None]:
    """Layers get their sizes at the end of the prompt, and hold them."""
    sizes: dict[int, list[int]] = {}

    def change(one: ByHand) -> None:
        if id(one) not in sizes:
            sizes[id(one)] = sized(one.layers)
        for layer, size in zip(one.layers, sizes[id(one)], strict=True):
            step(layer, size)

    return change


@SHAPES
def test_d2o_sizes_layers_merges_and_moves_its_threshold(heads, lengths):
    sizes = partial(d2o_sizes, budget=SMALL)
    assert_steps("d2o", SMALL, heads, lengths, sized_once(d2o_step, sizes))


@pytest.mark.slow
@SHAPES
def test_d2o_merges_keys_and_values_apart(heads, lengths):
    sizes, spec = partial(d2o_sizes, budget=SMALL), "d2o:similarity=independent"
    assert_steps(spec, SMALL, heads, lengths, sized_once(d2o_independent_step, sizes))


@pytest.mark.slow
@SHAPES
def test_d2o_with_whole_layers_inside_the_budget(heads, lengths):
    """The first two layers and the last hold a prompt's tokens; the other what they leave."""

    def sizes(layers: list[Layer]) -> list[int]:
        budget = int(len(layers[0].heads[0]) * 0.8125)
        return d2o_sizes(layers, budget, skipped=(0, 1, LAYERS - 1))

    spec = "d2o_official:spending=exact"
    assert_steps(spec, 0.8125, heads, lengths, sized_once(d2o_official_step, sizes))


@pytest.mark.slow
@SHAPES
def test_d2o_as_released(heads, lengths):
    """The first two layers and the last keep everything beside the budget, whatever it is."""
    sizes = partial(d2o_official_sizes, part=0.3)
    assert_steps("d2o_official", 0.3, heads, lengths, sized_once(d2o_official_step, sizes))


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


@SHAPES
@pytest.mark.parametrize("targets", [32, 3])
def test_cam_spreads_the_value_that_leaves(targets, heads, lengths):
    spec = f"cam:deterministic=true,targets={targets}"
    assert_steps(spec, SMALL, heads, lengths, lambda one: cam_step(one, SMALL, targets))


@pytest.mark.parametrize("lengths", [(17,), (SMALL, 18)])
@pytest.mark.parametrize("spec", ["h2o", "streaming_llm_original", "d2o", "cam:deterministic=true"])
def test_texts_that_fit_and_grow_past_the_budget(spec, lengths):
    """From the first eviction on it is as by hand, what is merged included."""
    by_layer = {"d2o": lambda one: [d2o_step(layer, SMALL) for layer in one.layers]}
    of_all = {"cam:deterministic=true": lambda one: cam_step(one, SMALL, 32)}
    by_head = {"h2o": h2o, "streaming_llm_original": first_and_newest}
    change = (by_layer | of_all).get(spec) or holding(by_head[spec], SMALL)
    assert_steps(spec, SMALL, 2, lengths, change, count=8)


# --- fewer tokens in every layer: PyramidInfer -------------------------------------------------


def going_on(rows: Tensor, tokens: int, part: float, least_context: int) -> list[int]:
    """Slots of a layer that the next one computes; rows `[Hq, n, n]`."""
    recent = int(tokens * 0.2)
    window = 1 + recent
    context = rows.shape[1] - window
    kept = int(context * part)
    if context <= min(least_context, tokens - window) or part >= 1:
        return list(range(rows.shape[1]))
    if kept <= min(least_context, tokens - window):
        return list(range(rows.shape[1]))
    weights = [1 + 0.2 * r / recent for r in range(window)]
    scores = [
        sum(w * float(rows[:, context + r, j].mean()) for r, w in enumerate(weights)) / window
        for j in range(context)
    ]
    scores[:SINKS] = [math.inf] * SINKS
    return sorted(best(scores, kept)) + list(range(context, rows.shape[1]))


@torch.no_grad()
def pyramidinfer(model: PreTrainedModel, ids: Tensor, least: float, least_context: int) -> ByHand:
    """The model's own parts, one layer after the other, with what is left of the hidden states."""
    out = ByHand(model)
    hidden, places = model.model.embed_tokens(ids), list(range(ids.shape[1]))
    for index, (block, layer) in enumerate(zip(model.model.layers, out.layers, strict=True)):
        attention = block.self_attn
        normed = block.input_layernorm(hidden)
        q, k, v = (
            project(normed)[0].unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = model.model.rotary_emb(hidden, torch.tensor([places]))
        q, k = (x[0] for x in apply_rotary_pos_emb(q[None], k[None], cos, sin))
        seen = layer.attend(q, k, v, 0, attention.scaling)
        hidden = hidden + attention.o_proj(seen.transpose(0, 1).flatten(1))[None]
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        for head in layer.heads:
            head.positions = list(places)
        part = (1 - least) * (math.cos(math.pi * index / LAYERS) + 1) / 2 + least
        slots = going_on(rows_of_layer(layer), ids.shape[1], part, least_context)
        hidden, places = hidden[:, slots], [places[i] for i in slots]
    out.seen = ids.shape[1]
    return out


@SHAPES
@pytest.mark.parametrize(("least", "least_context"), [(0.3, 8), (0.9, 20)])
def test_pyramidinfer_computes_fewer_tokens_in_every_layer(least, least_context, heads, lengths):
    ids, mask = prompts(lengths)
    model = model_with(heads, "kvfold")
    cache = kvfold.CompressedCache(
        model, f"pyramidinfer:least={least},least_context={least_context}"
    )
    kvfold.generate(model, ids, cache=cache, attention_mask=mask, max_new_tokens=1, do_sample=False)
    expected = []
    for row in rows_of(ids, lengths):
        # The prompt's last token is read with the answer.
        one = pyramidinfer(model_with(heads, "truth"), row[:, :-1], least, least_context)
        expected.append(one(row[:, -1:]))
    kept = [len(layer.heads[0]) for layer in expected[0].layers]
    assert kept == sorted(kept, reverse=True) and kept[0] == 64 and kept[-1] < 62
    assert_holds(cache, expected)


# --- repeating the text: KVzip -----------------------------------------------------------------

CHUNK = 24
FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with "


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tokenizer()(text, add_special_tokens=False).input_ids)


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@cache
def chat_frame() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the chat template puts before a message and after it."""
    message = [{"role": "user", "content": "WORDS"}]
    text = tokenizer().apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, after = text.split("WORDS")
    return ids_of(before), ids_of(after)


@cache
def kvzip_scores(heads: int, ids: tuple[int, ...], prefix: int) -> list[list[list[float]]]:
    """Of each layer, KV head and token after the prefix: the most attention while repeating."""
    model = model_with(heads, "truth", vocab_size=len(tokenizer()))
    text, postfix = ids[prefix:], chat_frame()[1]
    scores: list[list[list[float]]] = [[[] for _ in range(heads)] for _ in range(LAYERS)]
    for start in range(0, len(text), CHUNK):
        part = text[start : start + CHUNK]
        request = ids_of(FIRST)
        if start > 0:
            request = (*ids_of(LATER), *text[start - 8 : start])
        new = (*request, *postfix, *part)
        one = ByHand(model)(torch.tensor([ids + new]))
        scored = range(prefix + start, prefix + start + len(part))
        for layer, of_layer in zip(one.layers, scores, strict=True):
            for h, of_head in enumerate(of_layer):
                of_head += most_attention(layer, h, prefix, scored, len(new))
    return scores


def most_attention(layer: Layer, h: int, prefix: int, scored: range, new: int) -> list[float]:
    """Over all new queries of a group: softmax over the prefix, the part and the new entries."""
    head = layer.heads[h]
    group = len(layer.query) // len(layer.heads)
    places = [*range(prefix), *scored, *range(len(head) - new, len(head))]
    later = torch.ones(new, new, dtype=torch.bool).triu(1)
    hidden = torch.cat([torch.zeros(new, len(places) - new, dtype=torch.bool), later], 1)
    most = torch.zeros(len(scored), dtype=torch.float64)
    for query in layer.query[h * group : (h + 1) * group, -new:]:
        logits = query @ head.keys[places].T * layer.scale
        rows = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        most = torch.maximum(most, rows[:, prefix : prefix + len(scored)].amax(0))
    return most.tolist()


def kvzip(scores: list[list[list[float]]], mean: int, prefix: int, options: str) -> list:
    """Positions per layer and head: the prefix, and the best of all layers and heads."""
    every = [
        (-score, layer, head, token)
        for layer, heads in enumerate(scores)
        for head, tokens in enumerate(heads)
        for token, score in enumerate(tokens)
    ]
    heads = len(scores) * len(scores[0])
    total = min(mean * heads, len(every))
    kept = sorted(every)[:total]
    if options == "strict=true":
        kept = [pair for pair in kept if pair[0] < kept[-1][0]]
    if options == "level=uniform":
        kept = [
            (0.0, layer, head, token)
            for layer, of_heads in enumerate(scores)
            for head, tokens in enumerate(of_heads)
            for token in best(tokens, mean)
        ]
    if options == "level=head":
        order = sorted((-max(t), i, h) for i, hs in enumerate(scores) for h, t in enumerate(hs))
        whole = {(i, h) for _, i, h in order[: total // len(scores[0][0])]}
        kept = [pair for pair in every if pair[1:3] in whole]
    out = [[list(range(prefix)) for _ in of_heads] for of_heads in scores]
    for _, layer, head, token in kept:
        out[layer][head].append(prefix + token)
    return out


def some_ids(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(40, len(tokenizer()), (count,), generator=generator).tolist())


@pytest.mark.slow
@HEADS
@pytest.mark.parametrize("options", ["", "strict=true", "level=uniform", "level=head"])
def test_kvzip_keeps_what_repeating_the_text_looks_at(options, heads):
    """A chat of 70 tokens and a bare text of 53; the first's last part is a short one."""
    size = len(tokenizer())
    model, truth = (model_with(heads, role, vocab_size=size) for role in ("kvfold", "truth"))
    opening = chat_frame()[0]
    # The last token is read with the answer.
    texts = [opening + some_ids(70 - len(opening), 1), some_ids(53, 2)]
    cache = kvfold.CompressedCache(
        model, f"kvzip:{options or 'level=pair'},chunk={CHUNK}", SMALL, tokenizer=tokenizer()
    )
    ids = torch.tensor([texts[0], (0,) * 17 + texts[1]])
    mask = torch.tensor([[1] * 70, [0] * 17 + [1] * 53])
    kvfold.generate(model, ids, cache=cache, attention_mask=mask, max_new_tokens=1, do_sample=False)
    expected = []
    for text, prefix in zip(texts, (len(opening), 0), strict=True):
        kept = kvzip(kvzip_scores(heads, tuple(text[:-1]), prefix), SMALL, prefix, options)
        one = ByHand(truth)(torch.tensor([text[:-1]]))
        expected.append(evict(one, lambda _, kept=kept: kept)(torch.tensor([text[-1:]])))
    assert_holds(cache, expected)


@HEADS
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_kvzip_keeps_heads_by_scores_from_a_file_and_repeats_nothing(heads, suffix, tmp_path):
    size = len(tokenizer())
    model, truth = (model_with(heads, role, vocab_size=size) for role in ("kvfold", "truth"))
    opening = chat_frame()[0]
    texts = [opening + some_ids(70 - len(opening), 1), some_ids(53, 2)]
    scores = torch.rand(LAYERS, heads, generator=torch.Generator().manual_seed(3))
    file = str(tmp_path / f"heads{suffix}")
    if suffix == ".pt":
        torch.save(scores[:, None], file)
    else:
        save_file({"head_scores": scores}, file)
    cache = kvfold.CompressedCache(
        model, f"kvzip:level=head,head_scores={file}", 0.5, tokenizer=tokenizer()
    )
    ids = torch.tensor([texts[0], (0,) * 17 + texts[1]])
    mask = torch.tensor([[1] * 70, [0] * 17 + [1] * 53])
    lengths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    options = {"attention_mask": mask, "max_new_tokens": 1, "do_sample": False}
    kvfold.generate(model, ids, cache=cache, prefill_chunk=30, **options)
    hook.remove()
    assert lengths == [30, 30, 9, 1]
    expected = []
    for text, prefix in zip(texts, (len(opening), 0), strict=True):
        tokens = len(text) - 1 - prefix
        per_token = [[[score] * tokens for score in layer] for layer in scores.tolist()]
        kept = kvzip(per_token, int(tokens * 0.5), prefix, "level=head")
        one = ByHand(truth)(torch.tensor([text[:-1]]))
        expected.append(evict(one, lambda _, kept=kept: kept)(torch.tensor([text[-1:]])))
    assert_holds(cache, expected)


# --- no budget: auto ---------------------------------------------------------------------------


def output_change(layer: Layer, kept: list[list[int]], queries: slice) -> float:
    """Relative change of the layer's attention output when only `kept` stays in each head."""
    change = whole = 0.0
    for head, slots in zip(layer.heads, kept, strict=True):
        for row in head.rows[:, queries].flatten(0, 1):
            full = row @ head.values
            left = row[slots] @ head.values[slots] / row[slots].sum()
            change += float((left - full).square().sum())
            whole += float(full.square().sum())
    return math.sqrt(change / whole)


def ranking(layer: Layer) -> list[tuple[float, int, int]]:
    """Entries of all heads that may go, the best first: score, head, slot."""
    ranked = []
    for h, head in enumerate(layer.heads):
        rows = head.rows[:, -WINDOW:].flatten(0, 1)
        change = torch.zeros(len(head), dtype=torch.float64)
        for row in rows:
            change += (row[:, None] * (head.values - row @ head.values)).square().sum(-1)
        scores = pooled(change.sqrt().tolist(), 7, "max")
        free = range(SINKS, len(head) - WINDOW)
        ranked += [(-scores[j], h, j) for j in free]
    return sorted(ranked)


def auto_kept(layer: Layer, chosen: list[tuple[float, int, int]]) -> list[list[int]]:
    kept = [[*range(SINKS), *newest(head, WINDOW)] for head in layer.heads]
    for _, h, j in chosen:
        kept[h].append(j)
    return kept


@SHAPES
@pytest.mark.parametrize("tolerance", [0.05, 0.3])
def test_auto_keeps_the_fewest_within_its_tolerance(tolerance, heads, lengths):
    spec = f"auto:window={WINDOW},tolerance={tolerance},measure=true"
    cache = compressed(spec, None, heads, lengths).cache
    errors = torch.zeros(LAYERS, 2)
    for row, length in enumerate(lengths):
        for index, layer in enumerate(prompt_read(heads, lengths, row).layers):
            found = [p - (64 - length) for p in cache.positions(index)[row]]
            free = sum(map(len, found)) - heads * (SINKS + WINDOW)
            ranked = ranking(layer)
            kept = auto_kept(layer, ranked[:free])
            assert [p.tolist() for p in found] == [sorted(slots) for slots in kept]
            predicted = output_change(layer, kept, slice(-WINDOW, None))
            assert predicted <= tolerance
            if free:
                one_less = auto_kept(layer, ranked[: free - 1])
                assert output_change(layer, one_less, slice(-WINDOW, None)) > tolerance
            errors[index, 0] += predicted / len(lengths)
            measured = output_change(layer, kept, slice(-2 * WINDOW, -WINDOW))
            errors[index, 1] += measured / len(lengths)
    torch.testing.assert_close(torch.tensor(cache.stats().errors), errors, **CLOSE)
    assert 0 < cache.stats().kept_fraction < 1
