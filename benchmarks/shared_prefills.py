# SPDX-License-Identifier: Apache-2.0
"""Time that shared prefills and batches save in an evaluation, interleaved in one process.

    python benchmarks/shared_prefills.py MODEL BOOK [--samples 2]

Each sample of a needle task is answered by some methods at two budgets, under both protocols: with
a prefill for each method and budget, with shared prefills, and with shared prefills in one batch.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

from kvfold.eval.run.cell import EvalCell, EvalProtocol, EvaluatedModel
from kvfold.eval.run.job import EvalJob, run_job
from kvfold.eval.run.plan import TaskSamples, contenders
from kvfold.eval.tasks import SampleRequest, select
from kvfold.hf.chat_template import token_count
from kvfold.loading import load

METHODS = ["full", "snapkv", "pyramidkv", "adakv", "knorm", "h2o", "d2o", "kvzip"]
BUDGETS = ["0.2", "0.1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("book", type=Path)
    parser.add_argument("--samples", type=int, default=2)
    given = parser.parse_args()
    model, tokenizer = load(given.model)
    count = partial(token_count, tokenizer)
    request = SampleRequest(samples=given.samples, length=1024, count=count, haystack=given.book)
    drawn = TaskSamples.of(select(["ruler_niah_single_2"])[0], request)
    samples = dict(enumerate(drawn.samples))
    for aware in (False, True):
        protocol = EvalProtocol(question_aware=aware, max_length=2048, answer_tokens=16)
        subject = EvaluatedModel.of(given.model, model, tokenizer)
        cells = tuple(drawn.cells(subject, protocol, contenders(METHODS, BUDGETS)))
        ways = {"a prefill each": 0.0, "shared prefills": 0.0, "in one batch": 0.0}

        def timed(way: str, index: list[int], own: tuple[EvalCell, ...]) -> None:
            began = time.perf_counter()
            job = EvalJob({i: samples[i] for i in index}, own)
            assert all(line.error is None for of in run_job(model, tokenizer, job) for line in of)
            ways[way] += time.perf_counter() - began  # noqa: B023

        for index in samples:
            for cell in cells:
                timed("a prefill each", [index], (cell,))
            timed("shared prefills", [index], cells)
        timed("in one batch", list(samples), cells)
        print(f"{'question-aware' if aware else 'question-agnostic'}, {len(cells)} cells:")
        for way, seconds in ways.items():
            each = seconds / len(samples)
            print(f"  {way}: {each:.1f} s a sample, {seconds / ways['a prefill each']:.2f} of it")


if __name__ == "__main__":
    main()
