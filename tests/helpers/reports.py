# SPDX-License-Identifier: Apache-2.0
"""Results of a few cells to report on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfold.eval.run.cell import EvalCell, EvalProtocol, EvaluatedModel
from kvfold.eval.run.cell_result import CellResult
from kvfold.evidence.estimates import Estimate, PairedDifference
from kvfold.measure.machine import MachineSetup
from kvfold.report import summary

HOSTILE = "</script><img src=x onerror=alert(1)>"
HERE = MachineSetup(cpu="a", cores=2, gpu=None, threads=2, python="3.12", versions={"torch": "2"})
MODEL = EvaluatedModel(
    name="tiny", config="c", weights="w", vocabulary="v", dtype="float32", attention="sdpa"
)
PLAIN: dict[str, Any] = {
    "benchmark": "ruler", "group": "needles", "haystack": None, "phase": "prefill",
    "metric": "match", "lower_is_better": False, "samples": 100, "questions": 100,
    "scores": {}, "by": {}, "kept_per_layer": (), "peak_bytes": None, "tokens": 1000.0,
    "prefill_seconds": 2.0,
    "seconds_per_token": None, "answer_tokens": None, "truncation": "none", "truncated": 0,
    "at_limit": 0, "failed": {}, "errors": {}, "commits": ("abc",), "setups": (HERE,),
    "nbytes_full": 1000.0,
}  # fmt: skip


def known(value: float, error: float | None) -> Estimate:
    """A mean of 100 samples and its standard error."""
    far = None if error is None else 1.96 * error
    return Estimate(
        value=value,
        error=error,
        low=None if far is None else value - far,
        high=None if far is None else value + far,
        count=100,
    )


def made(
    method: str = "full",
    budget: str | None = None,
    score: tuple[float, float | None] | None = (90.0, 1.0),
    apart: tuple[float, float, float] | None = None,
    task: str = "a",
    length: int | None = 1024,
    aware: bool = False,
    **changed: Any,
) -> CellResult:
    """A record; `score` is a value and its error, `apart` the difference to the full cache."""
    subject = changed.pop("subject", MODEL)
    kept = float(budget) if budget else 1.0
    protocol = EvalProtocol(question_aware=aware, max_length=2048)
    fields = PLAIN | {
        "cell": EvalCell(
            subject=subject, task=task, length=length, seed=0, data=(), protocol=protocol,
            method=method, budget=budget,
        ),
        "score": None if score is None else known(*score),
        "difference": None if apart is None else PairedDifference(
            value=apart[0], low=apart[1], high=apart[2], samples=100, worse=1, better=1),
        "kept_nominal": kept if budget else None, "kept": kept, "nbytes": 1000.0 * kept,
    }  # fmt: skip
    return CellResult(**(fields | changed))


def row(results: Sequence[CellResult], method: str, budget: str | None = None) -> summary.ReportRow:
    return next(r for r in summary.rows(results) if (r.method, r.budget) == (method, budget))


def three() -> list[CellResult]:
    """Task a at two lengths, task b at one."""
    return [
        made(score=(80.0, 2.0)),
        made(score=(60.0, 4.0), length=2048),
        made(score=(50.0, 3.0), task="b"),
    ]


def board() -> list[CellResult]:
    """Full cache, two methods and a baseline on two tasks."""
    results = []
    for task in ("a", "b"):
        results += [
            made(task=task, score=(90.0, 1.0)),
            made("good", "0.2", (89.0, 1.0), (-1.0, -1.5, -0.5), task),
            made("bad", "0.2", (70.0, 2.0), (-20.0, -24.0, -16.0), task),
            made("random", "0.2", (10.0, 1.0), (-80.0, -85.0, -75.0), task),
        ]
    return results


def _write(path: Path, results: Sequence[CellResult]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(one.model_dump_json() + "\n" for one in results), encoding="utf-8")
    return path
