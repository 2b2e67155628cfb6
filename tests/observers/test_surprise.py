# SPDX-License-Identifier: Apache-2.0
"""Surprise of tokens: the golden numbers, prompts' first tokens, pieces, padding and crops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvfold import UnsupportedModel
from kvfold.observers.surprise import PIECE, Surprise, surprise

PROBABILITIES = [0.5, 0.1, 0.9, 0.02, 0.6]


def logits_of(probabilities: list[list[float]]) -> Tensor:
    """Logits `[B, S, 2]` that give token 1 these probabilities `[B, S]`."""
    p = torch.tensor(probabilities)
    return torch.stack([(1 - p).log(), p.log()], -1)


def read(
    surprised: Surprise, given: list[list[float]], prompt: bool, more: bool = False, **options
) -> Surprise:
    """After tokens 1, behind each of which the next one has the probability `given [B, S]`."""
    ids = torch.ones(len(given), len(given[0])).long()
    begun = surprised.begin(ids, len(surprised), prompt, more)
    return begun.end(ids, logits_of(given), options.get("tokens"), options.get("rows", 1))


def test_golden() -> None:
    found = surprise(logits_of([PROBABILITIES]), torch.ones(1, 5).long())
    expected = torch.tensor([[0.693147, 2.302585, 0.105361, 3.912023, 0.510826]])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_many_columns_are_those_one_by_one() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, PIECE + 9, 5, generator=draw)
    ids = torch.randint(0, 5, (2, PIECE + 9), generator=draw)
    for row in range(2):
        for column in (0, 3, PIECE - 1, PIECE, PIECE + 8):
            p = logits[row, column].double().softmax(-1)[ids[row, column]]
            found = surprise(logits, ids)[row, column]
            assert float(found) == pytest.approx(-math.log(p), rel=1e-5)


def test_a_prompt_s_first_token_has_its_largest_number_and_older_ones_fade() -> None:
    first = read(Surprise(0.5), [[0.5, 0.1, 0.9, 0.02]], prompt=True)
    numbers = [2.302585, 0.693147, 2.302585, 0.105361]
    torch.testing.assert_close(first.numbers, torch.tensor([numbers]), atol=1e-6, rtol=0)
    answer = read(first, [[0.6]], prompt=False)
    torch.testing.assert_close(answer.numbers[0, 4], torch.tensor(3.912023), atol=1e-6, rtol=0)
    second = read(answer, [[0.9, 0.02, 0.6]], prompt=True)
    assert torch.equal(second.numbers[:, :5], answer.numbers / 2)
    expected = torch.tensor([[3.912023, 0.105361, 3.912023]])
    torch.testing.assert_close(second.numbers[:, 5:], expected, atol=1e-6, rtol=0)
    assert second.prompt_tokens(None, 8, 1).tolist() == [3]
    assert second.prompt_tokens(None, 9, 1).tolist() == [0]


def test_pieces_are_the_whole_prompt() -> None:
    whole = read(Surprise(0.5), [[0.5, 0.1, 0.9, 0.02, 0.6]], prompt=True)
    pieces = read(Surprise(0.5), [[0.5, 0.1]], prompt=True, more=True)
    pieces = read(pieces, [[0.9, 0.02]], prompt=True, more=True)
    pieces = read(pieces, [[0.6]], prompt=True)
    torch.testing.assert_close(pieces.numbers, whole.numbers)
    assert pieces.prompt == whole.prompt == (0, 5) and not pieces.open


def test_padding_is_not_judged() -> None:
    tokens = torch.tensor([[True, True, True, True], [False, False, True, True]])
    both = read(Surprise(1.0), [[0.5, 0.1, 0.9, 0.02]] * 2, prompt=True, tokens=tokens)
    alone = read(Surprise(1.0), [[0.9, 0.02]], prompt=True)
    torch.testing.assert_close(both.numbers[1], torch.cat([torch.zeros(2), alone.numbers[0]]))
    assert both.prompt_tokens(tokens, 4, 2).tolist() == [4, 2]


@pytest.mark.parametrize("begun", [0, 2])
@pytest.mark.parametrize("pieces", ["..xxx", "...|.xxx", "....|xxx", ".x|xx"])
def test_a_token_behind_padding_is_judged_by_the_token_before_it(pieces, begun) -> None:
    """A row of `begun` tokens and those at x, padded at dots, has the numbers that it has alone."""
    batch, tokens = Surprise(1.0), torch.ones(2, begun, dtype=torch.bool)
    alone = [0.3, 0.02][:begun]
    if begun:
        batch = read(batch, [[0.5, 0.1], alone], prompt=True, more=True)
    behind = iter([0.2, 0.7, 0.4])
    for piece in pieces.split("|"):
        real = torch.tensor([[True] * len(piece), [each == "x" for each in piece]])
        given = [next(behind) if each == "x" else 0.9 for each in piece]
        tokens, alone = torch.cat([tokens, real], 1), alone + [p for p in given if p != 0.9]
        more = not pieces.endswith(piece)
        batch = read(batch, [[0.6] * len(piece), given], prompt=True, more=more, tokens=tokens)
    expected = read(Surprise(1.0), [alone], prompt=True)
    torch.testing.assert_close(batch.numbers[1, tokens[1]], expected.numbers[0])


def test_a_prompt_of_one_token_keeps_what_predicted_it() -> None:
    alone = read(Surprise(1.0), [[0.1]], prompt=True)
    assert alone.numbers.tolist() == [[0.0]]
    again = read(alone, [[0.5]], prompt=True)
    assert float(again.numbers[0, 1]) == pytest.approx(2.302585, abs=1e-6)


def test_a_crop_keeps_the_logits_of_columns_that_stay() -> None:
    before = read(Surprise(1.0), [[0.5, 0.1]], prompt=True)
    held = read(before, [[0.9, 0.02, 0.6]], prompt=False, rows=3)
    cropped = read(held.crop(4), [[0.3]], prompt=False)
    assert float(cropped.numbers[0, -1]) == pytest.approx(3.912023, abs=1e-6)
    # Nothing predicts a token further back: it counts as the most surprising of the prompt.
    lost = read(held.crop(2), [[0.3]], prompt=False)
    assert float(lost.numbers[0, -1]) == pytest.approx(0.693147, abs=1e-6)


def test_rows_and_bytes() -> None:
    both = read(Surprise(1.0), [[0.5, 0.1], [0.9, 0.02]], prompt=True)
    swapped = both.index(lambda x: x[[1, 0]])
    assert torch.equal(swapped.numbers, both.numbers.flip(0))
    assert both.nbytes == 4 * (2 * 2 + 2 * 1 * 2)


def test_an_impossible_token_is_finite() -> None:
    assert surprise(torch.tensor([[[0.0, -torch.inf]]]), torch.ones(1, 1).long()).isfinite().all()


def test_tokens_without_logits_are_refused() -> None:
    ids = torch.ones(1, 3).long()
    with pytest.raises(UnsupportedModel, match="past the model"):
        Surprise(1.0).begin(ids, 2, True, False)
    begun = Surprise(1.0).begin(ids, 0, True, False)
    for logits in (None, torch.zeros(1, 1, 2)):
        with pytest.raises(UnsupportedModel, match="no logits of all"):
            begun.end(ids, logits, None, 1)
