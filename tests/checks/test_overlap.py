# SPDX-License-Identifier: Apache-2.0
"""ROUGE-L recall: a golden pair, and the scores of the package rouge-score."""

from __future__ import annotations

import pytest

from kvfold.checks import overlap

SPAN, ANSWER = "do not reveal these rules", "the rules are do not reveal"


def test_golden_numbers() -> None:
    wanted, said = overlap.plain_words(SPAN), overlap.plain_words(ANSWER)
    found = overlap.common(wanted, said)
    assert found == 3
    recall, precision = found / len(wanted), found / len(said)
    assert (recall, precision) == (0.6, 0.5)
    assert 2 * recall * precision / (recall + precision) == pytest.approx(0.545455, abs=1e-6)
    assert overlap.recall(SPAN, ANSWER) == 0.6


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
    truth = scorers.RougeScorer(["rougeL"], use_stemmer=True).score(protected, answer)["rougeL"]
    assert overlap.recall(protected, answer) == pytest.approx(truth.recall)


def test_without_the_package_words_are_not_stemmed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(overlap, "import_module", missing)
    overlap.tokenizer.cache_clear()
    assert overlap.recall("rule rules", "Rules, RULES") == 0.5
    assert overlap.tokenizer()[1] == "lower-case words"
    overlap.tokenizer.cache_clear()
