"""What is packed is the trace."""

from __future__ import annotations

import base64
import gzip
import json
import math
from itertools import accumulate

import pytest

from flashtile.learn.algorithms.trace import Event, Trace
from flashtile.learn.visualizer.packing import pack
from flashtile.learn.visualizer.recording import record
from flashtile.learn.visualizer.settings import Setting

RUNS = (
    Setting("standard", 96, 32, mask="causal", sram_bytes=16 * 1024),
    Setting("flash1", 100, 32, block="32x16"),
    Setting("flash2", 100, 32, mask="window", block="16x32"),
    Setting("flash3", 128, 32, mask="causal", block="16x32"),
    Setting("flash_decoding", 256, 32, queries="one", block="1x32", num_splits=3),
    Setting("paged", 40, 16, queries="one", page_size=8),
)


def unpack(packed: str) -> Trace:
    """The inverse of pack, but for values, which are rounded and said once."""
    content = json.loads(gzip.decompress(base64.b64decode(packed)))
    forms, rows, cols, programs = (
        list(accumulate(content[name])) for name in ("form", "row", "col", "program")
    )
    events = []
    data = {int(number): entry for number, entry in content["data"]}
    for number, (form, row, col, program) in enumerate(zip(forms, rows, cols, programs, strict=True)):
        kind, name, kernel, op, size, matmul, other, height, width = content["forms"][form]
        extent = None if row < 0 else (row, row + height)
        across = None if col < 0 else (col, col + width)
        events.append(
            Event(
                kind, name, extent, across, size, matmul, other, kernel, program, op, None, data.get(number)
            )
        )
    return Trace(events=events)


@pytest.mark.parametrize("setting", RUNS, ids=lambda setting: setting.algorithm)
def test_every_event_comes_back(setting: Setting) -> None:
    recording = record(setting)
    as_json = [event._replace(values=None) for event in recording.trace.events]
    again = unpack(recording.packed())
    assert len(as_json) > 10
    assert again.events == [
        event._replace(data=json.loads(json.dumps(event.data)) if event.data else None) for event in as_json
    ]
    assert again.totals() == recording.totals


def test_statistics_come_back_at_their_events() -> None:
    recording = record(Setting("flash2", 100, 32, mask="causal", block="16x32"))
    content = json.loads(gzip.decompress(base64.b64decode(recording.packed())))
    assert {(series["name"], series["row"]) for series in content["series"]} == {
        (name, row) for name in ("m", "l", "lse") for row in (0, 33, 66, 99)
    }
    for series in content["series"]:
        known = dict(zip(accumulate(series["at"]), series["value"], strict=True))
        current = None
        for number, event in enumerate(recording.trace.events):
            current = known.get(number, current)
            if event.name == series["name"] and event.values and series["row"] in event.values:
                assert current == pytest.approx(event.values[series["row"]], rel=1e-4)


def test_infinities_keep_their_sign() -> None:
    """An overflowed sum is +inf; a maximum over hidden scores is -inf."""
    values = [-math.inf, math.inf, math.nan]
    events = [Event("compute", "m", (0, 1), (0, 1), 2, values={0: value}) for value in values]
    content = json.loads(gzip.decompress(base64.b64decode(pack(Trace(events=events)))))
    assert content["series"] == [
        {"name": "m", "row": 0, "at": [0, 1, 1], "value": ["-Infinity", "Infinity", "NaN"]}
    ]
