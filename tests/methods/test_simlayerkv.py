# SPDX-License-Identifier: Apache-2.0
"""SimLayerKV: which layers are lazy, and what they keep, by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from kvfold import parse
from kvfold.methods.base import Across, Measured
from kvfold.methods.stages.when import AtEnd, Once
from kvfold.observers.last_queries import window_of
from tests.helpers.by_hand import (
    ALONE,
    SHAPES,
    SINKS,
    WINDOW,
    Layer,
    assert_holds,
    assert_prefill,
    evict,
    first_and_newest,
    prompt_read,
    read_by_kvfold,
    rows_of_layer,
    with_window,
)
from tests.helpers.models import continuation, prompts
from tests.helpers.observations import observe
from tests.helpers.padded_prefill import LENGTHS, kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("threshold=-1", [12, 12, 12]),
        ("threshold=1", [64, 53, 24]),
        ("threshold=-1,sinks=8,window=16", [24, 24, 24]),
    ],
)
@pytest.mark.parametrize("when", ["last_query", "prefill", "first_decode"])
def test_simlayerkv_trims_all_layers_or_none_at_the_ends(model, options, expected, when):
    defaults = "" if "window" in options else ",window=8"
    spec = f"simlayerkv:{options}{defaults},when={when}"
    counts, cache = kept(model, spec)
    if when == "first_decode":
        assert counts[..., 0].tolist() == [[64, 53, 24]] * 4
        mask = torch.cat([prompts(LENGTHS)[1], torch.ones(3, 1, dtype=torch.long)], 1)
        with torch.no_grad():
            model(torch.full((3, 1), 5), attention_mask=mask, past_key_values=cache)
        counts = torch.tensor(cache.stats().kept)
        expected = [n + 1 if "threshold=1" in options else n for n in expected]
    assert counts.tolist() == [[[n] * 2 for n in expected]] * 4
    if options == "threshold=-1" and when == "last_query":
        places = [0, 1, 2, 3, *range(56, 64)]
        assert cache.positions(0)[0][0].tolist() == places


def test_simlayerkv_may_keep_the_last_layer(model):
    counts, _ = kept(model, "simlayerkv:window=8,threshold=-1,keep_last_layer=true")
    assert counts[:, 0, 0].tolist() == [12, 12, 12, 64]


def test_simlayerkv_asks_the_queries_it_names():
    for when, window in (("last_query", 1), ("first_decode", 1), ("prefill", 5)):
        stages = parse(f"simlayerkv:when={when},n_last=5").stages()
        assert window_of(stages.needs) == window
        assert stages.when == (Once() if when == "first_decode" else AtEnd())
    seen = observe([40], layer=1)
    sizes = set()
    for when in ("last_query", "prefill,n_last=5", "prefill,n_last=5,recent=30"):
        threshold = _threshold_between(seen, when)
        sizes.add(round(threshold, 3))
    assert len(sizes) == 3


def _threshold_between(seen, when):
    """The attention mass that the method sees, by bisection over its threshold."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        stages = parse(f"simlayerkv:window=8,sinks=2,threshold={middle},when={when}").stages()
        assert isinstance(stages.allocate, Measured)
        low, high = (middle, high) if int(stages.allocate.size(seen)) == 10 else (low, middle)
    return low


@pytest.mark.parametrize("strategy", ["random", "random_bottom", "random_top", "pyramid"])
def test_simlayerkv_strategies_keep_as_much_as_it_does(strategy):
    # With other numbers of heads, so that what is drawn differs.
    layers = [observe([40, 31], heads=1 + layer, layers=6, seed=3) for layer in range(6)]
    spec = "simlayerkv:window=8,sinks=2,threshold=0.3"
    lazy = parse(spec).stages().allocate
    compared = parse(f"{spec},strategy={strategy}").stages().allocate
    assert isinstance(lazy, Measured) and isinstance(compared, Across)
    alone = torch.stack([lazy.size(seen) for seen in layers])
    nobody = torch.zeros(2, dtype=torch.long)
    shared = torch.stack(
        compared.share([compared.statistic(seen) for seen in layers], nobody, nobody)
    )
    trimmed = (alone == 10).sum(0)
    assert 0 < trimmed.max() < 6
    if strategy in ("random", "pyramid"):
        assert torch.equal(shared.sum(0), alone.sum(0))
    else:
        assert (shared == 10).sum(0).tolist() == trimmed.clamp(max=3).tolist()
        other = shared[3:] if strategy == "random_bottom" else shared[:3]
        assert other.tolist() == [[40, 31]] * 3


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
        ("llama2", 0.65, 36, None, 3),
        ("mistral", 0.8, 43, None, 3),
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

    held = read_by_kvfold(f"simlayerkv_{name}:window={window}", None, 2, ALONE).cache
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
    reader = read_by_kvfold(spec, None, heads, lengths)
    reader(step)
    expected = [
        evict(one, lambda layers: trimmed_if_lazy(layers, threshold, mass_of_last_query))
        for one in after
    ]
    assert sorted(len(layer.heads[0]) for layer in expected[0].layers) == [12, 12, 65, 65]
    assert_holds(reader.cache, expected)
