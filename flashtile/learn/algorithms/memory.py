"""The machine of the FlashAttention papers: a large slow memory (HBM) and a small fast one (SRAM).

An algorithm computes only on tiles in SRAM. It loads them from arrays in HBM and stores results there, always
through a :class:`Memory`. The Memory counts the bytes of each move and the floating-point operations between
moves, refuses tiles that do not fit into SRAM, and records every step if it is given a trace.

    memory = Memory(sram_bytes=100 * 1024)
    A = memory.place("A", torch.randn(1024, 64))
    with memory.sram() as sram:
        a = sram.load(A, range(0, 128))               # (128, 64), counted
        sram.E = torch.exp(a)                         # a second tile, 8192 FLOPs
    memory.hbm_read                                   # 128 * 64 * 2 bytes

The body of an algorithm therefore has only loads, computations and stores. A dictionary of :class:`Tile`
above each algorithm describes its computed tiles for the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.learn.algorithms.flops import FlopCounter
from flashtile.learn.algorithms.trace import Event, Trace

KIB = 1024

DEFAULT_SRAM_BYTES = 100 * KIB
"""Default size of SRAM, about that of the FlashAttention paper (section 3.2: M is around 100 KB)."""


class SramExceededError(MemoryError):
    """The tiles of an algorithm do not fit into SRAM."""


@dataclass
class Array:
    """A matrix in HBM. Only :class:`Sram` reads and writes ``tensor`` while an algorithm runs."""

    name: str
    tensor: Tensor  # (rows, cols)
    element_bytes: int

    @property
    def rows(self) -> int:
        return self.tensor.shape[0]

    @property
    def cols(self) -> int:
        return self.tensor.shape[1]

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.element_bytes

    def extent(self, rows: range | None, cols: range | None) -> tuple[range, range]:
        """Return (rows, cols), with None replaced by the range of all rows or columns."""
        return range(self.rows) if rows is None else rows, range(self.cols) if cols is None else cols


class Tile(NamedTuple):
    """Description of a computed tile for the trace.

    Attributes:
        op: formula of the tile.
        rows, cols: names of the ranges that give the tile's position in the whole matrix, such as "keys".
            None: the tile has no position on this axis.
        name: name in SRAM and in the trace; None means the name of the attribute. A new tile replaces an
            older tile of the same name.
        element_bytes: bytes of one element. None means the ``element_bytes`` of the memory.

    Examples:
        >>> from flashtile.algorithms import Memory, Tile, Trace
        >>> memory = Memory(trace=Trace())
        >>> x = memory.place("X", torch.ones(8, 8))
        >>> with memory.sram(tiles={"E": Tile("E = exp(X)", "rows")}, rows=range(4)) as sram:
        ...     sram.E = torch.exp(sram.load(x, range(4)))
        >>> event = memory.trace.events[2]
        >>> event.name, event.rows, event.op
        ('E', (0, 4), 'E = exp(X)')
    """

    op: str = ""
    rows: str | None = "rows"
    cols: str | None = None
    name: str | None = None
    element_bytes: int | None = None

    def position(self, ranges: Mapping[str, range]) -> tuple[range | None, range | None]:
        """Return the ranges (rows, cols) of the tile in the whole matrix.

        The names ``self.rows`` and ``self.cols`` are looked up in ``ranges``. The range of an axis is None if
        the axis has no name or its name is not in ``ranges``.
        """
        rows, cols = (ranges.get(axis) if axis else None for axis in (self.rows, self.cols))
        return rows, cols


@dataclass
class Traffic:
    """Bytes of one array that crossed between HBM and SRAM."""

    read: int = 0
    written: int = 0


@dataclass
class _Tile:
    bytes: int
    rows: range | None
    cols: range | None


class Memory:
    """HBM without limit, SRAM of ``sram_bytes``, and counters of an algorithm's costs.

    Args:
        sram_bytes: size M of SRAM in bytes. Named tiles occupy it; temporaries of one expression are assumed
            to be in registers.
        element_bytes: bytes of one element, independent of the dtype in which torch computes. 2 stands for
            float16. With 1 the counters count elements, as the papers do.
        trace: trace that gets an event for every step; None records nothing.

    Attributes:
        hbm_read, hbm_written: bytes moved so far.
        traffic: bytes moved so far, by array.
        matmul_flops, other_flops: floating-point operations on tiles, in matrix products and elsewhere.
        tiles: tiles that SRAM holds now, by name.
        sram_used, sram_peak: bytes of SRAM in use now, and the most so far.
        hbm_used, hbm_peak: bytes of HBM in use now, and the most so far, including inputs and results.

    Raises:
        ValueError: ``sram_bytes`` or ``element_bytes`` is not a positive int.

    Examples:
        >>> from flashtile.algorithms import Memory
        >>> memory = Memory(sram_bytes=1024)
        >>> x = memory.place("X", torch.ones(8, 8))
        >>> with memory.sram() as sram:
        ...     tile = sram.load(x, rows=range(4))
        >>> memory.hbm_read, memory.sram_peak  # 4 x 8 numbers of two bytes
        (64, 64)
    """

    def __init__(
        self, sram_bytes: int = DEFAULT_SRAM_BYTES, element_bytes: int = 2, trace: Trace | None = None
    ):
        for name, value in (("sram_bytes", sram_bytes), ("element_bytes", element_bytes)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        self.sram_bytes, self.element_bytes, self.trace = sram_bytes, element_bytes, trace
        self.hbm_read = self.hbm_written = 0
        self.sram_used = self.sram_peak = 0
        self.hbm_used = self.hbm_peak = 0
        self.traffic: dict[str, Traffic] = {}
        self.tiles: dict[str, _Tile] = {}
        self._flops = FlopCounter()
        self._recorded_flops = (0, 0)
        self._depth = 0
        self._kernel = ""
        self._programs: dict[str, int] = {}
        if trace is not None:
            trace.sram_bytes = sram_bytes

    def __repr__(self) -> str:
        return f"Memory({', '.join(f'{name}={count}' for name, count in self.totals().items())})"

    @property
    def matmul_flops(self) -> int:
        return self._flops.matmul

    @property
    def other_flops(self) -> int:
        return self._flops.other

    @property
    def sram_elements(self) -> int:
        """Size M of SRAM in elements, as in the papers."""
        return self.sram_bytes // self.element_bytes

    def totals(self) -> dict[str, int]:
        """Return every counter by name."""
        names = ("hbm_read", "hbm_written", "matmul_flops", "other_flops", "sram_peak", "hbm_peak")
        return {name: getattr(self, name) for name in names}

    def place(self, name: str, tensor: Tensor, element_bytes: int | None = None) -> Array:
        """Put an input (rows, cols) into HBM and return it as an :class:`Array`.

        ``element_bytes`` is the size of one element. None means the ``element_bytes`` of the memory.
        """
        return self._appear("place", name, tensor.detach(), element_bytes)

    def empty(self, name: str, rows: int, cols: int, like: Tensor, element_bytes: int | None = None) -> Array:
        """Allocate a result in HBM with the dtype of ``like``; it is NaN until it is written."""
        return self._appear("empty", name, like.new_full((rows, cols), torch.nan), element_bytes)

    def release(self, *arrays: Array) -> None:
        """Free arrays in HBM."""
        for array in arrays:
            self.hbm_used -= array.bytes
            self.record("release", array.name, bytes=array.bytes)

    @contextmanager
    def sram(
        self, kernel: str = "", tiles: Mapping[str, Tile] | None = None, **ranges: range
    ) -> Iterator[Sram]:
        """Open a scope of SRAM. Tiles that are loaded or computed in the scope are freed when it ends.

        The outermost scope is a program (a GPU's thread block); scopes within it share its SRAM.

        Args:
            kernel: name of the program's kernel, if an algorithm has several.
            tiles: descriptions of the computed tiles. The key is the attribute to which a tile is assigned.
            ranges: rows and columns that the program works on. The keywords are the names that ``tiles`` use
                for ranges, such as ``rows`` and ``keys``.
        """
        outermost = self._depth == 0
        if outermost:
            self._kernel = kernel
            self._programs[kernel] = self._programs.get(kernel, -1) + 1
        self._depth += 1
        scope = Sram(self, tiles or {}, ranges)
        with self._flops if outermost else nullcontext():
            try:
                yield scope
            finally:
                self._depth -= 1
                scope.free(*list(scope.names))

    def record(
        self,
        kind: str,
        name: str,
        rows: range | None = None,
        cols: range | None = None,
        bytes: int = 0,
        op: str = "",
        column: Tensor | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Add an event to the trace, if there is one.

        ``column`` is the tile of the event. If the tile has only one column, such as the running maximum m,
        the event also stores the tile's values in the rows that the trace watches.
        """
        if self.trace is None:
            return
        flops = (self.matmul_flops, self.other_flops)
        matmul, other = (now - before for now, before in zip(flops, self._recorded_flops, strict=True))
        self._recorded_flops = flops
        values = None
        if column is not None and rows is not None and column.shape[-1] == 1:
            watched = (row for row in self.trace.watch_rows if row in rows)
            values = {row: column[row - rows.start, 0].item() for row in watched} or None
        self.trace.events.append(
            Event(
                kind, name, _ends(rows), _ends(cols), bytes, matmul, other,
                self._kernel, self._programs.get(self._kernel, 0), op, values, data,
            )
        )  # fmt: skip

    def _appear(self, kind: str, name: str, tensor: Tensor, element_bytes: int | None) -> Array:
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have 2 dimensions (rows, cols), got shape {tuple(tensor.shape)}")
        array = Array(name, tensor, element_bytes or self.element_bytes)
        self.hbm_used += array.bytes
        self.hbm_peak = max(self.hbm_peak, self.hbm_used)
        self.record(kind, name, range(array.rows), range(array.cols), array.bytes)
        return array


class Sram:
    """A scope of named tiles on chip, made by :meth:`Memory.sram`.

    A tensor that is assigned to an attribute becomes a tile of SRAM; the attribute returns it. A new tile
    replaces a tile of the same name in this scope or in a scope around it.

    Examples:
        >>> from flashtile.algorithms import Memory
        >>> memory = Memory()
        >>> x = memory.place("X", torch.ones(8, 8))
        >>> y = memory.empty("Y", 8, 8, like=x.tensor)
        >>> with memory.sram() as sram:
        ...     sram.E = 2 * sram.load(x, rows=range(4))
        ...     sram.store(y, sram.E, rows=range(4))
        >>> y.tensor[:4].sum()
        tensor(64.)
    """

    memory: Memory
    names: list[str]
    _tiles: Mapping[str, Tile]
    _ranges: dict[str, range]
    _values: dict[str, tuple[str, Tensor]]
    _suffix: str

    def __init__(self, memory: Memory, tiles: Mapping[str, Tile], ranges: dict[str, range], suffix: str = ""):
        self.memory, self.names, self._suffix = memory, [], suffix
        self._tiles, self._ranges, self._values = tiles, ranges, {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Sram.__annotations__:
            object.__setattr__(self, name, value)
        else:
            self._assign(name, value, self._tiles.get(name, Tile()).op)

    def __getattr__(self, name: str) -> Tensor:
        if name not in self._values:
            raise AttributeError(f"SRAM holds no computed tile {name}, only {', '.join(self.memory.tiles)}")
        return self._values[name][1]

    def part(self, number: int, **ranges: range) -> Sram:
        """Return a view of this scope for one of several workers, such as warpgroups.

        The names of the worker's tiles end with its number: S.0, S.1, ... Its tiles are freed at the end of
        this scope. ``ranges`` are the worker's rows and columns, in addition to the ranges of this scope.
        """
        part = Sram(self.memory, self._tiles, {**self._ranges, **ranges}, f".{number}")
        part.names = self.names
        return part

    def move(self, **ranges: range) -> None:
        """Set the rows or columns of the tiles that are computed from now on. Earlier tiles stay in SRAM."""
        self._ranges = {**self._ranges, **ranges}

    def start(self, **values: Tensor) -> None:
        """Set the initial values of accumulators. Their events in the trace have an empty formula."""
        for name, value in values.items():
            self._assign(name, value, op="")

    @contextmanager
    def scope(self, **ranges: range) -> Iterator[None]:
        """Open an inner scope, such as one iteration of a loop. Tiles created in it are freed when it ends.

        Args:
            ranges: rows and columns of the inner scope, in addition to those of the outer scope.
        """
        around = self.names, self._ranges
        self.names, self._ranges = [], {**self._ranges, **ranges}
        try:
            yield
        finally:
            try:
                self.free(*list(self.names))
            finally:
                self.names, self._ranges = around

    def _assign(self, attribute: str, value: Tensor, op: str) -> None:
        tile = self._tiles.get(attribute, Tile())
        name = (tile.name or attribute) + self._suffix
        self.compute(name, value, *tile.position(self._ranges), op, tile.element_bytes)
        self._values[attribute] = (name, value)

    def skip(self, name: str, rows: range, cols: range) -> None:
        """Record that a tile of a matrix is not computed."""
        self.memory.record("skip", name, rows, cols)

    def load(
        self, array: Array, rows: range | None = None, cols: range | None = None, name: str | None = None
    ) -> Tensor:
        """Copy a tile of an array from HBM to SRAM; ``rows`` and ``cols`` default to all.

        The tile has the name of the array by default, and it replaces a tile of the same name. To hold
        several tiles of one array at a time, give each tile its own ``name``.
        """
        rows, cols = array.extent(rows, cols)
        tile = array.tensor[rows.start : rows.stop, cols.start : cols.stop].clone()
        size = tile.numel() * array.element_bytes
        name = name or array.name + self._suffix
        self._hold(name, size, rows, cols)
        self.memory.hbm_read += size
        self.memory.traffic.setdefault(array.name, Traffic()).read += size
        self.memory.record("load", name, rows, cols, size, column=tile)
        return tile

    def compute(
        self,
        name: str,
        value: Tensor,
        rows: range | None = None,
        cols: range | None = None,
        op: str = "",
        element_bytes: int | None = None,
    ) -> Tensor:
        """Put a computed value into SRAM as the tile ``name``, and return the value.

        Args:
            name: name of the tile.
            value: the computed tile, (rows, cols).
            rows, cols: position of the tile in the whole matrix, for the trace.
            op: formula of the tile, for the trace.
            element_bytes: bytes of one element. None means the ``element_bytes`` of the memory.
        """
        size = value.numel() * (element_bytes or self.memory.element_bytes)
        self._hold(name, size, rows, cols)
        self.memory.record("compute", name, rows, cols, size, op, value)
        return value

    def store(
        self, array: Array, value: Tensor, rows: range | None = None, cols: range | None = None
    ) -> None:
        """Write a tile, or the value of an expression on tiles, to an array in HBM."""
        rows, cols = array.extent(rows, cols)
        if tuple(value.shape) != (len(rows), len(cols)):
            raise ValueError(
                f"the tile of {array.name} must have shape {(len(rows), len(cols))}, got {tuple(value.shape)}"
            )
        array.tensor[rows.start : rows.stop, cols.start : cols.stop] = value
        size = value.numel() * array.element_bytes
        self.memory.hbm_written += size
        self.memory.traffic.setdefault(array.name, Traffic()).written += size
        self.memory.record("store", array.name, rows, cols, size, column=value)

    def free(self, *names: str) -> None:
        """Free tiles of this scope before the scope ends."""
        for name in names:
            self.names.remove(name)
            tile = self.memory.tiles.pop(name)
            self._forget(name)
            self.memory.sram_used -= tile.bytes
            self.memory.record("free", name, tile.rows, tile.cols, tile.bytes)

    def _forget(self, name: str) -> None:
        """Remove the attributes that refer to the tile ``name``, which is freed or replaced."""
        self._values = {key: held for key, held in self._values.items() if held[0] != name}

    def _hold(self, name: str, size: int, rows: range | None, cols: range | None) -> None:
        memory = self.memory
        self._forget(name)
        held = memory.tiles.get(name)
        used = memory.sram_used - (held.bytes if held else 0) + size
        if used > memory.sram_bytes:
            others = ", ".join(f"{o} {tile.bytes}" for o, tile in memory.tiles.items() if o != name)
            raise SramExceededError(
                f"tile {name} of {size} bytes does not fit into {memory.sram_bytes} bytes of SRAM next to "
                f"{others or 'nothing'}: take smaller blocks or a larger sram_bytes"
            )
        if held is None:
            self.names.append(name)
        memory.tiles[name] = _Tile(size, rows, cols)
        memory.sram_used = used
        memory.sram_peak = max(memory.sram_peak, used)


def _ends(extent: range | None) -> tuple[int, int] | None:
    return None if extent is None else (extent.start, extent.stop)
