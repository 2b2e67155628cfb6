# SPDX-License-Identifier: Apache-2.0
"""Bounds of methods: the fixed sequence, groups, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

from kvfold.checks.bound import fixed_sequence, risk_bound
from kvfold.checks.encoded import EncodedPrompt, distinct
from kvfold.checks.records import CheckRecord, PromptDistances
from kvfold.checks.result import CheckCell, CheckLimits
from kvfold.errors import KvfoldError
from kvfold.evidence.bounds import upper_bound
from tests.helpers.checked import cell

SEQUENCE = ("0.9", "0.5", "0.2", "0.1")


def encoded(count: int, *groups: str | None) -> list[tuple[EncodedPrompt, ...]]:
    """Prompts in batches of up to three, of the groups in turn."""
    made = [
        EncodedPrompt(
            f"{n}",
            torch.tensor([[n, n + 1]]),
            None,
            {},
            group=(groups or (None,))[n % max(1, len(groups))],
        )
        for n in range(count)
    ]
    return [tuple(made[i : i + 3]) for i in range(0, count, 3)]


class Measured:
    """Losses of each prompt at each budget, in place of a model's."""

    def __init__(self, losses: dict[str, Any]) -> None:
        self.losses = losses
        self.answers: tuple[int, ...] = (1, 2)

    def forced(self, batch: tuple[EncodedPrompt, ...]) -> list[Any]:
        return [CheckRecord(run="", prompt="", method="", budget=None, forced=self.answers)] * len(
            batch
        )

    def distances(self, batch: tuple[EncodedPrompt, ...], at: tuple[str, str]) -> list[Any]:
        return [
            PromptDistances(kl=(2 * loss, 0.0), agrees=(True, True), lost=(0.0, 0.0))
            for prompt in batch
            for loss in [float(self.losses[at[1]][int(prompt.ids[0, 0])])]
        ]


def cells() -> list[CheckCell]:
    """In another order than that of the sequence."""
    return [
        cell("m", float(part), 0.01).model_copy(update={"budget": part})
        for part in reversed(SEQUENCE)
    ]


def found(losses: dict[str, Any], batches: list[tuple[EncodedPrompt, ...]], **limits: float) -> Any:
    measured: Any = Measured(losses)
    return risk_bound(measured, batches, cells(), CheckLimits(**limits))


def test_the_smallest_budget_before_the_first_that_fails():
    """A smaller one that would pass by itself is not looked at."""
    good, bad = np.full(200, 0.001), np.full(200, 0.3)
    losses = dict(zip(SEQUENCE, (good, good, bad, good), strict=True))
    bound = found(losses, encoded(200))
    assert bound.confirmed and (bound.budget, bound.kept) == ("0.5", 0.5)
    of = bound.groups["all"]
    assert (of.prompts, of.loss) == (200, pytest.approx(0.001))
    assert of.bound == pytest.approx(float(upper_bound(good, 0.1)))
    refused = found(dict(zip(SEQUENCE, (bad, good, good, good), strict=True)), encoded(200))
    assert not refused.confirmed and refused.budget == "0.9"
    assert "the clipped mean KL may be" in refused.reason and "above 0.05" in refused.reason


def test_the_sequence_does_not_depend_on_what_was_kept():
    """Of 64 tokens more is kept on shorter prompts, where they also lose less."""
    of = [
        cell("m", kept, 0.01).model_copy(update={"budget": budget})
        for kept, budget in ((0.3, "0.2"), (0.9, "64"), (0.4, "0.5"), (0.95, "128"))
    ]
    assert [each.budget for each in fixed_sequence(of)] == ["0.5", "0.2", "128", "64"]
    alone = [cell("m", 0.3, 0.01).model_copy(update={"budget": None})]
    assert fixed_sequence(alone) == alone


def test_losses_are_clipped_and_said_in_nats():
    rare = np.full(400, 0.0)
    rare[7] = 1e6
    bound = found(dict.fromkeys(SEQUENCE, rare), encoded(400), clip=2.0, mean_kl=0.2)
    assert bound.confirmed and bound.groups["all"].loss == pytest.approx(2 / 400)
    assert 2 / 400 < bound.groups["all"].bound < 0.2


def test_groups_share_the_error_and_each_must_pass():
    losses = np.full(240, 0.001)
    batches = encoded(240, "law", "tax", None)
    bound = found(dict.fromkeys(SEQUENCE, losses), batches)
    assert list(bound.groups) == ["all", "law", "tax"] and bound.confirmed
    assert bound.groups["law"].bound == pytest.approx(float(upper_bound(losses[:80], 0.1 / 3)))
    losses[1::3] = 0.2  # of "tax"
    refused = found(dict.fromkeys(SEQUENCE, losses), batches)
    assert not refused.confirmed and "of the group 'tax' may be" in refused.reason


def test_too_few_prompts_are_told_how_many_it_takes():
    nothing = dict.fromkeys(SEQUENCE, np.zeros(60))
    assert found(nothing, encoded(48)).confirmed
    refused = found(nothing, encoded(47))
    assert refused.reason == "47 prompts are too few: give at least 48"
    groups = found(nothing, encoded(60, "law", "tax"))
    assert groups.reason.startswith("30 prompts of the group 'law' are too few: give at least ")
    exact = found(nothing, encoded(60), mean_kl=0.0)
    assert exact.reason == "no number of prompts confirms a tolerance of 0"


def test_a_prompt_is_of_one_group():
    one = encoded(1, "law")[0][0]
    assert len(distinct([one, one])) == 1
    with pytest.raises(KvfoldError, match="is in another group"):
        distinct([one, replace(one, group="tax")])


@pytest.mark.parametrize("error", [0.1, 0.05])
@pytest.mark.parametrize("samples", [50, 100, 400])
def test_a_sequence_errs_as_seldom_as_one_budget(error, samples):
    """All budgets are a little too lossy: confirming any of them is an error."""
    batches, runs, failed = encoded(samples), 200, 0
    for run in range(runs):
        rng = np.random.default_rng((run, samples))
        losses = {part: (rng.random(samples) < 0.051).astype(float) for part in SEQUENCE}
        failed += found(losses, batches, error=error).confirmed
    assert failed <= binom.ppf(1 - 1e-4, runs, error)


def test_nothing_is_confirmed_where_nothing_was_measured():
    """The only token after a prompt that is compressed as a whole is the full cache's."""
    measured: Any = Measured(dict.fromkeys(SEQUENCE, np.zeros(100)))
    measured.answers = (1,)
    bound = risk_bound(measured, encoded(100), cells(), CheckLimits())
    assert not bound.confirmed and "are too short to measure" in bound.reason


def test_a_tolerance_that_no_loss_exceeds_confirms_nothing():
    nothing = dict.fromkeys(SEQUENCE, np.zeros(100))
    bound = found(nothing, encoded(100), mean_kl=1.0)
    assert bound.reason == "a tolerance of 1 is no limit where losses end at 1"
    assert not bound.confirmed
