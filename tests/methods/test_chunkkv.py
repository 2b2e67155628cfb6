# SPDX-License-Identifier: Apache-2.0
"""KeyDiff, DropKV, CUR and ChunkKV: hand-computed vectors, naive formulas, and padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.methods.chunkkv import whole_chunks
from kvfold.methods.cur import local_leverage
from kvfold.methods.dropkv import removal_change
from kvfold.methods.keydiff import dissimilarity
from kvfold.methods.observation import Observation
from tests.helpers.models import build

T, D = 8, 4
ROW, COLUMN = torch.arange(T)[:, None], torch.arange(D)
KEYS = ((7 * ROW + 3 * COLUMN + ROW * COLUMN) % 11 - 5) / 4
VALUES = ((5 * ROW + 2 * COLUMN + 4 * ROW * COLUMN) % 7 - 3) / 2
QUERIES = ((4 * ROW + 5 * COLUMN + 2 * ROW * COLUMN) % 9 - 4) / 4


def observed(window: int = 0, left: int = 0) -> Observation:
    """One head of eight entries, after `left` columns of padding."""

    def padded(entries: Tensor) -> Tensor:
        return torch.cat([torch.ones(left, D), entries])[None, None]

    positions = torch.cat([torch.full((left,), -1), torch.arange(T)])[None, None]
    return Observation(
        padded(KEYS),
        padded(VALUES),
        positions,
        QUERIES[None, None, T - window :] if window else None,
        torch.arange(T - window, T)[None] if window else None,
        scale=0.5,
    )


def best(scores: Tensor, count: int) -> set[int]:
    return set(scores.flatten().topk(count).indices.tolist())


@pytest.mark.parametrize("left", [0, 3])
def test_keydiff(left: int) -> None:
    scores = dissimilarity(observed(left=left))[0, 0, left:]
    expected = [0.266915, -0.547968, -0.297543, -0.945124, 0.449614, 0.672133, -0.211246, -0.276183]
    torch.testing.assert_close(scores, torch.tensor(expected), atol=2e-6, rtol=0)
    assert best(scores, 4) == {0, 4, 5, 6}


def test_a_key_of_zeros_is_neither_like_nor_unlike() -> None:
    keys = torch.cat([torch.zeros(1, D), KEYS[1:]])[None, None]
    scores = dissimilarity(Observation(keys, keys, torch.arange(T)[None, None]))
    assert scores[0, 0, 0] == 0 and not scores.isnan().any()


@pytest.mark.parametrize("left", [0, 2])
def test_dropkv_is_what_removal_changes(left: int) -> None:
    scores = removal_change(observed(window=2, left=left), window=2, kernel=1)[0, 0, left:]
    expected = [0.268514, 0.101282, 0.158959, 0.221508, 0.219619, 0.256549, 0.222176, 0.077826]
    torch.testing.assert_close(scores, torch.tensor(expected), atol=5e-6, rtol=0)
    torch.testing.assert_close(scores, by_removal(), atol=1e-5, rtol=0)


def by_removal() -> Tensor:
    """The same by leaving each entry out."""
    changes = torch.zeros(T)
    for at in (6, 7):
        logits = (KEYS[: at + 1] @ QUERIES[at]) / 2
        whole = logits.softmax(0) @ VALUES[: at + 1]
        for left_out in range(at + 1):
            rest = [i for i in range(at + 1) if i != left_out]
            changes[left_out] += (logits[rest].softmax(0) @ VALUES[rest] - whole).square().sum()
    return changes


def test_an_entry_that_takes_all_attention_is_finite() -> None:
    keys = torch.zeros(1, 1, 4, D)
    keys[..., 1, :] = 1e4
    values = torch.randn(1, 1, 4, D, generator=torch.Generator().manual_seed(0))
    seen = Observation(
        keys, values, torch.arange(4)[None, None], torch.ones(1, 1, 1, D), torch.tensor([[3]])
    )
    assert removal_change(seen, window=1, kernel=1).isfinite().all()


@pytest.mark.parametrize("left", [0, 3])
def test_cur(left: int) -> None:
    scores = local_leverage(observed(left=left), "kv_product", 4)[0, 0]
    expected = [0.197427, 0.050215, 0.078112, 0.175109, 0.122857, 0.223082, 0.083562, 0.069635]
    torch.testing.assert_close(scores[left:], torch.tensor(expected), atol=2e-6, rtol=0)
    assert not scores[:left].any()


CHUNKED = torch.tensor(
    [[[0.1, 0.9, 0.2, 0.2, 0.3, 0.3, 0.05], [0.2, 0.1, 0.4, 0.4, 0.1, 0.1, 0.6]]]
)


def chunks(count: int, shared: bool, *forced: int) -> list[list[int]]:
    positions = torch.arange(7).expand(1, 2, 7)
    must = torch.zeros(1, 2, 7, dtype=torch.bool)
    must[..., list(forced)] = True
    counts = torch.full((1, 2), count)
    slots = whole_chunks(CHUNKED, must, positions, counts, length=3, shared=shared)
    return slots[0].tolist()


def test_whole_chunks_stay_and_the_next_one_in_part() -> None:
    assert chunks(1, True) == [[6], [6]]
    assert chunks(4, True) == [[0, 1, 2, 6]] * 2
    # {3, 4, 5} holds .6, .4, .4 of both heads.
    assert chunks(5, True) == [[0, 1, 2, 3, 6]] * 2


def test_heads_may_choose_chunks_by_themselves() -> None:
    # Means .4, .2667, .05 and .2333, .2, .6.
    assert chunks(3, False) == [[0, 1, 2], [0, 2, 6]]


def test_forced_entries_take_room_first_and_no_part_in_their_chunk() -> None:
    # Without 1, the first chunk's mean is (.3 + .6) / 2 = .45, below .4667 of the second.
    assert chunks(5, True, 1) == [[1, 3, 4, 5, 6]] * 2


@torch.no_grad()
def test_rows_choose_their_own_chunks_and_spend_the_whole_budget() -> None:
    model = build("llama")
    ids = torch.randint(5, 190, (2, 90), generator=torch.Generator().manual_seed(1))
    both = kvfold.CompressedCache(model, "chunkkv:window=8,length=7", 37)
    model(ids, past_key_values=both)
    for row in range(2):
        alone = kvfold.CompressedCache(model, "chunkkv:window=8,length=7", 37)
        model(ids[row : row + 1], past_key_values=alone)
        for layer in range(len(both.states)):
            for one, other in zip(
                both.positions(layer)[row], alone.positions(layer)[0], strict=True
            ):
                assert len(one) == 37 and torch.equal(one, other)


def test_chunks_go_with_any_score_but_not_with_eviction_while_decoding() -> None:
    assert kvfold.parse("knorm + chunkkv").stages().select is not None
    assert kvfold.parse("keydiff + chunkkv:length=10").stages().score is dissimilarity
    with pytest.raises(kvfold.IllegalComposition, match="while decoding"):
        kvfold.parse("h2o + chunkkv").stages()
