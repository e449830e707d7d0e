"""Which loads of a kernel reach DRAM: the programs of a grid, the L2 cache they share, and its replacement.

A kernel of attention loads its own tile once and then walks the other sequence, block by block. Programs that
walk the same blocks at the same time cost DRAM one read; a block that comes around again after L2 has dropped
it costs another. The model lets as many programs run as the card holds, in the order of the grid and in step
with one another, and keeps L2 as a list of blocks, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

UNITS = 256
"""Into how many pieces a stream is cut for the simulation, at most: L2 holds dozens of them either way."""

WAVES = 8
"""Grids are simulated for this many rounds of resident programs, and the rest is taken to go on alike."""


@dataclass(frozen=True)
class Stream:
    """Blocks that several programs walk: the keys and values of one head, or the rows of one group of heads.

    Args:
        blocks: length of the stream.
        programs: in the order of the grid, the ranges of blocks that each one walks.
    """

    blocks: int
    programs: tuple[tuple[range, ...], ...]

    @property
    def walked(self) -> int:
        """Blocks loaded by all programs together."""
        return sum(len(part) for program in self.programs for part in program)

    @property
    def distinct(self) -> int:
        """Blocks that at least one program loads."""
        edges = sorted((part.start, part.stop) for program in self.programs for part in program if len(part))
        count = end = 0
        for start, stop in edges:
            count += max(0, stop - max(start, end))
            end = max(end, stop)
        return count


def dram_blocks(stream: Stream, count: int, resident: int, capacity: float) -> float:
    """Blocks that ``count`` streams like this one, one after the other in the grid, read from DRAM.

    Args:
        resident: programs that run at once.
        capacity: blocks that L2 holds.
    """
    if count == 0 or not stream.programs:
        return 0.0
    in_flight = min(count, -(-resident // len(stream.programs)) + 1)
    if in_flight * stream.distinct <= capacity:
        return float(count * stream.distinct)
    simulated = min(count, max(1, -(-WAVES * resident // len(stream.programs))))
    unit = max(1, -(-stream.blocks // UNITS))
    paths = [_path(program, unit) for program in stream.programs]
    misses = _misses(paths, simulated, -(-stream.blocks // unit), resident, capacity / unit)
    return min(misses * unit, simulated * stream.walked) * count / simulated


def _path(program: Sequence[range], unit: int) -> list[int]:
    """The pieces of the stream that a program visits, in order."""
    whole = (range(part.start // unit, -(-part.stop // unit)) for part in program if len(part))
    return [piece for pieces in whole for piece in pieces]


def _misses(paths: Sequence[Sequence[int]], count: int, pieces: int, resident: int, capacity: float) -> int:
    """Least-recently-used misses of ``count`` streams whose programs start in order and move in step."""
    waiting = ((stream * pieces, path) for stream in range(count) for path in paths if path)
    running: list[tuple[int, Sequence[int], int]] = []  # first piece of the stream, path, position
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    while True:
        running = [(base, path, at) for base, path, at in running if at < len(path)]
        for base, path in islice(waiting, resident - len(running)):
            running.append((base, path, 0))
        if not running:
            return misses
        for piece in dict.fromkeys(base + path[at] for base, path, at in running):
            if piece in cache:
                cache.move_to_end(piece)
            else:
                misses += 1
                cache[piece] = None
                if len(cache) > capacity:
                    cache.popitem(last=False)
        running = [(base, path, at + 1) for base, path, at in running]
