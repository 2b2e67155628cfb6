# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' scores on cases worked by hand, and the traps between them and their imitations.

A prediction that cannot be parsed or scored says so.
"""

import sys

import pytest

from kvfold.errors import KvfoldError
from kvfold.eval.metrics import MetricScore, best, longbench, maths, mean, rouge


def test_the_best_reference_counts_and_failures_stay_visible():
    assert best([MetricScore(0.25), MetricScore(0.75)]) == MetricScore(0.75)
    assert best([MetricScore(0.0, "broken"), MetricScore(0.5)]) == MetricScore(0.5, "broken")


def test_the_mean_is_weighted():
    assert mean([MetricScore(1.0), MetricScore(0.0)]) == 0.5
    assert mean([MetricScore(1.0, weight=3), MetricScore(0.0)]) == 0.75
    assert str(mean([])) == "nan"


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("rouge", lambda: rouge.pltrdy("a", "a")),
        ("rapidfuzz.fuzz", lambda: longbench.code_sim_rapidfuzz("a", "a")),
        ("math_verify", lambda: maths.equivalent("\\boxed{1}", "1")),
    ],
)
def test_a_missing_library_is_named_with_the_way_to_install_it(monkeypatch, module, call):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KvfoldError, match=r"pip install 'kvfold\[eval\]'"):
        call()
