# SPDX-License-Identifier: Apache-2.0
"""Records of a small benchmark, and the command that makes them."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from kvfold.bench.models import BenchModel
from kvfold.bench.participants import ParticipantLabel
from kvfold.bench.record import BenchCell, Measurement, RoundRecord
from kvfold.cli import app
from kvfold.measure.machine import MachineSetup

SETUP = MachineSetup(
    cpu="this", cores=2, gpu=None, threads=1, python="3.11", versions={"kvfold": "0", "torch": "2"}
)


def cell_of(subject: BenchModel, length: int = 80, new_tokens: int = 3) -> BenchCell:
    return BenchCell(**subject.source.model_dump(), length=length, batch=1, new_tokens=new_tokens)


def record(
    label: ParticipantLabel,
    *,
    cell: BenchCell,
    name: str = "a",
    index: int = 0,
    first: float = 1.0,
    steps: tuple[float, ...] = (1.0, 1.0),
    nbytes: int = 100,
    peak: int | None = None,
    setup: MachineSetup = SETUP,
    subject: BenchModel,
) -> RoundRecord:
    measured = Measurement(
        prefill_seconds=first, compression_seconds=0.0, step_seconds=steps,
        seconds_per_token=steps[0], tokens_per_second=1 / steps[0], cache_bytes=nbytes, kept=1.0,
        peak_bytes=peak,
    )  # fmt: skip
    return RoundRecord(
        session=name, round=index, at="now", side=label.side, method=label.method,
        budget=label.budget, baseline="sdpa", shape=subject.shape, setup=setup, commit=None,
        cell=cell, measured=measured,
    )  # fmt: skip


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "100"})


def refused(*arguments: str) -> str:
    result = bench(*arguments)
    assert result.exit_code == 2, result.output
    message = result.stderr.splitlines()[-1]
    assert message.startswith("error: ")
    return message


STAND_IN = """
import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    do = request["do"]
    answer = {
        "hello": {"versions": {"kvpress": "0"}},
        "build": {"check": json.loads(os.environ.get("CHECK", "[]"))},
        "prefill": {"seconds": 2.0, "compression": 0.5, "peak": None},
        "step": {"seconds": 0.25},
        "cache_size": {"nbytes": 1000, "kept": 0.5},
        "free": {},
    }.get(do, {"error": "no " + do})
    if request.get("press") == ["KnormPress", {"compression_ratio": 0.5}]:
        sys.exit("out of memory")
    print(json.dumps(answer), flush=True)
"""
