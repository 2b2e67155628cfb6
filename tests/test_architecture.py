# SPDX-License-Identifier: Apache-2.0
"""The plan of the house: no import upwards, no circle at all, nothing too long, no name twice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.helpers.import_graph import MODULES, circles, imports, nodes, text

# From the foundation up: a wing imports its own floor's modules and those of the floors below.
FLOORS = (
    ("errors", "budget", "interruption", "terminal", "reading", "writing"),
    ("evidence",),
    ("kernels",),
    ("store",),
    ("fitted.numbers",),
    ("observers",),
    ("methods",),
    ("codecs",),
    ("hf",),
    ("bundled", "loading"),
    ("fitted",),
    ("attention",),
    ("cache",),
    ("policies",),
    ("generation",),
    ("contexts",),
    ("measure",),
    ("jobs",),
    ("eval", "inspect", "report", "bench", "serve", "checks", "fitted.fitting"),
    ("fit",),
    ("cli",),
    ("__main__",),
)
FLOOR = {wing: number for number, wings in enumerate(FLOORS) for wing in wings}
LINES, FUNCTION_LINES = 400, 60


def wing(module: str) -> str:
    """The wing of a module, or a part of one that has a floor of its own."""
    parts = module.split(".")[1:]
    names = (".".join(parts[:count]) for count in range(len(parts), 1, -1))
    return next((name for name in names if name in FLOOR), parts[0])


@pytest.mark.slow
def test_nothing_imports_upwards() -> None:
    wrong = {}
    for module in set(MODULES) - {"kvfold"}:
        own = FLOOR[wing(module)]
        at_home = own in (FLOOR["errors"], FLOOR["loading"], FLOOR["eval"])
        wrong[module] = {
            name
            for name in imports(MODULES[module])
            if FLOOR[wing(name)] > own
            or (FLOOR[wing(name)] == own and wing(name) != wing(module) and not at_home)
        }
    assert not {module: names for module, names in wrong.items() if names}


def test_there_are_no_circles_of_files_lazy_and_typed_imports_counted() -> None:
    assert circles({name: imports(path) for name, path in MODULES.items()}) == []


def test_there_are_no_circles_of_wings() -> None:
    graph: dict[str, set[str]] = {}
    for name in set(MODULES) - {"kvfold"}:
        graph.setdefault(wing(name), set()).update(map(wing, imports(MODULES[name])))
    assert circles(graph) == []


def test_circles_are_found_as_by_hand() -> None:
    graph = {"a": "b", "b": "ca", "c": "d", "d": "ec", "e": "f", "f": "", "g": "g"}
    assert {*circles(graph)} == {frozenset("ab"), frozenset("cd")}


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in sorted(MODULES.items()):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_no_module_is_too_long() -> None:
    assert not {name for name, path in MODULES.items() if text(path).count("\n") > LINES}


def test_no_function_is_too_long() -> None:
    functions = (
        (module, node)
        for module, path in MODULES.items()
        if wing(module + ".") != "cli"  # options of commands are parameters, one a line
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        # One launch is one function, whose arguments are pointers, strides and constants.
        and not any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    )
    assert not {(module, node.name) for module, node in functions if _lines(node) > FUNCTION_LINES}


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, without its docstring."""
    documented = ast.get_docstring(function) is not None
    first = function.body[1 if documented and len(function.body) > 1 else 0].lineno
    signature = function.body[0].lineno - function.lineno
    return (function.end_lineno or first) - first + 1 + signature


# Records that change, each in its own file alone; frozen ones cannot, and others follow.
OWNED = (
    "LayerState",
    "Barrier",
    "OpenForward",
    "Phase",
    "ModelBinding",
    "CacheParts",
    "CompressedCache",
    "LogicalSequence",
)


def assigned(path: Path) -> set[str]:
    """Names of the attributes that a file assigns, those of `self` left out."""
    targets = (node for node in nodes(path) if isinstance(node, ast.Attribute))
    stored = (node for node in targets if isinstance(node.ctx, ast.Store))
    return {node.attr for node in stored if not _is_self(node.value)}


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def fields_of(path: Path) -> dict[str, set[str]]:
    """Fields of a file's classes: those that their body annotates, and that `__init__` assigns."""
    return {node.name: _fields(node) for node in nodes(path) if isinstance(node, ast.ClassDef)}


def _fields(record: ast.ClassDef) -> set[str]:
    annotated = (n.target for n in record.body if isinstance(n, ast.AnnAssign))
    fields = {target.id for target in annotated if isinstance(target, ast.Name)}
    made = [n for n in record.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    inside = (n for function in made for n in ast.walk(function) if isinstance(n, ast.Attribute))
    return fields | {n.attr for n in inside if isinstance(n.ctx, ast.Store) and _is_self(n.value)}


def test_fields_of_a_record_are_assigned_in_its_own_file_alone() -> None:
    declared = {path: fields_of(path) for path in MODULES.values()}
    written = {path: assigned(path) for path in MODULES.values()}
    homes = {name: path for path, of in declared.items() for name in of if name in OWNED}
    assert {*homes} == {*OWNED}
    for name, home in homes.items():
        elsewhere = {
            path.name: sorted(written[path] & declared[home][name] - set().union(*of.values()))
            for path, of in declared.items()
            if path != home
        }
        assert not {file: names for file, names in elsewhere.items() if names}, name
