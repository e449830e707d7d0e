"""Tiles that leave a few columns at a time, through shared memory that is smaller than they are."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def column_parts(x, PART: gl.constexpr):
    """x [64, n] of a warpgroup, n = PART times a power of two, as a tuple of [64, PART] from left to
    right."""
    ROWS: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    if WIDTH == PART:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
        return (gl.convert_layout(x, layout, assert_trivial=True),)
    else:
        left, right = gl.split(x.reshape([ROWS, 2, WIDTH // 2]).permute((0, 2, 1)))
        return column_parts(left, PART) + column_parts(right, PART)
