# SPDX-License-Identifier: Apache-2.0
"""`kvfold demo`: budgets that are refused, and a page that needs nothing else."""

from __future__ import annotations

from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvfold.cli.demo_page import page
from tests.helpers.commands import refused


def test_demo_refuses_bad_budgets() -> None:
    assert "cannot read 'much'" in refused("demo", "--budgets", "0.5 much")
    assert "no budgets" in refused("demo", "--budgets", " ")
    assert "name it a.html" in refused("demo", "--page", "a.png")


def test_the_demo_s_page_needs_nothing_else_and_escapes_its_text() -> None:
    rows = Table("method")
    rows.add_row(Text("<b>snapkv</b>"))
    made = page([Group("{braces} of text", rows)], Figure())
    assert "{braces} of text" in made and "&lt;b&gt;snapkv&lt;/b&gt;" in made
    assert made.count("<img ") == 1 and 'src="data:image/png;base64,' in made
    assert "http" not in made and "<script" not in made
