"""From the fp32 accumulator of dQ to dQ: scaled, cast, and in order (see ``backward.in_register_order``)."""

import triton
import triton.language as tl

from flashtile.backends.kernel_cache import kernel
from flashtile.backends.portable.backward_prepare import statistics_offset
from flashtile.backends.portable.tiles import RUNTIME_INTEGERS, sequence

TILE_ROWS = 64
"""Rows of a tile of the accumulator: those of a warpgroup."""


@triton.jit
def cell(row, column, COLUMNS: tl.constexpr):
    """Where (row, column) of a 64 x COLUMNS part of dQ lies: register (j, a, b) of thread (w, r, t).

    Row 16 w + 8 a + r and column 8 j + 2 t + b, as wgmma's accumulator has them.
    """
    register = column // 8 * 2 + row // 8 % 2
    thread = row // 16 * 64 + row % 8 * 8
    return register * 256 + thread + column % 8


@kernel(do_not_specialize=RUNTIME_INTEGERS)
def finish_kernel(
    accumulator,
    dq,
    cu_seqlens_q,
    softmax_scale,
    num_heads_q,
    seqlen_q,
    total_q,
    padded_rows,
    VARLEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PART_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROW_PAD: tl.constexpr,
):
    """Grid: (blocks of BLOCK_M rows * heads * batch,). dq is contiguous; parts are 64 x PART_COLUMNS."""
    num_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    head = pid % num_heads_q
    block = pid // num_heads_q % num_blocks
    b = pid // num_heads_q // num_blocks
    start_q, len_q = sequence(cu_seqlens_q, b, seqlen_q, total_q, VARLEN)
    if block * BLOCK_M >= len_q:
        return
    first = statistics_offset(b, head, start_q, num_heads_q, padded_rows, VARLEN, ROW_PAD) + block * BLOCK_M
    rows = tl.arange(0, BLOCK_M)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    part = columns // PART_COLUMNS * (BLOCK_M * PART_COLUMNS)
    cells = part + cell(rows, columns % PART_COLUMNS, PART_COLUMNS)  # [BLOCK_M, BLOCK_D]
    values = tl.load(accumulator + first.to(tl.int64) * BLOCK_D + cells) * softmax_scale
    row = block * BLOCK_M + rows
    if VARLEN:
        token = start_q + row
    else:
        token = b.to(tl.int64) * seqlen_q + row
    target = dq + (token * num_heads_q + head) * HEAD_DIM + columns
    tl.store(target, values.to(dq.dtype.element_ty), mask=(row < len_q) & (columns < HEAD_DIM))
