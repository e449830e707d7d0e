"""Runs that the page makes itself: event for event, and number for number, what Python records."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from visits import KIB, Visit

from flashtile.algorithms import Memory, Trace, flash1, flash2, standard
from flashtile.learn.algorithms.trace import Event
from flashtile.learn.visualizer.page import small_inputs

MODULES = {"standard": standard, "flash1": flash1, "flash2": flash2}
WATCHED = ("m", "l", "lse")


def python_run(made: dict[str, Any], seqlen: int, sram: int, counting: bool = False) -> Trace:
    """The same run in Python, in float64 as JavaScript computes."""
    rows = 1 if made.get("queries") == "one" else seqlen
    if seqlen > 64:
        q, k, v = torch.zeros(3, seqlen, made["head_dim"]).unbind()
    elif counting:
        q, v = torch.eye(4)[:1].double(), torch.eye(4)[[i % 4 for i in range(seqlen)]].double()
        k = torch.outer(torch.arange(1, seqlen + 1), torch.eye(4)[0]).double()
    else:
        inputs = small_inputs()
        q, k, v = (torch.tensor(inputs[name][:seqlen], dtype=torch.float64) for name in "qkv")
    options: dict[str, Any] = {"softmax_scale": 1.0} if counting else {}
    if "block" in made:
        options |= dict(zip(("block_m", "block_n"), map(int, made["block"].split("x")), strict=True))
    window = {"full": (-1, -1), "causal": (-1, 0), "window": (seqlen // 4 - 1, 0)}[made.get("mask", "full")]
    trace = Trace(watch_rows=tuple(range(rows)))
    memory = Memory(sram, made.get("element", 2), trace)
    MODULES[made["algorithm"]].forward(q[:rows], k, v, memory, window_size=window, **options)
    return trace


def as_rows(events: list[Event]) -> list[list[Any]]:
    return [
        [
            e.kind, e.name, e.kernel, e.op, e.bytes, e.matmul_flops, e.other_flops, e.program,
            *(e.rows or (-1, -1)), *(e.cols or (-1, -1)),
        ]
        for e in events
    ]  # fmt: skip


def series_of(events: list[Event]) -> dict[str, list[list[float]]]:
    """By name and row: [event, value] where the value changes."""
    changes: dict[str, list[list[float]]] = {}
    for number, event in enumerate(events):
        for row, value in (event.values or {}).items() if event.name in WATCHED else ():
            known = changes.setdefault(f"{event.name} {row}", [])
            if not known or known[-1][1] != value:
                known.append([number, value])
    return changes


MAKE = """([wanted, sram]) => {
  const { trace, totals } = flashtilePage.catalog.maker.recording(wanted, sram);
  const all = Array.from({ length: trace.length }, (_, i) => trace.event(i));
  const end = (start, size) => (start < 0 ? -1 : start + size);
  const rows = all.map((e) => [e.kind, e.name, e.kernel, e.op, e.bytes, e.matmul, e.other, e.program,
    e.row, end(e.row, e.rows), e.col, end(e.col, e.cols)]);
  const series = trace.series.map((s) => [`${s.name} ${s.row}`, [...s.at].map((at, i) => [at, s.value[i]])]);
  return [rows, Object.fromEntries(series), totals];
}"""
RUNS = [
    {"algorithm": "flash2", "seqlen": 8, "block": "2x2"},
    {"algorithm": "flash2", "seqlen": 11, "block": "4x3", "mask": "causal"},
    {"algorithm": "flash2", "seqlen": 11, "block": "3x1", "mask": "window"},
    {"algorithm": "flash2", "seqlen": 4, "block": "2x2", "element": 4},
    {"algorithm": "flash1", "seqlen": 12, "block": "3x2"},
    {"algorithm": "flash1", "seqlen": 11, "block": "11x5", "mask": "causal"},
    {"algorithm": "standard", "seqlen": 6},
    {"algorithm": "standard", "seqlen": 64, "mask": "window"},
]


def test_made_runs_are_those_of_python(visit: Visit) -> None:
    for run in RUNS:
        compare(visit, run, 100 * KIB)
    large = {"algorithm": "flash1", "seqlen": 1024, "head_dim": 64, "block": "64x768", "element": 1}
    compare(visit, large, 192 * KIB)
    compare(visit, {"algorithm": "standard", "seqlen": 512, "head_dim": 64, "element": 1}, 64 * KIB)
    counting = {"algorithm": "flash2", "queries": "one", "seqlen": 4, "block": "1x2", "element": 2}
    compare(visit, {**counting, "inputs": "counting"}, 100 * KIB)


def compare(visit: Visit, run: dict[str, Any], sram: int) -> None:
    rows, series, totals = visit.page.evaluate(MAKE, [run, sram])
    trace = python_run(run, run["seqlen"], sram, run.get("inputs") == "counting")
    for ours, theirs in itertools.zip_longest(rows, as_rows(trace.events)):
        assert ours == theirs, run
    assert totals == trace.totals()
    if run["seqlen"] > 64:
        return
    expected = series_of(trace.events)
    assert series.keys() == expected.keys(), run
    for name, changes in expected.items():
        flat = list(itertools.chain(*changes))
        shown = [-math.inf if x is None else x for x in itertools.chain(*series[name])]
        assert shown == pytest.approx(flat, rel=1e-12, abs=1e-12), (run, name)
