# SPDX-License-Identifier: Apache-2.0
"""The HTML page of a check: one static file without scripts or network access."""

from __future__ import annotations

from html import escape

from kvfold.checks.chart import chart, legend
from kvfold.checks.groups import confidence
from kvfold.checks.result import (
    EVERYTHING,
    Certificate,
    CheckCell,
    CheckLimits,
    CheckResult,
    RiskBound,
)
from kvfold.evidence import page as pages
from kvfold.evidence.estimates import IntervalEstimate
from kvfold.evidence.page import facts, filled, table, template

CELLS = (
    "method", "budget", "kept", "bytes", "mean KL", "99th percentile", "maximum", "agreement",
    "first", "perplexity", "length", "at limit",
)  # fmt: skip
SPANS = ("method", "budget", "part", "kept", "effect left", "leaked", "leaked, full")


def page(result: CheckResult) -> str:
    """The HTML of a result; names that users gave are text only."""
    subject, limits = result.subject, result.limits
    values = {
        "SUBJECT": escape(f"{subject.name}, {subject.dtype}"),
        "CLAIM": escape(claim(result)),
        "EVIDENCE": escape(evidence(result)),
        "TOLERANCE": f"{limits.mean_kl:g}",
        "P99": f"{limits.p99_kl:g}",
        "SHORTEST": f"{limits.shortest:g}",
        "LONGEST": f"{limits.longest:g}",
        "CERTIFICATES": "".join(map(_certificate, result.certificates)),
        "BOUNDS": "".join(_bound(each, limits) for each in result.bounds),
        "CLIP": f"{limits.clip:g}",
        "CONFIDENCE": confidence(limits.error),
        "CHART": chart(result),
        "LEGEND": legend(result),
        "CELLS": table("", CELLS, map(_cell, result.cells)),
        "SPANS": _spans(result),
        "FACTS": _facts(result),
    }
    said = f"{claim(result)} {evidence(result)}"
    return pages.page("checks", f"{subject.name}: kvfold check", said, values)


def claim(result: CheckResult) -> str:
    """The headline: the smallest certified part, or that there is none."""
    best = smallest(result)
    if best is None or best.held_out is None:
        return "No method stays within the limits on these prompts."
    if best.held_out.kept == 1:
        return f"{best.method} stays within the limits on these prompts."
    return f"{best.method} may keep {best.held_out.kept:.0%} of the cache on these prompts."


def smallest(result: CheckResult) -> Certificate | None:
    """The certificate of the smallest part; None without any."""
    sized = [each for each in result.certificates if each.certified and each.held_out]
    kept = lambda each: each.held_out.kept if each.held_out else 1.0  # noqa: E731
    return min(sized, key=kept, default=None)


def evidence(result: CheckResult) -> str:
    """The sentence below the headline."""
    refused = [each.method for each in result.certificates if not each.certified]
    fewest, most = result.prompt_tokens
    parts = [
        f"{result.prompts} prompts of {fewest:,} to {most:,} tokens, no labels needed.",
        f"Refused: {', '.join(refused)}." if refused else "All methods are certified.",
        *(f"{note[0].upper()}{note[1:]}." for note in result.notes),
    ]
    return " ".join(parts)


def verdict(of: Certificate) -> str:
    """A certificate as one line."""
    if not of.certified:
        return f"{of.method}: no certificate: {of.reason}"
    held = of.held_out
    assert held is not None
    at = f" at {of.budget}, {held.kept:.0%} kept" if of.budget else ""
    length = f", length {held.lengths.ratio.value:.2f}" if held.lengths else ""
    return (
        f"{of.method}: certified{at}: mean KL {held.kl.value:.3g}, 99th percentile "
        f"{held.kl_p99.value:.2g}, agreement {held.agreement.value:.1%}{length} on "
        f"{held.prompts} held-out prompts"
    )


def _certificate(of: Certificate) -> str:
    name, _, said = verdict(of).partition(": ")
    sign = '<b class="yes">✓ certified</b>' if of.certified else '<b class="no">✗ refused</b>'
    hashed = f"<code>{of.digest}</code>"
    return f"<li>{sign} {escape(name)}: {escape(said)}{hashed}</li>"


def bound_said(of: RiskBound, limits: CheckLimits) -> str:
    """A bound as one line."""
    if not of.confirmed:
        return f"{of.method}: no bound: {of.reason}"
    at = f" at {of.budget}, {of.kept:.0%} kept" if of.budget else ""
    groups = "; ".join(
        f"{'' if name == EVERYTHING else f'{name}: '}{group.loss:.3g} on {group.prompts} prompts"
        for name, group in of.groups.items()
    )
    return (
        f"{of.method}: bounded{at}: mean KL clipped at {limits.clip:g} at most {limits.mean_kl:g}, "
        f"with {confidence(limits.error)} confidence (measured {groups})"
    )


def _bound(of: RiskBound, limits: CheckLimits) -> str:
    name, _, said = bound_said(of, limits).partition(": ")
    sign = '<b class="yes">✓ bounded</b>' if of.confirmed else '<b class="no">✗ no bound</b>'
    return f"<li>{sign} {escape(name)}: {escape(said)}</li>"


def _cell(of: CheckCell) -> list[str]:
    """A row with the columns `CELLS`, as HTML."""
    answers = of.lengths
    return [
        escape(of.method),
        of.budget or "",
        f"{of.kept:.1%}",
        f"{of.bytes_ratio:.1%}",
        _estimate(of.kl, ".3g") + (" =" if of.equal else ""),
        _estimate(of.kl_p99, ".2g"),
        f"{of.kl_max:.2g}",
        _estimate(of.agreement, ".1%"),
        f"{of.first_disagreement:g}",
        _estimate(of.perplexity_ratio, ".3g"),
        "" if answers is None else _estimate(answers.ratio, ".2f"),
        "" if answers is None else f"{answers.at_limit:.0%} / {answers.at_limit_full:.0%}",
    ]


def _estimate(of: IntervalEstimate, form: str) -> str:
    return f"{of.value:{form}} <small>{of.low:{form}} to {of.high:{form}}</small>"


def span_rows(result: CheckResult) -> list[list[str]]:
    """Rows with the columns `SPANS`, as texts; none without spans."""
    rows = []
    for cell in result.cells:
        for name, span in cell.spans.items():
            leaked = cell.leakage.get(name)
            recalls = ("", "") if leaked is None else (leaked.recall, leaked.recall_full)
            rows.append([
                cell.method,
                cell.budget or "",
                name,
                f"{span.kept:.1%}",
                "" if span.effect is None else f"{span.effect:.0%}",
                *(f"{recall:.2f}" if recall != "" else "" for recall in recalls),
            ])  # fmt: skip
    return rows


def _spans(result: CheckResult) -> str:
    """The section on spans, if a prompt has any."""
    lines = [[escape(text) for text in row] for row in span_rows(result)]
    if not lines:
        return ""
    return filled(template("checks", "spans.html"), {"TABLE": table("names", SPANS, lines)})


def _facts(result: CheckResult) -> str:
    protocol, subject = result.protocol, result.subject
    versions = ", ".join(f"{name} {number}" for name, number in result.setup.versions.items())
    told = "together with their questions" if protocol.question_aware else "before their questions"
    return facts({
        "Model": f"{subject.name}, {subject.dtype}, attention {subject.attention}",
        "Weights": f"{subject.weights}, configuration {subject.config}",
        "Compression": f"contexts {told}; prompts without a question as a whole",
        "Forced tokens": f"{protocol.tokens}; free answers at most {protocol.limit}",
        "Noise floor": f"{result.floor:.2e} nats per token",
        "Leaked words": protocol.words,
        "Seed": str(protocol.seed),
        "Machine": f"{result.setup.gpu or result.setup.cpu}; {versions}",
        "Commit": result.commit or "",
        "Prompts": result.prompts_digest,
        "Result": result.digest,
    })  # fmt: skip
