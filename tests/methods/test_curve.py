# SPDX-License-Identifier: Apache-2.0
"""curve: sizes of heads from a fitted file, by expected attention or another method's scores."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import kvfold
from kvfold import CompressedCache, IllegalComposition, ScorerFileError
from kvfold.fitted.of_model import write_fitted
from kvfold.methods.stages.allocate.parts import Curve, proportional_within
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    PIECES,
    SHAPES,
    WINDOW,
    Keep,
    Layer,
    assert_prefill,
    model_with,
    with_window,
)
from tests.helpers.caches import GREEDY, PADDED, positions, start
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.models import build, prompts
from tests.helpers.scorers import zap_of
from tests.helpers.tokenizers import word_tokenizer

SNAPKV = "snapkv:window=8"


def random_curve(model: Any) -> Curve:
    config, draw = model.config, torch.Generator().manual_seed(0)
    shape = 3, config.num_hidden_layers, config.num_key_value_heads
    return Curve(torch.tensor([0.2, 0.4, 0.6]), torch.rand(shape, generator=draw))


def curve_of(model: Any, folder: Path, curve: Curve | None = None) -> str:
    """The text of curve with a random one of the model, written into `folder`."""
    path = folder / "curve.safetensors"
    write_fitted(path, curve or random_curve(model), model, written_by="", target="snapkv", texts=0)
    return f"curve:file={path}"


def shared_out(weights: list[float], total: int, least: int, most: int) -> list[int]:
    """Shares in proportion, heads outside the bounds fixed step by step; largest remainder."""
    fixed: dict[int, float] = {}
    while True:
        open_ = [i for i in range(len(weights)) if i not in fixed]
        each = (total - sum(fixed.values())) / sum(weights[i] for i in open_) if open_ else 0
        wanted = {i: weights[i] * each for i in open_}
        off = {i: min(max(share, least), most) - share for i, share in wanted.items()}
        whole = sum(off.values())
        wrong = [i for i, by in off.items() if by * whole > 0 or (by and not whole)]
        if not wrong:
            break
        fixed |= {i: wanted[i] + off[i] for i in wrong}
    shares = [fixed.get(i, wanted.get(i, 0.0)) for i in range(len(weights))]
    counts = [math.floor(share + 1e-9) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def of_curve(curve: Curve) -> Keep:
    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        tokens, heads = len(layers[0].heads[0]), len(layers[0].heads)
        weights = curve.at(SMALL / tokens).flatten().tolist()
        sizes = shared_out(weights, SMALL * len(weights), WINDOW, tokens)
        return [
            [with_window(head, sizes[i * heads + h]) for h, head in enumerate(layer.heads)]
            for i, layer in enumerate(layers)
        ]

    return keep


@PIECES
@SHAPES
def test_kept_entries(heads, lengths, chunk, tmp_path) -> None:
    model = model_with(heads, "kvfold")
    spec = f"{SNAPKV} + {curve_of(model, tmp_path)}"
    assert_prefill(spec, SMALL, heads, lengths, of_curve(random_curve(model)), chunk)


@pytest.mark.parametrize("budget", [20, 0.5])
def test_heads_have_the_sizes_of_the_curve_at_the_budget(model, tmp_path, budget) -> None:
    cache = start(model, f"{SNAPKV} + {curve_of(model, tmp_path)}", PADDED, budget=budget).cache
    curve = random_curve(model)
    for row, length in enumerate(PADDED):
        size = budget * length if budget == 0.5 else min(budget, length)
        wanted = proportional_within(
            curve.at(size / length).flatten(),
            math.floor(8 * size),
            torch.full((8,), min(8.0, length)).double(),
            torch.full((8,), length).double(),
        )
        found = [n for layer in cache.stats().kept for n in layer[row]]
        assert found == wanted and sum(found) == math.floor(8 * size)


@pytest.mark.slow
def test_the_choice_inside_a_head_is_the_other_methods(model, tmp_path) -> None:
    """Equal parts are the method alone; with a curve, more or fewer of the same ranking."""
    equal = dataclasses.replace(random_curve(model), parts=torch.full((3, 4, 2), 0.5))
    spec = f"{SNAPKV} + {curve_of(model, tmp_path, equal)}"
    assert positions(start(model, spec).cache) == positions(start(model, SNAPKV).cache)
    whole = start(model, SNAPKV, budget=40).cache
    spread = start(model, f"{SNAPKV} + {curve_of(model, tmp_path)}").cache
    for layers, fewer in zip(positions(whole), positions(spread), strict=True):
        for most, head in zip(layers[0], fewer[0], strict=True):
            assert len(head) > 40 or set(head) <= set(most)


def test_alone_it_scores_by_expected_attention(model, tmp_path) -> None:
    curve = curve_of(model, tmp_path)
    alone = start(model, curve)
    other = start(model, f"expected_attention:epsilon=0.02 + {curve}")
    assert positions(alone.cache) == positions(other.cache)


def test_a_context_is_saved_and_goes_on(tmp_path) -> None:
    model, tokenizer = new_model(), word_tokenizer()
    spec = f"snapkv:window=8 + {curve_of(model, tmp_path)}"
    context = kvfold.compress(model, tokenizer, DOCUMENT, spec, 0.4)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    assert loaded.ask(QUESTION, max_new_tokens=8) == context.ask(QUESTION, max_new_tokens=8)


def test_a_padded_row_is_its_prompt_alone(model, tmp_path) -> None:
    spec = f"{SNAPKV} + {curve_of(model, tmp_path)}"
    ids, mask = prompts(PADDED)
    batch = CompressedCache(model, spec, 20)
    out = kvfold.generate(model, ids, cache=batch, attention_mask=mask, **GREEDY)
    for row, length in enumerate(PADDED):
        alone = CompressedCache(model, spec, 20)
        own = kvfold.generate(model, ids[row : row + 1, 64 - length :], cache=alone, **GREEDY)
        assert torch.equal(own[0], out[row, 64 - length :])
        for layer, expected in zip(positions(batch), positions(alone), strict=True):
            assert [[at - 64 + length for at in head] for head in layer[row]] == expected[0]


def test_files_of_others_are_refused(tmp_path) -> None:
    model = build("llama")
    spec = f"snapkv + {curve_of(model, tmp_path)}"
    CompressedCache(model, spec, 0.5)
    for other, why in [
        (build("llama", seed=1), "other weights"),
        (build("llama", torch.bfloat16), "float32, and the model computes in bfloat16"),
        (build("llama", num_key_value_heads=4), "another model"),
    ]:
        with pytest.raises(ScorerFileError, match=f"{why}.*--scorer curve"):
            CompressedCache(other, spec, 0.5)
    scorer = zap_of(model, tmp_path).removeprefix("zap:file=")
    with pytest.raises(ScorerFileError, match="no file for curve"):
        CompressedCache(model, f"snapkv + curve:file={scorer}", 0.5)
    with pytest.raises(ScorerFileError, match="cannot read"):
        CompressedCache(model, f"snapkv + curve:file={tmp_path / 'nothing'}", 0.5)
    path = tmp_path / "curve.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ScorerFileError):
        CompressedCache(model, spec, 0.5)


def test_sizes_of_heads_exclude_other_sizes() -> None:
    for spec in ("adakv + curve", "pyramidkv + curve", "kvzip + curve"):
        with pytest.raises(IllegalComposition):
            kvfold.parse(spec)


def test_the_bundled_model_has_a_curve() -> None:
    model, tokenizer = kvfold.bundled_model()
    text = "the keys of the house are under the third stone on the left of the door " * 6
    context = kvfold.compress(model, tokenizer, text, "curve", 0.3)
    kept = context.stats().kept
    assert len({n for layer in kept for n in layer[0]}) > 4
    assert context.stats().kept_fraction == pytest.approx(0.3, abs=0.01)
