"""From tensors to the kernels of the Hopper backward for head sizes over 128: prepare, dK and dV, dQ."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from flashtile.backends.common.kept_kernel import KeptKernel
from flashtile.backends.common.launch import contiguous_strides, stride_of_two
from flashtile.backends.common.preprocess import preprocess_launch
from flashtile.backends.common.tma import View, dense_view, ragged_view, rows_between_sequences
from flashtile.backends.hopper.backward import launch as backward_launch
from flashtile.backends.hopper.backward.wide_dkv import dkv_kernel
from flashtile.backends.hopper.backward.wide_dq import dq_kernel
from flashtile.backends.hopper.config import (
    LAUNCH_REGISTERS,
    WARPGROUP_ROWS,
    BackwardVariant,
    ForwardConfig,
    Variant,
    WideBackwardConfig,
    padded,
)
from flashtile.backends.hopper.forward import launch
from flashtile.backends.hopper.forward.launch import (
    num_programs,
    schedule_scalars,
    score_numbers,
    table_items,
    table_kernel,
)
from flashtile.backends.hopper.forward.schedule import TABLE_WIDTH
from flashtile.problem import LOG2_E, Extras, Problem


def variants(problem: Problem, config: WideBackwardConfig) -> tuple[BackwardVariant, Variant]:
    """Of the kernel of dK and dV, and of that of dQ, which has the forward's schedule."""
    dkv = replace(backward_launch.variant_of(problem, config), DETERMINISTIC=False)  # it always is
    rows = ForwardConfig(2, config.BLOCK_N, paired_below=config.paired_below)
    dq = replace(
        launch.variant_of(problem, rows, has_queue=False), SINK=False, PACK=1, KV_GROUP=problem.group_size
    )
    return dkv, dq


class WideBackwardLaunch:
    """``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink)`` for tensors of one signature."""

    def __init__(self, problem: Problem, config: WideBackwardConfig) -> None:
        self._problem = problem
        self._dkv, self._dq = variants(problem, config)
        self._begin = backward_launch.Beginning(problem, counters=1)
        self._kernels: tuple[KeptKernel, KeptKernel, KeptKernel] | None = None

    def __call__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        extras: Extras,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, _ = extras
        if self._kernels is None:
            self._kernels = self._prepare(dlse, q, k, v, alibi_slopes)
        prepare, compute_dkdv, compute_dq = self._kernels
        device = q.device
        dout, dq, dk, dv, dsink, _workspace, shift, dp_shift, next_item, _ = self._begin(
            prepare, compute_dq, dout, dlse, q, k, v, out, lse, extras
        )
        table_k = table_q = lse
        if self._problem.varlen:
            table_k, table_q = (q.new_empty(*shape, dtype=torch.int32) for shape in self._table_shapes)
            fill_k, fill_q = self._table_kernels
            fill_k(device, table_k, cu_seqlens_k, cu_seqlens_q, lse)
            fill_q(device, table_q, cu_seqlens_q, cu_seqlens_k, lse if seqused_k is None else seqused_k)
        used = lse if seqused_k is None else seqused_k
        slopes = lse if alibi_slopes is None else alibi_slopes
        compute_dkdv(device, q, k, v, dout, shift, dp_shift, dk, dv, table_k, used, slopes, next_item)
        compute_dq(device, q, k, v, dout, dq, shift, dp_shift, table_q, used, slopes)
        return dq, dk, dv, dsink

    def _prepare(
        self, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None
    ) -> tuple[KeptKernel, KeptKernel, KeptKernel]:
        problem, dkv, dq = self._problem, self._dkv, self._dq
        of = views(problem, q, k, v, self._begin.statistics_shape)
        inputs = (of["q"], of["k"], of["v"], of["do"])
        blocks = math.ceil(problem.seqlen_k / dkv.BLOCK_N)
        items = backward_launch.key_items(problem, dkv.BLOCK_N)
        if problem.varlen:
            self._table_shapes = (
                (1 + items, TABLE_WIDTH.value),
                (1 + table_items(problem, dq), TABLE_WIDTH.value),
            )
            fill_k = backward_launch.key_table_kernel(problem, dkv.BLOCK_N)
            self._table_kernels = (fill_k, table_kernel(problem, dq))
        left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
        slope_stride = stride_of_two(alibi_slopes)
        numbers = (problem.softmax_scale, *score_numbers(problem))
        options = {"maxnreg": LAUNCH_REGISTERS[2]}
        lengths = (problem.seqlen_q, problem.seqlen_k, rows_between_sequences(k))
        scalars: tuple = (items * problem.num_heads_kv, blocks, problem.num_heads_kv, *lengths, left, right)
        programs = num_programs(scalars, q.device)
        compute_dkdv = KeptKernel(
            dkv_kernel,
            programs,
            (*scalars, slope_stride, *numbers),
            (dkv,),
            None,
            (*inputs, of["statistics"], of["statistics"], of["dk"], of["dv"]),
            **options,
        )
        scalars = schedule_scalars(problem, dq, rows_between_sequences(k))
        programs = num_programs(scalars, q.device)
        scalars = (self._begin.statistics_shape[1], *scalars, slope_stride, *numbers)
        compute_dq = KeptKernel(dq_kernel, programs, scalars, (dq,), None, (*inputs, of["dq"]), **options)
        return preprocess_launch(problem, dlse is not None, LOG2_E, counters=1), compute_dkdv, compute_dq


def views(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, statistics_shape: tuple[int, int]
) -> dict[str, View]:
    """Of each tensor that TMA moves: 64 rows of a head at a time, of the statistics those of 64 rows."""
    rows, dtype = WARPGROUP_ROWS, problem.dtype
    block_d, block_dv = padded(problem.head_dim), padded(problem.head_dim_v)
    view_q = ragged_view if problem.varlen else dense_view
    view_k = ragged_view if problem.varlen or problem.seqused_k else dense_view
    count, padded_row_count = statistics_shape
    return {
        "q": view_q(q.shape, q.stride(), rows, block_d, dtype),
        "k": view_k(k.shape, k.stride(), rows, block_d, dtype),
        "v": view_k(v.shape, v.stride(), rows, block_dv, dtype),
        "do": view_q(problem.out_shape, contiguous_strides(problem.out_shape), rows, block_dv, dtype),
        "statistics": View(
            [count, padded_row_count], [padded_row_count, 1], [1, rows], torch.float32, swizzled=False
        ),
        "dq": view_q(q.shape, contiguous_strides(q.shape), rows, block_d, dtype),
        "dk": view_k(k.shape, contiguous_strides(k.shape), rows, block_d, dtype),
        "dv": view_k(v.shape, contiguous_strides(v.shape), rows, block_dv, dtype),
    }
