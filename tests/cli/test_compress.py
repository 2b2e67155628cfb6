# SPDX-License-Identifier: Apache-2.0
"""`kvfold compress`: half where no budget is given; other files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvfold.cli import app
from tests.helpers.commands import refused
from tests.helpers.tokenizers import PROMPT, tiny_llama, word_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


def test_compress_keeps_half_where_no_budget_is_given(folder: Path, tmp_path: Path) -> None:
    piped = CliRunner().invoke(
        app,
        ["compress", str(folder), "-", "-o", str(tmp_path / "a.kvfold"), "--method", "knorm",
         "--json"],
        input=PROMPT,
    )  # fmt: skip
    assert piped.exit_code == 0, piped.output
    assert json.loads(piped.stdout)["stats"]["budget"] == "0.5 of the tokens seen"
    assert "give --out" in refused("compress", str(folder), "-", "--method", "knorm")


def test_what_is_no_context_file_is_called_that(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The sky is blue. " * 9)
    assert "it is no context file; make one with `kvfold compress`" in refused(
        "ask", "m", str(text), "q"
    )
    assert "there is no such file" in refused("info", str(tmp_path / "absent.kvfold"))
