# SPDX-License-Identifier: Apache-2.0
"""Results of a check as they would be measured, made up."""

from __future__ import annotations

from kvfold.checks.result import (
    EVERYTHING,
    AnswerLengths,
    Certificate,
    CheckCell,
    CheckLimits,
    CheckProtocol,
    CheckResult,
    GroupBound,
    Leakage,
    RiskBound,
    SpanRetention,
)
from kvfold.eval.run.cell import EvaluatedModel
from kvfold.evidence.estimates import IntervalEstimate
from kvfold.measure.machine import MachineSetup

PARTS = {0.5: 0.012, 0.2: 0.31}


def around(value: float) -> IntervalEstimate:
    return IntervalEstimate(value=value, low=0.8 * value, high=1.3 * value)


def cell(method: str, kept: float, kl: float) -> CheckCell:
    return CheckCell(
        method=method,
        budget=str(kept),
        prompts=24,
        kept=kept,
        bytes_ratio=kept + 0.02,
        kl=around(kl),
        kl_p99=around(20 * kl),
        kl_max=40 * kl,
        agreement=around(0.7),
        perplexity_ratio=around(1 + kl),
        first_disagreement=31.5,
        floor=4e-8,
        equal=False,
        lengths=AnswerLengths(prompts=6, ratio=around(1.1), at_limit=0.5, at_limit_full=0.25),
        spans={"<b>system": SpanRetention(kept=kept, effect=None)},
        leakage={"<b>system": Leakage(recall=0.4, recall_full=0.6)},
    )


def certificate(method: str, certified: bool) -> Certificate:
    held_out = cell(method, 0.35, 0.03)
    return Certificate(
        method=method,
        certified=certified,
        budget="0.35",
        reason="" if certified else "on the held-out prompts, the mean KL is 0.3, above 0.05",
        limits=CheckLimits(),
        found=cell(method, 0.35, 0.025),
        held_out=held_out,
    ).signed("run")


def bound(method: str, confirmed: bool, *groups: str) -> RiskBound:
    held = 0.031 if confirmed else 0.2
    return RiskBound(
        method=method,
        confirmed=confirmed,
        budget="0.5",
        kept=0.5,
        reason="" if confirmed else "the clipped mean KL may be 0.2, above 0.05",
        groups={
            name: GroupBound(prompts=24, loss=0.012, bound=held) for name in groups or [EVERYTHING]
        },
    )


def checked(methods: int = 3, certified: int = 1) -> CheckResult:
    """A result of `methods` methods, the first of them certified."""
    names = [f"method_{number}:option=value" for number in range(methods)]
    return CheckResult(
        subject=EvaluatedModel(
            name="<i>model", config="c", weights="w", vocabulary="v", dtype="float32",
            attention="sdpa",
        ),
        protocol=CheckProtocol(
            tokens=64, limit=256, question_aware=False, seed=0, words="lower-case words"
        ),
        limits=CheckLimits(),
        run="r" * 64,
        prompts=24,
        prompts_digest="p" * 64,
        prompt_tokens=(900, 1100),
        floor=4e-8,
        cells=tuple(cell(name, kept, kl) for name in names for kept, kl in PARTS.items()),
        certificates=tuple(certificate(name, n < certified) for n, name in enumerate(names)),
        bounds=tuple(bound(name, n < certified, "<u>law", "tax") for n, name in enumerate(names)),
        notes=("a note",),
        setup=MachineSetup(cpu="a", cores=2, gpu=None, threads=1, python="3", versions={}),
        commit="abc",
    ).signed()  # fmt: skip
