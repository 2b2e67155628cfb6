# SPDX-License-Identifier: Apache-2.0
"""The same prompt gives the same result, whatever was read before it, beside it or in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.errors import UnsupportedModel
from tests.helpers.budgets import NAMED, SMALL, compressed, needs_driver
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader

ALONE, PADDED = (64,), (64, 53, 24)
EVERY = pytest.mark.parametrize("spec", NAMED)
# Presets have the code of their method, so that one of each will do.
ONCE = list({type(kvfold.parse(spec)): spec for spec in reversed(NAMED)}.values())[::-1]
KINDS = pytest.mark.parametrize("spec", ONCE)
GREEDY = {"do_sample": False, "max_new_tokens": 4}
# What the random part of these depends on is the seed, and with it head and position alone.
DRAWN = ["cam", "cam:newest=0", "h2o + merge:rule=cam", "random", "d2o", "d2o:decode=append"]
CHANGING = ["cam", "cam:newest=0", "h2o + merge:rule=cam", "random"]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", torch.float64, num_hidden_layers=3)


def new_cache(model: Any, spec: str, **options: Any) -> kvfold.CompressedCache:
    tokenizer = word_tokenizer() if needs_driver(spec) else None
    return compressed(model, spec, tokenizer=tokenizer, **options)


def prompt(seed: int, length: int = 64) -> Tensor:
    return prompts((length,), seed)[0]


def answer(
    model: Any, cache: kvfold.CompressedCache, ids: Tensor, mask: Tensor | None = None
) -> Tensor:
    """The prompt and four tokens."""
    mask = torch.ones_like(ids) if mask is None else mask
    return kvfold.generate(model, ids, cache=cache, attention_mask=mask, **GREEDY)


def held(cache: kvfold.CompressedCache) -> list[Tensor]:
    """Copies of all keys, values and columns, decoded."""
    parts = ((*layer.stored().dense(), layer.columns()) for layer in cache.states)
    return [part.clone() for layer in parts for part in layer]


def row_of(cache: kvfold.CompressedCache, row: int, padding: int) -> list[Tensor]:
    """One row's positions, keys and values, head after head, without padding and holes."""
    parts = []
    for layer in cache.states:
        keys, values = layer.stored().dense()
        for head, columns in enumerate(layer.columns()[row]):
            real = columns >= 0
            parts += [columns[real] - padding, keys[row, head][real], values[row, head][real]]
    return parts


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def assert_close(one: list[Tensor], other: list[Tensor]) -> None:
    """The same entries, up to how a batch of another size is multiplied."""
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


# --- seeds ---------------------------------------------------------------------------------------


def run(model: Any, spec: str, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Logits of a padded prompt, of six steps and of a second turn; and what is held then."""
    ids, mask = prompts(PADDED)
    reader = Reader(model, compressed(model, spec, seed=seed), mask)
    logits = [reader(ids)[mask.bool()]]
    logits += [reader(token) for token in continuation(3, 6).split(1, 1)]
    logits.append(reader(continuation(3, 9, seed=5)))
    return logits, held(reader.cache)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("spec", DRAWN)
def test_a_seed_gives_the_same_bits_again(spec, dtype):
    small = build("llama", dtype, num_hidden_layers=3)
    torch.manual_seed(1)
    first = run(small, spec, seed=7)
    torch.manual_seed(2)  # nothing is drawn from torch's own generator
    again = run(build("llama", dtype, num_hidden_layers=3), spec, seed=7)
    assert same(first[0], again[0]) and same(first[1], again[1])


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("spec", DRAWN)
def test_another_seed_changes_what_is_drawn_and_nothing_else(model, spec):
    outcomes = [run(model, spec, seed) for seed in (0, 1, 2)]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        alike = same(outcomes[one][1], outcomes[other][1])
        assert alike == (spec not in CHANGING)
        # The prompt itself is attended to in full.
        assert torch.equal(outcomes[one][0][0], outcomes[other][0][0])
    if "cam" in spec:
        keys_of = [outcome[1][:3] for outcome in outcomes]
        assert torch.equal(keys_of[0][0], keys_of[1][0])  # the first layer's keys see no values
        assert not torch.equal(keys_of[0][1], keys_of[1][1])


def test_draws_differ_from_layer_to_layer_and_from_turn_to_turn(model):
    cache = compressed(model, "random", 20)
    reader = Reader(model, cache)
    reader(prompt(1))
    layers = [[h.tolist() for h in cache.positions(i)[0]] for i in range(3)]
    assert layers[0] != layers[1] != layers[2] and layers[0][0] != layers[0][1]
    more = continuation(1, 40)
    reader(more)
    # Were the second turn's draw the first one's, this would keep what one turn keeps of it all.
    at_once = compressed(model, "random", 20)
    Reader(model, at_once)(torch.cat([prompt(1), more], 1))
    assert at_once.positions(0)[0][0].tolist() != cache.positions(0)[0][0].tolist()


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cases(6)
@KINDS
def test_a_row_is_the_same_in_any_place(model, spec):
    ids, mask = prompts(PADDED)
    first = new_cache(model, spec)
    out = answer(model, first, ids, mask)
    padding = [64 - length for length in PADDED]
    order = [2, 0, 1]
    cache = new_cache(model, spec)
    turned = answer(model, cache, ids[order], mask[order])
    for place, row in enumerate(order):
        assert torch.equal(turned[place], out[row])
        assert_close(row_of(cache, place, 0), row_of(first, row, 0))
    for row in (0, 2):
        cache = new_cache(model, spec)
        answer(model, cache, ids[row : row + 1, padding[row] :])
        assert_close(row_of(cache, 0, 0), row_of(first, row, padding[row]))


@pytest.mark.parametrize("spec", [*ONCE, "h2o + merge:rule=cam"])
def test_equal_rows_stay_equal(model, spec):
    ids, mask = prompts((53, 64))
    cache = new_cache(model, spec)
    order = [0, 1, 0]
    out = answer(model, cache, ids[order], mask[order])
    assert torch.equal(out[0], out[2])
    assert_close(row_of(cache, 0, 0), row_of(cache, 2, 0))


# --- one after the other -------------------------------------------------------------------------


def two_turns(model: Any, cache: kvfold.CompressedCache, seed: int) -> list[Tensor]:
    """The texts after two turns, and all that is held after each."""
    first = answer(model, cache, prompt(seed, 40 + 8 * seed))
    after_first = held(cache)
    second = answer(model, cache, torch.cat([first, continuation(1, 10, seed)], 1))
    return [first, *after_first, second, *held(cache)]


@pytest.mark.slow
@pytest.mark.cases(3)
@KINDS
def test_prompts_in_any_order_give_the_same_results(model, spec):
    upwards = {seed: two_turns(model, new_cache(model, spec), seed) for seed in (1, 2, 3)}
    for seed in (3, 2, 1):
        assert same(two_turns(model, new_cache(model, spec), seed), upwards[seed])


@pytest.mark.slow
@pytest.mark.cases(4)
@EVERY
def test_a_reset_cache_forgets_its_prompts(model, spec):
    cache = new_cache(model, spec)
    first = two_turns(model, cache, 1)
    assert cache.stats().seen > 0
    cache.reset()
    stats = cache.stats()
    assert (stats.seen, stats.nbytes, stats.kept, cache.runs_own_forwards) == (
        0,
        0,
        [],
        needs_driver(spec),
    )
    assert same(two_turns(model, cache, 1), first)
    # What another prompt left, padded and in the middle of blocks, is forgotten as well.
    cache.reset()
    ids, mask = prompts(PADDED)
    answer(model, cache, ids, mask)
    with cache.frozen(), cache.reading():
        cache.reset()
    assert same(two_turns(model, cache, 1), first)


@contextmanager
def interrupted(model: Any, layer: int) -> Iterator[None]:
    """A forward fails before this layer."""

    def fail(*_: Any) -> None:
        raise RuntimeError("interrupted")

    failing = model.model.layers[layer].register_forward_pre_hook(fail)
    with failing, pytest.raises(RuntimeError, match="interrupted"):
        yield


@pytest.mark.slow
@pytest.mark.cases(6)
@KINDS
def test_a_reset_cache_forgets_a_forward_that_failed(model, spec):
    cache = new_cache(model, spec)
    expected = two_turns(model, cache, 1)

    for layer in (1, 2):
        cache.reset()
        with interrupted(model, layer):
            answer(model, cache, prompt(2))
        cache.reset()
        assert same(two_turns(model, cache, 1), expected)


@pytest.mark.slow
@pytest.mark.cases(4)
@KINDS
@torch.no_grad()
def test_a_token_that_failed_half_way_makes_the_cache_useless_until_it_is_reset(model, spec):
    cache = new_cache(model, spec)
    expected = two_turns(model, cache, 1)

    for layer in (1, 2):
        cache.reset()
        answer(model, cache, prompt(1))
        with interrupted(model, layer):
            model(prompt(2)[:, :1], past_key_values=cache)
        with pytest.raises(UnsupportedModel, match="the last forward failed"):
            model(prompt(2)[:, :1], past_key_values=cache)
        cache.reset()
        assert same(two_turns(model, cache, 1), expected)


def test_a_threshold_is_of_one_prompt_alone(model):
    """D2O's released code starts the second prompt with the first one's."""
    cache = new_cache(model, "d2o")
    for seed in (1, 2):
        cache.reset()
        answer(model, cache, prompt(seed))
    fresh = new_cache(model, "d2o")
    answer(model, fresh, prompt(2))
    pairs = zip(cache.states, fresh.states, strict=True)
    for layer, expected in pairs:
        assert layer.merging is not None and torch.equal(layer.merging, expected.merging)


# --- side by side --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "spec", [spec for spec in [*ONCE, "h2o + merge"] if not needs_driver(spec)]
)
def test_two_caches_of_a_method_never_meet(model, spec):
    """Two prompts of other lengths, read and continued in turn, one of them a padded batch."""
    texts = [(prompt(1), None), prompts((50, 31), seed=4)]
    steps = [continuation(len(ids), 5, seed).split(1, 1) for seed, (ids, _) in enumerate(texts)]

    def reader_of(which: int) -> Reader:
        ids, mask = texts[which]
        reader = Reader(model, compressed(model, spec), mask)
        reader(ids)
        return reader

    separate = []
    for which in (0, 1):
        reader = reader_of(which)
        separate.append([*map(reader, steps[which]), *held(reader.cache)])
    readers = [reader_of(which) for which in (0, 1)]
    together: list[list[Tensor]] = [[], []]
    for step in range(5):
        for which, reader in enumerate(readers):
            together[which].append(reader(steps[which][step]))
    for which, reader in enumerate(readers):
        assert same([*together[which], *held(reader.cache)], separate[which])


@pytest.mark.parametrize("spec", [spec for spec in ONCE if needs_driver(spec)])
def test_two_caches_with_forwards_of_their_own_never_meet(model, spec):
    separate = [two_turns(model, new_cache(model, spec), seed) for seed in (1, 2)]
    caches = [new_cache(model, spec) for _ in (1, 2)]
    texts, after = [], []
    for cache, seed in zip(caches, (1, 2), strict=True):
        texts.append(answer(model, cache, prompt(seed, 40 + 8 * seed)))
    for cache in caches:
        after.append(held(cache))
    for which, seed in ((1, 2), (0, 1)):
        text = torch.cat([texts[which], continuation(1, 10, seed)], 1)
        second = answer(model, caches[which], text)
        found = [texts[which], *after[which], second, *held(caches[which])]
        assert same(found, separate[which])


@pytest.mark.slow
@pytest.mark.cases(3)
@KINDS
def test_one_cache_inside_anothers_block_does_not_disturb_it(model, spec):
    """A cache is frozen, or half way through reading, while another reads and answers."""
    if needs_driver(spec):
        other = "snapkv:window=8"
        expected = two_turns(model, new_cache(model, other), 2)
        busy = new_cache(model, spec)
        answer(model, busy, prompt(1))
        with busy.frozen():
            assert same(two_turns(model, new_cache(model, other), 2), expected)
        return
    ids = prompt(1)
    plain = Reader(model, new_cache(model, spec))
    with plain.cache.reading():
        plain(ids[:, :40])
        plain(ids[:, 40:])
    expected = [plain(token) for token in continuation(1, 3).split(1, 1)]
    inside = two_turns(model, new_cache(model, spec), 2)
    busy = Reader(model, new_cache(model, spec))
    with busy.cache.reading():
        busy(ids[:, :40])
        assert same(two_turns(model, new_cache(model, spec), 2), inside)
        busy(ids[:, 40:])
    got = [busy(token) for token in continuation(1, 3).split(1, 1)]
    assert same(got, expected) and busy.cache.stats().seen == 67
    assert max(n for layer in busy.cache.stats().kept for n in layer[0]) >= SMALL


def test_trying_a_model_out_draws_none_of_the_users_numbers():
    """Its first cache lets it read a few tokens, with dropout where it is being trained."""
    model = build("llama", attention_dropout=0.5).train()
    before = torch.get_rng_state()
    kvfold.CompressedCache(model, "knorm", 20)
    assert torch.equal(torch.get_rng_state(), before)


# --- torch's settings ----------------------------------------------------------------------------


@pytest.mark.cases(6)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
@pytest.mark.parametrize("spec", NAMED)
def test_torch_s_default_dtype_changes_nothing(spec, dtype):
    def outcome() -> tuple[Tensor, list[Tensor]]:
        cache = new_cache(small, spec)
        return answer(small, cache, prompt(1)), held(cache)

    small = build("llama", torch.float32, num_hidden_layers=3)
    ids, entries = outcome()
    torch.set_default_dtype(dtype)
    try:
        again, kept = outcome()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(ids, again) and same(entries, kept)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
@pytest.mark.parametrize("spec", ["kvzip", "snapkv:window=8"])
def test_masks_of_any_dtype_mean_the_same(model, spec, dtype):
    ids, mask = prompts((64, 40))
    found = []
    for each in (mask, mask.to(dtype)):
        cache = new_cache(model, spec)
        found.append((answer(model, cache, ids, each), held(cache)))
    assert torch.equal(found[0][0], found[1][0]) and same(found[0][1], found[1][1])
