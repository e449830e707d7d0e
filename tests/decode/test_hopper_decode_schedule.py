"""Who computes what in attention over a cache on Hopper: each n_block once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from flashtile.backends.hopper.decode.work import CHUNK, balanced_tile, queued_tile, table_kernel
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
HEADS, PACK, BLOCK_M, BLOCK_N = 2, 4, 64, 128
M_BLOCKS = -(-max(QUERIES) * PACK // BLOCK_M)
PROGRAMS = 7


@dataclass(frozen=True)
class Variant(CombineVariant):
    SPLIT: bool


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
    HEAD_DIM_V=16,
    BLOCK_DV=16,
    ROWS=16,
    SPLITS=2,
    SPLIT=True,
)


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
    cache_seqlens, cu_seqlens_q, covered, m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q,
    seqlen_new, total_q, capacity, window_left, window_right, C: tl.constexpr,
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
    end = share_start(program + 1, programs, total)
    while position < end:
        work, n_begin, n_end, _, _, position, m_block, m_block_start = balanced_tile(
            C, position, end, m_block, m_block_start, sequences, lengths
        )
        for n in range(n_begin, n_end):
            tl.atomic_add(covered + (work.m_block * num_heads_kv + work.head_kv) * 32 + n, 1)


@triton.jit
def _queued_kernel(
    table, covered, m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q,
    capacity, window_left, window_right, num_splits, C: tl.constexpr,
):  # fmt: skip
    lengths = Lengths(
        m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity,
        window_left, window_right,
    )  # fmt: skip
    for index in range(tl.load(table) * num_heads_kv * num_splits):
        work, n_begin, n_end, slot, _ = queued_tile(C, index, table, lengths, Splits(0, 0, num_splits, 0))
        for n in range(n_begin, n_end):
            tl.atomic_add(covered + (work.m_block * num_heads_kv + work.head_kv) * 32 + n, slot + 1)


def expected_cover():
    covered = torch.zeros(len(LENGTHS) * M_BLOCKS, HEADS, 32, dtype=torch.int32)
    for m_block in range(len(LENGTHS) * M_BLOCKS):
        covered[m_block, :, : n_blocks_of(m_block)] = 1
    return covered


def test_balanced_programs_share_all_n_blocks():
    covered = torch.zeros_like(expected_cover())
    _balanced_kernel[(PROGRAMS,)](int32(*LENGTHS), offsets(), covered, *lengths(), C=VARIANT)
    assert torch.equal(covered, expected_cover())


@pytest.mark.parametrize("num_splits", [1, 3])
def test_the_queue_has_each_split_once_long_sequences_first(num_splits):
    table = torch.full((1 + len(LENGTHS) * M_BLOCKS, TABLE_WIDTH.value), -1, dtype=torch.int32)
    given = int32(*LENGTHS), None, offsets(), None
    table_kernel[(len(LENGTHS),)](
        table, *given, len(LENGTHS), *lengths(), C=VARIANT, WIDTH=TABLE_WIDTH.value, CHUNK=CHUNK
    )
    rows = table[1 : 1 + table[0, 0]]
    order = [LENGTHS[row[0] // M_BLOCKS] for row in rows.tolist()]
    assert order == sorted(order, reverse=True)
    covered = torch.zeros_like(expected_cover())
    variant = replace(VARIANT, SPLIT=num_splits > 1)
    _queued_kernel[(1,)](table, covered, *lengths(), num_splits, C=variant)
    assert torch.equal(covered > 0, expected_cover() > 0)
    for m_block, head_kv, n in (covered > 0).nonzero().tolist():  # slots as the portable kernel has them
        b, m = divmod(m_block, M_BLOCKS)
        split = n // -(-n_blocks_of(m_block) // num_splits)
        slot = ((b * HEADS + head_kv) * num_splits + split) * M_BLOCKS + M_BLOCKS - 1 - m
        assert covered[m_block, head_kv, n] == slot + 1
