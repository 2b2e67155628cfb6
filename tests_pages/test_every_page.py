# SPDX-License-Identifier: Apache-2.0
"""What holds for every page: its width, its text, its keyboard, its names."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests_pages.built import PAGES
from tests_pages.conftest import Open

MEASURE = (Path(__file__).parent / "measure.js").read_text(encoding="utf-8")
WIDTHS, SCHEMES = (390, 1400), ("light", "dark")
TEXT, GRAPHICS = 4.5, 3.0  # least contrasts, WCAG 2.2, 1.4.3 and 1.4.11
SMALLEST = 11  # pixels of a letter
SERIES = ".key path, .key line"  # marks and lines beside the names of series
NAMED = "button", "combobox", "slider", "link", "img", "image", "application", "region"

every_page = pytest.mark.parametrize("name", PAGES)
every_width = pytest.mark.parametrize("width", WIDTHS)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def measured(page: Page, call: str):
    """The answer of a function of `measure.js`."""
    page.evaluate(MEASURE)
    return page.evaluate(f"measure.{call}")


@every_width
@every_page
def test_nothing_is_outside_the_window(opened: Open, name: str, width: int) -> None:
    page = opened(name, width)

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not measured(page, "outside()")


@every_page
def test_a_wide_window_cuts_off_no_table(opened: Open, name: str) -> None:
    assert not measured(opened(name), "cutOff()")


@every_scheme
@every_width
@every_page
def test_text_is_readable(opened: Open, name: str, width: int, scheme: str) -> None:
    page = opened(name, width, scheme)

    assert not measured(page, f"small({SMALLEST})")
    assert not measured(page, f"faint({TEXT})")


@every_scheme
@every_page
def test_marks_of_series_stand_out(opened: Open, name: str, scheme: str) -> None:
    assert not measured(opened(name, scheme=scheme), f"faintMarks('{SERIES}', {GRAPHICS})")


@every_width
@every_page
def test_labels_of_charts_do_not_overlap(opened: Open, name: str, width: int) -> None:
    assert not measured(opened(name, width), "overlaps('.chart .names text')")


@every_width
@every_page
def test_the_keyboard_reaches_every_control(opened: Open, name: str, width: int) -> None:
    page = opened(name, width)
    controls = measured(page, "controls()")
    reached, unseen = set(), []
    for _ in range(len(controls) + 1):
        page.keyboard.press("Tab")
        number, drawn = page.evaluate("measure.focused()")
        if number is not None:
            reached.add(int(number))
            unseen += [] if drawn else [controls[int(number)]]

    assert not [control for number, control in enumerate(controls) if number not in reached]
    assert not unseen


@every_page
def test_controls_and_pictures_have_names(opened: Open, name: str) -> None:
    page = opened(name)
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = [(node["role"]["value"].lower(), node) for node in tree if not node["ignored"]]

    assert not [
        node for role, node in roles if role in NAMED and not node.get("name", {}).get("value")
    ]
    assert not [role for role, _ in roles if role == "canvas"]


@every_page
def test_the_page_can_be_published(opened: Open, name: str) -> None:
    page = opened(name)

    assert len(page.title()) > 10
    described = page.locator("meta[name=description]").get_attribute("content")
    assert described is not None and len(described) > 40
    assert page.locator("h1").count() == 1
