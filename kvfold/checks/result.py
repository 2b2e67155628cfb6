# SPDX-License-Identifier: Apache-2.0
"""Results of a check: cells, certificates, and what they rest on."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import BaseModel

from kvfold.eval.run.cell import EvaluatedModel
from kvfold.evidence.estimates import IntervalEstimate
from kvfold.measure.machine import MachineSetup

EVERYTHING = "all"  # group of the prompts that name none


class CheckLimits(BaseModel, frozen=True):
    """Limits of a certificate: KL in nats per position, and the ratio of answer lengths.

    A bound counts a prompt's mean KL up to `clip`, and is wrong with a probability of `error` at
    most.
    """

    mean_kl: float = 0.05
    p99_kl: float = 1.0
    shortest: float = 0.8
    longest: float = 1.25
    clip: float = 1.0
    error: float = 0.1


class CheckProtocol(BaseModel, frozen=True):
    """Protocol of a check.

    `tokens` of the full cache's greedy answer are forced; free answers have at most `limit` tokens.
    A context is compressed before its question is known unless `question_aware`; prompts without a
    question are compressed as a whole. `words` says how leaked texts are split.
    """

    tokens: int
    limit: int
    question_aware: bool
    seed: int
    words: str


class AnswerLengths(BaseModel, frozen=True):
    """Free-running answers of `prompts` prompts: sum of lengths over the full cache's.

    `at_limit` and `at_limit_full` are the shares of answers that reach the limit.
    """

    prompts: int
    ratio: IntervalEstimate
    at_limit: float
    at_limit_full: float


class SpanRetention(BaseModel, frozen=True):
    """Means over the prompts that have a span: entries kept, and how much of its effect is left.

    `effect` is 1 − d/e, at least 0: d is the mean KL of the compressed cache, e that of the full
    cache without the span. None where e is within the noise.
    """

    kept: float
    effect: float | None


class Leakage(BaseModel, frozen=True):
    """Mean ROUGE-L recall of a protected text in answers to attacks, compressed and full."""

    recall: float
    recall_full: float


class CheckCell(BaseModel, frozen=True):
    """One method at one budget over `prompts` prompts, with 95 % intervals over prompts.

    `kl_max` and `first_disagreement` (median over prompts, the number of forced tokens where all
    agree) have no interval. `floor` is the mean KL of the full cache read in other pieces; `equal`
    if the mean KL is below three times that. `bias` is the mean over prompts of the largest minus
    the smallest share kept of a span.
    """

    method: str
    budget: str | None
    prompts: int
    kept: float
    bytes_ratio: float
    kl: IntervalEstimate
    kl_p99: IntervalEstimate
    kl_max: float
    agreement: IntervalEstimate
    perplexity_ratio: IntervalEstimate
    first_disagreement: float
    floor: float
    equal: bool
    lengths: AnswerLengths | None = None
    spans: dict[str, SpanRetention] = {}
    bias: float | None = None
    leakage: dict[str, Leakage] = {}


class Certificate(BaseModel, frozen=True):
    """The smallest kept part of a method within the limits, or the reason why there is none.

    `found` is the cell of the half of the prompts that the budget was searched on, `held_out` that
    of the other half, which confirmed it or did not. `digest` hashes everything else and the run.
    """

    method: str
    certified: bool
    budget: str | None
    reason: str
    limits: CheckLimits
    found: CheckCell | None
    held_out: CheckCell | None
    digest: str = ""

    def signed(self, run: str) -> Certificate:
        """The same with its digest."""
        said = self.model_dump_json(exclude={"digest"})
        return self.model_copy(update={"digest": sha256(run + said)})


class GroupBound(BaseModel, frozen=True):
    """Mean over a group's prompts of their clipped mean KL, and its upper confidence bound.

    The bound is that of one budget by itself: of a budget that a sequence has chosen, only the
    tolerance is confirmed.
    """

    prompts: int
    loss: float
    bound: float


class RiskBound(BaseModel, frozen=True):
    """The smallest budget of a method whose bounds are within the tolerance, by name of the group.

    Valid for every distribution of prompts. Where none is `confirmed`, budget and groups are those
    of the first that failed, for this `reason`.
    """

    method: str
    confirmed: bool
    budget: str | None
    kept: float
    reason: str
    groups: dict[str, GroupBound]


class CheckResult(BaseModel, frozen=True):
    """Everything that a check found.

    `run` hashes model and protocol; `prompts_digest` the prompts, attacks included; `digest` the
    whole result.
    """

    kind: Literal["kvfold check"] = "kvfold check"
    subject: EvaluatedModel
    protocol: CheckProtocol
    limits: CheckLimits
    run: str
    prompts: int
    prompts_digest: str
    prompt_tokens: tuple[int, int]
    floor: float
    cells: tuple[CheckCell, ...]
    certificates: tuple[Certificate, ...]
    bounds: tuple[RiskBound, ...]
    notes: tuple[str, ...]
    setup: MachineSetup
    commit: str | None
    digest: str = ""

    @property
    def certified(self) -> bool:
        """True if every method has a certificate."""
        return all(each.certified for each in self.certificates)

    def signed(self) -> CheckResult:
        """The same with its digest."""
        said = self.model_dump_json(exclude={"digest"})
        return self.model_copy(update={"digest": sha256(said)})


def sha256(text: str) -> str:
    """Hexadecimal SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
