# SPDX-License-Identifier: Apache-2.0
"""`kvfold report`: evaluation records as tables, pictures and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvfold.cli.options import Json
from kvfold.cli.records import say_failures
from kvfold.errors import KvfoldError
from kvfold.evidence.outputs import check_own
from kvfold.terminal import messages, print_json
from kvfold.writing import check_folder, check_replaceable

PICTURES = ("pareto-*.png", "pareto-*.svg", "needles-*.png")
PAGE, BESIDE = "index.html", ("records.csv", "report.md", "tasks.md", *PICTURES)


def command(
    records: Annotated[
        list[Path], typer.Argument(help="Folders that `kvfold eval` wrote, or files of records.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", file_okay=False, help="Folder to write to.")
    ] = Path("kvfold-report"),
    as_json: Json = False,
) -> None:
    """Turn evaluation records into tables, Pareto pictures and one page."""
    screen = messages(as_json)
    with screen.status("importing torch and matplotlib"):
        from kvfold.report.load import load_results
        from kvfold.report.write import write
    check_folder(out)
    check_own(out / PAGE)
    check_replaceable(*(path for name in BESIDE for path in out.glob(name)))
    theirs = next((path for name in BESIDE for path in sorted(out.glob(name))), None)
    if theirs and not (out / PAGE).exists():
        raise KvfoldError(f"{theirs} is there without a report's {PAGE}: choose another --out")
    results = load_results(records)
    with screen.status(f"drawing {len(results):,} records"):
        try:
            written = write(results, out)
        except OSError as problem:
            raise KvfoldError(f"cannot write into {out}: {problem}") from problem
    if as_json:
        claims = {title: claim._asdict() for title, claim in written.claims.items()}
        print_json({"claims": claims, "files": [path.resolve() for path in written.paths]})
        say_failures(screen, results)
        return
    for title, claim in written.claims.items():
        screen.print(Text.assemble((title, "bold"), ": ", claim.claim))
        screen.print(Text(claim.evidence, style="dim"))
    for path in written.paths:
        screen.print(Text(str(path.resolve())), soft_wrap=True)
    say_failures(screen, results)
