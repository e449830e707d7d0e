"""Blocks of the cache copied to others: all pairs of a step, all layers, keys and values, in one launch.

Copy-on-write (Kwon et al. 2023, arXiv:2309.06180, section 4.4) makes such pairs when sequences that share a
block go different ways. Bytes are moved as they are.
"""

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel


@triton.jit
def copy_rows(
    base,
    source,
    destination,
    strides,
    first,
    rows,
    num_heads,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows ``first`` to ``first + BLOCK`` of the (page_size * heads) rows of a block."""
    stride_s, stride_h = strides
    row = first + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_W)
    offsets = (row // num_heads).to(tl.int64) * stride_s + (row % num_heads).to(tl.int64) * stride_h
    offsets = offsets[:, None] + columns[None, :]
    inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
    tl.store(base + destination + offsets, tl.load(base + source + offsets, mask=inside), mask=inside)


@kernel(do_not_specialize=("num_layers", "num_blocks", "page_size", "num_heads", "parts"))
def copy_kernel(
    k_ptr,
    v_ptr,
    pairs_ptr,
    k_descale,
    v_descale,
    k_stride_l,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_l,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    pair_stride,
    pair_column_stride,
    k_descale_stride_l,
    k_descale_stride_b,
    v_descale_stride_l,
    v_descale_stride_b,
    num_layers,
    num_blocks,
    page_size,
    num_heads,
    parts,
    HAS_DESCALES: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_WV: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (parts of BLOCK rows * layers * pairs,).

    Caches (layers, num_blocks, page_size, heads, WIDTH), pairs (n, 2) of source and destination; a pair with
    a block that is not in the cache is left out.
    """
    program = tl.program_id(0)
    part = program % parts
    layer = (program // parts % num_layers).to(tl.int64)
    pair = (program // parts // num_layers).to(tl.int64)
    source = tl.load(pairs_ptr + pair * pair_stride).to(tl.int64)
    destination = tl.load(pairs_ptr + pair * pair_stride + pair_column_stride).to(tl.int64)
    if (source >= 0) & (source < num_blocks) & (destination >= 0) & (destination < num_blocks):
        rows = page_size * num_heads
        copy_rows(
            k_ptr + layer * k_stride_l, source * k_stride_b, destination * k_stride_b,
            (k_stride_s, k_stride_h), part * BLOCK, rows, num_heads, WIDTH, BLOCK_W, BLOCK,
        )  # fmt: skip
        copy_rows(
            v_ptr + layer * v_stride_l, source * v_stride_b, destination * v_stride_b,
            (v_stride_s, v_stride_h), part * BLOCK, rows, num_heads, WIDTH_V, BLOCK_WV, BLOCK,
        )  # fmt: skip
        if HAS_DESCALES and part == 0:
            heads = tl.arange(0, BLOCK_HEADS)
            inside = heads < num_heads
            base = k_descale + layer * k_descale_stride_l + heads
            scale = tl.load(base + source * k_descale_stride_b, mask=inside)
            tl.store(base + destination * k_descale_stride_b, scale, mask=inside)
            base = v_descale + layer * v_descale_stride_l + heads
            scale = tl.load(base + source * v_descale_stride_b, mask=inside)
            tl.store(base + destination * v_descale_stride_b, scale, mask=inside)
