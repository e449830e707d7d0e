"""Masks by position in Gluon: the keys that rows of a tile see, and hiding the others.

``mask`` is the launch's :class:`~flashtile.problems.masking.KernelMask`; the constants ``C`` of each kernel
extend :class:`~flashtile.problems.masking.MaskConstants`. How far a row sees is the rule of the portable
kernels, :func:`~flashtile.backends.portable.masking.window_at`.

Kernels whose tiles have rows of queries find the first and the last key of each row once
(:func:`key_bounds`), and compare keys with them (:func:`hide_by_bounds`). Kernels that visit rows in their
loop compare keys with positions (:func:`hide_by_window`). :func:`key_range` can be called from Python.
"""

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.layouts import WARPGROUP_ROWS
from flashtile.backends.portable.masking import window_at


@gluon.jit
def key_range(
    C: gl.constexpr, first_row, last_row, seqlen_q, seqlen_k, mask, MIRRORED: gl.constexpr = False
):  # fmt: skip
    """Return (begin, end, full_begin, full_end) for query rows first_row to last_row.

    All rows see keys [full_begin, full_end). No row sees a key outside [begin, end). With MIRRORED, rows and
    keys change places: the result is the range of query rows that see keys first_row to last_row, and
    ``seqlen_q`` and ``seqlen_k`` are exchanged.
    """
    left = mask.window_right if MIRRORED else mask.window_left
    right = mask.window_left if MIRRORED else mask.window_right
    HAS_LEFT: gl.constexpr = C.HAS_RIGHT if MIRRORED else C.HAS_LEFT
    HAS_RIGHT: gl.constexpr = C.HAS_LEFT if MIRRORED else C.HAS_RIGHT
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
def key_bounds(C: gl.constexpr, positions, first_key, seqlen_k, mask):
    """Return (first, last) key that each of a warpgroup's rows sees, [64] each.

    Chunks are counted from ``first_key``.
    """
    left, right = window_at(positions, first_key, mask, C)
    last = gl.full([WARPGROUP_ROWS], 0, gl.int32, positions.type.layout) + seqlen_k - 1
    if C.HAS_RIGHT:
        last = gl.minimum(positions + right, last)
    return positions - left, last


@gluon.jit
def hide_by_bounds(C: gl.constexpr, s, keys, start, rows):
    """Return scores [rows, keys] with -inf where a key is not within its row's :func:`key_bounds`.

    ``keys`` are counted from key ``start``.
    """
    if C.MASK_MOD is None or not C.LISTED or not C.EVEN_N:
        # The block's first key is subtracted from the row's bound: one subtraction for a row, none for a key.
        s = gl.where(keys <= (rows.last_key - start)[:, None], s, float("-inf"))
    if C.HAS_LEFT:
        s = gl.where(keys >= (rows.first_key - start)[:, None], s, float("-inf"))
    return s


@gluon.jit
def hide_by_window(C: gl.constexpr, x, keys, positions, mask):
    """Return ``x`` with 0 where rows at ``positions`` do not see ``keys``.

    ``keys`` and ``positions`` broadcast to ``x``, or ``positions`` is [rows] and ``x`` [rows, keys].
    """
    left, right = window_at(positions, 0, mask, C)
    if C.HAS_RIGHT:
        last = positions + right
        x = gl.where(keys <= (last[:, None] if len(last.shape) == 1 else last), x, 0.0)
    if C.HAS_LEFT:
        first = positions - left
        x = gl.where(keys >= (first[:, None] if len(first.shape) == 1 else first), x, 0.0)
    return x
