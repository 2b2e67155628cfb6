# SPDX-License-Identifier: Apache-2.0
"""Controls of the inspection page: layer, needles, texts, maps."""

from __future__ import annotations

from tests_pages.conftest import Open

FRAMES = 200  # milliseconds until a scrolled text has taken the others along


def test_the_slider_chooses_a_layer(opened: Open) -> None:
    page = opened("inspected")
    every = page.locator(".card .numbers").all_inner_texts()

    page.get_by_role("slider").focus()
    page.keyboard.press("ArrowRight")

    assert page.locator("#layer-name").inner_text() == "0"
    assert page.locator(".card .numbers").all_inner_texts() != every
    assert page.locator(".map .row").first.is_visible()
    page.keyboard.press("Home")
    assert page.locator("#layer-name").inner_text() == "all"


def test_needles_and_maps_scroll_all_texts_together(opened: Open) -> None:
    page = opened("inspected")

    def tops() -> list[int]:
        page.wait_for_timeout(FRAMES)
        return page.evaluate("[...document.querySelectorAll('.text')].map((t) => t.scrollTop)")

    page.locator("#jumps button").last.click()
    shown = tops()
    assert min(shown) > 0 and max(shown) - min(shown) <= 2
    page.locator(".map canvas").first.click(position={"x": 1, "y": 20})
    assert max(tops()) < min(shown)


def test_a_token_is_explained_by_pointer_and_by_keyboard(opened: Open) -> None:
    page = opened("inspected")
    tip = page.locator("#tip")

    page.locator(".text span").nth(20).hover()
    assert "position 20" in tip.inner_text()
    assert page.locator(".text .same").count() == page.locator(".card").count()
    page.mouse.move(1, 1)
    assert tip.is_hidden()
    page.locator(".text").nth(1).focus()
    for position in (0, 1, 2):
        page.keyboard.press("ArrowRight")
        assert f"position {position}\n" in tip.inner_text()
    page.keyboard.press("Tab")
    assert tip.is_hidden()


def test_a_cell_of_attention_is_read_by_pointer_and_by_keyboard(opened: Open) -> None:
    page = opened("inspected")
    cell, first = page.locator("#cell"), page.locator("#heatmaps canvas").first

    first.hover(position={"x": 3, "y": 60})
    assert cell.inner_text().startswith("Layer 0: queries")
    page.locator("#heatmaps canvas").nth(1).focus()
    page.keyboard.press("ArrowRight")
    assert cell.inner_text().startswith("Layer 1: queries")


def test_series_differ_in_shape_without_their_colours(opened: Open) -> None:
    page = opened("inspected")

    looks = page.evaluate(
        "[...document.querySelectorAll('#budgets .keys path')].map((key) => key.getAttribute('d'))"
    )

    assert len(looks) == len(set(looks)) == page.locator(".card").count()
