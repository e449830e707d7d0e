"""Functions of scores and masks on a warpgroup's tile of scores, where the kernels modify and hide them.

The forward has queries as rows of a tile, the backward keys.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.mods.visits import key_visits, row_visits

COLUMNS = gl.constexpr(16)
"""Of a block, on which MASK_MOD is called at a time."""

KEEP_SEEN = gl.constexpr(
    "{ .reg .pred seen; .reg .b32 bit; and.b32 bit, $2, $3; setp.ne.b32 seen, bit, 0; "
    "selp.f32 $0, $1, 0fFF800000, seen; }"
)
"""Of (score, bits, bit). Each test stands beside its choice: the compiler would make all tests first and pack
their results."""


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
def cells_seen(C: gl.constexpr, n, is_full, rows, WIDTH: gl.constexpr):
    """What MASK_MOD leaves of ``WIDTH`` keys of block ``n``, all if it ``is_full``: [rows, COLUMNS] ints, in
    which bit a of column c is key a * COLUMNS + c.

    A loop has the instructions of MASK_MOD once. Written out they would be there for each of a thread's
    scores and for each consumer, more than the instruction cache holds.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    mods = rows.mods
    queries = gl.convert_layout(rows.positions - mods.offset, gl.SliceLayout(1, layout))[:, None]
    keys = n * C.BLOCK_N + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    bits = gl.full([rows.positions.shape[0], COLUMNS], 0, gl.int32, layout)
    steps = n * 0 + WIDTH // COLUMNS
    if C.LISTED:
        bits = gl.where(is_full, 0 if mods.visits.is_empty else -1, bits)
        steps = 0 if is_full or mods.visits.is_empty else steps
    # A number of steps that the compiler knew would make it write the loop out.
    steps = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [steps], gl.int32, True, 1)
    for a in range(steps):
        seen = C.MASK_MOD(mods.sequence, mods.head, queries, keys + a * COLUMNS, mods.captured)
        bits = bits | gl.where(seen, 1 << a, bits * 0)
    return bits


@gluon.jit
def hide_cells(C: gl.constexpr, s, n, is_full, rows, s_layout: gl.constexpr):
    """-inf for the keys of block ``n`` that MASK_MOD hides, unless the block is full."""
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    bits = cells_seen(C, n, is_full, rows, N)
    s = s.reshape([M, N // COLUMNS, COLUMNS])
    layout: gl.constexpr = s.type.layout
    bits = gl.convert_layout(bits, gl.SliceLayout(1, layout))[:, None, :]
    bit = 1 << gl.arange(0, N // COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    s = gl.inline_asm_elementwise(KEEP_SEEN, "=f,f,r,r", [s, bits, bit[None, :, None]], gl.float32, True, 1)
    return gl.convert_layout(s.reshape([M, N]), s_layout)
