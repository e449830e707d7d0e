"""The work queue: programs take work tiles one by one from a counter in global memory.

This is FlashAttention-3's dynamic persistent scheduler. Programs end at most one work tile's time apart, even
if the costs of work tiles are unknown. The producer takes a tile for its program and passes the tile's index
to the other partitions through a :class:`~flashtile.backends.hopper.channels.Channel` of two slots. ``t``
counts the program's work tiles.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtile.backends.hopper.channels import make_ring
from flashtile.backends.hopper.compat import gluon

SLOTS = gl.constexpr(2)


@gluon.jit
def make_work_queue(READERS: gl.constexpr):
    """Make the channel that passes indices of work tiles from the producer to READERS partitions."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return make_ring(gl.allocate_shared_memory(gl.int32, [SLOTS, 1], layout), SLOTS, READERS)


@gluon.jit
def put(queue, t, tile_index, WARPS: gl.constexpr = 1):
    """Producer of WARPS warps: pass ``tile_index`` to the readers as the program's work tile ``t``."""
    slot = queue.acquire(t)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    queue.tiles.index(slot).store(gl.full([1], 0, gl.int32, layout) + tile_index)
    mbarrier.arrive(queue.full.index(slot), count=1)


@gluon.jit
def peek(queue, t, WARPS: gl.constexpr):
    """Reader of WARPS warps: wait for the index of work tile ``t`` and return it, but keep the slot."""
    queue.wait(t)
    return read(queue, t, WARPS)


@gluon.jit
def read(queue, t, WARPS: gl.constexpr):
    """Return the index that :func:`peek` returned.

    A second read from shared memory saves a register: the index need not be kept between the two calls.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(queue.tiles.index(t % SLOTS).load(layout), 0)


@gluon.jit
def take(queue, t, WARPS: gl.constexpr):
    """Call :func:`peek`, release the slot, and return the index."""
    tile_index = peek(queue, t, WARPS)
    queue.release(t)
    return tile_index
