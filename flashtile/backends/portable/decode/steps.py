"""Steps of attention over a cache: its keys loaded by way of the block table, scores, the online softmax.

A *page* is a block of a paged cache, an *n_block* a tile of BLOCK_N keys of one sequence.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.common.tiles import tile_index
from flashtile.backends.portable.decode.e4m3 import decode_bits, split_pairs
from flashtile.backends.portable.decode.schedule import Layout
from flashtile.backends.portable.decode.unified_max import shifted_exponentials
from flashtile.backends.portable.tiles import apply_score_mod, visible


@dataclass(frozen=True)
class Variant(Layout):
    """What the attention kernel is compiled for."""

    PAGE_SIZE: int
    """0 is a dense cache."""
    HAS_BATCH_IDX: bool
    HAS_SOFTCAP: bool
    HAS_ALIBI: bool
    HAS_SINK: bool
    HAS_TREE: bool
    HAS_PRIOR: bool
    HAS_QV: bool
    """Queries for the values are part of the scores; no cache of e4m3."""
    HAS_SCORE_MOD: bool
    """Whether scores are more than raw products times a positive scale (which keeps their maximum)."""
    SOFTMAX_MAX: str
    """"none", "number", or "head": whether the caller says what is subtracted (:mod:`unified_max`)."""
    DESCALE: str
    """"none", "head", or "block": of each page, or of each row of a dense cache."""
    E4M3: bool
    """Whether the cache is in FP8; products are then in float16, unless queries are in float32."""
    E4M3_BITS: bool
    """Whether its elements are decoded in software."""
    E4M3_PAIRS: bool
    """Whether it comes as pairs of elements; their even and odd columns are then multiplied apart."""
    BALANCED: bool
    SPLIT: bool
    """Whether a work tile may have several splits: always, if balanced."""
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    WIDE: bool
    """Whether offsets into the cache need 64 bits."""
    PDL: bool
    """Programmatic dependent launch: the combining kernel starts before this one has ended."""
    PREFETCH: int
    """n_blocks before the end of a work tile at which what comes after it is called for: the first n_blocks
    of the next one, into the L2 cache, or after the last the kernels that depend on this one. 0: nothing
    is."""
    PRECISION: str

    @property
    def faults_ahead(self) -> bool:
        """Whether the pages of a work tile are checked before the loop over its n_blocks. Within it that is
        free where tiles are small; elsewhere the loop has no register to spare."""
        return self.PAGE_SIZE != 0 and (self.BLOCK_M > 16 or self.E4M3)


class Strides(NamedTuple):
    """In elements: of sequences (pages), tokens and heads; a stride of ``k_descale`` is that of a
    page or sequence."""

    q_stride_b: Any
    q_stride_s: Any
    q_stride_h: Any
    k_stride_b: Any
    k_stride_s: Any
    k_stride_h: Any
    v_stride_b: Any
    v_stride_s: Any
    v_stride_h: Any
    table_stride: Any
    alibi_stride: Any
    k_descale_stride: Any
    v_descale_stride: Any
    tree_stride: Any


class Numbers(NamedTuple):
    """Of the scores: softmax_scale, the same times log2(e), softcap, and what is subtracted from scores."""

    softmax_scale: Any
    scale_log2: Any
    softcap: Any
    softmax_max: Any
    """None where the maximum is."""


class Cache(NamedTuple):
    """One sequence's keys and values of one head. What the call does not have is some number that is not
    used."""

    k: Any
    """Pointer to the head in the first page, or in the first row of a dense cache."""
    v: Any
    row: Any
    """Of a dense cache."""
    block_table: Any
    """Pointer to the sequence's row."""
    pages: Any
    """Of the two n_blocks that are attended to first, as :func:`load_pages` has them."""
    k_descale: Any
    """Pointer to the head's factor in the first page."""
    v_descale: Any
    num_blocks: Any
    """Pages, or rows of a dense cache."""
    fault: Any
    """int32, 0 if the sequence lies within the cache, as far as that is known before its pages are."""


class NextWork(NamedTuple):
    """What a program attends to after a work tile."""

    cache: Any
    n_block: Any
    keys: Any
    exists: Any


class ScoreRows(NamedTuple):
    """What the scores of a tile's rows depend on, [BLOCK_M] or a number for all."""

    tokens: Any
    offset: Any
    """len_k - len_q: token i stands at key i + offset."""
    slope: Any
    k_scale: Any
    tree_rows: Any
    """Pointers to the tokens' rows of the tree mask."""
    len_q: Any


@triton.jit
def load_pages(block_table, n, keys, C: tl.constexpr, EARLY: tl.constexpr = False):
    """The pages of n_block ``n``: one number where it lies within one page, else one for each page where
    pages divide it, else one for each key.

    Entries of keys that are not seen are not read. EARLY as for :func:`schedule.load_sequence`.
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
def in_cache(pages, num_blocks):
    """A page outside of the cache is the caller's mistake: the last stands for it, which is not its own.

    One comparison: a negative number is a large one without a sign.
    """
    last = (num_blocks - 1).to(tl.uint32, bitcast=True)
    return tl.minimum(pages.to(tl.uint32, bitcast=True), last).to(tl.int32, bitcast=True)


@triton.jit
def find_faults(cache, first, last, keys, C: tl.constexpr):
    """int32, one number or [BLOCK_N], all 0 if the sequence is in the cache, and with faults_ahead also the
    pages of its ``keys`` in n_blocks ``first`` to ``last`` (exclusive).
    """
    faults = cache.fault
    if C.faults_ahead:
        # Tiles of more rows have no registers for more.
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
            # Rounds of loads that are on their way together.
            columns = column + tl.arange(0, ROUNDS)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            pages = tl.load(cache.block_table + columns, mask=columns < end_column, other=0)
            outside |= tl.max((pages != in_cache(pages, cache.num_blocks)).to(tl.int32), 0)
            column += ROUNDS * BLOCK_N
        faults = faults | outside
    return faults


@triton.jit
def is_seen(positions, keys, C: tl.constexpr):
    """Whether positions are among the keys that any row of a work tile sees."""
    seen = positions < keys.end
    if C.HAS_LEFT or C.HAS_LEFTPAD:
        seen = seen & (positions >= keys.first)
    return seen


@triton.jit
def page_of_keys(page, C: tl.constexpr):
    """What :func:`load_pages` has, as the page of the n_block, or of each of its keys [BLOCK_N]."""
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
def rows_of_n_block(cache, page, start, strides, C: tl.constexpr):
    """(pointers into k and v, offsets [BLOCK_N] of their rows) of the n_block of keys from ``start`` on."""
    k = cache.k
    v = cache.v
    PAGE_SIZE: tl.constexpr = C.PAGE_SIZE
    position = tile_index(C.BLOCK_N, C.WIDE)
    if PAGE_SIZE == 0:
        k += page * strides.k_stride_b + start.to(tl.int64) * strides.k_stride_s
        v += page * strides.v_stride_b + start.to(tl.int64) * strides.v_stride_s
        k_offsets = position * strides.k_stride_s
        v_offsets = position * strides.v_stride_s
    elif PAGE_SIZE % C.BLOCK_N == 0:
        within = (start % PAGE_SIZE).to(tl.int64)
        k += page * strides.k_stride_b + within * strides.k_stride_s
        v += page * strides.v_stride_b + within * strides.v_stride_s
        k_offsets = position * strides.k_stride_s
        v_offsets = position * strides.v_stride_s
    else:
        if C.BLOCK_N % PAGE_SIZE != 0:
            position += start
        position = position % PAGE_SIZE
        k_offsets = page * strides.k_stride_b + position * strides.k_stride_s
        v_offsets = page * strides.v_stride_b + position * strides.v_stride_s
    return k, v, k_offsets, v_offsets


@triton.jit
def prefetch_rows(base, offsets, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Ask for the rows of a cache at ``offsets``, where ``seen``: they are on their way to the L2 cache."""
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
    """int32 as it is, but the compiler moves nothing that is made of it out of a loop, where it would hold
    registers."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_n_block(cache, page, n, keys, strides, C: tl.constexpr):
    """Ask for the keys and values of n_block ``n``; ``page`` is its row of a dense cache, or as
    :func:`load_pages` has it."""
    PER_ELEMENT: tl.constexpr = 2 if C.E4M3_PAIRS else 1
    start = not_hoisted(n) * C.BLOCK_N
    seen = is_seen(start + tl.arange(0, C.BLOCK_N), keys, C)
    if C.PAGE_SIZE != 0:
        page = page_of_keys(in_cache(not_hoisted(page), cache.num_blocks), C)
    k, v, k_offsets, v_offsets = rows_of_n_block(cache, page, start, strides, C)
    prefetch_rows(k, k_offsets, seen, C.HEAD_DIM // PER_ELEMENT, C.BLOCK_D // PER_ELEMENT)
    prefetch_rows(v, v_offsets, seen, C.HEAD_DIM_V // PER_ELEMENT, C.BLOCK_DV // PER_ELEMENT)


@triton.jit
def as_float16(q):
    """(q / scale in float16, scale [BLOCK_M]), exact but for what is 2^-24 times below a row's largest
    element.

    e4m3 is exact in float16 and cheap to convert; to bfloat16 it takes the slowest of the conversion units.
    """
    q = q.to(tl.float32)
    largest = tl.max(tl.abs(q), 1)
    # The power of two at or below it: the exponent alone.
    scale = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(scale == 0.0, 1.0, scale)
    return (q / scale[:, None]).to(tl.float16), scale


@triton.jit
def load_rows(base, offsets, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_N, BLOCK_D] of a cache: rows at ``offsets``, zeros where not ``seen``."""
    columns = tl.arange(0, BLOCK_D)
    inside = seen[:, None]
    if HEAD_DIM != BLOCK_D:
        inside = inside & (columns < HEAD_DIM)[None, :]
    return tl.load(base + offsets[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def as_dtype(tile, dtype: tl.constexpr, C: tl.constexpr):
    """A tile that :func:`load_rows` has of a cache that does not come in pairs, in ``dtype``."""
    if C.E4M3_BITS:
        tile = decode_bits(tile)
    return tile.to(dtype)


@triton.jit
def multiply_keys(q, q_odd, base, offsets, seen, C: tl.constexpr):
    """Raw products [BLOCK_M, BLOCK_N] of queries with the keys at ``offsets``."""
    if C.E4M3_PAIRS:
        pairs = load_rows(base, offsets, seen, C.HEAD_DIM // 2, C.BLOCK_D // 2)
        even, odd = split_pairs(pairs, C.E4M3_BITS)
        products = tl.dot(q, tl.trans(even.to(q.dtype)), input_precision=C.PRECISION)
        odd = tl.trans(odd.to(q.dtype))
        products = tl.dot(q_odd, odd, products, input_precision=C.PRECISION)
    else:
        k = load_rows(base, offsets, seen, C.HEAD_DIM, C.BLOCK_D)
        k = tl.trans(as_dtype(k, q.dtype, C))
        products = tl.dot(q, k, input_precision=C.PRECISION)
    return products


@triton.jit
def add_values(
    acc, acc_odd, p, base, offsets, seen, page_scale, dtype: tl.constexpr, scaled_dtype: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """acc + p V for the values at ``offsets``, multiplied in ``dtype``, or by the scales of their pages in
    ``scaled_dtype``.
    """
    SCALED: tl.constexpr = C.DESCALE == "block"
    operand: tl.constexpr = scaled_dtype if SCALED else dtype
    if C.E4M3_PAIRS:
        pairs = load_rows(base, offsets, seen, C.HEAD_DIM_V // 2, C.BLOCK_DV // 2)
        v, v_odd = split_pairs(pairs, C.E4M3_BITS)
        if SCALED:
            v_odd = v_odd.to(tl.float32) * page_scale
        acc_odd = tl.dot(p.to(operand), v_odd.to(operand), acc_odd, input_precision=C.PRECISION)
    else:
        v = as_dtype(load_rows(base, offsets, seen, C.HEAD_DIM_V, C.BLOCK_DV), dtype, C)
    if SCALED:
        v = v.to(tl.float32) * page_scale
    return tl.dot(p.to(operand), v.to(operand), acc, input_precision=C.PRECISION), acc_odd


@triton.jit
def score_keys(products, positions, seen, rows, lengths, numbers, C: tl.constexpr):
    """Raw products [BLOCK_M, BLOCK_N] -> scores, -inf where masked; in log2 units if HAS_SCORE_MOD."""
    scores = products
    distance = positions[None, :] - (rows.tokens + rows.offset)[:, None]
    if C.HAS_SCORE_MOD:
        scores, _ = apply_score_mod(
            scores * rows.k_scale, distance, rows.slope, numbers.softmax_scale, numbers.softcap,
            C.HAS_SOFTCAP, C.HAS_ALIBI,
        )  # fmt: skip
    allowed = visible(distance, lengths.window_left, lengths.window_right, C.HAS_LEFT, C.HAS_RIGHT)
    allowed = allowed & seen[None, :]
    if C.HAS_TREE:
        columns = (positions - rows.offset)[None, :]
        in_tree = (columns >= 0) & (columns < rows.len_q) & (rows.tokens < rows.len_q)[:, None]
        allowed = allowed & (tl.load(rows.tree_rows[:, None] + columns, mask=in_tree, other=1) != 0)
    return tl.where(allowed, scores, -float("inf"))


@triton.jit
def softmax_step(scores, row_max, scale_log2, HAS_SCORE_MOD: tl.constexpr):
    """(probabilities over the new maximum, it, the old one's factor); rows that have met no key stay at
    -inf.
    """
    if HAS_SCORE_MOD:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    if HAS_SCORE_MOD:
        p = tl.exp2(scores - shift[:, None])
    else:
        p = tl.exp2(scores * scale_log2 - shift[:, None])
    return p, new_max, tl.exp2(row_max - shift)


@triton.jit
def attend_n_blocks(
    q, first, last, keys, cache, faults, next_work, rows, lengths, strides, numbers, dtype: tl.constexpr,
    C: tl.constexpr, PREFETCH: tl.constexpr, UNIFIED: tl.constexpr = False, shift=None, qv=None,
):  # fmt: skip
    """(acc [BLOCK_M, BLOCK_DV], row_max, row_sum [BLOCK_M]) over those of ``keys`` in n_blocks ``first`` to
    ``last`` (exclusive). Sums are NaN if there are ``faults``, as :func:`find_faults` has them, or if a page
    is not in the cache.

    ``dtype``, that of the call's queries, is what values scaled by their page are rounded to. UNIFIED:
    ``shift`` is subtracted from scores, and not their maximum. ``qv`` [BLOCK_M, BLOCK_DV] multiplies values.
    """
    PAGE_SIZE: tl.constexpr = C.PAGE_SIZE
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    operand: tl.constexpr = q.dtype
    q_odd = tl.zeros([], tl.float32)
    acc_odd = q_odd
    if C.E4M3_PAIRS:
        q, q_odd = tl.split(tl.reshape(q, [BLOCK_M, C.BLOCK_D // 2, 2]))
        acc = tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    # Where a row's columns lie in several warps, they are summed at the end: a sum is an exchange between
    # them.
    SUM_LATE: tl.constexpr = BLOCK_M < 64
    # A sum that begins as NaN remains it.
    row_sum = 0.0
    if C.faults_ahead:
        row_sum = tl.where(faults == 0, 0.0, float("nan"))
    if SUM_LATE:
        row_sum += tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        if C.faults_ahead:
            row_sum = tl.sum(row_sum, 0)
        row_sum += tl.zeros([BLOCK_M], tl.float32)
    # Entries are on their way while the keys of two n_blocks are: n_blocks then follow each other without a
    # chain of two latencies.
    current, upcoming = cache.pages
    if PAGE_SIZE != 0:
        given = current
        current = in_cache(given, cache.num_blocks)
        if not C.faults_ahead:
            faults = faults | (given ^ current)
    for n in range(first, last):
        if PREFETCH != 0:
            i = n - tl.maximum(first, last - PREFETCH)
            if (i == 0) | (i == 1):
                if next_work.exists:
                    page = next_work.cache.row
                    if PAGE_SIZE != 0:
                        page = tl.where(i == 0, next_work.cache.pages[0], next_work.cache.pages[1])
                    prefetch_n_block(
                        next_work.cache, page, next_work.n_block + i, next_work.keys, strides, C
                    )
                else:
                    tl.extra.cuda.gdc_launch_dependents()
        start = n * BLOCK_N
        positions = start + tl.arange(0, BLOCK_N)
        seen = is_seen(positions, keys, C)
        page = cache.row
        if PAGE_SIZE != 0:
            page = page_of_keys(current, C)
            current = in_cache(upcoming, cache.num_blocks)
            if not C.faults_ahead:
                faults = faults | (upcoming ^ current)
            upcoming = load_pages(cache.block_table, n + 2, keys, C)
        k, v, k_offsets, v_offsets = rows_of_n_block(cache, page, start, strides, C)
        products = multiply_keys(q, q_odd, k, k_offsets, seen, C)  # [BLOCK_M, BLOCK_N]
        if C.HAS_QV:
            v_tile = load_rows(v, v_offsets, seen, C.HEAD_DIM_V, C.BLOCK_DV)  # once for both products
            products = tl.dot(qv, tl.trans(v_tile), products, input_precision=C.PRECISION)
        page_v_scale = 1.0
        if C.DESCALE == "block":
            page_k_scale = tl.load(cache.k_descale + page.to(tl.int64) * strides.k_descale_stride)
            page_v_scale = tl.load(cache.v_descale + page.to(tl.int64) * strides.v_descale_stride)
            if PAGE_SIZE != 0 and not ONE_PAGE:
                page_k_scale = page_k_scale[None, :]
                page_v_scale = page_v_scale[:, None]
            products = products * page_k_scale
        scores = score_keys(products, positions, seen, rows, lengths, numbers, C)
        if UNIFIED:
            p = shifted_exponentials(scores, shift, numbers.scale_log2, C, dtype)
            if SUM_LATE:
                row_sum += p
            else:
                row_sum += tl.sum(p, 1)
        else:
            p, row_max, alpha = softmax_step(scores, row_max, numbers.scale_log2, C.HAS_SCORE_MOD)
            if SUM_LATE:
                row_sum = row_sum * alpha[:, None] + p
            else:
                row_sum = row_sum * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            if C.E4M3_PAIRS:
                acc_odd = acc_odd * alpha[:, None]
        if C.HAS_QV:
            acc = tl.dot(p.to(operand), v_tile, acc, input_precision=C.PRECISION)
        else:
            acc, acc_odd = add_values(acc, acc_odd, p, v, v_offsets, seen, page_v_scale, operand, dtype, C)
    if C.E4M3_PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, BLOCK_DV])
    if SUM_LATE:
        row_sum = tl.sum(row_sum, 1)
    if not C.faults_ahead:
        if PAGE_SIZE != 0 and not ONE_PAGE:
            faults = tl.max((faults != 0).to(tl.int32), 0)
        row_sum = tl.where(faults == 0, row_sum, float("nan"))
    return acc, row_max, row_sum
