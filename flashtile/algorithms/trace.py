"""What an algorithm did, event by event, in a form that JSON holds and a page can play.

A trace is complete: adding up its events gives the totals that :class:`~flashtile.algorithms.memory.Memory`
counted, what SRAM holds at any moment, and which part of which matrix is being worked on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

VERSION = 1

KINDS = (
    "place", "empty", "release", "load", "store", "compute", "free", "skip", "page",
    "shared_load", "shared_store", "register", "barrier",
)  # fmt: skip
"""What an event may be.

place, empty: an input, or room for a result, appears in HBM; release: it goes.
load: HBM to a tile in SRAM; store: a tile or an expression to HBM; compute: a value becomes a tile in SRAM
(both replace the tile that had that name); free: a tile leaves SRAM. skip: a tile of the score matrix that
is never computed. page: a change of block tables, in ``data``.
shared_load: a warp reads from shared memory into its registers; shared_store: it writes there; register: it
computes; barrier: all warps of the thread block wait for each other. "K.2" is K in warp 2.
"""


class Event(NamedTuple):
    """One step. ``rows`` and ``cols`` are half-open ranges of the named matrix, None where there is none.

    A tile of "S" or "P" has query rows and key columns. ``bytes`` are moved (load, store), held in SRAM
    (compute, free) or in HBM (place, empty, release). ``op`` says what was computed, in a fixed short form.
    The FLOPs are those since the event before. ``program`` numbers what could run in parallel (a GPU's
    thread blocks) within ``kernel``. ``values`` are the watched rows of a column vector such as the running
    maximum m.
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
_RANGES = ("row_start", "row_end", "col_start", "col_end")


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


@dataclass
class Trace:
    """A recording.

    Attributes:
        watch_rows: rows whose statistics (column vectors, such as m and l) are recorded as ``values``.
        algorithm, settings: what was run, filled in by who runs it.
        sram_bytes: the SRAM that there was.
        events: in the order in which they happened.
        spans: timelines, for what runs at the same time.

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
        """The counters of Memory, from the events alone."""
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
        """Bytes held after each event; a tile takes the place of what had its name."""
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
        """Plain lists and dictionaries, one list a column: small, and small again when compressed.

        Kinds, names, kernels and ops are numbers into the lists ``kinds``, ``names``, ``kernels`` and
        ``ops``; ranges without meaning are -1; infinities are None; ``values`` and ``data`` are keyed by
        the number of their event.
        """
        texts = {column: _distinct(getattr(e, column) for e in self.events) for column in _TEXTS}
        numbers = {column: {text: i for i, text in enumerate(texts[column])} for column in _TEXTS}
        ranges = [(*(e.rows or (-1, -1)), *(e.cols or (-1, -1))) for e in self.events]
        return {
            "version": VERSION,
            "algorithm": self.algorithm,
            "settings": self.settings,
            "sram_bytes": self.sram_bytes,
            "totals": self.totals(),
            "kinds": texts["kind"],
            "names": texts["name"],
            "kernels": texts["kernel"],
            "ops": texts["op"],
            "events": {
                **{column: [numbers[column][getattr(e, column)] for e in self.events] for column in _TEXTS},
                **{column: [getattr(e, column) for e in self.events] for column in _NUMBERS},
                **{column: [ends[i] for ends in ranges] for i, column in enumerate(_RANGES)},
            },
            "values": {i: _finite(e.values) for i, e in enumerate(self.events) if e.values},
            "data": {i: dict(e.data) for i, e in enumerate(self.events) if e.data},
            "spans": [span._asdict() for span in self.spans],
        }


def _finite(values: Mapping[int, float]) -> dict[int, float | None]:
    return {row: value if math.isfinite(value) else None for row, value in values.items()}
