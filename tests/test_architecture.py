# SPDX-License-Identifier: Apache-2.0
"""The plan of the house: no import upwards, no circle, nothing too long, no name twice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvfold

ROOT = Path(kvfold.__file__).parent

# From the foundation up: a wing imports its own floor's modules and those of the floors below.
FLOORS = (
    ("errors", "budget", "interruption", "terminal", "reading", "writing"),
    ("kernels",),
    ("store",),
    ("methods",),
    ("codecs",),
    ("hf",),
    ("bundled", "loading"),
    ("attention",),
    ("cache",),
    ("policies",),
    ("generation",),
    ("contexts",),
    ("jobs",),
    ("eval", "inspect", "report", "bench", "serve", "checks", "fit"),
    ("cli",),
    ("__main__",),
)
FLOOR = {wing: number for number, wings in enumerate(FLOORS) for wing in wings}
LINES, FUNCTION_LINES = 400, 60


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ("kvfold", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path, *, at_import_only: bool = False) -> set[str]:
    """The modules of kvfold that a file imports; those inside functions only where asked for."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = _run_at_import(tree) if at_import_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvfold":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else str(node.module))
    return found - {"kvfold"}


def _run_at_import(tree: ast.Module) -> list[ast.AST]:
    """Statements that run when the module is imported."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            if not checking and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(node)
                waiting.append(node)
    return found


def wing(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"kvfold"}))
def test_nothing_imports_upwards(module: str) -> None:
    own = FLOOR[wing(module)]
    above = {name for name in imports(MODULES[module]) if FLOOR[wing(name)] > own}
    beside = {
        name
        for name in imports(MODULES[module])
        if FLOOR[wing(name)] == own and wing(name) != wing(module)
    }
    assert not above
    assert not beside or own in (FLOOR["errors"], FLOOR["loading"], FLOOR["eval"])


def test_there_are_no_circles() -> None:
    graph = {name: imports(path, at_import_only=True) for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " → ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in sorted(MODULES.items()):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert not {name: found for name, found in homes.items() if len(found) > 1}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_and_no_function_is_too_long(module: str) -> None:
    text = MODULES[module].read_text(encoding="utf-8")
    assert text.count("\n") <= LINES
    if wing(module + ".") == "cli":  # options of commands are parameters, one a line
        return
    functions = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        # One launch is one function, whose arguments are pointers, strides and constants.
        and not any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    )
    assert not {function.name for function in functions if _lines(function) > FUNCTION_LINES}


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, without its docstring."""
    documented = ast.get_docstring(function) is not None
    first = function.body[1 if documented and len(function.body) > 1 else 0].lineno
    signature = function.body[0].lineno - function.lineno
    return (function.end_lineno or first) - first + 1 + signature
