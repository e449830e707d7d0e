"""Groups of adjacent sequences that begin with the same blocks, found on the device.

:mod:`flashtile.integrations.paged_groups` describes the groups, and computes the same in torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.launch import CachedLaunch, Launched

BLOCKS_AT_ONCE = 1024
"""Blocks that a program compares at a time: those of 16,384 tokens."""
DEPTHS_AT_ONCE = 16
NOTHING = tl.constexpr(2**31 - 1)


class GroupLengths(NamedTuple):
    """Integers of a launch. Kernels are not specialized on their values."""

    rows: Any
    table_stride: Any
    block_size: Any
    most: Any
    """Largest number of sequences of a group."""
    least: Any
    """Fewest tokens that groups must save."""


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def cached_tokens(row, seq_lens, starts):
    """Return the number of a sequence's tokens that are older than the step."""
    return tl.load(seq_lens + row) - (tl.load(starts + row + 1) - tl.load(starts + row))


@kernel(do_not_specialize=("lengths",))
def common_kernel(table, seq_lens, starts, common, lengths, BLOCK: tl.constexpr):
    """Write the number of tokens in equal first blocks of a sequence and the one before it, (rows,)."""
    row = tl.program_id(0)
    blocks = 0
    if row > 0:
        tokens = tl.minimum(cached_tokens(row, seq_lens, starts), cached_tokens(row - 1, seq_lens, starts))
        blocks = tl.maximum(tokens, 0) // lengths.block_size
    own = table + row.to(tl.int64) * lengths.table_stride
    equal = blocks
    first = 0
    while first < equal:
        at = first + tl.arange(0, BLOCK)
        inside = at < blocks
        a = tl.load(own + at, mask=inside, other=0)
        b = tl.load(own - lengths.table_stride + at, mask=inside, other=0)
        equal = tl.min(tl.where(a == b, equal, tl.minimum(at, equal)))
        first += BLOCK
    tl.store(common + row, equal * lengths.block_size)


@kernel(do_not_specialize=("lengths",))
def group_kernel(common_ptr, starts, offsets, shared, lengths, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Write the groups' offsets (rows + 1,) and the keys that each sequence shares (rows,). One program."""
    row = tl.arange(0, ROWS)
    exists = row < lengths.rows
    common = tl.load(common_ptr + row, mask=exists, other=0)
    best = tl.full(
        (), 0, tl.int64
    )  # tokens saved, and below them the threshold, so that one maximum finds both
    for first in range(0, lengths.rows, STEP):
        at = first + tl.arange(0, STEP)
        depths = tl.load(common_ptr + at, mask=at < lengths.rows, other=0)
        joined = tl.sum((common[:, None] >= depths[None, :]).to(tl.int32), axis=0)
        best = tl.maximum(best, tl.max(((depths.to(tl.int64) * joined) << 32) | depths))
    threshold = tl.where((best >> 32) >= lengths.least, (best & NOTHING).to(tl.int32), NOTHING)

    joins = common >= threshold
    first = tl.associative_scan(tl.where(joins, 0, row), 0, larger)
    place = (row - first) % lengths.most
    group = (row - place).to(tl.int64) << 32
    depth = tl.where(place > 0, common, NOTHING)
    # The least depth of a group is the least of the rows before and after: scans that begin anew in each group.
    before = NOTHING - (tl.associative_scan(group | (NOTHING - depth), 0, larger) & NOTHING).to(tl.int32)
    after = (tl.associative_scan(group | depth, 0, smaller, reverse=True) & NOTHING).to(tl.int32)
    least = tl.minimum(before, after)
    tl.store(shared + row, tl.where(least == NOTHING, 0, least), mask=exists)

    # The offset of a group's first row is its own; those of all others are the group's end.
    leader = tl.where(exists & (place == 0), row, lengths.rows)
    offset = tl.associative_scan(leader, 0, smaller, reverse=True)
    tl.store(offsets + row, tl.load(starts + offset, mask=exists, other=0), mask=exists)
    tl.store(offsets + lengths.rows, tl.load(starts + lengths.rows))


class GroupLaunch:
    """``(block_table, seq_lens, starts, common, offsets, shared) -> None`` for one number of sequences."""

    def __init__(self, lengths: GroupLengths, max_rows: int) -> None:
        # All numbers of sequences share two kernels.
        padded = max(16, triton.next_power_of_2(max_rows))
        self.common = CachedLaunch(common_kernel, lengths.rows, (lengths,), (BLOCKS_AT_ONCE,), None)
        self.group = CachedLaunch(group_kernel, 1, (lengths,), (padded, DEPTHS_AT_ONCE), None)

    def __call__(self, *tensors: Tensor) -> None:
        table, seq_lens, starts, common, offsets, shared = tensors
        self.common(table.device, table, seq_lens, starts, common)
        self.group(table.device, common, starts, offsets, shared)


def groups_ahead(max_rows: int) -> list[Launched]:
    """Return the launches of both kernels, to be compiled ahead of time."""
    launch = GroupLaunch(GroupLengths(1, 1, 16, 2, 1), max_rows)
    integers = torch.empty(1, dtype=torch.int32, device=torch.device("meta"))
    return [(launch.common, (integers,) * 4), (launch.group, (integers,) * 4)]
