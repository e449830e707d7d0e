"""The producer's side of attention over a cache: keys by way of the block table, n_block by n_block.

The cache is seen as one long run of rows, in which a page, or a row of a dense cache, begins every so many
rows. A *copy* is a TMA load of COPY_ROWS keys that lie side by side. Its descriptor is the forward's for
packed sequences (``tma.ragged_view``): it ends where the copy's keys end, and what is behind arrives as
zeros, however much of a page's memory was never written.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtile.backends.common import launch
from flashtile.backends.hopper.compat import async_load
from flashtile.backends.portable.decode.cache import in_cache

RAGGED_ROWS = gl.constexpr(launch.RAGGED_ROWS)


class CacheRows(NamedTuple):
    """Integers that say where pages, or rows of a dense cache, lie."""

    num_blocks: Any
    k_rows: Any
    """From the beginning of one page of k to that of the next, in rows."""
    v_rows: Any


@gluon.jit
def first_entry(C: gl.constexpr, b, call):
    """(where the block table of sequence ``b`` begins, or its row of a dense cache; its fault)."""
    fault = b * 0
    if C.PAGE_SIZE != 0:
        return call.pointers.block_table + b.to(gl.int64) * call.outer.table_stride, fault
    else:
        row = b
        if C.HAS_BATCH_IDX:
            given = gl.load(call.pointers.cache_batch_idx + b)
            row = in_cache(given, call.cache.num_blocks)
            fault = given ^ row
        return row, fault


@gluon.jit
def num_held(C: gl.constexpr, position, keys):
    """How many rows of the copy from ``position`` on are loaded: none if no row of the tile sees any."""
    held = gl.minimum(gl.maximum(keys.end - position, 0), C.COPY_ROWS)
    if C.HAS_LEFT:
        held = gl.where(position + C.COPY_ROWS > keys.first, held, 0)
    return held


@gluon.jit
def load_pages(C: gl.constexpr, PART: gl.constexpr, entry, n, keys):
    """The page of each copy that loader PART makes of n_block ``n``. Entries of keys that are not seen are
    not read."""
    if C.PAGE_SIZE == 0:
        return (entry,)
    else:
        COPIES: gl.constexpr = C.COPIES
        pages = ()
        for c in gl.static_range(COPIES):
            position = n * C.BLOCK_N + (PART * COPIES + c) * C.COPY_ROWS
            held = num_held(C, position, keys) > 0
            page = gl.load(entry + position // C.PAGE_SIZE, mask=held, other=0)
            pages = pages + (page,)  # type: ignore[assignment]
        return pages


@gluon.jit
def faults_of(C: gl.constexpr, entry, n, keys, cache):
    """int32 [32], all 0 if the pages of all copies of n_block ``n`` are in the cache."""
    copy = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    position = n * C.BLOCK_N + copy * C.COPY_ROWS
    held = (num_held(C, position, keys) > 0) & (copy < C.LOADERS * C.COPIES)
    pages = gl.load(entry + position // C.PAGE_SIZE, mask=held, other=0)
    return pages ^ in_cache(pages, cache.num_blocks)


@gluon.jit
def load_n_block(
    C: gl.constexpr, PART: gl.constexpr, desc, pages, page_rows, n, keys, head, cache, barrier, tile
):  # fmt: skip
    """TMA loads, by loader PART, of its part of n_block ``n`` of k or v; keys that are not held arrive as
    zeros."""
    COPIES: gl.constexpr = C.COPIES
    mbarrier.expect(barrier, desc.block_type.nbytes * COPIES)
    for c in gl.static_range(COPIES):
        position = n * C.BLOCK_N + (PART * COPIES + c) * C.COPY_ROWS
        rows = num_held(C, position, keys)
        if C.PAGE_SIZE == 0:
            start = pages[0] * page_rows + position
        else:
            start = in_cache(pages[c], cache.num_blocks) * page_rows + position % C.PAGE_SIZE
        part = tile
        if C.COPY_ROWS < C.BLOCK_N:
            part = tile.slice((PART * COPIES + c) * C.COPY_ROWS, C.COPY_ROWS, dim=2)
        async_load(desc, [RAGGED_ROWS, start + rows, RAGGED_ROWS - rows, head, 0], barrier, part)
