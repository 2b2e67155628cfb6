# SPDX-License-Identifier: Apache-2.0
"""Scissorhands: rounds by hand, by the paper's counts and by KVCache-Factory's sums."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch

import kvfold
from kvfold import KvfoldError
from kvfold.observers.last_queries import window_of
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import PADDED, WINDOW, ByHand, Head, best, newest
from tests.helpers.caches import decode, positions, same, start
from tests.helpers.models import build, continuation, prompts
from tests.helpers.rounds import assert_each_round, per_full_head
from tests.helpers.truth import Reader

RECENT = 5
Rule = Callable[[Head], list[int]]


def fewest(head: Head) -> list[int]:
    """The newest entries, and those that fewest of the last queries gave less than average."""
    counts = [0.0] * len(head)
    last = head.positions[-1]
    for rows in head.rows:
        for place, row in enumerate(rows):
            at = last - len(rows) + 1 + place
            visible = [i for i, position in enumerate(head.positions) if position <= at]
            for i in visible:
                counts[i] += float(row[i] < 1 / len(visible)) / len(head.rows)
    others = [-count for count in counts[: len(head) - RECENT]]
    return best(others, SMALL - RECENT) + newest(head, RECENT)


@pytest.mark.slow
@pytest.mark.parametrize("interval", [3, 10])
@pytest.mark.parametrize("lengths", [PADDED, (17,)], ids=["padded", "short"])
def test_rounds_by_hand(lengths, interval):
    spec = f"scissorhands:window={WINDOW},recent={RECENT} + every:interval={interval}"
    assert_each_round(spec, per_full_head(fewest), lengths, interval)


def most_attended(decay: float) -> Rule:
    """The newest entries, and those that the last queries, and older rounds, gave most."""

    def keep(head: Head) -> list[int]:
        old = getattr(head, "old", {})
        own = head.rows.mean(0).sum(0).tolist()
        scores = [s + decay * old.get(at, 0.0) for s, at in zip(own, head.positions, strict=True)]
        head.old = dict(zip(head.positions, scores, strict=True))
        if len(head) <= SMALL:
            return list(range(len(head)))
        return best(scores[: len(head) - RECENT], SMALL - RECENT) + newest(head, RECENT)

    return keep


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("interval", [3, 10])
@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("lengths", [PADDED, (17,)], ids=["padded", "short"])
def test_rounds_of_sums_by_hand(lengths, decay, interval):
    """Rounds in which nothing leaves count as well, from the prompt's end on."""
    rule = most_attended(decay)

    def round_of(one: ByHand) -> None:
        for head in (head for layer in one.layers for head in layer.heads):
            head.keep(rule(head))

    options = f"window={WINDOW},recent={RECENT},decay={decay}"
    spec = f"scissorhands_kvcf:{options} + every:interval={interval}"
    assert_each_round(spec, round_of, lengths, interval, steps=24)


@pytest.mark.parametrize("steps", [4, 10])
def test_the_last_scores_go_along_in_copies_crops_and_files(steps):
    model = build("llama")
    reader = start(model, "scissorhands_kvcf:window=8,recent=5 + every:interval=8")
    decode(reader, steps)
    twin = Reader(model, copy.deepcopy(reader.cache))
    decode(reader, 3, seed=9)
    reader.cache.crop(-3)
    file = io.BytesIO()
    torch.save(reader.cache, file)
    file.seek(0)
    loaded = Reader(model, torch.load(file, weights_only=False))
    expected = decode(reader, 20)
    for other in (twin, loaded):
        assert same(decode(other, 20), expected)
        assert positions(other.cache) == positions(reader.cache)


@pytest.mark.parametrize("preset", ["scissorhands_kvcf", "scissorhands"])
def test_a_short_row_of_a_batch_keeps_what_it_keeps_alone(preset):
    """At 0.05 nothing of 12 tokens stays, so queries of the window are older than all entries."""
    model, spec = build("llama"), f"{preset}:window=8 + every:interval=4"
    (ids, mask), answer = prompts((40, 12)), continuation(2, 14)
    both, alone = (
        Reader(model, kvfold.CompressedCache(model, spec, 0.05), seen) for seen in (mask, None)
    )
    both(ids), alone(ids[1:, -12:])
    for token in answer.split(1, 1):
        both(token), alone(token[1:])
    rows = [layer[1] for layer in positions(both.cache)]
    assert [[[place - 28 for place in head] for head in row] for row in rows] == [
        layer[0] for layer in positions(alone.cache)
    ]


def test_defaults_are_the_paper_s():
    stages = kvfold.parse("scissorhands").stages()
    assert (window_of(stages.needs), stages.forced.recent, stages.interval) == (400, 10, 128)
    assert kvfold.parse("scissorhands_kvcf") == kvfold.parse("scissorhands:rule=sums,recent=0")


@pytest.mark.parametrize(
    "options", ["window=0", "recent=-1", "decay=0.5", "rule=sums,decay=-1", "rule=sums,decay=nan"]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(KvfoldError):
        kvfold.parse(f"scissorhands:{options}")
