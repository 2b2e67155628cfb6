# SPDX-License-Identifier: Apache-2.0
"""An endpoint against a reference: agreement of the first token, and a lower bound of the KL."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from kvfold.checks.engines.client import Endpoint
from kvfold.checks.engines.questions import ChatQuestion, digest_of
from kvfold.checks.engines.reference import (
    EndpointReference,
    LocalReference,
    Reference,
    TokenComparison,
)
from kvfold.checks.engines.result import (
    AgreementLimits,
    CheckedEndpoint,
    ComparedPrompt,
    EngineCheckResult,
)
from kvfold.checks.groups import bounded_groups, checked_error, too_high
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import EvaluatedModel
from kvfold.evidence.estimates import IntervalEstimate
from kvfold.evidence.intervals import Array, Interval, bounded, moments, of_mean
from kvfold.measure.machine import MachineSetup, commit

LOSS = "the share of other first tokens"
UNSEEN = 1e-7  # nats; what engines round differs by more than that
LEAST_SHARED = 0.1  # of the tokens that two endpoints list, over all prompts


def agreement_limits(tolerance: float, error: float) -> AgreementLimits:
    """The limits; raises KvfoldError for what is no share, or no probability."""
    if not 0 < tolerance < 1:
        raise KvfoldError(f"the tolerance is {tolerance!r}: give a share of prompts, such as 0.05")
    return AgreementLimits(differing=tolerance, error=checked_error(error))


def check_engine(
    endpoint: Endpoint,
    reference: EndpointReference | LocalReference,
    subject: CheckedEndpoint | EvaluatedModel,
    questions: Sequence[ChatQuestion],
    limits: AgreementLimits,
    say: Callable[[str], None] = lambda text: None,
) -> EngineCheckResult:
    """Asks both for the first token after each prompt; `subject` describes the reference.

    Raises KvfoldError where one does not answer, and where their tokens cannot be the same.
    """
    found, shared = [], []
    for number, question in enumerate(questions, 1):
        say(f"prompt {number} of {len(questions)}")
        made = _compared(endpoint, reference, question)
        shared.append(made.shared)
        found.append(
            ComparedPrompt(
                digest=question.digest,
                group=question.group,
                agrees=made.agrees,
                kl_at_least=made.kl_at_least,
                covered=made.covered,
            )
        )
    if math.fsum(shared) < LEAST_SHARED * len(shared):
        raise KvfoldError(
            f"the two endpoints share {math.fsum(shared) / len(shared):.1%} of their likeliest "
            "tokens: they have other tokenizers, or other models"
        )
    losses = ((one.group, (one.digest, float(not one.agrees))) for one in found)
    groups = bounded_groups(losses, limits.error)
    reason = too_high(groups, limits.differing, limits.error, LOSS)
    agrees = np.array([float(one.agrees) for one in found])
    kl = np.array([one.kl_at_least for one in found])
    return EngineCheckResult(
        endpoint=described(endpoint),
        reference=subject,
        limits=limits,
        prompts=len(questions),
        prompts_digest=digest_of(questions),
        agreement=_estimate(bounded(moments(agrees, np.ones(len(agrees))))),
        kl_at_least=_estimate(of_mean(kl)),
        kl_at_least_max=float(kl.max()),
        covered=float(np.mean([one.covered for one in found])),
        certified=not reason,
        reason=reason,
        groups=groups,
        compared=tuple(found),
        notes=tuple(_notes(kl, agrees)),
        setup=MachineSetup.here(),
        commit=commit(),
    ).signed()


def described(endpoint: Endpoint) -> CheckedEndpoint:
    """An endpoint as results hold it, without its key."""
    return CheckedEndpoint(url=endpoint.url, model=endpoint.model, top=endpoint.top)


def _compared(endpoint: Endpoint, reference: Reference, question: ChatQuestion) -> TokenComparison:
    try:
        made = reference.compared(question.messages, endpoint.top_tokens(question.messages))
    except KvfoldError as refused:
        raise KvfoldError(f"{question.where}: {refused}") from refused
    ours, theirs = made.read
    if ours is not None and theirs is not None and ours != theirs:
        raise KvfoldError(
            f"{question.where}: the endpoint reads {ours} tokens, the reference {theirs}: they "
            "have other tokenizers or chat templates"
        )
    return made


def _notes(kl: Array, agrees: Array) -> list[str]:
    """Sentences on what limits the result."""
    if kl.max() > UNSEEN or not agrees.all():
        return []
    return ["no difference was seen: the first token may not be read from the engine's cache"]


def _estimate(of: Interval) -> IntervalEstimate:
    value, low, high = map(float, of)
    return IntervalEstimate(value=value, low=max(0.0, low), high=high)
