# SPDX-License-Identifier: Apache-2.0
"""TurboQuant as a method: with other methods, other groups of heads, edits and bad input.

`tests/cache/test_encode.py` compares its caches with the formula, number by number.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import KvfoldError, parse
from kvfold.errors import IllegalComposition
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from tests.helpers.caches import ALONE, PADDED, decode, positions, start
from tests.helpers.models import build, continuation, prompts
from tests.helpers.truth import Reader, rotated, stock_cache, worst

TURBO = "turboquant:residual=8,sinks=2"


def model_of(query_heads: int = 8, heads: int = 2, **options: Any) -> Any:
    sizes = {"num_attention_heads": query_heads, "num_key_value_heads": heads, "head_dim": 16}
    sizes["hidden_size"] = 48 if query_heads == 6 else 64
    return build("llama", torch.float64, **(sizes | options))


def copied(reader: Reader) -> Any:
    """A stock cache of the decoded entries of a cache that has evicted nothing."""
    stock = stock_cache(reader.model)
    for index, state in enumerate(reader.cache.states):
        keys, values = state.stored().dense()
        stock.update(keys, values, index)
    return stock


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "spec", [TURBO, f"{TURBO},keys=8,values=2", f"{TURBO},keys=3,end_layers=0"]
)
@pytest.mark.parametrize(("query_heads", "heads"), [(2, 2), (6, 2), (8, 1)])
def test_every_group_of_heads_attends_to_the_decoded_entries(spec, query_heads, heads):
    """Steps across a lot of 32, and a turn, as a stock cache of the decoded entries gives them."""
    reader = start(model_of(query_heads, heads), spec)
    for piece in (*continuation(1, 40).split(1, 1), continuation(1, 9, 5)):
        expected = Reader(reader.model, copied(reader))
        expected.started = True
        assert worst(reader(piece), expected(piece)) < 1e-6


def test_it_reads_like_the_full_cache_and_closer_with_more_bits():
    model = model_of()
    full = start(model, "full")
    expected = decode(full, 6)
    errors = []
    for bits in (2, 3, 4):
        spec = f"{TURBO},keys={bits},values={bits},end_layers=0"
        got = decode(start(model, spec), 6)
        errors.append(max(worst(*pair) for pair in zip(got, expected, strict=True)))
    assert errors[0] > errors[1] > 1.5 * errors[2] > 0


def test_end_layers_hold_entries_as_they_came():
    model = model_of()
    whole, some = start(model, "full"), start(model, f"{TURBO},end_layers=1")
    for index, state in enumerate(some.cache.states):
        mine, theirs = state.stored().dense()[1], whole.cache.states[index].stored().dense()[1]
        assert state.stored().is_dense == (index in (0, 3))
        assert torch.equal(mine, theirs) == (index == 0) or index > 1  # later ones read others


@pytest.mark.parametrize(
    ("spec", "end_layers"),
    [("turboquant", 0), ("turboquant_3bit", 2), ("turboquant:values=2", 2), ("turboquant_k8v4", 0),
     ("turboquant:keys=2,end_layers=1", 1), ("turboquant_k3v4:end_layers=0", 0)],
)  # fmt: skip
def test_few_bits_spare_the_layers_at_the_ends(spec, end_layers):
    assert parse(spec).stages().encode.end_layers == end_layers


# --- edits ----------------------------------------------------------------------------------------


def encoded_of(reader: Reader) -> list[tuple[RotatedKeys, TokenValues]]:
    parts = [(state.store._keys.encoded, state.store._values.encoded)
             for state in reader.cache.states]  # fmt: skip
    assert all(isinstance(keys, RotatedKeys) for keys, _ in parts)
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("spec", [TURBO, f"snapkv:window=8 + {TURBO}", f"adakv:window=8 + {TURBO}"])
def test_a_drop_moves_decoded_keys_and_touches_no_others(spec):
    reader = start(model_of(), spec, budget=40)
    cache = reader.cache
    before = [state.stored().dense() for state in cache.states]
    was = [state.columns() for state in cache.states]
    cache.drop((20, 27))
    for state, (keys, values), columns in zip(cache.states, before, was, strict=True):
        new_keys, new_values = state.stored().dense()
        turned = rotated(keys, -7 * (columns >= 27).long())
        for head in range(2):
            stay = (columns[0, head] >= 0) & ((columns[0, head] < 20) | (columns[0, head] >= 27))
            own, other = turned[0, head][stay], values[0, head][stay]
            count = len(own) - 8
            expected = RotatedKeys.of([own[:count]], 4, True, [2]).segment(0)
            got = new_keys[0, head][-len(own) :]
            torch.testing.assert_close(got[:count], expected, atol=1e-6, rtol=0)
            torch.testing.assert_close(got[count:], own[count:], atol=1e-6, rtol=0)
            first = int((columns[0, head][stay] < 20).sum())
            torch.testing.assert_close(
                got[:first], keys[0, head][stay][:first], rtol=2**-10, atol=0
            )
            torch.testing.assert_close(
                new_values[0, head][-len(own) :], other, rtol=2**-9, atol=1e-6
            )
    assert cache.get_seq_length() == ALONE[0] - 7
    assert bool(reader(continuation(1, 5)).isfinite().all())


@pytest.mark.parametrize("spec", [TURBO, f"snapkv:window=8 + {TURBO} + every:interval=8"])
def test_edited_caches_go_on(spec):
    reader = start(model_of(), spec, budget=40)
    sizes = [len(head) for head in positions(reader.cache)[0][0]]
    reader.cache.move((50, 56), 20)
    reader.cache.replace((30, 34), continuation(1, 4, 8))
    assert [len(head) for head in positions(reader.cache)[0][0]] >= sizes
    stored = [keys.codes.lengths for keys, _ in encoded_of(reader)]
    assert all(min(lengths) > 20 for lengths in stored)
    assert all(bool(out.isfinite().all()) for out in decode(reader, 40))


def test_edits_leave_no_more_bytes_than_a_cache_that_was_never_edited():
    edited, fresh = (start(model_of(), TURBO, (length,)) for length in (64, 57))
    edited.cache.drop((20, 27))
    assert edited.cache.stats().kv_bytes == fresh.cache.stats().kv_bytes


# --- with other methods ---------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [ALONE, PADDED])
@pytest.mark.parametrize("spec", ["snapkv:window=8", "keydiff", "knorm"])
def test_rounds_keep_what_they_keep_without_it_where_entries_are_alike(spec, lengths):
    """Kept positions are those of the same rounds on raw entries, as far as few bits allow."""
    model = model_of()
    both = [
        start(model, f"{spec} + every:interval=8" + extra, lengths, budget=30)
        for extra in ("", f" + {TURBO}")
    ]
    for reader in both:
        decode(reader, 24)
    kept, encoded = (positions(reader.cache) for reader in both)
    heads = zip(kept[0][0], encoded[0][0], strict=True)
    for one, other in heads:
        assert len(one) == len(other)
        assert len(set(one) & set(other)) >= 0.6 * len(one)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["snapkv:window=8", "adakv:window=8", "knorm"])
def test_a_row_that_ended_is_not_encoded_in_the_others_rounds(spec):
    """The second row ends after 4 of 8 generated tokens, and all rows have another turn."""
    spec, ids, mask = f"{spec} + {TURBO},end_layers=0 + every:interval=5", *prompts((40, 21, 9))
    tiny, answer = model_of(), continuation(3, 8)
    answer[1, 4:] = 0
    together, alone = (
        Reader(tiny, kvfold.CompressedCache(tiny, spec, 20), each) for each in (mask, None)
    )
    together(ids)
    alone(ids[1:2, 19:])
    for token in answer.split(1, 1):
        logits = together(token)
        if token[1] > 0:
            torch.testing.assert_close(logits[1:2], alone(token[1:2]), atol=1e-6, rtol=0)
    for piece in (continuation(3, 12, seed=5), *continuation(3, 7, seed=6).split(1, 1)):
        torch.testing.assert_close(together(piece)[1:2], alone(piece[1:2]), atol=1e-6, rtol=0)


def test_a_kept_prompt_is_encoded_before_the_first_round():
    reader = start(model_of(), f"knorm + every:interval=8,prompt=kept + {TURBO}", budget=30)
    assert all(min(keys.lengths) == ALONE[0] - 8 for keys, _ in encoded_of(reader))
    sizes = []
    for token in continuation(1, 60).split(1, 1):
        reader(token)
        sizes.append(len(positions(reader.cache)[0][0][0]))
    assert max(sizes) <= ALONE[0] + 30 + 8


def test_refitted_entries_are_encoded_and_their_bias_is_not():
    reader = start(model_of(), f"snapkv:window=8 + match:up_to=1 + {TURBO}", budget=40)
    biases = [state.stored().bias for state in reader.cache.states]
    assert all(bool(bias.any()) for bias in biases)
    reader(continuation(1, 12))
    assert all(state.stored().bias is not None for state in reader.cache.states)
    assert all(bool(out.isfinite().all()) for out in decode(reader, 40))


def test_merged_entries_are_encoded_again_a_turn_later():
    reader = start(model_of(), f"d2o:decode=append + {TURBO}", budget=40)
    before = [keys.segment(0).clone() for keys, _ in encoded_of(reader)]
    reader(continuation(1, 30))
    after = [keys.segment(0) for keys, _ in encoded_of(reader)]
    assert any(not torch.equal(a[2:9], b[2:9]) for a, b in zip(before, after, strict=True))
    assert all(bool(out.isfinite().all()) for out in decode(reader, 3))


@pytest.mark.parametrize("first", ["h2o", "tova", "streaming_llm"])
def test_entries_that_leave_at_every_step_are_not_encoded(first):
    with pytest.raises(IllegalComposition, match="encoded entries"):
        parse(f"{first} + {TURBO}").stages()


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("turboquant:keys=1", "not 1"),
        ("turboquant:keys=0", "not 0"),
        ("turboquant:keys=16", "not 16"),
        ("turboquant:values=8", "not 8"),
        ("turboquant:residual=-1", "not -1"),
        ("turboquant:end_layers=-2", "not -2"),
        ("turboquant:keys=4.5", "keys"),
        ("turboquant + kivi", "both bring the encode stage"),
    ],
)
def test_options_out_of_range_are_refused(spec, message):
    with pytest.raises(KvfoldError, match=message):
        parse(spec).stages()


@pytest.mark.parametrize("size", [24, 40, 56, 80])
def test_head_sizes_of_no_power_of_two_are_rotated_too(size):
    reader = start(model_of(head_dim=size), TURBO)
    full = start(reader.model, "full")
    exact = full.cache.states[0].stored().dense()
    for mine, theirs in zip(reader.cache.states[0].stored().dense(), exact, strict=True):
        assert 0 < (mine - theirs).norm() < 0.15 * theirs.norm()


def test_a_head_size_that_fills_no_bytes_is_refused_and_the_cache_says_so():
    model = model_of(head_dim=12)
    reader = Reader(model, kvfold.CompressedCache(model, TURBO))
    with pytest.raises(KvfoldError, match="12 channels: choose kivi"):
        reader(prompts(ALONE)[0])


def test_keys_beyond_float16_are_refused():
    model = model_of()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1e9)
    with pytest.raises(KvfoldError, match="too large for it"):
        start(model, TURBO)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [TURBO, f"snapkv:window=8 + {TURBO}"])
def test_texts_shorter_than_sinks_and_recent_entries_stay_raw(spec):
    model = model_of()
    reader, full = start(model, spec, (9,), budget=20), start(model, "full", (9,))
    for token in continuation(1, 1).split(1, 1):
        assert torch.equal(reader(token), full(token))
    for mine, theirs in zip(reader.cache.states, full.cache.states, strict=True):
        assert torch.equal(mine.stored().dense()[0], theirs.stored().dense()[0])


def test_models_of_half_precision_are_read_closely():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        model = build("llama", dtype, head_dim=16)
        got, expected = (decode(start(model, spec), 3) for spec in (TURBO, "full"))
        for one, other in zip(got, expected, strict=True):
            assert one.dtype == other.dtype and bool(one.isfinite().all())
            assert (one - other).float().norm() < 0.5 * other.float().norm()


def test_copies_share_nothing():
    reader = start(model_of(), TURBO)
    twin = copy.deepcopy(reader.cache)
    before: list[Tensor] = [keys.rows.clone() for keys, _ in encoded_of(reader)]
    for state in twin.states:
        state.store._keys.encoded.codes.rows.zero_()
    for (keys, _), rows in zip(encoded_of(reader), before, strict=True):
        assert torch.equal(keys.rows, rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "phi3", "gemma2", "gpt_oss", "gemma3"])
@pytest.mark.parametrize("spec", [TURBO, f"{TURBO},keys=8,values=3,end_layers=0"])
def test_families_attend_to_the_decoded_entries(name, spec):
    """Softcaps, sink logits, sliding layers: a step of the same entries held raw."""
    model = build(name, torch.float64)
    reader, raw = start(model, spec), start(model, "full")
    for state, other in zip(reader.cache.states, raw.cache.states, strict=True):
        keys, values = state.stored().dense()
        other.store = type(other.stored())(keys, values)
    assert worst(reader(continuation(1, 1)), raw(continuation(1, 1))) < 1e-6
