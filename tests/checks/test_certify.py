# SPDX-License-Identifier: Apache-2.0
"""Certificates: the budget that exhaustive search finds, confirmed on prompts not searched on."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kvfold
from kvfold.checks import certify
from kvfold.checks.certify import certificate, halves, length_off, too_far
from kvfold.checks.encoded import EncodedPrompt
from kvfold.checks.measure import PromptMeasurements
from kvfold.checks.records import CheckStore
from kvfold.checks.result import AnswerLengths, CheckLimits
from kvfold.checks.summary import cell
from kvfold.evidence.estimates import IntervalEstimate
from tests.helpers.models import build, prompts

METHOD = str(kvfold.parse("streaming_llm_original:decode=append"))
PARTS = tuple(f"{number / 10}" for number in range(2, 10))


@pytest.fixture(scope="module")
def measured() -> PromptMeasurements:
    return PromptMeasurements(build("llama"), None, CheckStore("run", None), 6, 24)


@pytest.fixture(scope="module")
def encoded() -> list[EncodedPrompt]:
    made = [prompts((60 + number,), seed=number)[0] for number in range(6)]
    return [EncodedPrompt(f"prompt {n}", ids, 50, {}) for n, ids in enumerate(made)]


def test_halves_are_apart_and_together_everything(encoded) -> None:
    first, second = halves(encoded[:5], seed=3)
    assert (len(first), len(second)) == (2, 3)
    assert {p.digest for p in first} | {p.digest for p in second} == {p.digest for p in encoded[:5]}
    assert [p.digest for p in halves(encoded[:5], seed=3)[0]] == [p.digest for p in first]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("place", [1, 4, 6])
def test_the_budget_is_that_of_exhaustive_search(
    place: int, measured, encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certify, "PARTS", PARTS)
    search, held_out = halves(encoded, seed=0)
    curve = [cell(measured, [search], (METHOD, part)).kl.high for part in PARTS]
    assert curve == sorted(curve, reverse=True)  # monotone here, so the smallest is unique
    limits = CheckLimits(mean_kl=curve[place], p99_kl=1e9, shortest=0, longest=1e9)
    found = certificate(measured, [search], [held_out], kvfold.parse(METHOD), limits)
    assert found.budget == PARTS[place]
    assert found.found == cell(measured, [search], (METHOD, PARTS[place]))
    assert found.held_out is not None and found.held_out.lengths is not None
    alone = cell(measured, [held_out], (METHOD, PARTS[place]))
    assert found.held_out.kl == alone.kl
    assert found.certified == (alone.kl.value <= curve[place])


@pytest.mark.slow
def test_what_fails_on_the_held_out_prompts_is_refused(
    measured, encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certify, "PARTS", PARTS)
    search, held_out = encoded[:3], encoded[3:]
    cells = [cell(measured, [half], (METHOD, "0.5")).kl for half in (search, held_out)]
    if cells[0].high > cells[1].value:
        search, held_out = held_out, search
        cells.reverse()
    limits = CheckLimits(mean_kl=cells[0].high, p99_kl=1e9, shortest=0, longest=1e9)
    monkeypatch.setattr(certify, "PARTS", ("0.5",))
    found = certificate(measured, [search], [held_out], kvfold.parse(METHOD), limits)
    assert found.certified == (cells[1].value <= cells[0].high)
    assert found.certified or "on the held-out prompts, the mean KL is" in found.reason


@pytest.mark.slow
def test_a_method_without_budget_passes_or_not(measured, encoded) -> None:
    loose = CheckLimits(mean_kl=1e9, p99_kl=1e9, shortest=0, longest=1e9)
    kivi = kvfold.parse("kivi:bits=4,group=8,residual=8")
    found = certificate(measured, [encoded[:3]], [encoded[3:]], kivi, loose)
    assert found.certified and found.budget is None
    strict = CheckLimits(mean_kl=0)
    found = certificate(measured, [encoded[:3]], [encoded[3:]], kivi, strict)
    assert not found.certified and found.held_out is None


def test_limits_are_those_of_the_certificate(measured, encoded) -> None:
    made = cell(measured, [encoded], (METHOD, "0.9"))

    def estimate(value: float, high: float = 0.0) -> IntervalEstimate:
        return IntervalEstimate(value=value, low=0, high=max(value, high))

    fine = made.model_copy(update={"kl": estimate(0.05), "kl_p99": estimate(1.0)})
    limits = CheckLimits()
    assert too_far(fine, limits) == ""
    assert "mean KL" in too_far(fine.model_copy(update={"kl": estimate(0.051)}), limits)
    assert "percentile" in too_far(fine.model_copy(update={"kl_p99": estimate(1.01)}), limits)
    doubtful = fine.model_copy(update={"kl": estimate(0.03, 0.06)})
    assert too_far(doubtful, limits) == "" and "may be" in too_far(doubtful, limits, upper=True)
    assert too_far(fine.model_copy(update={"kl": estimate(float("nan"))}), limits)
    far = fine.model_copy(update={"kl": estimate(0.97, 1.08)})
    assert too_far(far, limits, upper=True) == "the mean KL is 0.97, above 0.05"
    for ratio, off in ((0.79, True), (0.8, False), (1.25, False), (1.26, True)):
        answers = AnswerLengths(prompts=3, ratio=estimate(ratio), at_limit=0, at_limit_full=0)
        assert bool(length_off(fine.model_copy(update={"lengths": answers}), limits)) == off


def test_prompts_and_answers_that_measure_nothing_certify_nothing(measured, encoded) -> None:
    limits = CheckLimits(mean_kl=1e9, p99_kl=1e9, shortest=0, longest=1e9)
    (search, held_out), method = halves(encoded, seed=0), kvfold.parse("full")
    few = certificate(measured, [search[:1]], [held_out], method, limits)
    assert not few.certified and "one searched prompt has no interval" in few.reason
    whole = [replace(one, context=None) for one in encoded]
    ended = PromptMeasurements(build("llama"), None, CheckStore("ended", None), 1, 24)
    short = certificate(ended, [whole[:3]], [whole[3:]], method, limits)
    assert not short.certified and "too short to measure" in short.reason
    assert certificate(measured, [whole[:3]], [whole[3:]], method, limits).certified
