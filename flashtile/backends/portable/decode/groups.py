"""Kernels that find groups of sequences on the device (:mod:`flashtile.integrations.paged_groups`)."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.launch import CachedLaunch, Launched

BLOCKS_AT_ONCE = 1024
DEPTHS_AT_ONCE = 16
NOTHING = tl.constexpr(2**31 - 1)
SIZES = "rows", "table_stride", "block_size", "most", "least"


@triton.jit
def cached_tokens(row, seq_lens, starts):
    """Return the number of a sequence's tokens that are older than the step."""
    return tl.load(seq_lens + row) - (tl.load(starts + row + 1) - tl.load(starts + row))


@kernel(do_not_specialize=SIZES)
def common_kernel(
    table, seq_lens, starts, common_ptr, rows, table_stride, block_size, most, least, BLOCK: tl.constexpr
):
    """Write the number of tokens in equal first blocks of a sequence and the one before it."""
    row = tl.program_id(0)
    before = tl.maximum(row - 1, 0)
    tokens = tl.minimum(cached_tokens(row, seq_lens, starts), cached_tokens(before, seq_lens, starts))
    blocks = tl.where(row > 0, tl.maximum(tokens, 0) // block_size, 0)
    own = table + row.to(tl.int64) * table_stride
    equal, first = blocks, 0
    while first < equal:
        at = first + tl.arange(0, BLOCK)
        differs = tl.load(own + at, mask=at < blocks) != tl.load(own - table_stride + at, mask=at < blocks)
        equal = tl.min(tl.where(differs, tl.minimum(at, equal), equal))
        first += BLOCK
    tl.store(common_ptr + row, equal * block_size)


@kernel(do_not_specialize=SIZES)
def group_kernel(
    common_ptr, starts, offsets, shared, rows, table_stride, block_size, most, least,
    ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the offset of a sequence's group, and the number of keys that the sequence shares."""
    row, all_rows = tl.program_id(0), tl.arange(0, ROWS)
    common = tl.load(common_ptr + all_rows, mask=all_rows < rows, other=0)
    best = tl.full((), 0, tl.int64)  # the tokens saved, then the threshold, so that one maximum finds both
    for first in range(0, rows, STEP):
        at = first + tl.arange(0, STEP)
        depths = tl.load(common_ptr + at, mask=at < rows, other=0)
        joining = tl.sum((common[:, None] >= depths[None, :]).to(tl.int32), axis=0)
        best = tl.maximum(best, tl.max(((depths.to(tl.int64) * joining) << 32) | depths))
    begins = common < tl.where((best >> 32) >= least, (best & NOTHING).to(tl.int32), NOTHING)
    place = (row - tl.max(tl.where(begins & (all_rows <= row), all_rows, 0))) % most
    first = row - place
    end = tl.minimum(tl.min(tl.where(begins & (all_rows > first), all_rows, rows)), first + most)
    end = tl.minimum(end, rows)
    depth = tl.min(tl.where((all_rows > first) & (all_rows < end), common, NOTHING))
    tl.store(shared + row, tl.where(end - first > 1, depth, 0))
    tl.store(offsets + row, tl.load(starts + tl.where(place > 0, end, row)))
    tl.store(offsets + rows, tl.load(starts + rows), mask=row == 0)


class GroupLaunch:
    """``(block_table, seq_lens, starts, common, offsets, shared) -> None`` for one number of sequences.

    Args:
        max_rows: largest number of sequences.
        sizes: ``SIZES`` of the kernels: number of sequences, elements between rows of the block table, tokens
            of a block, most sequences of a group, and least tokens that groups must save.
    """

    def __init__(self, max_rows: int, *sizes: int) -> None:
        lanes = max(16, triton.next_power_of_2(max_rows))  # all numbers of sequences share two kernels
        self.common = CachedLaunch(common_kernel, sizes[0], sizes, (BLOCKS_AT_ONCE,), None)
        self.group = CachedLaunch(group_kernel, sizes[0], sizes, (lanes, DEPTHS_AT_ONCE), None)

    def __call__(self, *tensors: Tensor) -> None:
        table, seq_lens, starts, common, offsets, shared = tensors
        self.common(table.device, table, seq_lens, starts, common)
        self.group(table.device, common, starts, offsets, shared)


def groups_ahead(max_rows: int) -> list[Launched]:
    """Return the launches of both kernels, to be compiled ahead of time."""
    launch = GroupLaunch(max_rows, 1, 1, 16, 2, 1)
    integers = torch.empty(1, dtype=torch.int32, device=torch.device("meta"))
    return [(launch.common, (integers,) * 4), (launch.group, (integers,) * 4)]
