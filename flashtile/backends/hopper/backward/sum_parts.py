"""Sum of the float32 parts of dK and dV, if programs share blocks of keys (``splits``).

One program adds all parts of its rows, from the first part to the last, and rounds the sum. The result
therefore has the same bits in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.config import padded
from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.launch import CachedLaunch
from flashtile.problems.attention import Problem

BLOCK = 1024
"""Elements of a gradient that a program computes: few, because each is loaded from every part."""


@dataclass(frozen=True)
class SumVariant:
    """Constants that the kernel is compiled for."""

    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    """HEAD_DIM padded to a power of two."""
    BLOCK_DV: int
    """HEAD_DIM_V padded to a power of two."""
    BLOCK: int


@triton.jit
def sum_rows(
    parts, gradient, block, rows, num_parts, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr
):
    """Write one block of rows of ``gradient`` [rows, WIDTH], the sum of ``parts`` [rows, num_parts, WIDTH]
    over the parts."""
    ROWS: tl.constexpr = C.BLOCK // BLOCK_D
    # The parts of a row follow one another in memory: they were written as so many heads
    # (``schedule.gradient_head``).
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (row < rows) & (column < WIDTH)
    elements = parts + row * (num_parts * WIDTH) + column
    # One load in flight. With four, a call took 34.9 instead of 36.7 us, but that form has not passed all GPU
    # tests yet.
    total = tl.load(elements, mask=inside, other=0.0)
    for part in range(1, num_parts):
        total += tl.load(elements + part * WIDTH, mask=inside, other=0.0)
    tl.store(gradient + row * WIDTH + column, total.to(gradient.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=("rows", "num_parts", "blocks_k"))
def sum_parts_kernel(dk_parts, dv_parts, dk, dv, rows, num_parts, blocks_k, C: tl.constexpr):
    """Write dK and dV, the sums of their ``num_parts`` parts. A row is one key head of one token.

    Grid: one program for each block of rows. The first ``blocks_k`` programs write dK, the others dV.
    """
    # One launch for both gradients, whose heads may have different sizes.
    block = tl.program_id(0)
    if block < blocks_k:
        sum_rows(dk_parts, dk, block, rows, num_parts, C.HEAD_DIM, C.BLOCK_D, C)
    else:
        sum_rows(dv_parts, dv, block - blocks_k, rows, num_parts, C.HEAD_DIM_V, C.BLOCK_DV, C)


def sum_variant(problem: Problem) -> SumVariant:
    d, dv = problem.head_dim, problem.head_dim_v
    return SumVariant(d, dv, padded(d), padded(dv), BLOCK)


class SumParts:
    """The launch that adds up the parts of dK and dV, and their memory, for calls of one signature."""

    def __init__(self, problem: Problem, parts: int) -> None:
        self._parts = parts
        self._some_unwritten = problem.seqused_k
        rows = problem.total_k * problem.num_heads_kv
        variant = sum_variant(problem)
        blocks_k, blocks_v = (triton.cdiv(rows, BLOCK // d) for d in (variant.BLOCK_D, variant.BLOCK_DV))
        self._kernel = CachedLaunch(
            sum_parts_kernel,
            blocks_k + blocks_v,
            (rows, parts, blocks_k),
            (variant,),
            None,
        )

    def allocate(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return memory for the parts of the gradients of ``k`` and ``v`` (:func:`shape_of_parts`).

        The memory is zeroed if tokens may be unused: no program writes their parts.
        """
        # float32, so that the sum is rounded once.
        allocate = k.new_zeros if self._some_unwritten else k.new_empty
        dk, dv = (allocate(shape_of_parts(t.shape, self._parts), dtype=torch.float32) for t in (k, v))
        return dk, dv

    def __call__(self, dk_parts: Tensor, dv_parts: Tensor, dk: Tensor, dv: Tensor) -> None:
        self._kernel(dk.device, dk_parts, dv_parts, dk, dv)


def shape_of_parts(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Return the shape of a tensor of all partial sums of a gradient: [..., heads * parts, head_dim]."""
    return (*shape[:-2], shape[-2] * parts, shape[-1])
