# SPDX-License-Identifier: Apache-2.0
"""Controls of the report: each one is used, and changes what its name says."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tests_pages.built import MANY
from tests_pages.conftest import Open


def texts(page: Page, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def test_the_protocol_changes_claim_and_table(opened: Open) -> None:
    page = opened("published")
    before = page.locator("#claim").inner_text(), texts(page, "#summary tbody tr")

    page.get_by_label("Protocol").select_option(label="question-aware")

    assert page.locator("#claim").inner_text() != before[0]
    assert texts(page, "#summary tbody tr") != before[1]
    assert "question-aware" in page.locator("#pareto-lead").inner_text()


def test_both_claims_are_in_view_and_lead_to_each_other(opened: Open) -> None:
    page = opened("published")
    claim, other = page.locator("#claim").inner_text(), page.locator("#others button").inner_text()
    assert "before the question is known" in claim and "with the question in view" in other

    page.locator("#others button").press("Enter")

    assert page.locator("#claim").inner_text() == other
    assert page.locator("#others button").inner_text() == claim


def test_every_table_says_what_the_haystack_is(opened: Open) -> None:
    page = opened("published")

    for section in ("pareto", "table", "where", "needles"):
        assert "Haystack: " in page.locator(f"#{section}").inner_text()
    page.get_by_label("Tasks").select_option(label="ruler_niah_single_1")
    assert "Haystack: noise (ruler_niah_single_1)." in page.locator("#table").inner_text()
    assert texts(page, "#perplexity h3") == ["frankenstein_pg84.txt (continuation)"]


def test_tasks_and_lengths_choose_the_rows(opened: Open) -> None:
    page = opened("published")

    page.get_by_label("Tasks").select_option(label="niah_magic")
    assert page.locator("#pareto-lead").inner_text().startswith("Mean over niah_magic,")
    assert set(texts(page, "#summary td.samples")) == {"33"}
    page.get_by_label("Length").select_option(label="512 tokens")
    assert set(texts(page, "#summary td.samples")) == {"11"}


def test_a_budget_and_a_method_are_hidden_and_shown_again(opened: Open) -> None:
    page = opened("published")
    chip = page.get_by_role("group", name="Budgets").get_by_role("button", name="0.2")
    method = page.locator("#legend").get_by_role("button", name="h2o + merge")
    rows = page.locator("#summary tbody tr")
    every = rows.count()

    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert "0.2" not in texts(page, "#summary td.budget") and rows.count() < every
    chip.click()
    method.click()
    assert "h2o + merge" not in texts(page, "#summary th.method")
    page.get_by_role("button", name="none", exact=True).click()
    assert texts(page, "#summary tbody th.method") == ["full cache"]
    page.get_by_role("button", name="all", exact=True).click()
    assert rows.count() == every


def test_the_table_sorts_down_up_and_back_by_keyboard(opened: Open) -> None:
    page = opened("published")
    before = texts(page, "#summary tbody tr")

    def shares() -> list[float]:
        return [float(cell.split()[0]) for cell in texts(page, "#summary tbody td.bytes")]

    page.locator("#summary [data-column=bytes]").focus()
    page.keyboard.press("Enter")
    assert shares() == sorted(shares(), reverse=True)
    assert page.locator("#summary th.bytes[aria-sort]").get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")
    assert shares() == sorted(shares())
    page.keyboard.press("Enter")
    assert texts(page, "#summary tbody tr") == before


def test_every_column_sorts(opened: Open) -> None:
    page = opened("published")
    columns = page.locator("#summary thead button")

    for number in range(columns.count()):
        columns.nth(number).click()
        assert page.locator("#summary th[aria-sort]").count() == 1


def test_the_matrix_changes_with_budget_and_columns(opened: Open) -> None:
    page = opened("published")
    before = texts(page, "#matrix td")

    page.get_by_role("group", name="Budget", exact=True).get_by_role("button", name="0.5").click()
    assert texts(page, "#matrix td") != before
    page.get_by_role("button", name="tasks", exact=True).click()
    assert "niah_magic" in texts(page, "#matrix thead th")


@pytest.mark.parametrize("width", (390, 1400))
def test_a_point_is_explained_inside_the_window(opened: Open, width: int) -> None:
    page = opened("published", width)
    chart, tip = page.locator("#chart svg"), page.locator("#tip")
    mark = page.locator("#chart .series.strong .mark").last

    chart.scroll_into_view_if_needed()
    mark.hover(force=True)
    assert tip.is_visible() and "entries kept" in tip.inner_text()
    box = tip.bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width
    page.mouse.move(1, 1)
    assert tip.is_hidden()


def test_arrow_keys_go_from_point_to_point(opened: Open) -> None:
    page = opened("published")
    tip = page.locator("#tip")

    page.locator("#chart svg").focus()
    page.keyboard.press("ArrowRight")
    first = tip.inner_text()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    assert tip.is_visible() and tip.inner_text() != first
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_the_legend_brings_out_a_method(opened: Open) -> None:
    page = opened("published")

    page.locator("#legend").get_by_role("button", name="roco").hover()

    assert page.locator("#chart .series.bright").count() == 1
    assert page.locator("#chart .series.dim").count() > 20


def test_details_open(opened: Open) -> None:
    page = opened("published")

    page.get_by_text("As a table").first.click()
    found = page.locator("#perplexity .scroll").first
    assert found.locator("tbody tr").first.is_visible()
    found.get_by_role("button", name="Perplexity").click()
    assert found.locator("tbody tr").first.is_visible()  # sorting closes no table
    page.get_by_role("link", name="Skip to the table").focus()
    page.keyboard.press("Enter")
    assert page.url.endswith("#table")


def test_forty_methods_differ_in_shape_or_dash_without_their_colours(opened: Open) -> None:
    page = opened("many_methods")

    looks = page.evaluate(
        "[...document.querySelectorAll('#legend .key')].map((key) =>"
        " key.querySelector('path').getAttribute('d') + '|' +"
        " key.querySelector('line').getAttribute('stroke-dasharray'))"
    )

    assert len(looks) == len(set(looks)) == MANY + 1
