"""The warps of a thread block, each with its own registers, which exchange data through shared memory.

This is one level below :mod:`flashtile.algorithms.memory`: there a thread block loads tiles from HBM into
SRAM, here its warps read their parts of those tiles into registers. A warp cannot read another's registers.
Data for another warp is written to shared memory, and a barrier separates the write from the read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from flashtile.learn.algorithms.memory import Memory, Tile


class Warps:
    """Counts the bytes moved between shared memory and registers, and the barriers; iterates over the warps.

    Args:
        memory: memory of the thread block. Its trace gets the events, and its ``element_bytes`` is the
            default size of an element.
        count: warps in the thread block.
        tiles: descriptions of the tiles that warps read, write and compute, by name.

    Attributes:
        read_bytes, written_bytes: bytes from shared memory to registers, and back.
        barriers: number of times that all warps waited for each other.

    Raises:
        ValueError: ``count`` is below 1.

    Examples:
        >>> from flashtile.algorithms import Memory
        >>> from flashtile.learn.algorithms.warps import Warps
        >>> warps = Warps(Memory(), count=4)
        >>> halves = [warp.read("K", torch.ones(8, 4)) for warp in warps]
        >>> warps.read_bytes  # four times 32 numbers of two bytes
        256
    """

    def __init__(self, memory: Memory, count: int, tiles: Mapping[str, Tile] | None = None):
        if count < 1:
            raise ValueError(f"the number of warps must be at least 1, got {count}")
        self.memory, self.count = memory, count
        self.read_bytes = self.written_bytes = self.barriers = 0
        self._warps = [Warp(self, number, tiles or {}) for number in range(count)]

    def __iter__(self) -> Iterator[Warp]:
        return iter(self._warps)

    def barrier(self, why: str = "") -> None:
        """Make all warps wait until all have arrived."""
        self.barriers += 1
        self.memory.record("barrier", "barrier", op=why)


class Warp:
    """One warp of a thread block and its registers.

    A tensor that is assigned to an attribute is kept in the registers; the attribute returns it. The
    assignment is recorded in the trace if the ``tiles`` of :class:`Warps` describe the attribute.

    Examples:
        >>> from flashtile.algorithms import Memory, Tile
        >>> from flashtile.learn.algorithms.warps import Warps
        >>> warps = Warps(Memory(), count=2, tiles={"S": Tile("S = Q K^T", "rows", "keys")})
        >>> q, k = torch.randn(8, 4), torch.randn(16, 4)
        >>> for warp, rows in zip(warps, (range(4), range(4, 8))):
        ...     warp.take(rows=rows, keys=range(16))
        ...     warp.S = warp.read("Q", q[rows.start : rows.stop]) @ warp.read("K", k).T
        >>> warps.read_bytes  # twice half of q and all of k, two bytes each
        320
    """

    warps: Warps
    number: int
    _tiles: Mapping[str, Tile]
    _ranges: dict[str, range]

    def __init__(self, warps: Warps, number: int, tiles: Mapping[str, Tile]):
        self.warps, self.number, self._tiles, self._ranges = warps, number, tiles, {}

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name not in Warp.__annotations__ and name in self._tiles:
            tile = self._tiles[name]
            self._record("register", tile.name or name, tile, op=tile.op, column=value)

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(f"the registers of warp {self.number} hold no {name}")

    def take(self, **ranges: range) -> None:
        """Set the rows and columns that the warp works on.

        The keywords are the names that ``tiles`` use for ranges, such as ``rows`` and ``keys``.
        """
        self._ranges |= ranges

    def start(self, **values: Tensor) -> None:
        """Set the initial values of accumulators without recording an event."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def read(self, name: str, tile: Tensor) -> Tensor:
        """Read the warp's part of a tile from shared memory into registers."""
        self.warps.read_bytes += self._move("shared_load", name, tile)
        return tile

    def write(self, name: str, value: Tensor) -> None:
        """Write a value from registers to shared memory."""
        self.warps.written_bytes += self._move("shared_store", name, value)

    def _move(self, kind: str, name: str, value: Tensor) -> int:
        """Record a move and return its bytes."""
        tile = self._tiles.get(name, Tile())
        size = value.numel() * (tile.element_bytes or self.warps.memory.element_bytes)
        self._record(kind, name, tile, bytes=size)
        return size

    def _record(self, kind: str, name: str, tile: Tile, **what: Any) -> None:
        self.warps.memory.record(kind, f"{name}.{self.number}", *tile.position(self._ranges), **what)
