"""Bytes that the Hopper forward kernel moves (``flashtile.backends.hopper``).

Each SM runs one persistent program that computes work tiles. A work tile is one or two blocks of query rows;
the program visits their keys from the last to the first. The backend's own schedule says which tiles a
program computes and in which order, so triton must be installed.
"""

from __future__ import annotations

import heapq
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice

import torch

from flashtile.backends.common.device import Target, compiling_for
from flashtile.backends.hopper import CAPABILITY
from flashtile.backends.hopper.forward.config import ForwardVariant, choose
from flashtile.hardware.calls import Call, walks
from flashtile.hardware.cards import Card
from flashtile.learn.io_model.kernels import L2_SHARE, KernelTraffic
from flashtile.learn.io_model.l2 import UNITS, WAVES, Stream, misses, path_of
from flashtile.problems.attention import OptionalTensors, Options, Problem

LARGEST_HEAD_DIM = 256

START_AND_END = 1
"""Approximate cost of a query block's prologue and epilogue, in units of one key block."""
VISITS = 2**19
"""Approximate maximum of simulated visits of programs to pieces of K and V. They take half a second."""


def serves(call: Call, card: Card) -> bool:
    """Whether the kernel supports the call with contiguous tensors on the card, and triton is installed."""
    return (
        card.capability == CAPABILITY
        and call.dtype in ("float16", "bfloat16")
        and all(size % 8 == 0 and size <= LARGEST_HEAD_DIM for size in (call.head_dim, call.width_v))
        and call.score_pairs > 0
        and importlib.util.find_spec("triton") is not None
    )


def forward(call: Call, card: Card) -> KernelTraffic:
    """Return the traffic of one launch, for a call and card that pass :func:`serves`.

    In a large grid only the first work tiles of every program are simulated; the rest is extrapolated.
    """
    work = WorkTiles.of(call, card)
    width = (call.head_dim + call.width_v) * call.element_bytes
    key_blocks = [-(-seqlen_k // work.variant.BLOCK_N) for _, seqlen_k in call.sequences]
    block_bytes = width * call.rows_k / (sum(key_blocks) * call.num_heads_kv)
    loaded = sum(len(walk) for walks in work.walks for walk in walks) * work.heads
    distinct = call.num_heads_kv * sum(
        Stream(blocks, tuple((walk,) for walk in walks)).distinct
        for blocks, walks in zip(key_blocks, work.walks, strict=True)
    )
    programs = min(card.sm_count, work.count)
    capacity = L2_SHARE * card.l2_bytes / block_bytes
    again = 0.0
    if distinct > capacity:
        unit = -(-max(key_blocks) // UNITS)
        most = max(WAVES, VISITS * unit * work.count // (loaded * programs))
        queues = [
            list(islice(paths_of(work, tiles, key_blocks, unit), most)) for tiles in work.by_program(programs)
        ]
        walked = sum(len(path) for queue in queues for _, path in queue) * unit
        missed, compulsory = (misses(map(iter, queues), pieces) for pieces in (capacity / unit, math.inf))
        again = min((missed - compulsory) * unit * loaded / walked, loaded - distinct)
    return KernelTraffic(
        name="forward",
        programs=work.count,
        resident=programs,
        sm_read=call.q_bytes + loaded * block_bytes,
        dram_read=call.q_bytes + (distinct + again) * block_bytes,
        written=call.out_bytes + call.lse_bytes,
        compulsory_read=round(call.q_bytes + distinct * block_bytes),
    )


def cost_of(walk: range) -> int:
    """Return the cost of a query block that visits the key blocks ``walk``, in units of one key block."""
    return START_AND_END + len(walk)


def by_program(count: int, programs: int, cost: Callable[[int], int] | None) -> Iterator[Iterable[int]]:
    """Yield for each program the indices (below ``count``) of its work tiles, in the order of execution.

    Args:
        cost: cost of the work tile at an index, if programs take tiles from the work queue. None if tiles are
            assigned in serpentine order.
    """
    from flashtile.backends.hopper.forward.schedule import num_own_tiles, serpentine_order

    if cost is None:
        for program in range(programs):
            own = range(num_own_tiles.fn(program, programs, count))
            yield (serpentine_order.fn(t, program, programs) for t in own)
        return
    taken: list[list[int]] = [[] for _ in range(programs)]
    free = [(0, program) for program in range(programs)]
    for index in range(count):
        now, program = heapq.heappop(free)
        taken[program].append(index)
        heapq.heappush(free, (now + cost(index), program))
    yield from taken


def paths_of(
    work: WorkTiles, indices: Iterable[int], key_blocks: list[int], unit: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield the pieces of K and V that each work tile of a program visits, in the format of :func:`misses`.

    A piece is ``unit`` consecutive key blocks. Pieces are numbered over all sequences and key/value heads.
    Each item is (number of the first piece of the work tile's head, visited pieces relative to this number).

    Args:
        indices: work tiles of the program, in order.
        key_blocks: number of key blocks of each sequence.
        unit: key blocks per piece.
    """
    pieces = [-(-blocks // unit) for blocks in key_blocks]
    group = work.heads // work.heads_kv
    first = list(accumulate((count * work.heads_kv for count in pieces), initial=0))
    for index in indices:
        sequence, head, walks = work.tile(index)
        base = first[sequence] + head // group * pieces[sequence]
        yield base, path_of((walk[::-1] for walk in walks), unit)


@dataclass(frozen=True)
class WorkTiles:
    """The work tiles of a launch.

    Args:
        variant: compile-time options of the kernel.
        heads: number of query heads divided by the number of query heads that share a tile.
        heads_kv: number of key heads.
        swizzle: number of heads whose work tiles are interleaved.
        walks: for each sequence, the key blocks that each of its query blocks attends to.
        rows: (sequence, index of the tile in the sequence) of all work tiles of one head, in the order of the
            kernel's tile table.
        count: work tiles of all heads.
    """

    variant: ForwardVariant
    heads: int
    heads_kv: int
    swizzle: int
    walks: list[list[range]]
    rows: list[tuple[int, int]]
    count: int

    @classmethod
    def of(cls, call: Call, card: Card) -> WorkTiles:
        from flashtile.backends.hopper.forward.launch import forward_variant
        from flashtile.backends.hopper.forward.rounds import plan_of
        from flashtile.backends.hopper.forward.schedule import tiles_of_head

        problem = _problem(call)
        with compiling_for(Target.of_card(card)):  # tiles are chosen by the number of multiprocessors
            plan = plan_of(problem, choose(problem))
            variant = forward_variant(problem, plan)
        blocks = (variant.BLOCK_M // variant.PACK, variant.BLOCK_N)
        seen = [walks(call, lengths, blocks) for lengths in call.sequences]
        heads = call.num_heads_q // variant.PACKED_HEADS
        # Sequences with more keys come first, as in the kernel's tile table.
        order = sorted(range(len(seen)), key=lambda sequence: -call.sequences[sequence][1])
        table = [
            (sequence, place)
            for sequence in order
            for place in range(tiles_of_head.fn(len(seen[sequence]), variant.PAIRED))
        ]
        return cls(variant, heads, call.num_heads_kv, plan.interleaved, seen, table, len(table) * heads)

    def by_program(self, programs: int) -> Iterator[Iterable[int]]:
        """Yield the indices of each program's work tiles, as the function :func:`by_program` does."""

        def cost(index: int) -> int:
            return sum(cost_of(walk) for walk in self.tile(index)[2])

        return by_program(self.count, programs, cost if self.variant.QUEUED else None)

    def tile(self, index: int) -> tuple[int, int, list[range]]:
        """Return a work tile as (sequence, head, key blocks that each query block of the tile visits)."""
        from flashtile.backends.hopper.forward.schedule import block_of_part, dense_tile, num_parts

        if self.variant.VARLEN:
            sequence, place = self.rows[index // self.heads]
            head = index % self.heads
        else:
            per_head = len(self.rows) // len(self.walks)
            sequence, head, place = dense_tile.fn(index, per_head, self.heads, self.swizzle)
        walks, paired = self.walks[sequence], self.variant.PAIRED
        parts = range(num_parts.fn(len(walks), place, paired))
        return sequence, head, [walks[block_of_part.fn(len(walks), place, part, paired)] for part in parts]


def _problem(call: Call) -> Problem:
    """Return the call as a ``Problem`` of contiguous tensors on the meta device, which take no memory."""

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
        OptionalTensors(cu_seqlens_q=offsets, cu_seqlens_k=offsets) if call.lengths else OptionalTensors(),
        Options(
            max_seqlen_q=call.seqlen_q if call.lengths else None,
            max_seqlen_k=call.seqlen_k if call.lengths else None,
            masking=call.masking,
        ),
    )
