# SPDX-License-Identifier: Apache-2.0
"""InfiniteBench's scores, and what they cannot parse."""

import pytest

from kvfold.eval.metrics import infinitebench
from tests.helpers.metrics import value


@pytest.mark.parametrize(
    ("task", "prediction", "label", "expected"),
    [
        ("passkey", "The pass key is 71432.", "71432", 1),
        ("passkey", "71432 or 5", "5", 0),
        ("number_string", "It is 0071", "0071", 1),
        ("kv_retrieval", 'The value is: "ab-12".', "ab-12", 1),
        ("kv_retrieval", "xab-12", "ab-12", 0),
        ("code_run", "so it returns -7.", -7, 1),
        ("code_run", "-7 it is 8", -7, 0),
        ("math_find", "about 88 or 89", 88, 1),
        ("math_find", "0.5", 0.5, 1),
        ("math_calc", "[1, 2, 9, 4]", [1, 2, 3, 4], 0.5),
        ("math_calc", "1 2", [1, 2], 1),
        ("math_calc", "1", [1, 2], 0.5),
        ("math_calc", "01, 00, 3", [1, 0, 2], 2 / 3),
        ("math_calc", "7" * 5000, [7], 0),
        ("math_calc", "1, " + "7" * 5000, [1, 2], 0.5),
        ("longdialogue_qa_eng", "It is Gaggi.", ["GAGGI", "Remo"], 1),
        ("longdialogue_qa_eng", "Remo", ["GAGGI", "Remo"], 0),
        ("longbook_choice_eng", "C. Snowfield", ["Snowfield", "C"], 1),
        ("longbook_choice_eng", "the answer is Snowfield", ["Snowfield", "C"], 1),
        ("longbook_choice_eng", "I say B here", ["Snowfield", "C"], 0),
        ("code_debug", "B. repack", ["repack", "B"], 1),
        ("code_debug", "The answer is: repack", ["repack", "B"], 1),
        ("code_debug", "The answer is: A", ["repack", "B"], 0),
        ("longbook_qa_eng", "red stockings", ["shoes", "stockings"], 2 / 3),
        ("longbook_qa_chn", "北京！", ["北京"], 1),
    ],
)
def test_infinitebench(task, prediction, label, expected):
    assert value(infinitebench.METRICS[task][1](prediction, label)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("task", "prediction", "label"),
    [
        ("passkey", "no key", "71432"),
        ("code_run", "", 1),
        ("code_run", "unknown", 1),
        ("math_find", "none", 88),
        ("math_find", "88.5", 88),
        ("math_calc", "?", [1]),
        ("longbook_choice_eng", "", ["Snowfield", "C"]),
        ("longbook_choice_eng", "nobody knows", ["Snowfield", "C"]),
        ("longbook_choice_eng", "the answer is", ["Snowfield", "C"]),
        ("code_debug", "I cannot tell", ["repack", "B"]),
        ("code_debug", "The answer is: ", ["repack", "B"]),
    ],
)
def test_what_infinitebench_cannot_parse_is_a_counted_failure(task, prediction, label):
    scored = infinitebench.METRICS[task][1](prediction, label)
    assert scored.value == 0
    assert scored.failed
