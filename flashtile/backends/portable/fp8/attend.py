"""FlashAttention-3's FP8 forward (Shah et al. 2024, arXiv:2407.08608, section 3.3) in portable Triton.

One program owns BLOCK_M rows of one query head, as in :mod:`flashtile.backends.portable.attention.forward`.
Operands of both products are e4m3, with a scale for each head or for each block of rows and keys::

    load Q and its scales s_q
    m = -inf, l = 0, acc = 0, unit = 0
    for each key block, with scales s_k and s_v:
        load K      S = (Q K^T) s_q s_k scale
                    m' = max(m, rowmax S);  P = 2^8 exp(S - m');  alpha = exp(m - m');  l = alpha l + rowsum P
                    unit' = s_v;  acc = alpha acc (unit / unit')
        load V      acc = acc + e4m3(P) V
    out = acc unit / l;  lse

P is at most 1, and e4m3 loses bits below 2^-6. The factor 2^8 moves P up: 1 becomes 256, within e4m3's range,
which ends at 448. It is in acc and in l, so out needs no correction.

The accumulator is in units of the current block's scale of v, instead of multiplying V or P by that scale: V
stays e4m3, and P keeps the whole range. The change of unit is a part of the factor that corrects the
accumulator for a new maximum, so it costs no product. The bound on the ratio of two units is
``fp8_layout.LARGEST_RATIO``.

If v is stored transposed, k's rows are read in v's key order, so that P's columns need no permutation.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.tiles import LN_2, LOG2_E, decode_number, encode_bits, sequence
from flashtile.backends.portable.fp8.quantize import key_of_column
from flashtile.backends.portable.masking import block_range, visible, window_at
from flashtile.backends.portable.tiles import (
    load_slope,
    result_bases,
    row_block,
    softcap_and_alibi,
    store_tile,
    used_length,
    with_sink,
)
from flashtile.problems import fp8_layout
from flashtile.problems.masking import MaskConstants

QUERY_BLOCK = tl.constexpr(fp8_layout.QUERY_BLOCK)
KEY_BLOCK = tl.constexpr(fp8_layout.KEY_BLOCK)
P_EXPONENT = tl.constexpr(float(fp8_layout.P_EXPONENT))
SMALLEST_RATIO = tl.constexpr(1 / fp8_layout.LARGEST_RATIO)


@dataclass(frozen=True)
class Fp8AttendVariant(MaskConstants):
    """Constants of the kernel."""

    VARLEN: bool
    HAS_SOFTCAP: bool
    HAS_ALIBI: bool
    BLOCK_SCALES: bool
    """Whether scales are per block, not per head. A block of keys consists of whole tiles."""
    TRANSPOSED: bool
    """Whether v is stored transposed."""
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int
    NATIVE: bool
    """Whether products take e4m3 operands, not float16."""


class Fp8AttendPointers(NamedTuple):
    """Tensors of the kernel; None for each that a call does not use."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    alibi_slopes: Any
    sink: Any


class Fp8ScaleStrides(NamedTuple):
    """Elements from the scales of one sequence and head to those of the next.

    The kernel is not specialized on their values.
    """

    q_scale_stride_b: Any
    q_scale_stride_h: Any
    k_scale_stride_b: Any
    k_scale_stride_h: Any
    v_scale_stride_b: Any
    v_scale_stride_h: Any


class Fp8Lengths(NamedTuple):
    """Integers of a launch. Kernels are not specialized on their values."""

    q_scale_group: Any
    """Query heads that share an entry of the scales of q."""
    alibi_stride_b: Any
    num_heads_q: Any
    group_size: Any
    """Query heads per key/value head."""
    seqlen_q: Any
    seqlen_k: Any
    total_q: Any
    total_k: Any
    mask: Any
    """A :class:`~flashtile.problems.masking.KernelMask`."""


class Fp8Numbers(NamedTuple):
    """Floating-point scalars of the call, applied to scores."""

    softmax_scale: Any
    softcap: Any


@kernel(do_not_specialize=("scale_strides", "lengths"))
def attend_kernel(pointers, strides, scale_strides, lengths, numbers, C: tl.constexpr):
    """Compute out and lse of BLOCK_M rows of a head per program, from e4m3 q, k and v.

    Grid: (blocks of rows * heads * batch,). out and lse are contiguous.

    q [batch, seqlen_q, num_heads_q, HEAD_DIM] and k [batch, seqlen_k, heads_kv, HEAD_DIM] are e4m3, viewed as
    uint8 unless NATIVE. v is like k, or [batch, heads_kv, HEAD_DIM_V, columns] if TRANSPOSED. When VARLEN,
    they have no batch dimension. Scales are laid out as ``flashtile.problems.fp8.Scales`` says.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    b, head, row_start = row_block(lengths.seqlen_q, lengths.num_heads_q, C.HAS_RIGHT, C.BLOCK_M)
    head_kv = head // lengths.group_size

    start_q, len_q = sequence(pointers.cu_seqlens_q, b, lengths.seqlen_q, lengths.total_q, C.VARLEN)
    start_k, len_k = sequence(pointers.cu_seqlens_k, b, lengths.seqlen_k, lengths.total_k, C.VARLEN)
    len_k = used_length(pointers.seqused_k, b, len_k)
    if row_start >= len_q:
        return
    offset = len_k - len_q

    # Prologue: where the heads of q, k and v begin, and their scales.
    b64 = b.to(tl.int64)
    head_kv64 = head_kv.to(tl.int64)
    q_base = pointers.q + b64 * strides.q_batch + start_q * strides.q_token
    q_base += head.to(tl.int64) * strides.q_head
    k_base = pointers.k + b64 * strides.k_batch + start_k * strides.k_token
    k_base += head_kv64 * strides.k_head
    v_base = pointers.v + b64 * strides.v_batch + head_kv64 * strides.v_head
    # Index of the sequence's first block of scales. Blocks are numbered through all packed sequences. ``b``
    # keeps the numbers of two sequences apart, without the lengths of those before.
    first_q = tl.zeros([], tl.int64)
    first_k = tl.zeros([], tl.int64)
    if C.VARLEN:
        first_q = start_q // QUERY_BLOCK + b
        first_k = start_k // KEY_BLOCK + b
    if C.TRANSPOSED:  # columns of V^T are padded to whole blocks
        v_base += first_k * KEY_BLOCK
    else:
        v_base += start_k * strides.v_token

    rows = row_start + tl.arange(0, BLOCK_M)
    # A tensor without scales has None here, which load_scale takes for 1.
    q_scale_base = pointers.q_scale
    k_scale_base = pointers.k_scale
    v_scale_base = pointers.v_scale
    if pointers.q_scale is not None:
        first_scale = b64 * scale_strides.q_scale_stride_b
        first_scale += (head // lengths.q_scale_group) * scale_strides.q_scale_stride_h
        q_scale_base += first_scale
    if pointers.k_scale is not None:
        k_scale_base += b64 * scale_strides.k_scale_stride_b + head_kv * scale_strides.k_scale_stride_h
    if pointers.v_scale is not None:
        v_scale_base += b64 * scale_strides.v_scale_stride_b + head_kv * scale_strides.v_scale_stride_h
    if C.BLOCK_SCALES:
        k_scale_base += first_k
        v_scale_base += first_k
        # Rows past the end of the sequence take the scale of the last block.
        block = tl.minimum(rows, len_q - 1) // QUERY_BLOCK
        q_scale = tl.load(q_scale_base + first_q + block)
    else:  # one number for all rows, in the shape of those of blocks
        q_scale = tl.zeros([BLOCK_M], tl.float32) + load_scale(q_scale_base, 0)

    slope = load_slope(pointers.alibi_slopes, lengths.alibi_stride_b, b, head, C.HAS_ALIBI)
    q = load_rows(q_base, rows, len_q, strides.q_token, C.HEAD_DIM, C.BLOCK_D, C.NATIVE)
    operands = Fp8Operands(
        q, q_scale, slope, k_base, v_base, k_scale_base, v_scale_base, row_start, offset, len_k
    )
    state = Fp8Accumulator(
        tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
        tl.full([BLOCK_M], -float("inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([], tl.float32),  # no unit yet: acc is 0 in any
        tl.zeros([], tl.float32),
    )

    # Main loop.
    row_end = min(row_start + BLOCK_M, len_q)
    of_first = window_at(row_start + offset, 0, lengths.mask, C)
    of_last = window_at(row_end - 1 + offset, 0, lengths.mask, C)
    first, full_first, full_last, last = block_range(
        row_start, row_end, offset, len_k, of_first, of_last, C.HAS_LEFT, C.HAS_RIGHT, C.BLOCK_N
    )
    # Three ranges of blocks: the left edge of the window, blocks within the window, and the right edge or the
    # end of the sequence. Only the edges are masked, as in the 16-bit kernels (attention/steps.py, walk).
    for RUN in tl.static_range(3):
        if RUN != 0 or C.HAS_LEFT:
            begin = first if RUN == 0 else (full_first if RUN == 1 else full_last)
            end = full_first if RUN == 0 else (full_last if RUN == 1 else last)
            state = attend_blocks(state, begin, end, operands, strides, lengths, numbers, RUN != 1, C)

    # Epilogue.
    acc, row_max, row_sum, v_unit, _ = state
    if not C.BLOCK_SCALES:
        v_unit = load_scale(v_scale_base, 0)
    row_max -= P_EXPONENT  # the sums have the factor 2^8 of P, and lse must not
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    out = tl.where(empty[:, None], 0.0, acc * (v_unit / row_sum)[:, None])
    lse = tl.where(empty, -float("inf"), row_max * LN_2 + tl.log(row_sum))
    if pointers.sink is not None:
        out, lse = with_sink(out, lse, tl.load(pointers.sink + head))
    out_base, lse_base = result_bases(
        pointers.out, pointers.lse, b, head, start_q, lengths.num_heads_q, lengths.seqlen_q,
        lengths.total_q, C.HEAD_DIM_V, C.VARLEN,
    )  # fmt: skip
    store_tile(
        out_base, row_start, len_q, lengths.num_heads_q * C.HEAD_DIM_V, out, C.BLOCK_M, C.HEAD_DIM_V,
        C.BLOCK_DV,
    )  # fmt: skip
    tl.store(lse_base + rows, lse, mask=rows < len_q)


class Fp8Operands(NamedTuple):
    """A tile of queries, and where the keys and values of its sequence and head begin."""

    q: Any
    q_scale: Any
    """[BLOCK_M]"""
    slope: Any
    k_base: Any
    v_base: Any
    k_scale_base: Any
    v_scale_base: Any
    row_start: Any
    offset: Any
    """len_k - len_q: row i stands at key i + offset."""
    len_k: Any


class Fp8Accumulator(NamedTuple):
    """Running results of the rows. acc is in units of ``v_unit``; ``v_largest``: v's largest scale so far."""

    acc: Any
    row_max: Any
    row_sum: Any
    v_unit: Any
    v_largest: Any


@triton.jit
def attend_blocks(
    state, first, last, operands, strides, lengths, numbers, MASKED: tl.constexpr, C: tl.constexpr
):
    """Add key blocks ``first`` to ``last`` (exclusive) to ``state``, an :class:`Fp8Accumulator`."""
    acc, row_max, row_sum, v_unit, v_largest = state
    for n in range(first, last):
        start = n * C.BLOCK_N
        keys = start + tl.arange(0, C.BLOCK_N)
        if C.TRANSPOSED:  # column i of S and P is then the key in column i of V^T
            keys = start + key_of_column(tl.arange(0, C.BLOCK_N))
        # Rows past the end are masked in every range. Not measured against loads without a mask.
        k = load_rows(operands.k_base, keys, operands.len_k, strides.k_token, C.HEAD_DIM, C.BLOCK_D, C.NATIVE)
        scores = tl.dot(operands.q, tl.trans(k))  # [BLOCK_M, BLOCK_N]
        scale_block = start // KEY_BLOCK if C.BLOCK_SCALES else 0
        k_scale = load_scale(operands.k_scale_base, scale_block) * numbers.softmax_scale
        row_scale = operands.q_scale * k_scale
        rows = operands.row_start + tl.arange(0, C.BLOCK_M) + operands.offset
        distance = keys[None, :] - rows[:, None]
        if C.HAS_SOFTCAP or C.HAS_ALIBI:
            scores = scores * row_scale[:, None]
            scores, _ = softcap_and_alibi(
                scores, distance, operands.slope, 1.0, numbers.softcap, C.HAS_SOFTCAP, C.HAS_ALIBI
            )
            scores = scores * LOG2_E
        else:
            # Scales differ from row to row, so they cannot be folded into the exponent as one number.
            scores = scores * (row_scale * LOG2_E)[:, None]
        if MASKED:
            seen = visible(distance, window_at(rows[:, None], 0, lengths.mask, C), lengths.mask, C)
            scores = tl.where(seen & (keys < operands.len_k)[None, :], scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # a row that has met no key yet
        p = tl.exp2(scores - (shift - P_EXPONENT)[:, None])  # the factor 2^8 as a part of the exponent
        alpha = tl.exp2(row_max - shift)
        # Before P is scaled and rounded: l and lse do not depend on v.
        row_sum = row_sum * alpha + tl.sum(p, 1)
        row_max = new_max
        if C.BLOCK_SCALES:
            v_scale = tl.load(operands.v_scale_base + scale_block)
            v_largest = tl.maximum(v_largest, v_scale)
            # The bound keeps the ratio of two units finite, and with it the accumulator, if a block with a
            # tiny scale follows one with a large scale.
            unit = tl.maximum(v_scale, v_largest * SMALLEST_RATIO)
            p = p * (v_scale / unit)  # the factor is 1 if scales differ by less than LARGEST_RATIO
            alpha = alpha * (v_unit / unit)
            v_unit = unit
        if C.TRANSPOSED:
            v = load_columns(
                operands.v_base, start, keys, operands.len_k, strides.v_token, C.HEAD_DIM_V, C.BLOCK_DV,
                MASKED, C.NATIVE,
            )  # fmt: skip
        else:
            v = load_rows(
                operands.v_base, keys, operands.len_k, strides.v_token, C.HEAD_DIM_V, C.BLOCK_DV, C.NATIVE
            )
        acc = tl.dot(round_p(p, C.NATIVE), v, acc * alpha[:, None])  # [BLOCK_M, BLOCK_DV]
    return Fp8Accumulator(acc, row_max, row_sum, v_unit, v_largest)


@triton.jit
def load_rows(
    base,
    rows,
    length,
    stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Load ``rows`` as operands of a product, [rows, BLOCK_D].

    Rows from ``length`` on are 0, and so are columns from HEAD_DIM on.
    """
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < length)[:, None]
    if HEAD_DIM < BLOCK_D:
        inside = inside & (columns < HEAD_DIM)[None, :]
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return as_operand(tl.load(pointers, mask=inside, other=0.0), NATIVE)


@triton.jit
def load_columns(
    base,
    start,
    keys,
    length,
    columns,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Load a tile [keys, BLOCK_D] of v, stored transposed as [HEAD_DIM, columns], from column ``start`` on.

    Columns after the last key of the sequence are 0 in memory. Columns of keys that ``seqused_k`` excludes
    may have other values, so with MASKED they are replaced by 0.
    """
    features = tl.arange(0, BLOCK_D)
    places = start + tl.arange(0, keys.shape[0])
    pointers = base + features.to(tl.int64)[:, None] * columns + places[None, :]
    inside = (features < HEAD_DIM)[:, None]
    if MASKED:
        tile = tl.load(pointers, mask=inside & (keys < length)[None, :], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        tile = tl.load(pointers, mask=inside, other=0.0)
    else:
        tile = tl.load(pointers)
    return tl.trans(as_operand(tile, NATIVE))


@triton.jit
def load_scale(base, offset):
    """Load a scale; 1.0 without scales."""
    if base is None:
        return 1.0
    else:
        return tl.load(base + offset)


@triton.jit
def as_operand(tile, NATIVE: tl.constexpr):
    """Convert a tile to the dtype of the products' operands.

    If NATIVE, the tile and the operands are e4m3. Otherwise the tile has the bits of e4m3 numbers, and the
    operands are float16, which represents these numbers exactly.
    """
    if NATIVE:
        return tile
    else:
        return decode_number(tile).to(tl.float16)


@triton.jit
def round_p(p, NATIVE: tl.constexpr):
    """Round P (float32, at most 448) to the nearest e4m3. Without NATIVE, return the result as float16."""
    if NATIVE:
        return p.to(tl.float8e4nv)
    else:
        return as_operand(encode_bits(p), NATIVE)
