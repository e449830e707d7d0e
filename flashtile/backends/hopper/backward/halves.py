"""Tiles in halves, for head sizes over 256 in the Hopper backward.

Two rows of tiles of 64 x 512 take 128 KiB, for K and V or for q and dO. What remains holds 2.5 tiles of 32
rows. So COLUMN_SPLITS is 2: each tile consists of two tiles of 256 columns, its *halves*, and a ring of an odd
number of halves holds a tile and a half. A half is loaded again as soon as nothing reads it any more.

A step's two halves are two writes to the ring. Both are factors of S or dP. The half that comes last is called
``own``: it is also a factor of the gradient that a warpgroup accumulates, so it is read for longer.

With COLUMN_SPLITS 1, a tile is one write.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.columns import product_of_rows


@gluon.constexpr_function
def least(a, b):
    return min(a, b)


@gluon.jit
def tile_of(tile):
    """View a tile in the shape of its TMA block as [rows, columns]."""
    return tile.reshape([tile.shape[-3], tile.shape[-1]])


@gluon.jit
def last_write(C: gl.constexpr, i):
    """Return which write to a ring (from 0) is the last one of step ``i``'s tile."""
    return C.COLUMN_SPLITS * i + (C.COLUMN_SPLITS - 1)


@gluon.jit
def product_of_tiles(resident, ring, i, own, acc, HEAD_DIM: gl.constexpr):
    """Start the product of a resident tile with step ``i``'s tile in ``ring``, summed over HEAD_DIM columns.

    ``resident`` is one tile, or two halves. ``own`` is the half, 0 or 1, that is written last. Both halves have been written when this returns. The
    accumulator ``acc`` may have any value. Returns the result, in flight.
    """
    # Always 0, but to the compiler it depends on the step. Otherwise it would keep the matrix descriptors of
    # the resident tile in registers.
    zero = i >> 30
    COLUMNS: gl.constexpr = resident.shape[-1]
    if resident.shape[0] == 1:
        moving = tile_of(ring.tiles.index(ring.wait(i)))
        return product_of_rows(tile_of(resident.index(zero)), moving, acc, HEAD_DIM, False)
    else:
        moving = tile_of(ring.tiles.index(ring.wait(2 * i + own)))
        if HEAD_DIM > COLUMNS:
            right = tile_of(resident.index(1 + zero))
            acc = product_of_rows(right, moving, acc, HEAD_DIM - COLUMNS, False)
        moving = tile_of(ring.tiles.index(ring.wait(2 * i + 1 - own)))
        left = tile_of(resident.index(zero))
        return product_of_rows(left, moving, acc, least(HEAD_DIM, COLUMNS), HEAD_DIM > COLUMNS)


@gluon.jit
def release_tile(C: gl.constexpr, ring, i):
    """Release step ``i``'s tile, as the one of two readers that reads all columns.

    The other reader reads only the half ``own``, so the release of the other half counts for both.
    """
    if C.COLUMN_SPLITS > 1:
        ring.release(2 * i, 2)
    ring.release(last_write(C, i))
