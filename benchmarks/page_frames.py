"""What a frame of the interactive page costs: processor time of Chromium's main thread, from its own trace.

    python benchmarks/page_frames.py

Two runs of 64 x 64 blocks side by side. Sixty frames a second leave 16.7 ms for each. Needs the extra
"browser" and a Chromium.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from flashtile.learn.visualizer.page import write_page
from flashtile.learn.visualizer.settings import Setting

KIB = 1024
SETTINGS = (
    *(Setting(name, 4096, 64, block="64x64") for name in ("flash1", "flash2")),
    Setting("standard", 4096, 64, sram_bytes=100 * KIB),
)
STATE = (
    "a=flash1;block=64x64&b=flash2;block=64x64&queries=all&seqlen=4096&head_dim=64&mask=full&at=1000&sync="
)
SECONDS = 4


def events_while_playing(browser: Browser, url: str) -> list[dict[str, Any]]:
    """What Chromium's trace has while the page plays."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.goto(url)
    page.wait_for_selector("body[data-ready=yes]")
    browser.start_tracing(page=page, categories=["toplevel", "devtools.timeline"])
    page.keyboard.press(" ")
    page.wait_for_timeout(1000 * SECONDS)
    page.keyboard.press(" ")
    events = json.loads(browser.stop_tracing())["traceEvents"]
    page.close()
    return list(events)


def frame_times(events: list[dict[str, Any]]) -> list[float]:
    """Milliseconds of the main thread from each frame to the next."""
    frames = [event for event in events if event["name"] == "FireAnimationFrame"]
    main_thread = (frames[0]["pid"], frames[0]["tid"])
    starts = [frame["ts"] for frame in frames]
    costs = [0.0] * (len(frames) - 1)
    for event in events:
        if event["name"] != "ThreadControllerImpl::RunTask" or "tdur" not in event:
            continue
        number = sum(start <= event["ts"] + event["dur"] for start in starts) - 1
        if (event["pid"], event["tid"]) == main_thread and 0 <= number < len(costs):
            costs[number] += event["tdur"] / 1e3
    return costs


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        write_page(path, SETTINGS, workers=1)
        own = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        browser = playwright.chromium.launch(executable_path=own, args=["--no-sandbox"])
        for sync in ("share", "bytes"):
            costs = sorted(frame_times(events_while_playing(browser, f"{path.as_uri()}#{STATE}{sync}")))
            middle, most = statistics.median(costs), costs[int(0.9 * len(costs))]
            print(f"{sync}: median {middle:.1f} ms of {len(costs)} frames, 90 % within {most:.1f} ms")
        browser.close()


if __name__ == "__main__":
    main()
