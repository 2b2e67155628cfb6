# SPDX-License-Identifier: Apache-2.0
"""Moments of queries before RoPE, compared with the model's own projections."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

import kvfold
from kvfold import (
    CompressedCache,
    KvfoldError,
    Method,
    Needs,
    Observation,
    QueryMomentsNeed,
    Stages,
)
from kvfold.cache.fork import end_turn, fork_within
from kvfold.cache.layer import CompressedLayer
from kvfold.errors import IllegalComposition, UnsupportedModel
from kvfold.hf.models import read_tokens
from kvfold.methods.stages.when import Hold, Rounds
from kvfold.observers import query_moments as running_moments
from tests.helpers.caches import counted_bytes, reachable_bytes
from tests.helpers.models import build, continuation, prompts
from tests.helpers.truth import Reader

ALONE, PADDED = (64,), (64, 53, 24)
BUDGET, SKIP = 20, 4
BATCHES = pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
NEED = QueryMomentsNeed(skip=SKIP)


def watching(need: QueryMomentsNeed | None = NEED, **stages: Any) -> tuple[Method, list[Any]]:
    """A method that keeps other entries in each head, and the observations it was given."""
    seen: list[Observation] = []

    def score(observation: Observation) -> Tensor:
        seen.append(observation)
        heads = torch.arange(observation.positions.shape[1])[:, None]
        return ((observation.positions * 7 + heads * 5) % 23).float()

    @dataclass(frozen=True)
    class Watching(Method):
        def stages(self) -> Stages:
            return Stages(needs=Needs(need), score=score, **stages)

    return Watching(), seen


class QueriesBeforeRope:
    """Queries `[B, Hq, N, D]` of all tokens as the model's projections gave them, by layer."""

    def __init__(self, reader: Reader) -> None:
        layers = reader.cache.layers
        own = [i for i, layer in enumerate(layers) if isinstance(layer, CompressedLayer)]
        modules = [m for m in reader.model.modules() if getattr(m, "layer_idx", None) in own]
        attention = [m for m in modules if hasattr(m, "o_proj") or hasattr(m, "c_attn")]
        self.seen: list[list[Tensor]] = [[] for _ in own]
        for module, seen in zip(attention, self.seen, strict=True):
            last = getattr(module, "q_norm", getattr(module, "q_proj", None)) or module.c_attn
            last.register_forward_hook(partial(self._note, module.head_dim, seen))

    @staticmethod
    def _note(size: int, seen: list[Tensor], module: Any, args: Any, queries: Tensor) -> None:
        if isinstance(module, Conv1D):
            queries = queries.chunk(3, -1)[0]
        if queries.dim() == 3:
            queries = queries.unflatten(-1, (-1, size)).transpose(1, 2)
        elif queries.shape[1] != 8:  # [B, S, Hq, D]
            queries = queries.transpose(1, 2)
        seen.append(queries)

    def check(
        self, seen: list[Observation], mask: Tensor, skip: int = SKIP, since: int = 0
    ) -> None:
        """Compares with the queries from column `since` on; `mask [B, N]` is 0 at padding."""
        assert len(seen) == len(self.seen)
        counted = (mask.cumsum(1) > skip) & (mask == 1) & (torch.arange(mask.shape[1]) >= since)
        for observation in seen:
            queries = torch.cat(self.seen[observation.layer], 2).double()
            moments = observation[QueryMomentsNeed]
            for row, real in enumerate(counted):
                mine = queries[row][:, real]
                covariance = torch.stack([torch.cov(head.T, correction=0) for head in mine])
                assert moments.count[row] == real.sum()
                expected = mine.mean(1), covariance
                got = moments.mean[row].double(), moments.covariance[row].double()
                torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
        seen.clear()


def reader_of(model: Any, method: Method, lengths: tuple[int, ...]) -> tuple[Reader, Tensor]:
    """A reader with an empty cache, and a prompt `[B, N]` for it."""
    ids, mask = prompts(lengths)
    cache = CompressedCache(model, method, BUDGET)
    return Reader(model, cache, mask if len(lengths) > 1 else None), ids


def read_in_pieces(reader: Reader, ids: Tensor, ends: tuple[int, ...] = (3, 24, 25, 64)) -> None:
    """Reads a prompt `[B, N]`, 0 at padding, in pieces of one prefill."""
    with reader.cache.reading(until=ids.shape[1]):
        for end in ends:
            mask = None if reader.mask is None else (ids[:, :end] > 0).long()
            read_tokens(
                reader.model, ids[:, reader.cache.get_seq_length() : end], reader.cache, mask
            )
    reader.started = True


@pytest.mark.cases(4)
@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt2", "qwen3", "olmo2", "smollm3", "glm4", "granite"]
)
def test_moments_are_those_of_the_projection(family, lengths):
    method, seen = watching()
    reader, ids = reader_of(build(family), method, lengths)
    queries = QueriesBeforeRope(reader)
    reader(ids)
    queries.check(seen, prompts(lengths)[1])


@BATCHES
def test_moments_of_a_prompt_in_pieces_and_of_a_later_turn(lengths, monkeypatch):
    monkeypatch.setattr(running_moments, "BLOCK", 7)
    method, seen = watching()
    reader, ids = reader_of(build("llama"), method, lengths)
    queries, mask = QueriesBeforeRope(reader), prompts(lengths)[1]
    read_in_pieces(reader, ids)
    queries.check(seen, mask)
    more = continuation(len(ids), 30)
    reader(more[:, :1])  # generated
    reader(more[:, 1:20])
    mask = torch.nn.functional.pad(mask, (0, 20), value=1)
    queries.check(seen, mask, since=65)
    with reader.cache.reading():
        reader(more[:, 20:24])
        reader(more[:, 24:])
    queries.check(seen, torch.nn.functional.pad(mask, (0, 10), value=1), since=84)


def test_moments_of_the_prompt_stay_while_an_answer_is_evicted():
    method, seen = watching(when=Rounds(3))
    reader, ids = reader_of(build("llama"), method, PADDED)
    queries, mask = QueriesBeforeRope(reader), prompts(PADDED)[1]
    reader(ids)
    queries.check(seen, mask)
    reader.cache.reorder_cache(torch.tensor([2, 0, 0]))
    reader.mask = mask = reader.mask[[2, 0, 0]]
    queries.seen = [[part[[2, 0, 0]] for part in parts] for parts in queries.seen]
    assert counted_bytes(reader.cache) == reachable_bytes(reader.cache)
    twin = copy.deepcopy(reader.cache)
    for token in continuation(3, 3).split(1, 1):
        reader(token)
    queries.check(seen, mask)
    assert twin.states[0].observers[QueryMomentsNeed].nbytes() == 3 * 4 * (1 + 8 * 8 + 8 * 8 * 8)


@pytest.mark.slow
def test_moments_are_let_go_when_nothing_else_reads_them():
    reader, ids = reader_of(build("llama"), watching()[0], PADDED)
    reader(ids)
    assert all(state.observers[QueryMomentsNeed].nbytes() == 0 for state in reader.cache.states)


def test_a_prompt_of_one_token_has_no_moments():
    method, seen = watching(when=Hold())
    reader, ids = reader_of(build("llama"), method, ALONE)
    for token in ids[:, : BUDGET + 1].split(1, 1):
        reader(token)
    assert seen and all(each[QueryMomentsNeed].count.eq(0).all() for each in seen)
    assert all(each[QueryMomentsNeed].covariance.shape == (1, 8, 8, 8) for each in seen)


def test_moments_of_a_fork_are_those_of_its_own_turn():
    method, seen = watching()
    model = build("llama")
    reader, ids = reader_of(model, method, ALONE)
    queries = QueriesBeforeRope(reader)
    reader(ids)
    seen.clear()
    both = torch.cat([ids, continuation(1, 30)], 1)
    end_turn(model, fork_within(reader.cache, 8), both)
    queries.check(seen, torch.ones_like(both), since=64)


def test_questions_to_a_frozen_cache_are_not_counted():
    method, seen = watching(when=Rounds(3))
    reader, ids = reader_of(build("llama"), method, ALONE)
    queries = QueriesBeforeRope(reader)
    reader(ids)
    seen.clear()
    before = reader.cache.states[0].observers[QueryMomentsNeed].moments
    with reader.cache.frozen():
        reader(continuation(1, 9))
    assert reader.cache.states[0].observers[QueryMomentsNeed].moments is before
    assert len(queries.seen[0]) == 2 and not seen


def test_counted_queries_cannot_be_taken_back():
    reader, ids = reader_of(build("llama"), watching()[0], ALONE)
    with reader.cache.reading(until=64):
        reader(ids[:, :40])
        with pytest.raises(KvfoldError, match="scored since"):
            reader.cache.crop(-5)
        reader(ids[:, 40:])


def test_the_mean_alone():
    method, seen = watching(QueryMomentsNeed(covariance=False))
    reader, ids = reader_of(build("llama"), method, PADDED)
    reader(ids)
    assert seen[0][QueryMomentsNeed].covariance is None
    assert seen[0][QueryMomentsNeed].count.tolist() == list(PADDED)


def test_queries_hold_the_attention_factor():
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.5,
    }
    method, seen = watching()
    reader, ids = reader_of(build("llama", rope_parameters=rope), method, ALONE)
    queries = QueriesBeforeRope(reader)
    reader(ids)
    queries.seen = [[1.5 * part for part in parts] for parts in queries.seen]
    queries.check(seen, torch.ones_like(ids))


@pytest.mark.parametrize("family", ["cohere2", "llama4", "deepseek_v3", "gemma3n"])
def test_queries_that_cannot_be_rotated_back_are_refused(family):
    with pytest.raises(UnsupportedModel, match="no un-rotated keys or queries"):
        CompressedCache(build(family), watching()[0], BUDGET)


def test_frequencies_that_change_with_the_length_are_refused():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModel, match="changes its rotary frequencies"):
        CompressedCache(build("llama", rope_parameters=rope), watching()[0], BUDGET)


@pytest.mark.slow
def test_other_rotary_positions_are_refused():
    model = build("llama")
    reader, ids = reader_of(model, watching()[0], ALONE)
    with torch.no_grad(), pytest.raises(UnsupportedModel, match="its number in its row"):
        model(ids, past_key_values=reader.cache, position_ids=torch.arange(64)[None] + 5)


def test_future_queries_are_turned_by_the_next_positions():
    method, seen = watching()
    reader, ids = reader_of(build("llama"), method, PADDED)
    reader(ids)
    first = seen[0]
    future = first.future_query_moments(6)
    turned = [
        first.rotate(first[QueryMomentsNeed].mean[:, :, None], torch.tensor(PADDED) + i)
        for i in range(6)
    ]
    expected = torch.stack(turned).mean(0)[:, :, 0]
    torch.testing.assert_close(future.mean, expected, atol=1e-5, rtol=0)


def test_moments_must_be_asked_for():
    method, seen = watching(None)
    reader, ids = reader_of(build("llama"), method, ALONE)
    reader(ids)
    assert seen[0].get(QueryMomentsNeed) is None
    with pytest.raises(KvfoldError, match=r"Needs\(QueryMomentsNeed"):
        seen[0].future_query_moments(4)


def test_moments_of_different_queries_are_refused():
    other = dataclasses.replace(NEED, skip=0)
    with pytest.raises(IllegalComposition, match="different first tokens"):
        Needs(NEED).joined(Needs(other))


def test_a_graph_that_evicts_is_refused():
    model, ids = build("llama"), prompts(ALONE)[0]
    cache = CompressedCache(model, watching(when=Hold())[0], BUDGET)
    with pytest.raises(KvfoldError, match="compile=True does not go with"):
        kvfold.generate(model, ids, cache=cache, max_new_tokens=2, compile=True)
