"""Synchronisation of the partitions of a warp-specialised kernel: rings of tiles, ping-pong, the work queue.

Partitions share nothing but shared memory, and wait for one another at mbarriers only: a barrier of all
threads would wait for partitions that are in other loops. An mbarrier has a phase, a bit that flips when all
its arrivals (and the bytes that TMA announces) have come. A wait names the phase whose end it waits for.

A :class:`Channel` is a ring of tiles. A *use* of a ring is one write of a slot and the reads that follow it.
Uses are counted from 0 over the whole kernel. In a ring of STAGES slots, the ``i``-th use has slot ``i %
STAGES``. This slot has been used ``i // STAGES`` times before, and the parity of that number is the phase of
the slot's mbarriers:

    producer  acquire(i)  waits for empty, phase of use i - STAGES; writes; arrives at full (TMA: by bytes)
    reader    wait(i)     waits for full, phase of use i; reads; release(i) arrives at empty

:class:`PingPong` lets partitions use the tensor cores in turn.

The work queue: programs take work tiles one by one from a counter in global memory. This is
FlashAttention-3's dynamic persistent scheduler: programs end at most one work tile's time apart, even if the
costs of work tiles are unknown. The producer takes a tile for its program and passes the tile's index to the
other partitions through a channel of two slots. ``t`` counts the program's work tiles.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtile.backends.hopper.compat import aggregate, gluon


@aggregate
class Channel:
    """A ring of shared-memory tiles from one producer to one or more reader partitions."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, STAGES):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def acquire(self, i):
        """Producer: wait until the slot for the ``i``-th write (from 0) is free, and return the slot."""
        # The phase before the first counts as complete, so the first STAGES writes do not wait.
        mbarrier.wait(self.empty.index(i % self.STAGES), ((i // self.STAGES) & 1) ^ 1)
        return i % self.STAGES

    @gluon.jit
    def wait(self, i):
        """Reader: wait until the ``i``-th write (from 0) is complete, and return its slot."""
        mbarrier.wait(self.full.index(i % self.STAGES), (i // self.STAGES) & 1)
        return i % self.STAGES

    @gluon.jit
    def release(self, i, READERS: gl.constexpr = 1):
        """Reader: report that the ``i``-th write (from 0) has been read, so that its slot can be reused.

        One reader may report for READERS of them, if the others do not read this write.
        """
        # ``arrive`` synchronises the warps of its partition first: one arrival, after all of them have read.
        mbarrier.arrive(self.empty.index(i % self.STAGES), count=READERS)


@gluon.jit
def make_channel(desc, STAGES: gl.constexpr, READERS: gl.constexpr, PARTS: gl.constexpr):
    """Make a channel for tiles of ``desc``. Slot s has PARTS tiles: s * PARTS to (s + 1) * PARTS - 1."""
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES * PARTS] + desc.block_type.shape, desc.layout)
    return make_ring(tiles, STAGES, READERS)


@gluon.jit
def make_channels(desc, STAGES: gl.constexpr, READERS: gl.constexpr, COUNT: gl.constexpr):
    """Make a tuple of COUNT channels for tiles of ``desc``."""
    channel = make_channel(desc, STAGES, READERS, 1)
    if COUNT == 1:
        return (channel,)
    else:
        return (channel,) + make_channels(desc, STAGES, READERS, COUNT - 1)


@gluon.jit
def make_ring(tiles, STAGES: gl.constexpr, READERS: gl.constexpr, WRITERS: gl.constexpr = 1):
    """Make a channel over ``tiles``, which are already allocated.

    With READERS 0 the producer never waits for a free slot. Each of WRITERS partitions writes a part of every
    tile.

    Only barriers on which a partition waits are initialised. The compiler sees that the others are not used
    after this, and may place data in their memory. An initialised barrier there changed the data in 4 of 1000
    runs, when many processes shared a GPU, and never without them.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=WRITERS)
        if READERS > 0:
            mbarrier.init(empty.index(i), count=READERS)
    return Channel(tiles, full, empty, STAGES)


@aggregate
class PingPong:
    """Barriers that let partitions 0 to COUNT - 1 use the tensor cores in turn (FlashAttention-3, section
    3.1)."""

    barriers: gl.shared_memory_descriptor
    COUNT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, barriers, COUNT):
        self.barriers = barriers
        self.COUNT = gl.constexpr(COUNT)

    @gluon.jit
    def wait(self, me: gl.constexpr, i):
        """Partition ``me`` waits until it may issue its products for the ``i``-th time."""
        # The i-th turn waits for the barrier's i-th phase, so ``i`` must be the number of turns: a partition
        # takes one for each block of keys, also for those that it skips.
        mbarrier.wait(self.barriers.index(me), i & 1)

    @gluon.jit
    def pass_on(self, me: gl.constexpr):
        """Let the next partition issue its products, after partition ``me`` has issued its own."""
        mbarrier.arrive(self.barriers.index((me + 1) % self.COUNT), count=1)


@gluon.jit
def make_ping_pong(COUNT: gl.constexpr):
    """Make a :class:`PingPong` of COUNT partitions, in which partition 0 comes first."""
    # mbarriers, because Gluon of Triton 3.6 and 3.7 has no named barriers (``bar.sync`` with a number), which
    # FlashAttention-3 uses.
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    mbarrier.arrive(barriers.index(0), count=1)  # partition 0 waits for no other in its first turn
    return PingPong(barriers, COUNT)


SLOTS = gl.constexpr(2)
"""Slots of a work queue: the producer takes and loads the next work tile while the readers compute one."""


@gluon.jit
def make_work_queue(READERS: gl.constexpr):
    """Make the channel that passes indices of work tiles from the producer to READERS partitions.

    It passes any integers: decoding has a second one, for invalid pages.
    """
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return make_ring(gl.allocate_shared_memory(gl.int32, [SLOTS, 1], layout), SLOTS, READERS)


@gluon.jit
def put(queue, t, tile_index, WARPS: gl.constexpr = 1):
    """Producer of WARPS warps: pass ``tile_index`` to the readers as the program's work tile ``t``."""
    # Plain stores and loads of both sides: the barriers order them, and no proxy fence is needed.
    slot = queue.acquire(t)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    queue.tiles.index(slot).store(gl.full([1], 0, gl.int32, layout) + tile_index)
    mbarrier.arrive(queue.full.index(slot), count=1)


@gluon.jit
def peek(queue, t, WARPS: gl.constexpr):
    """Reader of WARPS warps: wait for the index of work tile ``t`` and return it, but keep the slot.

    The backward needs the index again after its loop, and then calls :func:`read`.
    """
    queue.wait(t)
    return read(queue, t, WARPS)


@gluon.jit
def read(queue, t, WARPS: gl.constexpr):
    """Return the index that :func:`peek` returned.

    A second read from shared memory saves a register: the index need not be kept between the two calls.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(queue.tiles.index(t % SLOTS).load(layout), 0)  # of one number: a scalar in all threads


@gluon.jit
def take(queue, t, WARPS: gl.constexpr):
    """Call :func:`peek`, release the slot, and return the index."""
    tile_index = peek(queue, t, WARPS)
    queue.release(t)
    return tile_index
