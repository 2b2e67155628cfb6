# SPDX-License-Identifier: Apache-2.0
"""`kvfold check`: tables, page, JSON, exit codes; bad input refused before a model is loaded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import kvfold
from tests.helpers.commands import kvfold_command, refused
from tests.helpers.registry import registry_restored

WORDS = ["the", "grass", "is", "green", "sky", "blue", "here", "we", "go", "there", "and", "back"]


def row(seed: int) -> dict[str, Any]:
    context = " ".join(random.Random(seed).choices(WORDS, k=20))
    return {"context": context, "question": "What is blue?", "spans": {"<b>start": (0, 9)}}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row(seed)) + "\n" for seed in range(4)))
    return path


@pytest.mark.slow
def test_a_certificate_is_exit_code_0_and_a_refusal_1(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["check", "bundled", str(prompts), "--tokens", "2", "--out", str(out)]
    good = kvfold_command(*arguments, "--methods", "kivi:bits=8")
    assert good.exit_code == 0, good.output
    assert "kivi:bits=8: certified: mean KL" in good.output
    assert "kivi:bits=8: no bound: 4 prompts are too few: give at least 48" in good.output
    table = good.stdout.splitlines()[:5]
    assert max(map(len, table)) <= 80 and "kivi:bits=8" in table[4], table
    result = kvfold.CheckResult.model_validate_json((out / "check.json").read_text())
    assert result.certified and result.prompts == 4
    page = (out / "index.html").read_text()
    assert "<script" not in page and "<b>start" not in page and "&lt;b&gt;start" in page
    assert result.digest in page and result.certificates[0].digest in page
    assert kvfold_command(*arguments, "--methods", "kivi:bits=8").exit_code == 0
    for other in (
        ["--seed", "1"],
        ["--tolerance", "0.1"],
        ["--error", "0.2"],
        ["--methods", "full"],
    ):
        said = refused(*arguments, "--methods", "kivi:bits=8", *other)
        assert "check.json is there already, made with" in said and "--force" in said
    for change, what in (("prompts", "other prompts"), ("model", "another model")):
        options = ["--dtype", "bfloat16"] if change == "model" else []
        before = prompts.read_text()
        if change == "prompts":
            prompts.write_text("".join(json.dumps(row(seed)) + "\n" for seed in range(5)))
        assert what in refused(*arguments, "--methods", "kivi:bits=8", *options)
        prompts.write_text(before)
    assert kvfold.CheckResult.model_validate_json((out / "check.json").read_text()) == result
    arguments += [
        "--methods",
        "keep_middle",
        "--budgets",
        "0.3",
        "--tolerance",
        "0",
        "--json",
        "--force",
    ]
    with registry_restored("tests.helpers.keep_middle"):
        wrong = kvfold_command(*arguments, "--import", "tests.helpers.keep_middle")
    assert wrong.exit_code == 1, wrong.output
    assert not json.loads(wrong.stdout)["certificates"][0]["certified"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", [], "prompts.jsonl is empty"),
        ('{"prompt": "one"}\n', [], "there is one prompt only"),
        ('{"text": "one"}\n', [], "prompts.jsonl:1: give"),
        (None, [], "there is no such file or folder"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', ["--methods", "snapkw"], "did you mean 'snapkv'"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', ["--methods", ","], "no methods"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', ["--budgets", "3"], "raise it to at least"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', ["--tolerance", "inf"], "the tolerance is inf"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', ["--error", "0"], "the error is 0"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', ["--error", "0.6"], "the error is 0.6"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', ["--budgets", ""], "an empty list"),
        ('{"prompt": "a", "x": ' + "1" * 5000 + "}", [], "prompts.jsonl:1: no JSON"),
        ('{"prompt": "a", "x": ' + "[" * 3000 + "]" * 3000 + "}", [], "prompts.jsonl:1: no JSON"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    text: str | None, options: list[str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text)
    assert message in refused("check", "no/model", str(path), *options)


def test_a_result_that_is_not_of_kvfold_is_not_replaced(prompts: Path, tmp_path: Path) -> None:
    given = ["check", "no/model", str(prompts), "--out", str(tmp_path)]
    (tmp_path / "check.json").write_text('{"my": "checks of kvfold"}')
    for options in ([], ["--force"]):
        assert "check.json is no result of `kvfold check`" in refused(*given, *options)
    (tmp_path / "check.json").write_text('{"kind": "kvfold check"}')
    assert "of another version of kvfold: replace it with --force" in refused(*given)


def test_a_folder_of_prompts_is_not_that_of_results(prompts: Path) -> None:
    message = refused("check", "no/model", str(prompts.parent), "--out", f"{prompts.parent}/.")
    assert "is read, and would be overwritten: choose another --out" in message
    assert [path.name for path in prompts.parent.iterdir()] == ["prompts.jsonl"]
