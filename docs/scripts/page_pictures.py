"""Take the pictures of the interactive page in ``docs/assets/visualizer`` with a Chromium (extra "browser").

python docs/scripts/page_pictures.py [CHROMIUM]
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import ViewportSize, sync_playwright

from flashtile.learn.visualizer.page import write_page
from flashtile.learn.visualizer.settings import grid

FOLDER = Path(__file__).parents[1] / "assets" / "visualizer"
WINDOW: ViewportSize = {"width": 1366, "height": 768}
RACE: ViewportSize = {"width": 1240, "height": 620}
RUN = "queries=all&seqlen=1024&head_dim=64&mask=full&sram=102400"
PICTURES = {
    "home": "",
    "stage": f"a=flash2;block=64x64&{RUN}&at=903",
    "turns": "tour=turns&scene=3",
    "backward": "tour=gradients&scene=5",
}
"""State of the page by the name of its picture."""

RACE_STATE = f"a=flash2;block=64x64&b=standard&{RUN}&sync=bytes&at=0"
FRAMES, MILLISECONDS, LAST_MILLISECONDS = 60, 100, 2000


def main(chromium: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        path = Path(folder) / "page.html"
        write_page(path, grid())
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        options: dict[str, Any] = {"locale": "en-US", "color_scheme": "light", "reduced_motion": "reduce"}
        page = browser.new_context(viewport=WINDOW, **options).new_page()
        for name, state in PICTURES.items():
            show(page, f"{path.as_uri()}#{state}")
            page.screenshot(path=str(FOLDER / f"{name}.png"))
        page = browser.new_context(viewport=RACE, **options).new_page()
        show(page, f"{path.as_uri()}?embed=1#{RACE_STATE}")
        first, *others = [race_at(page, number / (FRAMES - 1)) for number in range(FRAMES)]
        durations = [MILLISECONDS] * (FRAMES - 1) + [LAST_MILLISECONDS]
        first.save(FOLDER / "race.gif", save_all=True, append_images=others, duration=durations, loop=0)
        browser.close()


def show(page: Any, address: str) -> None:
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("body[data-ready=yes]")


def race_at(page: Any, share: float) -> Image.Image:
    """Return the stage after a share of the race."""
    page.evaluate("(share) => flashtilePage.clock.seek(Math.round(share * flashtilePage.clock.end))", share)
    shot = page.locator(".stage").screenshot()
    return Image.open(io.BytesIO(shot)).convert("RGB").quantize(48, Image.Quantize.FASTOCTREE)


if __name__ == "__main__":
    main(*sys.argv[1:])
