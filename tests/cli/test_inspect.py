# SPDX-License-Identifier: Apache-2.0
"""`kvfold inspect`: a page and pictures, never over others; refusals."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from kvfold.cli.inspect import PAGE, PICTURES
from tests.helpers.commands import refused
from tests.helpers.inspected import inspect


@pytest.mark.slow
def test_the_command_writes_a_page_and_pictures_and_never_over_them(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(["the", "sky", "is", "green"], k=120)))
    out = tmp_path / "out"
    arguments = ("--file", str(text), "--methods", "knorm,snapkv:window=8,kernel=3", "--out")
    result = inspect(*arguments, str(out), "--budget", "40")
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in out.iterdir()) == sorted([PAGE, *PICTURES])
    assert re.search(r"snapkv:window=8,kernel=3 +\d+\.\d%", result.output)
    assert "index.html" in result.output
    written = (out / PAGE).read_bytes()
    again = inspect(*arguments, str(out))
    assert again.exit_code == 2 and "already holds index.html" in again.stderr
    assert (out / PAGE).read_bytes() == written


def test_budgets_below_the_forced_entries_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvfold.cli.inspect._write", lambda *_: None)
    prompt = ("--prompt", "The sky is blue. " * 20)
    result = inspect(*prompt, "--methods", "snapkv:window=8,knorm", "--budget", "0.05")
    assert re.search(r"snapkv:window=8 +[\d.]+%\*", result.output)
    assert re.search(r"knorm +[\d.]+% ", result.output)
    assert "*: the budget leaves no room beside the forced set" in result.output


def test_without_a_folder_each_run_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvfold.cli.inspect._write", lambda folder, *_: (folder / PAGE).touch())
    for _ in range(2):
        result = inspect("--prompt", "The sky is blue. " * 20, "--methods", "knorm")
        assert result.exit_code == 0, result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kvfold-inspect", "kvfold-inspect-2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--file", "b"], "not both"),
        (["--prompt", " "], "the prompt is empty"),
        (["--file", "absent.txt"], "cannot read absent.txt"),
        (["--methods", "snapkw"], "did you mean 'snapkv'?"),
        (["--methods", ","], "no methods"),
        (["--budget", "1.5"], "at most 1.0"),
        (["--budget", "3", "--methods", "snapkv"], "raise it to at least"),
        (["--model", "no/such/model/here"], "cannot load"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = inspect(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_link_to_nothing_is_no_picture_to_write(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "lazy.png").symlink_to(tmp_path / "elsewhere.png")
    said = refused("inspect", "no/model", "--out", str(tmp_path / "out"))
    assert "already holds lazy.png" in said
    assert not (tmp_path / "elsewhere.png").exists()
