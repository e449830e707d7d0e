"""Sixty frames a second: the work of a frame, counted. It depends only on what the frame changes."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from visits import FRAMES_BY_THE_CLOCK, Visit, address

from flashtile.learn.visualizer.settings import Setting

CATEGORIES = ["devtools.timeline"]
FRAMES = 30
COUNTED = """() => {
  window.counts = [];
  const of = (name) => (window.counts.at(-1) ?? {})[name]++;
  const request = requestAnimationFrame;
  window.requestAnimationFrame = (draw) => request((now) => {
    window.counts.push({ drawn: 0, changed: 0 });
    draw(now);
  });
  for (const painter of [CanvasRenderingContext2D.prototype, Path2D.prototype]) {
    for (const [name, { value }] of Object.entries(Object.getOwnPropertyDescriptors(painter))) {
      if (typeof value !== "function" || name === "constructor") continue;
      painter[name] = function (...given) { of("drawn"); return value.apply(this, given); };
    }
  }
  const changes = { subtree: true, attributes: true, childList: true, characterData: true };
  new MutationObserver((seen) => seen.forEach(() => of("changed"))).observe(document.body, changes);
}"""
"""Calls of the canvas and changes of the document, by frame."""


@pytest.mark.parametrize("sync", ["share", "bytes"])
def test_a_frame_touches_only_what_changes_at_64_blocks_a_side(
    visit: Visit, chromium: Any, sync: str
) -> None:
    """Two runs side by side, twice 4096 cells; some two tiles of each change in a frame.

    Painting every cell takes 8240 calls. Writing every number, whether or not it changed, or building
    one table anew makes at least 160 changes, and lays out a fifth of the page.
    """
    visit.page.add_init_script(FRAMES_BY_THE_CLOCK)
    visit.go(address(Setting("flash1", 4096, 64, block="64x64"), 1000, b="flash2;block=64x64", sync=sync))
    visit.page.evaluate(COUNTED)
    chromium.start_tracing(page=visit.page, categories=CATEGORIES)
    visit.press(" ")
    visit.page.wait_for_function(f"() => window.counts.length > {FRAMES}", polling=100)
    visit.press(" ")
    events = json.loads(chromium.stop_tracing())["traceEvents"]
    counts = visit.page.evaluate("window.counts")[1:FRAMES]
    boxes = [event["args"]["beginData"] for event in events if event["name"] == "Layout"][1:]
    assert int(visit.counter("position")) > 1000 + 10 * FRAMES
    assert max(frame["drawn"] for frame in counts) < 100, counts
    assert statistics.median(frame["changed"] for frame in counts) < 150, counts
    # The lower quartile, because a busy machine lays out several frames at once. A table that is built anew
    # is in every layout.
    shares = [layout["dirtyObjects"] / layout["totalObjects"] for layout in boxes]
    assert statistics.quantiles(shares, n=4)[0] < 1 / 6, shares
