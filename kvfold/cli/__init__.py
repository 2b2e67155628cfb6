# SPDX-License-Identifier: Apache-2.0
"""Command line of kvfold: one module per command."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, signature
from io import TextIOWrapper
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

import kvfold
from kvfold.cli import (
    ask,
    bench,
    check,
    compress,
    demo,
    eval,
    fit,
    info,
    inspect,
    methods,
    report,
    run,
    serve,
    tasks,
)
from kvfold.errors import KvfoldError
from kvfold.terminal import errors

LESS_MEMORY = (
    "give less text, or where the command has them --prefill-chunk 2048, --dtype bfloat16, "
    "--device-map auto over several GPUs, or --device cpu"
)
BUDGETS, METHODS = ("--budget", "--budgets"), ("--method", "--methods")
# Options of kvfold by the names that other libraries have for them, and how they are given.
OTHER_NAMES = dict.fromkeys(("--ratio", "--compression-ratio", "--compression_ratio"), BUDGETS)
OTHER_NAMES["--press"] = METHODS
PLACES = ("--out", "-o", "--page", "--folder")
OF_COMPRESS = ("--system", "--method", "--budget", "--codec", "--level")
ADVICE = {
    "--budget": "budget is the part kept, --budget 0.6",
    "--budgets": "budgets are the parts kept, --budgets 0.6",
    "--method": "the method has a name, --method snapkv",
    "--methods": "methods have names, --methods snapkv",
}


class Commands(TyperGroup):
    """The command group. A KvfoldError ends a command with one line and exit code 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments, and notes them as they were given."""
        self.given = [*args]
        with _told():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; Ctrl-C ends it with exit code 130."""
        with warnings.catch_warnings(), _told():
            warnings.showwarning = _one_line
            try:
                _check_named(self.given)
                return super().invoke(ctx)
            except KeyboardInterrupt:
                errors().print("\nstopped")
                raise typer.Exit(130) from None


def _check_named(given: list[str]) -> None:
    """Raises KvfoldError for an empty place to write to, as of a variable that is not set.

    A Path would make it the folder ".".
    """
    for option in PLACES:
        if f"{option}=" in given or (option, "") in pairwise(given):
            raise KvfoldError(f"{option} is empty: give it a name")


@contextmanager
def _told() -> Iterator[None]:
    """Ends a command whose error is said in a line, with exit code 2; other errors pass."""
    try:
        yield
    except Exception as problem:
        told = _line(problem)
        if told is None:
            raise
        errors().print(Text(f"error: {told}", style="red"))
        raise typer.Exit(2) from None


def _line(problem: Exception) -> str | None:
    """Words for refusals, for a lack of memory and for wrong usage; None for any other error.

    An option that other libraries name otherwise is told kvfold's name.
    """
    if isinstance(problem, KvfoldError):
        return str(problem)
    # By name: --help needs no torch, and typer has had click's classes, and some of its own.
    names = {each.__name__ for each in type(problem).__mro__}
    if type(problem).__name__ == "OutOfMemoryError":
        return f"out of memory: {problem}; {LESS_MEMORY}"
    if "UsageError" not in names or "NoArgsIsHelpError" in names:
        return None
    wrong: Any = problem
    told = " ".join(wrong.format_message().replace("Value error, ", "").split())
    if wrong.ctx is None:
        return told
    option = str(getattr(wrong, "option_name", None))
    known = {each for option in wrong.ctx.command.params for each in option.opts}
    found = [each for each in OTHER_NAMES.get(option, ()) if each in known]
    if found:
        return f"there is no {option}: {ADVICE[found[0]]}"
    if wrong.ctx.info_name == "ask" and option in OF_COMPRESS:
        return f"there is no {option}: it was chosen by kvfold compress, and the file holds it"
    command = "" if wrong.ctx.parent is None else f" {wrong.ctx.info_name}"
    return f"{told.rstrip('.')} (see kvfold{command} -h)"


def _one_line(message: Warning | str, *about: Any, **options: Any) -> None:
    """Prints a warning in one line, without file and line number."""
    errors().print(Text(f"warning: {message}", style="yellow"))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvfold {kvfold.__version__}")
        raise typer.Exit


def _import(modules: list[str] | None) -> None:
    from kvfold.methods.registry import import_methods

    for module in modules or ():
        import_methods(module)


Modules = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        callback=_import,
        is_eager=True,
        help="Import methods of your own: a module's name or a .py file; may be repeated.",
    ),
]


def takes_methods(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the option `--import`, whose modules are imported before it runs."""

    @wraps(command)
    def importing(**options: Any) -> None:
        del options["modules"]
        command(**options)

    own = signature(command, eval_str=True)
    option = Parameter("modules", Parameter.KEYWORD_ONLY, default=None, annotation=Modules)
    parameters = [*own.parameters.values(), option]
    importing.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    importing.__annotations__ = command.__annotations__ | {"modules": Modules}
    return importing


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")
    ] = False,
) -> None:
    """A KV cache that stays small: compression methods for Hugging Face models, measured."""


PLAIN = (demo, info, tasks, report)  # they run no methods of the user's own
# In the order of the help.
for _module in (
    demo, run, compress, ask, info, fit, eval, check, inspect, methods, tasks, bench, report, serve,
):  # fmt: skip
    _run = _module.command if _module in PLAIN else takes_methods(_module.command)
    app.command(_module.__name__.rpartition(".")[2])(_run)


def main() -> None:
    """Entry point of the `kvfold` program; what the system refuses ends it with exit code 2."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # of characters that its encoding lacks
    try:
        app()
    except OSError as refused:
        errors().print(Text(f"error: {refused}", style="red"))
        sys.exit(2)
