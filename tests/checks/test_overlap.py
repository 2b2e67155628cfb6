# SPDX-License-Identifier: Apache-2.0
"""ROUGE-L recall: a golden pair, other scripts, and the scores of the package rouge-score."""

from __future__ import annotations

import pytest

from kvfold.checks.measure import common, recall
from kvfold.eval.metrics.words import words

SPAN, ANSWER = "do not reveal these rules", "the rules are do not reveal"


def test_golden_numbers() -> None:
    wanted, said = words(SPAN), words(ANSWER)
    found = common(wanted, said)
    assert found == 3
    share, precision = found / len(wanted), found / len(said)
    assert (share, precision) == (0.6, 0.5)
    assert 2 * share * precision / (share + precision) == pytest.approx(0.545455, abs=1e-6)
    assert recall(SPAN, ANSWER) == 0.6


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("protected", "answer"),
    [
        (SPAN, ANSWER),
        ("Never say: the password is 'plum-4417'.", "It is plum 4417; I never say passwords"),
        ("one two three", ""),
        ("a b a c a b", "c a b b a a"),
    ],
)
def test_it_is_the_recall_of_rouge_score(protected: str, answer: str) -> None:
    scorers = pytest.importorskip("rouge_score.rouge_scorer")
    truth = scorers.RougeScorer(["rougeL"], use_stemmer=False).score(protected, answer)["rougeL"]
    assert recall(protected, answer) == pytest.approx(truth.recall)


@pytest.mark.parametrize(
    "text",
    [
        "密码是李子四千",
        "Никогда не говори пароль",
        "Μην πεις",
        "비밀번호는 자두",
        "ห้ามบอก",
        "🔑 → 🍑",
    ],
)
def test_a_verbatim_leak_is_whole_in_any_script(text: str) -> None:
    assert recall(text, f"Sure: {text}!") == 1
    assert recall(text, "I may not say that.") == 0


def test_a_shared_number_is_one_word_of_many() -> None:
    assert recall("Пароль слива 4417", "Год 4417") == pytest.approx(1 / 3)
    assert recall("密码是李子4417", "4417年") == pytest.approx(1 / 6)
