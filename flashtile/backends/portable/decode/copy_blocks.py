"""Copies blocks of the cache: all pairs of a step, for all layers, keys and values, in one launch.

Copy-on-write (Kwon et al. 2023, arXiv:2309.06180, section 4.4) makes pairs of source and destination when
sequences that share a block diverge. Bytes are copied unchanged.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.backends.common.jit import kernel


@dataclass(frozen=True)
class CopyVariant:
    """Constants of the kernel, passed as one argument."""

    HAS_DESCALES: bool
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_HEADS: int
    """Number of heads, rounded up to a power of two."""
    BLOCK: int
    """Rows that a program copies."""


class CopyPointers(NamedTuple):
    """Tensors of the kernel; None for each that a call does not have."""

    k: Any
    v: Any
    pairs: Any
    k_descale: Any
    v_descale: Any


class CopyStrides(NamedTuple):
    """Elements from one layer, block, token and head to the next."""

    k_stride_l: Any
    k_stride_b: Any
    k_stride_s: Any
    k_stride_h: Any
    v_stride_l: Any
    v_stride_b: Any
    v_stride_s: Any
    v_stride_h: Any


class CopyLengths(NamedTuple):
    """Integers of a launch. Kernels are not specialized on their values."""

    pair_stride: Any
    pair_column_stride: Any
    k_descale_stride_l: Any
    k_descale_stride_b: Any
    v_descale_stride_l: Any
    v_descale_stride_b: Any
    num_layers: Any
    num_blocks: Any
    page_size: Any
    num_heads: Any
    parts: Any
    """Programs per pair and layer."""


@triton.jit
def copy_rows(
    base, source, destination, stride_s, stride_h, first, lengths, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows ``first`` to ``first + BLOCK`` of the (page_size * heads) rows of a block."""
    row = first + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    offsets = (row // lengths.num_heads).to(tl.int64) * stride_s
    offsets += (row % lengths.num_heads).to(tl.int64) * stride_h
    offsets = offsets[:, None] + columns[None, :]
    exists = row < lengths.page_size * lengths.num_heads
    inside = exists[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(base + destination + offsets, tl.load(base + source + offsets, mask=inside), mask=inside)


@triton.jit
def copy_scales(base, source, destination, num_heads, BLOCK_HEADS: tl.constexpr):
    """Copy the scales of a block, one per head."""
    heads = tl.arange(0, BLOCK_HEADS)
    inside = heads < num_heads
    scale = tl.load(base + heads + source, mask=inside)
    tl.store(base + heads + destination, scale, mask=inside)


@kernel(do_not_specialize=("lengths",))
def copy_kernel(pointers, strides, lengths, C: tl.constexpr):
    """Copy blocks of the caches, with their scales, to other blocks of the same caches.

    Grid: (programs per block * layers * pairs,). Each program copies BLOCK rows of a block. Caches are
    (layers, num_blocks, page_size, heads, HEAD_DIM); ``pairs`` (n, 2) are source and destination blocks. A
    pair with a block outside of the cache is skipped.
    """
    program = tl.program_id(0)
    part = program % lengths.parts
    layer = (program // lengths.parts % lengths.num_layers).to(tl.int64)
    pair = (program // lengths.parts // lengths.num_layers).to(tl.int64)
    pair_at = pointers.pairs + pair * lengths.pair_stride
    source = tl.load(pair_at).to(tl.int64)
    destination = tl.load(pair_at + lengths.pair_column_stride).to(tl.int64)
    num_blocks = lengths.num_blocks
    if (source >= 0) & (source < num_blocks) & (destination >= 0) & (destination < num_blocks):
        k = pointers.k + layer * strides.k_stride_l
        copy_rows(
            k, source * strides.k_stride_b, destination * strides.k_stride_b, strides.k_stride_s,
            strides.k_stride_h, part * C.BLOCK, lengths, C.HEAD_DIM, C.BLOCK_D, C.BLOCK,
        )  # fmt: skip
        v = pointers.v + layer * strides.v_stride_l
        copy_rows(
            v, source * strides.v_stride_b, destination * strides.v_stride_b, strides.v_stride_s,
            strides.v_stride_h, part * C.BLOCK, lengths, C.HEAD_DIM_V, C.BLOCK_DV, C.BLOCK,
        )  # fmt: skip
        if C.HAS_DESCALES and part == 0:
            copy_scales(
                pointers.k_descale + layer * lengths.k_descale_stride_l, source * lengths.k_descale_stride_b,
                destination * lengths.k_descale_stride_b, lengths.num_heads, C.BLOCK_HEADS,
            )  # fmt: skip
            copy_scales(
                pointers.v_descale + layer * lengths.v_descale_stride_l, source * lengths.v_descale_stride_b,
                destination * lengths.v_descale_stride_b, lengths.num_heads, C.BLOCK_HEADS,
            )  # fmt: skip
