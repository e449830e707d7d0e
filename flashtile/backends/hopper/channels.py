"""How the partitions of a warp-specialised kernel hand tiles to one another and keep an order, by mbarriers.

Uses are counted from 0 since the kernel began. Use ``i`` of a ring of STAGES slots is slot ``i % STAGES``
for the ``i // STAGES``-th time; the parity of the latter is what an mbarrier calls its phase.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtile.backends.hopper.compat import aggregate


@aggregate
class Channel:
    """A ring of shared-memory tiles from one producer to ``readers`` partitions."""

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
        """Producer: wait until use ``i`` may be written; returns its slot."""
        mbarrier.wait(self.empty.index(i % self.STAGES), ((i // self.STAGES) & 1) ^ 1)
        return i % self.STAGES

    @gluon.jit
    def wait(self, i):
        """Reader: wait until use ``i`` has been written; returns its slot."""
        mbarrier.wait(self.full.index(i % self.STAGES), (i // self.STAGES) & 1)
        return i % self.STAGES

    @gluon.jit
    def release(self, i):
        """Reader: use ``i`` has been read."""
        mbarrier.arrive(self.empty.index(i % self.STAGES), count=1)


@gluon.jit
def make_channel(desc, STAGES: gl.constexpr, READERS: gl.constexpr, PARTS: gl.constexpr):
    """Tiles as ``desc`` loads them, ``PARTS`` to a slot: part w of slot s is tile ``s * PARTS + w``."""
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES * PARTS] + desc.block_type.shape, desc.layout)
    return make_ring(tiles, STAGES, READERS)


@gluon.jit
def make_ring(tiles, STAGES: gl.constexpr, READERS: gl.constexpr, WRITERS: gl.constexpr = 1):
    """A channel over ``tiles`` that exist already. With READERS 0 the producer never waits for a free slot;
    WRITERS partitions each bring a part of every tile.

    Only barriers on which a partition waits are initialised. The compiler reuses the memory of the others,
    and a GPU that switches between processes may write the state of an initialised barrier back there.
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
    """Partitions 0 to COUNT - 1 use the tensor cores in this order, over and over (FlashAttention-3, section
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
        if self.COUNT > 1:
            mbarrier.wait(self.barriers.index(me), i & 1)

    @gluon.jit
    def pass_on(self, me: gl.constexpr):
        """Partition ``me`` has issued its products: the next one may."""
        if self.COUNT > 1:
            mbarrier.arrive(self.barriers.index((me + 1) % self.COUNT), count=1)


@gluon.jit
def make_ping_pong(COUNT: gl.constexpr):
    """With COUNT 1 there is no order: waiting costs nothing, and no barrier is initialised."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    if COUNT > 1:
        for i in gl.static_range(COUNT):
            mbarrier.init(barriers.index(i), count=1)
        mbarrier.arrive(barriers.index(0), count=1)
    return PingPong(barriers, COUNT)
