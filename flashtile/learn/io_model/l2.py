"""Model of the loads that reach DRAM: the programs of a grid and the L2 cache that they share.

A program of an attention kernel loads its own tile, of queries or of keys, once. Then it loops over blocks of
keys if its tile has queries, and over blocks of queries if its tile has keys.
Programs that load the same block at the same time cost one DRAM read; a block that is loaded again after L2
evicted it costs another. In the model, the card runs as many programs at a time as fit on it, in the order of
the grid and in lockstep. L2 is a cache of blocks that evicts the least recently used one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

UNITS = 256
"""Maximum number of pieces of a stream in the simulation. A piece is one or more consecutive blocks."""

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
        """Number of blocks loaded by all programs together."""
        return sum(len(part) for program in self.programs for part in program)

    @property
    def distinct(self) -> int:
        """Number of different blocks, each loaded by at least one program."""
        edges = sorted((part.start, part.stop) for program in self.programs for part in program if len(part))
        count = end = 0
        for start, stop in edges:
            count += max(0, stop - max(start, end))
            end = max(end, stop)
        return count


def dram_blocks(stream: Stream, count: int, resident: int, capacity: float) -> float:
    """Return the number of blocks that the programs of ``count`` equal streams read from DRAM.

    In the grid, the programs of one stream come before those of the next.

    Args:
        stream: blocks that several programs load.
        count: number of streams.
        resident: number of programs that run at the same time.
        capacity: number of blocks that L2 holds.
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
    """Return the pieces that a program visits, in order. A piece is ``unit`` consecutive blocks.

    ``program`` contains ranges of blocks. A range may count down.
    """
    found: list[int] = []
    for part in program:
        if len(part):
            found += range(part[0] // unit, part[-1] // unit + part.step, part.step)
    return found


def misses(queues: Iterable[Iterator[tuple[int, Sequence[int]]]], capacity: float) -> int:
    """Count the misses of a least-recently-used cache of pieces. A piece is one or more consecutive blocks.

    All programs run in lockstep: at each step, every running program visits one piece.

    Args:
        queues: one iterator for each slot of the card. A slot runs one program after another. For each
            program, the iterator yields (number of the first piece of the program's stream, visited pieces
            relative to this number). Slots may share an iterator.
        capacity: number of pieces that L2 holds.
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
