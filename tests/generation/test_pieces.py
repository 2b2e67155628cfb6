# SPDX-License-Identifier: Apache-2.0
"""Where a prompt is cut into forwards, and which padding they allow."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, NemotronHConfig, NemotronHForCausalLM

import kvfold
from kvfold import CompressedCache, KvfoldError
from kvfold.generation.pieces import (
    before_padding,
    check_padding,
    forward_ends,
    piece_ends,
    piece_of,
    without_lone_columns,
)
from kvfold.generation.readers import plain
from tests.helpers.models import build, prompts, sharpen
from tests.helpers.truth import worst


def test_lengths():
    assert piece_of(None, 40) == 40 and piece_of(7, 40) == 7
    for tokens in (0, -1, 2.0, True):
        with pytest.raises(KvfoldError, match="positive number of tokens"):
            piece_of(tokens, 40)


def test_pieces_are_as_equal_as_can_be():
    assert piece_ends(0, 10, 4) == [3, 6, 10]
    assert piece_ends(5, 15, 10) == [15]
    assert piece_ends(5, 5, 4) == []


def test_forwards_end_before_padding_between_tokens():
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 1]])
    assert before_padding(mask, 2) == 3
    assert before_padding(mask, 0) == 0  # there is no answer yet
    assert forward_ends(mask, 2, 8, 2) == [3, 5, 7, 8]
    assert forward_ends(mask, 2, 8, 8) == [3, 8]
    assert forward_ends(None, 2, 8, 4) == [6, 8]
    assert forward_ends(None, 8, 8, 4) == []


@pytest.mark.parametrize(
    ("ends", "padding", "expected"),
    [
        ([4, 8, 9], 9, [4, 7, 9]),
        ([4, 8, 9], 0, [4, 7, 9]),
        ([2, 3], 0, [2, 3]),
        ([4, 8, 10], 10, [4, 8, 10]),
        ([9], 9, [9]),
    ],
)
def test_a_lone_column_is_read_with_the_one_before(ends, padding, expected):
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :padding] = 0
    assert without_lone_columns(ends, mask, 0) == expected


@pytest.mark.parametrize(("start", "ends"), [(0, [1]), (0, [1, 4]), (2, [4, 5]), (0, [1, 2, 3])])
def test_pieces_too_short_to_avoid_a_lone_column_of_padding_are_refused(start, ends):
    mask = torch.tensor([[1] * 8, [0] * 6 + [1] * 2])
    with pytest.raises(KvfoldError, match="3 or more"):
        without_lone_columns(ends, mask, start)


def test_pieces_of_a_model_that_computes_lone_columns_otherwise_are_the_whole():
    """Nemotron-H raises small time steps in forwards of several tokens only."""
    kinds = ["linear_attention", "full_attention"] * 2
    config = NemotronHConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=kinds,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=8,
        chunk_size=16,
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    model = NemotronHForCausalLM(config).eval()
    sharpen(model, 0)
    ids, _ = prompts((41,))
    cache = CompressedCache(model, "full")
    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    out = kvfold.generate(model, ids, cache=cache, prefill_chunk=20, do_sample=False, **options)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, -1]
        lone = DynamicCache(config=config)
        for piece in ids.split((20, 1, 20), 1):
            apart = model(piece, past_key_values=lone).logits[:, -1]
    assert worst(out.logits[0], whole) < 1e-4 < 10 * worst(apart, whole)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_padding_behind_tokens_of_one_forward_is_refused(data):
    """Rows of a forward are padding, then tokens; the last column has no padding."""
    total = data.draw(st.integers(1, 9))
    seen = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(seen, total - 1))
    chunk, per_chunk = data.draw(st.integers(1, 9)), data.draw(st.booleans())
    row = st.lists(st.integers(0, 1), min_size=total, max_size=total)
    rows = data.draw(st.lists(row, min_size=1, max_size=2))
    mask = torch.tensor(rows)
    pieces = [seen, *piece_ends(seen, stop, chunk)] if per_chunk else [seen, stop]
    forwards = [seen]
    for begin, end in pairwise(pieces):
        forwards += forward_ends(mask, begin, end, chunk)
    forwards += [total]
    allowed = all(each[-1] for each in rows) and all(
        each[begin:end] == sorted(each[begin:end])
        for each in rows
        for begin, end in pairwise(forwards)
    )
    if allowed:
        check_padding(mask, seen, stop, chunk, per_chunk)
    else:
        with pytest.raises(KvfoldError, match="pad on the left"):
            check_padding(mask, seen, stop, chunk, per_chunk)


@pytest.mark.parametrize("compress", ["at_end", "per_chunk"])
def test_prompts_are_read_in_these_forwards(monkeypatch, compress):
    model, ids = build("llama"), prompts((30,))[0]
    read, cache = [], kvfold.CompressedCache(model, "full")
    reading = plain.read_tokens

    def noted(model, ids, cache, mask):
        reading(model, ids, cache, mask)
        read.append(cache.get_seq_length())

    monkeypatch.setattr(plain, "read_tokens", noted)
    options = {"max_new_tokens": 1, "prefill_chunk": 8, "compress": compress}
    kvfold.generate(model, ids, cache=cache, **options)
    # The rest is read by transformers.
    stop = 30 - 8 if compress == "at_end" else piece_ends(0, 30, 8)[-2]
    pieces = [0, *piece_ends(0, stop, 8)] if compress == "per_chunk" else [0, stop]
    assert read == [
        end for begin, until in pairwise(pieces) for end in forward_ends(None, begin, until, 8)
    ]
