# SPDX-License-Identifier: Apache-2.0
"""Prompts from files and lists; each bad input is one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvfold.checks.prompts import prompts_of
from kvfold.errors import KvfoldError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def rows(path: Path, *found: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def test_a_folder_holds_texts_and_rows_in_order_of_name(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("one\n\ntwo\n")
    (tmp_path / "c.md").write_text("three")
    (tmp_path / "notes.csv").write_text("left alone")
    rows(tmp_path / "a.jsonl", {"context": "c", "question": "q", "id": 7}, {"messages": CHAT})
    first, second, third, fourth = prompts_of(tmp_path)
    assert (first.context, first.question) == ("c", "q")
    assert second.system == "Be brief." and second.messages[1].content == "Hello"
    assert (third.prompt, fourth.prompt) == ("one\n\ntwo", "three")


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "two"})
    (tmp_path / "a.jsonl").write_text(row, encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("one", encoding="utf-8-sig")
    assert [each.prompt for each in prompts_of(tmp_path)] == ["two", "one"]


def test_lists_hold_texts_and_rows_and_repeated_prompts_count_once() -> None:
    found = prompts_of(["one", {"prompt": "two", "spans": {"n": (0, 2)}}, "one"])
    assert [each.prompt for each in found] == ["one", "two"]
    assert found[1].spans == {"n": (0, 2)}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.txt", " \n", "a.txt is empty"),
        ("a.csv", "x", "in no known format"),
        ("a.jsonl", "{", "a.jsonl:1: no JSON"),
        ("a.jsonl", "[1]", "no object but list"),
        ("a.jsonl", '{"text": "x"}', 'a.jsonl:1: give "prompt", or'),
        ("a.jsonl", '{"context": "x"}', 'give "prompt", or "context" and "question"'),
        ("a.jsonl", '{"prompt": ""}', "field 'prompt'"),
        ("a.jsonl", '{"prompt": "x", "messages": [{"role": "user", "content": "y"}]}', "give"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "y"}]}', "is the user's"),
        ("a.jsonl", '{"messages": [{"role": "tool", "content": "y"}]}', "messages.0.role"),
        ("a.jsonl", '{"prompt": "x", "group": "all"}', "the group 'all' is that of prompts that"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(KvfoldError) as refused:
        prompts_of(tmp_path / name)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_missing_files_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(KvfoldError, match="no such file or folder"):
        prompts_of(tmp_path / "absent.txt")
    with pytest.raises(KvfoldError, match="holds no prompts"):
        prompts_of(tmp_path)
    with pytest.raises(KvfoldError, match="there are no prompts"):
        prompts_of([])
