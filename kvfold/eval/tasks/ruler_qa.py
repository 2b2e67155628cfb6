# SPDX-License-Identifier: Apache-2.0
"""RULER's two question-answering tasks: gold passages among distractors of the same data set.

Source: NVIDIA/RULER @c3f5e3b, `scripts/data/synthetic/qa.py` (Hsieh et al., 2024,
arXiv 2404.06654, section 3.4). `data` is SQuAD 2.0's or HotpotQA's development JSON, or a JSONL
file made by RULER. One difference: RULER shuffles all samples with one seed, so the gold passage
has the same position in all of them, and a method that evicts by position is always right or always
wrong. Here each sample draws its own position.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kvfold.errors import KvfoldError
from kvfold.eval.tasks import ruler
from kvfold.eval.tasks import ruler_wording as wording
from kvfold.eval.tasks.base import NoData, Question, SampleRequest, Samples, TaskSample
from kvfold.eval.tasks.generated import fitted
from kvfold.reading import read_text


@dataclass(frozen=True)
class PassageQuestion:
    """A question, its gold passages, and the `related` ones that are drawn first as distractors."""

    text: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]
    related: tuple[str, ...] = ()


def squad(data: Any) -> list[PassageQuestion]:
    """Answerable questions of SQuAD 2.0; the article's other paragraphs are `related`."""
    return [
        PassageQuestion(
            asked["question"],
            tuple(answer["text"] for answer in asked["answers"]),
            (paragraph["context"],),
            tuple(p["context"] for p in article["paragraphs"] if p is not paragraph),
        )
        for article in data["data"]
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
        if not asked["is_impossible"]
    ]


def hotpotqa(data: Any) -> list[PassageQuestion]:
    """HotpotQA's questions; all passages of a question count as gold."""
    return [
        PassageQuestion(
            asked["question"],
            (asked["answer"],),
            tuple(f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"]),
        )
        for asked in data
    ]


def _build(
    task: str,
    questions: list[PassageQuestion],
    passages: list[str],
    size: int,
    rng: random.Random,
    index: int,
) -> TaskSample:
    """A sample with `size` passages: gold ones, then related ones, then any others, shuffled."""
    asked = questions[index % len(questions)]
    chosen = list(asked.passages)
    related = [p for p in dict.fromkeys(asked.related) if p not in chosen]
    chosen += rng.sample(related, min(len(related), max(0, size - len(chosen))))
    known = set(chosen)
    others = [p for p in passages if p not in known]
    chosen += rng.sample(others, min(len(others), max(0, size - len(chosen))))
    rng.shuffle(chosen)
    intro, ask, prefix = wording.DOCUMENTS
    documents = "\n\n".join(f"Document {n}:\n{text}" for n, text in enumerate(chosen, 1))
    limit = ruler.MAX_NEW_TOKENS["qa"]
    question = Question(f"\n\n{ask}{asked.text}", asked.answers, limit, prefix)
    metadata = {"documents": len(chosen)}
    return TaskSample(task, index, f"{intro}\n\n{documents}", (question,), metadata=metadata)


def _samples(
    name: str, file: str, parse: Callable[[Any], list[PassageQuestion]], request: SampleRequest
) -> Samples:
    """Records of a QA task; raises NoData without data, KvfoldError for an unreadable file."""
    path = Path(request.data) if request.data else None
    if path and path.is_dir() and (path / file).is_file():
        path = path / file
    if path is None:
        raise NoData(f"ruler_{name} needs data: {file}, or a JSONL file made by RULER", file)
    if path.suffix != ".json":
        return ruler.read(name, "qa", request)
    try:
        questions = parse(json.loads(read_text(path)))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise KvfoldError(f"{path} cannot be read as {file}: {error!r}") from error
    passages = sorted({p for asked in questions for p in (*asked.passages, *asked.related)})
    build = partial(_build, f"ruler_{name}", questions, passages)
    return fitted(request, name, build, 1, len(passages))


def _task(
    name: Literal["qa_1", "qa_2"],
    file: str,
    parse: Callable[[Any], list[PassageQuestion]],
    summary: str,
) -> Any:
    samples = partial(_samples, name, file, parse)
    return ruler.task(name, "qa", "question answering", summary, samples, generated=False)


TASKS = (
    _task("qa_1", "squad.json", squad, "SQuAD's questions among its passages"),
    _task("qa_2", "hotpotqa.json", hotpotqa, "HotpotQA's two-hop questions among its passages"),
)
