# SPDX-License-Identifier: Apache-2.0
"""The command line: one module for each command of `kvfold`."""

from __future__ import annotations

from typing import Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from kvfold.cli import ask, bench, compress, demo, eval, info, inspect, methods, report, run, serve
from kvfold.cli.console import errors
from kvfold.errors import KvfoldError


class Commands(TyperGroup):
    """The commands; what kvfold refuses ends them with one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KvfoldError as refused:
            errors().print(Text(f"error: {refused}", style="red"))
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands,
    help="A KV cache that stays small: compression methods for Hugging Face models, measured.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command("demo")(demo.command)
app.command("run")(run.command)
app.command("compress")(compress.command)
app.command("ask")(ask.command)
app.command("info")(info.command)
app.command("eval")(eval.command)
app.command("inspect")(inspect.command)
app.command("methods")(methods.command)
app.command("bench")(bench.command)
app.command("report")(report.command)
app.command("serve")(serve.command)


def main() -> None:
    """The `kvfold` program."""
    app()
