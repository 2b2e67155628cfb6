# SPDX-License-Identifier: Apache-2.0
"""`kvfold info` and other commands on context files."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kvfold
from kvfold.loading import load as load_model
from tests.helpers.commands import kvfold_command, refused
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.tokenizers import word_tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def test_cold_bytes_are_those_that_loading_leaves_in_the_file(model, tokenizer, tmp_path):
    for method, path in (("recall", tmp_path / "a.kvfold"), ("full", tmp_path / "b.kvfold")):
        kvfold.compress(model, tokenizer, DOCUMENT, method).save(path)
        filed = kvfold.load(path, model, tokenizer).stats().cold.filed
        shown = json.loads(kvfold_command("info", str(path), "--json").output)
        assert shown["cold_bytes"] == filed and bool(filed) == (method == "recall")
        said = kvfold_command("info", str(path)).output
        assert ("cold bytes" in said) == (method == "recall")


@pytest.mark.slow
def test_commands(model, tokenizer, tmp_path):
    folder, text, path = tmp_path / "model", tmp_path / "a.txt", tmp_path / "a.kvfold"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text.write_text(DOCUMENT)
    made = kvfold_command(
        *("compress", str(folder), str(text), "--method", "snapkv", "--budget", "40")
    )
    assert made.exit_code == 0, made.output
    assert "kept in layers 0-3" in made.output and path.exists()
    shown = kvfold_command("info", str(path))
    assert shown.exit_code == 0 and "snapkv:window=" in shown.output
    assert "LlamaForCausalLM" in shown.output
    asked = kvfold_command("ask", str(folder), str(path), QUESTION, "--max-new-tokens", "8")
    assert asked.exit_code == 0, asked.output
    loaded = kvfold.load(path, *load_model(str(folder)))
    assert loaded.ask(QUESTION, max_new_tokens=8) in " ".join(asked.output.split())
    said = refused("ask", str(path), QUESTION)
    assert "made by a LlamaForCausalLM" in said and f"ask MODEL {path} QUESTION" in said
    assert "there is no question" in refused("ask", "bundled", str(path))
    path.write_bytes(path.read_bytes()[:-1])
    assert "cannot read" in refused("info", str(path))
    assert "cannot read" in refused("ask", "none", str(path), QUESTION)
    assert "no folder" in refused("compress", "none", str(text), "-o", str(tmp_path / "x" / "y"))
    assert "cannot read" in refused("compress", "none", str(tmp_path / "none.txt"))
