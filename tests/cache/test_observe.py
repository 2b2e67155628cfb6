# SPDX-License-Identifier: Apache-2.0
"""What an Observation offers beyond entries and attention, compared with the model's own data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import CompressedCache, KvfoldError, Method, Needs, Observation, Stages
from kvfold.cache.fork import end_turn, fork_within
from kvfold.errors import IllegalComposition
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader

ALONE, PADDED = (64,), (64, 53, 24)
BUDGET = 20
FAMILIES = pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "deepseek_v3"])
BATCHES = pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])


def watching(needs: Needs, **stages: Any) -> tuple[Method, list[Observation]]:
    """A method that keeps other entries in each head, and the observations it was given."""
    seen: list[Observation] = []

    def score(observation: Observation) -> Tensor:
        seen.append(observation)
        heads = torch.arange(observation.positions.shape[1])[:, None]
        return ((observation.positions * 7 + heads * 5) % 23).float()

    @dataclass(frozen=True)
    class Watching(Method):
        def stages(self) -> Stages:
            return Stages(needs=needs, score=score, **stages)

    return Watching(), seen


def reader_of(model: Any, method: Method, lengths: tuple[int, ...]) -> tuple[Reader, Tensor]:
    """A reader with an empty cache, and a prompt `[B, N]` for it."""
    ids, mask = prompts(lengths)
    cache = CompressedCache(model, method, BUDGET)
    return Reader(model, cache, mask if len(lengths) > 1 else None), ids


# --- token ids -------------------------------------------------------------------------------


def ids_by_position(ids: Tensor, positions: Tensor) -> Tensor:
    """The tokens of `ids [B, N]`, 0 for padding, at `positions [B, H, T]`, one by one."""
    rows = [row[row > 0].tolist() for row in ids]
    return torch.tensor(
        [
            [[-1 if p < 0 else row[p] for p in head] for head in of_row]
            for row, of_row in zip(rows, positions.tolist(), strict=True)
        ]
    )


def check_ids(seen: list[Observation], ids: Tensor) -> None:
    """Compares all observations since the last check with the tokens `[B, N]` read so far."""
    assert seen
    for observation in seen:
        assert torch.equal(observation.token_ids, ids_by_position(ids, observation.positions))
    seen.clear()


@BATCHES
@FAMILIES
def test_token_ids_are_those_of_the_entries(family, lengths):
    method, seen = watching(Needs(token_ids=True))
    reader, ids = reader_of(build(family), method, lengths)
    reader(ids)
    check_ids(seen, ids)
    more = continuation(len(ids), 9)
    reader(more[:, :1])
    reader(more[:, 1:])  # a later turn, of which earlier entries are gone
    check_ids(seen, torch.cat([ids, more], 1))


@BATCHES
def test_token_ids_of_a_prompt_in_pieces(lengths):
    method, seen = watching(Needs(token_ids=True))
    reader, ids = reader_of(build("llama"), method, lengths)
    with reader.cache.reading(until=64):
        for piece in ids.split(24, 1):
            reader(piece)
    check_ids(seen, ids)
    more = continuation(len(ids), 9)
    with reader.cache.reading():
        for piece in more.split(4, 1):
            reader(piece)
    check_ids(seen, torch.cat([ids, more], 1))


@BATCHES
def test_token_ids_while_decoding(lengths):
    method, seen = watching(Needs(token_ids=True, only_attention=True), decode="hold")
    reader, ids = reader_of(build("llama"), method, lengths)
    reader(ids)
    for token in continuation(len(ids), 4).split(1, 1):
        seen.clear()
        reader(token)
        ids = torch.cat([ids, token], 1)
        check_ids(seen, ids)


def test_token_ids_after_a_crop_and_other_rows():
    method, seen = watching(Needs(token_ids=True))
    reader, ids = reader_of(build("llama"), method, PADDED)
    reader(ids)
    mask, more = reader.mask, continuation(3, 9)
    with reader.cache.frozen():
        reader(more)
        reader.cache.crop(-9)
    reader.cache.reorder_cache(torch.tensor([2, 0, 0]))
    ids, reader.mask = ids[[2, 0, 0]], mask[[2, 0, 0]]
    other = continuation(3, 9, seed=5)
    seen.clear()
    reader(other)
    check_ids(seen, torch.cat([ids, other], 1))


def test_token_ids_of_generated_text():
    method, seen = watching(Needs(token_ids=True))
    model, ids = build("llama"), prompts(ALONE)[0]
    cache = CompressedCache(model, method, BUDGET)
    options = {"cache": cache, "max_new_tokens": 5, "do_sample": False}
    said = kvfold.generate(model, ids, prefill_chunk=20, **options)
    check_ids(seen, ids)
    asked = torch.cat([said, continuation(1, 7)], 1)
    kvfold.generate(model, asked, num_beams=2, **options)
    check_ids(seen, asked.repeat(seen[0].positions.shape[0], 1))


def test_token_ids_of_a_fork():
    method, seen = watching(Needs(token_ids=True))
    model = build("llama")
    reader, ids = reader_of(model, method, ALONE)
    reader(ids)
    both = torch.cat([ids, continuation(1, 30)], 1)
    seen.clear()
    end_turn(model, fork_within(reader.cache, 8), both)
    check_ids(seen, both)


SEEN: list[Observation] = []


def highest_id(observation: Observation) -> Tensor:
    """The token's id; of one token, the later entry."""
    SEEN.append(observation)
    assert observation.token_ids is not None
    return observation.token_ids * 1000.0 + observation.positions


@dataclass(frozen=True)
class HighestId(Method):
    """Keeps the tokens of highest id."""

    def stages(self) -> Stages:
        return Stages(needs=Needs(token_ids=True), score=highest_id)


def test_a_method_that_reads_token_ids_keeps_what_it_says():
    reader, ids = reader_of(build("llama"), HighestId(), PADDED)
    reader(ids)
    for row, kept in zip(ids.tolist(), reader.cache.positions(1), strict=True):
        best = sorted(range(64), key=lambda column: (row[column], column))[-BUDGET:]
        assert all(head.tolist() == sorted(best) for head in kept)


def test_token_ids_of_a_loaded_context(tmp_path):
    tokenizer, model = word_tokenizer(), build("llama", vocab_size=len(word_tokenizer()))
    known = dict(kvfold.methods.registry._REGISTRY)
    try:
        kvfold.register("highest_id")(HighestId)
        context = kvfold.compress(model, tokenizer, "sky sea " * 20, HighestId(), BUDGET)
        context.save(tmp_path / "a.kvfold")
        context = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    finally:
        kvfold.methods.registry._REGISTRY.clear()
        kvfold.methods.registry._REGISTRY.update(known)
    more = continuation(1, 9).clamp(max=len(tokenizer) - 1)
    SEEN.clear()
    Reader(model, context.cache)(more)
    for observation in SEEN:
        all_ids = torch.cat([context.ids, more], 1)[0]
        expected = all_ids[observation.positions]
        assert torch.equal(observation.token_ids, expected)


def test_tokens_read_past_the_model_are_unknown():
    method, seen = watching(Needs(token_ids=True))
    model = build("llama")
    reader, ids = reader_of(model, method, ALONE)
    with torch.no_grad(), reader.cache.reading():
        reader(ids[:, :40])
        model.get_decoder()(ids[:, 40:], past_key_values=reader.cache)
    for observation in seen:
        expected = ids_by_position(ids, observation.positions)
        expected = expected.masked_fill(observation.positions >= 40, -1)
        assert torch.equal(observation.token_ids, expected)
    assert seen


def test_embeddings_have_no_token_ids():
    method, seen = watching(Needs(token_ids=True))
    model = build("llama")
    reader, ids = reader_of(model, method, ALONE)
    embedded = model.get_input_embeddings()(ids)
    with torch.no_grad(), pytest.raises(KvfoldError, match="give input_ids"):
        model(inputs_embeds=embedded, past_key_values=reader.cache)
    assert reader.cache.get_seq_length() == 0
    reader(ids)
    check_ids(seen, ids)


# --- what every such need has in common --------------------------------------------------------

BEYOND = [Needs(token_ids=True)]


@pytest.mark.parametrize("needs", BEYOND, ids=str)
def test_a_graph_that_evicts_is_refused(needs):
    method, _ = watching(needs, decode="hold")
    model, ids = build("llama"), prompts(ALONE)[0]
    cache = CompressedCache(model, method, BUDGET)
    with pytest.raises(KvfoldError, match="compile=True does not go with"):
        kvfold.generate(model, ids, cache=cache, max_new_tokens=2, compile=True)


@pytest.mark.parametrize("needs", BEYOND, ids=str)
def test_token_pruning_is_refused(needs):
    with pytest.raises(IllegalComposition, match="pruned between the layers"):
        Stages(needs=needs, token_pruning=lambda observation: observation.positions[:, 0])


@pytest.mark.parametrize("needs", BEYOND, ids=str)
def test_needs_are_joined(needs):
    assert Needs(window=3).joined(needs) == needs.joined(Needs(window=3))
    assert needs.joined(needs) == needs
