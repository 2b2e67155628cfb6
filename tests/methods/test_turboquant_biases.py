# SPDX-License-Identifier: Apache-2.0
"""TurboQuant on models whose keys have large biases: they are kept beside the codes, exactly."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.kernels.per_token import RotatedKeys
from tests.helpers.caches import ALONE, PADDED, decode, start
from tests.helpers.models import build, continuation, prompts, with_key_biases
from tests.helpers.truth import Reader, rotated, stock_cache, worst

TURBO = "turboquant:residual=8,sinks=2,end_layers=0"
CHANNELS = [1, 6, 7, 15]


def tiny(**options: Any) -> Any:
    return build("llama", torch.float64, head_dim=16, num_hidden_layers=2, **options)


def biased(**options: Any) -> Any:
    return with_key_biases(tiny(**options), CHANNELS, 60.0)


def means_of(reader: Reader) -> list[Tensor]:
    encoded = [state.store._keys.encoded for state in reader.cache.states]
    assert all(isinstance(keys, RotatedKeys) and keys.means is not None for keys in encoded)
    return [keys.means.rows.clone() for keys in encoded]


def lost(reader: Reader, full: Reader) -> float:
    """Largest error of the stored keys in the first layer, whose keys read no others."""
    kept = reader.cache.positions(0)
    keys, exact = (each.cache.states[0].stored().dense()[0] for each in (reader, full))
    errors = []
    for row, heads in enumerate(kept):
        for head, at in enumerate(heads):
            errors.append(
                (keys[row, head, -len(at) :] - exact[row, head, at]).norm(dim=-1).max().item()
            )
    return max(errors)


@torch.no_grad()
def logits(model: Any, ids: Tensor, cache: Any, prompt: int) -> Tensor:
    pieces = ids.split([prompt, *[1] * (ids.shape[1] - prompt)], 1)
    found = [model(piece, past_key_values=cache).logits[:, -1] for piece in pieces]
    return torch.cat(found).double().log_softmax(-1)


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("spec", "budget", "prompt"),
    [("turboquant", None, 120), ("turboquant", None, 30), ("snapkv + turboquant", 0.6, 120),
     ("turboquant:keys=3,end_layers=0", None, 120), ("turboquant:keys=8", None, 120)],
)  # fmt: skip
def test_answers_of_a_model_with_large_biases_are_as_near_as_without(spec, budget, prompt):
    """KL of its logits to those of the same entries held raw, where biases change attention little.

    Channels of the lowest frequencies turn too little for it. Codes of whole keys are 5 to 50 times
    farther away.
    """
    model, tokenizer = kvfold.bundled_model()
    model, text = copy.deepcopy(model), Path(kvfold.__file__).read_text(encoding="utf-8")
    ids, found = torch.tensor([tokenizer.encode(text * 3)[: prompt + 45]]), []
    for by in (0.0, 200.0):
        with_key_biases(model, [13, 15, 31], by)
        raw = kvfold.CompressedCache(model, "snapkv" if budget else "full", budget)
        true = logits(model, ids, raw, prompt)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mine = logits(model, ids, kvfold.CompressedCache(model, spec, budget), prompt)
        found.append((true.exp() * (true - mine)).sum(-1).mean().item())
    assert 0 < found[1] < 2 * found[0] + 0.01


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
@pytest.mark.parametrize(
    "spec",
    [TURBO, f"{TURBO},keys=8", f"snapkv:window=8 + {TURBO}", f"adakv:window=8 + {TURBO}",
     f"snapkv:window=8 + {TURBO} + every:interval=8"],
)  # fmt: skip
def test_keys_lose_no_more_than_those_without_biases(spec, lengths):
    """In the first layer, after turns with padding between, steps, lots, and rounds."""
    errors = []
    for model in (tiny(), biased()):
        reader, full = (
            start(model, each, lengths, **({"budget": 40} if "window" in each else {}))
            for each in (spec, "full")
        )
        for piece in (
            continuation(len(lengths), 12, seed=5),
            *continuation(len(lengths), 45).split(1, 1),
        ):
            reader(piece), full(piece)
        errors.append(lost(reader, full))
    assert errors[1] < 1.5 * errors[0]


def test_means_are_those_of_the_first_keys_before_rope_and_stay():
    model = biased()
    reader, full = start(model, TURBO), start(model, "full")
    keys = full.cache.states[0].stored().dense()[0]
    before = rotated(keys, -torch.arange(64)[None, None])[:, :, 2:].mean(2)
    first = means_of(reader)
    torch.testing.assert_close(first[0], before[0], atol=1e-4, rtol=0)
    assert (before[0, :, CHANNELS] - 60).abs().max() < 5
    decode(reader, 45)
    reader(continuation(1, 30, seed=4))
    assert all(map(torch.equal, means_of(reader), first))


@pytest.mark.slow
def test_a_padded_row_has_the_means_that_it_has_alone():
    model = biased()
    together, (ids, _) = start(model, TURBO, PADDED), prompts(PADDED)
    alone = Reader(model, kvfold.CompressedCache(model, TURBO))
    alone(ids[1:2, -53:])
    short = Reader(model, kvfold.CompressedCache(model, TURBO))
    short(ids[2:3, -24:])
    for step in continuation(3, 45).split(1, 1):
        rows = together(step)
        for row, each in ((1, alone), (2, short)):
            torch.testing.assert_close(
                rows[row : row + 1], each(step[row : row + 1]), atol=1e-5, rtol=0
            )
    for layer, rows in enumerate(means_of(together)):
        for row, each in ((1, alone), (2, short)):
            own = means_of(each)[layer]
            torch.testing.assert_close(rows[2 * row : 2 * row + 2], own, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [TURBO, f"{TURBO},keys=8,values=2", f"adakv:window=8 + {TURBO}"])
def test_queries_attend_to_the_decoded_keys(spec):
    """Steps and a turn, as a stock cache of the decoded entries gives them."""
    reader = start(biased(), spec, budget=200) if "adakv" in spec else start(biased(), spec)
    for piece in (*continuation(1, 40).split(1, 1), continuation(1, 9, 5)):
        stock = stock_cache(reader.model)
        for index, state in enumerate(reader.cache.states):
            stock.update(*state.stored().dense(), index)
        expected = Reader(reader.model, stock)
        expected.started = True
        assert worst(reader(piece), expected(piece)) < 1e-4


@pytest.mark.parametrize("spec", [TURBO, f"snapkv:window=8 + {TURBO}"])
def test_edits_move_keys_and_their_means(spec):
    """Those that stay in place keep their codes; moved keys are rotated from what they were."""
    reader = start(biased(), spec, budget=48) if "snapkv" in spec else start(biased(), spec)
    cache, first = reader.cache, means_of(reader)
    before, was = [state.stored().dense()[0] for state in cache.states], cache.states[0].columns()
    cache.drop((20, 27))
    for old, new in zip(first, means_of(reader), strict=True):
        assert torch.equal(old, new)
    keys, columns = cache.states[0].stored().dense()[0], cache.states[0].columns()
    for head in range(2):
        stay = was[0, head][(was[0, head] < 20) & (was[0, head] >= 0)]
        assert torch.equal(
            keys[0, head][columns[0, head] < 20][-len(stay) :], before[0][0, head][: len(stay)]
        )
        later = rotated(before[0], -7 * (was >= 27).long())[0, head][was[0, head] >= 27]
        assert (keys[0, head][columns[0, head] >= 20] - later).norm(dim=-1).max() < 1.5
    reader(continuation(1, 5))
    cache.replace((30, 34), continuation(1, 9, 8))
    assert all(map(torch.equal, means_of(reader), first))
    assert all(bool(out.isfinite().all()) for out in decode(reader, 40))


def test_forks_and_reordered_rows_keep_the_means():
    model = biased()
    reader = start(model, TURBO, (64, 64, 64))
    first = means_of(reader)
    twin = copy.deepcopy(reader.cache)
    twin.batch_select_indices(torch.tensor([2, 0]))
    for rows, state in zip(first, twin.states, strict=True):
        assert torch.equal(state.store._keys.encoded.means.rows, rows[[4, 5, 0, 1]])
    steps = continuation(3, 12)
    together = [reader(step) for step in steps.split(1, 1)]
    chosen = Reader(model, twin)
    for all_rows, step in zip(together, steps[[2, 0]].split(1, 1), strict=True):
        torch.testing.assert_close(chosen(step), all_rows[[2, 0]], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("amount", [9_000, 14_000, 40_000])
def test_a_budget_in_bytes_holds_the_means_too(amount):
    for model in (tiny(), biased()):
        reader = start(model, f"snapkv:window=8 + {TURBO}", (300,), budget=f"{amount * 8}B")
        assert reader.cache.stats().kv_bytes <= amount * 8


def test_a_bias_behind_an_unknown_rope_is_warned_of():
    """Nothing else is known to be wrong there; without biases there is no word."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    for model, says in ((tiny(rope_parameters=rope), False), (biased(rope_parameters=rope), True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start(model, TURBO)
        found = [str(each.message) for each in caught if "large biases" in str(each.message)]
        assert bool(found) == says and all("choose kivi" in each for each in found)
