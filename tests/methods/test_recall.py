# SPDX-License-Identifier: Apache-2.0
"""Recall against a model that stores all, and whose attention hides what no query may read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kvfold
from kvfold.cache.fork import fork
from kvfold.errors import IllegalComposition, KvfoldError
from kvfold.store.ragged import RaggedStore
from tests.helpers.caches import PADDED, ask, decode, same, start
from tests.helpers.models import build, continuation, prompts
from tests.helpers.recall import READ, SINKS, SPEC, RecallTruth
from tests.helpers.truth import Reader, stock_cache, worst

BEHIND = ["snapkv:window=8", "adakv:window=8", "keydiff", "pyramidkv:window=8 + adakv:window=8"]
TOLERANCE = {"gpt_oss": 1e-5, "gemma2": 1e-5}  # their own attention weighs in float32


def model_of(query_heads: int = 6, heads: int = 2, name: str = "llama") -> Any:
    sizes = {"num_attention_heads": query_heads, "num_key_value_heads": heads, "head_dim": 16}
    sizes["hidden_size"] = 16 * query_heads
    return build(name, torch.float64, **sizes)


@pytest.mark.parametrize(("query_heads", "heads"), [(2, 2), (6, 2), (8, 1)])
def test_every_group_reads_what_a_full_cache_would_be_shown(query_heads, heads):
    """The prompt, a turn, and steps across a lot of 32."""
    model = model_of(query_heads, heads)
    reader, truth = start(model, SPEC), RecallTruth(model)
    truth(prompts((64,))[0])
    for piece in (continuation(1, 9, 5), *continuation(1, 50).split(1, 1), continuation(1, 5, 6)):
        assert worst(reader(piece), truth(piece)) < 1e-9


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_oss", "gemma3n", "gpt2"])
@pytest.mark.parametrize("behind", [None, "snapkv:window=8"])
def test_reading_everything_is_the_full_cache(name, behind):
    """Softcaps, sinks, layers that share entries and sliding windows beside."""
    model = build(name, torch.float64)
    spec = "recall:read=1.0,residual=8,sinks=0"
    reader = start(model, spec if behind is None else f"{behind} + {spec}")
    truth = Reader(model, stock_cache(model))
    truth(prompts((64,))[0])
    for piece in (continuation(1, 9, 5), *continuation(1, 40).split(1, 1)):
        assert worst(reader(piece), truth(piece)) < TOLERANCE.get(name, 1e-9)


@pytest.mark.parametrize(
    "spec",
    [
        "snapkv:window=8 + level + {}", "leverage + {}", "dbudgetkv + {}", "auto + {}",
        "simlayerkv:window=8 + {}", "h2o:decode=append + {} + every:interval=8", "random + {}",
        "streaming_llm_original:decode=append + {}", "rkv:window=8 + {}",
        "snapkv:window=8 + {} + every:interval=4,prompt=kept",
    ],
)  # fmt: skip
def test_behind_any_method_reading_everything_is_the_full_cache(spec):
    """Layers and heads that keep all, or nothing, among them."""
    model = model_of()
    reader = start(model, spec.format("recall:read=1.0,residual=8"))
    truth = Reader(model, stock_cache(model))
    truth(prompts((64,))[0])
    for piece in (continuation(1, 9, 5), *continuation(1, 40).split(1, 1), continuation(1, 5, 6)):
        assert worst(reader(piece), truth(piece)) < 1e-9


@pytest.mark.parametrize("behind", BEHIND)
def test_the_budget_is_what_stays_hot(behind):
    model = model_of()
    alone, both = start(model, behind), start(model, f"{behind} + recall:residual=0,sinks=0")
    for mine, theirs in zip(both.cache.states, alone.cache.states, strict=True):
        store = mine.stored()
        assert isinstance(store, RaggedStore) and store.hot is not None
        hot = mine.columns().where(store.hot, -1).sort(-1).values
        kept = theirs.columns().sort(-1).values
        assert torch.equal(hot[..., hot.shape[-1] - kept.shape[-1] :], kept)
        assert int((hot >= 0).sum()) == int((kept >= 0).sum())


def test_a_later_round_chooses_among_all_tokens():
    model = model_of()
    reader = start(model, f"snapkv:window=8 + {SPEC} + every:interval=16")
    before = [state.stored().hot for state in reader.cache.states]
    decode(reader, 40)
    assert all(count == 104 for layer in reader.cache.stats().kept for count in layer[0])
    moved = 0
    for state, hot in zip(reader.cache.states, before, strict=True):
        now = state.stored().hot
        moved += int((now[..., : hot.shape[-1]] & ~hot).sum())
    assert moved > 0


def test_padded_rows_are_read_as_alone():
    model = model_of()
    together = start(model, SPEC, PADDED)
    got = [ask(together, 3), *decode(together, 40)]
    for row, length in enumerate(PADDED):
        ids, _ = prompts(PADDED)
        alone = Reader(model, kvfold.CompressedCache(model, SPEC))
        alone(ids[row : row + 1, -length:])
        rows = len(PADDED)
        with alone.cache.frozen():
            question = continuation(rows, 13, 3)[row : row + 1]
            of_question = torch.cat([alone(question[:, :12]), alone(question[:, 12:])], 1)
            alone.cache.crop(-13)
        steps = [alone(token[row : row + 1]) for token in continuation(rows, 40, 2).split(1, 1)]
        for mine, theirs in zip(got, [of_question, *steps], strict=True):
            assert worst(mine[row : row + 1], theirs) < 1e-9


@pytest.mark.parametrize("spec", [SPEC, f"snapkv:window=8 + {SPEC}"])
def test_pieces_forks_and_crops_read_as_the_whole(spec):
    model = model_of()
    whole, question = start(model, spec), continuation(1, 12, 7)
    reader = fork(whole.cache)
    pieces = Reader(model, reader)
    got = torch.cat([pieces(part) for part in question.split(5, 1)], 1)
    with whole.cache.frozen():
        expected = whole(question)
        whole.cache.crop(-12)
    assert worst(got, expected) < 1e-9
    assert worst(ask(whole, 3), ask(start(model, spec), 3)) < 1e-12


@pytest.mark.parametrize("turn", [0, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_edit_keeps_entries_exact_and_what_is_hot(dtype, turn):
    model = build("llama", dtype)  # in float32 a step is the C++
    spec = "recall:read=1.0,residual=8,sinks=2"
    mine, theirs = start(model, spec), start(model, "full")
    later = [continuation(1, turn, 7)] if turn else []
    for reader in (mine, theirs):
        decode(reader, 40)
        reader.cache.drop((10, 20))
        reader.cache.move((30, 34), 12)
        for ids in later:
            reader(ids)
    assert all(
        state.stored().hot[..., :2].all() and not state.stored().hot[..., 2:40].any()
        for state in mine.cache.states
    )
    for one, other in zip(decode(mine, 40), decode(theirs, 40), strict=True):
        assert worst(one, other) < (1e-9 if dtype == torch.float64 else 1e-4)


def test_an_edit_near_the_start_leaves_few_entries_to_encode():
    """Fewer than stay hot: none of the values is encoded, and codes of no key are."""
    model = build("llama", torch.float32)
    mine, theirs = start(model, "recall:read=1.0"), start(model, "full")
    for reader in (mine, theirs):
        reader.cache.drop((0, 60))
    for one, other in zip(decode(mine, 40), decode(theirs, 40), strict=True):
        assert worst(one, other) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lengths", [(64,), PADDED], ids=["alone", "padded"])
def test_quantized_cold_entries_are_turboquants(dtype, lengths):
    """All of them read, behind the newest raw ones: through steps, an edit and a turn."""
    model = build("llama", dtype)
    mine = start(model, "recall:read=1.0,residual=8,cold=4", lengths)
    theirs = start(model, "turboquant:keys=4,values=4,sinks=0,residual=8,end_layers=0", lengths)
    for reader in (mine, theirs):
        decode(reader, 40)
        if len(lengths) == 1:
            reader.cache.drop((10, 20))
            reader(continuation(1, 40, 7))
    for one, other in zip(decode(mine, 40), decode(theirs, 40), strict=True):
        assert worst(one, other) < (1e-9 if dtype == torch.float64 else 1e-3)
    bits = {1: 16, 2: 32}  # beside a key's codes its scale, and beside a value's a minimum too
    expected = 0
    for state in mine.cache.states:
        part = state.stored().segments()
        for number, each in enumerate((part.keys, part.values), 1):
            cold = each.encoded.cold
            expected += sum(cold.lengths) * (4 * cold.coded.size + bits[number]) // 8
    assert mine.cache.stats().cold.host == expected


def test_bytes_are_hot_cold_and_moved():
    reader = start(model_of(), SPEC)
    cold = reader.cache.stats().cold
    entries, each = 56 * 2 * 4, 2 * 16 * 8  # of 4 layers' 2 heads; keys and values in float64
    assert cold == (entries * each, 0, 0)
    decode(reader, 3)
    read = math.ceil(READ * (56 - SINKS))
    assert reader.cache.stats().cold.read == 3 * read * 2 * 4 * each
    assert "cold beside them" in str(reader.cache.stats())


def test_beams_and_repeats_copy_rows():
    reader = start(model_of(), SPEC, (64, 40))
    before = [state.stored().dense() for state in reader.cache.states]
    reader.cache.reorder_cache(torch.tensor([1, 0]))
    for state, (keys, values) in zip(reader.cache.states, before, strict=True):
        assert same(list(state.stored().dense()), [keys.flip(0), values.flip(0)])


@pytest.mark.parametrize(
    "spec",
    [
        "d2o + recall", "snapkv + match + recall", "h2o + recall", "streaming_llm + recall",
        "kivi + recall", "recall + every", "snapkv + reindex + recall", "recall:keys=5",
        "recall:read=0", "recall:read=1.5", "recall:read=-1", "recall:residual=-1",
        "recall:sinks=-1", "pyramidinfer + recall",
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused(spec):
    with pytest.raises((IllegalComposition, KvfoldError)):
        kvfold.parse(spec).stages()


def test_latents_and_budgets_in_bytes_are_refused():
    with pytest.raises(KvfoldError, match="latents"):
        start(build("deepseek_v3", torch.float64), SPEC)
    with pytest.raises(KvfoldError, match="a budget in bytes"):
        start(model_of(), f"snapkv:window=8 + {SPEC}", budget="1MiB")
    with pytest.raises(KvfoldError, match="recall keeps every entry"):
        start(model_of(), f"snapkv:window=8 + {SPEC}", budget=20, max_cache_tokens=60)


def test_protected_spans_stay_hot():
    cache = start(model_of(), SPEC, protect=[(10, 20)]).cache
    for state in cache.states:
        (hot,) = state.stored().hot[0].unique(dim=0)
        assert hot.nonzero().flatten().tolist() == [0, 1, *range(10, 20), *range(56, 64)]
