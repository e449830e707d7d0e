"""Runs an algorithm and keeps its trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.learn.algorithms import (
    flash1,
    flash2,
    flash3,
    flash3_schedule,
    flash_decoding,
    paged,
    standard,
    unified_max,
)
from flashtile.learn.algorithms.memory import Memory
from flashtile.learn.algorithms.trace import Event, Trace
from flashtile.learn.visualizer.packing import pack
from flashtile.learn.visualizer.settings import DEFAULT_PAGE_SIZE, DEFAULT_SPLITS, SPLIT, SRAM_SIZES, Setting

WATCHED_ROWS = 4
SEED = 0

MAX_EVENTS = 300_000
"""Most events of a run. More cannot be drawn, take minutes to record and megabytes to keep."""


@dataclass(frozen=True)
class Recording:
    """A recorded run and its summary.

    Attributes:
        setting: algorithm and sizes of the run.
        trace: events of the run.
        totals: bytes, operations and peaks, as Memory counted them.
        traffic: bytes read and written of each array.
    """

    setting: Setting
    trace: Trace
    totals: dict[str, int]
    traffic: dict[str, tuple[int, int]]

    def as_record(self) -> dict[str, Any]:
        """Return the run's entry in the page's catalogue. Its events are packed separately."""
        blocks = _tile_sizes(self.trace)
        return {
            "algorithm": self.setting.algorithm,
            "settings": {**self.setting.as_record(), **blocks, "window_size": list(self.setting.window_size)},
            "totals": self.totals,
            "traffic": {name: list(bytes) for name, bytes in self.traffic.items()},
            "events": len(self.trace.events),
        }

    def packed(self) -> str:
        return pack(self.trace)


def record(setting: Setting) -> Recording:
    """Run an algorithm on random inputs and record it. An element counts as two bytes, as in float16.

    Raises:
        ValueError: an unknown algorithm or block, a length below 1, or too many events.
        SramExceededError: the blocks do not fit into SRAM.
    """
    if setting.algorithm not in RUNNERS:
        raise ValueError(f"algorithm must be one of {', '.join(RUNNERS)}, got {setting.algorithm!r}")
    for name in ("seqlen", "head_dim"):
        if getattr(setting, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(setting, name)}")
    rows = 1 if setting.queries == "one" else setting.seqlen
    trace = Trace(
        events=_Events(),
        watch_rows=watched_rows(rows, setting.num_splits),
        algorithm=setting.algorithm,
        settings=setting.as_record(),
    )
    memory = Memory(sram_bytes=setting.sram_bytes or max(SRAM_SIZES), trace=trace)
    generator = torch.Generator().manual_seed(SEED)

    def random(rows: int) -> Tensor:
        return torch.randn(rows, setting.head_dim, generator=generator, device="cpu")

    RUNNERS[setting.algorithm](setting, memory, random)
    traffic = {name: (moved.read, moved.written) for name, moved in memory.traffic.items()}
    return Recording(setting, trace, memory.totals(), traffic)


class _Events(list[Event]):
    """List of events that stops a run that is too long to watch."""

    def append(self, event: Event) -> None:
        if len(self) == MAX_EVENTS:
            raise ValueError(
                f"seqlen must be shorter or the blocks larger: the run has more than {MAX_EVENTS} events"
            )
        super().append(event)


def watched_rows(rows: int, num_splits: int | None = None) -> tuple[int, ...]:
    """Return the rows whose statistics are kept: the first, the last and some between.

    With splits, they are the first row of each split.
    """
    if num_splits is not None:
        return tuple(range(0, num_splits * rows, rows))
    return tuple(sorted({(rows - 1) * i // (WATCHED_ROWS - 1) for i in range(WATCHED_ROWS)}))


def _inputs(setting: Setting, random: Callable[[int], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    rows = 1 if setting.queries == "one" else setting.seqlen
    return random(rows), random(setting.seqlen), random(setting.seqlen)


def _options(setting: Setting) -> dict[str, Any]:
    block_m, block_n = setting.block_sizes
    options = {"window_size": setting.window_size, "block_m": block_m, "block_n": block_n}
    if setting.algorithm in SPLIT:
        options["num_splits"] = setting.num_splits or DEFAULT_SPLITS
    return options


def _forward(module: Any, setting: Setting, memory: Memory, random: Callable[[int], Tensor]) -> None:
    module.forward(*_inputs(setting, random), memory, **_options(setting))


def _flash3(setting: Setting, memory: Memory, random: Callable[[int], Tensor]) -> None:
    """Record a run with the timeline of one thread block that attends to all keys."""
    _forward(flash3, setting, memory, random)
    assert memory.trace is not None
    starts = {event.cols for event in memory.trace.events if event.name == "S.0"}
    memory.trace.spans = flash3_schedule.schedule(len(starts))


def _paged(setting: Setting, memory: Memory, random: Callable[[int], Tensor]) -> None:
    """Record two sequences that share a prompt of two thirds of the tokens and differ in the last third."""
    q, k, v = random(2), random(setting.seqlen), random(setting.seqlen)
    page_size = setting.page_size or DEFAULT_PAGE_SIZE
    paged.forked(q, k, v, memory, prompt=2 * setting.seqlen // 3, page_size=page_size)


def _backward(module: Any, setting: Setting, memory: Memory, random: Callable[[int], Tensor]) -> None:
    """Record the backward pass, without the forward pass."""
    q, k, v = _inputs(setting, random)
    out, *kept = module.forward(q, k, v, Memory(), window_size=setting.window_size)
    dout = random(q.shape[0])
    if module is standard:
        module.backward(q, k, v, *kept, dout, memory)
    else:
        module.backward(q, k, v, out, *kept, dout, memory, **_options(setting))


RUNNERS: dict[str, Callable[[Setting, Memory, Callable[[int], Tensor]], None]] = {
    "standard": partial(_forward, standard),
    "flash1": partial(_forward, flash1),
    "flash2": partial(_forward, flash2),
    "flash3": _flash3,
    "flash_decoding": partial(_forward, flash_decoding),
    "unified_max": partial(_forward, unified_max),
    "paged": _paged,
    "standard_backward": partial(_backward, standard),
    "flash1_backward": partial(_backward, flash1),
    "flash2_backward": partial(_backward, flash2),
}


def _tile_sizes(trace: Trace) -> dict[str, int]:
    """Return the size of the largest computed tile of scores, as block_m and block_n."""
    tiles = [
        e for e in trace.events if e.kind == "compute" and e.name.split(".")[0] == "S" and e.rows and e.cols
    ]
    if not tiles:
        return {}
    return {
        "block_m": max(e.rows[1] - e.rows[0] for e in tiles if e.rows),
        "block_n": max(e.cols[1] - e.cols[0] for e in tiles if e.cols),
    }
