# SPDX-License-Identifier: Apache-2.0
"""`kvfold demo`: budgets that are refused, and a page that needs nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from rich.text import Text

import kvfold
from kvfold.cli.demo import _answered
from kvfold.cli.demo_page import page
from kvfold.cli.measure import DemoTrial
from kvfold.inspect.inspected_text import NEEDLE
from tests.helpers.commands import refused


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
    assert "20 tokens cannot hold the 6 needles" in refused("demo", "--tokens", "20", *page)
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
    trial = DemoTrial.of(*kvfold.bundled_model(), 512, 3, 0, None)
    right = [question.answers[0] for question in trial.sample.questions]
    wrong = ["none"] * 3
    assert _answered(trial, right, right) == 0
    assert _answered(trial, ["none", *right[1:]], [*right[:2], "none"]) == 1
    assert _answered(trial, ["none", "none", right[2]], right) == 2
    assert _answered(trial, wrong, right) == 0
