"""Write zeros to those blocks of a bias's gradient in which a mask hides scores.

This is needed if the backward kernel writes the gradient, because it skips blocks without visible scores.
"""

import triton.language as tl
from torch import Tensor

from flashtile.backends.common.cached_launch import CachedLaunch
from flashtile.backends.common.deferred import triton
from flashtile.backends.common.jit import kernel
from flashtile.problems.attention import Problem
from flashtile.problems.common import UNLIMITED

BLOCK = 128
"""Rows and keys of a block that is zeroed; no block of the backward is larger."""


@triton.jit
def zero_blocks(dbias, rows, begin, end, seqlen_q, seqlen_k, BLOCK: tl.constexpr):
    """Write zeros to ``dbias`` of one head, at ``rows`` [BLOCK] and the keys of blocks [begin, end)."""
    for n in range(begin, end):
        keys = n * BLOCK + tl.arange(0, BLOCK)
        elements = dbias + rows[:, None].to(tl.int64) * seqlen_k + keys[None, :]
        zeros = tl.zeros([BLOCK, BLOCK], dbias.dtype.element_ty)
        tl.store(elements, zeros, mask=(rows < seqlen_q)[:, None] & (keys < seqlen_k)[None, :])


@kernel(do_not_specialize=("seqlen_q", "row_blocks", "window_left", "window_right"))
def zero_hidden_kernel(
    dbias,
    seqlen_q,
    seqlen_k,
    row_blocks,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write zeros to all blocks of ``dbias`` in which a mask hides scores.

    Some of these blocks also have visible scores; the backward overwrites them later. Grid: one program for
    each block of rows of each head.
    """
    program = tl.program_id(0)
    first = program % row_blocks * BLOCK
    rows = first + tl.arange(0, BLOCK)
    dbias += (program // row_blocks).to(tl.int64) * seqlen_q * seqlen_k
    key_blocks = tl.cdiv(seqlen_k, BLOCK)
    offset = seqlen_k - seqlen_q
    begin = 0
    if HAS_LEFT:
        hidden = tl.maximum(first + BLOCK - 1 + offset - window_left, 0)
        begin = tl.minimum(tl.cdiv(hidden, BLOCK), key_blocks)
        zero_blocks(dbias, rows, 0, begin, seqlen_q, seqlen_k, BLOCK)
    if HAS_RIGHT:
        end = tl.maximum(first + offset + window_right + 1, 0) // BLOCK
        zero_blocks(dbias, rows, tl.maximum(begin, end), key_blocks, seqlen_q, seqlen_k, BLOCK)


class ZeroHidden:
    """Launch that zeroes hidden blocks of contiguous gradients of one signature."""

    def __init__(self, problem: Problem) -> None:
        left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
        row_blocks = triton.cdiv(problem.seqlen_q, BLOCK)
        self._kernel = CachedLaunch(
            zero_hidden_kernel,
            problem.batch * problem.num_heads_q * row_blocks,
            (problem.seqlen_q, problem.seqlen_k, row_blocks, left, right),
            (left != UNLIMITED, right != UNLIMITED, BLOCK),
            None,
        )

    def __call__(self, dbias: Tensor) -> None:
        self._kernel(dbias.device, dbias)
