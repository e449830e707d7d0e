"""Combines partial results of one softmax over different keys: the second half of Flash-Decoding.

The attention kernel leaves, in *slots* of scratch memory, normalised results over disjoint keys with their
log-sum-exps in base 2. One program owns ROWS rows of a work tile::

    find the work tile, and the slots of its splits     while attention still runs, if PDL
    wait for the attention kernel
    m = -inf, l = 0, acc = 0
    for SPLITS splits at a time:                        in the order of the keys: same bits in every run
        load out_i, lse_i                               together, so that their latencies overlap
        m' = max(m, lse_i);  w_i = 2^(lse_i - m');  alpha = 2^(m - m')
        l = alpha l + sum w_i;  acc = alpha acc + sum w_i out_i
    out = acc / l, lse                                  prior results and the sink are added here

With stream-K, every program has two slots: 2 p for a work tile that an earlier team began, 2 p + 1 for one
that it begins itself. Otherwise a slot is a split of a work tile. :mod:`schedule` defines *work tile* and
*team*.

It is a kernel of its own. The last program that finishes a part of a work tile could combine its parts; that
was written three times, and always took longer: counting who is last costs more than a second launch, which
begins while the first one drains (docs/kernels/decode.md).

``combine_given_kernel`` does the same for partial results of the caller, in the caller's layout.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.tiles import LN_2, LOG2_E
from flashtile.backends.portable.decode.schedule import (
    Layout,
    Rows,
    heads_of_rows,
    load_sequence,
    locate_m_block,
    normalised,
    reach_of,
    sequence_of,
    share_of,
    split_size,
    store_results,
    store_rows,
    stream_k_start,
    with_prior,
)


@dataclass(frozen=True)
class CombineVariant(Layout):
    """Constants of the combining kernel, passed as one argument."""

    STREAM_K: bool
    BY_WORK_TILE: bool
    """Whether programs belong to work tiles; otherwise to boundaries between the shares of two teams."""
    HAS_SINK: bool
    HAS_PRIOR: bool
    PDL: bool
    HEAD_DIM_V: int
    BLOCK_DV: int
    ROWS: int
    """Rows of a program."""
    SPLITS: int
    """Splits that a program loads at a time."""
    ONE_BY_ONE: bool
    """Whether these splits are loaded as SPLITS tiles of rows, for few splits (:func:`sum_few_splits`). Only
    launches of Hopper's decoding choose it."""


class CombinePointers(NamedTuple):
    """Tensors of a call; None for each that the call does not use."""

    partial: Any
    out: Any
    lse: Any
    sink: Any
    prior_out: Any
    prior_lse: Any
    cache_seqlens: Any
    cache_leftpad: Any
    cu_seqlens_q: Any
    cu_seqlens_k_new: Any


class Parts(NamedTuple):
    """Partial results of one work tile: m_block ``m`` of sequence ``b``, for a key/value head."""

    b: Any
    m: Any
    head_kv: Any
    start_q: Any
    """First row of the sequence in q, where sequences are packed."""
    num_rows: Any
    count: Any
    start: Any
    """First slot, as in :class:`Slots`."""
    step: Any
    first_extra: Any


@kernel(do_not_specialize=("lengths", "splits", "teams", "row_blocks"))
def combine_kernel(pointers, lengths, splits, teams, row_blocks, C: tl.constexpr):
    """Combine the partial results of ``decode_kernel``.

    ``teams``: number of teams of that kernel's stream-K grid; 0 for other grids.

    Grid: (row blocks * work tiles,) if BY_WORK_TILE, else (row blocks * boundaries,). A row block is ROWS
    rows of a work tile. A boundary separates the shares of two programs that process the same heads in
    adjacent teams. Large batches have fewer boundaries than work tiles.
    """
    # The next step's attention may take free multiprocessors at once: it waits for the end of this kernel.
    if C.PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_block = tl.program_id(0) % row_blocks
    unit = tl.program_id(0) // row_blocks
    # Parts are found before the wait: that needs lengths only, which were final before attention began.
    if C.STREAM_K:
        parts = stream_k_parts(unit, teams, pointers, lengths, C)
    else:
        parts = split_parts(unit, pointers, lengths, splits, C)
    if C.PDL:
        # Every program waits for the attention kernel, even without partial results to combine. Otherwise
        # this kernel could end first, and the next kernel in the stream would start too early.
        tl.extra.cuda.gdc_wait()
    first_row = row_block * C.ROWS
    # A work tile of one part is whole: the attention kernel has written its result.
    if (parts.count > 1) & (first_row < parts.num_rows):
        combine_rows(parts, first_row, pointers, lengths, splits, C)


@triton.jit
def stream_k_parts(unit, teams, pointers, lengths, C: tl.constexpr):
    """Return the :class:`Parts` (partial results) of one work tile from a stream-K grid of ``teams`` teams.

    If BY_WORK_TILE, this is work tile ``unit``. Otherwise ``unit`` is the number of a program, and the result
    is for the work tile within which the share of this program ends. A program of the next team continues
    that work tile. ``Parts.count`` is 0 if the share ends between two work tiles, or if the share of an
    earlier team also ends within the work tile.
    """
    HEADS: tl.constexpr = C.HEADS_PER_TEAM
    if C.BY_WORK_TILE:
        m_block = unit // lengths.num_heads_kv
        head_kv = unit % lengths.num_heads_kv
        total, m_block_start = locate_m_block(m_block, pointers, lengths, C)
    else:
        head_kv = unit % HEADS
        total, position, m_block, m_block_start = stream_k_start(
            tl.arange(0, C.SCAN_BLOCK), unit // HEADS + 1, teams, pointers, lengths, C
        )
    b, m = sequence_of(m_block, lengths, C)
    sequence = load_sequence(b, m_block < lengths.m_blocks, pointers, lengths, C)
    num_rows, _, n_blocks = reach_of(m, sequence, lengths, C)
    if not (C.BY_WORK_TILE or C.ONE_TEAM):  # which of the m_block's groups of heads the position is in
        head_kv += (position - m_block_start) // tl.maximum(n_blocks, 1) * HEADS
    # The work tile's n_blocks have consecutive positions, so its parts belong to consecutive teams.
    first_position = m_block_start + head_kv // HEADS * n_blocks
    first_team = share_of(first_position, teams, total)
    splits = share_of(first_position + tl.maximum(n_blocks, 1) - 1, teams, total) - first_team + 1
    # If several boundaries divide a work tile, the program of the first boundary combines it.
    if n_blocks == 0 or (not C.BY_WORK_TILE and first_team != unit // HEADS):
        splits = 0
    # The first part is in the second slot of its program (first_extra 1), because that program began the work
    # tile. All others are in the first slot. Programs of the same head in adjacent teams are HEADS apart.
    start = 2 * (first_team * HEADS + head_kv % HEADS)
    return Parts(b, m, head_kv, sequence.start_q, num_rows, splits, start, 2 * HEADS, 1)


@triton.jit
def split_parts(unit, pointers, lengths, splits, C: tl.constexpr):
    """Return the partial results of work tile ``unit`` as :class:`Parts`, if the grid is not stream-K."""
    m_blocks, num_splits = lengths.m_blocks_per_sequence, splits.num_splits
    m = m_blocks - 1 - unit % m_blocks
    head_kv = unit // m_blocks % lengths.num_heads_kv
    b = unit // (m_blocks * lengths.num_heads_kv)
    sequence = load_sequence(b, True, pointers, lengths, C)
    num_rows, _, n_blocks = reach_of(m, sequence, lengths, C)
    each = split_size(n_blocks, splits)
    count = (n_blocks + each - 1) // each  # later splits are empty: nothing wrote their slots
    # Slots are numbered as the attention kernel's programs, in which m_blocks vary fastest, then splits.
    start = (unit // m_blocks) * num_splits * m_blocks
    start += unit % m_blocks
    return Parts(b, m, head_kv, sequence.start_q, num_rows, count, start, m_blocks, 0)


@triton.jit
def combine_rows(parts, first_row, pointers, lengths, splits, C: tl.constexpr):
    """Combine the partial results for ROWS rows of a work tile, and store the combined results.

    The first of these rows is ``first_row``.
    """
    index = first_row + tl.arange(0, C.ROWS)
    exists = index < parts.num_rows
    row = parts.m * C.BLOCK_M + index
    tokens, heads = heads_of_rows(row, parts.head_kv, lengths, C)
    # All outputs come first, then all log-sum-exps, as attend_work_tile stores them.
    partial_lse = pointers.partial + splits.slots.to(tl.int64) * splits.partial_rows * C.HEAD_DIM_V
    partial_out = pointers.partial + index * C.HEAD_DIM_V
    partial_lse += index
    slots = Slots(
        parts.start, parts.step, parts.first_extra, splits.partial_rows * C.HEAD_DIM_V, splits.partial_rows
    )
    if C.ONE_BY_ONE:
        acc, row_max, row_sum = sum_few_splits(partial_out, partial_lse, exists, parts.count, slots, C)
    else:
        acc, row_max, row_sum = sum_splits(partial_out, partial_lse, exists, parts.count, slots, False, C)
    rows = Rows(parts.b, parts.start_q, tokens, heads, exists)
    if C.HAS_PRIOR:
        acc, row_max, row_sum = with_prior(
            acc, row_max, row_sum, pointers.prior_out, pointers.prior_lse, rows, lengths, C
        )
    out, lse = normalised(acc, row_max, row_sum)
    store_results(pointers, out, lse, rows, lengths, C)


class Slots(NamedTuple):
    """Slots of a row's splits: slot ``start + i * step`` for split i, plus ``first_extra`` for split 0."""

    start: Any
    step: Any
    first_extra: Any
    out_stride: Any
    """Elements from one slot to the next."""
    lse_stride: Any


@triton.jit
def slot_of(split, slots):
    """Return the slot of a split as int64."""
    slot = slots.start + split * slots.step + tl.where(split == 0, slots.first_extra, 0)
    return slot.to(tl.int64)


@triton.jit
def sum_splits(out_rows, lse_rows, exists, splits, slots, NATURAL: tl.constexpr, C: tl.constexpr):
    """Sum partial results, and return (acc [ROWS, BLOCK_DV], maximum [ROWS], sum [ROWS]).

    ``out_rows`` and ``lse_rows`` [ROWS] point to each row's results in slot 0. SPLITS results are loaded at a
    time. Log-sum-exps are in base 2, or natural if NATURAL. A log-sum-exp of -inf means that the partial
    result covers no keys. With NATURAL, +inf means the same.
    """
    ROWS: tl.constexpr = C.ROWS
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    columns = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for first in range(0, splits, C.SPLITS):
        split = first + tl.arange(0, C.SPLITS)
        slot = slot_of(split, slots)
        inside = (split < splits)[:, None] & exists[None, :]  # [SPLITS, ROWS]
        # Both loads are issued together, so that their latencies overlap.
        lse_slots = (slot * slots.lse_stride)[:, None]
        lse = tl.load(lse_rows[None, :] + lse_slots, mask=inside, other=-float("inf"))
        out_slots = (slot * slots.out_stride)[:, None, None]
        pointers = out_rows[None, :, None] + out_slots + columns[None, None, :]
        in_row = inside[:, :, None] & (columns < C.HEAD_DIM_V)[None, None, :]
        out = tl.load(pointers, mask=in_row, other=0.0).to(tl.float32)  # [SPLITS, ROWS, BLOCK_DV]
        if NATURAL:
            lse = tl.where(lse == float("inf"), -float("inf"), lse * LOG2_E)
        # A partial result over no keys has an arbitrary output, and 0 times NaN is NaN.
        out = tl.where((lse == -float("inf"))[:, :, None], 0.0, out)
        # A step of the online softmax, with a log-sum-exp as the score and a partial output as the value.
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # -inf - (-inf) would be NaN
        weight = tl.exp2(lse - shift[None, :])
        alpha = tl.exp2(row_max - shift)
        acc = acc * alpha[:, None] + tl.sum(out * weight[:, :, None], 0)
        row_sum = row_sum * alpha + tl.sum(weight, 0)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def sum_few_splits(out_rows, lse_rows, exists, splits, slots, C: tl.constexpr):
    """Do what :func:`sum_splits` does, with a tile of rows for each of the SPLITS splits.

    A thread holds the same elements of each tile, so threads exchange nothing. 256 tokens of one sequence of
    8192 keys take 61.2 instead of 84.3 us, attention and combining together (H200).
    """
    ROWS: tl.constexpr = C.ROWS
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    SPLITS: tl.constexpr = C.SPLITS
    columns = tl.arange(0, BLOCK_DV)
    in_row = exists[:, None] & (columns < C.HEAD_DIM_V)[None, :]
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for first in range(0, splits, SPLITS):
        outs = ()
        for i in tl.static_range(SPLITS):
            out_slot = slot_of(first + i, slots) * slots.out_stride
            pointers = out_rows[:, None] + out_slot + columns[None, :]
            out = tl.load(pointers, mask=in_row & (first + i < splits), other=0.0)
            outs = outs + (out,)  # type: ignore[assignment]
        # The compiler moves no load over a barrier. Otherwise it would use the first tiles before it loads
        # the others, to save registers.
        tl.debug_barrier()
        lses = ()
        new_max = row_max
        for i in tl.static_range(SPLITS):
            lse_slot = slot_of(first + i, slots) * slots.lse_stride
            inside = exists & (first + i < splits)
            lse = tl.load(lse_rows + lse_slot, mask=inside, other=-float("inf"))
            lses = lses + (lse,)  # type: ignore[assignment]
            new_max = tl.maximum(new_max, lse)
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        alpha = tl.exp2(row_max - shift)
        acc = acc * alpha[:, None]
        row_sum = row_sum * alpha
        for i in tl.static_range(SPLITS):
            weight = tl.exp2(lses[i] - shift)
            # A partial result over no keys has an arbitrary output.
            acc += tl.where((lses[i] == -float("inf"))[:, None], 0.0, outs[i] * weight[:, None])
            row_sum += weight
        row_max = new_max
    return acc, row_max, row_sum


@dataclass(frozen=True)
class CombineGivenVariant:
    """Constants of the kernel for the caller's partial results."""

    HEAD_DIM_V: int
    BLOCK_DV: int
    ROWS: int
    SPLITS: int


class GivenPointers(NamedTuple):
    """The caller's partial results, and the combined results."""

    out_partial: Any
    lse_partial: Any
    out: Any
    lse: Any


class GivenStrides(NamedTuple):
    """Strides of the caller's partial results between splits, sequences, tokens and heads, in elements."""

    out_stride_split: Any
    out_stride_b: Any
    out_stride_s: Any
    out_stride_h: Any
    lse_stride_split: Any
    lse_stride_b: Any
    lse_stride_s: Any
    lse_stride_h: Any


class GivenSizes(NamedTuple):
    """Integers of the caller's partial results. The kernel is not specialized on their values."""

    splits: Any
    seqlen: Any
    num_heads: Any
    rows: Any
    """batch * seqlen * heads."""


@kernel(do_not_specialize=("sizes",))
def combine_given_kernel(pointers, strides, sizes, C: tl.constexpr):
    """Combine the caller's partial results.

    Grid: (cdiv(batch * seqlen * heads, ROWS),); each program combines ROWS rows.
    out_partial is (splits, batch, seqlen, heads, HEAD_DIM_V); lse_partial is (splits, batch, seqlen, heads),
    natural log. out (batch, seqlen, heads, HEAD_DIM_V) and lse (batch, heads, seqlen) are contiguous.
    """
    row = tl.program_id(0).to(tl.int64) * C.ROWS + tl.arange(0, C.ROWS)
    exists = row < sizes.rows
    head = row % sizes.num_heads
    token = row // sizes.num_heads % sizes.seqlen
    b = row // sizes.num_heads // sizes.seqlen
    out_rows = pointers.out_partial + b * strides.out_stride_b + token * strides.out_stride_s
    out_rows += head * strides.out_stride_h
    lse_rows = pointers.lse_partial + b * strides.lse_stride_b + token * strides.lse_stride_s
    lse_rows += head * strides.lse_stride_h
    acc, row_max, row_sum = sum_splits(
        out_rows, lse_rows, exists, sizes.splits,
        Slots(0, 1, 0, strides.out_stride_split, strides.lse_stride_split), True, C,
    )  # fmt: skip
    out, lse = normalised(acc, row_max, row_sum)
    store_rows(pointers.out, row * C.HEAD_DIM_V, exists, out, C.HEAD_DIM_V, C.BLOCK_DV)
    tl.store(pointers.lse + (b * sizes.num_heads + head) * sizes.seqlen + token, lse * LN_2, mask=exists)
