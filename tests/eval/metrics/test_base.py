# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' scores on cases worked by hand, and the traps between them and their imitations.

A prediction that cannot be parsed or scored says so.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvfold.errors import KvfoldError
from kvfold.eval.metrics import (
    MetricScore,
    best,
    choice,
    infinitebench,
    longbench,
    loogle,
    maths,
    mean,
    needle,
    overlap,
    rouge,
    ruler,
    scbench,
)
from kvfold.eval.tasks.needle import SANDWICH


def value(scored):
    """A score that nothing went wrong with."""
    assert scored.failed is None
    return scored.value


# --- what a score is ---------------------------------------------------------------------------


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


# --- RULER -------------------------------------------------------------------------------------


def test_ruler_counts_the_share_of_answers():
    assert value(ruler.string_match_all("ABCDE, fghij", ["abcde", "FGHIJ", "KLMNO"])) == 2 / 3


def test_any_of_rulers_paraphrases_is_enough():
    answers = ["Denver Broncos", "Broncos", "the Broncos"]
    assert value(ruler.string_match_part("It was Denver Broncos.", answers)) == 1
    # As a share of all, which lm-evaluation-harness takes, it would be two thirds.
    assert value(ruler.string_match_all("It was Denver Broncos.", answers)) == 2 / 3


def test_control_characters_do_not_glue_lines_together():
    assert ruler.cleaned(" 12\x0034\t\n") == "12\n34"
    assert value(ruler.string_match_all("12\x0034", ["1234"])) == 0


# --- needle ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prediction", "rouge_1", "right"),
    [
        ("eat a sandwich and sit in Dolores Park on a sunny day.", 7.27, 1),
        (
            "The best thing to do in San Francisco is to visit Golden Gate Park on a sunny day.",
            7.18,
            0,
        ),
        ("Eat a sandwich and sit in Dolores Park.", 5.52, 1),
    ],
)
def test_rouge_takes_a_wrong_answer_for_a_right_one_and_keywords_do_not(prediction, rouge_1, right):
    assert 10 * value(needle.rouge_1(prediction, SANDWICH.text)) == pytest.approx(
        rouge_1, abs=0.006
    )
    assert value(needle.keywords(prediction, SANDWICH.keywords)) == right


def test_both_rouges_of_a_needle_itself_are_1():
    assert value(needle.rouge_1(SANDWICH.text, SANDWICH.text)) == 1
    assert value(needle.rouge_l(SANDWICH.text, SANDWICH.text)) == pytest.approx(1)


# --- ROUGE -------------------------------------------------------------------------------------


def test_the_two_rouges_differ():
    prediction, reference = "the cat sat. the cat ran. the cat", "the cat ran"
    # Three of four different words against three of all eight.
    assert value(rouge.pltrdy(prediction, reference)) == pytest.approx(6 / 7)
    assert value(rouge.google(prediction, [reference], "rougeL")) == pytest.approx(6 / 11)


def test_one_long_sentence_is_a_counted_failure():
    text = " ".join(f"word{number}" for number in range(1100))
    scored = rouge.pltrdy(text, "word1 word2")
    assert scored.value == 0
    assert "RecursionError" in scored.failed
    # The same words in sentences can be scored.
    assert value(rouge.pltrdy(text.replace(" ", ". "), "word1 word2")) > 0


def test_which_texts_overflow_does_not_depend_on_the_caller():
    text = " ".join(f"word{number}" for number in range(600))

    def deep(calls):
        return deep(calls - 1) if calls else rouge.pltrdy(text, "word1 word2")

    assert deep(600) == rouge.pltrdy(text, "word1 word2")


@pytest.mark.parametrize("empty", ["", "...", "  "])
def test_an_empty_text_is_a_counted_failure(empty):
    assert rouge.pltrdy(empty, "a reference").failed
    assert rouge.pltrdy("a prediction", empty).failed


@pytest.mark.slow
def test_chinese_rouge_counts_segments():
    assert value(rouge.pltrdy_zh("我爱北京", "我爱北京天安门")) == pytest.approx(0.857142, abs=1e-5)


def test_words_are_not_stemmed():
    assert value(infinitebench.summary("running", ["run"])) == 0
    # Sentences are lines, and the best reference counts.
    assert value(infinitebench.summary("a b\nc d", ["x", "c d\na b"])) == 1


# --- LongBench ---------------------------------------------------------------------------------


def test_f1_ignores_case_punctuation_and_articles():
    assert value(overlap.qa_f1("The Cat, sat!", "a cat")) == pytest.approx(2 / 3)
    assert value(overlap.qa_f1("dog", "cat")) == 0
    assert value(overlap.qa_f1("", "cat")) == 0


@pytest.mark.slow
def test_chinese_f1_counts_segments_or_characters():
    assert value(overlap.qa_f1_zh("北京。", "北京")) == 1
    assert value(overlap.qa_f1_zh("北京大学", "北京")) == 0
    assert value(overlap.character_f1("北京 大学！", "北京")) == pytest.approx(2 / 3)


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


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [
        ("The correct answer is (B)", "B"),
        ("**The correct answer is** C.", "C"),
        ("The correct answer is (D), not (A)", "D"),
        ("B", None),
    ],
)
def test_the_letter_of_longbench_v2(prediction, letter):
    assert choice.letter(prediction) == letter
    scored = choice.accuracy(prediction, "B")
    assert scored.value == (letter == "B")
    assert bool(scored.failed) == (letter is None)
    merged = choice.accuracy(prediction, "B", compensated=True)
    assert merged.value == (0.25 if letter is None else letter == "B")


# --- InfiniteBench and SCBench -----------------------------------------------------------------


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


# --- LooGLE ------------------------------------------------------------------------------------


def test_loogle_takes_rouges_recall_and_single_order_bleu():
    prediction, answer = "the cat sat on the mat", "the cat sat"
    assert value(loogle.rouge_recall(prediction, answer)) == pytest.approx(1)
    assert value(loogle.rouge_recall(answer, prediction, "rouge-1")) == pytest.approx(3 / 5)
    assert value(loogle.rouge_recall("", "None")) == pytest.approx(1)
    assert value(loogle.bleu(prediction, answer)) == pytest.approx(0.5)
    assert value(loogle.bleu("a b c d e", "a b c d x", 4)) == pytest.approx(0.5)


def test_clozes_are_read_as_literals_and_never_evaluated():
    answers = {"<mask-0>": "Bob Smith", "<mask-1>": "Rome"}
    half = "{'<mask-0>': 'Bob', '<mask-1>': 'Rome'}"
    assert loogle.cloze(half, answers) == MetricScore(0.5, None, 2)
    assert loogle.cloze(half, answers, partial=True) == MetricScore(1.0, None, 2)
    for broken in ("", "Bob", "['Bob']", "{'<mask-0>': open('x')}", "__import__('os').getcwd()"):
        assert loogle.cloze(broken, answers).failed
        assert loogle.cloze(broken, answers).weight == 2


# --- maths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "strict", "flexible"),
    [
        ("so 9 * 2 = 18.\n#### 18", 1, 1),
        ("#### 1,800", 0, 0),
        # As the official code; lm-evaluation-harness drops the full stop.
        ("#### 18.", 0, 1),
        ("It makes $18.", None, 1),
        ("18 eggs, then 20", None, 0),
        ("many", None, None),
    ],
)
def test_gsm8k(prediction, strict, flexible):
    for metric, expected in ((maths.gsm8k_strict, strict), (maths.gsm8k_flexible, flexible)):
        scored = metric(prediction, "18")
        assert scored.value == (expected or 0)
        assert bool(scored.failed) == (expected is None)


def test_commas_in_numbers_are_ignored():
    assert value(maths.gsm8k_strict("#### 1,800", "1800")) == 1
    assert value(maths.gsm8k_flexible("in all $1,800.", "1,800")) == 1


def test_the_last_box_is_read_with_its_braces_balanced():
    assert maths.boxed("\\boxed{1} and \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert maths.boxed("\\boxed{1} then \\boxed{\\frac{1}{2}") == "1"
    assert maths.boxed("\\boxed{\\frac{1}") is None
    assert maths.boxed("1") is None


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}", 1),
        ("\\boxed{0.5}", "\\frac12", 1),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3, \\pi/2)", 1),
        ("\\boxed{x^2+2x}", "x(x+2)", 1),
        ("\\boxed{\\frac{1}{3}}", "\\frac{1}{2}", 0),
    ],
)
def test_math_answers_are_compared_as_expressions(prediction, answer, expected):
    assert value(maths.equivalent(prediction, answer)) == expected


@pytest.mark.slow
def test_expressions_that_never_end_are_given_up_outside_the_main_thread_too():
    with ThreadPoolExecutor(1) as thread:
        endless = thread.submit(maths.equivalent, "\\boxed{9^{9^{9^{9}}}}", "1", 1)
        assert endless.result(timeout=60).value == 0
        assert thread.submit(maths.equivalent, "\\boxed{0.5}", "\\frac12").result().value == 1


def test_math_without_a_box_is_a_counted_failure():
    assert maths.equivalent("It is 1/2.", "1/2") == MetricScore(
        0.0, "no complete \\boxed{} in the prediction"
    )
