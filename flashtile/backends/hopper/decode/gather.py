"""Loads keys one by one by asynchronous copies (cp.async), for pages of any size and for padding on the left.

TMA loads need 16 or more contiguous keys. Smaller or odd pages, and padding that may end at any key, need an
address for each key.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flashtile.backends.hopper.compat import async_copy_to_shared, gluon
from flashtile.backends.portable.decode.cache import in_cache

WARPS = gl.constexpr(2)
"""Warps of a loader of k, or of v."""
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [2], [0]))
"""Layout of one value per key, over the warps of a loader."""
ROWS = gl.constexpr(32)
"""Keys whose addresses a thread holds at a time."""


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
