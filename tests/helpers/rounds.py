# SPDX-License-Identifier: Apache-2.0
"""Rounds by hand: the answer's last queries, and a rule for each head when a round is due."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    WINDOW,
    ByHand,
    Head,
    Layer,
    assert_holds,
    best,
    distinct_prompts,
    newest,
    pooled,
    prompt_read,
    read_by_kvfold,
)


def last_queries(layer: Layer) -> None:
    """The attention of the last WINDOW queries, over all forwards, to what is stored now."""
    queries = torch.cat([getattr(layer, "recent", layer.query[:, :0]), layer.query], 1)[:, -WINDOW:]
    layer.recent = queries
    last = layer.heads[0].positions[-1] + 1
    at = torch.arange(last - queries.shape[1], last)
    for head, own in zip(layer.heads, queries.split(len(queries) // len(layer.heads)), strict=True):
        hidden = torch.tensor(head.positions) > at[:, None]
        head.logits = own @ head.keys.T * layer.scale
        head.rows = head.logits.masked_fill(hidden, -torch.inf).softmax(-1)


def per_full_head(rule: Callable[[Head], list[int]]) -> Callable[[ByHand], None]:
    """A round in which `rule` says what stays of each head with more than SMALL entries."""

    def round_of(one: ByHand) -> None:
        for head in (head for layer in one.layers for head in layer.heads):
            if len(head) > SMALL:
                head.keep(rule(head))

    return round_of


def unlike(head: Head) -> list[int]:
    """KeyDiff: the keys least like the mean direction."""
    unit = head.keys / head.keys.norm(dim=-1, keepdim=True)
    return best(-(unit @ unit.mean(0)), SMALL)


def of_all_pairs(
    keys: torch.Tensor, threshold: float, retain: bool, spare_first: bool
) -> torch.Tensor:
    """Mean cosines `[T]` of one head's keys `[T, D]`, from the matrix, pair by pair (R-KV)."""
    units = keys.double() / (keys.double().norm(dim=-1, keepdim=True) + 1e-8)
    cosines = units @ units.T
    for i in range(len(keys)):
        cosines[i, i] = 0
    for i in range(len(keys) if retain else 0):
        copies = [j for j in range(len(keys)) if cosines[i, j] > threshold]
        if copies or spare_first:
            cosines[i, max(copies, default=0)] = 0
    return cosines.sum(0) / len(keys)


def important(head: Head) -> torch.Tensor:
    """Pooled attention to the entries before the window, by the largest logit of a group."""
    largest = torch.stack(list(head.logits)).amax(0)[:, :-WINDOW]
    asked = torch.stack([row.softmax(-1) for row in largest]).mean(0)
    return torch.tensor(pooled(asked.tolist(), 7, "max"), dtype=torch.float64)


def important_and_new(head: Head, lam: float, spare_first: bool) -> list[int]:
    """R-KV: the window, and the best by the two terms."""
    repeated = of_all_pairs(head.keys, 0.5, True, spare_first).softmax(-1)[:-WINDOW]
    scores = lam * important(head) - (1 - lam) * repeated
    return sorted(scores.topk(SMALL - WINDOW).indices.tolist()) + newest(head, WINDOW)


def window_of_each(one: ByHand) -> None:
    """The window's queries and rows in all layers."""
    for layer in one.layers:
        last_queries(layer)


def assert_each_round(
    spec: str,
    round_of: Callable[[ByHand], None],
    lengths: tuple[int, ...],
    interval: int,
    observe: Callable[[ByHand], None] = window_of_each,
    steps: int = 12,
    heads: int = 2,
) -> list[ByHand]:
    """Asserts that kvfold stores what `round_of` leaves of rows alone, after each of the `steps`.

    `observe` notes after each forward what the rounds read; `heads` are the model's KV heads.
    """
    longest = max(lengths)
    # No token comes twice: equal norms would be ranked by their last bits.
    tokens = distinct_prompts((longest + steps,) * len(lengths))[0][:, longest:].split(1, 1)
    reader = read_by_kvfold(spec, SMALL, heads, lengths)
    prompts = [prompt_read(heads, lengths, row) for row in range(len(lengths))]
    expected = copy.deepcopy(prompts)
    for step in range(steps + 1):
        if step:
            reader(tokens[step - 1])
        for row, one in enumerate(expected):
            if step:
                one(tokens[step - 1][row : row + 1])
            observe(one)
            if step % interval == 0:
                round_of(one)
        assert_holds(reader.cache, expected)
    return expected
