"""Measure how smoothly the interactive page plays in a browser of this machine.

    python -m benchmarks.page_frames --out benchmarks/results/DATE-page-frames.json

Each scene plays for some seconds. Recorded are the times between two frames and the time of the page's own
script in a frame, in milliseconds. A browser without a GPU draws on the CPU, so its frames are the slowest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright

from benchmarks.suite.documents import source_commit
from flashtile.hardware import machine
from flashtile.learn.visualizer.page import write_page
from flashtile.learn.visualizer.settings import grid

SCENES = {
    "one run of 1024 tokens": "a=flash2;block=64x64&seqlen=1024&at=0",
    "one run of 8 tokens": "a=flash2;block=4x4&seqlen=8&head_dim=4&at=0",
    "two runs of 4096 tokens": "a=flash1;block=64x64&b=flash2;block=64x64&seqlen=4096&sync=bytes&at=0",
    "drawer open": "a=flash2;block=64x64&seqlen=1024&drawer=open&at=0",
    "pages": "a=paged;page_size=8&seqlen=64&queries=one&at=0",
}
"""State of the page by name."""

MEASURE = """(seconds) => new Promise((resolve) => {
  const [between, script] = [[], []];
  const draw = flashtilePage.draw.bind(flashtilePage);
  flashtilePage.clock.draw = () => {
    const begun = performance.now();
    draw();
    script.push(performance.now() - begun);
  };
  let before;
  const tick = (now) => {
    if (before !== undefined) between.push(now - before);
    before = now;
    if (between.reduce((sum, time) => sum + time, 0) > 1000 * seconds) return resolve({ between, script });
    requestAnimationFrame(tick);
  };
  flashtilePage.clock.play();
  requestAnimationFrame(tick);
})"""


def summary(times: list[float]) -> dict[str, float]:
    """Return median and 95th percentile of times in milliseconds."""
    late = statistics.quantiles(times, n=20)[-1]
    return {"median_ms": round(statistics.median(times), 2), "p95_ms": round(late, 2)}


def measure(page_file: Path, seconds: float) -> list[dict[str, Any]]:
    """Return a record for each scene and screen."""
    records = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width, height in ((1366, 768), (1920, 1080)):
            page = browser.new_context(viewport={"width": width, "height": height}).new_page()
            for scene, state in SCENES.items():
                page.goto("about:blank")
                page.goto(f"{page_file.as_uri()}#{state}")
                page.wait_for_selector("body[data-ready=yes]")
                times = page.evaluate(MEASURE, seconds)
                named = {"scene": scene, "screen": f"{width} x {height}", "frames": len(times["between"])}
                for kind, measured in (("frame", times["between"]), ("script", times["script"])):
                    named |= {f"{kind}_{key}": value for key, value in summary(measured).items()}
                records.append(named)
        browser.close()
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=5, help="seconds that each scene plays")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page_file = Path(folder) / "page.html"
        size = write_page(page_file, list(grid()), workers=1)
        document = {
            "schema": 1, "kind": "page_frames", "date": str(datetime.date.today()),
            "versions": machine.versions(), "source": source_commit(),
            "device": machine.describe_device(torch.device("cpu")), "page_bytes": size,
            "frames": measure(page_file, arguments.seconds),
        }  # fmt: skip
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
