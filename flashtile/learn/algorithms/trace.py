"""Trace of an algorithm, event by event, which can be stored as JSON and replayed by the interactive page.

A trace is complete. Its events determine the totals that :class:`~flashtile.algorithms.memory.Memory`
counted, the contents of SRAM at any moment, and the part of each matrix that is being worked on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

VERSION = 1


class Event(NamedTuple):
    """One step of an algorithm.

    ``rows`` and ``cols`` are half-open ranges of the named matrix, or None. A tile of "S" or "P" has query
    rows and key columns. ``bytes`` are moved (load, store), held in SRAM (compute, free) or held in HBM
    (place, empty, release). ``op`` is the short formula of a computed tile. The FLOPs are those since the
    previous event. ``program`` numbers the programs of ``kernel`` that can run in parallel (a GPU's thread
    blocks). ``values`` maps each watched row to its element of a column vector such as the running maximum m.
    ``data`` is the state that an event of kind page records. The kinds are:

    * place, empty: an input (place) or space for a result (empty) is allocated in HBM.
    * release: an array in HBM is freed.
    * load: a tile is copied from HBM to SRAM and replaces a tile of the same name.
    * compute: a computed value becomes a tile in SRAM and replaces a tile of the same name.
    * store: a tile, or the value of an expression, is written to HBM.
    * free: a tile in SRAM is freed.
    * skip: a tile of the score matrix is not computed.
    * page: block tables or the sequences in memory change; ``data`` holds the new state.
    * shared_load: a warp reads from shared memory into its registers.
    * shared_store: a warp writes from its registers to shared memory.
    * register: a warp computes a value in its registers.
    * barrier: all warps of the thread block wait for each other.
    * tick: time passes; ``Trace.spans`` say what happens in it.

    Names of a warp's tiles end with the number of the warp: "K.2" is K in warp 2.
    """

    kind: str
    name: str
    rows: tuple[int, int] | None = None
    cols: tuple[int, int] | None = None
    bytes: int = 0
    matmul_flops: int = 0
    other_flops: int = 0
    kernel: str = ""
    program: int = 0
    op: str = ""
    values: Mapping[int, float] | None = None
    data: Mapping[str, Any] | None = None


class Span(NamedTuple):
    """One bar of a timeline: ``worker`` keeps ``unit`` busy from ``start`` to ``end`` with ``label``."""

    worker: str
    unit: str
    label: str
    block: int
    start: float
    end: float


_TEXTS = ("kind", "name", "kernel", "op")
_NUMBERS = ("bytes", "matmul_flops", "other_flops", "program")


@dataclass
class Trace:
    """A recording of an algorithm.

    Attributes:
        watch_rows: rows whose statistics (column vectors, such as m and l) are recorded as ``values``.
        algorithm, settings: name and settings of the run, filled in by the caller.
        sram_bytes: size of SRAM.
        events: steps in the order in which they happened.
        spans: timelines of units that work at the same time.

    Examples:
        >>> from flashtile.algorithms import Memory, Trace, flash2
        >>> q, k, v = torch.randn(3, 256, 32).unbind()  # one head, (seqlen, head_dim)
        >>> trace = Trace()
        >>> memory = Memory(trace=trace)
        >>> out, lse = flash2.forward(q, k, v, memory)
        >>> trace.totals()["hbm_read"] == memory.hbm_read
        True
    """

    watch_rows: tuple[int, ...] = (0,)
    algorithm: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    sram_bytes: int = 0
    events: list[Event] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def totals(self) -> dict[str, int]:
        """Return the counters of ``Memory.totals``, computed from the events of the trace."""
        moved = {kind: sum(e.bytes for e in self.events if e.kind == kind) for kind in ("load", "store")}
        return {
            "hbm_read": moved["load"],
            "hbm_written": moved["store"],
            "matmul_flops": sum(e.matmul_flops for e in self.events),
            "other_flops": sum(e.other_flops for e in self.events),
            "sram_peak": max(self._sram_used(), default=0),
            "hbm_peak": max(self._hbm_used(), default=0),
        }

    def _sram_used(self) -> Iterator[int]:
        """Yield the bytes held in SRAM after each event. A new tile replaces a tile of the same name."""
        held: dict[str, int] = {}
        for event in self.events:
            if event.kind in ("load", "compute"):
                held[event.name] = event.bytes
            elif event.kind == "free":
                del held[event.name]
            yield sum(held.values())

    def _hbm_used(self) -> Iterator[int]:
        used = 0
        for event in self.events:
            used += {"place": 1, "empty": 1, "release": -1}.get(event.kind, 0) * event.bytes
            yield used

    def to_json(self) -> dict[str, Any]:
        """Return the trace as lists and dictionaries for JSON, with one list per field of the events.

        Events give their kind, name, kernel and op as indices into the lists ``kinds``, ``names``,
        ``kernels`` and ``ops``. Missing ranges are -1, infinities are None. The keys of ``values`` and
        ``data`` are event numbers.
        """
        columns: dict[str, list[Any]] = {
            name: [getattr(e, name) for e in self.events] for name in (*_TEXTS, *_NUMBERS)
        }
        texts = {name: list(dict.fromkeys(columns[name])) for name in _TEXTS}
        for name in _TEXTS:
            columns[name] = [texts[name].index(text) for text in columns[name]]
        for name, ends in (("row", [e.rows for e in self.events]), ("col", [e.cols for e in self.events])):
            columns[f"{name}_start"] = [-1 if pair is None else pair[0] for pair in ends]
            columns[f"{name}_end"] = [-1 if pair is None else pair[1] for pair in ends]
        return {
            "version": VERSION,
            "algorithm": self.algorithm,
            "settings": self.settings,
            "sram_bytes": self.sram_bytes,
            "totals": self.totals(),
            **{f"{name}s": texts[name] for name in _TEXTS},
            "events": columns,
            "values": {i: _finite(e.values) for i, e in enumerate(self.events) if e.values},
            "data": {i: dict(e.data) for i, e in enumerate(self.events) if e.data},
            "spans": [span._asdict() for span in self.spans],
        }


def _finite(values: Mapping[int, float]) -> dict[int, float | None]:
    return {row: value if math.isfinite(value) else None for row, value in values.items()}
