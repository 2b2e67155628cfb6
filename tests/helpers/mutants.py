# SPDX-License-Identifier: Apache-2.0
"""Mutants of a file: one changed operator or constant of a function's body each."""

from __future__ import annotations

import ast
import gc
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType, FunctionType

SWAPPED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+",
    "*": "+", "//": "*", "/": "*", "%": "+", "&": "|", "|": "&", "and": "or", "or": "and",
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Mutant:
    """`old` text at an offset, in bytes, of a file's line, and what stands there instead."""

    file: str
    line: int
    column: int
    old: str
    new: str

    def source(self, text: str) -> str:
        """The file's text with the change."""
        lines = text.encode().splitlines(keepends=True)
        line, end = lines[self.line - 1], self.column + len(self.old.encode())
        lines[self.line - 1] = line[: self.column] + self.new.encode() + line[end:]
        return b"".join(lines).decode()


def mutants_of(text: str, file: str) -> list[Mutant]:
    """All mutants of the bodies of a file's functions, in their order."""
    found, lines = [], text.encode().splitlines()
    for node in _of_functions(ast.parse(text)):
        if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            old = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
            new = str(node.value + 1 if type(node.value) is int else not node.value)
            found.append(Mutant(file, node.lineno, node.col_offset, old, new))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found.append(Mutant(file, node.lineno, node.col_offset, "not ", ""))
        for left, right in pairwise(_operands(node)):
            start = left.end_col_offset or 0
            between = lines[right.lineno - 1][start : right.col_offset].decode()
            old = between.strip(" ()")
            if left.end_lineno == right.lineno and old in SWAPPED:
                column = start + between.index(old)
                found.append(Mutant(file, right.lineno, column, old, SWAPPED[old]))
    return sorted(found)


def _operands(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    return node.values if isinstance(node, ast.BoolOp) else []


def _of_functions(tree: ast.AST) -> set[ast.AST]:
    """Nodes of functions' bodies, without annotations."""
    nodes, annotations = set[ast.AST](), set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            nodes.update(inner for part in node.body for inner in ast.walk(part))
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            annotations.update(ast.walk(part) if part else ())
    return nodes - annotations


def put_in(source: str, path: str) -> int:
    """Gives all loaded functions of a file the code of a changed text; their number."""
    codes, left = {}, [compile(source, path, "exec")]
    while left:
        code = left.pop()
        codes[code.co_qualname, code.co_firstlineno] = code
        left += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    gc.unfreeze()  # tests/conftest.py freezes what it has collected
    functions = [each for each in gc.get_objects() if type(each) is FunctionType]
    functions = [each for each in functions if each.__code__.co_filename == path]
    for each in functions:
        each.__code__ = codes[each.__code__.co_qualname, each.__code__.co_firstlineno]
    return len(functions)
