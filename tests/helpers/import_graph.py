# SPDX-License-Identifier: Apache-2.0
"""Imports between the files of kvfold by their syntax trees, and the circles that they make."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import kvfold

ROOT = Path(kvfold.__file__).parent
Graph = Mapping[str, Iterable[str]]


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ("kvfold", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(text(path))))


@cache
def imports(path: Path) -> set[str]:
    """The modules of kvfold that a file imports: at its top, inside functions, or for its types."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvfold":
            assert not node.level, f"{path} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else str(node.module))
    return found - {"kvfold"}


def circles(graph: Graph) -> list[frozenset[str]]:
    """Strongly connected components of two nodes or more, by Tarjan's algorithm."""
    number: dict[str, int] = {}
    least: dict[str, int] = {}
    open_: list[str] = []
    found: list[frozenset[str]] = []

    def visit(node: str) -> None:
        number[node] = least[node] = len(number)
        open_.append(node)
        for other in graph.get(node, ()):
            if other not in number:
                visit(other)
            if other in open_:
                least[node] = min(least[node], least[other])
        if least[node] == number[node]:
            circle = frozenset(open_[open_.index(node) :])
            del open_[open_.index(node) :]
            if len(circle) > 1:
                found.append(circle)

    for node in graph:
        if node not in number:
            visit(node)
    return found
