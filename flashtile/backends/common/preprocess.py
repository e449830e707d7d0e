"""Row statistics of the backward pass, computed once (Dao 2023, arXiv:2307.08691, Algorithm 2, line 4).

Each row has two floats. Rows are padded to whole blocks, so that loading them needs no mask:

* ``neg_lse`` is ``-lse * lse_factor``. ``lse_factor`` is log2(e) for kernels whose scores are in log2 units,
  where P = 2 ** (scores + neg_lse). It is 1 / softmax_scale for kernels whose scores are raw products.
* ``neg_delta`` is ``dlse - rowsum(dO * O)``, so that dS = P * (dP + neg_delta). It is minus the paper's D,
  plus the gradient of lse, which contributes P * dlse to dS.

An attention sink is a score without a value vector. Its gradient is its probability times ``neg_delta``,
summed over rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.config import padded
from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tiles import LOG2_E, Matrix, load_tile, row_of_head, row_of_token, sequence
from flashtile.problems.attention import OptionalTensors, Problem

ROW_PAD = 128
"""Rows of ``neg_lse`` and ``neg_delta`` come in blocks of this many; no backward BLOCK_M is larger."""
PAD = tl.constexpr(ROW_PAD)
NUM_WARPS = 8
"""At head_dim 64 eight take 53 us where four take 54. With four, float32 tiles of 256 columns spill."""
COUNTERS_AT_ONCE = tl.constexpr(1024)
SEQUENCES = tl.constexpr(256)
"""Sequences that a program compares with its padded row at a time."""
LARGE_LSE = tl.constexpr(2.0**24)
"""From this magnitude on, lse in fp32 may err by 1, and P by a factor of more than 2. The error grows with
lse, until P is infinite."""


class PreprocessPointers(NamedTuple):
    """Tensors of the kernel; None for those that a call does not use."""

    out: Any
    dout: Any
    lse: Any
    dlse: Any
    neg_lse: Any
    neg_delta: Any
    dsink: Any
    dq_accum: Any
    counters: Any
    cu_seqlens_q: Any
    sink: Any


class PreprocessLengths(NamedTuple):
    """Integers of a call. Kernels are not specialized on their values."""

    num_heads_q: Any
    seqlen_q: Any
    total_q: Any
    padded_rows: Any
    num_counters: Any
    dq_accum_heads: Any
    batch: Any
    """Number of packed sequences if programs find theirs, else None."""


def num_padded_rows(seqlen_q: int, total_q: int, batch: int, varlen: bool) -> int:
    """Return the number of padded rows per head: of one sequence, or of all sequences if they are packed."""
    return triton.cdiv(total_q + batch * ROW_PAD if varlen else seqlen_q, ROW_PAD) * ROW_PAD


@dataclass(frozen=True)
class PreprocessVariant:
    """Constants of the kernel."""

    VARLEN: bool
    FINDS_SEQUENCE: bool
    """Programs own the blocks of padded rows one after another, and find their sequences (:func:`owner`)."""
    HAS_DLSE: bool
    HEAD_DIM_V: int
    BLOCK_DV: int
    """HEAD_DIM_V padded to a power of two."""
    BLOCK_M: int
    LIMITS_LSE: bool
    """Whether P is 0 in rows whose lse is LARGE_LSE or more, positive or negative. Such rows come from a bias
    or a score_mod."""
    DQ_ACCUM_COLUMNS: int
    """Columns of the accumulator of dQ; 0 if there is none."""


@triton.jit
def statistics_offset(b, head, start_q, num_heads_q, padded_rows, VARLEN: tl.constexpr):
    """Return the index (int64) of the first padded row that belongs to head ``head`` of sequence ``b``."""
    if VARLEN:
        # Each sequence begins at a multiple of PAD. With ``+ b``, ranges of adjacent sequences never overlap.
        return head.to(tl.int64) * padded_rows + (start_q // PAD + b) * PAD
    else:
        return (b.to(tl.int64) * num_heads_q + head) * padded_rows


@triton.jit
def owner(cu_seqlens, row, batch, total, CHUNK: tl.constexpr):
    """Return (sequence, row in it) of a padded row: the last sequence that begins there or before."""
    begun = 0
    for done in range(0, batch, CHUNK):
        b = done + tl.arange(0, CHUNK)
        begin = padded_begin(b, tl.load(cu_seqlens + b, mask=b < batch, other=0), total)
        begun += tl.sum(((begin <= row) & (b < batch)).to(tl.int32))
    b = tl.maximum(begun - 1, 0)
    return b, row - padded_begin(b, tl.load(cu_seqlens + b), total)


@triton.jit
def padded_begin(b, start, total):
    """Return the padded row at which packed sequence ``b`` begins, as :func:`statistics_offset` does."""
    return (tl.minimum(tl.maximum(start, 0), total) // PAD + b) * PAD


@kernel(do_not_specialize=("lengths",))
def preprocess_kernel(pointers, lse_factor, lengths, C: tl.constexpr):
    """Compute neg_lse and neg_delta. Grid: a program for each block of padded rows of each head. Unless
    FINDS_SEQUENCE, each sequence has as many blocks as the longest.

    Rows past the end, and rows whose lse is -inf, get neg_lse -inf and neg_delta 0. Their probabilities are
    therefore 0. With C.LIMITS_LSE, the same holds for a lse beyond LARGE_LSE. P of such a row could be
    infinite, and would then make all dK and dV NaN, even if dO of the row is 0.

    Each program writes its part of the gradient of the sink, a sum over its rows, to one element of dsink
    [programs]. Programs of adjacent heads have adjacent numbers.

    ``dq_accum`` is the fp32 accumulator of kernels that add dQ in memory, with C.DQ_ACCUM_COLUMNS columns per
    padded row. This kernel zeroes the accumulator of the first ``dq_accum_heads`` query heads: those of the
    first sequence, then those of the second, and so on. Packed sequences have one accumulator per head. The
    kernel also zeroes ``counters``.
    """
    num_heads_q, seqlen_q = lengths.num_heads_q, lengths.seqlen_q
    num_blocks = tl.cdiv(seqlen_q, PAD) * (PAD // C.BLOCK_M)
    pid = tl.program_id(0)
    # Counters and the accumulator of dQ are zeroed here, which saves launches of their own. The next kernel
    # is a dependent launch, without a trigger here: it starts as programs end. A trigger at the start gained
    # nothing.
    # One program zeroes all counters: the next kernel waits for the end of this one.
    if pointers.counters is not None and pid == 0:
        for first in range(0, lengths.num_counters, COUNTERS_AT_ONCE):
            place = first + tl.arange(0, COUNTERS_AT_ONCE)
            tl.store(pointers.counters + place, tl.zeros_like(place), mask=place < lengths.num_counters)
    # Heads vary fastest, so that adjacent programs read adjacent memory.
    head = pid % num_heads_q
    if C.FINDS_SEQUENCE:
        padded_row = pid // num_heads_q * C.BLOCK_M
        b, row_start = owner(pointers.cu_seqlens_q, padded_row, lengths.batch, lengths.total_q, SEQUENCES)
    else:
        row_start = (pid // num_heads_q) % num_blocks * C.BLOCK_M
        b = (pid // num_heads_q) // num_blocks
    start_q, len_q = sequence(pointers.cu_seqlens_q, b, seqlen_q, lengths.total_q, C.VARLEN)
    # Not ``len_q``: rows up to the end of a padded block must get -inf, since kernels load whole blocks.
    if row_start >= tl.cdiv(len_q, PAD) * PAD:
        if pointers.sink is not None:
            tl.store(pointers.dsink + pid, 0.0)
        return
    tile_offset = (row_of_token(b, start_q, num_heads_q, seqlen_q, C.VARLEN) + head) * C.HEAD_DIM_V
    lse_offset = row_of_head(b, head, start_q, num_heads_q, seqlen_q, lengths.total_q, C.VARLEN) + row_start
    stride = num_heads_q * C.HEAD_DIM_V
    out_rows = Matrix(pointers.out + tile_offset, stride, len_q)
    dout_rows = Matrix(pointers.dout + tile_offset, stride, len_q)
    # Read once, so evicted first: dq_accum and q should stay in the L2 cache (1.009 to 1.014 times as fast a
    # call).
    o = load_tile(out_rows, row_start, C.BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV, True, False, ONCE=True)
    do = load_tile(dout_rows, row_start, C.BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV, True, False, ONCE=True)
    # The products are in float32 for every dtype of out and dout.
    neg_delta_rows = -tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    rows = tl.arange(0, C.BLOCK_M)
    inside = row_start + rows < len_q
    if C.HAS_DLSE:  # lse is a result of its own: its gradient adds P * dlse to dS
        neg_delta_rows += tl.load(pointers.dlse + lse_offset + rows, mask=inside, other=0.0)
    lse_rows = tl.load(pointers.lse + lse_offset + rows, mask=inside, other=-float("inf"))
    if C.LIMITS_LSE:
        lse_rows = tl.where(tl.abs(lse_rows) >= LARGE_LSE, -float("inf"), lse_rows)
    empty = lse_rows == -float("inf")  # P = exp2(S + neg_lse) is 0 only with -inf, not with its negative
    # All rows of the block are stored without a mask: the padded rows are this kernel's.
    offset = statistics_offset(b, head, start_q, num_heads_q, lengths.padded_rows, C.VARLEN) + row_start
    neg_lse_rows = tl.where(empty, lse_rows, -lse_rows * lse_factor)
    if pointers.sink is not None:
        # lse of a row without keys is the sink. If that is -3e38, the product is inf, and P of a hidden key,
        # exp2(-inf + inf), would be NaN.
        neg_lse_rows = tl.minimum(neg_lse_rows, 3e38)
    tl.store(pointers.neg_lse + offset + rows, neg_lse_rows)
    neg_delta_rows = tl.where(empty, 0.0, neg_delta_rows)
    tl.store(pointers.neg_delta + offset + rows, neg_delta_rows)
    if C.DQ_ACCUM_COLUMNS > 0:  # noqa: SIM102 - Triton prunes an if only by a constant condition
        # Later heads reuse memory that the backward kernel has zeroed again.
        if b * num_heads_q * (not C.VARLEN) + head < lengths.dq_accum_heads:
            elements = tl.arange(0, C.BLOCK_M * C.DQ_ACCUM_COLUMNS)
            zeros = tl.zeros_like(elements).to(tl.float32)
            tl.store(pointers.dq_accum + offset.to(tl.int64) * C.DQ_ACCUM_COLUMNS + elements, zeros)
    if pointers.sink is not None:
        score = tl.load(pointers.sink + head).to(tl.float32)
        p = tl.exp2((score - tl.where(empty, float("inf"), lse_rows)) * LOG2_E)
        # Parts instead of atomic additions: torch sums them in a fixed order.
        tl.store(pointers.dsink + pid, tl.sum(p * neg_delta_rows, 0))


def _rows_of(problem: Problem) -> int:
    """Return BLOCK_M, chosen so that tiles of out and dout fit the registers.

    Blocks of 16 to 128 rows take the same time within 1 %: reading out and dout is the time of the kernel.
    """
    return 64 if problem.head_dim_v <= 256 else 32


def preprocess_variant(
    problem: Problem, has_dlse: bool, dq_accum_columns: int, finds_sequence: bool = False
) -> PreprocessVariant:
    return PreprocessVariant(
        VARLEN=problem.varlen,
        FINDS_SEQUENCE=finds_sequence,
        HAS_DLSE=has_dlse,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_DV=padded(problem.head_dim_v),
        BLOCK_M=_rows_of(problem),
        LIMITS_LSE=problem.has_natural_scores,
        DQ_ACCUM_COLUMNS=dq_accum_columns,
    )


def preprocess_launch(
    problem: Problem,
    has_dlse: bool,
    lse_factor: float,
    counters: int = 0,
    dq_accum_columns: int = 0,
    dq_accum_heads: int = 0,
) -> CachedLaunch:
    """Return the launch of ``preprocess_kernel`` for tensors of one signature.

    Args:
        lse_factor: factor that converts lse to the unit of the kernel's scores. It is log2(e), or
            1 / softmax_scale if scores are products of q and k without the scale.
        counters: number of int32 counters of the following kernels. ``preprocess_kernel`` zeroes them.
        dq_accum_columns: columns of the fp32 accumulator of dQ; 0 if the following kernels have none.
        dq_accum_heads: number of query heads whose accumulator of dQ is zeroed. Each sequence's heads
            count separately, unless sequences are packed.
    """
    blocks = problem.batch * triton.cdiv(problem.seqlen_q, ROW_PAD) * (ROW_PAD // _rows_of(problem))
    rows = num_padded_rows(problem.seqlen_q, problem.total_q, problem.batch, problem.varlen)
    # As many blocks for each packed sequence as for the longest are several times the blocks that exist, if
    # lengths differ: 134,000 programs instead of 40,000 for 35 documents of 40 to 3,756 tokens and 64 heads.
    finds_sequence = problem.varlen and rows // _rows_of(problem) < blocks
    if finds_sequence:
        blocks = rows // _rows_of(problem)
    lengths = PreprocessLengths(
        problem.num_heads_q, problem.seqlen_q, problem.total_q, rows, counters, dq_accum_heads,
        problem.batch if finds_sequence else None,
    )  # fmt: skip
    return CachedLaunch(
        preprocess_kernel,
        blocks * problem.num_heads_q,
        (lse_factor, lengths),
        (preprocess_variant(problem, has_dlse, dq_accum_columns, finds_sequence),),
        None,
        pointers=PreprocessPointers,
        num_warps=NUM_WARPS,
    )


def preprocess_rows(
    preprocess: CachedLaunch,
    neg_lse: Tensor | int,
    neg_delta: Tensor | int,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    extras: OptionalTensors,
    dq_accum: Tensor | int | None = None,
    counters: Tensor | int | None = None,
) -> Tensor | None:
    """Launch ``preprocess``, which writes one float per padded row to each of ``neg_lse`` and ``neg_delta``.

    Returns the gradient of the sink (heads,), or None without a sink.
    """
    sink = extras.sink
    terms = None
    if sink is not None:
        heads = sink.shape[0]
        terms = out.new_empty((preprocess.programs // heads, heads), dtype=torch.float32)
    preprocess(
        out.device, out, dout, lse, dlse, neg_lse, neg_delta, terms, dq_accum, counters, extras.cu_seqlens_q,
        sink,
    )  # fmt: skip
    return None if sink is None or terms is None else terms.sum(0).to(sink.dtype)
