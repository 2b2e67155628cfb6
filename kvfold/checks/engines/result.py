# SPDX-License-Identifier: Apache-2.0
"""Results of a check of another engine."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from kvfold.checks.result import GroupBound, sha256
from kvfold.eval.run.cell import EvaluatedModel
from kvfold.evidence.estimates import IntervalEstimate
from kvfold.measure.machine import MachineSetup


class AgreementLimits(BaseModel, frozen=True):
    """Largest share of other first tokens; its bound is wrong with probability `error` at most."""

    differing: float = 0.05
    error: float = 0.1


class CheckedEndpoint(BaseModel, frozen=True):
    """An endpoint's address, its name for the model, and how many likeliest tokens it gave."""

    url: str
    model: str
    top: int


class ComparedPrompt(BaseModel, frozen=True):
    """A prompt's first token at the endpoint beside the reference's; `digest` is the prompt's.

    `kl_at_least` is a lower bound of the KL from the reference, in nats: of the tokens that are
    told apart, which have the part `covered` of the reference's probability, and the rest.
    """

    digest: str
    group: str | None
    agrees: bool
    kl_at_least: float
    covered: float


class EngineCheckResult(BaseModel, frozen=True):
    """Everything that a check of an engine found.

    `groups` have the share of prompts whose first tokens differ, and its upper confidence bound;
    all are within the limit if `certified`, else the `reason` says what is not. `agreement` has a
    95 % interval, and so has `kl_at_least`, the mean of the prompts' lower bounds.
    """

    kind: Literal["kvfold check of an engine"] = "kvfold check of an engine"
    endpoint: CheckedEndpoint
    reference: CheckedEndpoint | EvaluatedModel
    limits: AgreementLimits
    prompts: int
    prompts_digest: str
    agreement: IntervalEstimate
    kl_at_least: IntervalEstimate
    kl_at_least_max: float
    covered: float
    certified: bool
    reason: str
    groups: dict[str, GroupBound]
    compared: tuple[ComparedPrompt, ...]
    notes: tuple[str, ...]
    setup: MachineSetup
    commit: str | None
    digest: str = ""

    def signed(self) -> EngineCheckResult:
        """The same with its digest."""
        said = self.model_dump_json(exclude={"digest"})
        return self.model_copy(update={"digest": sha256(said)})
