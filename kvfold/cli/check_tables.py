# SPDX-License-Identifier: Apache-2.0
"""Terminal tables of `kvfold check`."""

from __future__ import annotations

from rich.table import Table

from kvfold.checks.page import SPANS, span_rows
from kvfold.checks.page import bound_said as bound_said
from kvfold.checks.page import verdict as verdict
from kvfold.checks.result import CheckResult
from kvfold.evidence.tables import table

NEGLIGIBLE = 1e-5  # nats, far below any limit


def cells_table(result: CheckResult) -> Table:
    """A row per method and budget: distance to the full cache, and answer lengths."""
    names = ("kept", "KL", "95 %", "p99", "agree", "length")
    title = f"{result.prompts} prompts, {result.protocol.tokens} tokens; floor {result.floor:.1e}"
    shown = table(title, "method", "budget", *names, right=("budget", *names))
    for column in shown.columns:  # rather a method in two lines than a number
        column.no_wrap = column.justify == "right"
    shown.columns[0].min_width = 8
    for cell in result.cells:
        answers = cell.lengths
        shown.add_row(
            cell.method,
            cell.budget or "",
            f"{cell.kept:.1%}",
            _nats(cell.kl.value) + (" =" if cell.equal else ""),
            f"{_nats(cell.kl.low)}–{_nats(cell.kl.high)}",
            _nats(cell.kl_p99.value),
            f"{cell.agreement.value:.1%}",
            "" if answers is None else f"{answers.ratio.value:.2f}",
        )
    shown.caption = (
        f"KL: mean, in nats, ≈0 below {NEGLIGIBLE:g}; = is within the noise; agree: same likeliest "
        "token; length: of answers over the full cache's"
    )
    shown.caption_justify = "left"
    return shown


def _nats(kl: float) -> str:
    """A KL in a narrow column; check.json has all digits."""
    return "≈0" if 0 < kl < NEGLIGIBLE else f"{kl:.2g}"


def spans_table(result: CheckResult) -> Table:
    """A row per cell and span: entries kept, effect left, and recall in answers to attacks."""
    return table("spans", *SPANS, right=("budget", *SPANS[3:]), rows=span_rows(result))
