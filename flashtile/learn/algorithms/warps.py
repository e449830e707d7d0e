"""The warps of a thread block, each with its own registers, which exchange data through shared memory.

This is one level below :mod:`flashtile.algorithms.memory`: there a thread block loads tiles from HBM into
SRAM, here its warps read their parts of those tiles into registers. A warp cannot read another's registers.
Data for another warp is written to shared memory, and a barrier separates the write from the read.
"""

from __future__ import annotations

from torch import Tensor

from flashtile.learn.algorithms.memory import Memory


class Warps:
    """Counts the bytes moved between shared memory and registers, and the barriers.

    Args:
        memory: memory of the thread block; its trace gets the events, and its ``element_bytes`` is the
        default
            size of a number.
        count: warps in the thread block.

    Attributes:
        read_bytes, written_bytes: bytes from shared memory to registers, and back.
        barriers: number of times that all warps waited for each other.

    Raises:
        ValueError: ``count`` is below 1.

    Examples:
        >>> from flashtile.algorithms import Memory
        >>> from flashtile.learn.algorithms.warps import Warps
        >>> warps = Warps(Memory(), count=4)
        >>> halves = [warps.read("K", torch.ones(8, 4), warp) for warp in range(4)]
        >>> warps.read_bytes  # four times 32 numbers of two bytes
        256
    """

    def __init__(self, memory: Memory, count: int):
        if count < 1:
            raise ValueError(f"the number of warps must be at least 1, got {count}")
        self.memory, self.count = memory, count
        self.read_bytes = self.written_bytes = self.barriers = 0

    def read(
        self,
        name: str,
        tile: Tensor,
        warp: int,
        rows: range | None = None,
        cols: range | None = None,
        element_bytes: int | None = None,
    ) -> Tensor:
        """Read a part of a tile from shared memory into the registers of a warp."""
        size = tile.numel() * (element_bytes or self.memory.element_bytes)
        self.read_bytes += size
        self.memory.record("shared_load", f"{name}.{warp}", rows, cols, size)
        return tile

    def write(
        self,
        name: str,
        value: Tensor,
        warp: int,
        rows: range | None = None,
        cols: range | None = None,
        element_bytes: int | None = None,
    ) -> Tensor:
        """Write a value from the registers of a warp to shared memory."""
        size = value.numel() * (element_bytes or self.memory.element_bytes)
        self.written_bytes += size
        self.memory.record("shared_store", f"{name}.{warp}", rows, cols, size)
        return value

    def compute(
        self,
        name: str,
        value: Tensor,
        warp: int,
        rows: range | None = None,
        cols: range | None = None,
        op: str = "",
    ) -> Tensor:
        """Record in the trace a value that a warp computes in its registers; nothing is moved."""
        self.memory.record("register", f"{name}.{warp}", rows, cols, op=op, column=value)
        return value

    def barrier(self, why: str = "") -> None:
        """Make all warps wait until all have arrived."""
        self.barriers += 1
        self.memory.record("barrier", "barrier", op=why)
