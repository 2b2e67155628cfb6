# SPDX-License-Identifier: Apache-2.0
"""Queries of the last tokens, against all queries that requests have had."""

import random

import pytest
import torch

from kvfold.serve.vllm.head_pages.queries import WATCHED, QueryRing, WatchedStep

LAYERS, HEADS, SIZE = 2, 3, 4


class Reading:
    """A request that is read in pieces, and all queries that it has had."""

    def __init__(self, ring, count, block):
        self.tail, self.block = ring.take(count), block
        self.queries = torch.zeros(LAYERS, 0, HEADS, SIZE)

    def read(self, count):
        self.queries = torch.cat([self.queries, torch.randn(LAYERS, count, HEADS, SIZE)], 1)
        return self.queries[:, -count:]

    def check(self):
        seen = self.queries.shape[1]
        if seen >= self.tail.count:
            for found, whole in zip(self.tail.stacked(seen), self.queries, strict=True):
                assert torch.equal(found, whole[-self.tail.count :].transpose(0, 1))


@pytest.mark.parametrize("seed", range(10))
def test_the_last_queries_of_requests_that_come_and_go_are_kept(monkeypatch, seed):
    monkeypatch.setattr("kvfold.serve.vllm.head_pages.queries.WATCHED", watched := {})
    rng, ring, requests = random.Random(seed), QueryRing(LAYERS), []
    for step in range(40):
        if rng.random() < 0.3:
            requests.append(Reading(ring, rng.choice([1, 5, 8, 30]), 100 + step))
        if len(requests) > 4:
            ring.give_back(requests.pop(rng.randrange(5)).tail)
        watched.clear()
        watched.update({request.block: request.tail for request in requests})
        counts = [rng.choice([1, 1, 3, 20]) for _ in requests]
        # A request between them is not watched.
        pieces = [torch.randn(LAYERS, 2, HEADS, SIZE)]
        pieces += [of.read(count) for of, count in zip(requests, counts, strict=True)]
        starts = torch.tensor([0, 2, *counts]).cumsum(0).tolist()
        lengths = [7, *(of.queries.shape[1] for of in requests)]
        blocks = [9, *(of.block for of in requests)]
        found = WatchedStep.of(blocks, starts, lengths, torch.device("cpu"))
        assert (found is None) == (not requests)
        if found is not None:
            for layer in range(LAYERS):
                # The buffer is vLLM's own, written anew in the next step.
                buffer = torch.cat(
                    [*(piece[layer] for piece in pieces), torch.zeros(3, HEADS, SIZE)]
                )
                found.read(layer, buffer)
                buffer.zero_()
        for request in requests:
            request.check()


def test_rows_are_taken_again():
    ring = QueryRing(LAYERS)
    first, second, third = (ring.take(count) for count in (4, 2, 3))
    assert [tail.first for tail in (first, second, third)] == [0, 4, 6]
    ring.give_back(second)
    assert ring.take(3).first == 9 and ring.take(1).first == 4 and ring.take(1).first == 5
    ring.give_back(first)
    assert ring.take(4).first == 0
    assert WATCHED == {}


def test_a_text_shorter_than_its_tail_has_fewer_queries():
    """And gets more of them as it is written."""
    tail = QueryRing(LAYERS).take(8)
    queries = torch.randn(LAYERS, 20, HEADS, SIZE)
    for seen in range(1, 20):
        for layer in range(LAYERS):
            tail.ring.write(layer, tail.rows(seen - 1, seen), queries[layer, seen - 1 : seen])
        for found, whole in zip(tail.stacked(seen), queries, strict=True):
            assert torch.equal(found, whole[max(0, seen - 8) : seen].transpose(0, 1))
