"""The launch of the gradient of an additive bias, which comes from one of three kernels.

* The backward kernel stores dS if each element of the bias belongs to one score (:func:`writes_ds`).
* ``bias_gradient`` recomputes the probabilities for other dense calls (:func:`has_own_gradient`).
* The portable backend's kernel serves the rest, such as packed sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.common.cached_launch import CachedLaunch
from flashtile.backends.common.launch import contiguous_strides
from flashtile.backends.common.tma import View, cells_view, dense_view
from flashtile.backends.hopper.backward.bias_gradient import BiasSizes, gradient_kernel
from flashtile.backends.hopper.backward.config import BackwardVariant
from flashtile.backends.hopper.backward.kernel import BackwardNumbers
from flashtile.backends.hopper.backward.preprocess import statistics_shape
from flashtile.backends.hopper.backward.zero_hidden import ZeroHidden
from flashtile.backends.hopper.columns import count_products
from flashtile.backends.hopper.config import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    WARPGROUP_ROWS,
    padded,
)
from flashtile.backends.hopper.launch import num_programs, score_numbers
from flashtile.backends.hopper.modifiers.launch import own_sizes
from flashtile.problems.attention import Problem
from flashtile.problems.common import LOG2_E, UNLIMITED

GRADIENT_STAGES = {64: 5, 128: 3}
"""Stages of ``gradient_kernel``, by the number of columns of its operands."""


@dataclass(frozen=True)
class BiasGradientVariant:
    """Compile-time parameters of the kernel of the bias's gradient."""

    HAS_LEFT: bool
    HAS_RIGHT: bool
    SOFTCAP: bool
    HAS_SCORE_MOD: bool
    """Scores are more than raw products times a positive scale (``BackwardVariant``)."""
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    """Columns of all operands in shared memory."""
    STAGES: int
    """Number of pairs of operands in shared memory."""
    PRODUCTS: int
    """Number of wgmma products that dO V^T takes (``count_products``)."""
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    BLOCK_M: int = 128
    BLOCK_N: int = 128


def writes_ds(problem: Problem, bias: Tensor) -> bool:
    """Return whether the backward kernel writes the gradient of the bias, by storing dS.

    This gradient must be needed, and it must equal dS. The two are equal if each score has its own element of
    the bias and there is no soft-cap. With a soft-cap, dS also contains the derivative of the soft-cap, which
    the gradient of the bias does not. TMA requires that seqlen_k is a multiple of 8.
    """
    scores = problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k
    dense = not (problem.varlen or problem.seqused_k) and own_sizes(bias) == scores
    return problem.bias_grad and dense and not problem.softcap and problem.seqlen_k % 8 == 0


def has_own_gradient(problem: Problem) -> bool:
    """Return whether ``gradient_kernel`` supports the shapes of a call. If not, the portable kernel runs."""
    dense = not (problem.varlen or problem.seqused_k)
    return dense and padded(problem.head_dim) == padded(problem.head_dim_v) and problem.seqlen_k % 8 == 0


class BiasGradient:
    """Prepares and computes the gradient of the bias for calls of one signature.

    Call it after ``backward_kernel``, with ``(dbias, dout, q, k, v, statistics, extras)``.
    """

    def __init__(self, problem: Problem, variant: BackwardVariant) -> None:
        self._problem, self._variant = problem, variant
        self._kernel: CachedLaunch | None = None
        self._zero_hidden: ZeroHidden | None = None

    def allocate(self, bias: Tensor) -> Tensor:
        """Return memory for dbias.

        If the backward kernel writes dbias, blocks with hidden scores are zeroed here.
        """
        dbias = bias.new_empty(bias.shape)
        variant = self._variant
        if variant.STORES_DS and (variant.HAS_LEFT or variant.HAS_RIGHT):
            if self._zero_hidden is None:
                self._zero_hidden = ZeroHidden(self._problem)
            self._zero_hidden(dbias)
        return dbias

    def __call__(
        self, dbias: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, statistics: Tensor, extras: Any
    ) -> None:
        """Write ``dbias``, unless the backward kernel has written it.

        ``statistics`` starts with neg_lse and neg_delta.
        """
        problem, variant, bias = self._problem, self._variant, extras.bias
        if variant.STORES_DS:
            return
        heads, rows = statistics_shape(problem)
        neg_lse, neg_delta = statistics[: 2 * heads * rows].view(2, heads, rows)
        if has_own_gradient(problem) and own_sizes(bias) == bias.shape:
            if self._kernel is None:
                self._kernel = gradient_launch(problem, variant.HAS_SCORE_MOD, q, k, v, bias)
            self._kernel(q.device, q, k, v, dout, neg_lse, neg_delta, bias, dbias)
            return
        from flashtile.backends.portable import configure_backward
        from flashtile.backends.portable.attention.launch import dbias_kernel_of, optional_pointers

        if self._kernel is None:
            config = configure_backward(problem)
            self._kernel = dbias_kernel_of(problem, config, (q, k, v), extras, rows)
        if not variant.HAS_SCORE_MOD:  # neg_lse is in units of raw products
            neg_lse = neg_lse * (problem.softmax_scale * LOG2_E)
        self._kernel(q.device, q, k, v, dout, neg_lse, neg_delta, dbias, *optional_pointers(extras))


def gradient_variant_of(problem: Problem, has_score_mod: bool) -> BiasGradientVariant:
    """Return the compile-time parameters of ``gradient_kernel``.

    ``has_score_mod`` is HAS_SCORE_MOD of the backward kernel's variant.
    """
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    columns = padded(problem.head_dim)
    return BiasGradientVariant(
        HAS_LEFT=left != UNLIMITED,
        HAS_RIGHT=right != UNLIMITED,
        SOFTCAP=problem.softcap > 0,
        HAS_SCORE_MOD=has_score_mod,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=columns,
        STAGES=GRADIENT_STAGES[columns],
        PRODUCTS=count_products.fn(problem.head_dim_v),
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[2],
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
    )


def gradient_sizes(problem: Problem, variant: BiasGradientVariant, bias: Tensor) -> BiasSizes:
    """Return the integer arguments of ``gradient_kernel``."""
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    batch, heads, rows, keys = bias.shape
    blocks = math.ceil(rows / variant.BLOCK_M), math.ceil(keys / variant.BLOCK_N)
    return BiasSizes(
        num_tiles=batch * heads * blocks[0] * blocks[1],
        row_blocks=blocks[0],
        key_blocks=blocks[1],
        batch=problem.batch,
        num_heads=problem.num_heads_q,
        group=problem.group_size,
        bias_batch=batch,
        bias_heads=heads,
        window_left=left,
        window_right=right,
        offset=problem.seqlen_k - problem.seqlen_q,
    )


def gradient_views(
    problem: Problem, variant: BiasGradientVariant, q: Tensor, k: Tensor, v: Tensor, bias: Tensor
) -> dict[str, View]:
    """Return the TMA view of each tensor. The keys are the names of ``gradient_kernel``'s parameters."""
    dtype, columns = problem.dtype, variant.BLOCK_D
    heads, rows = statistics_shape(problem)
    statistics = View([heads, rows], [rows, 1], [1, variant.BLOCK_M], torch.float32, swizzled=False)
    block = WARPGROUP_ROWS, variant.BLOCK_N
    return {
        "q_desc": dense_view(q.shape, q.stride(), variant.BLOCK_M, columns, dtype),
        "k_desc": dense_view(k.shape, k.stride(), variant.BLOCK_N, columns, dtype),
        "v_desc": dense_view(v.shape, v.stride(), variant.BLOCK_N, columns, dtype),
        "do_desc": dense_view(
            problem.out_shape, contiguous_strides(problem.out_shape), variant.BLOCK_M, columns, dtype
        ),
        "neg_lse_desc": statistics,
        "neg_delta_desc": statistics,
        "bias_desc": cells_view(bias.shape, bias.stride(), *block, dtype),
        "dbias_desc": cells_view(bias.shape, contiguous_strides(bias.shape), *block, dtype),
    }


def gradient_launch(
    problem: Problem, has_score_mod: bool, q: Tensor, k: Tensor, v: Tensor, bias: Tensor
) -> CachedLaunch:
    """Return the launch of ``gradient_kernel`` for tensors of one signature."""
    variant = gradient_variant_of(problem, has_score_mod)
    sizes = gradient_sizes(problem, variant, bias)
    numbers = BackwardNumbers(scale=problem.softmax_scale, **score_numbers(problem), zero=0.0)
    lse_scale = 1.0 if has_score_mod else problem.softmax_scale * LOG2_E
    return CachedLaunch(
        gradient_kernel,
        num_programs(sizes.num_tiles, q.device),
        (sizes, numbers, lse_scale),
        (variant,),
        None,
        tuple(gradient_views(problem, variant, q, k, v, bias).values()),
        maxnreg=LAUNCH_REGISTERS[2],
    )
