# SPDX-License-Identifier: Apache-2.0
"""Mutants are changes of one place of a function, and are what its calls run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.helpers.mutants import mutants_of, put_in
from tests.mutants import chosen

TEXT = '''
LIMIT = 7


def fits(size: int, most: "int" = 3, *, strict=True) -> bool:
    """É is two bytes."""
    held: "Held[3]" = [each for each in range(size) if not each % 2 and each != 0]
    return len(held) + 1 <= most
'''


def test_each_operator_and_constant_of_a_function_is_changed_once() -> None:
    found = {(each.old, each.new) for each in mutants_of(TEXT, "a.py")}
    assert found == {
        ("not ", ""), ("%", "+"), ("2", "3"), ("and", "or"), ("!=", "=="), ("0", "1"),
        ("+", "-"), ("1", "2"), ("<=", "<"),
    }  # fmt: skip
    assert len(list(mutants_of(TEXT, "a.py"))) == len(found)
    for each in mutants_of(TEXT, "a.py"):
        before, after = TEXT.splitlines(), each.source(TEXT).splitlines()
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_functions_that_are_loaded_run_the_changed_text(tmp_path: Path) -> None:
    path = tmp_path / "loaded.py"
    path.write_text(TEXT, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("loaded", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    kept = loaded.fits
    assert kept(5)  # 2 and 4 are held
    (stricter,) = (each for each in mutants_of(TEXT, str(path)) if each.old == "<=")
    assert put_in(stricter.source(TEXT), str(path)) == 1
    assert not kept(5)


@pytest.mark.slow
def test_a_seed_draws_the_same_mutants_of_the_core() -> None:
    drawn = chosen(9, 1)
    assert drawn == chosen(9, 1) != chosen(9, 2)
    assert all(each.file.startswith("kvfold/") for each in drawn)
