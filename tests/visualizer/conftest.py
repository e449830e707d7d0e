"""Real pages in a real Chromium."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flashtile.visualizer.page import write_page
from flashtile.visualizer.recording import Recording, record
from flashtile.visualizer.settings import Setting

KIB = 1024
SETTINGS = (
    Setting("standard", 256, 64, sram_bytes=64 * KIB),
    *(Setting("standard", 256, 64, mask=mask, sram_bytes=100 * KIB) for mask in ("full", "causal", "window")),
    *(Setting("flash1", 256, 64, mask=mask, block="64x64") for mask in ("full", "causal")),
    *(Setting("flash1", 256, 64, block="auto", sram_bytes=size * KIB) for size in (64, 100)),
    *(Setting("flash2", 256, 64, block=block) for block in ("32x32", "64x64")),
    Setting("flash2", 256, 64, mask="causal", block="64x64"),
    Setting("flash2", 256, 64, mask="window", block="32x32"),
    Setting("flash2", 256, 128, block="128x128"),
    Setting("flash3", 256, 64, block="32x32"),
    Setting("flash3", 256, 64, mask="causal", block="64x64"),
    Setting("standard", 256, 128, sram_bytes=100 * KIB),
    Setting("standard", 4096, 64, sram_bytes=100 * KIB),
    Setting("flash1", 4096, 64, block="64x64"),
    Setting("flash2", 4096, 64, block="64x64"),
    Setting("flash2", 4096, 64, block="auto", sram_bytes=100 * KIB),
    Setting("standard", 4096, 64, queries="one", sram_bytes=100 * KIB),
    *(Setting("flash_decoding", 4096, 64, queries="one", block="1x128", num_splits=n) for n in (1, 8)),
    Setting("unified_max", 4096, 64, queries="one", block="1x128", num_splits=8),
    Setting("paged", 64, 64, queries="one", page_size=8),
    *(Setting(f"{name}_backward", 256, 64, mask="causal", block="64x64") for name in ("flash1", "flash2")),
    Setting("standard_backward", 256, 64, mask="causal", sram_bytes=100 * KIB),
)
"""Every algorithm, in few enough runs for a test."""


def address(setting: Setting, at: int | None = None, **more: Any) -> str:
    """The page's state in which it shows a setting, after ``at`` events."""
    own = {"block": setting.block, "num_splits": setting.num_splits, "page_size": setting.page_size}
    run = ";".join(
        [setting.algorithm, *(f"{key}={value}" for key, value in own.items() if value is not None)]
    )
    shared = {key: getattr(setting, key) for key in ("queries", "seqlen", "head_dim", "mask")}
    sram = {"sram": setting.sram_bytes or 228 * 1024}
    parts = {"a": run, **shared, **sram, **({} if at is None else {"at": at}), **more}
    return "&".join(f"{key}={value}" for key, value in parts.items())


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


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A headless Chromium: playwright's own, or one of the system's."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (extra: browser)"
    )
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    on_path = next(filter(None, map(shutil.which, names)), None)
    with playwright.sync_playwright() as running:
        candidates = [None, on_path] if on_path else [None]
        for executable in candidates:
            try:
                browser = running.chromium.launch(executable_path=executable, args=["--no-sandbox"])
                break
            except playwright.Error as error:
                reason = str(error).splitlines()[0]
        else:
            pytest.skip(f"no Chromium: {reason} (python -m playwright install chromium, or a system package)")
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page that is open, and everything that went wrong on it."""

    page: Any
    url: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def go(self, state: str) -> None:
        """Open the page in a state, as its address has it."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}#{state}")
        self.settle()

    def show(self, state: str) -> None:
        """Go to a state of the page that is open, as a link within it would."""
        self.page.evaluate(
            """(hash) => location.hash === hash || new Promise((resolve) => {
                 addEventListener("hashchange", resolve, { once: true });
                 location.hash = hash;
               })""",
            f"#{state}",
        )
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is shown."""
        self.page.wait_for_selector("body[data-ready=yes]")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
            self.settle()

    def counter(self, name: str, run: str = "a") -> str:
        """The exact value behind a number."""
        return self.page.get_attribute(f"article.{run} [data-counter='{name}']", "data-value")

    def each(self, selector: str, expression: str) -> list[Any]:
        """A JavaScript expression on each element ``e`` that is found."""
        return self.page.eval_on_selector_all(selector, f"all => all.map((e) => {expression})")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    @property
    def state(self) -> dict[str, str]:
        hash = self.page.evaluate("location.hash")
        return dict(part.split("=", 1) for part in hash.removeprefix("#").split("&"))


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
    visit = Visit(page, page_file.as_uri())
    page.on("console", lambda message: visit.complaints.append(message.text))
    page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    page.on("request", lambda sent: visit.requests.append(sent.url))
    visit.go("")
    yield visit
    context.close()
    assert not visit.complaints
    foreign = [url for url in visit.requests if not url.startswith((visit.url, "about:", "data:", "blob:"))]
    assert not foreign


_recorded: dict[Setting, Recording] = {}


@pytest.fixture
def recorded() -> Any:
    """recorded(setting): the run again, for comparison with the page."""

    def again(setting: Setting) -> Recording:
        if setting not in _recorded:
            _recorded[setting] = record(setting)
        return _recorded[setting]

    return again
