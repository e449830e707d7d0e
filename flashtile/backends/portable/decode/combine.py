"""Partial results of one softmax into one: the second half of Flash-Decoding.

Deterministic: a row is summed by one program, in the order of the keys.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.common.kernel_cache import kernel
from flashtile.backends.common.tiles import LN_2, LOG2_E
from flashtile.backends.portable.decode.attend import RUNTIME_INTEGERS
from flashtile.backends.portable.decode.results import (
    Rows,
    Splits,
    normalised,
    store_results,
    store_rows,
    with_prior,
    with_sink,
)
from flashtile.backends.portable.decode.schedule import (
    Layout,
    Lengths,
    Sequences,
    balanced_start,
    heads_of_rows,
    load_sequence,
    locate_m_block,
    reach_of,
    sequence_of,
    share_of,
)


@dataclass(frozen=True)
class CombineVariant(Layout):
    """What the combining kernel is compiled for."""

    BALANCED: bool
    BY_WORK_TILE: bool
    """Whether there is a program for each work tile, else for each boundary between two programs."""
    HAS_SINK: bool
    HAS_PRIOR: bool
    PDL: bool
    HEAD_DIM_V: int
    BLOCK_DV: int
    ROWS: int
    """Of a program."""
    SPLITS: int
    """That it loads at a time."""


@dataclass(frozen=True)
class CombineGivenVariant:
    """What the kernel for partial results of the caller is compiled for."""

    HEAD_DIM_V: int
    BLOCK_DV: int
    ROWS: int
    SPLITS: int


class Slots(NamedTuple):
    """Where the splits of a row lie: i in slot ``start + i * step``, the first ``first_extra`` later."""

    start: Any
    step: Any
    first_extra: Any
    out_stride: Any
    """From slot to slot."""
    lse_stride: Any


class GivenStrides(NamedTuple):
    """Of the caller's partial results, in elements."""

    out_stride_split: Any
    out_stride_b: Any
    out_stride_s: Any
    out_stride_h: Any
    lse_stride_split: Any
    lse_stride_b: Any
    lse_stride_s: Any
    lse_stride_h: Any


@triton.jit
def sum_splits(out_rows, lse_rows, exists, splits, slots, NATURAL: tl.constexpr, C: tl.constexpr):
    """(acc [ROWS, BLOCK_DV], maximum, sum [ROWS]) of the partial results at ``out_rows`` and ``lse_rows``,
    pointers [ROWS] to slot 0, SPLITS of them at a time. Log-sum-exps are in base 2 unless NATURAL, -inf
    (NATURAL: +inf, too) without keys.
    """
    ROWS: tl.constexpr = C.ROWS
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    columns = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for first in range(0, splits, C.SPLITS):
        split = first + tl.arange(0, C.SPLITS)
        slot = slots.start + split * slots.step + tl.where(split == 0, slots.first_extra, 0)
        slot = slot.to(tl.int64)
        inside = (split < splits)[:, None] & exists[None, :]  # [SPLITS, ROWS]
        # Both loads at once: neither waits for the other.
        lse_slots = (slot * slots.lse_stride)[:, None]
        lse = tl.load(lse_rows[None, :] + lse_slots, mask=inside, other=-float("inf"))
        out_slots = (slot * slots.out_stride)[:, None, None]
        pointers = out_rows[None, :, None] + out_slots + columns[None, None, :]
        in_row = inside[:, :, None] & (columns < C.HEAD_DIM_V)[None, None, :]
        out = tl.load(pointers, mask=in_row, other=0.0).to(tl.float32)  # [SPLITS, ROWS, BLOCK_DV]
        if NATURAL:
            lse = tl.where(lse == float("inf"), -float("inf"), lse * LOG2_E)
        # An empty part may hold anything.
        out = tl.where((lse == -float("inf"))[:, :, None], 0.0, out)
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weight = tl.exp2(lse - shift[None, :])
        alpha = tl.exp2(row_max - shift)
        acc = acc * alpha[:, None] + tl.sum(out * weight[:, :, None], 0)
        row_sum = row_sum * alpha + tl.sum(weight, 0)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def combine_rows(
    partial_ptr, out_ptr, lse_ptr, sink_ptr, prior_out, prior_lse, b, m, head_kv, start_q, num_rows,
    first_row, splits, start, step, first_extra, lengths, partial, C: tl.constexpr,
):  # fmt: skip
    """ROWS rows, from ``first_row`` on, of the work tile that is m_block ``m`` of sequence ``b`` and a
    key/value head, from its parts in the slots that :class:`Slots` describes."""
    index = first_row + tl.arange(0, C.ROWS)
    exists = index < num_rows
    row = m * C.BLOCK_M + index
    tokens, heads = heads_of_rows(row, head_kv, lengths, C)
    partial_lse = partial_ptr + partial.slots.to(tl.int64) * partial.partial_rows * C.HEAD_DIM_V
    acc, row_max, row_sum = sum_splits(
        partial_ptr + index * C.HEAD_DIM_V, partial_lse + index, exists, splits,
        Slots(start, step, first_extra, partial.partial_rows * C.HEAD_DIM_V, partial.partial_rows),
        False, C,
    )  # fmt: skip
    rows = Rows(b, start_q, tokens, heads, exists)
    if C.HAS_PRIOR:
        acc, row_max, row_sum = with_prior(acc, row_max, row_sum, prior_out, prior_lse, rows, lengths, C)
    if C.HAS_SINK:
        sink = tl.load(sink_ptr + heads, mask=exists, other=0.0)
        acc, row_max, row_sum = with_sink(acc, row_max, row_sum, sink)
    out, lse = normalised(acc, row_max, row_sum)
    store_results(out_ptr, lse_ptr, out, lse, rows, lengths, C)


@kernel(do_not_specialize=(*RUNTIME_INTEGERS, "teams", "row_blocks"))
def combine_kernel(
    partial_ptr, out_ptr, lse_ptr, sink_ptr, prior_out, prior_lse, cache_seqlens, cache_leftpad,
    cu_seqlens_q, cu_seqlens_k_new,
    m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity,
    window_left, window_right, partial_rows, slots, num_splits, split_n_blocks, teams, row_blocks,
    C: tl.constexpr,
):  # fmt: skip
    """What ``decode_kernel`` left in parts, in a balanced grid of ``teams`` teams.

    Grid: (row blocks * work tiles,), or unless BY_WORK_TILE (row blocks * boundaries between those teams'
    programs,), which are fewer where the batch is large. A row block is ROWS rows of a work tile.
    """
    if C.PDL:
        tl.extra.cuda.gdc_launch_dependents()
    sequences = Sequences(cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new)
    lengths = Lengths(
        m_blocks, m_blocks_per_sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity,
        window_left, window_right,
    )  # fmt: skip
    partial = Splits(partial_rows, slots, num_splits, split_n_blocks)
    row_block = tl.program_id(0) % row_blocks
    unit = tl.program_id(0) // row_blocks
    if C.BALANCED:
        HEADS: tl.constexpr = C.HEADS_PER_TEAM
        if C.BY_WORK_TILE:
            m_block = unit // num_heads_kv
            head_kv = unit % num_heads_kv
            total, m_block_start = locate_m_block(m_block, sequences, lengths, C)
        else:
            # The work tile that holds the first n_block of a program of the next team.
            head_kv = unit % HEADS
            total, position, m_block, m_block_start = balanced_start(
                tl.arange(0, C.SCAN_BLOCK), unit // HEADS + 1, teams, sequences, lengths, C
            )
        b, m = sequence_of(m_block, lengths, C)
        sequence = load_sequence(b, m_block < m_blocks, sequences, lengths, C)
        num_rows, _, n_blocks = reach_of(m, sequence, lengths, C)
        if not (C.BY_WORK_TILE or C.ONE_TEAM):
            head_kv += (position - m_block_start) // tl.maximum(n_blocks, 1) * HEADS
        first_position = m_block_start + head_kv // HEADS * n_blocks
        first_team = share_of(first_position, teams, total)
        splits = share_of(first_position + tl.maximum(n_blocks, 1) - 1, teams, total) - first_team + 1
        # Of a work tile over several boundaries, the first one's program combines it.
        if n_blocks == 0 or (not C.BY_WORK_TILE and first_team != unit // HEADS):
            splits = 0
        start = 2 * (first_team * HEADS + head_kv % HEADS)
        step = 2 * HEADS
        first_extra = 1
    else:
        m = m_blocks_per_sequence - 1 - unit % m_blocks_per_sequence
        head_kv = unit // m_blocks_per_sequence % num_heads_kv
        b = unit // (m_blocks_per_sequence * num_heads_kv)
        sequence = load_sequence(b, True, sequences, lengths, C)
        num_rows, _, n_blocks = reach_of(m, sequence, lengths, C)
        each = split_n_blocks
        if split_n_blocks == 0:
            each = max((n_blocks + num_splits - 1) // num_splits, 1)
        splits = (n_blocks + each - 1) // each
        start = (unit // m_blocks_per_sequence) * num_splits * m_blocks_per_sequence
        start += unit % m_blocks_per_sequence
        step = m_blocks_per_sequence
        first_extra = 0
    if C.PDL:
        # Waited for by every program: what follows in the stream may start when this kernel has ended.
        tl.extra.cuda.gdc_wait()
    first_row = row_block * C.ROWS
    if (splits > 1) & (first_row < num_rows):
        combine_rows(
            partial_ptr, out_ptr, lse_ptr, sink_ptr, prior_out, prior_lse, b, m, head_kv, sequence.start_q,
            num_rows, first_row, splits, start, step, first_extra, lengths, partial, C,
        )  # fmt: skip


@kernel(do_not_specialize=("splits", "seqlen", "num_heads", "total_rows"))
def combine_given_kernel(
    out_partial_ptr, lse_partial_ptr, out_ptr, lse_ptr, out_stride_split, out_stride_b, out_stride_s,
    out_stride_h, lse_stride_split, lse_stride_b, lse_stride_s, lse_stride_h, splits, seqlen, num_heads,
    total_rows, C: tl.constexpr,
):  # fmt: skip
    """Partial results of the caller. Grid: (blocks of ROWS of the batch * seqlen * heads rows,).

    out_partial (splits, batch, seqlen, heads, HEAD_DIM_V), lse_partial (splits, batch, seqlen, heads),
    natural log; out (batch, seqlen, heads, HEAD_DIM_V) and lse (batch, heads, seqlen) contiguous.
    """
    strides = GivenStrides(
        out_stride_split, out_stride_b, out_stride_s, out_stride_h, lse_stride_split, lse_stride_b,
        lse_stride_s, lse_stride_h,
    )  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * C.ROWS + tl.arange(0, C.ROWS)
    exists = row < total_rows
    head = row % num_heads
    token = row // num_heads % seqlen
    b = row // num_heads // seqlen
    out_rows = out_partial_ptr + b * strides.out_stride_b + token * strides.out_stride_s
    out_rows += head * strides.out_stride_h
    lse_rows = lse_partial_ptr + b * strides.lse_stride_b + token * strides.lse_stride_s
    lse_rows += head * strides.lse_stride_h
    acc, row_max, row_sum = sum_splits(
        out_rows, lse_rows, exists, splits,
        Slots(0, 1, 0, strides.out_stride_split, strides.lse_stride_split), True, C,
    )  # fmt: skip
    out, lse = normalised(acc, row_max, row_sum)
    store_rows(out_ptr, row * C.HEAD_DIM_V, exists, out, C.HEAD_DIM_V, C.BLOCK_DV)
    tl.store(lse_ptr + (b * num_heads + head) * seqlen + token, lse * LN_2, mask=exists)
