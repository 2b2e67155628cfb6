# SPDX-License-Identifier: Apache-2.0
"""Prompts as messages: three forms, each distinct one once, and enough of them."""

from __future__ import annotations

import pytest

from kvfold.checks.engines.questions import check_number, questions_of
from kvfold.checks.engines.result import AgreementLimits
from kvfold.checks.prompts import prompts_of
from kvfold.errors import KvfoldError


def test_the_three_forms_are_messages() -> None:
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = ["p", {"context": "c", "question": "q"}, {"messages": said}, {"prompt": "c\n\nq"}]
    found = questions_of(prompts_of(rows))
    assert [list(each.messages) for each in found] == [
        [{"role": "user", "content": "p"}],
        [{"role": "user", "content": "c\n\nq"}],
        said,
    ]


def test_a_prompt_is_in_one_group() -> None:
    rows = [{"prompt": "p", "group": "a"}, {"prompt": "p", "group": "b"}]
    with pytest.raises(KvfoldError, match="prompt 2 is the same prompt as prompt 1"):
        questions_of(prompts_of(rows))


def test_each_group_needs_enough_prompts_for_its_part_of_the_error() -> None:
    rows = [{"prompt": f"{n}", "group": "ab"[n % 2]} for n in range(100)]
    check_number(questions_of(prompts_of([{"prompt": row["prompt"]} for row in rows[:48]])), LIMITS)
    with pytest.raises(KvfoldError, match="50 prompts of the group 'a' are too few: give at least"):
        check_number(questions_of(prompts_of(rows)), LIMITS)


LIMITS = AgreementLimits()
