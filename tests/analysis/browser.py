"""A real browser for the page of `explore`; where none can be had, tests say what to install and are skipped."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a headless Chromium, driven by playwright."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium, or its path in the variable CHROMIUM")
    # its sandbox refuses to run as root
    options = ["--no-sandbox"] if hasattr(os, "getuid") and os.getuid() == 0 else []
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=options)
        except api.Error as error:
            pytest.skip(f"{found} does not start, try apt-get install chromium: {str(error)[:300]}")
        yield browser
        browser.close()


class Page:
    """A page in the browser, with what it complained of and what it asked for besides its own file."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.tab = browser.new_page(viewport={"width": 1400, "height": 900}, **options)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(path.as_uri())
        self.wait()

    def wait(self) -> None:
        """Wait until everything is computed and drawn."""
        self.tab.wait_for_function("explore.jobs.size === 0")
        self.tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return str(self.tab.text_content(selector))

    def choose(self, index: int) -> None:
        """Choose one of the patterns of the page."""
        self.tab.select_option("#preset", str(index))
        self.wait()

    def type(self, selector: str, text: str) -> None:
        """Fill in a field and leave it."""
        self.tab.fill(selector, text)
        self.tab.dispatch_event(selector, "change")
        self.wait()
