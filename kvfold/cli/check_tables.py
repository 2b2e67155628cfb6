# SPDX-License-Identifier: Apache-2.0
"""Terminal tables of `kvfold check`."""

from __future__ import annotations

from rich.table import Table

from kvfold.checks.page import verdict as verdict
from kvfold.checks.result import CheckResult
from kvfold.cli.console import table


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
            f"{cell.kl.value:.2g}" + (" =" if cell.equal else ""),
            f"{cell.kl.low:.2g}–{cell.kl.high:.2g}",
            f"{cell.kl_p99.value:.2g}",
            f"{cell.agreement.value:.1%}",
            "" if answers is None else f"{answers.ratio.value:.2f}",
        )
    shown.caption = (
        "KL: mean, in nats; = is within the noise; agree: same likeliest token; length: of answers "
        "over the full cache's"
    )
    shown.caption_justify = "left"
    return shown


def spans_table(result: CheckResult) -> Table:
    """A row per cell and span: entries kept, effect left, and recall in answers to attacks."""
    names = ("kept", "effect left", "leaked", "leaked, full")
    shown = table("spans", "method", "budget", "span", *names, right=("budget", *names))
    for cell in result.cells:
        for name, span in cell.spans.items():
            leaked = cell.leakage.get(name)
            shown.add_row(
                cell.method,
                cell.budget or "",
                name,
                f"{span.kept:.0%}",
                "" if span.effect is None else f"{span.effect:.0%}",
                "" if leaked is None else f"{leaked.recall:.2f}",
                "" if leaked is None else f"{leaked.recall_full:.2f}",
            )
    return shown
