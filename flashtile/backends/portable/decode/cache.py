"""Loads and prefetches of a sequence's keys and values, by its block table or from a dense cache.

A *page* is a block of a paged cache, an *n_block* a tile of BLOCK_N keys of one sequence. Entries of the
block table are read only for visible keys.
"""

from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.backends.common.tiles import tile_index
from flashtile.backends.portable.decode.schedule import sequence_of


class Cache(NamedTuple):
    """One sequence's keys and values of one head. Fields that the call does not use hold a dummy number,
    since tuples that are carried through a loop must not hold None."""

    k: Any
    """Pointer to the head in the first page, or in the first row of a dense cache."""
    v: Any
    row: Any
    """The sequence's row of a dense cache."""
    block_table: Any
    """Pointer to the sequence's row of the block table."""
    pages: Any
    """Pages of the first two n_blocks, as :func:`load_pages` returns them."""
    k_descale: Any
    """Pointer to the head's scale in the first page."""
    v_descale: Any
    num_blocks: Any
    """Pages, or rows of a dense cache."""
    fault: Any
    """int32, 0 if the sequence's row and lengths are valid. :func:`find_faults` and the loop check pages."""


@triton.jit
def cache_of(work, n, call, C: tl.constexpr, EARLY: tl.constexpr = False):
    """Return the :class:`Cache` of a work tile, for a loop over its n_blocks from ``n`` on.

    EARLY: an earlier kernel may still be writing the tables, so they must not be kept in the L1 cache.
    """
    pointers, strides, outer = call.pointers, call.strides, call.outer
    b, _ = sequence_of(work.m_block, call.lengths, C)
    b = b.to(tl.int64)
    row = b
    fault = work.sequence.fault
    if C.HAS_BATCH_IDX:
        given = tl.load(pointers.cache_batch_idx + b, cache_modifier=".cg" if EARLY else "")
        row = in_cache(given, call.num_blocks)
        fault = fault | (given ^ row)
        row = row.to(tl.int64)
    block_table = b
    pages = (b, b)
    k_descale = b
    v_descale = b
    if C.PAGE_SIZE != 0:
        block_table = pointers.block_table + b * outer.table_stride
        pages = (
            load_pages(block_table, n, work.keys, C, EARLY),
            load_pages(block_table, n + 1, work.keys, C, EARLY),
        )
    if C.DESCALE == "block":
        k_descale = pointers.k_descale + work.head_kv
        v_descale = pointers.v_descale + work.head_kv
    head64 = work.head_kv.to(tl.int64)
    k = pointers.k + head64 * strides.k_head
    v = pointers.v + head64 * strides.v_head
    return Cache(k, v, row, block_table, pages, k_descale, v_descale, call.num_blocks, fault)


@triton.jit
def load_pages(block_table, n, keys, C: tl.constexpr, EARLY: tl.constexpr = False):
    """Load the pages of n_block ``n`` from the block table.

    The result is a scalar if the n_block lies within one page. It has one number per page if the n_block
    consists of whole pages, else one number per key. Entries of keys that are not visible are not read.
    EARLY: an earlier kernel may still be writing the table, so it must not be kept in the L1 cache.
    """
    PAGE_SIZE: tl.constexpr = C.PAGE_SIZE
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    start = n * C.BLOCK_N
    if PAGE_SIZE % C.BLOCK_N == 0:
        return tl.load(block_table + start // PAGE_SIZE, mask=start < keys.end, other=0, cache_modifier=CACHE)
    elif C.BLOCK_N % PAGE_SIZE == 0:
        columns = n * (C.BLOCK_N // PAGE_SIZE) + tl.arange(0, C.BLOCK_N // PAGE_SIZE)
        held = columns * PAGE_SIZE < keys.end
        if C.HAS_LEFT or C.HAS_LEFTPAD:
            held = held & ((columns + 1) * PAGE_SIZE > keys.first)
        return tl.load(block_table + columns, mask=held, other=0, cache_modifier=CACHE)
    else:
        positions = start + tl.arange(0, C.BLOCK_N)
        seen = is_seen(positions, keys, C)
        return tl.load(block_table + positions // PAGE_SIZE, mask=seen, other=0, cache_modifier=CACHE)


@triton.jit
def page_of_keys(page, C: tl.constexpr):
    """Convert the result of :func:`load_pages` to one page for the n_block, or one per key [BLOCK_N]."""
    ONE_PAGE: tl.constexpr = C.PAGE_SIZE % C.BLOCK_N == 0
    if C.PAGE_SIZE != 0:
        if ONE_PAGE or C.WIDE:
            page = page.to(tl.int64)
        if C.BLOCK_N % C.PAGE_SIZE == 0 and not ONE_PAGE:
            PAGES: tl.constexpr = C.BLOCK_N // C.PAGE_SIZE
            page = tl.broadcast_to(page[:, None], [PAGES, C.PAGE_SIZE])
            page = tl.reshape(page, [C.BLOCK_N])
    return page


@triton.jit
def in_cache(pages, num_blocks):
    """Replace invalid pages, which are the caller's mistake, by the last page of the cache.

    An unsigned comparison also catches negative numbers.
    """
    last = (num_blocks - 1).to(tl.uint32, bitcast=True)
    return tl.minimum(pages.to(tl.uint32, bitcast=True), last).to(tl.int32, bitcast=True)


@triton.jit
def find_faults(cache, first, last, keys, C: tl.constexpr):
    """Return int32, a scalar or [BLOCK_N]: all 0 if the sequence's lengths and row in the cache are valid.

    With C.faults_ahead, the result is 0 only if the pages of ``keys`` in n_blocks ``first`` to ``last``
    (exclusive) are valid as well.
    """
    faults = cache.fault
    if C.faults_ahead:
        # Number of loads per round. Taller tiles have registers for only one load.
        ROUNDS: tl.constexpr = 4 if C.BLOCK_M < 64 else 1
        BLOCK_N: tl.constexpr = C.BLOCK_N
        start = first * BLOCK_N
        if C.HAS_LEFT or C.HAS_LEFTPAD:
            start = tl.maximum(start, keys.first)
        end = tl.minimum(last * BLOCK_N, keys.end)
        column = start // C.PAGE_SIZE
        end_column = tl.where(start < end, (end + C.PAGE_SIZE - 1) // C.PAGE_SIZE, column)
        outside = tl.zeros([BLOCK_N], tl.int32)
        while column < end_column:
            # The loads of a round are in flight together.
            columns = column + tl.arange(0, ROUNDS)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            pages = tl.load(cache.block_table + columns, mask=columns < end_column, other=0)
            outside |= tl.max((pages != in_cache(pages, cache.num_blocks)).to(tl.int32), 0)
            column += ROUNDS * BLOCK_N
        faults = faults | outside
    return faults


@triton.jit
def is_seen(positions, keys, C: tl.constexpr):
    """Return which positions are among ``keys``, the keys that at least one row of a work tile sees."""
    seen = positions < keys.end
    if C.HAS_LEFT or C.HAS_LEFTPAD:
        seen = seen & (positions >= keys.first)
    return seen


@triton.jit
def rows_of_n_block(cache, page, start, strides, C: tl.constexpr):
    """Return (k, v, k_offsets, v_offsets) of the n_block whose first key is ``start``.

    k and v are pointers. k_offsets and v_offsets [BLOCK_N] are the offsets of the n_block's rows from these
    pointers, in elements.
    """
    k = cache.k
    v = cache.v
    PAGE_SIZE: tl.constexpr = C.PAGE_SIZE
    position = tile_index(C.BLOCK_N, C.WIDE)
    if PAGE_SIZE == 0:
        k += page * strides.k_batch + start.to(tl.int64) * strides.k_token
        v += page * strides.v_batch + start.to(tl.int64) * strides.v_token
        k_offsets = position * strides.k_token
        v_offsets = position * strides.v_token
    elif PAGE_SIZE % C.BLOCK_N == 0:
        within = (start % PAGE_SIZE).to(tl.int64)
        k += page * strides.k_batch + within * strides.k_token
        v += page * strides.v_batch + within * strides.v_token
        k_offsets = position * strides.k_token
        v_offsets = position * strides.v_token
    else:
        if C.BLOCK_N % PAGE_SIZE != 0:
            position += start
        position = position % PAGE_SIZE
        k_offsets = page * strides.k_batch + position * strides.k_token
        v_offsets = page * strides.v_batch + position * strides.v_token
    return k, v, k_offsets, v_offsets


@triton.jit
def load_rows(base, offsets, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows [BLOCK_N, BLOCK_D] of a cache at ``offsets``; zeros where not ``seen``."""
    columns = tl.arange(0, BLOCK_D)
    inside = seen[:, None]
    if HEAD_DIM != BLOCK_D:
        inside = inside & (columns < HEAD_DIM)[None, :]
    return tl.load(base + offsets[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def prefetch_n_block(cache, page, n, keys, strides, C: tl.constexpr):
    """Prefetch the keys and values of n_block ``n``.

    ``page``: the sequence's row of a dense cache, or the result of :func:`load_pages`.
    """
    PER_ELEMENT: tl.constexpr = 2 if C.E4M3_PAIRS else 1
    start = not_hoisted(n) * C.BLOCK_N
    seen = is_seen(start + tl.arange(0, C.BLOCK_N), keys, C)
    if C.PAGE_SIZE != 0:
        page = page_of_keys(in_cache(not_hoisted(page), cache.num_blocks), C)
    k, v, k_offsets, v_offsets = rows_of_n_block(cache, page, start, strides, C)
    prefetch_rows(k, k_offsets, seen, C.HEAD_DIM // PER_ELEMENT, C.BLOCK_D // PER_ELEMENT)
    prefetch_rows(v, v_offsets, seen, C.HEAD_DIM_V // PER_ELEMENT, C.BLOCK_DV // PER_ELEMENT)


@triton.jit
def prefetch_rows(base, offsets, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Prefetch the rows of a cache at ``offsets`` to the L2 cache, where ``seen``."""
    SECTOR: tl.constexpr = 256 // base.dtype.element_ty.primitive_bitwidth
    SECTORS: tl.constexpr = max(BLOCK_D // SECTOR, 1)
    columns = tl.arange(0, SECTORS) * SECTOR
    inside = seen[:, None] & (columns < HEAD_DIM)[None, :]
    addresses = (base + offsets[:, None] + columns[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        """{
        .reg .pred inside;
        setp.ne.b32 inside, $2, 0;
        @inside prefetch.global.L2 [$1];
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [addresses, inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def not_hoisted(number):
    """Return an int32 unchanged, and keep the compiler from hoisting uses of it out of a loop.

    Hoisted results would occupy registers during the loop.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
    )
