"""From a call with a bias to the arguments of the Hopper kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.common.kept_kernel import KeptKernel
from flashtile.backends.common.launch import contiguous_strides
from flashtile.backends.common.tma import View, cells_view, dense_view
from flashtile.backends.hopper.backward import launch as plain_backward
from flashtile.backends.hopper.backward.config import BackwardConfig
from flashtile.backends.hopper.backward.launch import Kernels
from flashtile.backends.hopper.backward.preprocess import statistics_shape
from flashtile.backends.hopper.bias.backward import backward_kernel
from flashtile.backends.hopper.bias.config import (
    GRADIENT_STAGES,
    BiasBackwardVariant,
    BiasForwardConfig,
    BiasForwardVariant,
    GradientVariant,
    has_own_gradient,
)
from flashtile.backends.hopper.bias.forward import Numbers, forward_kernel
from flashtile.backends.hopper.bias.gradient import Sizes, gradient_kernel
from flashtile.backends.hopper.bias.hidden import ZeroHidden
from flashtile.backends.hopper.bias.tiles import SQUARE
from flashtile.backends.hopper.columns import count_products
from flashtile.backends.hopper.config import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    WARPGROUP_ROWS,
    padded,
)
from flashtile.backends.hopper.forward import launch as plain_forward
from flashtile.backends.hopper.forward.config import ForwardVariant
from flashtile.backends.hopper.launch import arguments_of, num_programs, score_numbers
from flashtile.backends.portable import configure_backward
from flashtile.backends.portable.launch import dbias_kernel_of, without_sink
from flashtile.problems.attention import Problem
from flashtile.problems.common import LOG2_E, UNLIMITED


def variant_of(problem: Problem, config: BiasForwardConfig, shared: bool = True) -> BiasForwardVariant:
    """What the forward kernel is compiled for. ``shared``: sequences share the bias of a head."""
    fields = vars(plain_forward.variant_of(problem, config))
    fields |= {"HAS_SCORE_MOD": False}
    return BiasForwardVariant(
        **fields, BIAS_STAGES=config.BIAS_STAGES, SEQUENCES_FIRST=shared and not problem.varlen
    )


def numbers_of(problem: Problem) -> Numbers:
    """The floats of the forward."""
    rate = score_numbers(problem)["softcap_rate"]
    return Numbers(LOG2_E, rate, problem.softcap or problem.softmax_scale)


def own_sizes(bias: Tensor) -> tuple[int, ...]:
    """Its shape, 1 for sequences or heads that share it by a stride of 0."""
    return tuple(size if step else 1 for size, step in zip(bias.shape, bias.stride(), strict=True))


def is_shared(problem: Problem, bias: Tensor) -> bool:
    """Whether several sequences have the bias of a head."""
    return own_sizes(bias)[0] == 1 < problem.batch


def is_ds(problem: Problem, bias: Tensor) -> bool:
    """Whether the gradient of the bias is wanted, and is dS: each score has a cell of the bias of its own,
    and no soft-cap makes dS the gradient of something else."""
    cells = problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k
    dense = not (problem.varlen or problem.seqused_k) and own_sizes(bias) == cells
    return problem.bias_grad and dense and not problem.softcap and problem.seqlen_k % 8 == 0


def integers_of(bias: Tensor) -> dict[str, int]:
    """The kernels' integers that say how the bias is broadcast."""
    batch, heads, _, _ = own_sizes(bias)
    return {"bias_batch": batch, "bias_heads": heads}


def rows_view(problem: Problem, variant: ForwardVariant, bias: Tensor) -> dict[str, View]:
    """Of the bias in the forward: a warpgroup's rows, a block of keys."""
    block = WARPGROUP_ROWS, variant.BLOCK_N
    return {"bias_desc": cells_view(own_sizes(bias), bias.stride(), *block, problem.dtype)}


def squares_views(problem: Problem, bias: Tensor, stores_ds: bool) -> dict[str, View]:
    """Of the bias in the backward, and of its gradient if that is dS."""
    block = SQUARE.value, SQUARE.value
    of_bias = cells_view(own_sizes(bias), bias.stride(), *block, problem.dtype)
    of_gradient = of_bias
    if stores_ds:
        of_gradient = cells_view(bias.shape, contiguous_strides(bias.shape), *block, problem.dtype)
    return {"bias_desc": of_bias, "dbias_desc": of_gradient}


class ForwardLaunch(plain_forward.ForwardLaunch):
    """``(q, k, v, extras[, out, lse]) -> (out, lse)`` for tensors of one signature."""

    _config: BiasForwardConfig
    kernel = forward_kernel
    _variant_of = staticmethod(variant_of)
    _numbers_of = staticmethod(numbers_of)

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, extras: Any) -> plain_forward.Kernels:
        shared = is_shared(self._problem, extras.bias)
        self._variant = variant_of(self._problem, self._config, shared)
        return super()._prepare(q, k, v, extras)

    def _more_integers(self, extras: Any) -> dict[str, int]:
        return integers_of(extras.bias)

    def _more_views(self, extras: Any) -> dict[str, View]:
        return rows_view(self._problem, self._variant, extras.bias)

    def _moved_tensors(self, extras: Any) -> tuple:
        return (extras.bias,)


def gradient_variant_of(problem: Problem, has_score_mod: bool) -> GradientVariant:
    """What the kernel of the bias's gradient is compiled for, beside this backward."""
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    columns = padded(problem.head_dim)
    return GradientVariant(
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


def gradient_sizes(problem: Problem, variant: GradientVariant, bias: Tensor) -> Sizes:
    """The integers of the gradient's kernel."""
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    batch, heads, rows, keys = bias.shape
    blocks = math.ceil(rows / variant.BLOCK_M), math.ceil(keys / variant.BLOCK_N)
    return Sizes(
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
    problem: Problem, variant: GradientVariant, q: Tensor, k: Tensor, v: Tensor, bias: Tensor
) -> dict[str, View]:
    """Of each tensor that TMA moves, by the parameters of the gradient's kernel."""
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
) -> KeptKernel:
    """The kernel of the bias's gradient for tensors of one signature."""
    variant = gradient_variant_of(problem, has_score_mod)
    sizes = gradient_sizes(problem, variant, bias)
    scalars = sizes._asdict() | plain_backward.numbers_of(problem)._asdict()
    scalars["lse_scale"] = 1.0 if has_score_mod else problem.softmax_scale * LOG2_E
    return KeptKernel(
        gradient_kernel,
        num_programs(sizes.num_tiles, q.device),
        arguments_of(gradient_kernel, scalars),
        (variant,),
        None,
        arguments_of(gradient_kernel, gradient_views(problem, variant, q, k, v, bias)),
        maxnreg=LAUNCH_REGISTERS[2],
    )


def backward_variant_of(
    problem: Problem, config: BackwardConfig, shared: bool = True, stores_ds: bool = False
) -> BiasBackwardVariant:
    """What the backward kernel is compiled for. ``shared``: sequences share the bias of a head."""
    fields = vars(plain_backward.variant_of(problem, config))
    return BiasBackwardVariant(
        **fields, SEQUENCES_FIRST=shared and not problem.varlen, STORES_DS=stores_ds
    )


class BackwardLaunch(plain_backward.BackwardLaunch):
    """``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink, dbias)``, of one signature.

    dbias is dS as the backward makes it if no two scores share a cell of the bias. Else it comes from a
    kernel of its own (``gradient``), which recomputes the probabilities; for packed sequences and the like
    from the portable backend's.
    """

    kernel = backward_kernel
    _variant_of = staticmethod(backward_variant_of)

    def __init__(self, problem: Problem, config: BackwardConfig) -> None:
        super().__init__(problem, config)
        self._gradient: KeptKernel | None = None
        self._zero_hidden: ZeroHidden | None = None

    def _prepare(self, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, extras: Any) -> Kernels:
        problem, bias = self._problem, extras.bias
        stores_ds = is_ds(problem, bias)
        self._variant = backward_variant_of(problem, self._config, is_shared(problem, bias), stores_ds)
        self._has_own_gradient = has_own_gradient(problem) and own_sizes(bias) == bias.shape
        return super()._prepare(dlse, q, k, v, extras)

    def _more_integers(self, extras: Any) -> dict[str, int]:
        return integers_of(extras.bias)

    def _more_views(self, extras: Any) -> dict[str, View]:
        return squares_views(self._problem, extras.bias, self._variant.STORES_DS)

    def _moved_tensors(self, extras: Any) -> tuple:
        bias, variant = extras.bias, self._variant
        if not variant.STORES_DS:
            return bias, bias
        dbias = bias.new_empty(bias.shape)
        if variant.HAS_LEFT or variant.HAS_RIGHT:
            if self._zero_hidden is None:
                self._zero_hidden = ZeroHidden(self._problem)
            self._zero_hidden(dbias)
        return bias, dbias

    def _bias_gradient(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, statistics: Tensor, extras: Any, moved: tuple
    ) -> Tensor | None:
        problem = self._problem
        if not problem.bias_grad:
            return None
        if self._variant.STORES_DS:
            return moved[1]
        heads, rows = statistics_shape(problem)
        bias = extras.bias
        neg_lse, neg_delta = statistics[: 2 * heads * rows].view(2, heads, rows)
        dbias = bias.new_empty(bias.shape)
        if self._has_own_gradient:
            if self._gradient is None:
                self._gradient = gradient_launch(problem, self._variant.HAS_SCORE_MOD, q, k, v, bias)
            self._gradient(q.device, q, k, v, dout, neg_lse, neg_delta, bias, dbias)
            return dbias
        if self._gradient is None:
            config = configure_backward(problem)
            self._gradient = dbias_kernel_of(problem, config, (q, k, v), extras, rows)
        if not self._variant.HAS_SCORE_MOD:  # its units are those of raw products
            neg_lse = neg_lse * (problem.softmax_scale * LOG2_E)
        self._gradient(q.device, q, k, v, dout, neg_lse, neg_delta, dbias, *without_sink(extras))
        return dbias
