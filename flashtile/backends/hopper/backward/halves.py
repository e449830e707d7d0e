"""Tiles in halves, for head sizes over 256 in the Hopper backward.

64 rows of 512 columns of two tensors, K and V or q and dO, take 128 KiB of shared memory. What remains holds
two and a half tiles of 32 rows. So COLUMN_SPLITS is 2: a tile consists of two tiles of 256 columns, its
*halves*, and a ring has slots for three halves or for two. A half is loaded again as soon as nothing reads it
any more.

The two halves of a step's tile are two writes to the ring. Both are factors of S or dP. The half that comes
last is called ``own``: it is also a factor of the gradient that a warpgroup accumulates, so it is read for
longer.

With COLUMN_SPLITS 1, a tile is one write.
"""

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.columns import product_of_rows
from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.forward.kernel import least


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

    ``resident`` is one tile, or two halves. ``own`` is the half, 0 or 1, that is written last. When this
    returns, both halves have been written, and the product is in flight. ``acc`` may have any value.
    """
    # Always 0, but to the compiler it depends on the step. Otherwise it would keep the matrix descriptors of
    # the resident tile in registers.
    zero = i >> 30
    COLUMNS: gl.constexpr = resident.shape[-1]
    if resident.shape[0] == 1:
        moving = tile_of(ring.tiles.index(ring.wait(i)))
        return product_of_rows(tile_of(resident.index(zero)), moving, acc, HEAD_DIM, False)
    else:
        # The half that is written first is multiplied first, unless the halves differ in columns.
        ALIKE: gl.constexpr = HEAD_DIM == 2 * COLUMNS
        half = 1 - own if ALIKE else 1
        write = 2 * i if ALIKE else 2 * i + own
        moving = tile_of(ring.tiles.index(ring.wait(write)))
        if HEAD_DIM > COLUMNS:
            resting = tile_of(resident.index(half + zero))
            acc = product_of_rows(resting, moving, acc, HEAD_DIM - COLUMNS, False)
        moving = tile_of(ring.tiles.index(ring.wait(4 * i + 1 - write)))
        resting = tile_of(resident.index(1 - half + zero))
        return product_of_rows(resting, moving, acc, least(HEAD_DIM, COLUMNS), HEAD_DIM > COLUMNS)


@gluon.jit
def release_tile(C: gl.constexpr, ring, i):
    """Release step ``i``'s tile, as the one of two readers that reads all columns.

    The other reader reads only the half ``own``, so the release of the other half counts for both.
    """
    if C.COLUMN_SPLITS > 1:
        ring.release(2 * i, 2)
    ring.release(last_write(C, i))
