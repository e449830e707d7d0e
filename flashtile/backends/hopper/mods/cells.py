"""Functions of scores and masks on a warpgroup's tile of scores, where the kernels modify and hide them.

The forward has queries as rows of a tile, the backward keys.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.mods.visits import key_visits, row_visits


class CellMods(NamedTuple):
    """What functions are called with beside rows and keys, and what a block mask has the tile visit."""

    sequence: Any
    head: Any
    offset: Any
    """Where the first row stands among the keys."""
    captured: Any
    visits: Any
    """0 without a block mask."""


@gluon.jit
def query_mods(C: gl.constexpr, work, block, pointers):
    """Of a block of query rows."""
    visits = 0
    if C.LISTED:
        visits = key_visits(C, 4, work, block, pointers.lists)
    return CellMods(work.sequence, work.head, work.seqlen_k - work.seqlen_q, pointers.captured, visits)


@gluon.jit
def key_mods(C: gl.constexpr, work, pointers):
    """Of a block of keys, with the first of the query heads that share its head."""
    visits = 0
    if C.LISTED:
        visits = row_visits(C, work, pointers.lists)
    head = work.head * C.GROUP
    return CellMods(work.sequence, head, work.seqlen_k - work.seqlen_q, pointers.captured, visits)


@gluon.jit
def of_query_head(C: gl.constexpr, mods, g):
    """:func:`key_mods` with the ``g``-th query head."""
    return CellMods(mods.sequence, mods.head + g, mods.offset, mods.captured, mods.visits)


@gluon.jit
def modify_scores(C: gl.constexpr, s, n, rows, numbers, s_layout: gl.constexpr):
    """SCORE_MOD of raw products with block ``n`` of keys, in natural units."""
    mods = rows.mods
    s = s * numbers.scale
    keys = n * C.BLOCK_N + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s_layout))
    queries = rows.positions - mods.offset
    s, _ = C.SCORE_MOD(s, mods.sequence, mods.head, queries[:, None], keys[None, :], mods.captured)
    return s


@gluon.jit
def hide_cells(C: gl.constexpr, s, n, is_full, rows, s_layout: gl.constexpr):
    """-inf for the keys of block ``n`` that MASK_MOD hides, unless the block is full."""
    mods = rows.mods
    keys = n * C.BLOCK_N + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s_layout))
    queries = rows.positions - mods.offset
    seen = C.MASK_MOD(mods.sequence, mods.head, queries[:, None], keys[None, :], mods.captured)
    return gl.where(seen | is_full, s, float("-inf"))
