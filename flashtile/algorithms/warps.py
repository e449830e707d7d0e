"""The warps of a thread block, each with its own registers, that meet in shared memory.

One level below :mod:`flashtile.algorithms.memory`: there a thread block loads tiles from HBM into SRAM, here
its warps read their parts of those tiles into registers. A warp cannot see another's registers. What one is
to learn from another is written to shared memory, and a barrier stands between the writing and the reading.
"""

from __future__ import annotations

from torch import Tensor

from flashtile.algorithms.memory import Memory


class Warps:
    """Counts what crosses between shared memory and registers, and the barriers.

    Args:
        memory: of the thread block; its trace gets the events, its ``element_bytes`` is a number's size where
            no other is given.
        count: warps in the block.

    Attributes:
        read_bytes, written_bytes: from shared memory to registers, and back.
        barriers: how often all warps waited for each other.

    Raises:
        ValueError: fewer than one warp.

    Examples:
        >>> from flashtile.algorithms import Memory
        >>> from flashtile.algorithms.warps import Warps
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
        """A part of a tile in shared memory, into the registers of a warp."""
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
        """What a warp has computed, into shared memory."""
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
        """What a warp computes in its registers, for the trace; it moves nothing."""
        self.memory.record("register", f"{name}.{warp}", rows, cols, op=op, column=value)
        return value

    def barrier(self, why: str = "") -> None:
        """All warps wait until all have come."""
        self.barriers += 1
        self.memory.record("barrier", "barrier", op=why)
