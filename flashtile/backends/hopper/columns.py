"""Tiles that leave a few columns at a time, through shared memory that is smaller than they are."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@gluon.jit
def column_parts(x, PART: gl.constexpr):
    """x [64, n] of a warpgroup, n = PART times a power of two: a tuple of [64, PART] from left to right."""
    ROWS: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    if WIDTH == PART:
        return (x,)
    else:
        left, right = gl.split(x.reshape([ROWS, 2, WIDTH // 2]).permute((0, 2, 1)))
        return column_parts(left, PART) + column_parts(right, PART)


@gluon.jit
def store_part(part, tile):
    """One of :func:`column_parts` to shared memory, which TMA may read then."""
    ROWS: gl.constexpr = part.shape[0]
    PART: gl.constexpr = part.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    part = gl.convert_layout(part.to(tile.dtype), layout, assert_trivial=True)
    tile.reshape([ROWS, PART]).store(part)
    fence_async_shared()
