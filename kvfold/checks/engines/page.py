# SPDX-License-Identifier: Apache-2.0
"""What a check of an engine found, in words and as an HTML page without scripts."""

from __future__ import annotations

import math
from html import escape

from kvfold.checks.engines.result import CheckedEndpoint, EngineCheckResult
from kvfold.checks.groups import confidence
from kvfold.checks.result import EVERYTHING
from kvfold.eval.run.cell import EvaluatedModel
from kvfold.evidence.estimates import IntervalEstimate
from kvfold.evidence.page import facts, filled, table, template, whole

COLUMNS = ("measured", "value", "95 % from", "to")


def rows(result: EngineCheckResult) -> list[list[str]]:
    """Rows with the columns `COLUMNS`, as texts."""
    return [
        ["agreement of the first token", *_cells(result.agreement, ".1%")],
        ["mean KL, lower bound", *_cells(result.kl_at_least, ".3g")],
        ["largest KL, lower bound", f"{result.kl_at_least_max:.3g}", "", ""],
        ["covered probability", f"{result.covered:.1%}", "", ""],
    ]


def verdict(result: EngineCheckResult) -> str:
    """The certificate as one line."""
    if not result.certified:
        return f"no certificate: {result.reason}"
    groups = "; ".join(
        f"{'' if name == EVERYTHING else f'{name}: '}at most {_rounded_up(group.bound):.1%} "
        f"(measured {group.loss:.1%} on {group.prompts} prompts)"
        for name, group in result.groups.items()
    )
    sure = confidence(result.limits.error)
    return f"certified by agreement, with {sure} confidence: other first tokens {groups}"


def _rounded_up(bound: float) -> float:
    """An upper bound as a part of 1, of whole thousandths: shown smaller, it would not hold."""
    return math.ceil(bound * 1000) / 1000


def page(result: EngineCheckResult) -> str:
    """The HTML of a result."""
    subject = f"{result.endpoint.model} at {result.endpoint.url}"
    claim = f"The first token agrees on {result.agreement.value:.1%} of the prompts."
    notes = [f"{note[0].upper()}{note[1:]}." for note in result.notes]
    evidence = " ".join([f"{result.prompts} prompts, no labels needed.", *notes])
    yes, no = '<b class="yes">✓ certified</b>', '<b class="no">✗ refused</b>'
    hashed = f"<code>{result.digest}</code>"
    values = {
        "SUBJECT": escape(subject),
        "CLAIM": escape(claim),
        "EVIDENCE": escape(evidence),
        "CONFIDENCE": confidence(result.limits.error),
        "TOLERANCE": f"{result.limits.differing:g}",
        "CERTIFICATE": f"<li>{yes if result.certified else no} {escape(verdict(result))}{hashed}",
        "TABLE": table("", COLUMNS, rows(result)),
        "FACTS": _facts(result),
    }
    body = filled(template("checks", "engine.html"), values)
    style = template("checks", "page.css")
    return whole(f"{result.endpoint.model}: kvfold check", f"{claim} {evidence}", style, body)


def name_of(subject: CheckedEndpoint | EvaluatedModel) -> str:
    """An endpoint or model in words."""
    if isinstance(subject, EvaluatedModel):
        return f"{subject.name}, {subject.dtype}, in transformers"
    return f"{subject.model} at {subject.url}, {subject.top} likeliest tokens"


def _cells(of: IntervalEstimate, form: str) -> list[str]:
    return [f"{each:{form}}" for each in (of.value, of.low, of.high)]


def _facts(result: EngineCheckResult) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result.setup.versions.items())
    return facts({
        "Endpoint": name_of(result.endpoint),
        "Reference": name_of(result.reference),
        "Asked": "one greedy token after each prompt, in the chat template",
        "Here": f"{result.setup.gpu or result.setup.cpu}; {versions}",
        "Commit": result.commit or "",
        "Prompts": result.prompts_digest,
        "Result": result.digest,
    })  # fmt: skip
