# SPDX-License-Identifier: Apache-2.0
"""Rounds of ten scorers on six families: what each keeps, from the same stored keys, in float64.

The witness notes queries and stored entries of each attention call. Where a round is due, loops
choose from them; transformers' own positions and masks aside, nothing of the choice is kvfold's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvfold
from kvfold.cache import layer as module
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.state import LayerState
from kvfold.observers.call import AttentionCall
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import WINDOW, Head, best, distinct_prompts, h2o, newest, with_window
from tests.helpers.caches import BATCHES
from tests.helpers.models import FAMILIES
from tests.helpers.rounds import important, important_and_new, unlike
from tests.helpers.truth import Reader

FUTURE, SINKS, CHUNK, DISTANCES = 5, 4, 20, [2**power for power in range(17)]


class Row:
    """One row's heads of a layer as a round finds them, and all that was asked of them."""

    def __init__(self, seen: Witness, state: LayerState, call: AttentionCall, row: int) -> None:
        record, self.padding = seen.of[state], seen.padding[row]
        self.seen, self.prompt = state.seen - self.padding, seen.prompt - self.padding
        self.turn, self.scale = state.plan.rotation, call.logits["scale"]
        self.sizes = record.sizes[row]
        self.queries = torch.stack(record.queries, 2)[row, :, self.padding :]  # [Hq, N, D]
        self.heads = [self.head(state, call, record, row, h) for h in range(len(self.sizes))]

    def head(self, state: LayerState, call: AttentionCall, record: Any, row: int, h: int) -> Head:
        """A KV head, with the last queries' logits and rows."""
        keys, values = (part[row, h] for part in state.stored().dense())
        columns = state.stored().columns[row, h]
        real = columns >= self.padding
        own = self.queries.split(len(self.queries) // len(self.sizes))[h]
        head = Head(keys.shape[-1], len(own))
        head.keys, head.values = keys[real], values[real]
        head.positions = (columns[real] - self.padding).tolist()
        head.sums = record.sums[row, h, columns[real]]
        at = torch.arange(self.seen - WINDOW, self.seen)
        hidden = torch.tensor(head.positions) > at[:, None]
        head.logits = own[:, -WINDOW:] @ head.keys.T * self.scale
        sinks = sinks_of(call, h, len(own))
        head.rows = softmax(head.logits.masked_fill(hidden, -torch.inf), sinks)
        head.own = own
        return head

    def before_rope(self, first: int = 0) -> Tensor:
        """The prompt's queries `[Hq, n, D]` from token `first` on, turned back."""
        asked = self.queries[None, :, first : self.prompt]
        return self.turn(asked, -torch.arange(first, self.prompt)[None])[0]

    def rotation(self, position: int, size: int) -> Tensor:
        """The rotation matrix `[D, D]` of a position."""
        unit = torch.eye(size, dtype=torch.float64)[None, None]
        return self.turn(unit, torch.full((1, size), position))[0, 0].T


def softmax(logits: Tensor, sinks: Tensor) -> Tensor:
    """Weights of logits `[G, S, T]`; sink logits `[G, 1]` take their share."""
    beside = torch.cat([logits, sinks[:, None].expand(-1, logits.shape[1], -1)], -1)
    return beside.softmax(-1)[..., : logits.shape[-1]]


def sinks_of(call: AttentionCall, head: int, group: int) -> Tensor:
    """Sink logits `[G, 1]` of a KV head's query heads; −∞ where the model has none."""
    sinks = call.logits.get("sink_logits")
    if sinks is None:
        return torch.full((group, 1), -torch.inf, dtype=torch.float64)
    return sinks.double()[head * group : (head + 1) * group, None]


class Witness:
    """Queries and attention of each layer; `round_of` says what a due round leaves of a row."""

    def __init__(self, lengths: tuple[int, ...], interval: int, round_of: Rule) -> None:
        self.prompt, self.interval, self.round_of = max(lengths), interval, round_of
        self.padding = [self.prompt - length for length in lengths]
        self.of: dict[LayerState, Any] = {}
        self.expected: list[tuple[LayerState, list[list[list[int]]]]] = []

    def attends(self, state: LayerState, call: AttentionCall) -> None:
        """Adds a call's queries, and the attention that they give."""
        keys, columns = state.stored().dense()[0], state.stored().columns
        batch, heads = keys.shape[:2]
        record = self.of.setdefault(
            state, SimpleNamespace(queries=[], sums=torch.zeros(batch, heads, 200).double())
        )
        new = call.query.shape[2]
        first = state.seen - new
        record.queries += call.query.unbind(2)
        group = call.query.shape[1] // heads
        for row, padding in enumerate(self.padding):
            at = torch.arange(max(first, padding), state.seen)
            for h in range(heads):
                asked = call.query[row, h * group : (h + 1) * group, new - len(at) :]
                places = columns[row, h]
                hidden = (places > at[:, None]) | (places < padding)
                logits = asked @ keys[row, h].T * call.logits["scale"]
                rows = softmax(logits.masked_fill(hidden, -torch.inf), sinks_of(call, h, group))
                received = rows.mean(0).sum(0)
                record.sums[row, h].index_add_(0, places.clamp(min=0), received * (places >= 0))

    def generates(self, state: LayerState, call: AttentionCall) -> None:
        """Notes what loops keep if a round is due."""
        if not hasattr(self.of[state], "sizes"):
            self.of[state].sizes = self.sizes_of(state)
        if (state.seen - self.prompt) % self.interval == 0:
            rows = [Row(self, state, call, row) for row in range(len(self.padding))]
            kept = [
                [
                    [head.positions[i] for i in sorted(slots)]
                    for head, slots in zip(row.heads, self.round_of(row), strict=True)
                ]
                for row in rows
            ]
            self.expected.append((state, kept))

    def sizes_of(self, state: LayerState) -> list[list[int]]:
        """Entries of each row's heads before the first generated token."""
        columns = state.stored().columns
        before = [
            [int(((head >= at) & (head < state.seen - 1)).sum()) for head in row]
            for at, row in zip(self.padding, columns, strict=True)
        ]
        return before


Rule = Callable[[Row], list[list[int]]]


def per_head(rule: Callable[[Head], list[int]]) -> Rule:
    return lambda row: [rule(head) for head in row.heads]


def in_chunks(row: Row) -> list[list[int]]:
    """The window, then chunks by their mean of all heads' votes, the last one in part."""
    head = row.heads[0]
    assert all(other.positions == head.positions for other in row.heads)
    open_ = len(head) - WINDOW
    total = sum(each.rows[:, :, :open_].sum(1).mean(0) for each in row.heads).tolist()
    chunks: dict[int, list[int]] = {}
    for i in range(open_):
        chunks.setdefault(head.positions[i] // CHUNK, []).append(i)
    ranked = sorted(chunks.values(), key=lambda own: -sum(total[i] for i in own) / len(own))
    order = [i for own in ranked for i in sorted(own, key=lambda i: (-total[i], i))]
    return [order[: SMALL - WINDOW] + newest(head, WINDOW)] * len(row.heads)


def pairs_of(row: Row, size: int) -> list[list[int]]:
    """Components that rotate together, others alone."""
    turned = row.rotation(1, size)
    return [
        [i for i in range(size) if turned[i, j].abs() > 1e-9 or turned[j, i].abs() > 1e-9]
        for j in range(size)
    ]


def at_distances(row: Row) -> list[list[int]]:
    """TriAttention's series at 17 distances, from the prompt's queries."""
    before, size = row.before_rope(), row.queries.shape[-1]
    pairs = list({tuple(sorted({j, *own})) for j, own in enumerate(pairs_of(row, size))})
    turns = [row.rotation(row.seen + distance, size) for distance in DISTANCES]
    group, kept = len(before) // len(row.heads), []
    for h, head in enumerate(row.heads):
        scores = []
        for asked in before[h * group : (h + 1) * group]:
            centre = asked.mean(0)
            logits = sum(head.keys @ (turn @ centre) for turn in turns) / len(turns)
            for pair in map(list, pairs):
                beyond = asked[:, pair].norm(dim=-1).mean() - centre[pair].norm()
                logits = logits + beyond * head.keys[:, pair].norm(dim=-1)
            scores.append((logits - logits.mean()) / logits.std(correction=0))
        kept.append(best(torch.stack(scores).amax(0), SMALL))
    return kept


def expected(row: Row) -> list[list[int]]:
    """Attention expected from Gaussian queries at the next positions, times the values' norms."""
    before, size = row.before_rope(SINKS), row.queries.shape[-1]
    turn = sum(row.rotation(row.seen + i, size) for i in range(FUTURE)) / FUTURE
    group, kept = len(before) // len(row.heads), []
    for h, head in enumerate(row.heads):
        rows = []
        first = sum(at < SINKS for at in head.positions)
        keys = head.keys[first:]
        for asked in before[h * group : (h + 1) * group]:
            mean, away = turn @ asked.mean(0), (asked - asked.mean(0)) @ turn.T
            spread = away.T @ away / len(away)
            squares = ((keys @ spread) * keys).sum(-1)
            rows.append((row.scale * keys @ mean + row.scale**2 / 2 * squares).softmax(0))
        scores = torch.stack(rows).mean(0) * head.values[first:].norm(dim=-1)
        kept.append([*range(first), *(first + i for i in best(scores, SMALL - first))])
    return kept


RULES: dict[str, Rule] = {
    "knorm:skip_layers=none": per_head(lambda head: best(-head.keys.norm(dim=-1), SMALL)),
    "keydiff": per_head(unlike),
    "snapkv:window=8": per_head(lambda head: with_window(head, SMALL)),
    "h2o:decode=append": per_head(lambda head: h2o(head, SMALL)),
    "adakv:window=8": lambda row: [
        with_window(head, size) for head, size in zip(row.heads, row.sizes, strict=True)
    ],
    f"chunkkv:window=8,length={CHUNK}": in_chunks,
    "rkv": per_head(lambda head: important_and_new(head, 0.1, False)),
    "snapkv_decode": per_head(
        lambda head: best(important(head), SMALL - WINDOW) + newest(head, WINDOW)
    ),
    "triattention:prompt=counted": at_distances,
    f"expected_attention:future={FUTURE}": expected,
}
# Norms of queries and keys; half of each key rotated; sliding windows; sinks; recurrent layers
OF_SIX = ["llama", "qwen3", "phi3", "gemma3", "gpt_oss", "qwen3_5"]


def with_norms_that_differ(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose normalized keys are not all of one length."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for name, weight in other.named_parameters():
        if name.endswith("k_norm.weight"):
            weight.data.uniform_(0.5, 1.5, generator=generator)
    return other


@pytest.mark.slow
@pytest.mark.cases(3)
@BATCHES
@pytest.mark.parametrize("name", OF_SIX)
@pytest.mark.parametrize("spec", RULES)
def test_each_round_keeps_what_loops_keep_of_the_same_entries(spec, name, lengths, monkeypatch):
    steps, interval = 9, 3
    witness = Witness(lengths, interval, RULES[spec])
    attend, note = CompressedLayer.attend, module.note_token

    def watched(layer: Any, owner: Any, kind: str, call: AttentionCall, **rest: Any) -> Any:
        witness.attends(layer.state, call)
        return attend(layer, owner, kind, call, **rest)

    def noted(state: LayerState, call: AttentionCall) -> None:
        witness.generates(state, call)
        note(state, call)

    model = with_norms_that_differ(FAMILIES[name](torch.float64))
    ids, mask = distinct_prompts((max(lengths) + steps,) * len(lengths))
    ids[:, : max(lengths)] *= distinct_prompts(lengths)[1]
    mask = None if len(lengths) == 1 else distinct_prompts(lengths)[1]
    cache = kvfold.CompressedCache(model, f"{spec} + every:interval={interval}", SMALL)
    monkeypatch.setattr(CompressedLayer, "attend", watched)
    monkeypatch.setattr(module, "note_token", noted)
    reader = Reader(model, cache, mask)
    reader(ids[:, : max(lengths)])
    for step, token in enumerate(ids[:, max(lengths) :].split(1, 1), 1):
        witness.expected.clear()
        reader(token)
        assert len(witness.expected) == (len(cache.states) if step % interval == 0 else 0)
        for state, kept in witness.expected:
            found = cache.positions(cache.states.index(state))
            for row, padding in enumerate(witness.padding):
                assert [(head - padding).tolist() for head in found[row]] == kept[row]
