"""The bytes that the Hopper forward kernel moves (``flashtile.backends.hopper``).

One persistent program an SM works off the items that are dealt to it: one or two blocks of query rows, whose
keys it walks from the last to the first. The backend's schedule is asked, not told again, so triton must be
there.
"""

from __future__ import annotations

import heapq
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice

import torch

from flashtile.attn.problem import Extras, Options, Problem
from flashtile.backends.hopper import CAPABILITY
from flashtile.backends.hopper.config import Variant, choose
from flashtile.io_model.calls import Call
from flashtile.io_model.cards import Card
from flashtile.io_model.kernels import L2_SHARE, KernelTraffic, reach
from flashtile.io_model.l2 import UNITS, WAVES, Stream, misses, path_of

LARGEST_HEAD_DIM = 256

START_AND_END = 1
"""Blocks of keys that the start and the end of a block of query rows cost, about."""
VISITS = 2**19
"""Pieces that programs visit in a simulation, about: half a second's worth."""


def serves(call: Call, card: Card) -> bool:
    """Whether the kernel takes contiguous tensors of the call on the card, and triton is there."""
    return (
        card.capability == CAPABILITY
        and call.dtype in ("float16", "bfloat16")
        and all(size % 8 == 0 and size <= LARGEST_HEAD_DIM for size in (call.head_dim, call.width_v))
        and call.score_pairs > 0
        and importlib.util.find_spec("triton") is not None
    )


def forward(call: Call, card: Card) -> KernelTraffic:
    """What one launch moves, of a call that the kernel ``serves``.

    Of large grids, the first turns of every program are simulated, and the rest is taken to go on alike.
    """
    work = Work.of(call)
    width = (call.head_dim + call.width_v) * call.element_bytes
    key_blocks = [-(-seqlen_k // work.variant.BLOCK_N) for _, seqlen_k in call.sequences]
    block_bytes = width * call.rows_k / (sum(key_blocks) * call.num_heads_kv)
    loaded = sum(len(walk) for walks in work.walks for walk in walks) * work.heads
    distinct = call.num_heads_kv * sum(
        Stream(blocks, tuple((walk,) for walk in walks)).distinct
        for blocks, walks in zip(key_blocks, work.walks, strict=True)
    )
    programs = min(card.sm_count, work.items)
    capacity = L2_SHARE * card.l2_bytes / block_bytes
    again = 0.0
    if distinct > capacity:
        unit = -(-max(key_blocks) // UNITS)
        turns = max(WAVES, VISITS * unit * work.items // (loaded * programs))
        queues = [
            list(islice(_paths(work, items, key_blocks, unit), turns)) for items in work.dealt(programs)
        ]
        walked = sum(len(path) for queue in queues for _, path in queue) * unit
        missed, compulsory = (misses(map(iter, queues), pieces) for pieces in (capacity / unit, math.inf))
        again = min((missed - compulsory) * unit * loaded / walked, loaded - distinct)
    return KernelTraffic(
        name="forward",
        programs=work.items,
        resident=programs,
        sm_read=call.q_bytes + loaded * block_bytes,
        dram_read=call.q_bytes + (distinct + again) * block_bytes,
        written=call.out_bytes + call.lse_bytes,
        compulsory_read=round(call.q_bytes + distinct * block_bytes),
    )


def cost_of(walk: range) -> int:
    """Of a block of query rows that walks these blocks of keys, in blocks of keys."""
    return START_AND_END + len(walk)


def dealt(items: int, programs: int, cost: Callable[[int], int] | None) -> Iterator[Iterable[int]]:
    """The items of each program, in its order.

    Args:
        cost: of an item, if they are taken from a queue; else they are dealt out in turn.
    """
    from flashtile.backends.hopper.forward.schedule import turns_of, work_item

    if cost is None:
        for program in range(programs):
            turns = range(turns_of.fn(program, programs, items))
            yield (work_item.fn(turn, program, programs) for turn in turns)
        return
    taken: list[list[int]] = [[] for _ in range(programs)]
    free = [(0, program) for program in range(programs)]
    for item in range(items):
        now, program = heapq.heappop(free)
        taken[program].append(item)
        heapq.heappush(free, (now + cost(item), program))
    yield from taken


def _paths(
    work: Work, items: Iterable[int], key_blocks: list[int], unit: int
) -> Iterator[tuple[int, list[int]]]:
    """What a program walks: (first piece of a key/value head, pieces of it), item by item."""
    pieces = [-(-blocks // unit) for blocks in key_blocks]
    heads_kv = work.heads // work.variant.KV_GROUP
    first = list(accumulate((count * heads_kv for count in pieces), initial=0))
    for item in items:
        sequence, head, walks = work.item(item)
        base = first[sequence] + head // work.variant.KV_GROUP * pieces[sequence]
        yield base, path_of((walk[::-1] for walk in walks), unit)


@dataclass(frozen=True)
class Work:
    """The items of a launch.

    Args:
        variant: what the kernel is compiled for.
        heads: of tiles.
        section: as ``schedule.dense_item`` takes it.
        walks: for each sequence, the key blocks that each of its blocks of rows sees.
        rows: (sequence, place) of each item of a head, of a variable-length batch only.
        items: of all heads.
    """

    variant: Variant
    heads: int
    section: int
    walks: list[list[range]]
    rows: list[tuple[int, int]]
    items: int

    @classmethod
    def of(cls, call: Call) -> Work:
        from flashtile.backends.hopper.forward.launch import section_of, variant_of
        from flashtile.backends.hopper.forward.schedule import items_of

        problem = _problem(call)
        variant = variant_of(problem, choose(problem))
        left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
        rows = variant.BLOCK_M // variant.PACK
        walks = [
            [
                reach(
                    start,
                    min(start + rows, length),
                    length_k - length,
                    length_k,
                    left,
                    right,
                    variant.BLOCK_N,
                )
                for start in range(0, length, rows)
            ]
            for length, length_k in call.sequences
        ]
        heads = call.num_heads_q // variant.PACK
        # Sequences with more keys come first (``tile_table``).
        order = sorted(range(len(walks)), key=lambda sequence: -call.sequences[sequence][1])
        table = [
            (sequence, place)
            for sequence in order
            for place in range(items_of.fn(len(walks[sequence]), variant.PAIRED))
        ]
        return cls(variant, heads, section_of(problem, variant), walks, table, len(table) * heads)

    def dealt(self, programs: int) -> Iterator[Iterable[int]]:
        """As :func:`dealt`."""

        def cost(item: int) -> int:
            return sum(cost_of(walk) for walk in self.item(item)[2])

        return dealt(self.items, programs, cost if self.variant.QUEUED else None)

    def item(self, item: int) -> tuple[int, int, list[range]]:
        """Its sequence, its head, and what its blocks of rows walk."""
        from flashtile.backends.hopper.forward.schedule import block_of, blocks_of, dense_item

        if self.variant.VARLEN:
            sequence, place = self.rows[item // self.heads]
            head = item % self.heads
        else:
            per_head = len(self.rows) // len(self.walks)
            sequence, head, place = dense_item.fn(item, per_head, self.heads, self.section)
        walks, paired = self.walks[sequence], self.variant.PAIRED
        parts = range(blocks_of.fn(len(walks), place, paired))
        return sequence, head, [walks[block_of.fn(len(walks), place, part, paired)] for part in parts]


def _problem(call: Call) -> Problem:
    """Of contiguous tensors that take no memory."""

    def tensor(length: int, heads: int, width: int) -> torch.Tensor:
        shape = (length, heads, width) if call.lengths else (call.batch, length, heads, width)
        return torch.empty(shape, dtype=getattr(torch, call.dtype), device="meta")

    offsets = torch.empty(len(call.sequences) + 1, dtype=torch.int32, device="meta")
    totals = [sum(column) for column in zip(*call.sequences, strict=True)] if call.lengths else None
    rows_q, rows_k = totals or (call.seqlen_q, call.seqlen_k)
    return Problem.from_tensors(
        tensor(rows_q, call.num_heads_q, call.head_dim),
        tensor(rows_k, call.num_heads_kv, call.head_dim),
        tensor(rows_k, call.num_heads_kv, call.width_v),
        Extras(offsets, offsets) if call.lengths else Extras(),
        Options(
            max_seqlen_q=call.seqlen_q if call.lengths else None,
            max_seqlen_k=call.seqlen_k if call.lengths else None,
            window_left=call.window_left,
            window_right=call.window_right,
        ),
    )
