# SPDX-License-Identifier: Apache-2.0
"""Option `--import MODULE` of the commands that take a method."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer


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

    own = inspect.signature(command, eval_str=True)
    option = inspect.Parameter(
        "modules", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Modules
    )
    parameters = [*own.parameters.values(), option]
    importing.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    importing.__annotations__ = command.__annotations__ | {"modules": Modules}
    return importing
