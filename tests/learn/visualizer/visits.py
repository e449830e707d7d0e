"""What the page's tests record, and what they do on a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flashtile.learn.visualizer.settings import Setting

KIB = 1024
SETTINGS = (
    *(Setting("standard", 1024, 64, sram_bytes=size * KIB) for size in (64, 100)),
    *(Setting(name, 1024, 64, block="64x64") for name in ("flash1", "flash2")),
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
    Setting("flash2", 4096, 64, queries="one", block="1x128"),
    *(Setting("flash_decoding", 4096, 64, queries="one", block="1x128", num_splits=n) for n in (1, 8)),
    Setting("unified_max", 4096, 64, queries="one", block="1x128", num_splits=8),
    Setting("paged", 64, 64, queries="one", page_size=8),
    *(Setting(f"{name}_backward", 256, 64, mask="causal", block="64x64") for name in ("flash1", "flash2")),
    Setting("standard_backward", 256, 64, mask="causal", sram_bytes=100 * KIB),
)
"""Every algorithm, in few enough runs for a test."""

FRAMES_BY_THE_CLOCK = """(() => {
  const request = requestAnimationFrame;
  let now = 0;
  window.requestAnimationFrame = (draw) => request(() => draw((now += 1000 / 60)));
})()"""
"""Frames a sixtieth of a second apart, as the page sees it, however slow the machine."""


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

    def draw_frames(self, count: int) -> None:
        """Wait until the browser has drawn so many frames."""
        for _ in range(count):
            self.page.evaluate("() => new Promise((resolve) => requestAnimationFrame(resolve))")

    def counter(self, name: str, run: str = "a") -> str:
        """The exact value behind a number."""
        return self.page.get_attribute(f"[data-run={run}] [data-counter='{name}']", "data-value")

    def each(self, selector: str, expression: str) -> list[Any]:
        """A JavaScript expression on each element ``e`` that is found."""
        return self.page.eval_on_selector_all(selector, f"all => all.map((e) => {expression})")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    @property
    def state_text(self) -> str:
        return str(self.page.evaluate("location.hash")).removeprefix("#")

    @property
    def state(self) -> dict[str, str]:
        return dict(part.split("=", 1) for part in self.state_text.split("&"))
