"""Who computes what in attention over a cache on Hopper, and how its parts are joined: each n_block once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from flashtile.backends.hopper.decode.combine import (
    NOTE_WIDTH,
    Note,
    combine_noted_kernel,
    write_note,
)
from flashtile.backends.hopper.decode.work import (
    CHUNK,
    balanced_tile,
    place_in_queue,
    queued_tile,
    table_kernel,
    tiles_in_queue,
)
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH
from flashtile.backends.portable.decode.combine import CombineVariant
from flashtile.backends.portable.decode.results import Splits
from flashtile.backends.portable.decode.schedule import (
    Lengths,
    Sequences,
    balanced_start,
    share_start,
)

pytestmark = pytest.mark.interpreter

LENGTHS = (700, 3, 0, 1900, 260)
QUERIES = (9, 40, 5, 1, 70)
HEADS, PACK, BLOCK_M, BLOCK_N, D = 2, 4, 64, 128, 16
M_BLOCKS = -(-max(QUERIES) * PACK // BLOCK_M)
TILES = len(LENGTHS) * M_BLOCKS * HEADS


@dataclass(frozen=True)
class Variant(CombineVariant):
    SPLIT: bool
    SIZED_SPLITS: bool


VARIANT = Variant(
    HAS_LENGTHS=True,
    HAS_LEFTPAD=False,
    VARLEN=True,
    VARLEN_NEW=False,
    HAS_LEFT=False,
    HAS_RIGHT=True,
    BLOCK_M=BLOCK_M,
    BLOCK_N=BLOCK_N,
    SCAN_BLOCK=32,
    ONE_SCAN=True,
    ONE_M_BLOCK=False,
    ONE_TOKEN=False,
    HEADS_PER_TEAM=1,
    ONE_TEAM=False,
    BALANCED=True,
    BY_WORK_TILE=False,
    HAS_SINK=False,
    HAS_PRIOR=False,
    PDL=False,
    HEAD_DIM_V=D,
    BLOCK_DV=D,
    ROWS=16,
    SPLITS=2,
    SPLIT=True,
    SIZED_SPLITS=False,
)


class Start(NamedTuple):
    total: Any
    end: Any


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def lengths():
    return (
        len(LENGTHS) * M_BLOCKS, M_BLOCKS, HEADS, PACK, max(QUERIES), 0, sum(QUERIES), max(LENGTHS), -1, 0,
    )  # fmt: skip


def offsets():
    return int32(*(sum(QUERIES[:i]) for i in range(len(QUERIES) + 1)))


def n_blocks_of(m_block):
    """By the definition: blocks of keys that the last row of an m_block sees, at least one."""
    b, m = divmod(m_block, M_BLOCKS)
    rows = min(QUERIES[b] * PACK - m * BLOCK_M, BLOCK_M)
    if rows <= 0:
        return 0
    last = (m * BLOCK_M + rows - 1) // PACK
    seen = min(LENGTHS[b], last + LENGTHS[b] - QUERIES[b] + 1)
    return max(-(-seen // BLOCK_N), 1)


@triton.jit
def _balanced_kernel(
    cache_seqlens, cu_seqlens_q, covered, slots_of, partial, m_blocks, m_blocks_per_sequence, num_heads_kv,
    group_size, seqlen_q, seqlen_new, total_q, capacity, window_left, window_right, slots, C: tl.constexpr,
):  # fmt: skip
    sequences = Sequences(cache_seqlens, None, cu_seqlens_q, None)
    lengths = Lengths(
        m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity,
        window_left, window_right,
    )  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    total, position, m_block, m_block_start = balanced_start(
        tl.arange(0, C.SCAN_BLOCK), program, programs, sequences, lengths, C
    )
    start = Start(total, share_start(program + 1, programs, total))
    splits_of = Splits(C.BLOCK_M, slots, 1, 0)
    if not C.BY_WORK_TILE:
        write_note(partial, Note(0, program, 0, 0, 0, 0), lengths, splits_of, C)
    while position < start.end:
        work, n_begin, n_end, slot, splits, position, m_block, m_block_start = balanced_tile(
            C, position, start, m_block, m_block_start, sequences, lengths
        )
        if n_begin < n_end:
            tile = work.m_block * num_heads_kv + work.head_kv
            for n in range(n_begin, n_end):
                tl.atomic_add(covered + tile * 32 + n, 1)
            if splits != 1:
                tl.store(slots_of + slot, tile)
            if splits > 0:
                note = Note(splits, program, work.m_block, work.head_kv, work.num_rows, work.sequence.start_q)
                write_note(partial, note, lengths, splits_of, C)


@triton.jit
def _queued_kernel(
    table, covered, m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q,
    capacity, window_left, window_right, num_splits, split_n_blocks, C: tl.constexpr,
):  # fmt: skip
    lengths = Lengths(
        m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity,
        window_left, window_right,
    )  # fmt: skip
    splits = Splits(0, 0, num_splits, split_n_blocks)
    for index in range(tiles_in_queue(C, table, lengths, splits)):
        work, n_begin, n_end, slot, _ = queued_tile(C, index, table, lengths, splits)
        for n in range(n_begin, n_end):
            tl.atomic_add(covered + (work.m_block * num_heads_kv + work.head_kv) * 32 + n, slot + 1)


@triton.jit
def _places_kernel(places, num_few, num_many):
    index = tl.arange(0, 128)
    tl.store(places + index, place_in_queue(index, num_few >= 0, num_few, num_many))
    tl.store(places + 128 + index, place_in_queue(index, num_few < 0, num_few, num_many))


def expected_cover():
    covered = torch.zeros(len(LENGTHS) * M_BLOCKS, HEADS, 32, dtype=torch.int32)
    for m_block in range(len(LENGTHS) * M_BLOCKS):
        covered[m_block, :, : n_blocks_of(m_block)] = 1
    return covered


@pytest.mark.parametrize(("programs", "row_blocks"), [(7, 3), (3 * TILES, BLOCK_M // 16)])
def test_balanced_programs_and_what_joins_their_parts(programs, row_blocks):
    """With fewer programs than work tiles, and fewer row blocks than rows; and with more."""
    variant = replace(VARIANT, BY_WORK_TILE=programs > TILES)
    places = TILES if variant.BY_WORK_TILE else programs
    slots = 2 * programs
    floats = slots * BLOCK_M * (D + 1)
    partial = torch.full((floats + places * NOTE_WIDTH.value,), torch.inf)
    covered, slots_of = torch.zeros_like(expected_cover()), torch.full((slots,), -1, dtype=torch.int32)
    given = int32(*LENGTHS), offsets()
    _balanced_kernel[(programs,)](*given, covered, slots_of, partial, *lengths(), slots, C=variant)
    assert torch.equal(covered, expected_cover())

    values = torch.randn(slots, BLOCK_M, D)
    lse = torch.randn(slots, BLOCK_M)
    partial[:floats] = torch.cat([values.flatten(), lse.flatten()])
    out = torch.full((sum(QUERIES), HEADS * PACK, D), torch.nan)
    out_lse = torch.full((HEADS * PACK, sum(QUERIES)), torch.nan)
    combine_noted_kernel[(places * row_blocks,)](
        partial, out, out_lse, None, given[0], None, given[1], None, *lengths(), BLOCK_M, slots, 1, 0,
        row_blocks, C=variant,
    )  # fmt: skip
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


@pytest.mark.parametrize(("num_splits", "size"), [(1, 0), (3, 0), (100, 4)])
def test_the_queue_has_each_split_once_long_sequences_first(num_splits, size):
    """Splits by their number, and of so many n_blocks each, for which capacity has far more room."""
    table = torch.full((1 + len(LENGTHS) * M_BLOCKS, TABLE_WIDTH.value), -1, dtype=torch.int32)
    given, splits = (int32(*LENGTHS), None, offsets(), None), (num_splits, size)
    table_kernel[(len(LENGTHS),)](
        table, *given, len(LENGTHS), *lengths(), *splits, C=VARIANT, WIDTH=TABLE_WIDTH.value, CHUNK=CHUNK
    )
    assert table[0, 2] == (-(-max(LENGTHS) // (BLOCK_N * size)) if size else num_splits)
    rows = table[1 : 1 + table[0, 0]]
    order = [row[0] // M_BLOCKS for row in rows.tolist()]
    many = [LENGTHS[b] for b in order if QUERIES[b] * PACK > BLOCK_M]
    assert many == sorted(many, reverse=True)
    few = [LENGTHS[b] for b in order if QUERIES[b] * PACK <= BLOCK_M]
    assert few == sorted(few, reverse=True)
    covered = torch.zeros_like(expected_cover())
    variant = replace(VARIANT, SPLIT=num_splits > 1, SIZED_SPLITS=size > 0)
    _queued_kernel[(1,)](table, covered, *lengths(), *splits, C=variant)
    assert torch.equal(covered > 0, expected_cover() > 0)
    for m_block, head_kv, n in (covered > 0).nonzero().tolist():  # slots as the portable kernel has them
        b, m = divmod(m_block, M_BLOCKS)
        split = n // (size or -(-n_blocks_of(m_block) // num_splits))
        slot = ((b * HEADS + head_kv) * num_splits + split) * M_BLOCKS + M_BLOCKS - 1 - m
        assert covered[m_block, head_kv, n] == slot + 1


@pytest.mark.parametrize("few", [0, 1, 2, 3, 64, 101])
@pytest.mark.parametrize("many", [0, 1, 2, 7, 64])
def test_work_tiles_of_few_rows_are_spread_among_the_others(few, many):
    places = torch.zeros(2, 128, dtype=torch.int32)
    _places_kernel[(1,)](places, few, many)
    of_few, of_many = places[0, :few].tolist(), places[1, :many].tolist()
    assert sorted(of_few + of_many) == list(range(few + many))
    assert of_few == sorted(of_few)
    assert of_many == sorted(of_many)
    if many:
        assert sum(place > of_many[-1] for place in of_few) >= few // 2
    for i, position in enumerate(of_many):  # as evenly as whole numbers are
        assert position - i == i * (few // 2) // many
