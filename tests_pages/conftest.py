# SPDX-License-Identifier: Apache-2.0
"""Pages opened in headless Chromium: no network, nothing but the page in its window."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, sync_playwright

from tests_pages.built import PAGES

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
HEIGHT = 900
PATIENCE = 5000  # milliseconds

Open = Callable[..., Page]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder."""
    own = Path(__file__).parent
    for item in items:
        if own in item.path.parents:
            item.add_marker(pytest.mark.pages)


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    """Chromium with an empty profile."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt install chromium, or CHROMIUM=path")
    with sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=CHROMIUM, args=FLAGS
        )
        yield context
        context.close()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a page of `PAGES`, built once."""
    folder = tmp_path_factory.mktemp("pages")

    def file(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            path.write_text(PAGES[name](), encoding="utf-8")
        return path

    return file


@pytest.fixture
def opened(window: BrowserContext, files: Callable[[str], Path]) -> Iterator[Open]:
    """Opens a page by name; afterwards it has said nothing and asked nothing of a network."""
    said: list[str] = []
    pages: list[Page] = []

    def open_page(name: str, width: int = 1400, scheme: str = "light") -> Page:
        page = window.new_page()
        page.set_default_timeout(PATIENCE)
        pages.append(page)
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        address = files(name).as_uri()
        page.on("request", lambda r: said.append(r.url) if r.url != address else None)
        page.set_viewport_size({"width": width, "height": HEIGHT})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.goto(address)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not said
