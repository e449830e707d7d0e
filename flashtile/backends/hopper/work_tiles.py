"""Work tiles, the units of work that a persistent program computes one after another.

In the forward, a work tile is one or two blocks of query rows of a head. In the backward, it is a block of
keys of a key head. The kernels' functions on integers can be called from Python through ``.fn`` (tests,
documentation).
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.constants import LOG2_E

TABLE_WIDTH = gl.constexpr(8)
"""Integers in a row of the tile table of packed sequences (``tile_table``). Row 0 is a header: the number of
other rows, then the number of work tiles taken from the work queue."""
TAKEN = gl.constexpr(1)
"""Index, in the header, of the number of work tiles taken. In dense calls with a work queue, the header is
the only row."""


class WorkTile(NamedTuple):
    """A work tile: its sequence, head and blocks, and where the sequence lies in memory."""

    sequence: Any
    head: Any
    """A head of the schedule: in the forward a query head, in the backward a key head, or a part of one."""
    head_kv: Any
    """The head's key head in k and v."""
    tile_in_head: Any
    """Number of the work tile in its sequence and head. In the forward it counts from the longest to the
    shortest; in the backward it is the block of keys."""
    start_q: Any
    """First row of the sequence in q."""
    start_k: Any
    """First row of the sequence in k."""
    seqlen_q: Any
    seqlen_k: Any


@gluon.jit
def num_work_tiles(C: gl.constexpr, pointers, schedule):
    """Return the number of work tiles of the launch.

    For packed sequences, the tile table holds the number of work tiles of one head.
    """
    num_tiles = schedule.num_tiles
    if C.VARLEN:
        num_tiles = gl.load(pointers.table) * schedule.num_heads
    return num_tiles


@gluon.jit
def key_range(
    first_row, last_row, seqlen_q, seqlen_k, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr
):
    """Return (begin, end, full_begin, full_end) for query rows first_row to last_row.

    All rows see keys [full_begin, full_end). No row sees a key outside [begin, end).
    """
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
    """Return ALiBi's slope of a query head, in log2 units; 0.0 without ALiBi."""
    slope = 0.0
    if C.ALIBI:
        slope = gl.load(pointers.alibi_slopes + work.sequence * schedule.alibi_stride + head) * LOG2_E
    return slope
