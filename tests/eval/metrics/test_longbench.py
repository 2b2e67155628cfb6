# SPDX-License-Identifier: Apache-2.0
"""LongBench's scores: first lines, classes, counts and code."""

import pytest

from kvfold.eval.metrics import longbench
from tests.helpers.metrics import value


def test_only_the_first_line_of_a_few_shot_answer_counts():
    run_on = "\n\nParis\n\nQuestion: What is the capital of Italy?\nAnswer: Rome"
    assert value(longbench.score("triviaqa", run_on, ["Paris"])) == 1
    assert value(longbench.score("hotpotqa", run_on, ["Paris"])) < 0.3


def test_classification_splits_between_classes_named():
    classes = ["Food", "Other animal", "Animal", "Sport"]
    assert value(longbench.classification("Food", "Food", classes)) == 1
    assert value(longbench.classification("Food or Sport", "Food", classes)) == 0.5
    assert value(longbench.classification("Sport", "Food", classes)) == 0
    assert longbench.classification("?", "Food", classes).failed


def test_the_class_after_each_one_removed_is_skipped():
    # "a" goes, which hides "b" from the loop; both are parts of the right class.
    assert value(longbench.classification("a b c", "a b c", ["a", "b", "a b c"])) == 0.5


def test_counts_are_shares_of_all_numbers():
    assert value(longbench.count("17, or 18", "17")) == 0.5
    assert value(longbench.retrieval("Paragraph 3", "Paragraph 3")) == 1
    assert value(longbench.retrieval("3 of 30", "Paragraph 3")) == 0.5
    assert value(longbench.retrieval_zh("段落3", "段落3")) == 1
    assert longbench.count("none", "17").failed
    assert longbench.retrieval("3", "no number").failed


def test_code_similarity_is_difflibs():
    assert value(longbench.code_sim("ababab", "aaaaab")) == 0.33
    assert value(longbench.code_sim_rapidfuzz("ababab", "aaaaab")) == 0.67


def test_code_keeps_its_indentation():
    gold = "        return x"
    assert value(longbench.score("lcc", gold, [gold])) == 1
    assert value(longbench.score("lcc", gold.lstrip(), [gold])) < 0.75
    assert longbench.score("lcc", gold, [gold], metric="code_sim_rapidfuzz").value == 1


def test_fences_and_comments_are_no_code():
    assert longbench.code_line("\n```python\n# why\n  x = 1\ny = 2") == "  x = 1"
    assert longbench.code_line("// only\n# comments") == ""


def test_every_longbench_task_has_a_metric():
    assert len(longbench.METRICS) == 21
    for task in longbench.METRICS:
        answer = {"passage_retrieval_en": "Paragraph 1", "passage_retrieval_zh": "段落1"}.get(
            task, "1"
        )
        assert value(longbench.score(task, answer, [answer], [answer])) == pytest.approx(1)
