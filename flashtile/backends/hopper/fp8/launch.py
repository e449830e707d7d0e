"""From e4m3 tensors and their scales to the FP8 kernel's arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.common.kept_kernel import KeptKernel
from flashtile.backends.hopper.config import LAUNCH_REGISTERS
from flashtile.backends.hopper.forward import launch as hopper
from flashtile.backends.hopper.forward.schedule import TABLE_WIDTH
from flashtile.backends.hopper.fp8.config import PRODUCER_WARPS, REGISTERS, Fp8Config, Fp8Variant
from flashtile.backends.hopper.fp8.forward import forward_kernel
from flashtile.fp8.problem import Fp8Problem, Scales
from flashtile.problem import Extras


class ForwardLaunch:
    """``(q, k, v, scales, extras) -> (out, lse)`` for tensors of one signature."""

    def __init__(self, problem: Fp8Problem, config: Fp8Config) -> None:
        self._problem = problem
        self._variant = fp8_variant_of(problem, config)
        self._out_shape = problem.out_shape
        self._lse_shape = problem.lse_shape
        self._kernel: KeptKernel | None = None
        self._table_kernel: KeptKernel | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scales: Scales, extras: Extras
    ) -> tuple[Tensor, Tensor]:
        problem = self._problem
        if not problem.varlen:
            out = q.new_empty(*self._out_shape, dtype=problem.out_dtype)
            lse = q.new_empty(*self._lse_shape, dtype=torch.float32)
        else:  # tokens that belong to no sequence are written by no program
            out = q.new_zeros(self._out_shape, dtype=problem.out_dtype)
            lse = q.new_full(self._lse_shape, -torch.inf, dtype=torch.float32)
        if self._kernel is None:
            self._prepare(q, k, v, scales)
        assert self._kernel is not None
        seqused_k = lse if extras.seqused_k is None else extras.seqused_k
        table = lse
        if self._table_kernel is not None:
            table = q.new_empty(*self._table_shape, dtype=torch.int32)
            self._table_kernel(q.device, table, extras.cu_seqlens_q, extras.cu_seqlens_k, seqused_k)
        given = (self._one if scale is None else scale for scale in scales)
        self._kernel(q.device, q, k, v, out, lse, table, seqused_k, *given)
        return out, lse

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, scales: Scales) -> None:
        problem, variant = self._problem, self._variant
        self._one = torch.ones((), device=q.device)
        if problem.varlen:
            self._table_shape = (1 + hopper.table_items(problem, variant), TABLE_WIDTH.value)
            self._table_kernel = hopper.table_kernel(problem, variant)
        scalars = (
            *hopper.schedule_scalars(problem, variant, hopper.rows_between_sequences(k)),
            *hopper.score_numbers(problem),
            *(stride for scale in scales for stride in scale_strides(problem, scale)),
        )
        self._kernel = KeptKernel(
            forward_kernel,
            hopper.num_programs(scalars, q.device),
            scalars,
            (variant,),
            None,
            views(problem, variant, q, k, v),
            maxnreg=LAUNCH_REGISTERS[variant.WARPGROUPS],
        )


def fp8_variant_of(problem: Fp8Problem, config: Fp8Config) -> Fp8Variant:
    common = vars(hopper.variant_of(problem, config, has_queue=False))
    consumer, producer = REGISTERS[config.warpgroups, problem.v_transposed]
    return Fp8Variant(
        **common | {"CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer},
        V_TRANSPOSED=problem.v_transposed,
        BLOCK_SCALES=problem.block_scales,
        Q_SCALE_GROUP=problem.q_scale_group,
        PRODUCER_WARPS=PRODUCER_WARPS[problem.v_transposed],
    )


def scale_strides(problem: Fp8Problem, scale: Tensor | None) -> tuple[int, int, int]:
    """From one sequence, head and block to the next; 0 where they share a scale."""
    if scale is None:
        return 0, 0, 0
    if not problem.block_scales:
        return scale.stride(0), scale.stride(1), 0
    if problem.varlen:
        return 0, scale.stride(0), scale.stride(1)
    return scale.stride(0), scale.stride(1), scale.stride(2)


def views(
    problem: Fp8Problem, variant: Fp8Variant, q: Tensor, k: Tensor, v: Tensor
) -> tuple[hopper.View, hopper.View, hopper.View, hopper.View]:
    """Of q, k, v and out."""
    if not problem.v_transposed:
        return hopper.views(problem, variant, q, k, v, problem.out_dtype)
    view_q, view_k, _, view_o = hopper.views(problem, variant, q, k, k, problem.out_dtype)
    block = [1] * (v.dim() - 2) + [variant.BLOCK_DV, variant.BLOCK_N]
    return view_q, view_k, hopper.View(list(v.shape), list(v.stride()), block, problem.dtype), view_o
