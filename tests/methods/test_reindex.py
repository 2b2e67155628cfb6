# SPDX-License-Identifier: Apache-2.0
"""reindex: kept keys at consecutive positions, beside a dense truth whose keys are moved."""

from __future__ import annotations

import copy

import pytest
import torch

import kvfold
from kvfold import IllegalComposition, UnsupportedModel, parse
from kvfold.cache.fork import fork
from tests.helpers.budgets import SMALL, compressed
from tests.helpers.caches import ALONE, BATCHES, decode, same, start
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.exactness import against_truth
from tests.helpers.models import FAMILIES, build, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import MaskedDense, Reader, kept_moved_up, worst

# transformers computes RoPE's cosines in float32, by which keys are moved.
CLOSE = 2e-5
EVICTING = ["snapkv:window=8", "snapkv:window=8 + adakv", "keydiff", "pyramidkv:window=8"]


def turns(spec: str, lengths: tuple[int, ...], move=kept_moved_up) -> tuple[float, float]:
    """Largest difference to the truth over three turns and their answers, and to no eviction."""
    ids, mask = prompts(lengths)
    mask = None if lengths == ALONE else mask
    model, other = (FAMILIES["llama"](torch.float64) for _ in range(2))
    cache = compressed(model, spec, SMALL)
    reader, truth = Reader(model, cache, mask), MaskedDense(other, mask, move)
    off = 0.0
    for turn in range(3):
        piece = ids if turn == 0 else continuation(len(ids), 15, seed=turn)
        off = max(off, worst(reader(piece), truth(piece), None if turn else mask))
        truth.hide(cache)
        for token in continuation(len(ids), 4, seed=9 + turn).split(1, 1):
            off = max(off, worst(reader(token), truth(token)))
    return off, float(cache.states[0].observers.moves.moves.max())


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("spec", EVICTING)
def test_kept_keys_stand_right_before_the_next_token(spec, lengths) -> None:
    off, moved = turns(f"{spec} + reindex", lengths)
    assert off <= CLOSE and moved > 10


def test_without_moves_the_truth_is_another() -> None:
    assert turns("snapkv:window=8 + reindex", ALONE, move=None)[0] > 0.1


@BATCHES
def test_streaming_llm_of_a_prompt_is_the_same(lengths) -> None:
    spec = "streaming_llm_original:decode=append + reindex"
    options = {"every_step": False, "move": kept_moved_up}
    off, effect, _ = against_truth("llama", spec, lengths, torch.float64, **options)
    assert off <= CLOSE and effect > 1.0
    model, ids = build("llama"), prompts(lengths)[0]
    moving, once = (start(model, each, lengths) for each in ("streaming_llm", spec))
    token = continuation(len(ids), 1)
    with moving.cache.frozen():  # so that the newest entry does not push another one out
        torch.testing.assert_close(moving(token), once(token), atol=1e-4, rtol=0)


def test_keys_are_those_of_a_text_of_the_kept_tokens_alone() -> None:
    """Layer 0 depends on each token alone: there a fresh read at 0, 1, 2 … gives the same keys."""
    model = build("llama", torch.float64)
    reader = start(model, "keydiff + reindex")
    ids = prompts(ALONE)[0][0]
    state = reader.cache.states[0]
    for head in range(2):
        kept = reader.cache.positions(0)[0][head]
        places = torch.arange(64 - len(kept), 64)
        fresh = kvfold.CompressedCache(model, "full")
        with torch.no_grad():
            model(ids[kept][None], past_key_values=fresh, position_ids=places[None])
        expected = fresh.states[0].stored().keys[0, head]
        torch.testing.assert_close(state.stored().keys[0, head], expected, atol=CLOSE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["snapkv:window=8", "snapkv:window=8 + adakv"])
def test_rounds_of_an_answer_move_keys_again(spec) -> None:
    ids = prompts(ALONE)[0]
    model, other = (FAMILIES["llama"](torch.float64) for _ in range(2))
    cache = compressed(model, f"{spec} + every:interval=4 + reindex", 16)
    reader, truth = Reader(model, cache), MaskedDense(other, None, kept_moved_up)
    for piece in (ids, *continuation(1, 12).split(1, 1)):
        assert worst(reader(piece), truth(piece)) <= CLOSE
        truth.hide(cache)
    assert max(n for layer in cache.stats().kept for row in layer for n in row) < 64


def test_merged_entries_are_moved_too() -> None:
    model = build("llama", torch.float64)
    spec = "h2o:decode=append + merge"
    plain, moved = (start(model, each) for each in (spec, f"{spec} + reindex"))
    for one, other in zip(plain.cache.states, moved.cache.states, strict=True):
        by = other.observers.moves.moves
        assert by.max() > 10
        keys = one.plan.rotation(one.stored().keys, by)
        torch.testing.assert_close(other.stored().keys, keys, atol=CLOSE, rtol=0)
        assert torch.equal(other.stored().values, one.stored().values)


@BATCHES
def test_questions_through_a_fork_find_the_moved_keys(lengths) -> None:
    reader = start(build("llama"), "snapkv:window=8 + reindex", lengths)
    twin = Reader(reader.model, fork(reader.cache), reader.mask)
    twin.started = True
    own = copy.deepcopy(reader.cache)
    expected = decode(reader)
    assert same(decode(twin), expected)
    again = Reader(reader.model, own, prompts(lengths)[1] if len(lengths) > 1 else None)
    again.started = True
    assert same(decode(again), expected)


@pytest.mark.parametrize("spec", ["snapkv:window=8", "snapkv:window=8 + adakv"])
def test_a_context_file_holds_moved_keys_and_their_moves(tmp_path, spec) -> None:
    model, tokenizer = new_model(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, DOCUMENT, f"{spec} + reindex", 40)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    for one, other in zip(context.cache.states, loaded.cache.states, strict=True):
        assert torch.equal(one.observers.moves.moves, other.observers.moves.moves)
        assert torch.equal(one.key_positions(), other.key_positions())
    assert loaded.ask(QUESTION, max_new_tokens=8) == context.ask(QUESTION, max_new_tokens=8)
    piece = continuation(1, 20) % 9 + 3
    with torch.no_grad():  # a later turn moves the keys once more
        outs = [model(piece, past_key_values=c.cache).logits for c in (context, loaded)]
    assert torch.equal(*outs)
    for one, other in zip(context.cache.states, loaded.cache.states, strict=True):
        assert torch.equal(one.stored().dense()[0], other.stored().dense()[0])


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("snapkv + kivi + reindex", "encoded entries"),
        ("pyramidinfer + reindex", "evicts nothing itself"),
        ("h2o + reindex", "at every step"),
        ("streaming_llm + reindex", "both bring the positions"),
    ],
)
def test_keys_that_cannot_be_moved_once_are_refused(spec, why) -> None:
    with pytest.raises(IllegalComposition, match=why):
        parse(spec)


def test_it_evicts_nothing_itself() -> None:
    with pytest.raises(IllegalComposition, match="evicts nothing"):
        parse("reindex").stages()


@pytest.mark.slow
def test_frequencies_that_change_with_the_length_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = build("llama", rope_parameters=rope)
    with pytest.raises(UnsupportedModel, match="changes its rotary frequencies"):
        kvfold.CompressedCache(model, "snapkv + reindex", 64)
