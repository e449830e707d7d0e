"""Items of work that programs take one by one from a counter in memory, whenever they have time.

Whatever the items cost, programs end together, give or take the last item. The producer takes an item for its
program and hands it to the partitions that compute it, through two slots of shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtile.backends.hopper.compat import aggregate


@aggregate
class Queue:
    """From a program's producer to its other partitions."""

    items: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, items, full, empty):
        self.items = items
        self.full = full
        self.empty = empty

    @gluon.jit
    def give(self, turn, item):
        """Producer: ``item`` is the program's number ``turn``."""
        slot = turn % 2
        mbarrier.wait(self.empty.index(slot), ((turn // 2) & 1) ^ 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        self.items.index(slot).store(gl.full([1], 0, gl.int32, layout) + item)
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def wait(self, turn, WARPS: gl.constexpr):
        """Item number ``turn`` of the program, for a partition of so many warps."""
        mbarrier.wait(self.full.index(turn % 2), (turn // 2) & 1)
        return self.read(turn, WARPS)

    @gluon.jit
    def read(self, turn, WARPS: gl.constexpr):
        """The same, once it has been waited for: what follows from it need not stay in registers."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        return gl.max(self.items.index(turn % 2).load(layout), 0)

    @gluon.jit
    def release(self, turn):
        """Item number ``turn`` is not read again."""
        mbarrier.arrive(self.empty.index(turn % 2), count=1)

    @gluon.jit
    def take(self, turn, WARPS: gl.constexpr):
        """:meth:`wait` for what is read but once."""
        item = self.wait(turn, WARPS)
        self.release(turn)
        return item


@gluon.jit
def make_queue(READERS: gl.constexpr):
    """For as many partitions beside the producer."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    items = gl.allocate_shared_memory(gl.int32, [2, 1], layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Queue(items, full, empty)
