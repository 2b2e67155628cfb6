# SPDX-License-Identifier: Apache-2.0
"""Consoles print texts as they are, and nothing that steers the terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
from rich.console import Console
from rich.text import Text

from kvfold.evidence.tables import table
from kvfold.terminal import console, errors, messages, print_json

ALL = (console, errors, lambda: messages(False), lambda: messages(True))
CONTROLS = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0))))


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    return out + err


@pytest.mark.parametrize("of", ALL)
@pytest.mark.parametrize("text", ["notes [draft].txt", "a[/b].kvfold", "[red]x[/]", ":star: \\[x]"])
def test_names_are_printed_as_they_are(
    of: Callable[[], Console], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    of().print(text)
    assert printed(capsys) == f"{text}\n"
    shown = table(text, text)
    shown.add_row(f"{text}, a row")
    of().print(shown)
    assert [line.strip() for line in printed(capsys).splitlines()].count(text) == 2


@pytest.mark.parametrize("of", ALL)
def test_control_characters_do_not_reach_the_terminal(
    of: Callable[[], Console], capsys: pytest.CaptureFixture[str]
) -> None:
    steering = f"a\x1b]0;title\x07b\x9b2J{CONTROLS}c"
    shown = table(steering, "what")
    shown.add_row(Text(steering))
    for each in (steering, Text(steering), shown):
        of().print(each)
        out = printed(capsys)
        assert not set(out) & set(CONTROLS) - {"\n", "\t"}
        assert "a]0;title" in out and out.rstrip().endswith("c")
    of().print("one\n\ttwo")
    assert printed(capsys).splitlines()[1].strip() == "two"


def test_styles_still_have_their_codes_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console().print(Text("error: \x1b[2Ja", style="red"))
    assert printed(capsys) == "\x1b[31merror: [2Ja\x1b[0m\n"


def test_json_is_the_value_also_with_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    value = {f"[b]{CONTROLS}": [":star:", "é" * 200, 1.5, None]}
    print_json(value)
    out = printed(capsys)
    assert json.loads(out) == value and "é" in out
    assert not set(out) & set(CONTROLS) - {"\n"}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_the_value_in_any_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding, newline="")
    monkeypatch.setattr("sys.stdout", out)
    value = {"é": ["→", "\udce9.txt", "😀", "\x1b"]}
    print_json(value)
    out.flush()
    assert json.loads(out.buffer.getvalue().decode(encoding)) == value
