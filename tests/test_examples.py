# SPDX-License-Identifier: Apache-2.0
"""The scripts in `examples/`, each run as a newcomer runs it, on the bundled model."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
LONGEST = 40
# The number hidden in the text, which a method that lost its entries cannot name.
NUMBER = "2241461"


def output_of(name: str, *arguments: str) -> list[str]:
    """The lines that a script prints."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_short_and_says_how_it_is_run(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST
    described = ast.get_docstring(ast.parse(text)) or ""
    assert described.endswith(f"python examples/{script.name} [MODEL]")


@pytest.mark.whole
def test_generate_answers_from_a_smaller_cache() -> None:
    answer, sizes = output_of("generate")
    assert NUMBER in answer
    compressed, full = (int(part.split(" ")[0].replace(",", "")) for part in sizes.split(", "))
    assert compressed < full / 2


@pytest.mark.whole
def test_compress_and_ask_answers_each_question_with_its_own_number() -> None:
    lines = output_of("compress_and_ask")
    assert len(lines) == 2
    for line, other in zip(lines, reversed(lines), strict=True):
        asked, answer = line.split("): ")
        number = asked.split("(")[1]
        assert number in answer and number not in other


@pytest.mark.whole
def test_own_method_works_with_options_and_with_kivi() -> None:
    sizes = dict(line.split(": ") for line in output_of("own_method"))
    stored = {name: int(text.split(" ")[0].replace(",", "")) for name, text in sizes.items()}
    assert list(stored) == ["value_norm", "value_norm:recent=64", "value_norm + kivi:bits=4"]
    assert stored["value_norm + kivi:bits=4"] < stored["value_norm"]


@pytest.mark.whole
def test_evaluate_own_data_finds_what_kvzip_keeps_and_random_eviction_loses() -> None:
    lines = output_of("evaluate_own_data")
    assert "full keeps all: 100 % right" in lines
    assert "kvzip keeps 0.3: 100 % right" in lines
    assert "random keeps 0.3: 0 % right" in lines


@pytest.mark.whole
def test_serve_and_ask_answers_and_stops() -> None:
    assert NUMBER in "".join(output_of("serve_and_ask"))


@pytest.mark.whole
def test_engine_policy_chooses_for_each_head_and_for_all() -> None:
    needs, own, one = output_of("engine_policy")
    assert needs.startswith("keydiff reads 0 queries")
    assert own.startswith("layer 0, head 0 keeps tokens [")
    kept, tokens, overlap = (int(part) for part in re.findall(r"\d+", one))
    assert kept == tokens // 4 and 0 < overlap < 100


@pytest.mark.whole
def test_a_script_takes_the_name_of_a_model() -> None:
    bundled = ROOT / "kvfold" / "bundled"
    assert len(output_of("own_method", str(bundled))) == 3
