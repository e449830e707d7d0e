"""A headless Chromium for the tests of pages, and axe-core, which judges their accessibility."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 120_000
"""Milliseconds after which a wait fails. Playwright's 30 seconds are too few on busy cores."""


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """Playwright's own Chromium, or one of the system's. The test is skipped where there is none.

    Use it for a module at most, because Playwright's event loop runs until it ends, and other tests run
    loops of their own.
    """
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (extra: browser)"
    )
    on_path = next(filter(None, map(shutil.which, NAMES)), None)
    with playwright.sync_playwright() as running:
        for executable in [None, on_path] if on_path else [None]:
            try:
                browser = running.chromium.launch(
                    executable_path=executable, args=["--no-sandbox"], timeout=PATIENCE
                )
                break
            except playwright.Error as error:
                reason = str(error).splitlines()[0]
        else:
            pytest.skip(f"no Chromium: {reason} (python -m playwright install chromium, or a system package)")
        yield browser
        browser.close()


def watched(page: Any) -> list[str]:
    """The complaints of a page from now on: exceptions, and errors on the console.

    Warnings are not complaints. They include Chromium's advice on performance, which depends on the load.
    """
    complaints: list[str] = []
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    return complaints


def axe_violations(page: Any) -> list[str]:
    """The rules of axe-core that a page breaks, each with the elements that break it."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-core is not installed (extra: browser)"
    )
    found = axe.Axe().run(page).response["violations"]
    return [f"{one['id']}: {[node['html'][:120] for node in one['nodes']]}" for one in found]
