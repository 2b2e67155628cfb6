# SPDX-License-Identifier: Apache-2.0
"""SCBench's scores."""

import pytest

from kvfold.eval.metrics import scbench
from tests.helpers.metrics import value


@pytest.mark.parametrize(
    ("task", "prediction", "label", "expected"),
    [
        ("kv", "xab-12y", "ab-12", 1),
        ("kv", "AB-12", ["ab-12"], 0),
        ("qa_eng", "red STOCKINGS", ["stockings"], 1),
        ("many_shot", "it is (B)", ["b", "(b)"], 1),
        ("mf", "88.7", [88], 1),
        ("mf", "88.7", 88, 1),
        ("choice_eng", " C", ["Snowfield", "C"], 1),
        ("choice_eng", "Snowfield", ["Snowfield", "C"], 1),
        ("vt", "ABC, DEF", ["ABC", "XYZ"], 0.5),
        ("vt", "ABC, DEF", ["ABC", "XYZ", "IJK"], 0.33),
        ("qa_chn", "北京", "北京", 1),
        ("summary", "a b", "a b", 1),
    ],
)
def test_scbench(task, prediction, label, expected):
    assert value(scbench.METRICS[task][1](prediction, label)) == pytest.approx(expected)


@pytest.mark.parametrize("label", [88, [88.5]])
@pytest.mark.parametrize("prediction", ["7" * 400, "7" * 5000, "7" * 400 + ".5"])
def test_a_number_beyond_floats_is_wrong_and_counted(prediction, label):
    scored = scbench.METRICS["mf"][1](prediction, label)
    assert (scored.value, scored.failed) == (0, "the first number is beyond every label")
