"""The launch of the Hopper backward for head sizes over 128: its kernels are preprocess, dK and dV, dQ and,
if programs share blocks of keys, the sum of parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.common.config import contiguous_strides
from flashtile.backends.common.counters import zeroed_counters
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tma import View, dense_view, ragged_view
from flashtile.backends.hopper.backward import launch as backward
from flashtile.backends.hopper.backward.config import (
    GRADIENT_PART,
    BackwardVariant,
    WideBackwardConfig,
)
from flashtile.backends.hopper.backward.costs import as_scheduled, last_heads
from flashtile.backends.hopper.backward.halves_dq import halves_dq_kernel
from flashtile.backends.hopper.backward.preprocess import Preprocess, statistics_shape
from flashtile.backends.hopper.backward.sum_parts import SumParts
from flashtile.backends.hopper.backward.wide_dkv import DkvPointers, dkv_kernel
from flashtile.backends.hopper.backward.wide_dq import DqPointers, dq_kernel
from flashtile.backends.hopper.config import LAUNCH_REGISTERS, WARPGROUP_ROWS, padded, persistent_programs
from flashtile.backends.hopper.forward import launch as forward
from flashtile.backends.hopper.forward.config import ForwardVariant
from flashtile.backends.hopper.modifiers import FunctionTensors
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH, TileTable
from flashtile.problems.attention import OptionalTensors, Problem
from flashtile.problems.common import LOG2_E
from flashtile.problems.masks import MAX_CAPTURED


@dataclass(frozen=True)
class DqVariant(ForwardVariant):
    """Constants that the kernel of dQ is compiled for."""

    HEAD_DIM: int
    HEAD_DIM_V: int


def variants(problem: Problem, config: WideBackwardConfig) -> tuple[BackwardVariant, DqVariant]:
    """Return the variants of the kernels of (dK and dV, dQ). The latter has the forward's tile scheduler."""
    # Both kernels sum in registers only, so they are deterministic without an order of additions.
    dkv = replace(backward.variant_of(problem, config), DETERMINISTIC=False)
    dq = replace(
        forward.variant_of(problem, config.rows, has_queue=False),
        SINK=False,
        PACK=1,
        COLUMN_SPLITS=1,
    )
    return dkv, DqVariant(**vars(dq), HEAD_DIM=problem.head_dim, HEAD_DIM_V=problem.head_dim_v)


class WideKernels(NamedTuple):
    """The prepared launches of one signature, in launch order."""

    preprocess: Preprocess
    fill_table_k: TileTable | None
    fill_table_q: TileTable | None
    dkv: CachedLaunch
    dq: CachedLaunch
    sum_parts: SumParts | None
    of_keys: FunctionTensors | None
    """For ``dkv``: prepares the tensors that score and mask functions read; None without functions."""
    of_queries: FunctionTensors | None
    """For ``dq``: prepares the tensors that score and mask functions read; None without functions."""


class WideBackwardLaunch:
    """Launch for tensors of one signature:
    ``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink, None)``.

    With score or mask functions, None follows for each of MAX_CAPTURED captured tensors.
    """

    def __init__(self, problem: Problem, config: WideBackwardConfig) -> None:
        self._problem = problem
        self._config = config
        self._dkv, self._dq = variants(problem, config)
        self._kernels: WideKernels | None = None

    def __call__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        extras: OptionalTensors,
    ) -> tuple[Tensor | None, ...]:
        cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, *_ = extras
        kernels = self._kernels
        if kernels is None:  # assigned only when complete, since other threads may read it
            kernels = self._kernels = self._prepare(dlse, q, k, v, extras)
        device = q.device
        # ``_workspace`` must stay alive until all kernels that get addresses of its parts are launched.
        dout, dq, dk, dv, dsink, _workspace, neg_lse, neg_delta, counters, _ = kernels.preprocess(
            kernels.dq, dout, dlse, q, k, v, out, lse, extras
        )
        table_k = table_q = None
        if kernels.fill_table_k is not None and kernels.fill_table_q is not None:
            table_k = kernels.fill_table_k(cu_seqlens_k, cu_seqlens_q, None)
            table_q = kernels.fill_table_q(cu_seqlens_q, cu_seqlens_k, seqused_k)
        written = dk, dv
        if kernels.sum_parts is not None:
            written = kernels.sum_parts.allocate(k, v)
        read = seqused_k, alibi_slopes
        of_keys: Any = None, None
        of_queries: Any = None, None
        none: tuple[None, ...] = ()
        if kernels.of_keys is not None and kernels.of_queries is not None:
            # The last tensors must stay alive until the kernels that get their addresses are launched.
            *of_keys, _tensors = kernels.of_keys(extras, lse, kernels.dkv.takes_addresses)
            *of_queries, _more = kernels.of_queries(extras, lse, kernels.dq.takes_addresses)
            none = (None,) * MAX_CAPTURED
            if self._dq.QUEUED:  # the kernel resets the counter (leave_queue)
                table_q = zeroed_counters(device, TABLE_WIDTH.value)
        kernels.dkv(device, q, k, v, dout, neg_lse, neg_delta, *written, table_k, *read, counters, *of_keys)
        kernels.dq(device, q, k, v, dout, dq, neg_lse, neg_delta, table_q, *read, *of_queries)
        if kernels.sum_parts is not None:
            kernels.sum_parts(*written, dk, dv)
        return dq, dk, dv, dsink, None, *none

    def _prepare(self, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, extras: Any) -> WideKernels:
        problem, config, dkv, dq = self._problem, self._config, self._dkv, self._dq
        alibi_slopes = extras.alibi_slopes
        of_dkv = views(problem, dkv, config.parts, q, k, v)
        of_dq = views(problem, dkv, config.parts, q, k, v, of_dq=True)
        numbers = backward.numbers_of(problem)
        scheduled = as_scheduled(problem, config.HEAD_SPLITS)
        blocks_k = backward.schedule_of(scheduled, config, k, alibi_slopes)
        blocks_q = forward.schedule_of(problem, dq, k, alibi_slopes)
        per_block = config.ROW_SPLITS * dkv.COLUMN_SPLITS
        programs = persistent_programs(blocks_k.num_tiles * per_block, q.device)
        last = last_heads(scheduled, dkv.BLOCK_N, programs, per_block)
        blocks_k = blocks_k._replace(swizzle=last)
        compute_dkv = CachedLaunch(
            dkv_kernel,
            programs,
            (blocks_k, numbers),
            (dkv,),
            None,
            tuple(view for name, view in of_dkv.items() if name != "dq_desc"),
            DkvPointers,
            maxnreg=LAUNCH_REGISTERS[2],
        )
        compute_dq = CachedLaunch(
            dq_kernel_of(dkv),
            persistent_programs(blocks_q.num_tiles, q.device),
            (statistics_shape(problem)[1], blocks_q, numbers),
            (dq,),
            None,
            tuple(of_dq[name] for name in ("q_desc", "k_desc", "v_desc", "do_desc", "dq_desc")),
            DqPointers,
            maxnreg=LAUNCH_REGISTERS[2],
        )
        return WideKernels(
            Preprocess(problem, dlse is not None, LOG2_E, counters=1),
            backward.key_tile_table(problem, dkv.BLOCK_N),
            forward.tile_table(problem, dq),
            compute_dkv,
            compute_dq,
            SumParts(problem, config.parts) if config.parts > 1 else None,
            *(
                None if problem.mods is None else FunctionTensors(problem.mods, extras, by_keys=by_keys)
                for by_keys in (True, False)
            ),
        )


def dq_kernel_of(dkv: BackwardVariant) -> Any:
    """Return the kernel of dQ that goes with a variant of ``dkv_kernel``."""
    return dq_kernel if dkv.COLUMN_SPLITS == 1 else halves_dq_kernel


def gradient_columns(head_dim: int) -> int:
    """Return the columns of a gradient that one TMA store writes, for head sizes up to 256.

    These are all columns, or 64 for head sizes of 129 to 192.
    """
    return GRADIENT_PART if 128 < head_dim <= 192 else padded(head_dim)


def views(
    problem: Problem, dkv: BackwardVariant, parts: int, q: Tensor, k: Tensor, v: Tensor, of_dq: bool = False
) -> dict[str, View]:
    """Return the TMA view of each tensor, by the name of the kernels' parameter.

    Blocks have 64 rows. With COLUMN_SPLITS they have half of the columns, and blocks of the tensors that a
    work tile walks have 32 rows: k and v in the kernel of dQ (``of_dq``), else q and dO.
    """
    dtype, resident = problem.dtype, WARPGROUP_ROWS
    rows_q, rows_k = (resident, dkv.BLOCK_M) if of_dq else (dkv.BLOCK_M, resident)
    block_d, block_dv = dkv.BLOCK_D // dkv.COLUMN_SPLITS, dkv.BLOCK_DV // dkv.COLUMN_SPLITS
    dk_columns, dv_columns = block_d, block_dv
    if dkv.COLUMN_SPLITS == 1:
        dk_columns, dv_columns = gradient_columns(problem.head_dim), gradient_columns(problem.head_dim_v)
    view_q = ragged_view if problem.varlen else dense_view
    view_k = ragged_view if problem.varlen or problem.seqused_k else dense_view
    heads, padded_rows = statistics_shape(problem)
    statistics = View([heads, padded_rows], [padded_rows, 1], [1, rows_q], torch.float32, swizzled=False)
    return {
        "q_desc": view_q(q.shape, q.stride(), rows_q, block_d, dtype),
        "k_desc": view_k(k.shape, k.stride(), rows_k, block_d, dtype),
        "v_desc": view_k(v.shape, v.stride(), rows_k, block_dv, dtype),
        "do_desc": view_q(problem.out_shape, contiguous_strides(problem.out_shape), rows_q, block_dv, dtype),
        "neg_lse_desc": statistics,
        "neg_delta_desc": statistics,
        "dq_desc": view_q(q.shape, contiguous_strides(q.shape), resident, block_d, dtype),
        "dk_desc": backward.gradient_view(problem, parts, k.shape, dk_columns),
        "dv_desc": backward.gradient_view(problem, parts, v.shape, dv_columns),
    }
