"""The schedule of attention over a cache on Hopper computes each key block once and joins the parts."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from benchmarks.suite import drawn
from flashtile.backends.common.device import Target, multiprocessors
from flashtile.backends.hopper.decode.combine import (
    RECORD_WIDTH,
    PartialRecord,
    combine_divided_kernel,
    combine_recorded_kernel,
    write_partial_record,
)
from flashtile.backends.hopper.decode.config import DIVIDED_SLOTS, choose
from flashtile.backends.hopper.decode.launch import hopper_decode_variant, packed
from flashtile.backends.hopper.decode.work import (
    PART_COST,
    TablePointers,
    balanced_start,
    balanced_tile,
    behind_partials,
    queued_tile,
    table_kernel,
)
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH
from flashtile.backends.portable.decode.combine import CombinePointers, CombineVariant
from flashtile.backends.portable.decode.launch import lengths_of
from flashtile.backends.portable.decode.schedule import DecodeLengths, Splits
from flashtile.problems.decode import DecodeProblem
from flashtile.problems.masking import KernelMask
from walk import walk

pytestmark = pytest.mark.interpreter

LENGTHS = (3900, 3, 0, 700, 260)
QUERIES = (1, 40, 5, 9, 70)
HEADS, PACK, BLOCK_M, BLOCK_N, D = 2, 4, 64, 128, 16
M_BLOCKS = -(-max(QUERIES) * PACK // BLOCK_M)
TILES = len(LENGTHS) * M_BLOCKS * HEADS
WIDTH = TABLE_WIDTH.value


@dataclass(frozen=True)
class Variant(CombineVariant):
    SPLIT: bool
    DIVIDES: bool


VARIANT = Variant(
    HAS_LENGTHS=True,
    HAS_LEFTPAD=False,
    VARLEN=True,
    VARLEN_NEW=False,
    HAS_LEFT=False,
    HAS_RIGHT=True,
    HAS_CHUNK=False,
    BLOCK_M=BLOCK_M,
    BLOCK_N=BLOCK_N,
    SCAN_BLOCK=32,
    ONE_SCAN=True,
    ONE_M_BLOCK=False,
    ONE_TOKEN=False,
    HEADS_PER_TEAM=1,
    ONE_TEAM=False,
    STREAM_K=True,
    BY_WORK_TILE=False,
    HAS_SINK=False,
    HAS_PRIOR=False,
    PDL=False,
    HEAD_DIM_V=D,
    BLOCK_DV=D,
    ROWS=16,
    SPLITS=2,
    ONE_BY_ONE=False,
    SPLIT=True,
    DIVIDES=False,
)


ROW_BLOCKS = BLOCK_M // VARIANT.ROWS


class Sequences(NamedTuple):
    cache_seqlens: Any
    cu_seqlens_q: Any


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def lengths():
    return DecodeLengths(
        len(LENGTHS) * M_BLOCKS, M_BLOCKS, HEADS, PACK, max(QUERIES), 0, sum(QUERIES), 4096,
        KernelMask(-1, 0),
    )  # fmt: skip


def offsets():
    return int32(*(sum(QUERIES[:i]) for i in range(len(QUERIES) + 1)))


def n_blocks_of(m_block, keys=LENGTHS):
    """By the definition: blocks of keys that the last row of an m_block sees, at least one."""
    b, m = divmod(m_block, M_BLOCKS)
    rows = min(QUERIES[b] * PACK - m * BLOCK_M, BLOCK_M)
    if rows <= 0:
        return 0
    last = (m * BLOCK_M + rows - 1) // PACK
    seen = min(keys[b], last + keys[b] - QUERIES[b] + 1)
    return max(-(-seen // BLOCK_N), 1)


@triton.jit
def _balanced_kernel(pointers, covered, readers, slots_of, partial, lengths, slots, C: tl.constexpr):
    program = tl.program_id(0)
    start = balanced_start(tl.arange(0, C.SCAN_BLOCK), pointers, lengths, C)
    position, m_block, m_block_start = start.position, start.m_block, start.m_block_start
    splits_of = Splits(C.BLOCK_M, slots, 1, 0)
    if not C.BY_WORK_TILE:
        write_partial_record(partial, PartialRecord(0, program, 0, 0, 0, 0), lengths, splits_of, C)
    while position < start.end:
        work, n_begin, n_end, slot, splits, position, m_block, m_block_start = balanced_tile(
            C, position, start, m_block, m_block_start, pointers, lengths
        )
        if n_begin < n_end:
            tile = work.m_block * lengths.num_heads_kv + work.head_kv
            for n in range(n_begin, n_end):
                tl.atomic_add(covered + tile * 32 + n, 1)
                tl.store(readers + tile * 32 + n, program)
            if splits != 1:
                tl.store(slots_of + slot, tile)
            if splits > 0:
                record = PartialRecord(
                    splits, program, work.m_block, work.head_kv, work.num_rows, work.sequence.start_q
                )
                write_partial_record(partial, record, lengths, splits_of, C)


@triton.jit
def _queued_kernel(
    partial, covered, slots_of, lengths, slots, num_splits, C: tl.constexpr, WIDTH: tl.constexpr
):
    splits = Splits(C.BLOCK_M, slots, num_splits, 0)
    table = behind_partials(partial, splits, C)
    for index in range(tl.load(table) * lengths.num_heads_kv * num_splits):
        work, n_begin, n_end, slot, whole = queued_tile(C, index, table, lengths, splits, WIDTH)
        tile = work.m_block * lengths.num_heads_kv + work.head_kv
        for n in range(n_begin, n_end):
            tl.atomic_add(covered + tile * 32 + n, 1)
        if n_begin < n_end and not whole:
            tl.store(slots_of + slot, tile)


def expected_cover(keys=LENGTHS):
    covered = torch.zeros(len(LENGTHS) * M_BLOCKS, HEADS, 32, dtype=torch.int32)
    for m_block in range(len(LENGTHS) * M_BLOCKS):
        covered[m_block, :, : n_blocks_of(m_block, keys)] = 1
    return covered


@walk("one_by_one", [False, True])
@walk("programs", [7, TILES + 3])
def test_balanced_programs_and_what_joins_their_parts(programs, one_by_one):
    """With fewer programs than work tiles, and with more."""
    run_balanced(programs, LENGTHS, one_by_one)


ALIKE = (3900, 3840, 3799, 3500, 3910)
"""Keys of sequences whose work tiles have 28 to 31 n_blocks."""
PARTS = 8
"""Programs per work tile. Many, because most of the work tiles in these grids have no rows."""


def test_work_tiles_of_similar_lengths_are_divided_alike():
    """Into as many parts, which begin at the same keys in all heads, and one for each program."""
    programs = PARTS * TILES
    blocks = torch.tensor([n_blocks_of(m_block, ALIKE) for m_block in range(TILES // HEADS)])
    assert set(blocks.tolist()) == {0, 28, 30, 31}
    each = -(-31 // PARTS)
    assert each <= int(blocks.sum()) * HEADS / programs + PART_COST.value
    readers = run_balanced(programs, ALIKE)
    for tile, n_blocks in enumerate(blocks.repeat_interleave(HEADS).tolist()):
        expected = PARTS * tile + torch.arange(n_blocks, dtype=torch.int32) // each
        assert torch.equal(readers.view(TILES, 32)[tile, :n_blocks], expected)


def test_work_tiles_of_other_lengths_have_equal_shares():
    """The same grid, with lengths for which parts of the longest work tiles would take too long."""
    loads = run_balanced(PARTS * TILES, LENGTHS).flatten().bincount()[:-1]
    assert loads.max() - loads.min() <= 1


def run_balanced(programs, keys, one_by_one=True):
    """Check what stream-K programs cover, and how it is combined. Returns the program of each n_block."""
    variant = replace(VARIANT, BY_WORK_TILE=programs > TILES, ONE_BY_ONE=one_by_one)
    places = TILES if variant.BY_WORK_TILE else programs
    slots = 2 * programs
    floats = slots * BLOCK_M * (D + 1)
    partial = torch.full((floats + places * RECORD_WIDTH.value,), torch.inf)
    covered, slots_of = torch.zeros_like(expected_cover()), torch.full((slots,), -1, dtype=torch.int32)
    readers = torch.full_like(covered, programs)
    given = Sequences(int32(*keys), offsets())
    _balanced_kernel[(programs,)](given, covered, readers, slots_of, partial, lengths(), slots, C=variant)
    assert torch.equal(covered, expected_cover(keys))

    def combine(out, out_lse):
        pointers = CombinePointers(partial, out, out_lse, None, None, None, given[0], None, given[1], None)
        splits = Splits(BLOCK_M, slots, 1, 0)
        combine_recorded_kernel[(places * ROW_BLOCKS,)](pointers, lengths(), splits, ROW_BLOCKS, C=variant)

    check_joined(slots_of, partial, combine)
    return readers


def check_joined(slots_of, partial, combine):
    """Random parts in ``partial`` are joined by ``combine(out, lse)``, which writes nothing else."""
    slots = len(slots_of)
    values = torch.randn(slots, BLOCK_M, D)
    lse = torch.randn(slots, BLOCK_M)
    partial[: slots * BLOCK_M * (D + 1)] = torch.cat([values.flatten(), lse.flatten()])
    out = torch.full((sum(QUERIES), HEADS * PACK, D), torch.nan)
    out_lse = torch.full((HEADS * PACK, sum(QUERIES)), torch.nan)
    combine(out, out_lse)
    written = torch.zeros(out.shape[:2], dtype=torch.bool)
    for tile in set(slots_of.tolist()) - {-1}:
        m_block, head_kv = divmod(tile, HEADS)
        b, m = divmod(m_block, M_BLOCKS)
        mine = (slots_of == tile).nonzero().flatten()
        weights = torch.softmax(lse[mine] * torch.log(torch.tensor(2.0)), 0)
        joined = (values[mine] * weights[..., None]).sum(0)
        for i in range(min(QUERIES[b] * PACK - m * BLOCK_M, BLOCK_M)):
            token, head = divmod(m * BLOCK_M + i, PACK)
            token += sum(QUERIES[:b])
            torch.testing.assert_close(out[token, head_kv * PACK + head], joined[i])
            written[token, head_kv * PACK + head] = True
    assert written.any()
    assert torch.equal(~out.isnan().any(2), written)
    assert torch.equal(~out_lse.isnan().mT, written)


def fill_table(slots, num_splits, programs, variant):
    """(memory of partial results, the table behind it), filled."""
    floats = slots * BLOCK_M * (D + 1)
    rows = 1 + len(LENGTHS) * M_BLOCKS + slots // HEADS
    partial = torch.full((floats + rows * WIDTH,), torch.inf)
    pointers = TablePointers(None, None, partial, int32(*LENGTHS), None, offsets(), None)
    splits = Splits(BLOCK_M, slots, num_splits, 0)
    table_kernel[(len(LENGTHS),)](
        pointers, len(LENGTHS), programs, lengths(), splits, C=variant, WIDTH=WIDTH, CHUNK=8
    )
    return partial, partial[floats:].view(torch.int32).view(rows, WIDTH)


@walk("num_splits", [1, 3])
def test_the_queue_has_each_split_once_long_sequences_first(num_splits):
    variant = replace(VARIANT, SPLIT=num_splits > 1)
    slots = TILES * num_splits
    partial, table = fill_table(slots, num_splits, 4, variant)
    rows = table[1 : 1 + table[0, 0]]
    order = [LENGTHS[row[0] // M_BLOCKS] for row in rows.tolist()]
    assert order == sorted(order, reverse=True)
    covered, slots_of = torch.zeros_like(expected_cover()), torch.full((slots,), -1, dtype=torch.int32)
    _queued_kernel[(1,)](partial, covered, slots_of, lengths(), slots, num_splits, C=variant, WIDTH=WIDTH)
    assert torch.equal(covered, expected_cover())
    for slot, tile in enumerate(slots_of.tolist()):  # as the portable kernel has them
        m_block, head_kv = divmod(tile, HEADS)
        b, m = divmod(m_block, M_BLOCKS)
        first = (b * HEADS + head_kv) * num_splits * M_BLOCKS + M_BLOCKS - 1 - m
        assert tile == -1 or slot in range(first, first + num_splits * M_BLOCKS, M_BLOCKS)


@walk(("programs", "one_by_one"), [(2, False), (12, True), (20, False)])
def test_the_table_divides_what_is_long(programs, one_by_one):
    """31 n_blocks of one m_block beside 6, 3, 1 and 1 of others: enough for two programs as they are, and not
    for twelve or twenty."""
    variant = replace(VARIANT, DIVIDES=True, ONE_BY_ONE=one_by_one)
    slots = 2 * programs
    partial, table = fill_table(slots, 1, programs, variant)
    parts = {LENGTHS[row[0] // M_BLOCKS]: row[6] >> 16 for row in table[1 : 1 + table[0, 0]].tolist()}
    assert (max(parts.values()) > 1) == (programs > 2)
    assert [parts[length] for length in sorted(LENGTHS, reverse=True)] == sorted(parts.values(), reverse=True)
    covered, slots_of = torch.zeros_like(expected_cover()), torch.full((slots,), -1, dtype=torch.int32)
    _queued_kernel[(1,)](partial, covered, slots_of, lengths(), slots, 1, C=variant, WIDTH=WIDTH)
    assert torch.equal(covered, expected_cover())
    if programs == 2:
        return

    def combine(out, lse):
        pointers = CombinePointers(partial, out, lse, *[None] * 7)
        splits = Splits(BLOCK_M, slots, 1, 0)
        combine_divided_kernel[(3,)](pointers, lengths(), splits, ROW_BLOCKS, C=variant, WIDTH=WIDTH)

    check_joined(slots_of, partial, combine)


STEPS = [one for one in drawn.workloads(0) if one.drawn_from == "mixed-groups"]
"""Serving steps with chunks of 255 to 962 tokens among 23 to 98 sequences, and groups of 3 to 14 heads."""


@walk("step", STEPS)
def test_no_program_of_a_serving_step_has_much_more_work_than_the_mean(step):
    """Each program takes the next entry of the queue when it is free. A part costs PART_COST n_blocks beside
    its keys: with equal shares of keys, programs of three of the steps had 2.5 to 3 times the mean."""
    new, keys = (torch.tensor(lengths, dtype=torch.int32) for lengths in zip(*step.lengths, strict=True))
    problem = DecodeProblem(
        batch=step.batch, seqlen_q=step.seqlen_q, total_q=int(new.sum()), num_heads_q=step.num_heads_q,
        num_heads_kv=step.num_heads_kv, head_dim=step.head_dim, head_dim_v=step.head_dim,
        capacity=step.seqlen_k, page_size=16, num_blocks=99, seqlen_new=0, dtype=torch.bfloat16,
        cache_dtype=torch.bfloat16, out_dtype=torch.bfloat16,
        device=Target("H200", (9, 0), 132),  # type: ignore[arg-type]
        softmax_scale=1.0, window_right=0, lengths=True, varlen=True,
    )  # fmt: skip
    config = choose(problem)
    variant = replace(hopper_decode_variant(problem, config), PDL=False)
    assert not variant.STREAM_K
    BM, BN, packed_problem = config.tile.BLOCK_M, config.tile.BLOCK_N, packed(problem)
    sizes, heads = lengths_of(packed_problem, config), packed_problem.num_heads_kv
    programs = multiprocessors(problem.device) * config.programs_per_sm
    slots = DIVIDED_SLOTS * programs if variant.DIVIDES else 0
    table = torch.full((1 + sizes.m_blocks + slots // heads, WIDTH), -1, dtype=torch.int32)
    offsets = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
    table_kernel[(step.batch,)](
        TablePointers(None, None, table.view(torch.float32), keys, None, offsets, None),
        step.batch, programs, sizes, Splits(0, slots, 1, 0), C=variant, WIDTH=WIDTH, CHUNK=256,
    )  # fmt: skip
    load = [0.0] * programs
    for m_block, _, len_q, len_k, _, _, part, _ in table[1 : 1 + table[0, 0]].tolist():
        first_row = m_block % sizes.m_blocks_per_sequence * BM
        last_row = min(len_q * sizes.group_size, first_row + BM) - 1
        n_blocks = triton.cdiv(len_k - len_q + last_row // sizes.group_size + 1, BN)
        parts, nth = divmod(part, 1 << 16)
        each = triton.cdiv(n_blocks, parts)
        if (count := min(each, n_blocks - nth * each)) > 0:
            for _ in range(heads):
                heapq.heappush(load, heapq.heappop(load) + count + PART_COST.value)
    assert max(load) <= 1.25 * sum(load) / programs
