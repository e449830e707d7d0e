"""Quantisation to e4m3 in one pass over memory: rotary embedding, Hadamard transform, scale, transpose.

FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, section 3.3) has two methods. *Block quantisation*: each
block of rows of a head has a scale. *Incoherent processing*: q and k are multiplied by one random orthogonal
matrix, which consists of random signs and a Hadamard matrix. This spreads outliers over all columns and
leaves q k^T unchanged.

One program owns one block of one head, and reads it once::

    load the rows, and rotate pairs of columns          three ways to load the two columns of a pair
    multiply by random signs and the Hadamard matrix    log2(columns) stages of sums and differences
    find the largest magnitude -> scale                 one pass; two, if several blocks share a scale
    multiply, round to e4m3, store                      v transposed, in the key order of the second product

The sums of the transform have a fixed order, and no multiplication is fused with an addition
(``enable_fp_fusion=False``). So the result equals that of :mod:`flashtile.reference.fp8` to the bit.

With rotary embedding, the transform's sums and exchanges between threads limit the speed: q runs at 0.585 of
a copy's speed with the transform and at 0.868 without (H200).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.tiles import E4M3_MAX, encode_bits, sequence
from flashtile.backends.portable.tiles import used_length
from flashtile.problems import fp8_layout

SMALLEST_LARGEST = tl.constexpr(fp8_layout.SMALLEST_LARGEST)
HEADROOM = tl.constexpr(fp8_layout.HEADROOM)
"""x is multiplied by this factor, so that every sum of 256 finite numbers is finite."""
ONE_PASS, LARGEST_ONLY, LARGEST_GIVEN = (tl.constexpr(i) for i in range(3))
"""Passes of the kernel. One scale per block takes one pass. One scale for several blocks takes two passes:
the first finds the largest magnitude, the second quantises. If the caller gives the scale, only the second
pass runs."""


@dataclass(frozen=True)
class QuantizeVariant:
    """Constants of the kernel."""

    PASS: int
    VARLEN: bool
    TRANSPOSED: bool
    """Whether the result is stored transposed (for v)."""
    TRANSFORM_STAGES: int
    """log2 of the number of columns that the Hadamard transform mixes, 0 for no transform."""
    ROTARY_DIM: int
    INTERLEAVED: bool
    HALVES: bool
    """Whether all columns are rotated in pairs (i, i + half), and both halves are loaded separately."""
    HEAD_DIM: int
    STORED_HEAD_DIM: int
    BLOCK_D: int
    BLOCK_M: int
    NATIVE: bool
    """Whether the GPU converts to e4m3; otherwise its bits are encoded in software."""


class QuantizePointers(NamedTuple):
    """Tensors of the kernel. Tensors that a call does not use are None."""

    x: Any
    quantized: Any
    scales: Any
    largest: Any
    cu_seqlens: Any
    seqused: Any
    cos: Any
    sin: Any
    rotary_offsets: Any


class QuantizeStrides(NamedTuple):
    """Strides of x and of the result, in elements.

    The structure is not nested in another one, because after a branch Triton 3.6 forgets that a stride in a
    nested structure is 1.
    """

    x_batch: Any
    x_token: Any
    x_head: Any
    columns: Any
    """Stride between features of a transposed result."""


class QuantizeScaleStrides(NamedTuple):
    """Strides of the scales between sequences and heads, in elements."""

    scale_stride_b: Any
    scale_stride_h: Any


class QuantizeLengths(NamedTuple):
    """Sizes of x. The kernel is not specialized on them, nor on :class:`QuantizeNumbers`."""

    num_heads: Any
    seqlen: Any
    """Rows of the longest sequence."""
    total: Any


class QuantizeNumbers(NamedTuple):
    """Numbers of the Hadamard transform and of the rotary embedding."""

    seed: Any
    rotary_offset: Any
    rotary_rows: Any
    """Rows (positions) of the tables of cos and sin."""
    normalizer: Any
    """Factor of the Hadamard transform; 1 without it."""


@kernel(do_not_specialize=("lengths", "scale_strides", "numbers"))
def quantize_kernel(pointers, strides, lengths, scale_strides, numbers, C: tl.constexpr):
    """Quantise one block of one head of x to e4m3. Grid: (heads * blocks * batch,).

    Heads vary fastest, because they are adjacent in memory. x has shape [batch, seqlen, num_heads, HEAD_DIM],
    or [total, num_heads, HEAD_DIM] if VARLEN. ``quantized`` has the same shape with STORED_HEAD_DIM columns,
    or [batch, num_heads, HEAD_DIM, columns] if TRANSPOSED, without the batch if VARLEN. Its dtype is e4m3 if
    NATIVE, else uint8 with the bits of e4m3.

    ``scale_strides`` are the strides of scales and largest. In ONE_PASS, the scales of a head are contiguous,
    and there is one for each block. If VARLEN, blocks are numbered over all sequences as in
    ``flashtile.problems.fp8_layout``. seqused, cos and sin [rotary_rows, ROTARY_DIM / 2] and rotary_offsets
    [batch] may be None.
    """
    num_blocks = tl.cdiv(lengths.seqlen, C.BLOCK_M)
    pid = tl.program_id(0)
    head = pid % lengths.num_heads
    block = (pid // lengths.num_heads) % num_blocks
    b = (pid // lengths.num_heads) // num_blocks

    start, length = sequence(pointers.cu_seqlens, b, lengths.seqlen, lengths.total, C.VARLEN)
    used = used_length(pointers.seqused, b, length)
    place = Place(b, block, start, length)
    b64, head64 = b.to(tl.int64), head.to(tl.int64)
    # The scale is stored here, by one program of each head. Each program of this pass loads the largest
    # magnitude again where it multiplies (store_block).
    if C.PASS == LARGEST_GIVEN:
        scale_at = b64 * scale_strides.scale_stride_b + head64 * scale_strides.scale_stride_h
        largest = tl.maximum(tl.load(pointers.largest + scale_at), SMALLEST_LARGEST)
        scale = tl.div_rn(largest, E4M3_MAX) * numbers.normalizer
        tl.store(pointers.scales + scale_at, scale, mask=block == 0)  # also if the sequence has no rows
    if block * C.BLOCK_M >= length:
        return

    row = block * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    if C.TRANSPOSED:  # rows are loaded in the order in which they are stored as columns
        row = block * C.BLOCK_M + key_of_column(tl.arange(0, C.BLOCK_M))
    column = tl.arange(0, C.BLOCK_D)
    # HEADROOM keeps the transform's sums finite. The normalizer of the scale takes it back.
    signs = sign_of_column(column, numbers.seed) * HEADROOM
    x_rows = pointers.x + b64 * strides.x_batch + start * strides.x_token
    x_rows += row.to(tl.int64)[:, None] * strides.x_token + head64 * strides.x_head
    in_use = (row < used)[:, None]  # other rows are stored as zeros
    position = row
    if pointers.cos is not None:
        offset = numbers.rotary_offset
        if pointers.rotary_offsets is not None:
            offset += tl.load(pointers.rotary_offsets + b)
        # Rows past the end of the sequence also load angles, so positions are clamped to the tables.
        position = tl.minimum(tl.maximum(row + offset, 0), numbers.rotary_rows - 1)
    # A pair's columns are in one thread only if they are adjacent, or if both halves are loaded separately.
    if C.HALVES:
        x = rotate_all(x_rows, position, in_use, pointers.cos, pointers.sin, C.BLOCK_D // 2)
    else:
        x_ptrs = x_rows + column[None, :]
        inside = in_use
        if C.HEAD_DIM < C.BLOCK_D:
            inside = inside & (column < C.HEAD_DIM)[None, :]
        x = tl.load(x_ptrs, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
        if pointers.cos is not None:
            HALF: tl.constexpr = C.ROTARY_DIM // 2
            if C.INTERLEAVED:
                x = x.to(tl.float32)
                x = rotate_neighbours(x, position, in_use, pointers.cos, pointers.sin, HALF)
            else:
                x = rotate_halves(x, x_ptrs, position, in_use, column, pointers.cos, pointers.sin, HALF)
    if C.TRANSFORM_STAGES > 0:
        x = hadamard(x.to(tl.float32) * signs[None, :], C.TRANSFORM_STAGES)
    store_block(x, row, column, head, place, pointers, strides, lengths, scale_strides, numbers, C)


@triton.jit
def rotate_all(x_rows, position, inside, cos_ptr, sin_ptr, HALF: tl.constexpr):
    """Load rows of 2 * HALF columns, and rotate their pairs of columns (i, i + HALF).

    ``x_rows``: pointers to the first element of each row.
    """
    ROWS: tl.constexpr = position.shape[0]
    # From two loads one thread has both elements. This, one head per program and 64 registers raised q from
    # 0.37 to 0.58 of a copy's speed (H200).
    pair = tl.arange(0, HALF)[None, :]
    angle = position[:, None] * HALF + pair
    cos = tl.load(cos_ptr + angle, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    x_ptrs = x_rows + pair
    a = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptrs + HALF, mask=inside, other=0.0).to(tl.float32)
    return tl.join(a * cos - b * sin, b * cos + a * sin).trans(0, 2, 1).reshape([ROWS, 2 * HALF])


@triton.jit
def rotate_halves(x, x_ptrs, position, inside, column, cos_ptr, sin_ptr, HALF: tl.constexpr):
    """Rotate the pairs of columns (i, i + HALF) of x by the angles of ``position``.

    x has been loaded from ``x_ptrs``. The other element of each pair is loaded again, because another thread
    holds it.
    """
    rotated = inside & (column < 2 * HALF)[None, :]
    first = column < HALF
    away = tl.where(first, HALF, -HALF)
    pair = tl.where(first, column, column - HALF)
    if HALF % 8 == 0:  # hints: eight adjacent columns have adjacent partners, so loads are vectors
        pair = tl.max_contiguous(tl.multiple_of(pair, 8), 8)
        away = tl.max_constancy(tl.multiple_of(away, 8), 8)
    other = tl.load(x_ptrs + away[None, :], mask=rotated, other=0.0).to(tl.float32)
    angle = position[:, None] * HALF + pair[None, :]
    cos = tl.load(cos_ptr + angle, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=rotated, other=0.0).to(tl.float32)
    return x.to(tl.float32) * cos + tl.where(first[None, :], -other, other) * sin


@triton.jit
def rotate_neighbours(x, position, inside, cos_ptr, sin_ptr, HALF: tl.constexpr):
    """Rotate the pairs of columns (2i, 2i + 1) of x [rows, columns] by the angles of ``position``.

    ``inside`` [rows, 1]: whether a row is rotated.
    """
    ROWS: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = x.shape[1] // 2
    pair = tl.arange(0, PAIRS)
    angle = position[:, None] * HALF + pair[None, :]
    rotated = inside & (pair < HALF)[None, :]
    cos = tl.load(cos_ptr + angle, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=rotated, other=0.0).to(tl.float32)
    a, b = tl.split(x.reshape([ROWS, PAIRS, 2]))
    # Pairs that are not rotated are kept as they are, because 0 times infinity would be NaN.
    first = tl.where(rotated, a * cos - b * sin, a)
    second = tl.where(rotated, b * cos + a * sin, b)
    return tl.join(first, second).reshape([ROWS, 2 * PAIRS])


@triton.jit
def sign_of_column(column, seed):
    """Return the random sign of each column, -1.0 or 1.0, as ``fp8_layout.hadamard_signs`` does.

    MurmurHash3's 32-bit finaliser (Appleby 2011) gives one word for every 32 columns. Each bit of the word is
    the sign bit of one column.
    """
    h = (column >> 5).to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = (h ^ (h >> 16)) << (31 - (column & 31)).to(tl.uint32)  # the column's bit becomes the sign bit
    # Sign bit and the bits of 1.0, instead of a comparison: 1408 instead of 1456 instructions for 32 numbers.
    return ((h & 0x80000000) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def hadamard(x, STAGES: tl.constexpr):
    """Multiply x [rows, 2**STAGES] by Sylvester's Hadamard matrix, whose elements are 1 and -1.

    Each stage replaces pairs of columns by their sum and their difference.
    """
    column = tl.arange(0, 1 << STAGES)
    for stage in tl.static_range(STAGES):
        sign = tl.where((column & (1 << stage)) == 0, 1.0, -1.0)
        # x * 1 and x * -1 are exact, so this rounds once, as the sum and the difference of the reference do.
        x = tl.fma(x, tl.broadcast_to(sign[None, :], x.shape), swap_columns(x, 1 << stage))
    return x


@triton.jit
def swap_columns(x, APART: tl.constexpr):
    """Swap the columns of x [rows, columns] whose indices differ only in the bit ``APART``."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    # The sum of a pair minus one element is the other element. Integer arithmetic makes this exact. Triton
    # computes the sum by exchanging registers within a warp.
    pairs = x.to(tl.int32, bitcast=True).reshape([ROWS, COLUMNS // (2 * APART), 2, APART])
    others = tl.sum(pairs, 2, keep_dims=True) - pairs
    return others.reshape([ROWS, COLUMNS]).to(tl.float32, bitcast=True)


class Place(NamedTuple):
    """Position of a block: its sequence, its index in the sequence, the sequence's first row and length."""

    b: Any
    block: Any
    start: Any
    length: Any


@triton.jit
def store_block(
    x, row, column, head, place, pointers, strides, lengths, scale_strides, numbers, C: tl.constexpr
):  # fmt: skip
    """Scale x, a block of one head, to the range of e4m3 and write it. In ONE_PASS, also write its scale.

    In the pass LARGEST_ONLY, only update the largest magnitude.
    """
    b64 = place.b.to(tl.int64)
    head64 = head.to(tl.int64)
    scale_at = b64 * scale_strides.scale_stride_b + head64 * scale_strides.scale_stride_h
    if C.PASS == LARGEST_GIVEN:
        largest = tl.maximum(tl.load(pointers.largest + scale_at), SMALLEST_LARGEST)
        x = finite_or_nan(x)
    else:
        largest = largest_magnitude(x)
        # e4m3 has no infinity: infinities become NaN, and NaN does not affect the scale.
        if not (largest < float("inf")):
            x = finite_or_nan(x)
            largest = largest_magnitude(tl.where(x == x, x, 0.0))
    if C.PASS == LARGEST_ONLY:  # the same in any order of the programs, as a maximum does not round
        tl.atomic_max(pointers.largest + scale_at, largest)
    else:
        largest = tl.maximum(largest, SMALLEST_LARGEST)
        number = place.block
        if C.VARLEN:  # numbers of different sequences never meet, and none needs the lengths before it
            number += (place.start // C.BLOCK_M).to(tl.int32) + place.b
        if C.PASS == ONE_PASS:
            scale = tl.div_rn(largest, E4M3_MAX) * numbers.normalizer
            tl.store(pointers.scales + scale_at + number, scale)
        # div_rn, because the plain division of GPUs is not rounded as the CPU's is. One division per block,
        # and a product per element.
        scaled = x.to(tl.float32) * tl.div_rn(E4M3_MAX, largest)
        if C.PASS == LARGEST_GIVEN and not C.NATIVE:
            # The caller may have given a scale that is too small. Clamp as the conversion in hardware does;
            # NaN stays NaN.
            scaled = tl.where(scaled > E4M3_MAX, E4M3_MAX, tl.where(scaled < -E4M3_MAX, -E4M3_MAX, scaled))
        values = scaled.to(tl.float8e4nv) if C.NATIVE else encode_bits(scaled)
        if C.TRANSPOSED:  # whole blocks of columns: those past the end are written as 0
            at = number.to(tl.int64) * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
            first = head64 if C.VARLEN else b64 * lengths.num_heads + head
            out = pointers.quantized + first * C.HEAD_DIM * strides.columns
            out += column.to(tl.int64)[:, None] * strides.columns
            tl.store(out + at[None, :], tl.trans(values), mask=(column < C.HEAD_DIM)[:, None])
        else:
            first = b64 * lengths.seqlen * (not C.VARLEN) + place.start
            out = pointers.quantized + (first * lengths.num_heads + head) * C.STORED_HEAD_DIM
            out += row.to(tl.int64)[:, None] * (lengths.num_heads * C.STORED_HEAD_DIM) + column[None, :]
            inside = (row < place.length)[:, None]
            if C.STORED_HEAD_DIM < C.BLOCK_D:
                inside = inside & (column < C.STORED_HEAD_DIM)[None, :]
            tl.store(out, values, mask=inside)


@triton.jit
def largest_magnitude(x):
    """Return the largest magnitude in x as float32. It is not finite if x contains an infinity.

    16-bit elements are compared as integers, by their bits, because float32 would take twice the registers.
    """
    if x.dtype == tl.float32:
        largest = tl.max(tl.max(tl.abs(x), 1), 0)
    else:
        bits = x.to(tl.int16, bitcast=True) & 0x7FFF
        largest = tl.max(tl.max(bits, 1), 0).to(tl.int16).to(x.dtype, bitcast=True).to(tl.float32)
    return largest


@triton.jit
def finite_or_nan(x):
    """Replace infinities of x by NaN."""
    return tl.where(tl.abs(x) < float("inf"), x, float("nan"))


@triton.jit
def key_of_column(column):
    """Return the index of the key in ``column`` of a stored V^T, as ``fp8_layout.key_order`` does."""
    # The key order in which Hopper's threads hold P, so that it needs no exchange before P V.
    within = (column & 16) | ((column & 2) << 2) | ((column & 12) >> 1) | (column & 1)
    return (column & -32) | within
