# SPDX-License-Identifier: Apache-2.0
"""The page of a check: everything in it, nothing of users as markup, no script."""

from __future__ import annotations

import re

import pytest

from kvfold.checks.chart import points
from kvfold.checks.page import bound_said, claim, evidence, page, verdict
from kvfold.checks.result import CheckLimits
from tests.helpers.checked import bound, certificate, checked
from tests.helpers.inspected import Tags


def test_the_page_holds_every_number_and_hash() -> None:
    result = checked()
    made = page(result)
    for cell in result.cells:
        assert f"{cell.kl.value:.3g} <small>{cell.kl.low:.3g} to {cell.kl.high:.3g}" in made
        assert f"{cell.kept:.1%}" in made and f"{cell.bytes_ratio:.1%}" in made
    for hashed in (result.digest, result.prompts_digest, *(c.digest for c in result.certificates)):
        assert hashed in made
    assert made.count("✓ certified") == 1 and made.count("✗ refused") == 2
    assert made.count("✓ bounded") == 1 and made.count("✗ no bound") == 2


def test_names_are_text_and_there_is_no_script() -> None:
    made = page(checked())
    assert "<b>system" not in made and "<i>model" not in made and "&lt;b&gt;system" in made
    assert "<u>law" not in made and "&lt;u&gt;law" in made
    assert "script" not in {name for name, _ in Tags(made).found}
    assert "@@" not in made and not re.search(r"https?://", made)


def test_the_chart_has_a_mark_for_every_cell_and_certificate() -> None:
    result = checked(methods=9)
    found = points(result)
    assert [len(cells) for cells in found.values()] == [3] * 9
    assert [cell.kept for cell in found["method_0:option=value"]] == [0.2, 0.35, 0.5]
    assert page(result).count('<polygon class="mark"') == 9 * 3 + 9


@pytest.mark.parametrize(
    ("certified", "said"),
    [(1, "may keep 35% of the cache"), (0, "No method stays within the limits")],
)
def test_the_headline_follows_from_the_certificates(certified: int, said: str) -> None:
    result = checked(certified=certified)
    assert said in claim(result)
    assert "Refused: method_" in evidence(result)
    assert result.certified == (certified == 3)


def test_verdicts_are_one_line() -> None:
    good, bad = certificate("a", True), certificate("b", False)
    assert verdict(good).startswith(
        "a: certified at 0.35, 35% kept: mean KL 0.03, 99th percentile 0.6"
    )
    assert verdict(bad) == f"b: no certificate: {bad.reason}"


def test_a_bound_says_its_level_its_clip_and_its_groups() -> None:
    limits = CheckLimits(error=0.05, clip=0.5)
    assert bound_said(bound("snapkv", True), limits) == (
        "snapkv: bounded at 0.5, 50% kept: mean KL clipped at 0.5 at most 0.05, with 0.95 "
        "confidence (measured 0.012 on 24 prompts)"
    )
    assert "law: 0.012 on 24 prompts" in bound_said(bound("snapkv", True, "law", "tax"), limits)
    refused = bound_said(bound("snapkv", False), limits)
    assert refused == "snapkv: no bound: the clipped mean KL may be 0.2, above 0.05"
