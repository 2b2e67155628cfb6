# SPDX-License-Identifier: Apache-2.0
"""every: after each n generated tokens a layer is back at its size, by another method's score."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import IllegalComposition, KvfoldError
from kvfold.budget import Budget
from kvfold.cache.barrier import Barrier
from kvfold.cache.fork import fork
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.phase import Phase
from kvfold.cache.plan import Plan
from kvfold.cache.state import LayerState
from kvfold.methods.base import Composition, Measured, parse
from kvfold.methods.every import Every
from kvfold.methods.stages.score import redundancy
from kvfold.methods.stages.when import AtEnd, Hold, Once, Rounds
from kvfold.observers.call import AttentionCall
from kvfold.observers.of_layer import Observers
from tests.helpers.budgets import SMALL, compressed, moves, sums_columns
from tests.helpers.by_hand import (
    WINDOW,
    ByHand,
    Head,
    adaptive,
    best,
    h2o,
    votes,
    with_window,
)
from tests.helpers.caches import (
    ALONE,
    BATCHES,
    PADDED,
    counted_bytes,
    decode,
    go_on,
    kept,
    positions,
    reachable_bytes,
    same,
    start,
)
from tests.helpers.contexts import assert_same, new_model
from tests.helpers.exactness import against_truth
from tests.helpers.models import build, continuation, prompts
from tests.helpers.operations import LargestTensor
from tests.helpers.rounds import assert_each_round, per_full_head, unlike
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader

KNORM = "knorm:skip_layers=none"
SNAPKV = "snapkv:window=8"
H2O = "h2o:decode=append"
TRIATTENTION = "triattention:prompt=counted"
SCORING = [KNORM, SNAPKV, "keydiff", H2O, "adakv:window=8", "pyramidkv:window=8"]
SCORING += ["rkv", "snapkv_decode", TRIATTENTION, f"{TRIATTENTION},scope=model"]
SCORING += ["d2o:decode=append", "streaming_llm:decode=append", "chunkkv:window=8", "random"]
EACH = pytest.mark.parametrize("spec", SCORING)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", torch.float64)


def every(spec: str, interval: int = 3, prompt: str = "counted") -> str:
    return f"{spec} + every:interval={interval},prompt={prompt}"


# --- sizes and sets ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [(4, [4, 5, 6, 6, 7, 8, 6, 7, 8, 6]), (10, [6, 7, 8, 6, 7, 8, 6, 7, 8, 6])],
)
@pytest.mark.parametrize("spec", [KNORM, "snapkv:window=2", H2O, "streaming_llm:decode=append"])
def test_golden_sizes(model, spec, tokens, sizes):
    spec = spec.replace("append", "append,sinks=2") if spec.startswith("str") else spec
    reader = start(model, every(spec), (tokens,), budget=6)
    found = [kept(reader.cache)]
    for token in continuation(1, 9).split(1, 1):
        reader(token)
        found.append(kept(reader.cache))
    assert found == [[size] for size in sizes]


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [(4, [4, 5, 6, 7, 8, 6, 7, 8, 6, 7]), (10, [6, 7, 6, 7, 8, 6, 7, 8, 6, 7])],
)
def test_sizes_where_the_whole_text_is_counted(model, tokens, sizes):
    reader = start(model, f"{every(KNORM)},phase=absolute", (tokens,), budget=6)
    found = [kept(reader.cache)]
    for token in continuation(1, 9).split(1, 1):
        reader(token)
        found.append(kept(reader.cache))
    assert found == [[size] for size in sizes]


# K_ij = ((7i + 3j + ij) mod 11 − 5) / 4
TOKENS, FEATURES = torch.arange(8)[:, None], torch.arange(4)
KEYS = (((7 * TOKENS + 3 * FEATURES + TOKENS * FEATURES) % 11 - 5) / 4)[None, None]


def one_layer(spec: str, budget: int) -> CompressedLayer:
    """A single layer without a model."""
    stages = kvfold.parse(spec).stages()
    plan = Plan(stages, Budget.of(budget), 0, 1, 0, None, None)
    observers = Observers.of(stages.needs, {}, stages.interval)
    return CompressedLayer(LayerState(plan, Phase(), Barrier(), observers), None)


def feed(layer: CompressedLayer, first: int, last: int) -> list[int]:
    """Stored columns after the tokens `first` to `last − 1` in one forward."""
    new = KEYS[:, :, first:last]
    keys, values = layer.update(new, new)
    layer.finish(AttentionCall(new, keys, values, {"scale": 0.5}))
    return layer.state.columns()[0, 0].tolist()


@pytest.mark.parametrize(
    ("spec", "golden"),
    [
        (KNORM, [[0, 1, 2], [0, 1, 2, 4], [1, 2, 4], [1, 2, 4, 6], [2, 6, 7]]),
        ("keydiff", [[0, 2, 3], [0, 2, 3, 4], [3, 4, 5], [3, 4, 5, 6], [3, 4, 5]]),
    ],
)
def test_golden_sets(spec, golden):
    layer = one_layer(every(spec, 2), 3)
    found = [feed(layer, 0, 4)] + [feed(layer, at, at + 1) for at in range(4, 8)]
    assert found == golden


# --- by hand, in float64 -----------------------------------------------------------------------


BY_HAND: dict[str, Callable[[Head], list[int]]] = {
    KNORM: lambda head: best(-head.keys.norm(dim=-1), SMALL),
    SNAPKV: lambda head: with_window(head, SMALL),
    "keydiff": unlike,
    H2O: lambda head: h2o(head, SMALL),
}


@pytest.mark.slow
@pytest.mark.cases(8)
@pytest.mark.parametrize("interval", [3, 10])
@pytest.mark.parametrize("lengths", [(64,), (17,)], ids=["long", "short"])
@pytest.mark.parametrize("spec", BY_HAND)
def test_rounds_of_the_whole_text_by_hand(spec, lengths, interval):
    """The first round is due before an interval is over, so its window reaches into the prompt."""
    rule = per_full_head(BY_HAND[spec])

    def where_due(one: ByHand) -> None:
        if one.seen % interval == 0 or one.seen == lengths[0]:
            rule(one)

    assert_each_round(f"{every(spec, interval)},phase=absolute", where_due, lengths, 1)


@pytest.mark.slow
@pytest.mark.cases(8)
@pytest.mark.parametrize("interval", [3, 10])
@pytest.mark.parametrize("lengths", [PADDED, (17,)], ids=["padded", "short"])
@pytest.mark.parametrize("spec", BY_HAND)
def test_each_round_keeps_what_is_kept_by_hand(spec, lengths, interval):
    """Rows by hand are read alone; the row of 17 reaches the budget of 20 while generating."""
    assert_each_round(every(spec, interval), per_full_head(BY_HAND[spec]), lengths, interval)


# Norms of queries and keys; half of each key rotated; sliding windows; sinks; recurrent layers
OF_SIX = ["llama", "qwen3", "phi3", "gemma3", "gpt_oss", "qwen3_5"]
TEN = [KNORM, SNAPKV, "keydiff", H2O, "adakv:window=8", "chunkkv:window=8", "rkv"]
TEN += ["snapkv_decode", TRIATTENTION, "expected_attention"]


@pytest.mark.slow
@pytest.mark.cases(4)
@pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
@pytest.mark.parametrize("name", OF_SIX)
@pytest.mark.parametrize("spec", TEN)
def test_steps_attend_to_what_is_stored(spec, name, lengths):
    off, effect, _ = against_truth(name, every(spec), lengths, torch.float64, every_step=True)
    assert off <= 1e-6 and effect > (1.0 if name == "llama" else 0.1)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("lengths", [ALONE, PADDED, (15,)], ids=["alone", "padded", "short"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", ["h2o", "roco", "d2o", "streaming_llm"])
def test_a_round_after_every_token_is_holding_bit_for_bit(name, dtype, lengths):
    """Past the copies that drop holes, and a crop of tokens that came frozen."""
    tiny = build("llama", dtype)
    in_rounds, held = (
        start(tiny, spec, lengths) for spec in (every(f"{name}:decode=append", 1), name)
    )

    def alike(steps: int, seed: int) -> bool:
        answers = [decode(reader, steps, seed=seed) for reader in (in_rounds, held)]
        return same(*answers) and positions(in_rounds.cache) == positions(held.cache)

    assert alike(70, 0)
    for reader in (in_rounds, held):
        with reader.cache.frozen():
            decode(reader, 3)
            reader.cache.crop(-2)
            if reader.mask is not None:
                reader.mask = reader.mask[:, :-2]
    assert alike(12, 1)
    assert max(kept(in_rounds.cache)) <= 2 * SMALL  # d2o gives layers different sizes


def in_rounds() -> list[str]:
    """Names of methods that may have rounds; `sizes` reads a file of one's own."""
    found = []
    for name in kvfold.list_methods():
        with contextlib.suppress(KvfoldError):
            parse(every(name, 1)).stages()
            found.append(name)
    shorter = {"duo": "duo:sinks=4,recent=8"}
    return [shorter.get(name, name) for name in found if name != "sizes"]


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("name", in_rounds())
def test_looking_at_a_cache_changes_no_round(name):
    """Columns of evicted entries are cleared when someone asks for them: scores always do."""
    model, _ = kvfold.bundled_model()
    seen, unseen = (start(model, every(name, 1), (100,), budget=70) for _ in range(2))
    for step in range(25):
        positions(seen.cache)
        assert same(*(decode(reader, 1, seed=step) for reader in (seen, unseen)))
    assert positions(seen.cache) == positions(unseen.cache)


# --- nothing but rounds changes anything ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cases(4)
@EACH
def test_an_interval_beyond_the_answer_is_append(model, spec):
    readers = [start(model, one, PADDED) for one in (every(spec, 9), spec)]
    assert same(*(decode(reader, 8) for reader in readers))
    assert positions(readers[0].cache) == positions(readers[1].cache)
    decode(readers[0], 1)
    assert max(kept(readers[0].cache)) < max(kept(readers[1].cache)) + 1


@pytest.mark.slow
@pytest.mark.cases(4)
@EACH
def test_a_budget_of_prompt_and_answer_evicts_nothing(model, spec):
    readers = [start(model, one, PADDED, budget=76) for one in (every(spec), spec)]
    assert same(*(decode(reader, 12) for reader in readers))
    assert positions(readers[0].cache) == positions(readers[1].cache)
    assert kept(readers[0].cache) == [length + 12 for length in sorted(PADDED)]


def test_a_ratio_of_1_never_evicts(model):
    reader = start(model, every(SNAPKV), budget=1.0)
    decode(reader, 9)
    assert kept(reader.cache) == [73]


@pytest.mark.slow
@pytest.mark.cases(2)
@EACH
@pytest.mark.parametrize("interval", [3, 10])
def test_each_row_is_the_row_alone(model, spec, interval):
    """Prompts of 64, 53 and 15 tokens; the second row ends after 7 generated tokens."""
    lengths, ends = (64, 53, 15), (20, 7, 20)
    ids, mask = prompts(lengths)
    steps = continuation(3, 20)
    steps[1, 7:] = 0
    together = Reader(model, compressed(model, every(spec, interval)), mask)
    together(ids)
    alone = []
    for row, length in enumerate(lengths):
        one = Reader(model, compressed(model, every(spec, interval)))
        one(ids[row : row + 1, 64 - length :])
        alone.append(one)
    for step, token in enumerate(steps.split(1, 1)):
        logits = together(token)
        for row, one in enumerate(alone):
            if step < ends[row]:
                expected = one(token[row : row + 1])
                # Sums and rotated sinks are float32 in every model.
                limit = 2e-5 if sums_columns(spec) or moves(spec) else 1e-6
                torch.testing.assert_close(logits[row : row + 1], expected, atol=limit, rtol=0)
        for row, one in enumerate(alone):
            padding = 64 - lengths[row]
            for layer, expected in zip(
                positions(together.cache), positions(one.cache), strict=True
            ):
                assert [[at - padding for at in head] for head in layer[row]] == expected[0]


@pytest.mark.cases(4)
@pytest.mark.slow
@EACH
def test_pieces_of_a_prompt_change_nothing(model, spec):
    ids, mask = prompts(PADDED)
    caches = [compressed(model, every(spec)) for _ in range(2)]
    outs = [
        go_on(model, ids, cache, attention_mask=mask, prefill_chunk=chunk, max_new_tokens=12)
        for cache, chunk in zip(caches, (None, 5), strict=True)
    ]
    assert torch.equal(*outs) and positions(caches[0]) == positions(caches[1])


# --- sizes of heads, and prompts beside the size -------------------------------------------------


def test_heads_keep_the_sizes_of_the_prompt(model):
    reader = start(model, every("adakv:window=8"), PADDED)
    sizes = reader.cache.stats().kept
    assert len(kept(reader.cache)) > 1
    for _ in range(3):
        decode(reader, 3)
        assert reader.cache.stats().kept == sizes


def test_heads_that_kept_everything_are_sized_when_entries_leave(model):
    reader = start(model, every("adakv:window=8"), (15,))
    decode(reader, 3)
    assert kept(reader.cache) == [18]
    decode(reader, 3)
    sizes = reader.cache.stats().kept
    assert len(kept(reader.cache)) > 1
    assert all(sum(row) == 2 * SMALL for layer in sizes for row in layer)
    decode(reader, 3)
    assert reader.cache.stats().kept == sizes


def shared(one: ByHand) -> None:
    """AdaKV's rule for what is stored now: a fifth of the mean for each head, then by need."""
    for layer in one.layers:
        sizes = adaptive([votes(head) for head in layer.heads], SMALL - WINDOW, 0.2)
        for head, size in zip(layer.heads, sizes, strict=True):
            head.sizes = [*getattr(head, "sizes", []), WINDOW + size]
            head.keep(with_window(head, WINDOW + size))


@pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
def test_heads_share_their_layer_again_in_each_round(lengths):
    spec = f"{every('adakv:window=8')},sizes=again"
    rows = assert_each_round(spec, shared, lengths, 3)
    sizes = [head.sizes for one in rows for layer in one.layers for head in layer.heads]
    assert any(len(set(of_head)) > 1 for of_head in sizes)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
@pytest.mark.parametrize("spec", [KNORM, SNAPKV, H2O, "streaming_llm:decode=append"])
def test_a_prompt_beside_the_size_is_kept(model, spec, lengths):
    reader = start(model, every(spec, 3, "kept"), lengths, budget=10)
    assert kept(reader.cache) == sorted(lengths)
    decode(reader, 15)
    for layer in positions(reader.cache):
        for row, length in zip(layer, lengths, strict=True):
            for head in row:
                assert len(head) == length + 10
                assert head[:length] == list(range(64 - length, 64))
    decode(reader, 2)
    assert kept(reader.cache) == [length + 12 for length in sorted(lengths)]


def test_beside_the_prompt_h2o_keeps_half_of_the_answer_for_the_newest(model):
    reader = start(model, every(H2O, 5, "kept"), budget=10)
    decode(reader, 20)
    for layer in positions(reader.cache):
        assert all(head[-5:] == list(range(79, 84)) for head in layer[0])
        assert any(head[-10:] != list(range(74, 84)) for head in layer[0])


# --- turns, frozen caches, forks, crops, files ---------------------------------------------------


def test_a_turn_starts_the_count_anew(model):
    reader = start(model, every(SNAPKV))
    decode(reader, 2)
    reader(continuation(1, 12, seed=7))
    for size in (SMALL + 1, SMALL + 2, SMALL):
        decode(reader, 1)
        assert kept(reader.cache) == [size]


def test_a_prompt_of_one_token_grows_to_the_budget(model):
    for spec in (KNORM, "snapkv:window=2", "adakv:window=2"):
        reader = start(model, every(spec), (1,), budget=6)
        decode(reader, 9)
        assert sum(n for layer in reader.cache.stats().kept for n in layer[0]) == 8 * 6


def test_tokens_read_while_frozen_go_at_the_next_step_that_is_due(model):
    reader = start(model, every(SNAPKV, 8))
    with reader.cache.frozen():
        decode(reader, 12)
    assert kept(reader.cache) == [SMALL + 12]
    sizes = []
    for _ in range(5):
        decode(reader, 1)
        sizes += kept(reader.cache)
    # After 13 generated tokens, and after 16, as 8 and 16 are the rounds.
    assert sizes == [SMALL, SMALL + 1, SMALL + 2, SMALL, SMALL + 1]


@pytest.mark.slow
@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "spec", [one for one in TEN if one != H2O] + ["triattention:centre=running"]
)
def test_a_crop_goes_back_to_the_last_round(model, spec):
    reader = start(model, every(spec, 16))
    decode(reader, 18)
    twin = copy.deepcopy(reader.cache)
    decode(reader, 5, seed=9)
    reader.cache.crop(-5)
    again = Reader(model, twin)
    # From column 80 + 2 on: the window of the next round begins at 88.
    assert same(decode(reader, 20), decode(again, 20))
    assert positions(reader.cache) == positions(twin)
    with pytest.raises(KvfoldError, match="cannot take back"):
        twin.crop(-7)
    twin.crop(-6)


@pytest.mark.parametrize("name", ["h2o", "roco", "d2o"])
def test_summed_attention_is_not_taken_back(model, name):
    reader = start(model, every(f"{name}:decode=append", 16))
    decode(reader, 5)
    twin = copy.deepcopy(reader.cache)
    with pytest.raises(KvfoldError, match=r"cannot take back 1 tokens: .* scored since"):
        reader.cache.crop(-1)
    assert same(decode(reader, 20), decode(Reader(model, twin), 20))
    with reader.cache.frozen():
        decode(reader, 3)
        reader.cache.crop(-3)


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["counted", "kept"])
@pytest.mark.parametrize("spec", [KNORM, "keydiff", "streaming_llm:decode=append"])
@pytest.mark.parametrize(
    ("length", "generated", "gone"),
    [(15, 0, 5), (15, 2, 7), (9, 7, 3)],
    ids=["of the prompt", "of answer and prompt", "of the answer, past a round"],
)
def test_after_a_crop_tokens_are_counted_as_if_the_cropped_ones_had_never_come(
    model, spec, prompt, length, generated, gone
):
    reader = start(model, every(spec, 4, prompt), (length,))
    answer = continuation(1, generated, seed=9).split(1, 1) if generated else ()
    for token in answer:
        reader(token)
    reader.cache.crop(-gone)
    straight = Reader(model, compressed(model, every(spec, 4, prompt)))
    straight(prompts((length,))[0][:, : length + generated - gone])
    for token in answer[:-gone]:
        straight(token)
    for token in continuation(1, 26).split(1, 1):
        torch.testing.assert_close(reader(token), straight(token), atol=1e-6, rtol=0)
        assert positions(reader.cache) == positions(straight.cache)


@pytest.mark.slow
@pytest.mark.cases(4)
@BATCHES
@EACH
def test_in_mid_answer_copies_and_forks_go_on_bit_for_bit(model, spec, lengths):
    reader = start(model, every(spec), lengths)
    decode(reader, 4)
    mask = reader.mask
    twin, branch = Reader(model, copy.deepcopy(reader.cache), mask), fork(reader.cache)
    forked = Reader(model, branch, mask)
    twin.started = forked.started = True
    with reader.cache.frozen():
        unbounded = decode(reader, 7)
        reader.cache.crop(-7)
    reader.mask = mask
    assert same(decode(forked, 7), unbounded)
    assert same(decode(reader, 11), decode(twin, 11))
    assert positions(reader.cache) == positions(twin.cache)


@pytest.mark.parametrize("spec", [SNAPKV, "adakv:window=8"])
def test_a_fork_evicts_nothing(model, spec):
    reader = start(model, every(spec))
    decode(reader, 2)
    branch = fork(reader.cache)
    before = positions(reader.cache)
    decode(Reader(model, branch), 9)
    assert positions(reader.cache) == before
    assert all(head[-9:] == list(range(66, 75)) for layer in positions(branch) for head in layer[0])


@pytest.mark.parametrize("interval", [3, 20])
@pytest.mark.parametrize("spec", [SNAPKV, "adakv:window=8"])
def test_rows_take_their_queries_and_sizes_along(model, spec, interval):
    ids, mask = prompts(PADDED)
    rows = [2, 0, 0]
    reader = start(model, every(spec, interval), PADDED)
    straight = Reader(model, compressed(model, every(spec, interval)), mask[rows])
    straight(ids[rows])
    steps = continuation(3, 24).split(1, 1)
    for token in steps[:16]:
        reader(token)
        straight(token[rows])
    reader.cache.reorder_cache(torch.tensor(rows))
    reader.mask = reader.mask[rows]
    for token in steps[16:]:
        torch.testing.assert_close(reader(token[rows]), straight(token[rows]), atol=1e-6, rtol=0)
    assert positions(reader.cache) == positions(straight.cache)


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("generated", [0, 4, 17])
@pytest.mark.parametrize("interval", [1, 3, 20])
@pytest.mark.parametrize(
    "spec",
    [
        *(SNAPKV, "adakv:window=8", H2O, f"{KNORM} + adakv", "d2o:decode=append"),
        *("rkv", "triattention", "triattention:centre=running"),
        *("keydiff", "snapkv_decode", "chunkkv:window=8", "expected_attention"),
    ],
)
def test_a_saved_answer_goes_on_as_it_would_have(spec, interval, generated, tmp_path: Path):
    model, tokenizer = new_model(), word_tokenizer()
    text = "the sky is blue and the grass is green " * 4
    context = kvfold.compress(model, tokenizer, text, every(spec, interval), SMALL)
    steps = torch.randint(3, 12, (1, 24), generator=torch.Generator().manual_seed(1)).split(1, 1)

    def read(cache: kvfold.CompressedCache, tokens: tuple[Tensor, ...]) -> list[Tensor]:
        with torch.no_grad():
            return [model(token, past_key_values=cache).logits for token in tokens]

    read(context.cache, steps[:generated])
    answered = torch.cat([context.ids, *steps[:generated]], 1)
    object.__setattr__(context, "ids", answered)
    context.save(tmp_path / "context.kvfold")
    loaded = kvfold.load(tmp_path / "context.kvfold", model, tokenizer)
    if not generated:
        assert_same(loaded.cache, context.cache)
    assert same(read(loaded.cache, steps[generated:]), read(context.cache, steps[generated:]))
    assert positions(loaded.cache) == positions(context.cache)


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("spec", [SNAPKV, H2O, "adakv:window=8"])
def test_bytes_stay_flat_over_a_long_answer(spec):
    model = build("llama", max_position_embeddings=2048)
    reader = start(model, every(spec, 16))
    sizes = []
    for token in continuation(1, 600).split(1, 1):
        reader(token)
        sizes.append(reader.cache.stats().nbytes - reader.cache.stats().slack_bytes)
    assert max(sizes[-32:]) <= max(sizes[:32])
    assert max(kept(reader.cache)) <= 2 * SMALL + 16


def largest_of_prompt_and_round(spec: str, tokens: int) -> int:
    """Elements of the largest tensor made while a prompt is read and a round of 3 is over."""
    with LargestTensor() as largest:
        reader = start(build("llama"), every(spec), (tokens,), budget=tokens // 2)
        decode(reader, 3)
    assert kept(reader.cache) == [tokens // 2]
    return largest.elements


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["rkv", "snapkv_decode", "scissorhands", TRIATTENTION])
def test_no_matrix_of_all_pairs_of_tokens_is_made(spec):
    tokens = 1500
    assert 0 < largest_of_prompt_and_round(spec, tokens) < tokens**2 / 2


@pytest.mark.slow
def test_a_matrix_of_all_pairs_would_be_noticed(monkeypatch):
    monkeypatch.setattr(redundancy, "TILE", 1500)
    assert largest_of_prompt_and_round("rkv", 1500) >= 1500**2


@pytest.mark.parametrize("spec", [SNAPKV, "adakv:window=8"])
@pytest.mark.parametrize("interval", [3, 10])
def test_bytes_are_those_of_all_storages(model, spec, interval):
    reader = start(model, every(spec, interval), PADDED)
    for _ in range(5):
        assert counted_bytes(reader.cache) == reachable_bytes(reader.cache)
        decode(reader, 2)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("every", "evicts nothing itself"),
        ("full + every", "evicts nothing itself"),
        ("kivi + every", "evicts nothing itself"),
        ("pyramidinfer + every", "evicts nothing itself"),
        ("h2o + every", "both bring the decode stage.*decode=append"),
        ("tova + every", "both bring the decode stage"),
        ("simlayerkv:when=first_decode + every", "both bring the decode stage"),
        ("snapkv + every + every", "both bring the decode stage"),
        ("kvzip + every", "forwards of its own"),
        ("snapkv + kivi + every", "encoded entries"),
        ("snapkv + think + every", "encoded entries"),
        ("dbudgetkv + every", "without a budget"),
        ("simlayerkv + every", "without a budget"),
    ],
)
def test_what_cannot_be_evicted_in_rounds_is_refused(spec, reason):
    with pytest.raises(IllegalComposition, match=reason):
        kvfold.parse(spec).stages()


def test_an_interval_of_no_tokens_is_refused():
    with pytest.raises(KvfoldError, match="at least 1 token"):
        kvfold.parse("snapkv + every:interval=0")
    with pytest.raises(IllegalComposition, match="1 token or more"):
        Rounds(0)


@pytest.mark.parametrize("interval", [0, -1, 1.5, float("nan"), "abc", None, True])
def test_an_interval_that_is_no_number_of_tokens_is_refused(interval):
    with pytest.raises(KvfoldError, match=f"at least 1 token, not {interval!r}"):
        Every(interval=interval)


def test_an_interval_that_no_text_could_name_is_refused(model):
    """A context file holds the method's text, and must be readable."""
    with pytest.raises(KvfoldError, match="every:interval is a number from"):
        kvfold.CompressedCache(model, SNAPKV, SMALL, every=2**31)


PER_HEAD = Measured(lambda seen: seen.positions.new_full((1, 2), 5), per_head=True)


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ({"positions": None}, "positions is original or reindex"),
        ({"when": Rounds(3), "allocate": PER_HEAD}, "allocation per head"),
        ({"when": Hold(), "allocate": PER_HEAD}, "allocation per head"),
    ],
)
def test_stages_that_would_be_ignored_are_refused(stages, reason):
    with pytest.raises(IllegalComposition, match=reason):
        kvfold.Stages(**stages)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"every": 1.5}, "1 token or more"),
        ({"every": "3"}, "1 token or more"),
        ({"every": -3}, "1 token or more"),
        ({"every": 3, "prompt": "keep"}, "prompt is counted or kept"),
        ({"every": 3, "sizes": "once"}, "sizes is fixed or again"),
        ({"every": 3, "counting": "all"}, "counting is generated or absolute"),
    ],
)
def test_rounds_that_there_are_not_are_refused(options, reason):
    with pytest.raises(IllegalComposition, match=reason):
        Rounds(**options)


OLD = [
    ({"decode": "hold"}, Hold()),
    ({"decode": "once"}, Once()),
    ({"decode": "append"}, AtEnd()),
    ({"decode": "every", "every": 5}, Rounds(5)),
    (
        {"decode": "every", "every": 5, "prompt": "kept", "sizes": "again", "phase": "absolute"},
        Rounds(5, "kept", "again", "absolute"),
    ),
]


@pytest.mark.parametrize(("options", "when"), OLD, ids=str)
def test_options_of_before_are_taken_with_a_warning(options, when):
    with pytest.warns(DeprecationWarning, match="when="):
        assert kvfold.Stages(**options) == kvfold.Stages(when=when)


@pytest.mark.parametrize(
    "options", [{"decode": "evry"}, {"every": 3}, {"prompt": "kept"}, {"decode": "every"}], ids=str
)
def test_options_of_before_that_name_no_time_are_refused(options):
    with pytest.warns(DeprecationWarning), pytest.raises(IllegalComposition, match="no time"):
        kvfold.Stages(**options)


def test_a_prompt_that_is_neither_counted_nor_kept_is_refused():
    with pytest.raises(KvfoldError, match="prompt is counted or kept, not 'keep'"):
        Composition((kvfold.parse(SNAPKV), Every(prompt="keep"))).stages()


def test_rounds_of_a_cache_are_those_of_the_composition(model):
    asked = kvfold.CompressedCache(model, "snapkv:window=8 + adakv", SMALL, every=3)
    assert str(asked.method) == "snapkv:window=8 + adakv + every:interval=3"
    assert asked.method == kvfold.parse(str(asked.method))
    reader = Reader(model, asked)
    reader(prompts(ALONE)[0])
    decode(reader, 6)
    assert all(sum(row) == 2 * SMALL for layer in asked.stats().kept for row in layer)
    with pytest.raises(KvfoldError, match="at least 1 token, not 0"):
        kvfold.CompressedCache(model, SNAPKV, SMALL, every=0)
    with pytest.raises(IllegalComposition, match="both bring the decode stage"):
        kvfold.CompressedCache(model, "h2o", SMALL, every=3)


class Newest(kvfold.Method):
    def stages(self) -> kvfold.Stages:
        score = kvfold.parse("streaming_llm_original").stages().score
        return kvfold.Stages(score=score, when=Rounds(4, "kept"))


def test_rounds_of_a_method_yield_to_those_asked_for():
    stages = Composition((Newest(), Every(9, sizes="again"))).stages()
    assert stages.when == Rounds(9, sizes="again")
    kept_beside = Composition((Newest(), kvfold.parse("adakv"))).stages()
    assert kept_beside.when == Rounds(4, "kept")


def test_compiled_decoding_is_refused(model):
    cache = compressed(model, every(SNAPKV))
    with pytest.raises(KvfoldError, match="evicts many entries at once after every 3 tokens"):
        kvfold.generate(model, prompts(ALONE)[0], cache=cache, compile=True, max_new_tokens=2)


def test_methods_of_ones_own_name_their_interval(model):
    """A method file that sets decode="every" needs no other file."""

    cache = kvfold.CompressedCache(model, Newest(), SMALL)
    reader = Reader(model, cache)
    reader(prompts(ALONE)[0])
    decode(reader, 28)
    assert positions(cache)[0][0][0] == [*range(64), *range(72, 92)]
