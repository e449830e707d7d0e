"""TMA loads of keys and values from a cache, n_block by n_block, at the pages that the block table names.

TMA sees the cache as one long sequence of rows, in which pages (or rows of a dense cache) begin at a fixed
distance. A *copy* is a TMA load of COPY_ROWS contiguous keys. Its descriptor is that of packed sequences
(``tma.ragged_view``), whose bounds end at the copy's last valid key. Rows after it arrive as zeros, so
uninitialised memory of a page is never read.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtile.backends.common import launch
from flashtile.backends.hopper.compat import async_load, gluon
from flashtile.backends.portable.decode.cache import in_cache

RAGGED_ROWS = gl.constexpr(launch.RAGGED_ROWS)


class CacheRows(NamedTuple):
    """Integers that locate pages, or rows of a dense cache."""

    num_blocks: Any
    k_rows: Any
    """Distance between the beginnings of two pages of k, in rows."""
    v_rows: Any
    """Distance between the beginnings of two pages of v, in rows."""


@gluon.jit
def first_entry(C: gl.constexpr, b, call):
    """Return (entry, fault) of sequence ``b``.

    entry: pointer to the sequence's row of the block table, or the index of its row of a dense cache.
    fault: int32, nonzero if that index is outside of the cache.
    """
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
    """Return the number of keys to load in the copy that begins at ``position``.

    It is 0 if no query row sees a key of the copy.
    """
    held = gl.minimum(gl.maximum(keys.end - position, 0), C.COPY_ROWS)
    if C.HAS_LEFT:
        held = gl.where(position + C.COPY_ROWS > keys.first, held, 0)
    return held


@gluon.jit
def load_pages(C: gl.constexpr, PART: gl.constexpr, entry, n, keys):
    """Load the numbers of the pages that hold one loader's keys of n_block ``n``.

    PART is the loader's index. Returns a tuple of page numbers, one for each copy (a TMA load of COPY_ROWS
    keys). For a dense cache the tuple is ``(entry,)``, the sequence's row of the cache. An entry of the block
    table is read only if a row sees one of its keys.
    """
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
    """Return int32 [32], all 0 if the pages of all copies of n_block ``n`` are in the cache."""
    copy = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    position = n * C.BLOCK_N + copy * C.COPY_ROWS
    held = (num_held(C, position, keys) > 0) & (copy < C.LOADERS * C.COPIES)
    pages = gl.load(entry + position // C.PAGE_SIZE, mask=held, other=0)
    return pages ^ in_cache(pages, cache.num_blocks)


@gluon.jit
def load_n_block(
    C: gl.constexpr, PART: gl.constexpr, desc, pages, page_rows, n, keys, head, cache, barrier, tile
):  # fmt: skip
    """Issue one loader's TMA loads of n_block ``n`` of k or v into ``tile``.

    PART is the loader's index. Each loader loads an equal part of the keys. Keys after the last key that any
    row sees arrive as zeros.
    """
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
