# SPDX-License-Identifier: Apache-2.0
"""Whether `kvfold check` foretells lost accuracy, on the samples of a leaderboard:

    python -m docs.results.check.measure MODEL BOOK OUT [--method kvzip] [--agnostic]

The methods and budgets whose answers docs/results has scores of, or those of `--method`, are
measured as `kvfold check` measures them, on the same samples; BOOK is the haystack. Measurements
are kept in OUT, so a rerun goes on. Results and their page are written into docs/results/check, in
which results of other tasks and protocols stay.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.progress import track
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from docs.generate import check_page as page
from docs.generate import compact_samples
from kvfold.checks.batches import batched
from kvfold.checks.certify import halves, smallest, too_far
from kvfold.checks.encoded import EncodedPrompt
from kvfold.checks.measure import PromptMeasurements
from kvfold.checks.reading import MethodAtBudget, reading_order
from kvfold.checks.records import CheckStore
from kvfold.checks.result import CheckLimits
from kvfold.checks.summary import cell
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import FULL, TRUNCATED
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.sample_result import sample_digest
from kvfold.eval.tasks import SampleRequest, TaskSample, tasks
from kvfold.hf.chat_template import token_count

PUBLISHED = Path(__file__).parents[1] / "samples.csv.gz"
TOKENS = 64
SPLITS = 50  # random halves of a task's prompts


class Workload(NamedTuple):
    """Samples of one task under one protocol, as a user's prompts."""

    task: str
    length: int
    aware: bool


class Scored(NamedTuple):
    """Prompts of a workload, and each prompt's score in points by method and budget."""

    prompts: list[EncodedPrompt]
    scores: dict[MethodAtBudget, list[float]]


def scored(
    tokenizer: PreTrainedTokenizerBase, book: Path, rows: Sequence[Mapping[str, str]]
) -> dict[Workload, Scored]:
    """Workloads with one question a sample, and the methods that have answered all of it."""
    found: dict[Workload, dict[MethodAtBudget, dict[int, Mapping[str, str]]]] = {}
    several = {(row["task"], row["length"]) for row in rows if row["turn"] not in ("", "0")}
    for row in rows:
        scored = tasks()[row["task"]].metric and (row["task"], row["length"]) not in several
        if row["method"] == TRUNCATED or row["error"] or not scored:
            continue
        work = Workload(row["task"], int(row["length"]), row["question_aware"] == "1")
        at = row["method"], row["budget"] or None
        found.setdefault(work, {}).setdefault(at, {})[int(row["index"])] = row
    return {
        work: _scored(tokenizer, book, work, own)
        for work, own in found.items()
        if (FULL, None) in own
    }


def _scored(
    tokenizer: PreTrainedTokenizerBase,
    book: Path,
    work: Workload,
    own: dict[MethodAtBudget, dict[int, Mapping[str, str]]],
) -> Scored:
    full = own[FULL, None]
    request = SampleRequest(
        samples=max(full) + 1,
        count=partial(token_count, tokenizer),
        haystack=book,
        length=work.length,
    )
    prompts = []
    for sample in tasks()[work.task].samples(request):
        if isinstance(sample, TaskSample) and sample.index in full:
            if sample_digest(sample) != full[sample.index]["text"]:
                raise KvfoldError(f"{work.task} is drawn otherwise than it was: another book?")
            prompt = SamplePrompt.of(sample, tokenizer)
            ids = torch.cat([prompt.ids, prompt.question_ids(sample.questions[0])], 1)
            context = None if work.aware else prompt.ids.shape[1]
            where = f"{work.task} {sample.index}"
            prompts.append(EncodedPrompt(where, ids, context, {}, request.seed + sample.index))
    scores = {
        at: [100 * float(rows[index]["score"]) for index in sorted(full)]
        for at, rows in own.items()
        if rows.keys() == full.keys()
    }
    return Scored(prompts, scores)


def measure(measured: PromptMeasurements, work: Workload, of: Scored) -> None:
    """Distances of every method at every budget; methods that observe the same share a reading."""
    batches = batched(of.prompts, lambda prompt: prompt)
    order = reading_order(method for method, _ in of.scores if method != FULL)
    cells = [at for method in order for at in of.scores if at[0] == method]
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
        kl = {at: [each.kl for each in measured.distances(of.prompts, at)] for at in candidates}
        for seed in range(SPLITS):
            search, held_out = halves(of.prompts, seed)

            def far(at: MethodAtBudget, half: list[EncodedPrompt], upper: bool) -> bool:
                own = np.concatenate([kl[at][place[prompt.digest]] for prompt in half])  # noqa: B023
                if own.mean() > limits.mean_kl:  # spares the bootstraps
                    return True
                return bool(too_far(cell(measured, [tuple(half)], at), limits, upper))

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
    for name in ("model", "book", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--method", action="append", help="these only, by their published names")
    parser.add_argument("--task", action="append", help="these tasks only")
    parser.add_argument("--length", action="append", help="these lengths only, in tokens")
    parser.add_argument("--samples", type=int, help="the first so many, of methods that have them")
    parser.add_argument("--aware", action="store_true", help="with the question in view only")
    parser.add_argument("--agnostic", action="store_true", help="before the question is known only")
    given = parser.parse_args()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    rows = [
        row
        for row in compact_samples.read(PUBLISHED)
        if (given.method is None or row["method"] in (FULL, *given.method))
        and (given.task is None or row["task"] in given.task)
        and (given.length is None or row["length"] in given.length)
        and (given.samples is None or int(row["index"]) < given.samples)
        and not (given.agnostic and row["question_aware"] == "1")
        and not (given.aware and row["question_aware"] == "0")
    ]
    found, certified = list[page.Cell](), list[page.Certified]()
    for work, of in scored(tokenizer, given.book, rows).items():
        store = CheckStore(str(work), given.out)
        measured = PromptMeasurements(model, tokenizer, store, TOKENS, TOKENS)
        measure(measured, work, of)
        found += cells(measured, work, of)
        certified += certificates(measured, work, of)
    page.write(found, certified)


if __name__ == "__main__":
    main()
