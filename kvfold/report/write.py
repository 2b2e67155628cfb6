# SPDX-License-Identifier: Apache-2.0
"""Files of a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

from kvfold.eval.run.cell_result import CellResult
from kvfold.evidence.pictures import save
from kvfold.report.board import Board, boards, slugs, titles
from kvfold.report.headline import Headline, headline
from kvfold.report.page import page
from kvfold.report.pictures import needles, pareto
from kvfold.report.style import LineStyle, styles
from kvfold.report.summary import rows
from kvfold.report.tables import by_task, markdown, to_csv
from kvfold.writing import write_text


class ReportFiles(NamedTuple):
    """Paths of the files, the page first, and each board's headline by its title."""

    paths: list[Path]
    claims: dict[str, Headline]


def texts(every: Sequence[Board], line_styles: dict[str, LineStyle]) -> dict[str, str]:
    """The page and the tables, by the names of their files."""
    return {
        "index.html": page(every, line_styles),
        "report.md": markdown(every),
        "tasks.md": by_task(every),
    }


def write(results: Sequence[CellResult], folder: Path) -> ReportFiles:
    """Writes page, tables and figures of `results` into `folder`; raises OSError or KvfoldError."""
    folder.mkdir(parents=True, exist_ok=True)
    every = boards(results)
    line_styles = styles_of(every)
    paths = []
    for name, text in (texts(every, line_styles) | {"records.csv": to_csv(results)}).items():
        paths.append(folder / name)
        write_text(paths[-1], text)
    for board, part in zip(every, slugs(titles(every)), strict=True):
        if board.scored or board.perplexities:
            drawn = pareto(board, line_styles)
            paths += [folder / f"pareto-{part}.png", folder / f"pareto-{part}.svg"]
            save(drawn, paths[-2], dpi=130)
            with matplotlib.rc_context({"svg.hashsalt": part}):
                save(drawn, paths[-1], metadata={"Date": None})
        maps = needles(board.scored, line_styles)
        for name, figure in zip(slugs(list(maps)), maps.values(), strict=True):
            paths.append(folder / f"needles-{name}-{part}.png")
            save(figure, paths[-1], dpi=130)
    claims = {
        title: headline(board.overall(), board.when)
        for board, title in zip(every, titles(every), strict=True)
    }
    return ReportFiles(paths, claims)


def styles_of(every: Sequence[Board]) -> dict[str, LineStyle]:
    """A style for every method of the boards."""
    return styles([row for board in every for row in board.overall() + rows(board.perplexities)])
