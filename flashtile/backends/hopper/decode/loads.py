"""Loads of keys and values from a cache, n_block by n_block, at the pages that the block table names: by TMA,
or key by key.

TMA sees the cache as one long sequence of rows, in which pages (or rows of a dense cache) begin at a fixed
distance. A *copy* is a TMA load of COPY_ROWS contiguous keys. Its descriptor is that of packed sequences
(``tma.ragged_view``), whose bounds end at the copy's last valid key. Rows after it arrive as zeros, so
uninitialised memory of a page is never read.

TMA loads need 16 or more contiguous keys. Smaller or odd pages, and padding on the left that may end at any
key, need an address for each key: threads then copy keys one by one (cp.async, with GATHER).
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flashtile.backends.common import launch
from flashtile.backends.hopper.compat import async_copy_to_shared, async_load, gluon
from flashtile.backends.portable.decode.cache import in_cache

RAGGED_ROWS = gl.constexpr(launch.RAGGED_ROWS)
WARPS = gl.constexpr(2)
"""Warps of a loader of k, or of v."""
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [2], [0]))
"""Layout of one value per key, over the warps of a loader."""
ROWS = gl.constexpr(32)
"""Keys whose addresses a thread holds at a time."""


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


# Key by key.


class Source(NamedTuple):
    """Memory of k or v: a pointer, and strides in elements between pages, tokens and heads."""

    base: Any
    page: Any
    token: Any
    head: Any


@gluon.jit
def is_seen(C: gl.constexpr, position, keys):
    """Whether positions are within ``keys``, the KeyRange that the rows of a work tile see."""
    seen = position < keys.end
    if C.HAS_LEFT:
        seen = seen & (position >= keys.first)
    return seen


@gluon.jit
def load_key_pages(C: gl.constexpr, entry, n, keys):
    """Load the number of each key's page, for n_block ``n``, as int32 [BLOCK_N].

    A dense cache has no pages. The result is then ``entry``, the sequence's row of the cache, for every key.
    Entries of the block table whose keys no query row sees are not read.
    """
    position = n * C.BLOCK_N + gl.arange(0, C.BLOCK_N, layout=LINE)
    if C.PAGE_SIZE == 0:
        return position * 0 + entry
    else:
        return gl.load(entry + position // C.PAGE_SIZE, mask=is_seen(C, position, keys), other=0)


@gluon.jit
def faults_of_keys(pages, cache):
    """Return int32 [BLOCK_N], 0 for each key whose page is in the cache."""
    return pages ^ in_cache(pages, cache.num_blocks)


@gluon.jit
def gather_n_block(
    C: gl.constexpr, WIDTH: gl.constexpr, HEAD_DIM: gl.constexpr, source, pages, n, keys, head, cache,
    offsets, barrier, tile,
):  # fmt: skip
    """Copy n_block ``n`` of k or v into ``tile``, then arrive at ``barrier``. Keys that no row sees become 0.

    ``offsets``: int64 [BLOCK_N] in shared memory, through which threads exchange the offsets of keys.
    """
    BLOCK_N: gl.constexpr = C.BLOCK_N
    position = n * BLOCK_N + gl.arange(0, BLOCK_N, layout=LINE)
    within = position
    if C.PAGE_SIZE != 0:
        within = position % C.PAGE_SIZE
    row = in_cache(pages, cache.num_blocks).to(gl.int64) * source.page + within.to(gl.int64) * source.token
    offsets.store(gl.where(is_seen(C, position, keys), row, -1))

    COPY: gl.constexpr = 128 // tile.dtype.primitive_bitwidth  # elements in 16 bytes
    wide: gl.constexpr = gl.BlockedLayout([1, COPY], [32 * COPY // WIDTH, WIDTH // COPY], [2, 1], [1, 0])
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, wide))
    base = source.base + gl.multiple_of(head.to(gl.int64) * source.head, COPY)
    rows_of_tile = tile.reshape([BLOCK_N, WIDTH])
    for part in gl.static_range(BLOCK_N // ROWS):
        row = offsets.slice(part * ROWS, ROWS).load(gl.SliceLayout(1, wide))
        inside = (row >= 0)[:, None] & (columns < HEAD_DIM)[None, :]
        addresses = base + gl.multiple_of(row, COPY)[:, None] + columns[None, :]
        async_copy_to_shared(
            rows_of_tile.slice(part * ROWS, ROWS, dim=0), addresses, mask=inside
        )
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(barrier, count=1)
