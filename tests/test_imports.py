# SPDX-License-Identifier: Apache-2.0
"""What is imported when: public names on first use, torch not for help, versions or typos."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvfold

HEAVY = {"torch", "transformers", "kvfold.method", "kvfold.methods", "matplotlib"}


def modules_after(code: str) -> set[str]:
    """The modules of a fresh interpreter that has run `code`."""
    program = f"import json, sys\n{code}\nprint(json.dumps(list(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout.splitlines()[-1]))


def command_imports(*arguments: str) -> set[str]:
    """The heavy modules that a command needs until it ends."""
    code = f"""
from kvfold.cli import main
sys.argv = ["kvfold", *{list(arguments)!r}]
try:
    main()
except SystemExit:
    pass
"""
    return modules_after(code) & HEAVY


def test_import_kvfold_imports_no_torch() -> None:
    assert not modules_after("import kvfold; dir(kvfold); kvfold.__version__") & HEAVY


def test_lazy_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(kvfold.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == kvfold._MODULES
    assert all(alias == getattr(kvfold, alias).__name__ for alias in seen)


def test_dir_lists_the_public_names() -> None:
    assert dir(kvfold) == sorted([*kvfold.__all__, "__version__"])
    assert {"SnapKV", "generate", "methods", "load"} <= set(dir(kvfold))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'SnapKW'"):
        kvfold.SnapKW  # noqa: B018


def test_functions_are_not_hidden_by_modules_of_their_name() -> None:
    modules_after(
        "import kvfold.generate, kvfold.methods.kivi, kvfold\n"
        "assert callable(kvfold.generate) and 'kivi' in kvfold.methods()\n"
        "from kvfold import generate, methods\n"
        "assert callable(generate) and callable(methods)"
    )


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("run", "--help"), ("eval", "--help"), ("serve", "--help"), ("rnu",)],
    ids=" ".join,
)
def test_help_and_typos_import_no_torch(arguments: tuple[str, ...]) -> None:
    assert not command_imports(*arguments)
