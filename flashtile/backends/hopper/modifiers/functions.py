"""Score and mask functions (SCORE_MOD, MASK_MOD) on a warpgroup's tile of scores.

Rows of a tile are queries, as in the forward. For the backward, where rows are keys, see ``backward.scores``.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.constants import accumulator_layout
from flashtile.problems.masks import MAX_CAPTURED, MAX_SIZES

COLUMNS = gl.constexpr(16)
"""Number of keys for which MASK_MOD is called at a time."""

KEEP_SEEN = gl.constexpr(
    "{ .reg .pred seen; .reg .b32 bit; and.b32 bit, $2, $3; setp.ne.b32 seen, bit, 0; "
    "selp.f32 $0, $1, 0fFF800000, seen; }"
)
"""Inline assembly of (score, bits, bit) -> the score if the bit is set, else -inf. It keeps each test next to
its selection; the compiler would do all tests first and pack their results."""


CapturedTensors = namedtuple(  # type: ignore[misc]
    "CapturedTensors",
    [f"tensor_{i}" for i in range(MAX_CAPTURED)] + [f"size_{i}" for i in range(MAX_SIZES)],
)
"""Contiguous tensors that functions read (0 for those that a call lacks), then the sizes of all their
dimensions in order. The last fields hold the integers of ``Mods.numbers`` instead of sizes."""


class FunctionArguments(NamedTuple):
    """Arguments of score_mod and mask_mod in addition to scores, queries and keys."""

    sequence: Any
    head: Any
    """The query head."""
    offset: Any
    """Position of the first query among the keys."""
    captured: Any


@gluon.jit
def function_arguments(work, head, captured):
    """Return the :class:`FunctionArguments` of a work tile and a query head."""
    return FunctionArguments(work.sequence, head, work.seqlen_k - work.seqlen_q, captured)


@gluon.jit
def modify_scores(C: gl.constexpr, s, n, rows, s_layout: gl.constexpr):
    """Apply SCORE_MOD to the scores of key block ``n``. Scores and results are in natural units, not log2."""
    own = rows.modifiers.functions
    keys = n * C.BLOCK_N + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s_layout))
    queries = rows.positions - own.offset
    s, _ = C.SCORE_MOD(s, own.sequence, own.head, queries[:, None], keys[None, :], own.captured)
    return s


@gluon.jit
def seen_bits(C: gl.constexpr, n, is_full, rows, WIDTH: gl.constexpr):
    """Return which of the first WIDTH keys of block ``n`` each row sees, as int32 bits [rows, COLUMNS].

    Bit a of column c is the result of MASK_MOD for key a * COLUMNS + c. If the block ``is_full``, all bits
    are set. If the list of the block mask is empty, no bit is set.

    A loop contains the instructions of MASK_MOD once. Unrolled, they would be repeated for each score of a
    thread and for each consumer, and would not fit in the instruction cache.
    """
    layout: gl.constexpr = accumulator_layout(COLUMNS)
    own, blocks = rows.modifiers.functions, rows.modifiers.blocks
    queries = gl.convert_layout(rows.positions - own.offset, gl.SliceLayout(1, layout))[:, None]
    keys = n * C.BLOCK_N + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    bits = gl.full([rows.positions.shape[0], COLUMNS], 0, gl.int32, layout)
    steps = n * 0 + WIDTH // COLUMNS
    if C.LISTED:
        bits = gl.where(is_full, 0 if blocks.is_empty else -1, bits)
        steps = 0 if is_full or blocks.is_empty else steps
    # The compiler would unroll the loop if it knew the number of steps.
    steps = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [steps], gl.int32, True, 1)
    for a in range(steps):
        seen = C.MASK_MOD(own.sequence, own.head, queries, keys + a * COLUMNS, own.captured)
        bits = bits | gl.where(seen, 1 << a, bits * 0)
    return bits


@gluon.jit
def hide_scores(C: gl.constexpr, s, n, is_full, rows, s_layout: gl.constexpr):
    """Return the scores with -inf for keys of block ``n`` that MASK_MOD hides, unless the block is full."""
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    bits = seen_bits(C, n, is_full, rows, N)
    s = s.reshape([M, N // COLUMNS, COLUMNS])
    layout: gl.constexpr = s.type.layout
    bits = gl.convert_layout(bits, gl.SliceLayout(1, layout))[:, None, :]
    bit = 1 << gl.arange(0, N // COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    s = gl.inline_asm_elementwise(KEEP_SEEN, "=f,f,r,r", [s, bits, bit[None, :, None]], gl.float32, True, 1)
    return gl.convert_layout(s.reshape([M, N]), s_layout)
