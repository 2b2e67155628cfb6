# SPDX-License-Identifier: Apache-2.0
"""What is imported when: public names on first use, torch not for help, versions or typos."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvfold
from kvfold.methods.registry import OWN

HEAVY = {"torch", "transformers", "kvfold.methods.base", "kvfold.methods", "matplotlib"}
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Imports in the code of pages.
SHOWN = re.compile(r"^from kvfold[\w.]* import [\w, ]+$", re.MULTILINE)


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


@pytest.mark.slow
def test_lazy_names_are_those_that_type_checkers_see() -> None:
    stub = ast.parse(Path(kvfold.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    seen = {
        alias.asname: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == kvfold._MODULES
    assert all(alias == getattr(kvfold, alias).__name__ for alias in seen)


def test_every_own_method_is_a_public_name() -> None:
    own = {cls for cls in kvfold.list_methods().values() if cls.__module__.startswith(OWN)}
    assert not {cls.__name__ for cls in own} - set(kvfold.__all__), "add them to __init__.pyi"
    assert all(getattr(kvfold, cls.__name__) is cls for cls in own)


def test_dir_lists_the_public_names() -> None:
    assert dir(kvfold) == sorted([*kvfold.__all__, "__version__"])
    assert {"SnapKV", "generate", "list_methods", "load"} <= set(dir(kvfold))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'SnapKW'"):
        kvfold.SnapKW  # noqa: B018


@pytest.mark.whole
def test_methods_and_generation_are_packages() -> None:
    modules_after(
        "import kvfold.methods.kivi, kvfold.generation.generate, kvfold\n"
        "assert callable(kvfold.generate) and 'kivi' in kvfold.list_methods()"
    )


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("run", "--help"), ("eval", "--help"), ("serve", "--help"), ("rnu",)],
    ids=" ".join,
)
def test_help_and_typos_import_no_torch(arguments: tuple[str, ...]) -> None:
    assert not command_imports(*arguments)


def test_the_library_does_not_import_the_command_line() -> None:
    root = Path(kvfold.__file__).parent
    programs = {root / "__main__.py"}
    library = {path for path in root.rglob("*.py") if "cli" not in path.relative_to(root).parts[:1]}
    found = [path for path in library - programs if "kvfold.cli" in path.read_text("utf-8")]
    assert not found


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    asked = {
        "_KVFOLD_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "kvfold t",
        "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "kvfold t",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    program = "import sys; sys.argv = ['kvfold']; from kvfold.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | asked
    )
    assert "tasks" in ran.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_pages_import_is_there(page: Path) -> None:
    for line in SHOWN.findall(page.read_text(encoding="utf-8")):
        exec(line, {})
