"""Sixty frames a second: what a frame costs Chromium's main thread, from its own trace."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from visits import Visit, address

from flashtile.visualizer.settings import Setting

FRAME_MS = 1000 / 60
CATEGORIES = ["toplevel", "devtools.timeline"]


@pytest.mark.parametrize("sync", ["share", "bytes"])
def test_a_frame_leaves_time_at_64_blocks_a_side(visit: Visit, chromium: Any, sync: str) -> None:
    """Two runs of 64 x 64 blocks side by side. Processor time, which other processes do not change."""
    visit.go(address(Setting("flash1", 4096, 64, block="64x64"), 1000, b="flash2;block=64x64", sync=sync))
    chromium.start_tracing(page=visit.page, categories=CATEGORIES)
    visit.press(" ")
    # Asked for by a timer: what asks in each frame would be part of its cost.
    reached = "() => Number(document.querySelector('article.a [data-counter=position]').dataset.value) > 1100"
    visit.page.wait_for_function(reached, polling=100, timeout=60_000)
    visit.press(" ")
    events = json.loads(chromium.stop_tracing())["traceEvents"]
    frames = [event for event in events if event["name"] == "FireAnimationFrame"]
    main_thread = (frames[0]["pid"], frames[0]["tid"])
    starts = [frame["ts"] for frame in frames]
    tasks = [
        event
        for event in events
        if event["name"] == "ThreadControllerImpl::RunTask"
        and (event["pid"], event["tid"]) == main_thread
        and "tdur" in event
    ]
    costs = [0.0] * (len(frames) - 1)
    for task in tasks:
        number = sum(start <= task["ts"] + task["dur"] for start in starts) - 1
        if 0 <= number < len(costs):
            costs[number] += task["tdur"] / 1e3
    assert statistics.median(costs) < FRAME_MS, costs
