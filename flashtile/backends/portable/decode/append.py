"""The kernels that change the cache in place: one appends new keys and values, one copies blocks.

append_kernel, one program per ROWS tokens of one head::

    which tokens                     of a sequence, or of all sequences packed (tokens_of)
    where they go in the cache       page and offset, or row (place_of); without a valid place: not written
    load k, its partner columns, cos, sin;  load v
    k = rotate k                     in float32
    round to the dtype of k and v;  quantise, if the cache is in FP8
    store k;  store v

Programs after those of the new tokens rotate the queries of the call into a tensor of their own, so a step
needs no other launch for rotary embedding (Su et al. 2021, arXiv:2104.09864). Pairs of rotated columns are
adjacent if interleaved, else ROTARY_DIM / 2 apart. The attention kernel calls :func:`append_tokens` and
:func:`load_rotated` where it appends itself.

copy_kernel copies all pairs of blocks of a step, for all layers, keys and values, in one launch: one program
per BLOCK rows of a block. Copy-on-write (Kwon et al. 2023, arXiv:2309.06180, section 4.4) makes such pairs
when sequences that share a block diverge.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.tiles import E4M3_MAX, encode_bits
from flashtile.backends.portable.decode.schedule import store_rows


@dataclass(frozen=True)
class AppendVariant:
    """Constants of the kernel."""

    HAS_SLOTS: bool
    HAS_LENGTHS: bool
    HAS_BATCH_IDX: bool
    VARLEN: bool
    VARLEN_Q: bool
    PAGE_SIZE: int
    """Tokens per page; 0 for a dense cache."""
    DESCALE: str
    """Scales of the cache: "none", "head" (one per head), "block" (per head of each page, or of each row of a
    dense cache) or "sequence" (per head of each sequence)."""
    QUANTISED: bool
    E4M3_BITS: bool
    """Whether e4m3 is encoded in software, and the cache viewed as uint8."""
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
    SEQUENCES: int = 128
    """Number of entries of ``cu_seqlens`` that are read at a time."""


class AppendPointers(NamedTuple):
    """Tensors of the kernel; None for each that a call does not use."""

    k_cache: Any
    v_cache: Any
    k: Any
    v: Any
    cache_seqlens: Any
    slot_mapping: Any
    cache_batch_idx: Any
    block_table: Any
    cu_seqlens_k_new: Any
    rotary_cos: Any
    rotary_sin: Any
    rotary_seqlens: Any
    k_descale: Any
    v_descale: Any
    q_in: Any
    cu_seqlens_q: Any
    q_out: Any


class AppendStrides(NamedTuple):
    """Strides between sequences (or pages), tokens and heads, in elements.

    The fields are flat: after a branch, Triton 3.6 forgets a stride of 1 in a structure within a structure.
    """

    k_cache_batch: Any
    k_cache_token: Any
    k_cache_head: Any
    v_cache_batch: Any
    v_cache_token: Any
    v_cache_head: Any
    k_batch: Any
    k_token: Any
    k_head: Any
    v_batch: Any
    v_token: Any
    v_head: Any
    q_batch: Any
    q_token: Any
    q_head: Any


class AppendLengths(NamedTuple):
    """Integers of a launch. Kernels are not specialized on their values."""

    table_stride: Any
    k_descale_stride: Any
    """Elements from the scales of one page or sequence to those of the next."""
    v_descale_stride: Any
    seqlen_new: Any
    """New tokens of the longest sequence."""
    total_new: Any
    num_heads_kv: Any
    seqlen_q: Any
    total_q: Any
    num_heads_q: Any
    capacity: Any
    """Maximum number of keys of a sequence."""
    num_blocks: Any
    """Pages, or rows of a dense cache."""
    rotary_rows: Any
    """Rows (positions) of the tables of cos and sin."""
    batch: Any
    new_programs: Any
    """Programs for the new keys and values; later programs rotate queries."""


@kernel(do_not_specialize=("lengths",))
def append_kernel(pointers, strides, lengths, C: tl.constexpr):
    """Append new tokens and rotate queries. Grid: (programs of new tokens + programs of queries,).

    For new tokens, and for queries, there are (blocks of ROWS tokens * heads) programs per sequence. Packed
    tokens count as one sequence.

    k and v are (batch, seqlen_new, heads_kv, ...). If VARLEN or HAS_SLOTS, they have no batch dimension. With
    HAS_SLOTS, they are one sequence of total_new tokens. q is laid out in the same way. q_out has the shape
    of q and is contiguous.
    """
    program = tl.program_id(0)
    if program < lengths.new_programs:
        head, b, tokens, first, exists = tokens_of(
            program, lengths.num_heads_kv, pointers.cu_seqlens_k_new, lengths.seqlen_new, lengths.total_new,
            lengths.batch, C.VARLEN, C,
        )  # fmt: skip
        append_tokens(head, b, tokens, first, exists, pointers, strides, lengths, C)
    elif C.ROTATE_Q:
        rotate_queries(program - lengths.new_programs, pointers, strides, lengths, C)


@triton.jit
def append_tokens(head, b, tokens, first, exists, pointers, strides, lengths, C: tl.constexpr):
    """Write ROWS new tokens of one head to the cache. Tokens with an invalid page or offset are dropped.

    The first five arguments are what :func:`tokens_of` returns.
    """
    # The new tokens of a sequence follow those that the cache has.
    positions = tokens
    if C.HAS_LENGTHS:
        positions += tl.load(pointers.cache_seqlens + b)
    rotary_positions = positions
    if C.HAS_ROTARY_SEQLENS:
        rotary_positions = tl.load(pointers.rotary_seqlens + b) + tokens
    page, place, written = place_of(tokens, positions, exists, b, pointers, lengths, C)

    k_scale = 1.0
    v_scale = 1.0
    if C.DESCALE == "head":
        k_scale = tl.load(pointers.k_descale + head)
        v_scale = tl.load(pointers.v_descale + head)
    if C.DESCALE == "block" or C.DESCALE == "sequence":
        owner = page
        if C.DESCALE == "sequence":
            owner = page * 0 + b  # one number per token, as the pages are
        k_scales = pointers.k_descale + owner * lengths.k_descale_stride + head
        k_scale = tl.load(k_scales, mask=written, other=1.0)[:, None]
        v_scales = pointers.v_descale + owner * lengths.v_descale_stride + head
        v_scale = tl.load(v_scales, mask=written, other=1.0)[:, None]
    # 64 bits, because a cache may have more than 2^31 elements.
    b64 = b.to(tl.int64)
    head64 = head.to(tl.int64)
    rows = first + tokens
    k_rows = b64 * strides.k_batch + rows * strides.k_token + head64 * strides.k_head
    k = load_rotated(pointers.k, k_rows, exists, rotary_positions, pointers, lengths.rotary_rows, C)
    k_places = page * strides.k_cache_batch + place * strides.k_cache_token + head64 * strides.k_cache_head
    k = as_cached(k, pointers.k.dtype.element_ty, k_scale, C)
    columns = tl.arange(0, C.BLOCK_DV)
    v_rows = b64 * strides.v_batch + rows * strides.v_token + head64 * strides.v_head
    inside = exists[:, None] & (columns < C.HEAD_DIM_V)[None, :]
    v = tl.load(pointers.v + v_rows[:, None] + columns[None, :], mask=inside, other=0.0)
    v_places = page * strides.v_cache_batch + place * strides.v_cache_token + head64 * strides.v_cache_head
    v = as_cached(v, pointers.v.dtype.element_ty, v_scale, C)
    # Stores come last: the compiler moves no load before a store, which might write what the load reads. In
    # the attention kernel, whose loads of keys follow, a step over 4096 keys takes 13.0 instead of 13.5 us on
    # an H200.
    store_rows(pointers.k_cache, k_places, written, k, C.HEAD_DIM, C.BLOCK_D)
    store_rows(pointers.v_cache, v_places, written, v, C.HEAD_DIM_V, C.BLOCK_DV)


@triton.jit
def rotate_queries(program, pointers, strides, lengths, C: tl.constexpr):
    """Rotate ROWS queries of one head into a separate tensor."""
    ROWS: tl.constexpr = C.ROWS
    head, b, tokens, first, exists = tokens_of(
        program, lengths.num_heads_q, pointers.cu_seqlens_q, lengths.seqlen_q, lengths.total_q, lengths.batch,
        C.VARLEN_Q, C,
    )  # fmt: skip
    positions = tl.zeros([ROWS], tl.int32) + start_of_rotation(b, pointers, C)
    # Without ROTATE_Q_BY_TOKEN, all queries of a sequence have the position of its first new token, as in
    # FlashAttention without a causal mask or window.
    if C.ROTATE_Q_BY_TOKEN:
        positions += tokens
    rows = first + tokens
    b64 = b.to(tl.int64)
    q_rows = b64 * strides.q_batch + rows * strides.q_token + head.to(tl.int64) * strides.q_head
    q = load_rotated(pointers.q_in, q_rows, exists, positions, pointers, lengths.rotary_rows, C)
    out_rows = rows if C.VARLEN_Q else b64 * lengths.seqlen_q + tokens
    offsets = (out_rows * lengths.num_heads_q + head) * C.HEAD_DIM
    store_rows(pointers.q_out, offsets, exists, q, C.HEAD_DIM, C.BLOCK_D)


@triton.jit
def tokens_of(program, heads, cu_seqlens, seqlen, total, batch, VARLEN: tl.constexpr, C: tl.constexpr):
    """Return (head, sequence, position in the sequence, first row of the sequence, exists) of ROWS tokens.

    These are the tokens of one program, and ``exists`` is False for tokens past the end. The sequence and its
    first row are scalars, or one number per token if VARLEN. Packed tokens are divided among programs
    regardless of sequences, so that unequal lengths leave no program idle.
    """
    ROWS: tl.constexpr = C.ROWS
    head = program % heads
    if VARLEN:
        rows = program // heads * ROWS + tl.arange(0, ROWS)
        b = tl.zeros([ROWS], tl.int32)
        # The sequence of a row is the number of sequences that end at or before it. Comparing with all
        # offsets costs 0.2 to 0.5 us. With programs for each sequence, 256 sequences of one token and one of
        # 4096 took 688 us instead of 13 (H200).
        for start in range(0, batch, C.SEQUENCES):
            sequences = start + tl.arange(0, C.SEQUENCES)
            ends = tl.load(cu_seqlens + 1 + sequences, mask=sequences < batch, other=total)
            b += tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), axis=1)
        exists = (rows < total) & (b < batch)  # rows after the last sequence are padding
        first = tl.load(cu_seqlens + b, mask=exists, other=0)
        tokens = rows - first
        # Offsets are data on the device. Wrong ones may give positions outside of the sequence.
        exists = exists & (first >= 0) & (tokens >= 0) & (tokens < seqlen)
        b = tl.where(exists, b, 0)
    else:
        blocks = tl.cdiv(seqlen, ROWS)
        b = program // heads // blocks
        tokens = program // heads % blocks * ROWS + tl.arange(0, ROWS)
        first = tl.zeros([], tl.int32)
        exists = tokens < seqlen
    return head, b, tokens, first.to(tl.int64), exists


@triton.jit
def place_of(tokens, positions, exists, b, pointers, lengths, C: tl.constexpr):
    """Return (page, offset in the page, whether both are valid) of each token.

    In a dense cache, the row of the sequence takes the place of the page.
    """
    ROWS: tl.constexpr = C.ROWS
    if C.HAS_SLOTS:  # a slot counts tokens through all pages, or through all rows of a dense cache
        size = lengths.capacity if C.PAGE_SIZE == 0 else C.PAGE_SIZE
        slot = tl.load(pointers.slot_mapping + tokens, mask=exists, other=-1).to(tl.int64)  # -1: not cached
        written = exists & (slot >= 0)
        page = slot // size
        place = slot % size
    else:
        written = exists & (positions >= 0) & (positions < lengths.capacity)
        if C.PAGE_SIZE == 0:
            row = b
            if C.HAS_BATCH_IDX:
                row = tl.load(pointers.cache_batch_idx + b)
            page = tl.zeros([ROWS], tl.int64) + row
            place = positions.to(tl.int64)
        else:
            table = pointers.block_table + b.to(tl.int64) * lengths.table_stride
            page = tl.load(table + positions // C.PAGE_SIZE, mask=written, other=-1).to(tl.int64)
            place = (positions % C.PAGE_SIZE).to(tl.int64)
    # The caller's mistake must not write to memory that is not the cache's. Such tokens are dropped without
    # an error, because pages are data on the device. Attention then gives NaN to a sequence that leaves the
    # cache.
    written = written & (page >= 0) & (page < lengths.num_blocks)
    return page, place, written


@triton.jit
def start_of_rotation(b, pointers, C: tl.constexpr):
    """Return the rotary position of the first new token, and of the first query, of sequence ``b``."""
    position = b * 0  # 0 as a scalar, or as a vector if VARLEN
    if C.HAS_ROTARY_SEQLENS:
        position += tl.load(pointers.rotary_seqlens + b)
    elif C.HAS_LENGTHS:
        position += tl.load(pointers.cache_seqlens + b)
    return position


@triton.jit
def load_rotated(base, row_offsets, exists, positions, pointers, rotary_rows, C: tl.constexpr):
    """Load rows [ROWS, BLOCK_D] in float32 and rotate their first ROTARY_DIM columns by position."""
    HALF: tl.constexpr = C.ROTARY_DIM // 2
    columns = tl.arange(0, C.BLOCK_D)
    inside = exists[:, None] & (columns < C.HEAD_DIM)[None, :]
    x = tl.load(base + row_offsets[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if HALF > 0:
        if C.INTERLEAVED:
            partner = columns ^ 1
            frequency = columns // 2
            first = columns % 2 == 0
        else:
            partner = tl.where(columns < HALF, columns + HALF, columns - HALF)
            frequency = columns % HALF
            first = columns < HALF
        in_rotary = columns < C.ROTARY_DIM
        # Loaded a second time instead of exchanged, because another thread may hold the partner column.
        at_partner = base + row_offsets[:, None] + partner[None, :]
        other = tl.load(at_partner, mask=exists[:, None] & in_rotary[None, :], other=0.0).to(tl.float32)
        # Positions beyond the tables are not rotated: cos 1, sin 0.
        in_table = (exists & (positions >= 0) & (positions < rotary_rows))[:, None] & in_rotary[None, :]
        angles = positions.to(tl.int64)[:, None] * HALF + frequency[None, :]
        cos = tl.load(pointers.rotary_cos + angles, mask=in_table, other=1.0).to(tl.float32)
        sin = tl.load(pointers.rotary_sin + angles, mask=in_table, other=0.0).to(tl.float32)
        x = x * cos + tl.where(first, -1.0, 1.0)[None, :] * other * sin
    return x


@triton.jit
def as_cached(x, dtype: tl.constexpr, scale, C: tl.constexpr):
    """Round x to the new tokens' ``dtype``, then quantise it if the cache is in FP8."""
    # To their dtype first: an e4m3 cache holds what a cache of 16 bits would hold, quantised.
    x = x.to(dtype)
    if C.QUANTISED:
        # Quantisation saturates, because e4m3 has no infinity and the caller's scale may be too small.
        x = x.to(tl.float32) / scale
        x = tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    if C.E4M3_BITS:
        x = encode_bits(x)
    return x


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
    # Pairs are data on the device that no host has checked. All pairs run at the same time, so no block may
    # be the source of one pair and the destination of another.
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
        if C.HAS_DESCALES and part == 0:  # one of the programs that share a block
            copy_scales(
                pointers.k_descale + layer * lengths.k_descale_stride_l, source * lengths.k_descale_stride_b,
                destination * lengths.k_descale_stride_b, lengths.num_heads, C.BLOCK_HEADS,
            )  # fmt: skip
            copy_scales(
                pointers.v_descale + layer * lengths.v_descale_stride_l, source * lengths.v_descale_stride_b,
                destination * lengths.v_descale_stride_b, lengths.num_heads, C.BLOCK_HEADS,
            )  # fmt: skip


@triton.jit
def copy_rows(
    base, source, destination, stride_s, stride_h, first, lengths, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows ``first`` to ``first + BLOCK`` of the (page_size * heads) rows of a block."""
    # Heads vary fastest, as in memory, so that a program's rows are adjacent.
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
