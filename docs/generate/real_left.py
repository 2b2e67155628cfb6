# SPDX-License-Identifier: Apache-2.0
"""Commands for the cells that the really trained model's published records lack:

    python -m docs.generate.real_left BOOK [FOLDER] [MODEL]

The arguments are those of `docs/results/run.sh`. One command for each task and length
runs the methods that have fewer samples than planned, at each of the budgets that one of them
lacks; `docs/generate/publish_real.py FOLDER` adds their records. `| bash` runs them one after the
other.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence

from docs.generate import publish_real, real_page
from docs.generate.made import RESULTS
from kvfold.eval.run.cell import FULL
from kvfold.eval.run.cell_result import CellResult
from kvfold.eval.run.plan import contenders
from kvfold.eval.run.run_folder import RECORDS
from kvfold.methods.registry import listed
from kvfold.report.load import load_results


def left(command: Sequence[str], results: Sequence[CellResult]) -> Iterator[list[str]]:
    """The part of one `kvfold eval` command that `results` lack, for each of its units."""
    counts = real_page.samples_of(results)
    for planned in publish_real.of_command(command):
        wanted = real_page.lacking(planned, counts)
        if not wanted:
            continue
        budgets = publish_real.option(command, "budgets").split(",")
        budgets = [one for one in budgets if any(one == budget for _, budget in wanted)] or budgets
        every = listed(publish_real.option(command, "methods"))
        methods = [one for one in every if one != FULL and wanted & own(one, budgets)]
        unit = planned.unit
        yield with_options(
            command,
            tasks=unit.task,
            lengths=str(unit.length),
            methods=",".join([FULL, *methods]),
            budgets=",".join(budgets),
        )


def own(method: str, budgets: Sequence[str]) -> set[tuple[str, str | None]]:
    """A method at its budgets, without the baselines."""
    return set(contenders([method], budgets)) - set(contenders([FULL], budgets))


def with_options(command: Sequence[str], **options: str) -> list[str]:
    """A copy of a command with other values of options that it has."""
    made = [*command]
    for name, value in options.items():
        if f"--{name}" in made:
            made[made.index(f"--{name}") + 1] = value
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("book", help="the text that needles are hidden in")
    parser.add_argument("folder", nargs="?", help="of the samples")
    parser.add_argument("model", nargs="?")
    given = [path for path in vars(parser.parse_args()).values() if path]
    results = load_results([RESULTS / RECORDS])
    for command in publish_real.commands(*given):
        for words in left(command, results):
            print(shlex.join(words))


if __name__ == "__main__":
    main()
