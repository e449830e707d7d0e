"""Which loads of a kernel reach DRAM: the programs of a grid, the L2 cache they share, and its replacement.

A kernel of attention loads its own tile once and then walks the other sequence, block by block. Programs that
walk the same blocks at the same time cost DRAM one read; a block that comes around again after L2 has dropped
it costs another. The model lets as many programs run as the card holds, in the order of the grid and in step
with one another, and keeps L2 as a list of blocks, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
    paths = [path_of(program, unit) for program in stream.programs]
    pieces = -(-stream.blocks // unit)
    waiting = ((number * pieces, path) for number in range(simulated) for path in paths)
    missed = misses([waiting] * resident, capacity / unit)
    return min(missed * unit, simulated * stream.walked) * count / simulated


def path_of(program: Iterable[range], unit: int) -> list[int]:
    """The pieces of ``unit`` blocks that a program visits, in order; a range may fall."""
    found: list[int] = []
    for part in program:
        if len(part):
            found += range(part[0] // unit, part[-1] // unit + part.step, part.step)
    return found


def misses(queues: Iterable[Iterator[tuple[int, Sequence[int]]]], capacity: float) -> int:
    """Least-recently-used misses of programs that move in step, a piece each at a time.

    Args:
        queues: one for each place that a program runs in: (first piece of a stream, pieces of that stream) of
            all that runs there, one after the other. Places that share an iterator take what comes next.
        capacity: pieces that L2 holds.
    """
    programs = [(first + piece for first, path in queue for piece in path) for queue in queues]
    cache: OrderedDict[int, None] = OrderedDict()
    count = 0
    while programs:
        at = [next(program, None) for program in programs]
        for piece in dict.fromkeys(at):
            if piece is None:
                continue
            if piece in cache:
                cache.move_to_end(piece)
            else:
                count += 1
                cache[piece] = None
                if len(cache) > capacity:
                    cache.popitem(last=False)
        if None in at:
            programs = [program for program, piece in zip(programs, at, strict=True) if piece is not None]
    return count
