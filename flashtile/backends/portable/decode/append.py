"""New keys and values into the cache, in place, in one launch with what goes with it: rotary embedding of
the keys (and of the queries of the same call) and quantisation to FP8.

Rotary embedding (Su et al. 2021, arXiv:2104.09864) turns pairs of columns, neighbours if interleaved, else
one half apart, in float32, and rounds once. A program owns ROWS tokens of one head.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.portable.decode.e4m3 import E4M3_MAX, encode_bits
from flashtile.backends.portable.decode.results import store_rows


class Features(NamedTuple):
    """What a call does, as far as its kernel is compiled for it."""

    HAS_SLOTS: bool
    HAS_LENGTHS: bool
    HAS_BATCH_IDX: bool
    VARLEN: bool
    VARLEN_Q: bool
    PAGE_SIZE: int
    """0 is a dense cache."""
    DESCALE: str
    """"none", "head", or "block": of each page, or of each row of a dense cache."""
    QUANTISED: bool
    E4M3_BITS: bool
    """Whether the cache takes the bits of e4m3, encoded in software."""
    ROTARY_DIM: int
    INTERLEAVED: bool
    HAS_ROTARY_SEQLENS: bool
    ROTATE_Q: bool
    ROTATE_Q_BY_TOKEN: bool
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    ROWS: int


@triton.jit
def rotated(base, row_offsets, exists, positions, rotary, FEATURES: tl.constexpr):
    """[ROWS, BLOCK_D] float32: rows of a tensor, their first ROTARY_DIM columns turned for their
    positions.
    """
    cos_ptr, sin_ptr, rotary_rows = rotary
    HALF: tl.constexpr = FEATURES.ROTARY_DIM // 2
    columns = tl.arange(0, FEATURES.BLOCK_D)
    inside = exists[:, None] & (columns < FEATURES.HEAD_DIM)[None, :]
    x = tl.load(base + row_offsets[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if HALF > 0:
        if FEATURES.INTERLEAVED:
            partner = columns ^ 1
            frequency = columns // 2
            first = columns % 2 == 0
        else:
            partner = tl.where(columns < HALF, columns + HALF, columns - HALF)
            frequency = columns % HALF
            first = columns < HALF
        turned = columns < FEATURES.ROTARY_DIM
        at_partner = base + row_offsets[:, None] + partner[None, :]
        other = tl.load(at_partner, mask=exists[:, None] & turned[None, :], other=0.0).to(tl.float32)
        known = (exists & (positions >= 0) & (positions < rotary_rows))[:, None] & turned[None, :]
        angles = positions.to(tl.int64)[:, None] * HALF + frequency[None, :]
        cos = tl.load(cos_ptr + angles, mask=known, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angles, mask=known, other=0.0).to(tl.float32)
        x = x * cos + tl.where(first, -1.0, 1.0)[None, :] * other * sin
    return x


@triton.jit
def as_cached(x, dtype: tl.constexpr, scale, FEATURES: tl.constexpr):
    """Rounded to ``dtype``, that of the new tokens, then quantised if the cache is."""
    x = x.to(dtype)
    if FEATURES.QUANTISED:
        x = x.to(tl.float32) / scale
        x = tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    if FEATURES.E4M3_BITS:
        x = encode_bits(x)
    return x


RUNTIME_INTEGERS = (
    "seqlen_new",
    "total_new",
    "num_heads_kv",
    "seqlen_q",
    "total_q",
    "num_heads_q",
    "capacity",
    "num_blocks",
    "rotary_rows",
    "new_programs",
    "table_stride",
    "k_descale_stride",
    "v_descale_stride",
)


@triton.jit
def token_rows(block, b, cu_seqlens, seqlen, total, VARLEN: tl.constexpr, ROWS: tl.constexpr):
    """(tokens of sequence ``b``, first row in memory of that sequence, whether they exist)."""
    tokens = block * ROWS + tl.arange(0, ROWS)
    first = tl.zeros([], tl.int32)
    length = seqlen
    if VARLEN:
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens + b), 0), total)
        length = tl.minimum(tl.minimum(tl.load(cu_seqlens + b + 1), total) - first, seqlen)
    return tokens, first.to(tl.int64), tokens < length


@kernel(do_not_specialize=RUNTIME_INTEGERS)
def append_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    cache_seqlens,
    slot_mapping,
    cache_batch_idx,
    block_table,
    cu_seqlens_k_new,
    rotary_cos,
    rotary_sin,
    rotary_seqlens,
    k_descale,
    v_descale,
    q_in_ptr,
    cu_seqlens_q,
    q_out_ptr,
    k_cache_stride_b,
    k_cache_stride_s,
    k_cache_stride_h,
    v_cache_stride_b,
    v_cache_stride_s,
    v_cache_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    table_stride,
    k_descale_stride,
    v_descale_stride,
    seqlen_new,
    total_new,
    num_heads_kv,
    seqlen_q,
    total_q,
    num_heads_q,
    capacity,
    num_blocks,
    rotary_rows,
    new_programs,
    FEATURES: tl.constexpr,
):
    """Grid: (blocks of ROWS new tokens * heads_kv * batch, and behind them the same of the queries,).

    k, v (batch, seqlen_new, heads_kv, ...), without the batch if VARLEN or HAS_SLOTS (one sequence of
    total_new); q likewise, q_out as q and contiguous. A token whose place is not in the cache is dropped.
    """
    ROWS: tl.constexpr = FEATURES.ROWS
    program = tl.program_id(0)
    rotary = (rotary_cos, rotary_sin, rotary_rows)
    if program < new_programs:
        blocks = tl.cdiv(seqlen_new, ROWS)
        head = program % num_heads_kv
        b = program // num_heads_kv // blocks
        tokens, first, exists = token_rows(
            program // num_heads_kv % blocks, b, cu_seqlens_k_new, seqlen_new, total_new, FEATURES.VARLEN,
            ROWS,
        )  # fmt: skip
        positions = tokens
        if FEATURES.HAS_LENGTHS:
            positions += tl.load(cache_seqlens + b)
        turns = positions
        if FEATURES.HAS_ROTARY_SEQLENS:
            turns = tl.load(rotary_seqlens + b) + tokens

        if FEATURES.HAS_SLOTS:
            size = capacity if FEATURES.PAGE_SIZE == 0 else FEATURES.PAGE_SIZE
            slot = tl.load(slot_mapping + tokens, mask=exists, other=-1).to(tl.int64)
            written = exists & (slot >= 0)
            block = slot // size
            place = slot % size
        else:
            written = exists & (positions >= 0) & (positions < capacity)
            if FEATURES.PAGE_SIZE == 0:
                row = b
                if FEATURES.HAS_BATCH_IDX:
                    row = tl.load(cache_batch_idx + b)
                block = tl.zeros([ROWS], tl.int64) + row
                place = positions.to(tl.int64)
            else:
                entry = block_table + b.to(tl.int64) * table_stride + positions // FEATURES.PAGE_SIZE
                block = tl.load(entry, mask=written, other=-1).to(tl.int64)
                place = (positions % FEATURES.PAGE_SIZE).to(tl.int64)
        written = written & (block >= 0) & (block < num_blocks)

        k_scale = 1.0
        v_scale = 1.0
        if FEATURES.DESCALE == "head":
            k_scale = tl.load(k_descale + head)
            v_scale = tl.load(v_descale + head)
        if FEATURES.DESCALE == "block":
            k_scale = tl.load(k_descale + block * k_descale_stride + head, mask=written, other=1.0)[:, None]
            v_scale = tl.load(v_descale + block * v_descale_stride + head, mask=written, other=1.0)[:, None]
        b64 = b.to(tl.int64)
        head64 = head.to(tl.int64)
        rows = first + tokens
        k_rows = b64 * k_stride_b + rows * k_stride_s + head64 * k_stride_h
        k = rotated(k_ptr, k_rows, exists, turns, rotary, FEATURES)
        at = block * k_cache_stride_b + place * k_cache_stride_s + head64 * k_cache_stride_h
        k = as_cached(k, k_ptr.dtype.element_ty, k_scale, FEATURES)
        store_rows(k_cache_ptr, at, written, k, FEATURES.HEAD_DIM, FEATURES.BLOCK_D)
        columns = tl.arange(0, FEATURES.BLOCK_DV)
        v_rows = b64 * v_stride_b + rows * v_stride_s + head64 * v_stride_h
        inside = exists[:, None] & (columns < FEATURES.HEAD_DIM_V)[None, :]
        v = tl.load(v_ptr + v_rows[:, None] + columns[None, :], mask=inside, other=0.0)
        at = block * v_cache_stride_b + place * v_cache_stride_s + head64 * v_cache_stride_h
        v = as_cached(v, v_ptr.dtype.element_ty, v_scale, FEATURES)
        store_rows(v_cache_ptr, at, written, v, FEATURES.HEAD_DIM_V, FEATURES.BLOCK_DV)
    elif FEATURES.ROTATE_Q:
        program -= new_programs
        blocks = tl.cdiv(seqlen_q, ROWS)
        head = program % num_heads_q
        b = program // num_heads_q // blocks
        tokens, first, exists = token_rows(
            program // num_heads_q % blocks, b, cu_seqlens_q, seqlen_q, total_q, FEATURES.VARLEN_Q, ROWS
        )
        turns = tl.zeros([ROWS], tl.int32)
        if FEATURES.HAS_ROTARY_SEQLENS:
            turns += tl.load(rotary_seqlens + b)
        elif FEATURES.HAS_LENGTHS:
            turns += tl.load(cache_seqlens + b)
        if FEATURES.ROTATE_Q_BY_TOKEN:
            turns += tokens
        rows = first + tokens
        q_rows = b.to(tl.int64) * q_stride_b + rows * q_stride_s + head.to(tl.int64) * q_stride_h
        q = rotated(q_in_ptr, q_rows, exists, turns, rotary, FEATURES)
        out_rows = rows if FEATURES.VARLEN_Q else b.to(tl.int64) * seqlen_q + tokens
        offsets = (out_rows * num_heads_q + head) * FEATURES.HEAD_DIM
        store_rows(q_out_ptr, offsets, exists, q, FEATURES.HEAD_DIM, FEATURES.BLOCK_D)
