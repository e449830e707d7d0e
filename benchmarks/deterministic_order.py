"""What the fixed order of additions costs a deterministic backward: a model of the Hopper kernel's schedule.

    python benchmarks/deterministic_order.py

It needs no GPU. Programs take work tiles, blocks of keys of a head, from one queue. A step adds to one block
of dQ when the blocks of keys behind it have; the next one sees that ``SEEN`` steps later. Time is in steps.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

PROGRAMS = 132
HIDDEN = 1.5
"""Of a work tile's start and end, in steps."""
SEEN = 1.45
"""An addition is signalled one step late, and the signal passes through the L2 cache."""
JITTER = 0.1
TOKENS, WIDTH, BLOCK_N = 16384, 2048, 128
BLOCK_M = {64: 128, 128: 64}


@dataclass
class Program:
    """Where a program is in its work tile."""

    head: int
    place: int
    m: int
    """The block of dQ that it adds to next."""


def share_without_waiting(
    head_dim: int, seqlen: int, causal: bool, swizzle: int, seen: float = SEEN
) -> float:
    """Steps of all programs over the time that they take, with ``swizzle`` heads interleaved."""
    blocks, row_blocks = seqlen // BLOCK_N, seqlen // BLOCK_M[head_dim]
    heads = TOKENS // seqlen * WIDTH // head_dim
    noise = random.Random(0)

    def first_row_block(place: int) -> int:
        return place * row_blocks // blocks if causal else 0

    queue = iter(
        [
            (head, place)
            for first in range(0, heads, swizzle)
            for place in reversed(range(blocks))
            for head in range(first, min(first + swizzle, heads))
        ]
    )
    last_seen = {m: max(n for n in range(blocks) if first_row_block(n) <= m) for m in range(row_blocks)}
    added: dict[tuple[int, int], tuple[int, float]] = {}  # how many, and when the next may
    waiting: dict[tuple[int, int], list[tuple[float, int]]] = {}
    programs: dict[int, Program] = {}
    events: list[tuple[float, int]] = []
    steps = end = 0.0

    def start(p: int, time: float) -> None:
        for head, place in queue:
            programs[p] = Program(head, place, first_row_block(place))
            heapq.heappush(events, (time + HIDDEN, p))
            return

    for p in range(PROGRAMS):
        start(p, 0.0)
    while events:
        time, p = heapq.heappop(events)
        at = programs[p]
        rows = at.head, at.m
        count, free = added.get(rows, (0, 0.0))
        if count != last_seen[at.m] - at.place:
            waiting.setdefault(rows, []).append((time, p))
            continue
        if free > time:
            heapq.heappush(events, (free, p))
            continue
        added[rows] = count + 1, time + seen
        for asked, other in waiting.pop(rows, []):
            heapq.heappush(events, (max(asked, time + seen), other))
        steps, end = steps + 1, max(end, time)
        at.m += 1
        time += 1 + noise.expovariate(1 / JITTER)
        if at.m == row_blocks:
            start(p, time)
        else:
            heapq.heappush(events, (time, p))
    return steps / PROGRAMS / end


def main() -> None:
    swizzles = (1, 2, 4, 8, 16, 32)
    table = Table("head_dim", "S", *map(str, swizzles), title="blocks of so many heads interleaved")
    for head_dim in (64, 128):
        for causal in (False, True):
            for seqlen in (512, 1024, 2048, 4096, 16384):
                alone = share_without_waiting(head_dim, seqlen, causal, 1, seen=0.0)
                shares = [share_without_waiting(head_dim, seqlen, causal, n) / alone for n in swizzles]
                name = f"{head_dim}{' causal' if causal else ''}"
                table.add_row(name, str(seqlen), *(f"{share:.2f}" for share in shares))
    Console().print(table)


if __name__ == "__main__":
    main()
