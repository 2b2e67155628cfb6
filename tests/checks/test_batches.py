# SPDX-License-Identifier: Apache-2.0
"""Prompts that are measured together have the distances and answers that each has alone."""

from __future__ import annotations

import pytest
import torch

from kvfold.checks.batches import COLUMNS, ROWS, batched
from kvfold.checks.encoded import EncodedPrompt
from kvfold.checks.measure import PromptMeasurements
from kvfold.checks.records import CheckStore
from tests.helpers.models import build, prompts
from tests.helpers.tokenizers import word_tokenizer

TOKENS, LIMIT = 7, 20
# Contexts and questions of different lengths; the whole prompt is compressed where there is none.
LENGTHS = ((60, 48), (71, 55), (66, 61))
METHODS = (
    ("snapkv:window=4,kernel=3", "0.5"),
    ("pyramidkv:window=4", "24"),
    ("adakv:window=4", "0.4"),
    ("h2o", "0.4"),
    ("kvzip", "0.5"),
    ("kivi:bits=4,group=8,residual=8", None),
)


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64)


def rows(with_context: bool, **spans: tuple[int, int]) -> list[EncodedPrompt]:
    return [
        EncodedPrompt(
            str(n), prompts((length,), seed=n)[0], context if with_context else None, spans
        )
        for n, (length, context) in enumerate(LENGTHS)
    ]


def measurements(model) -> PromptMeasurements:
    return PromptMeasurements(model, word_tokenizer(), CheckStore("run", None), TOKENS, LIMIT)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("with_context", [True, False])
@pytest.mark.parametrize("cell", METHODS, ids=lambda cell: cell[0])
def test_rows_of_a_batch_are_measured_as_alone(cell, with_context: bool, model) -> None:
    batch = rows(with_context, part=(9, 30))
    together, alone = measurements(model), measurements(model)
    singles = [each for row in batch for each in alone.distances([row], cell)]
    for ours, own in zip(together.distances(batch, cell), singles, strict=True):
        assert ours.kl == pytest.approx(own.kl, abs=1e-6)
        assert (ours.agrees, ours.spans) == (own.agrees, own.spans)
        assert ours.kept == pytest.approx(own.kept)
    forced = [each.forced for row in batch for each in alone.forced([row])]
    assert [each.forced for each in together.forced(batch)] == forced and len(set(forced)) == 3
    assert len({own.kl for own in singles}) == 3


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("with_context", [True, False])
@pytest.mark.parametrize("cell", [("full", None), ("h2o", "0.4"), ("snapkv:window=4", "0.5")])
def test_rows_end_where_they_end_alone(
    cell, with_context: bool, model, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = rows(with_context)
    free = measurements(model)._generated(batch, cell)
    # The first row's third token ends answers, of the full cache within its forced tokens.
    monkeypatch.setattr(model.generation_config, "eos_token_id", free[0][2])
    forced = [each.forced for each in measurements(model).forced(batch)]
    assert forced == [each.forced for row in batch for each in measurements(model).forced([row])]
    together = measurements(model).answers(batch, cell)
    assert together == [each for row in batch for each in measurements(model).answers([row], cell)]
    assert (together[0].tokens, together[0].ended) == (free[0].index(free[0][2]) + 1, True)
    assert len({answer.tokens for answer in together}) > 1


@pytest.mark.slow
def test_answers_to_attacks_are_those_of_each_alone(model) -> None:
    batch, cell = rows(True), ("snapkv:window=4", "0.5")
    together = measurements(model)._generated(batch, cell)
    assert together == [measurements(model)._generated([row], cell)[0] for row in batch]
    assert all(len(answer) == LIMIT for answer in together)


def test_batches_are_of_similar_prompts_that_are_compressed_alike() -> None:
    def made(length: int, context: int | None) -> EncodedPrompt:
        return EncodedPrompt("", torch.zeros(1, length, dtype=torch.long), context, {})

    lengths = [100, 5000, 110, 4900, 130, 5100, 5200, *range(800, 820)]
    found = batched([made(n, c) for n in lengths for c in (None, 50)], lambda prompt: prompt)
    assert sum(map(len, found)) == 2 * len(lengths)
    for batch in found:
        sizes = [prompt.ids.shape[1] for prompt in batch]
        assert len({prompt.context for prompt in batch}) == 1
        assert len(batch) <= ROWS and len(batch) * max(sizes) <= COLUMNS
        assert max(sizes) <= 1.25 * min(sizes)
    assert [len(batch) for batch in found if batch[0].context] == [2, 1, 8, 8, 4, 3, 1]
    assert [len(batch) for batch in batched([made(10**6, None)] * 2, lambda p: p)] == [1, 1]
