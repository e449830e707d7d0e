"""Steps of attention over a cache: products with its keys and values, scores, the online softmax.

:mod:`schedule` defines *n_block* and *work tile*.
"""

from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.backends.common.e4m3 import decode_bits, split_pairs
from flashtile.backends.portable.decode.cache import (
    in_cache,
    is_seen,
    load_pages,
    load_rows,
    page_of_keys,
    prefetch_n_block,
    rows_of_n_block,
)
from flashtile.backends.portable.decode.unified_max import shifted_exponentials
from flashtile.backends.portable.tiles import apply_score_mod, softmax_step, visible


class ScoreRows(NamedTuple):
    """Properties of a tile's rows that scores depend on: [BLOCK_M], or a scalar for all rows."""

    tokens: Any
    offset: Any
    """len_k - len_q: token i stands at key i + offset."""
    slope: Any
    k_scale: Any
    tree_rows: Any
    """Pointers to the tokens' rows of the tree mask."""
    len_q: Any
    left: Any
    """Maximum number of keys that a token sees before its position; ``right``: after it. Scalars or [BLOCK_M,
    1]."""
    right: Any


class NextWork(NamedTuple):
    """The work tile that a program attends to after the present one."""

    cache: Any
    n_block: Any
    keys: Any
    exists: Any


@triton.jit
def as_float16(q):
    """Return (q / scale in float16, scale [BLOCK_M]).

    The quotient is exact, except for elements that are more than 2^24 times smaller than the largest of their
    row. With q in float16, the cache is converted from e4m3 to float16, which is exact and cheap. Conversion
    to bfloat16 would use the slowest conversion unit.
    """
    q = q.to(tl.float32)
    largest = tl.max(tl.abs(q), 1)
    # Keep only the exponent: the largest power of two up to ``largest``.
    scale = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(scale == 0.0, 1.0, scale)
    return (q / scale[:, None]).to(tl.float16), scale


@triton.jit
def as_dtype(tile, dtype: tl.constexpr, C: tl.constexpr):
    """Convert a tile of k or v to ``dtype``. The cache must not be viewed as pairs of elements."""
    if C.E4M3_BITS:
        tile = decode_bits(tile)
    return tile.to(dtype)


@triton.jit
def multiply_keys(q, q_odd, base, offsets, seen, C: tl.constexpr):
    """Return the raw products [BLOCK_M, BLOCK_N] of queries with the keys at ``offsets``."""
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
    """Return (acc + p V, acc_odd + p V_odd) for the values at ``offsets``.

    Operands are in ``dtype``, or in ``scaled_dtype`` if values are multiplied by the scales of their pages.
    V_odd are the odd columns if E4M3_PAIRS; otherwise ``acc_odd`` is unused.
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
def score_keys(products, positions, seen, rows, numbers, C: tl.constexpr):
    """Turn raw products [BLOCK_M, BLOCK_N] into scores, -inf where masked; in log2 units if HAS_SCORE_MOD."""
    scores = products
    distance = positions[None, :] - (rows.tokens + rows.offset)[:, None]
    if C.HAS_SCORE_MOD:
        scores, _ = apply_score_mod(
            scores * rows.k_scale, distance, rows.slope, numbers.softmax_scale, numbers.softcap,
            C.HAS_SOFTCAP, C.HAS_ALIBI,
        )  # fmt: skip
    allowed = visible(distance, rows.left, rows.right, C.HAS_LEFT, C.HAS_RIGHT)
    allowed = allowed & seen[None, :]
    if C.HAS_TREE:
        columns = (positions - rows.offset)[None, :]
        in_tree = (columns >= 0) & (columns < rows.len_q) & (rows.tokens < rows.len_q)[:, None]
        allowed = allowed & (tl.load(rows.tree_rows[:, None] + columns, mask=in_tree, other=1) != 0)
    return tl.where(allowed, scores, -float("inf"))


@triton.jit
def start_sums(q, faults, C: tl.constexpr):
    """Return (q, odd columns of q, odd columns of acc, acc, row_max, row_sum) before the first n_block.

    If E4M3_PAIRS, q and acc have only the even columns. Otherwise the odd columns are unused.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    q_odd = tl.zeros([], tl.float32)
    acc_odd = q_odd
    if C.E4M3_PAIRS:
        q, q_odd = tl.split(tl.reshape(q, [BLOCK_M, C.BLOCK_D // 2, 2]))
        acc = tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    # With a fault the sum begins as NaN, and stays NaN.
    row_sum = 0.0
    if C.faults_ahead:
        row_sum = tl.where(faults == 0, 0.0, float("nan"))
    if C.sums_late:
        row_sum += tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        if C.faults_ahead:
            row_sum = tl.sum(row_sum, 0)
        row_sum += tl.zeros([BLOCK_M], tl.float32)
    return q, q_odd, acc_odd, acc, row_max, row_sum


@triton.jit
def prefetch_next(n, first, last, next_work, strides, PREFETCH: tl.constexpr, C: tl.constexpr):
    """Prefetch the first two n_blocks of the program's next work tile.

    The loop over n_blocks calls this function in each iteration ``n``. Two consecutive iterations prefetch
    one n_block each: they begin at ``last - PREFETCH``, or at ``first`` if the loop is shorter. In a
    program's last work tile, these two iterations launch the dependent kernels instead.
    """
    i = n - tl.maximum(first, last - PREFETCH)
    if (i == 0) | (i == 1):
        if next_work.exists:
            page = next_work.cache.row
            if C.PAGE_SIZE != 0:
                page = tl.where(i == 0, next_work.cache.pages[0], next_work.cache.pages[1])
            prefetch_n_block(next_work.cache, page, next_work.n_block + i, next_work.keys, strides, C)
        else:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def load_page_scales(cache, page, outer, C: tl.constexpr):
    """Load the scales of k and v by page: scalars if an n_block lies in one page, else one number per key.

    The numbers per key are [1, BLOCK_N] for k and [BLOCK_N, 1] for v.
    """
    k_scale = tl.load(cache.k_descale + page.to(tl.int64) * outer.k_descale_stride)
    v_scale = tl.load(cache.v_descale + page.to(tl.int64) * outer.v_descale_stride)
    if C.PAGE_SIZE != 0 and not C.one_page:
        k_scale = k_scale[None, :]
        v_scale = v_scale[:, None]
    return k_scale, v_scale


@triton.jit
def attend_n_blocks(
    q, first, last, keys, cache, faults, next_work, rows, call, dtype: tl.constexpr, C: tl.constexpr,
    PREFETCH: tl.constexpr, qv, shift=None,
):  # fmt: skip
    """Attend to ``keys`` in n_blocks ``first`` to ``last`` (exclusive).

    Returns (acc [BLOCK_M, BLOCK_DV], row_max [BLOCK_M], row_sum [BLOCK_M]). Sums are NaN if ``faults`` of
    :func:`find_faults` are not 0, or if a page is not in the cache.

    ``dtype`` is the dtype of the call's queries. If pages have scales, values are multiplied by the scales
    and rounded to ``dtype``. If ``shift`` is given, it is subtracted from scores instead of their maximum.
    ``qv`` [BLOCK_M, BLOCK_DV]: queries that are multiplied by the values, if C.HAS_QV.
    """
    PAGE_SIZE: tl.constexpr = C.PAGE_SIZE
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    operand: tl.constexpr = q.dtype
    q, q_odd, acc_odd, acc, row_max, row_sum = start_sums(q, faults, C)
    # Block-table entries are loaded two n_blocks ahead of their keys, so that the latencies of both loads do
    # not add up.
    current, upcoming = cache.pages
    if PAGE_SIZE != 0:
        given = current
        current = in_cache(given, cache.num_blocks)
        if not C.faults_ahead:
            faults = faults | (given ^ current)
    for n in range(first, last):
        if PREFETCH != 0:
            prefetch_next(n, first, last, next_work, call.strides, PREFETCH, C)
        start = n * C.BLOCK_N
        positions = start + tl.arange(0, C.BLOCK_N)
        seen = is_seen(positions, keys, C)
        page = cache.row
        if PAGE_SIZE != 0:
            page = page_of_keys(current, C)
            current = in_cache(upcoming, cache.num_blocks)
            if not C.faults_ahead:
                faults = faults | (upcoming ^ current)
            upcoming = load_pages(cache.block_table, n + 2, keys, C)
        k, v, k_offsets, v_offsets = rows_of_n_block(cache, page, start, call.strides, C)
        products = multiply_keys(q, q_odd, k, k_offsets, seen, C)  # [BLOCK_M, BLOCK_N]
        if C.HAS_QV:
            v_tile = load_rows(v, v_offsets, seen, C.HEAD_DIM_V, C.BLOCK_DV)  # loaded once for both products
            products = tl.dot(qv, tl.trans(v_tile), products, input_precision=C.PRECISION)
        v_scale = 1.0
        if C.DESCALE == "block":
            k_scale, v_scale = load_page_scales(cache, page, call.outer, C)
            products = products * k_scale
        scores = score_keys(products, positions, seen, rows, call.numbers, C)
        if shift is not None:
            p = shifted_exponentials(scores, shift, call.numbers.scale_log2, C, dtype)
            if C.sums_late:
                row_sum += p
            else:
                row_sum += tl.sum(p, 1)
        else:
            p, row_max, alpha = softmax_step(scores, row_max, call.numbers.scale_log2, C.HAS_SCORE_MOD, True)
            if C.sums_late:
                row_sum = row_sum * alpha[:, None] + p
            else:
                row_sum = row_sum * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            if C.E4M3_PAIRS:
                acc_odd = acc_odd * alpha[:, None]
        if C.HAS_QV:
            acc = tl.dot(p.to(operand), v_tile, acc, input_precision=C.PRECISION)
        else:
            acc, acc_odd = add_values(acc, acc_odd, p, v, v_offsets, seen, v_scale, operand, dtype, C)
    if C.E4M3_PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, BLOCK_DV])
    if C.sums_late:
        row_sum = tl.sum(row_sum, 1)
    if not C.faults_ahead:
        if PAGE_SIZE != 0 and not C.one_page:
            faults = tl.max((faults != 0).to(tl.int32), 0)
        row_sum = tl.where(faults == 0, row_sum, float("nan"))
    return acc, row_max, row_sum
