# SPDX-License-Identifier: Apache-2.0
"""`RowPolicy` keeps what `CompressedCache` keeps: of a prompt, and round by round."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kvfold import BudgetError, CompressedCache, KvfoldError
from kvfold.cache import rounds
from kvfold.policies import policy
from kvfold.policies.row_policy import RowPolicy, StoredRow
from tests.helpers.by_hand import distinct_prompts
from tests.helpers.engine import least, recorded
from tests.helpers.models import build

PROMPT, TOKENS, BUDGET = 70, 190, 40
METHODS = (
    "snapkv:window=8",
    "snapkv:window=8 + adakv",
    "pyramidkv:window=8",
    "pyramidkv:window=8 + adakv",
    "knorm",
    "keydiff",
    "rkv:window=8",
    "chunkkv:window=8,length=5",
    "lagkv:sinks=4,lag=16",
)
EVERY = (3, 8, 21)  # below the window, as long, and above it
PAGES = ("", " + pages:size=4")


@cache
def model() -> Any:
    return build("llama")


@cache
def text() -> Tensor:
    """Ids `[1, N]`, each token once."""
    return distinct_prompts((TOKENS,))[0]


@dataclass
class Round:
    """What the layers of a cache held when a round came, and the tokens that stayed."""

    keys: list[list[Tensor]] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)
    tokens: list[list[Tensor]] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)
    seen: int = 0
    kept: list[list[list[int]]] = field(default_factory=list)

    def note(self, state: Any) -> None:
        """Notes a layer before its round."""
        (keys, values), columns = state.stored().dense(), state.columns()[0]
        real = [head >= 0 for head in columns]
        for into, rows in (
            (self.keys, keys[0]),
            (self.values, values[0]),
            (self.tokens, columns),
        ):
            into.append([row[at].clone() for row, at in zip(rows, real, strict=True)])
        self.seen = state.sequence.seen
        window = state.observers.window.answer
        if window.width:
            queries, of = window.joined()
            assert of[0].tolist() == list(range(self.seen - of.shape[1], self.seen))
            self.queries.append(queries[0].clone())

    def note_kept(self, state: Any) -> None:
        """Notes the layer after it."""
        self.kept.append([head[head >= 0].tolist() for head in state.columns()[0]])

    @property
    def stored(self) -> StoredRow:
        """The same for a policy."""
        return StoredRow(self.keys, self.values, self.tokens, self.seen, self.queries or None)


@torch.no_grad()
def in_cache(spec: str, budget: float, prompt: int = PROMPT) -> list[Round]:
    """The rounds of a compressed cache that reads the text token by token after a prompt."""
    found: list[Round] = []
    evict_round = rounds.evict_round

    def spied(state: Any, call: Any) -> None:
        if state.plan.layer == 0:
            found.append(Round())
        found[-1].note(state)
        evict_round(state, call)
        found[-1].note_kept(state)

    held = CompressedCache(model(), spec, budget)
    with patch.object(rounds, "evict_round", spied):
        model()(text()[:, :prompt], past_key_values=held)
        for at in range(prompt, TOKENS):
            model()(text()[:, at : at + 1], past_key_values=held)
    return found


def row_of(spec: str, budget: float, prompt: int = PROMPT) -> RowPolicy:
    """A policy that has kept something of the prompt."""
    row = RowPolicy(policy(spec), budget)
    row.prompt(least(row.policy, recorded(model(), text()[:, :prompt])))
    return row


def kept_in(row: RowPolicy, one: Round) -> list[list[list[int]]]:
    """Tokens that the policy keeps in a round."""
    slots = row.round(one.stored)
    if slots is None:
        return [[head.tolist() for head in layer] for layer in one.tokens]
    return [
        [tokens[at].tolist() for tokens, at in zip(*of_layer, strict=True)]
        for of_layer in zip(one.tokens, slots, strict=True)
    ]


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("spec", [*METHODS, "expected_attention", "h2o:decode=append", "random"])
def test_of_a_prompt_it_keeps_what_its_policy_keeps(spec, pages):
    made = policy(spec + pages)
    prefill = least(made, recorded(model(), text()[:, :PROMPT]))
    expected = made.keep(prefill, BUDGET, seed=3).indices
    found = RowPolicy(made, BUDGET, seed=3).prompt(prefill).indices
    for of_layer, there in zip(found, expected, strict=True):
        assert [head.tolist() for head in of_layer] == [head.tolist() for head in there]


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("spec", METHODS)
def test_in_rounds_it_keeps_what_the_cache_keeps(spec, every, pages):
    spec = f"{spec} + every:interval={every}{pages}"
    there = in_cache(spec, BUDGET)
    row = row_of(spec, BUDGET)
    assert len(there) == (TOKENS - PROMPT) // every
    for one in there:
        assert kept_in(row, one) == one.kept
    assert any(  # a page may take more than one round to leave a head
        len(after) < len(before)
        for of, kept in zip(there[-1].tokens, there[-1].kept, strict=True)
        for before, after in zip(of, kept, strict=True)
    )


@pytest.mark.parametrize("spec", METHODS)
def test_a_budget_that_the_prompt_does_not_fill_is_filled_by_the_answer(spec):
    spec = f"{spec} + every:interval=8"
    there = in_cache(spec, 60, prompt=30)
    row = row_of(spec, 60, prompt=30)
    whole = [[list(range(one.seen))] * 2 for one in there]
    assert there[0].kept == [whole[0]] * 4
    assert there[-1].kept != [whole[-1]] * 4
    for one in there:
        assert kept_in(row, one) == one.kept


def test_other_entries_would_be_told_apart():
    spec = "snapkv:window=8 + every:interval=21"
    one = in_cache(spec, BUDGET)[0]
    other = replace(one, queries=[queries.flip(1) for queries in one.queries])
    row = row_of(spec, BUDGET)
    assert kept_in(row, other) != one.kept


@pytest.mark.parametrize(
    "spec", ["snapkv", "h2o:decode=append", "triattention:prompt=counted"], ids=str
)
def test_methods_without_such_rounds_are_refused(spec):
    row = RowPolicy(policy(spec), BUDGET)
    with pytest.raises(KvfoldError, match="has no rounds over an engine's entries"):
        row.round(StoredRow([], [], [], 0))


@pytest.mark.parametrize(
    "spec, budget, why",
    [
        ("snapkv", None, "needs a budget"),
        ("simlayerkv", 0.5, "takes no budget"),
        ("snapkv:window=8", 7, "raise it to at least 8"),
    ],
)
def test_budgets_that_are_refused(spec, budget, why):
    with pytest.raises(BudgetError, match=why):
        RowPolicy(policy(spec), budget)


def test_a_prompt_without_its_queries_is_refused():
    row = RowPolicy(policy("snapkv:window=8"), BUDGET)
    prefill = replace(recorded(model(), text()[:, :PROMPT]), queries=None)
    with pytest.raises(KvfoldError, match="the last 8 tokens"):
        row.prompt(prefill)


def test_a_budget_below_a_page_is_refused_when_the_prompt_was_read():
    with pytest.raises(BudgetError, match="raise the budget"):
        row_of("knorm + pages:size=64", 10)
