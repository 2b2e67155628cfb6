# SPDX-License-Identifier: Apache-2.0
"""F1 of words, segments and characters."""

import pytest

from kvfold.eval.metrics import overlap
from tests.helpers.metrics import value


def test_f1_ignores_case_punctuation_and_articles():
    assert value(overlap.qa_f1("The Cat, sat!", "a cat")) == pytest.approx(2 / 3)
    assert value(overlap.qa_f1("dog", "cat")) == 0
    assert value(overlap.qa_f1("", "cat")) == 0


@pytest.mark.slow
def test_chinese_f1_counts_segments_or_characters():
    assert value(overlap.qa_f1_zh("北京。", "北京")) == 1
    assert value(overlap.qa_f1_zh("北京大学", "北京")) == 0
    assert value(overlap.character_f1("北京 大学！", "北京")) == pytest.approx(2 / 3)
