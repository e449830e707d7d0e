"""Steps of attention over a cache: its tiles loaded by way of the block table, scores, the online softmax."""

from typing import NamedTuple

import triton
import triton.language as tl

from flashtile.backends.common.tiles import tile_index
from flashtile.backends.portable.decode.e4m3 import decode_bits, split_pairs
from flashtile.backends.portable.tiles import apply_score_mod, visible


class Features(NamedTuple):
    """What a call computes, as far as its kernel is compiled for it."""

    PAGE_SIZE: int
    """0 is a dense cache."""
    HAS_BATCH_IDX: bool
    HAS_SOFTCAP: bool
    HAS_ALIBI: bool
    HAS_SINK: bool
    HAS_TREE: bool
    HAS_PRIOR: bool
    BENT: bool
    """Whether scores are more than raw products times a positive scale (which keeps their maximum)."""
    DESCALE: str
    """"none", "head", or "block": of each page, or of each row of a dense cache."""
    E4M3: bool
    """Whether the cache is in FP8; products are then in float16, unless queries are in float32."""
    E4M3_BITS: bool
    """Whether its elements are decoded in software."""
    PAIRS: bool
    """Whether it comes as pairs of elements; their even and odd columns are then multiplied apart."""
    BALANCED: bool
    SPLIT: bool
    """Whether an item may have several splits: always, if balanced."""
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    WIDE: bool
    """Whether offsets into the cache need 64 bits."""
    PDL: bool
    """Programmatic dependent launch: the combining kernel starts before this one has ended."""
    AHEAD: int
    """Tiles before the end of an item at which what comes after it is called for: the first tiles of the next
    one, into the L2 cache, or after the last the kernels that depend on this one. 0: nothing is."""
    PRECISION: str


@triton.jit
def table_entries(
    table, n, keys_seen, LAYOUT: tl.constexpr, FEATURES: tl.constexpr, EARLY: tl.constexpr = False
):
    """The blocks of tile ``n``: one number where a tile lies within one block, else one for each block where
    blocks divide it, else one for each key.

    Entries of keys that are not seen are not read. EARLY as for :func:`schedule.sequence`.
    """
    PAGE_SIZE: tl.constexpr = FEATURES.PAGE_SIZE
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    low, high = keys_seen
    start = n * LAYOUT.BLOCK_N
    if PAGE_SIZE % LAYOUT.BLOCK_N == 0:
        return tl.load(table + start // PAGE_SIZE, mask=start < high, other=0, cache_modifier=CACHE)
    elif LAYOUT.BLOCK_N % PAGE_SIZE == 0:
        pages = n * (LAYOUT.BLOCK_N // PAGE_SIZE) + tl.arange(0, LAYOUT.BLOCK_N // PAGE_SIZE)
        held = pages * PAGE_SIZE < high
        if LAYOUT.HAS_LEFT or LAYOUT.HAS_LEFTPAD:
            held = held & ((pages + 1) * PAGE_SIZE > low)
        return tl.load(table + pages, mask=held, other=0, cache_modifier=CACHE)
    else:
        keys = start + tl.arange(0, LAYOUT.BLOCK_N)
        seen = is_seen(keys, keys_seen, LAYOUT)
        return tl.load(table + keys // PAGE_SIZE, mask=seen, other=0, cache_modifier=CACHE)


@triton.jit
def in_cache(entries, num_blocks):
    """A block outside of the cache is the caller's mistake; it must not become a fault."""
    return tl.minimum(tl.maximum(entries, 0), num_blocks - 1)


@triton.jit
def is_seen(keys, keys_seen, LAYOUT: tl.constexpr):
    """Whether keys are among those that any row of a pair sees."""
    low, high = keys_seen
    seen = keys < high
    if LAYOUT.HAS_LEFT or LAYOUT.HAS_LEFTPAD:
        seen = seen & (keys >= low)
    return seen


@triton.jit
def block_of_keys(block, LAYOUT: tl.constexpr, FEATURES: tl.constexpr):
    """What :func:`table_entries` has, as the block of the tile, or of each of its keys [BLOCK_N]."""
    WHOLE_BLOCK: tl.constexpr = FEATURES.PAGE_SIZE % LAYOUT.BLOCK_N == 0
    if FEATURES.PAGE_SIZE != 0:
        if WHOLE_BLOCK or FEATURES.WIDE:
            block = block.to(tl.int64)
        if LAYOUT.BLOCK_N % FEATURES.PAGE_SIZE == 0 and not WHOLE_BLOCK:
            PAGES: tl.constexpr = LAYOUT.BLOCK_N // FEATURES.PAGE_SIZE
            block = tl.broadcast_to(block[:, None], [PAGES, FEATURES.PAGE_SIZE])
            block = tl.reshape(block, [LAYOUT.BLOCK_N])
    return block


@triton.jit
def rows_of_tile(cache, block, start, LAYOUT: tl.constexpr, FEATURES: tl.constexpr):
    """(pointers into k and v, offsets [BLOCK_N] of their rows) of the tile of keys from ``start`` on."""
    k_at, v_at, _, _, _, strides, _ = cache
    k_stride_b, k_stride_s, v_stride_b, v_stride_s, _, _ = strides
    PAGE_SIZE: tl.constexpr = FEATURES.PAGE_SIZE
    position = tile_index(LAYOUT.BLOCK_N, FEATURES.WIDE)
    if PAGE_SIZE == 0:
        k_at += block * k_stride_b + start.to(tl.int64) * k_stride_s
        v_at += block * v_stride_b + start.to(tl.int64) * v_stride_s
        k_offsets = position * k_stride_s
        v_offsets = position * v_stride_s
    elif PAGE_SIZE % LAYOUT.BLOCK_N == 0:
        within = (start % PAGE_SIZE).to(tl.int64)
        k_at += block * k_stride_b + within * k_stride_s
        v_at += block * v_stride_b + within * v_stride_s
        k_offsets = position * k_stride_s
        v_offsets = position * v_stride_s
    else:
        if LAYOUT.BLOCK_N % PAGE_SIZE != 0:
            position += start
        position = position % PAGE_SIZE
        k_offsets = block * k_stride_b + position * k_stride_s
        v_offsets = block * v_stride_b + position * v_stride_s
    return k_at, v_at, k_offsets, v_offsets


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
def here(number):
    """int32 as it is, known to the compiler from here on only: nothing made of it moves out of a loop, where
    it would hold registers."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_tile(cache, block, tile, keys_seen, LAYOUT: tl.constexpr, FEATURES: tl.constexpr):
    """Ask for the keys and values of ``tile``; ``block`` is its row of a dense cache, or as
    :func:`table_entries` has it."""
    PER_ELEMENT: tl.constexpr = 2 if FEATURES.PAIRS else 1
    start = here(tile) * LAYOUT.BLOCK_N
    seen = is_seen(start + tl.arange(0, LAYOUT.BLOCK_N), keys_seen, LAYOUT)
    if FEATURES.PAGE_SIZE != 0:
        block = block_of_keys(in_cache(here(block), cache[6]), LAYOUT, FEATURES)
    k_at, v_at, k_offsets, v_offsets = rows_of_tile(cache, block, start, LAYOUT, FEATURES)
    prefetch_rows(k_at, k_offsets, seen, FEATURES.HEAD_DIM // PER_ELEMENT, FEATURES.BLOCK_D // PER_ELEMENT)
    prefetch_rows(v_at, v_offsets, seen, FEATURES.HEAD_DIM_V // PER_ELEMENT, FEATURES.BLOCK_DV // PER_ELEMENT)


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
def elements(tile, dtype: tl.constexpr, FEATURES: tl.constexpr):
    """A tile that :func:`load_rows` has of a cache that does not come in pairs, in ``dtype``."""
    if FEATURES.E4M3_BITS:
        tile = decode_bits(tile)
    return tile.to(dtype)


@triton.jit
def multiply_keys(q, q_odd, base, offsets, seen, FEATURES: tl.constexpr):
    """Raw products [BLOCK_M, BLOCK_N] of queries with the keys at ``offsets``."""
    if FEATURES.PAIRS:
        pairs = load_rows(base, offsets, seen, FEATURES.HEAD_DIM // 2, FEATURES.BLOCK_D // 2)
        even, odd = split_pairs(pairs, FEATURES.E4M3_BITS)
        products = tl.dot(q, tl.trans(even.to(q.dtype)), input_precision=FEATURES.PRECISION)
        odd = tl.trans(odd.to(q.dtype))
        products = tl.dot(q_odd, odd, products, input_precision=FEATURES.PRECISION)
    else:
        k = load_rows(base, offsets, seen, FEATURES.HEAD_DIM, FEATURES.BLOCK_D)
        k = tl.trans(elements(k, q.dtype, FEATURES))
        products = tl.dot(q, k, input_precision=FEATURES.PRECISION)
    return products


@triton.jit
def add_values(
    acc,
    acc_odd,
    p,
    base,
    offsets,
    seen,
    block_scale,
    dtype: tl.constexpr,
    scaled_dtype: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """acc + p V for the values at ``offsets``, multiplied in ``dtype``, or by the scales of their blocks in
    ``scaled_dtype``.
    """
    SCALED: tl.constexpr = FEATURES.DESCALE == "block"
    operand: tl.constexpr = scaled_dtype if SCALED else dtype
    if FEATURES.PAIRS:
        pairs = load_rows(base, offsets, seen, FEATURES.HEAD_DIM_V // 2, FEATURES.BLOCK_DV // 2)
        v, v_odd = split_pairs(pairs, FEATURES.E4M3_BITS)
        if SCALED:
            v_odd = v_odd.to(tl.float32) * block_scale
        acc_odd = tl.dot(p.to(operand), v_odd.to(operand), acc_odd, input_precision=FEATURES.PRECISION)
    else:
        v = elements(load_rows(base, offsets, seen, FEATURES.HEAD_DIM_V, FEATURES.BLOCK_DV), dtype, FEATURES)
    if SCALED:
        v = v.to(tl.float32) * block_scale
    return tl.dot(p.to(operand), v.to(operand), acc, input_precision=FEATURES.PRECISION), acc_odd


@triton.jit
def score_keys(products, keys, seen, rows, shape, numbers, LAYOUT: tl.constexpr, FEATURES: tl.constexpr):
    """Raw products [BLOCK_M, BLOCK_N] -> scores, -inf where masked; in log2 units if BENT."""
    tokens, offset, slope, k_scale, tree_rows, tree_size = rows
    softmax_scale, _, softcap = numbers
    scores = products
    distance = keys[None, :] - (tokens + offset)[:, None]
    if FEATURES.BENT:
        scores, _ = apply_score_mod(
            scores * k_scale, distance, slope, softmax_scale, softcap, FEATURES.HAS_SOFTCAP,
            FEATURES.HAS_ALIBI,
        )  # fmt: skip
    allowed = visible(distance, shape[8], shape[9], LAYOUT.HAS_LEFT, LAYOUT.HAS_RIGHT) & seen[None, :]
    if FEATURES.HAS_TREE:
        columns = (keys - offset)[None, :]
        in_tree = (columns >= 0) & (columns < tree_size) & (tokens < tree_size)[:, None]
        allowed = allowed & (tl.load(tree_rows[:, None] + columns, mask=in_tree, other=1) != 0)
    return tl.where(allowed, scores, -float("inf"))


@triton.jit
def softmax_step(scores, row_max, scale_log2, BENT: tl.constexpr):
    """(probabilities over the new maximum, it, the old one's factor); rows that have met no key stay at
    -inf.
    """
    if BENT:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    if BENT:
        p = tl.exp2(scores - shift[:, None])
    else:
        p = tl.exp2(scores * scale_log2 - shift[:, None])
    return p, new_max, tl.exp2(row_max - shift)


@triton.jit
def attend_tiles(
    q,
    cache,
    cache_row,
    entries,
    keys_seen,
    tiles,
    following,
    rows,
    shape,
    numbers,
    dtype: tl.constexpr,
    LAYOUT: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """(acc [BLOCK_M, BLOCK_DV], row_max, row_sum [BLOCK_M]) over the keys of ``tiles`` that are seen.

    ``entries`` are those of the first two tiles. ``following`` is what comes after them: (cache, row,
    entries, tile, keys that are seen) of the next item, and whether there is one. ``dtype``, that of the
    call's queries, is what values scaled by their block are rounded to.
    """
    _, _, table, k_scales, v_scales, strides, num_blocks = cache
    _, _, _, _, k_descale_stride, v_descale_stride = strides
    first, last = tiles
    PAGE_SIZE: tl.constexpr = FEATURES.PAGE_SIZE
    BLOCK_M: tl.constexpr = LAYOUT.BLOCK_M
    BLOCK_N: tl.constexpr = LAYOUT.BLOCK_N
    BLOCK_DV: tl.constexpr = FEATURES.BLOCK_DV
    WHOLE_BLOCK: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    operand: tl.constexpr = q.dtype
    q_odd = tl.zeros([], tl.float32)
    acc_odd = q_odd
    if FEATURES.PAIRS:
        q, q_odd = tl.split(tl.reshape(q, [BLOCK_M, FEATURES.BLOCK_D // 2, 2]))
        acc = tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    # Where a row's columns lie in several warps, they are summed at the end: a sum is an exchange between
    # them.
    SUM_LATE: tl.constexpr = BLOCK_M < 64
    if SUM_LATE:
        row_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Entries are on their way while the keys of two tiles are: tiles then follow each other without a chain
    # of two latencies.
    current, upcoming = entries
    if PAGE_SIZE != 0:
        current = in_cache(current, num_blocks)
    next_cache, next_row, next_entries, next_tile, next_seen, more = following
    for n in range(first, last):
        if FEATURES.AHEAD != 0:
            i = n - tl.maximum(first, last - FEATURES.AHEAD)
            if (i == 0) | (i == 1):
                if more:
                    block = next_row
                    if PAGE_SIZE != 0:
                        block = tl.where(i == 0, next_entries[0], next_entries[1])
                    prefetch_tile(next_cache, block, next_tile + i, next_seen, LAYOUT, FEATURES)
                else:
                    tl.extra.cuda.gdc_launch_dependents()
        start = n * BLOCK_N
        keys = start + tl.arange(0, BLOCK_N)
        seen = is_seen(keys, keys_seen, LAYOUT)
        block = cache_row
        if PAGE_SIZE != 0:
            block = block_of_keys(current, LAYOUT, FEATURES)
            current = in_cache(upcoming, num_blocks)
            upcoming = table_entries(table, n + 2, keys_seen, LAYOUT, FEATURES)
        k_at, v_at, k_offsets, v_offsets = rows_of_tile(cache, block, start, LAYOUT, FEATURES)
        products = multiply_keys(q, q_odd, k_at, k_offsets, seen, FEATURES)  # [BLOCK_M, BLOCK_N]
        block_v_scale = 1.0
        if FEATURES.DESCALE == "block":
            if PAGE_SIZE == 0 or WHOLE_BLOCK:
                block_k_scale = tl.load(k_scales + block.to(tl.int64) * k_descale_stride)
                block_v_scale = tl.load(v_scales + block.to(tl.int64) * v_descale_stride)
            else:
                block_k_scale = tl.load(k_scales + block.to(tl.int64) * k_descale_stride)[None, :]
                block_v_scale = tl.load(v_scales + block.to(tl.int64) * v_descale_stride)[:, None]
            products = products * block_k_scale
        scores = score_keys(products, keys, seen, rows, shape, numbers, LAYOUT, FEATURES)
        p, row_max, alpha = softmax_step(scores, row_max, numbers[1], FEATURES.BENT)
        if SUM_LATE:
            row_sum = row_sum * alpha[:, None] + p
        else:
            row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if FEATURES.PAIRS:
            acc_odd = acc_odd * alpha[:, None]
        acc, acc_odd = add_values(
            acc, acc_odd, p, v_at, v_offsets, seen, block_v_scale, operand, dtype, FEATURES
        )
    if FEATURES.PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, BLOCK_DV])
    if SUM_LATE:
        row_sum = tl.sum(row_sum, 1)
    return acc, row_max, row_sum
