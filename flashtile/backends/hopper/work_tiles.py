"""Work tiles: what a persistent program computes at a time, in the forward and in the backward.

A work tile of the forward is one block of query rows of a head, or two; one of the backward a block of keys
of a key head. Functions on integers are the kernels' own; Python calls them through ``.fn`` (tests,
documentation).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.constants import LOG2_E

TABLE_WIDTH = gl.constexpr(8)
"""Integers of a row of the tile table of packed sequences (``tile_table``). Row 0 is a header: the number of
the other rows, then how many work tiles were taken from the work queue."""
TAKEN = gl.constexpr(1)
"""Where the latter lies. A call with a work queue but without a table has the header alone."""


class WorkTile(NamedTuple):
    """Which blocks of which sequence and head, and where the sequence lies."""

    sequence: Any
    head: Any
    tile_in_head: Any
    """Number of the work tile in its sequence and head: in the forward from the longest to the shortest, in
    the backward the block of keys."""
    start_q: Any
    """First row of the sequence in memory, of queries; start_k: of keys."""
    start_k: Any
    seqlen_q: Any
    seqlen_k: Any


@gluon.jit
def num_work_tiles(C: gl.constexpr, pointers, schedule):
    """Return the work tiles of the launch. The table of packed sequences has those of one head."""
    num_tiles = schedule.num_tiles
    if C.VARLEN:
        num_tiles = gl.load(pointers.table) * schedule.num_heads
    return num_tiles


@gluon.jit
def key_range(
    first_row, last_row, seqlen_q, seqlen_k, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr
):
    """Keys [begin, end) that some row of [first_row, last_row] sees, and [full_begin, full_end)
    that all of them see."""
    offset = seqlen_k - seqlen_q
    begin = 0
    end = seqlen_k
    full_begin = 0
    full_end = seqlen_k
    if HAS_RIGHT:
        end = max(min(end, last_row + offset + right + 1), 0)
        full_end = max(min(full_end, first_row + offset + right + 1), 0)
    if HAS_LEFT:
        begin = max(first_row + offset - left, 0)
        full_begin = max(last_row + offset - left, 0)
    return begin, end, full_begin, full_end


@gluon.jit
def slope_of(C: gl.constexpr, work, head, pointers, schedule):
    """ALiBi's slope of a query head, in log2 units; 0.0 without ALiBi."""
    slope = 0.0
    if C.ALIBI:
        slope = gl.load(pointers.alibi_slopes + work.sequence * schedule.alibi_stride + head) * LOG2_E
    return slope
