"""Model of the loads that reach DRAM: the programs of a grid and the L2 cache that they share.

A program of an attention kernel loads its own tile once and then loops over the blocks of the other sequence.
Programs that load the same block at the same time cost one DRAM read; a block that is loaded again after L2
evicted it costs another. In the model, the card runs as many programs at a time as fit on it, in the order of
the grid and in lockstep. L2 is a cache of blocks that evicts the least recently used one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

UNITS = 256
"""Most pieces that a stream is cut into for the simulation; a piece is one or more consecutive blocks."""

WAVES = 8
"""Rounds of resident programs that are simulated; the rest of a grid is extrapolated."""


@dataclass(frozen=True)
class Stream:
    """Blocks that several programs load: keys and values of one head, or query rows of one group of heads.

    Args:
        blocks: number of blocks in the stream.
        programs: ranges of blocks that each program loads, in the order of the grid.
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
    """Return the blocks read from DRAM for ``count`` equal streams that follow each other in the grid.

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
    """Return the pieces of ``unit`` blocks that a program visits, in order; a range may count down."""
    found: list[int] = []
    for part in program:
        if len(part):
            found += range(part[0] // unit, part[-1] // unit + part.step, part.step)
    return found


def misses(queues: Iterable[Iterator[tuple[int, Sequence[int]]]], capacity: float) -> int:
    """Count the misses of a least-recently-used cache. All programs run in lockstep, one piece at a time.

    Args:
        queues: one iterator for each slot that a program runs in. For each program of the slot in turn, it
            yields (number of the stream's first piece, visited pieces counted from there). Slots may share an
            iterator.
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
