"""Prefetches the keys with which a stream-K program begins, while the kernel before it runs.

A program begins with a chain of latencies: lengths, entries of the block table, keys. Memory would be idle in
this time, and while the kernel before this one combines its parts.
"""

from triton.experimental.gluon import language as gl

from flashtile.backends.common.dependent_launch import prefetch
from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.decode.work import balanced_start, balanced_tile
from flashtile.backends.portable.decode.cache import in_cache
from flashtile.backends.portable.decode.schedule import sequence_of

SCAN = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Layout of one value per m_block."""
SECTORS = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
"""Layout of the sectors of several keys, [keys, sectors]."""
SECTOR_BITS = gl.constexpr(256)


@gluon.jit
def prefetch_rows(source, offsets, WIDTH: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Prefetch HEAD_DIM elements at each of the ``offsets`` [keys] of ``source`` to the L2 cache."""
    SECTOR: gl.constexpr = SECTOR_BITS // source.base.dtype.element_ty.primitive_bitwidth
    LAST: gl.constexpr = max(HEAD_DIM - SECTOR, 0)
    columns = gl.arange(0, WIDTH // SECTOR, layout=gl.SliceLayout(0, SECTORS)) * SECTOR
    columns = gl.minimum(columns, LAST)
    prefetch(source.base + offsets[:, None] + columns[None, :])


@gluon.jit
def prefetch_first(C: gl.constexpr, call, k_source, v_source):
    """Prefetch the first n_blocks that a program probably loads, as many as it loads without a wait.

    The kernel before this one may still be writing lengths and tables, so they may be wrong. All reads stay
    within the tensors, and bypass the L1 cache (EARLY). What is read only selects what is prefetched to the
    L2 cache. Since all writes go through L2, no stale data remains.
    """
    STAGES: gl.constexpr = C.STAGES
    index = gl.arange(0, C.SCAN_BLOCK, layout=SCAN)
    start = balanced_start(index, call.pointers, call.lengths, C, True)
    if start.position < start.end:
        work, n_begin, n_end, _, _, _, _, _ = balanced_tile(
            C, start.position, start, start.m_block, start.m_block_start, call.pointers, call.lengths, True
        )
        b, _ = sequence_of(work.m_block, call.lengths, C)
        row = b
        if C.HAS_BATCH_IDX:
            row = gl.load(call.pointers.cache_batch_idx + b, cache_modifier=".cg")
        head = (work.head_kv // C.KV_GROUP).to(gl.int64)
        for i in gl.static_range(STAGES):
            n = n_end - 1 - i
            position = n * C.BLOCK_N + gl.arange(0, C.BLOCK_N, layout=gl.SliceLayout(1, SECTORS))
            seen = (position >= work.keys.first) & (position < work.keys.end) & (n >= n_begin)
            page = position * 0 + row
            within = position
            if C.PAGE_SIZE != 0:
                entry = call.pointers.block_table + b.to(gl.int64) * call.outer.table_stride
                page = gl.load(entry + position // C.PAGE_SIZE, mask=seen, other=0, cache_modifier=".cg")
                within = position % C.PAGE_SIZE
            page = in_cache(page, call.cache.num_blocks).to(gl.int64)
            within = within.to(gl.int64)
            # Where no row sees a key, the first key of the cache stands for it.
            k_offsets = gl.where(seen, page * k_source.page + within * k_source.token, 0)
            v_offsets = gl.where(seen, page * v_source.page + within * v_source.token, 0)
            prefetch_rows(k_source, k_offsets + head * k_source.head, C.BLOCK_D, C.HEAD_DIM)
            prefetch_rows(v_source, v_offsets + head * v_source.head, C.BLOCK_DV, C.HEAD_DIM_V)
