# SPDX-License-Identifier: Apache-2.0
"""LongBench's 21 tasks, and the 13 of LongBench-E, which are scored by length bucket.

Source: THUDM/LongBench @2e00731, `LongBench/config/dataset2prompt.json`, `dataset2maxlen.json`,
`LongBench/pred.py` and `eval.py` (Bai et al., 2023, arXiv 2308.14508). Prompts are byte-exact,
oddities included. A row holds `dataset`, `context`, `input`, `answers`, `all_classes`, `length`.
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from kvfold.eval.metrics import MetricScore
from kvfold.eval.metrics import longbench as metrics
from kvfold.eval.tasks import source
from kvfold.eval.tasks.base import Question, SampleRequest, Samples, Task, TaskSample

HUB, PROMPTS = "THUDM/LongBench", source.prompts_of("longbench")
# Tasks prompted without a chat template: few-shot lists and code, which the model continues.
NO_CHAT = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
LONGBENCH_E = (
    "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec",
    "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
)  # fmt: skip


class _LongBenchRow(source.DatasetRow):
    context: str = Field(min_length=1)
    input: str
    answers: list[str] = Field(min_length=1)
    all_classes: list[str] | None = None
    length: int | None = None


def bucket(words: int) -> str:
    """LongBench-E's length bucket, from the number of words in a row's `length`."""
    return "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"


def _convert(name: str, task: str, row: _LongBenchRow) -> TaskSample:
    before, after = PROMPTS[task].parts
    question = Question(
        after.replace("{input}", row.input),
        tuple(row.answers),
        PROMPTS[task].max_new_tokens,
        metadata={"classes": row.all_classes},
    )
    known = {} if row.length is None else {"words": row.length, "bucket": bucket(row.length)}
    return TaskSample(
        name,
        0,
        before + row.context,
        (question,),
        chat=task not in NO_CHAT,
        stop=("\n",) if task == "samsum" else (),
        nonempty=task == "samsum",
        metadata=known,
    )


def _samples(name: str, task: str, subset: str, request: SampleRequest) -> Samples:
    return source.samples(
        request,
        _LongBenchRow,
        partial(_convert, name, task),
        file=subset,
        hub=HUB,
        subset=subset,
        wanted=lambda row: row.get("dataset", task) in (task, subset),
    )


def _score(task: str, metric: str | None, prediction: str, question: Question) -> MetricScore:
    classes = question.metadata["classes"]
    return metrics.score(task, prediction, question.answers, classes, metric=metric)


def _task(task: str, extended: bool) -> Task:
    """The task of LongBench, or of LongBench-E if `extended`."""
    name = f"longbench_e_{task}" if extended else f"longbench_{task}"
    metric = metrics.METRICS[task]
    scores = {metric: partial(_score, task, None)}
    if metric == "code_sim":
        scores["code_sim_rapidfuzz"] = partial(_score, task, "code_sim_rapidfuzz")
    return Task(
        name,
        f"{PROMPTS[task].group}, {'by length' if extended else 'LongBench'}",
        "THUDM/LongBench, arXiv 2308.14508",
        "longbench_e" if extended else "longbench",
        PROMPTS[task].group,
        partial(_samples, name, task, f"{task}_e" if extended else task),
        scores,
        truncation="middle",
    )


TASKS = (*(_task(t, False) for t in PROMPTS), *(_task(t, True) for t in LONGBENCH_E))
