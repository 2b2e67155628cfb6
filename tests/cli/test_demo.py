# SPDX-License-Identifier: Apache-2.0
"""`kvfold demo`: a line for each method, what is refused, and a page that needs nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from rich.text import Text

import kvfold
from kvfold.cli import demo
from kvfold.cli.demo import _answered
from kvfold.cli.demo_page import page
from kvfold.cli.measure import DemoTrial, Requests
from kvfold.inspect.inspected_text import NEEDLE
from tests.helpers.commands import kvfold_command, refused


@pytest.mark.slow
def test_demo_refuses_bad_budgets() -> None:
    assert "cannot read 'much'" in refused("demo", "--budgets", "0.5 much")
    assert "no budgets" in refused("demo", "--budgets", " ")
    assert "name it a.html" in refused("demo", "--page", "a.png")


@pytest.mark.slow
def test_demo_refuses_a_book_or_a_length_that_makes_no_document(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(" \n")
    page = ("--page", str(tmp_path / "demo.html"))
    assert f"{book} is empty" in refused("demo", "--book", str(book), *page)
    assert "there is no such file" in refused("demo", "--book", f"{book}.gz", *page)
    assert "20 tokens cannot hold the 4 needles" in refused("demo", "--tokens", "20", *page)
    assert refused("demo", "--tokens", "4600", *page).endswith("4608: give fewer --tokens")
    assert "there is no such folder" in refused("demo", "--model", f"{tmp_path}/none", *page)


def test_the_book_is_not_overwritten(tmp_path: Path) -> None:
    book = tmp_path / "book.html"
    book.write_text("It rained.")
    (tmp_path / "link.html").symlink_to(book)
    for place in (book, tmp_path / "link.html"):
        said = refused("demo", "--book", str(book), "--page", str(place), "--model", "no/model")
        assert f"{place} is read, and would be overwritten: choose another" in said
        assert said.endswith("--page")


def test_needles_lie_between_sentences_of_a_book(tmp_path: Path) -> None:
    model, tokenizer = kvfold.bundled_model()
    told = [f"On day {day} it rained; nobody came to see the old garden." for day in range(300)]
    trial = DemoTrial.of(
        model, tokenizer, 1024, 5, 0, " \n ".join(told).replace("nobody", "no\nbody")
    )
    needles = NEEDLE.findall(trial.sample.document)
    assert len(needles) == len(trial.needles()) == len(trial.sample.questions) == 5
    passage = NEEDLE.sub("", trial.sample.document.partition("\n")[2])
    days = [int(day) for day in re.findall(r"On day (\d+) it rained; no body came", passage)]
    assert len(days) > 20 and days == [(days[0] + i) % 300 for i in range(len(days))]
    assert 1000 < trial.tokens() <= 1024


def test_the_demo_s_page_needs_nothing_else_and_escapes_its_text() -> None:
    rows = Table("method")
    rows.add_row(Text("<b>snapkv</b>"))
    made = page([Group("{braces} of text", rows)], Figure())
    assert "{braces} of text" in made and "&lt;b&gt;snapkv&lt;/b&gt;" in made
    assert made.count("<img ") == 1 and 'src="data:image/png;base64,' in made
    printed = page(["[red]:star:[/] \x1b[2J\x07", Text(":smile: \x9b2J")], Figure())
    assert "[red]:star:[/] [2J" in printed and ":smile: 2J" in printed
    assert not any(control in printed for control in "\x1b\x07\x9b")
    assert not re.search("https?:", made) and "<script" not in made


def test_the_question_shown_is_one_that_the_full_cache_answers() -> None:
    yes, no = True, False
    assert _answered([yes] * 3, [yes] * 3) == 0
    assert _answered([no, yes, yes], [yes, yes, no]) == 1
    assert _answered([no, no, yes], [yes] * 3) == 2
    assert _answered([no] * 3, [yes] * 3) == 0


@pytest.mark.slow
def test_a_method_s_line_is_told_before_the_next_method_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    measured = demo._measure

    def listening(*given: object) -> demo.DemoRow:
        told.append(f"measures {given[2]}")
        return measured(*given)

    def line(*given: object) -> str:
        made = _line(*given)
        told.append(made)
        return made

    _line = demo._line
    monkeypatch.setattr(demo, "METHODS", ("snapkv", "zap"))
    monkeypatch.setattr(demo, "LONG", 512)
    monkeypatch.setattr(demo, "_measure", listening)
    monkeypatch.setattr(demo, "_line", line)
    page = tmp_path / "demo.html"

    ran = kvfold_command("demo", "--tokens", "512", "--budgets", "0.3", "--page", str(page))

    assert ran.exit_code == 0, ran.output
    assert told[::2] == ["measures full", "measures snapkv", "measures zap"]
    rows = [re.split(r" {2,}", line) for line in told[1::2]]
    assert [row[:3] for row in rows[:1]] == [["full", "8 of 8", "8 of 8"]]
    shares = [int(re.search(r"(\d+)%", line)[1]) for line in told[1::2]]
    assert 100 <= shares[0] < 110 and all(30 <= share < 40 for share in shares[1:])
    written = page.read_text(encoding="utf-8")
    assert all(line in ran.stdout and line in written for line in told[1::2])


@pytest.mark.slow
def test_requests_hold_their_rows_and_go_at_the_pace_of_their_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = DemoTrial.of(*kvfold.bundled_model(), 512, 3, 0, None)
    one = trial.compress("full", None).stats().nbytes_full
    full, fifth = trial.requests("full", None, 3), trial.requests("snapkv", "0.2", 3)
    assert full.beside(full).stats.nbytes_full == 3 * one
    assert 0.2 < fifth.beside(full).stats.ratio < 0.3

    monkeypatch.setattr(Requests, "step", lambda self: 0.08 if self is full else 0.02)
    assert (fifth.beside(full).seconds, fifth.beside(full).pace) == (0.02, 0.25)
