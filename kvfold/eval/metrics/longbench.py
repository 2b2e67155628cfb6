# SPDX-License-Identifier: Apache-2.0
"""Metrics of LongBench, by task.

Source: THUDM/LongBench @2e00731, `LongBench/metrics.py` and `LongBench/eval.py` (Bai et al., 2023,
arXiv 2308.14508, table 1). Scores are in [0, 1]; the benchmark prints 100 times their mean.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence

from kvfold.eval.metrics.base import MetricScore, best, library
from kvfold.eval.metrics.overlap import qa_f1, qa_f1_zh
from kvfold.eval.metrics.rouge import pltrdy, pltrdy_zh

# Few-shot tasks whose predictions continue with more examples: the first line is the answer.
FIRST_LINE_ONLY = frozenset({"trec", "triviaqa", "samsum", "lsht"})

_TASKS = {
    "qa_f1": (
        "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa",
    ),
    "qa_f1_zh": ("multifieldqa_zh",),
    "rouge": ("gov_report", "qmsum", "multi_news", "samsum"),
    "rouge_zh": ("dureader", "vcsum"),
    "classification": ("trec", "lsht"),
    "count": ("passage_count",),
    "retrieval": ("passage_retrieval_en",),
    "retrieval_zh": ("passage_retrieval_zh",),
    "code_sim": ("lcc", "repobench-p"),
}  # fmt: skip
METRICS = {task: metric for metric, tasks in _TASKS.items() for task in tasks}


def score(
    task: str,
    prediction: str,
    answers: Sequence[str],
    classes: Sequence[str] | None = None,
    *,
    metric: str | None = None,
) -> MetricScore:
    """The best score over a sample's references, by the task's metric or by `metric`.

    The prediction is not stripped: code keeps its indentation. Raises KeyError for an unknown task
    or metric, and KvfoldError if the metric's library is not installed.
    """
    metric = metric or METRICS[task]
    if task in FIRST_LINE_ONLY:
        prediction = prediction.lstrip("\n").split("\n")[0]
    if metric == "classification":
        return best(classification(prediction, answer, classes or ()) for answer in answers)
    return best(_PLAIN[metric](prediction, answer) for answer in answers)


def classification(prediction: str, answer: str, classes: Sequence[str]) -> MetricScore:
    """1 / (number of classes named in the prediction) if the right one is among them, else 0."""
    named = [name for name in classes if name in prediction]
    # As in the benchmark: removing while iterating skips the class after a removed one.
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    if not named:
        return MetricScore(0.0, "no class is named in the prediction")
    return MetricScore(1 / len(named) if answer in named else 0.0)


def count(prediction: str, answer: str) -> MetricScore:
    """Fraction of the numbers in the prediction that equal the answer."""
    numbers = re.findall(r"\d+", prediction)
    if not numbers:
        return MetricScore(0.0, "no number in the prediction")
    return MetricScore(numbers.count(answer) / len(numbers))


def retrieval(prediction: str, answer: str) -> MetricScore:
    """`count` against the number in "Paragraph 7"."""
    return _numbered(prediction, answer, r"Paragraph (\d+)")


def retrieval_zh(prediction: str, answer: str) -> MetricScore:
    """`count` against the number in "段落7"."""
    return _numbered(prediction, answer, r"段落(\d+)")


def _numbered(prediction: str, answer: str, pattern: str) -> MetricScore:
    numbered = re.search(pattern, answer)
    if numbered is None:
        return MetricScore(0.0, f"the reference {answer!r} has no number")
    return count(prediction, numbered.group(1))


def code_line(prediction: str) -> str:
    """The first line that is neither fenced nor commented, its indentation kept."""
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not re.search("`|#|//", line)), "")


def code_sim(prediction: str, answer: str) -> MetricScore:
    """Edit similarity of the first line of code, rounded to whole percent.

    Computed by difflib, as fuzzywuzzy does without a faster backend, which the benchmark does not
    install. The backends disagree (33 against 67 for "ababab", "aaaaab").
    """
    similarity = difflib.SequenceMatcher(None, code_line(prediction), answer).ratio()
    return MetricScore(round(100 * similarity) / 100)


def code_sim_rapidfuzz(prediction: str, answer: str) -> MetricScore:
    """`code_sim` by rapidfuzz, as reported by KV-cache papers with a newer fuzzywuzzy.

    Raises KvfoldError without the library.
    """
    return MetricScore(round(library("rapidfuzz.fuzz").ratio(code_line(prediction), answer)) / 100)


_PLAIN: dict[str, Callable[[str, str], MetricScore]] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge": pltrdy,
    "rouge_zh": pltrdy_zh,
    "count": count,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "code_sim": code_sim,
    "code_sim_rapidfuzz": code_sim_rapidfuzz,
}
