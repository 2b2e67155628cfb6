# SPDX-License-Identifier: Apache-2.0
"""`kvfold methods`: every name, one in full, and as JSON."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvfold
from tests.helpers.commands import kvfold_command, refused, run_json
from tests.helpers.tokenizers import PROMPT, tiny_llama, word_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


def test_methods_lists_every_name_within_100_columns() -> None:
    result = kvfold_command("methods")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 100
    named = {line.split()[0] for line in lines if re.match(r"  \w", line)}
    assert named >= set(kvfold.list_methods())


def test_methods_shows_one_in_full() -> None:
    result = kvfold_command("methods", "snapkv_official")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "The prompt's last queries vote" in shown and "arXiv 2404.14469" in shown
    assert kvfold.SnapKV.formula in shown
    assert re.search(r"window int 64 last queries that vote", shown)
    assert "did you mean 'snapkv'? `kvfold methods`" in refused("methods", "snapkb")
    assert run_json("methods", "tova")["formula"] == kvfold.TOVA.formula


@pytest.mark.slow
def test_methods_and_context_files_as_json(folder: Path, tmp_path: Path) -> None:
    listed = {method["name"]: method for method in run_json("methods")}
    assert set(listed) == set(kvfold.list_methods())
    assert listed["snapkv"]["defaults"]["window"] == 32
    text, file = tmp_path / "text.txt", tmp_path / "text.kvfold"
    text.write_text(PROMPT)
    made = run_json("compress", str(folder), str(text), "--method", "knorm", "--budget", "20")
    assert made["file"] == str(file) and made["bytes"] == file.stat().st_size
    assert made["stats"]["kept"] == [[[20, 20]]] * 2
    assert [layer["kept"] for layer in run_json("info", str(file))["layers"]] == [[20, 20]] * 2
    ask = ("ask", str(folder), str(file), "the sky is")
    assert run_json(*ask)["answer"] in " ".join(kvfold_command(*ask).output.split())
    text.write_text(PROMPT + " again")
    both = run_json("compress", str(folder), str(text), str(folder / "config.json"), "-o",
                    str(tmp_path), "--method", "full")  # fmt: skip
    assert sorted(Path(one["file"]).name for one in both) == ["config.kvfold", "text.kvfold"]


def test_methods_shows_one_with_its_options_set() -> None:
    shown = " ".join(kvfold_command("methods", "snapkv:window=16").output.split())
    assert re.search(r"window int 16 last queries that vote", shown)
    assert "snapkv + kivi is several methods: name one of them" in refused(
        "methods", "snapkv + kivi"
    )
