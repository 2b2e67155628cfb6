# SPDX-License-Identifier: Apache-2.0
"""Progress of commands: bars on a terminal, lines on standard error without one."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from kvfold.cli import console
from kvfold.cli.console import AGAIN, BETWEEN, ProgressLines, counted, progress
from kvfold.terminal import PlainConsole


@pytest.fixture
def lines() -> Iterator[ProgressLines]:
    yield ProgressLines(PlainConsole(file=io.StringIO()))


def said(lines: ProgressLines) -> list[str]:
    return lines.console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_there_is_a_line_for_what_has_changed_and_none_too_soon(lines: ProgressLines) -> None:
    lines.say(0.0)  # nothing has begun
    task = lines.add_task("reading the [bold]document", total=3)
    lines.say(1.0)
    lines.update(task, description="snapkv 0.5")
    lines.advance(task)
    for now in (2.0, 0.9 + BETWEEN):
        lines.say(now)
    assert said(lines) == ["0:00:00 reading the [bold]document, 0 of 3"]
    lines.advance(task)
    lines.say(1.0 + BETWEEN)
    assert said(lines)[1:] == ["0:00:00 snapkv 0.5, 2 of 3"]
    for now in (1.0 + 3 * BETWEEN, 0.9 + BETWEEN + AGAIN):
        lines.say(now)
    assert len(said(lines)) == 2  # the same is said again after a minute
    lines.say(1.0 + BETWEEN + AGAIN)
    assert said(lines)[2:] == ["0:00:00 snapkv 0.5, 2 of 3"]


def test_a_writer_says_lines_until_the_end(
    lines: ProgressLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = iter([False, False, True])
    monkeypatch.setattr(lines._ended, "wait", lambda seconds: next(heard))
    with lines:
        lines.add_task("samples", total=None)
        lines._writer.join()
    assert set(said(lines)) <= {"0:00:00 samples"} and not lines._writer.is_alive()


@pytest.mark.parametrize("terminal", ["out", "errors", "none"])
def test_a_bar_is_on_a_terminal_and_lines_are_on_standard_error(
    terminal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = PlainConsole(file=io.StringIO(), force_terminal=terminal == "out")
    errors = PlainConsole(file=io.StringIO(), force_terminal=terminal == "errors")
    monkeypatch.setattr(console, "messages", lambda as_json: errors)
    shown = progress(out)
    assert shown.console is (out if terminal == "out" else errors)
    assert isinstance(shown, ProgressLines) == (terminal == "none")
    with counted(out, "samples", 4) as done:
        done(3)
    assert bool(out.file.getvalue()) == (terminal == "out")  # type: ignore[attr-defined]
    assert ("3/4" in errors.file.getvalue()) == (terminal == "errors")  # type: ignore[attr-defined]
