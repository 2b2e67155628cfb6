# SPDX-License-Identifier: Apache-2.0
"""`kvfold check URL`: known distributions, exit codes, and input that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kvfold.checks.engines.check import check_engine
from kvfold.checks.engines.page import verdict
from kvfold.checks.engines.questions import ChatQuestion
from kvfold.checks.engines.reference import EndpointReference
from kvfold.checks.engines.result import AgreementLimits, CheckedEndpoint, EngineCheckResult
from kvfold.checks.engines.tokens import TopTokens
from kvfold.checks.result import EVERYTHING, GroupBound
from tests.helpers.commands import kvfold_command, refused
from tests.helpers.stub_endpoint import completion, served

TOKENS = [f" w{number}" for number in range(30)]


def distribution(text: str, shift: int = 0) -> dict[str, float]:
    """A distribution drawn by the prompt; `shift` changes it a little, one in ten a lot."""
    number = int(text.split()[-1])
    logits = np.random.default_rng(number).normal(size=30) * 2
    if shift:
        logits += np.random.default_rng(number + 1000).normal(size=30) * 0.01
        logits[np.argmin(logits)] += 20 * (number % shift == 0)
    weights = np.exp(logits)
    return dict(zip(TOKENS, weights / weights.sum(), strict=True))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "number {number}"}}\n' for number in range(60)))
    return path


@pytest.mark.slow
def test_agreement_and_the_lower_bound_are_those_by_hand(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with served(distribution) as own, served(lambda text: distribution(text, 10), top=10) as other:
        arguments = ["check", other, str(prompts), "--reference", own, "--out", str(out)]
        made = kvfold_command(*arguments)
        assert made.exit_code == 1, made.output
        assert kvfold_command(*arguments, "--tolerance", "0.3", "--force").exit_code == 0
        assert "is there already, of another check" in refused(*arguments)
        again = kvfold_command(*arguments, "--json", "--force")
    result = EngineCheckResult.model_validate_json((out / "check.json").read_text())
    assert json.loads(again.stdout) == result.model_dump(mode="json")
    bounds, alike = [], []
    for number in range(60):
        p, q = (distribution(f"number {number}", shift) for shift in (0, 10))
        listed = [set(sorted(of, key=of.__getitem__)[-n:]) for of, n in ((p, 20), (q, 10))]
        both = sorted(listed[0] & listed[1])
        cells = np.array([[of[token] for token in both] for of in (p, q)])
        cells = np.concatenate([cells, 1 - cells.sum(1, keepdims=True)], 1)
        bounds.append(float((cells[0] * np.log(cells[0] / cells[1])).sum()))
        alike.append(max(p, key=p.__getitem__) == max(q, key=q.__getitem__))
    assert result.kl_at_least.value == pytest.approx(np.mean(bounds), rel=1e-6)
    assert result.kl_at_least_max == pytest.approx(max(bounds), rel=1e-6)
    assert result.agreement.value == pytest.approx(np.mean(alike)) and not all(alike)
    assert not result.certified and "may be" in result.reason
    assert all(len(line) <= 80 for line in made.stdout.splitlines()[:8])
    assert "mean KL, lower bound" in made.stdout
    page = (out / "index.html").read_text()
    assert "lower bound" in page and result.digest in page and "number 7" not in page
    assert "number 7" not in (out / "check.json").read_text()


@pytest.fixture
def without_text() -> EngineCheckResult:
    """A check of an endpoint whose tokens are no text."""
    endpoint = Mock(url="u", model="m", top=1)
    endpoint.top_tokens.return_value = TopTokens({}, None, 7)
    told = CheckedEndpoint(url="u", model="m", top=1)
    questions = [ChatQuestion(f"{n}", ({"role": "user", "content": f"{n}"},), None) for n in "ab"]
    return check_engine(endpoint, EndpointReference(endpoint), told, questions, AgreementLimits())


def test_tokens_that_are_no_text_count_as_different_and_are_said_to_differ(
    without_text: EngineCheckResult,
) -> None:
    found = without_text
    assert found.agreement.value == 0 and found.kl_at_least_max == 0 and found.notes == ()


def test_a_bound_is_shown_rounded_up(without_text: EngineCheckResult) -> None:
    groups = {EVERYTHING: GroupBound(prompts=60, loss=0.0, bound=0.0401)}
    certified = without_text.model_copy(update={"certified": True, "groups": groups})
    assert verdict(certified).endswith("at most 4.1% (measured 0.0% on 60 prompts)")


@pytest.mark.slow
def test_input_that_cannot_be_compared_is_one_line(prompts: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    with served(distribution) as own:
        assert "give --reference" in refused("check", own, str(prompts), *out)
        given = ["check", own, str(prompts), "--reference", own, *out]
        assert "leave out --methods" in refused(*given, "--methods", "snapkv")
        assert "60 prompts are too few: give at least" in refused(*given, "--tolerance", "0.01")
        assert "give a share of prompts" in refused(*given, "--tolerance", "0")
        given[4] = "bundled"
        assert "the endpoint's token ' w" in refused(*given)
        with served(lambda _: {f" v{n}": 1 / 32 for n in range(30)}) as foreign:
            given[4] = foreign
            assert "share 0.0% of their likeliest tokens" in refused(*given)
        longer = lambda _: completion(distribution("x 1"), 20, 8)  # noqa: E731
        with served(distribution, change=longer) as other:
            given[4] = other
            assert "the endpoint reads 7 tokens, the reference 8" in refused(*given)
    assert "does not answer" in refused(*given)
    assert "leave out --reference" in refused(
        "check", "bundled", str(prompts), "--reference", "bundled"
    )
    assert not (tmp_path / "out").exists()
