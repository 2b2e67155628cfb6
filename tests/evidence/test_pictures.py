# SPDX-License-Identifier: Apache-2.0
"""Names with $ in every figure: shown as they are, where mathematics would fail."""

from __future__ import annotations

import io

import pytest
import torch
from matplotlib.figure import Figure

from kvfold.evidence.pictures import plain
from kvfold.inspect.kept import kept_figure
from kvfold.report import summary
from kvfold.report.board import boards
from kvfold.report.pictures import needles, pareto
from kvfold.report.style import styles
from tests.helpers.reports import known, made

# Between the two $ is no formula: matplotlib raises ValueError for it.
NAME = r"a$\b{$"


@pytest.mark.parametrize("name", [NAME, "a", "$", "$x$", r"a\$b$", "a$b$c$"])
def test_a_plain_name_is_no_mathematics(name: str) -> None:
    drawn = Figure()
    text = drawn.text(0, 0, plain(name))
    said, math = text._preprocess_math(text.get_text())
    assert said == name and not math
    drawn.savefig(io.BytesIO())


def test_the_figures_of_a_report_are_drawn() -> None:
    results = [
        made(task=NAME, group=NAME, by={"depth": {"0.0": known(1, 0)}}, haystack=NAME),
        made(NAME, "0.2", task=NAME, group=NAME, by={"depth": {"0.0": known(1, 0)}}),
    ]
    results[1] = results[1].model_copy(
        update={"cell": results[1].cell.model_copy(update={"budget": NAME})}
    )
    chosen = styles(summary.rows(results))
    (board,) = boards(results)
    pareto(board, chosen).savefig(io.BytesIO())
    for drawn in needles(results, chosen).values():
        drawn.savefig(io.BytesIO())


def test_the_figure_of_kept_entries_is_drawn() -> None:
    drawn = kept_figure({NAME: [[[torch.arange(4)]]]}, 8)
    drawn.savefig(io.BytesIO())
    assert drawn.axes[0].get_title("left") == plain(NAME)
