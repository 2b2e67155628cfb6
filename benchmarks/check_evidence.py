# SPDX-License-Identifier: Apache-2.0
"""Whether `kvfold check` foretells lost accuracy, on the samples of a leaderboard:

    python benchmarks/check_evidence.py MODEL BOOK FOLDER OUT

Every method and budget of FOLDER (`real_leaderboard.sh`) is measured as `kvfold check` measures it,
on the samples whose answers FOLDER has scores of; BOOK is the haystack. Measurements are kept in
OUT, so a rerun goes on. Results and their page are written into docs/results/check.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import check_evidence_page as page
import numpy as np
import torch
from rich.progress import track
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvfold.checks.batches import batched
from kvfold.checks.bisection import smallest
from kvfold.checks.certify import halves, too_far
from kvfold.checks.encoded import EncodedPrompt
from kvfold.checks.measure import PromptMeasurements
from kvfold.checks.reading import MethodAtBudget
from kvfold.checks.records import CheckStore
from kvfold.checks.result import CheckLimits
from kvfold.checks.summary import cell
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import FULL, TRUNCATED
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.run_folder import samples_file
from kvfold.eval.run.sample_result import SampleResult, sample_digest
from kvfold.eval.tasks import SampleRequest, tasks
from kvfold.hf.chat_template import token_count

TOKENS = 64
SPLITS = 50  # random halves of a task's prompts


class Workload(NamedTuple):
    """Samples of one task under one protocol, as a user's prompts."""

    task: str
    length: int | None
    aware: bool


class Scored(NamedTuple):
    """Prompts of a workload, and each prompt's score in points by method and budget."""

    prompts: list[EncodedPrompt]
    scores: dict[MethodAtBudget, list[float]]


def scored(
    tokenizer: PreTrainedTokenizerBase, book: Path, lines: Sequence[SampleResult]
) -> dict[Workload, Scored]:
    """Workloads with one question a sample, and the methods that have answered all of it."""
    found: dict[Workload, dict[MethodAtBudget, dict[int, SampleResult]]] = {}
    for line in lines:
        at = line.cell
        if at.method == TRUNCATED or line.outcome is None or len(line.outcome.answers) != 1:
            continue
        key = Workload(at.task, at.length, at.protocol.question_aware)
        found.setdefault(key, {}).setdefault((at.method, at.budget), {})[line.index] = line
    return {
        work: _scored(tokenizer, book, work, own)
        for work, own in found.items()
        if (FULL, None) in own and tasks()[work.task].metric
    }


def _scored(
    tokenizer: PreTrainedTokenizerBase,
    book: Path,
    work: Workload,
    own: dict[MethodAtBudget, dict[int, SampleResult]],
) -> Scored:
    full, metric = own[FULL, None], tasks()[work.task].metric
    assert metric is not None
    first = full[min(full)]
    request = SampleRequest(
        samples=max(full) + 1,
        seed=first.cell.seed,
        count=partial(token_count, tokenizer),
        haystack=book,
        length=work.length,
    )
    prompts = []
    for sample in tasks()[work.task].samples(request):
        if sample.index in full:
            if sample_digest(sample) != full[sample.index].text:
                raise KvfoldError(f"{work.task} is drawn otherwise than it was: another book?")
            prompt = SamplePrompt.of(sample, tokenizer)
            ids = torch.cat([prompt.ids, prompt.question_ids(sample.questions[0])], 1)
            context = None if work.aware else prompt.ids.shape[1]
            where = f"{work.task} {sample.index}"
            prompts.append(EncodedPrompt(where, ids, context, {}, first.cell.seed + sample.index))
    scores = {
        at: [100 * lines[index].outcome.answers[0].scores[metric] for index in sorted(full)]
        for at, lines in own.items()
        if lines.keys() == full.keys()
    }
    return Scored(prompts, scores)


def measure(measured: PromptMeasurements, work: Workload, of: Scored) -> None:
    """Distances of every method at every budget; those of a method share a reading."""
    batches = batched(of.prompts, lambda prompt: prompt)
    cells = sorted((at for at in of.scores if at[0] != FULL), key=lambda at: at[0])
    for at in track(cells, f"{work.task} {'aware' if work.aware else 'agnostic'}"):
        for batch in batches:
            measured.distances(batch, at)


def cells(measured: PromptMeasurements, work: Workload, of: Scored) -> Iterator[page.Cell]:
    """KL and lost points of each method at each budget."""
    full = np.mean(of.scores[FULL, None])
    for at, scores in of.scores.items():
        if at[0] != FULL:
            found = cell(measured, [tuple(of.prompts)], at)
            yield page.Cell(
                task=work.task,
                length=work.length,
                question_aware=work.aware,
                method=at[0],
                budget=at[1],
                prompts=len(of.prompts),
                kept=found.kept,
                mean_kl=found.kl.value,
                p99_kl=found.kl_p99.value,
                agreement=found.agreement.value,
                score=float(np.mean(scores)),
                lost=float(full - np.mean(scores)),
            )


def certificates(
    measured: PromptMeasurements, work: Workload, of: Scored
) -> Iterator[page.Certified]:
    """The budget that is certified on one half of the prompts, and points lost on the other."""
    limits, place = CheckLimits(), {p.digest: n for n, p in enumerate(of.prompts)}
    for method in dict.fromkeys(name for name, _ in of.scores if name != FULL):
        budgets = sorted(
            (b for name, b in of.scores if name == method), key=lambda b: float(b or 1)
        )
        candidates: list[MethodAtBudget] = [(method, budget) for budget in budgets]
        for seed in range(SPLITS):
            search, held_out = halves(of.prompts, seed)

            def far(at: MethodAtBudget, half: list[EncodedPrompt], upper: bool) -> str:
                return too_far(cell(measured, [tuple(half)], at), limits, upper)

            at = smallest(candidates, lambda at: not far(at, search, True))  # noqa: B023
            if at is None or far(at, held_out, False):
                continue
            rows = [place[prompt.digest] for prompt in held_out]
            full, own = (np.array(of.scores[one])[rows] for one in ((FULL, None), at))
            yield page.Certified(
                task=work.task,
                length=work.length,
                question_aware=work.aware,
                method=method,
                budget=at[1],
                split=seed,
                lost=float(np.mean(full - own)),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "book", "folder", "out"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    works = scored(tokenizer, given.book, samples_file(given.folder).load().records)
    found, certified = list[page.Cell](), list[page.Certified]()
    for work, of in works.items():
        store = CheckStore(str(work), given.out)
        measured = PromptMeasurements(model, tokenizer, store, TOKENS, TOKENS)
        measure(measured, work, of)
        found += cells(measured, work, of)
        certified += certificates(measured, work, of)
    page.write(found, certified)


if __name__ == "__main__":
    main()
