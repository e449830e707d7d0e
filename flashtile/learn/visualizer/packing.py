"""Compact storage of traces: repeated data is stored once, the rest as differences, then compressed.

An algorithm repeats a few steps on different tiles. So an event is stored as a *form* (kind of event, array,
size of the tile, bytes and operations) and a position (first row and column, program). A run has only dozens
of forms. The page's ``trace.js`` reads the format.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from itertools import pairwise
from typing import Any

from flashtile.learn.algorithms.trace import Event, Trace

NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}
SIGNIFICANT_DIGITS = 5
"""Significant digits of the statistics of watched rows. Everything else is exact."""


def as_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def zipped(value: Any) -> bytes:
    """Return ``value`` as gzipped JSON; equal values give equal bytes."""
    return gzip.compress(as_json(value).encode(), compresslevel=9, mtime=0)


def compressed(value: Any) -> str:
    """Return ``value`` as base64 of gzipped JSON."""
    return base64.b64encode(zipped(value)).decode()


def pack(trace: Trace) -> str:
    """Return the events and spans of a trace, without settings and totals, as :func:`compressed` data.

    A form is everything about an event except its position, and ``forms`` lists the different forms. ``form``
    (an index into ``forms``), ``row``, ``col`` and ``program`` have one number per event, stored as the
    difference from the previous event. A row or column of -1 means none. ``series`` has one entry for each
    statistic and watched row. An entry contains the numbers of the events that changed the value, stored as
    differences, and the new values. What is not finite is a string that JavaScript's ``Number`` reads.
    """
    forms: dict[tuple[Any, ...], int] = {}
    numbers = [forms.setdefault(_form(event), len(forms)) for event in trace.events]
    data = {
        "forms": list(forms),
        "form": differences(numbers),
        "row": differences([-1 if event.rows is None else event.rows[0] for event in trace.events]),
        "col": differences([-1 if event.cols is None else event.cols[0] for event in trace.events]),
        "program": differences([event.program for event in trace.events]),
        "series": _series(trace.events),
        "data": [[number, dict(event.data)] for number, event in enumerate(trace.events) if event.data],
        "spans": [list(span) for span in trace.spans],
    }
    return compressed(data)


def _form(event: Event) -> tuple[Any, ...]:
    rows = 0 if event.rows is None else event.rows[1] - event.rows[0]
    cols = 0 if event.cols is None else event.cols[1] - event.cols[0]
    return (
        event.kind, event.name, event.kernel, event.op, event.bytes,
        event.matmul_flops, event.other_flops, rows, cols,
    )  # fmt: skip


def _series(events: list[Event]) -> list[dict[str, Any]]:
    """Return the changes of each statistic in each watched row. Events with unchanged values are skipped."""
    changes: dict[tuple[str, int], list[tuple[int, float | str]]] = {}
    for number, event in enumerate(events):
        for row, value in (event.values or {}).items():
            series = changes.setdefault((event.name, row), [])
            rounded = _round(value)
            if not series or series[-1][1] != rounded:
                series.append((number, rounded))
    return [
        {
            "name": name,
            "row": row,
            "at": differences([number for number, _ in series]),
            "value": [value for _, value in series],
        }
        for (name, row), series in changes.items()
    ]


def _round(value: float) -> float | str:
    if not math.isfinite(value):
        return NOT_FINITE.get(value, "NaN")
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def differences(numbers: list[int]) -> list[int]:
    """Return the first number, then the difference of each number to the one before."""
    return numbers[:1] + [after - before for before, after in pairwise(numbers)]
