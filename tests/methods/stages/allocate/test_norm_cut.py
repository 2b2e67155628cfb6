# SPDX-License-Identifier: Apache-2.0
"""DBudgetKV: where the norm of the last query's attention stops the cut, against naive loops."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold import KvfoldError
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.norm_cut import VOTERS, norm_cut
from kvfold.methods.stages.score.observation_window import window_votes
from kvfold.methods.stages.score.position import recency
from kvfold.methods.stages.select.forced import Forced
from kvfold.methods.stages.select.top import top, with_forced
from tests.helpers.observations import alone, naive_rows, observe

GROUPS = pytest.mark.parametrize("groups", [1, 4, 8])
RANKING = pytest.mark.parametrize("ranking", ["position", "attention"])


def attending(*rows):
    """One layer whose last query attends exactly so, a KV head for each row."""
    stored = len(rows[0])
    keys = torch.eye(stored).expand(1, len(rows), stored, stored)
    logits = [[math.log(a) if a else -1e4 for a in row] for row in rows]
    places = torch.arange(stored).expand(1, len(rows), stored)
    queries = torch.tensor(logits).view(1, len(rows), 1, stored)
    return Observation(keys, keys, places, queries, places[:, 0, -1:], layer=2, layers=4)


GOLDEN = attending(
    [0.40, 0.10, 0.01, 0.02, 0.03, 0.04, 0.10, 0.30],
    [0.20, 0.20, 0.05, 0.05, 0.05, 0.05, 0.10, 0.30],
)


@pytest.mark.parametrize(
    ("threshold", "include_sinks", "kept"),
    [
        (0.001, False, 8),
        (0.01, False, 7),
        (0.02, False, 6),
        (0.05, False, 4),
        (0.2, False, 3),
        (0.01, True, 6),
        (0.02, True, 4),
        (0.05, True, 3),
    ],
)
def test_dbudgetkv_golden_vectors(threshold, include_sinks, kept):
    counts = norm_cut(GOLDEN, threshold=threshold, sinks=2, include_sinks=include_sinks)
    assert counts.tolist() == [kept]


# --- naive loops -------------------------------------------------------------------------------


def naive_row(attention, rows):
    """Equation 1: each entry's mean over those of the last rows that attend to it, `[Hq][T]`."""
    result = []
    for head in attention[:, -rows:].tolist():
        columns = list(zip(*head, strict=True))
        result.append([sum(c) / max(1, sum(a != 0 for a in c)) for c in columns])
    return result


def naive_orders(attention, ranking, sinks, groups):
    """Candidates of each query head, the least important first."""
    stored = attention.shape[-1]
    if ranking == "position":
        return [list(range(sinks, stored))] * len(attention)
    orders = []
    for head in range(len(attention) // groups):
        of_group = attention[head * groups : (head + 1) * groups, -VOTERS:]
        votes = of_group.sum((0, 1)).tolist()
        orders += [sorted(range(stored - VOTERS), key=lambda j: (votes[j], -j))] * groups
    return orders


def norm(row, entries):
    return math.sqrt(sum(row[j] ** 2 for j in entries))


def naive_cut(row, orders, threshold, include_sinks):
    """How many stay: cuts one after the other as long as the norms, averaged, lose so little."""
    stored = len(row[0])
    always = [set(range(stored)) - set(order) if include_sinks else set() for order in orders]

    def left(cut):
        norms = [norm(r, a | set(o[cut:])) for r, a, o in zip(row, always, orders, strict=True)]
        return sum(norms) / len(norms)

    cut = 0
    while cut + 1 < len(orders[0]) and (left(0) - left(cut + 1)) / left(0) <= threshold:
        cut += 1
    return stored - cut


@GROUPS
@RANKING
@pytest.mark.parametrize("include_sinks", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_cut_is_the_naive_loop(groups, ranking, include_sinks, rows):
    lengths = [30, 17, 9]
    seen = observe(lengths, groups=groups, layer=2, layers=4)
    attention = [naive_rows(alone(seen, row, length)) for row, length in enumerate(lengths)]
    naive = [(naive_row(a, rows), naive_orders(a, ranking, 3, groups)) for a in attention]
    found = set()
    for threshold in (0.01, 0.05, 0.2, 0.5):
        got = norm_cut(
            seen,
            threshold=threshold,
            sinks=3,
            rows=rows,
            include_sinks=include_sinks,
            ranking=ranking,
        )
        expected = [naive_cut(*of_row, threshold, include_sinks) for of_row in naive]
        assert got.tolist() == expected
        found |= set(expected)
    assert len(found) > 4


@RANKING
def test_padding_between_entries_changes_nothing(ranking):
    seen = observe([24], layer=2, layers=4)
    at = [i + (i > 5) + 2 * (i > 20) for i in range(24)]  # three holes
    wide = {"keys": torch.full((1, 2, 27, 8), 50.0), "positions": torch.full((1, 2, 27), -1)}
    for name, tensor in wide.items():
        tensor[:, :, at] = getattr(seen, name)
    holed = dataclasses.replace(seen, values=wide["keys"], **wide)
    for threshold in (0.02, 0.1, 0.4):
        options = {"threshold": threshold, "ranking": ranking}
        assert norm_cut(holed, **options).tolist() == norm_cut(seen, **options).tolist()


# --- what the selection does with it -----------------------------------------------------------


@RANKING
@given(st.floats(0, 0.9), st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_the_selection_keeps_the_norm_and_one_less_would_not(ranking, threshold, seed):
    seen = observe([20 + seed], groups=2, layer=2, layers=4)
    stored, sinks = 20 + seed, 4
    counts = norm_cut(seen, threshold=threshold, sinks=sinks, ranking=ranking)
    if ranking == "position":
        scores, forced = recency(seen), Forced(sinks=sinks)
    else:
        scores, forced = window_votes(seen, VOTERS, 1, "max"), Forced(recent=VOTERS)
    must = forced.mask(seen.positions, counts)
    scores = with_forced(scores, must, seen.positions)
    row = naive_rows(seen)[:, -1].tolist()

    def lost(count):
        slots = top(scores, torch.tensor([count]))[0].tolist()
        whole, left = 0.0, 0.0
        for head, attention in enumerate(row):
            candidates = {j for j in range(stored) if not must[0, head // 2, j]}
            whole += norm(attention, candidates)
            left += norm(attention, candidates & set(slots[head // 2]))
        return (whole - left) / whole

    kept = int(counts)
    fixed = int(must[0, 0].sum())
    assert fixed < kept <= stored
    assert lost(kept) <= threshold + 1e-6
    assert kept == fixed + 1 or lost(kept - 1) > threshold - 1e-6


# --- invariants --------------------------------------------------------------------------------


@RANKING
@given(st.floats(0, 1.2), st.floats(0, 0.5))
@settings(max_examples=30, deadline=None)
def test_a_higher_threshold_keeps_no_more(ranking, threshold, step):
    seen = observe([30, 17, 9], layer=2, layers=4)
    low = norm_cut(seen, threshold=threshold, ranking=ranking)
    high = norm_cut(seen, threshold=threshold + step, ranking=ranking)
    assert (high <= low).all()


@RANKING
def test_the_ends_of_the_threshold(ranking):
    seen = observe([30, 17, 10], layer=2, layers=4)
    least = 4 if ranking == "position" else VOTERS
    nothing = norm_cut(seen, threshold=0.0, ranking=ranking)
    assert nothing.tolist() == [30, 17, 10]
    assert norm_cut(seen, threshold=1.0, ranking=ranking).tolist() == [least + 1] * 3


def test_at_threshold_zero_only_what_nobody_attends_to_goes():
    seen = attending([0.5, 0.1, 0, 0, 0.1, 0, 0.3], [0.5, 0.1, 0, 0.0, 0.1, 0, 0.3])
    # Sinks 0 and 1; 2 and 3 may go, the unattended 5 is behind an attended one.
    assert norm_cut(seen, threshold=0.0, sinks=2).tolist() == [5]


def test_attention_to_nothing_but_sinks_keeps_the_newest_entry():
    seen = attending([0.75, 0.25, 0, 0, 0, 0])
    assert norm_cut(seen, threshold=0.01, sinks=2).tolist() == [3]


@RANKING
def test_rows_with_nothing_to_rank_stay_whole(ranking):
    seen = observe([30, 4, 2], layer=2, layers=4)
    counts = norm_cut(seen, threshold=1.0, sinks=4, ranking=ranking)
    assert counts.tolist()[1:] == [4, 2]


def test_kept_layers_lose_nothing():
    for layer, counts in ((0, [30, 17]), (1, [30, 17]), (2, [5, 5])):
        seen = observe([30, 17], layer=layer, layers=4)
        assert norm_cut(seen, threshold=1.0).tolist() == counts
        assert norm_cut(seen, threshold=1.0, keep_layers=(-4, -3)).tolist() == counts
    seen = observe([30, 17], layer=0)
    assert norm_cut(seen, threshold=1.0, keep_layers=()).tolist() == [5, 5]


@pytest.mark.parametrize("layer", [4, -5])
def test_a_kept_layer_that_there_is_not_is_refused(layer):
    seen = observe([30, 17], layer=0, layers=4)
    with pytest.raises(KvfoldError, match=f"dbudgetkv:keep_layers names layer {layer} of 4 "):
        norm_cut(seen, keep_layers=(0, layer))


def test_of_one_layer_the_default_names_it_and_another_is_refused():
    seen = observe([30, 17], layer=0, layers=1)
    assert norm_cut(seen, threshold=1.0).tolist() == [30, 17]
    with pytest.raises(KvfoldError, match="dbudgetkv:keep_layers names layer 5 of 1 "):
        norm_cut(seen, keep_layers=(5,))
