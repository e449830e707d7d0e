"""A real page in a real Chromium."""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from visits import SETTINGS, Visit

import chromium as chromium_browser
from flashtile.learn.visualizer.page import write_page
from flashtile.learn.visualizer.recording import Recording, record
from flashtile.learn.visualizer.settings import Setting


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page with SETTINGS, written once for all of pytest-xdist's workers."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / "visualizer" / "page.html"
    with (folder / "visualizer.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            write_page(path, SETTINGS, workers=1)
    return path


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless Chromium."""
    with chromium_browser.launched() as browser:
        yield browser


@pytest.fixture
def visit(chromium: Any, page_file: Path, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """The page in a fresh context; fails if the console complained or anything was fetched.

    ``@pytest.mark.parametrize("visit", [{...}], indirect=True)`` gives options of the context.
    """
    options = {
        "viewport": {"width": 1400, "height": 1000},
        "locale": "en-US",
        **getattr(request, "param", {}),
    }
    context = chromium.new_context(**options)
    page = context.new_page()
    visit = Visit(page, page_file.as_uri(), chromium_browser.watched(page))
    page.on("request", lambda sent: visit.requests.append(sent.url))
    visit.go("")
    yield visit
    context.close()
    assert not visit.complaints
    foreign = [url for url in visit.requests if not url.startswith((visit.url, "about:", "data:", "blob:"))]
    assert not foreign


@pytest.fixture(scope="session")
def recorded() -> Callable[[Setting], Recording]:
    """recorded(setting): the run again, for comparison with the page."""
    return functools.cache(record)
