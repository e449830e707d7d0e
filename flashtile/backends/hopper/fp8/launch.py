"""The launch of the FP8 kernel: tensors to kernel arguments, prepared once for each signature."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.common.launch import CachedLaunch, Outputs
from flashtile.backends.common.tma import View
from flashtile.backends.hopper.config import LAUNCH_REGISTERS, persistent_programs, score_numbers
from flashtile.backends.hopper.forward import launch as forward
from flashtile.backends.hopper.forward.launch import ForwardKernels, schedule_of, tile_table
from flashtile.backends.hopper.forward.rounds import ForwardPlan, plan_of
from flashtile.backends.hopper.forward.schedule import Numbers
from flashtile.backends.hopper.fp8.config import PRODUCER_WARPS, REGISTERS, Fp8Config, Fp8Variant
from flashtile.backends.hopper.fp8.kernel import BlockScaleStrides, Fp8ForwardPointers, fp8_forward_kernel
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH, Unwritten, UnwrittenSizes
from flashtile.problems.fp8 import AttendTensors, Fp8Problem, Scales


class Fp8ForwardLaunch:
    """A launch ``(q, k, v, tensors) -> (out, lse)`` for tensors of one signature."""

    def __init__(self, problem: Fp8Problem, config: Fp8Config) -> None:
        self._problem = problem
        self._config = config
        self._plan = plan_of(problem, config, "fp8")
        self._outputs = Outputs(problem, all_written=True)
        self._kernels: ForwardKernels | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tensors: AttendTensors) -> tuple[Tensor, Tensor]:
        q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k, seqused_k, _, _ = tensors
        out, lse = self._outputs(q)
        kernels = self._kernels
        if kernels is None:  # assigned when complete, because another thread may call this launch meanwhile
            kernels = self._kernels = self._prepare(q, k, v, tensors.scales)
        table = lse
        if kernels.fill_table is not None:
            table = kernels.fill_table(cu_seqlens_q, cu_seqlens_k, seqused_k, Unwritten(out, lse=lse))
        elif kernels.queued:
            table = q.new_zeros(TABLE_WIDTH.value, dtype=torch.int32)
        kernels.attend(
            q.device,
            q,
            k,
            v,
            out,
            lse,
            table,
            lse if seqused_k is None else seqused_k,
            lse if q_descale is None else q_descale,
            lse if k_descale is None else k_descale,
            lse if v_descale is None else v_descale,
        )
        return out, lse

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, scales: Scales) -> ForwardKernels:
        problem, plan = self._problem, self._plan
        variant = fp8_forward_variant(problem, plan, scales)
        heads = problem.num_heads_q
        table = tile_table(problem, plan, UnwrittenSizes(heads * problem.head_dim_v // 8, heads=heads))
        schedule = schedule_of(problem, plan, table, k)._replace(alibi_stride=None)
        attend = CachedLaunch(
            fp8_forward_kernel,
            persistent_programs(schedule.num_tiles, q.device),
            (schedule, Numbers(**score_numbers(problem)), scale_strides(problem, scales)),
            (variant,),
            None,
            tuple(views(problem, variant, q, k, v).values()),
            Fp8ForwardPointers,
            maxnreg=LAUNCH_REGISTERS[variant.WARPGROUPS],
        )
        return ForwardKernels(table, attend, None, plan.queued)


def fp8_forward_variant(problem: Fp8Problem, plan: ForwardPlan, scales: Scales) -> Fp8Variant:
    """Return the kernel's variant for ``scales``; a scale that is None counts as 1."""
    common = vars(forward.forward_variant(problem, plan))
    consumer, producer = REGISTERS[plan.config.warpgroups, problem.v_transposed]
    own = {
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
        "PRODUCER_WARPS": PRODUCER_WARPS[problem.v_transposed],
    }
    return Fp8Variant(
        **common | own,
        V_TRANSPOSED=problem.v_transposed,
        BLOCK_SCALES=problem.block_scales,
        HAS_Q_SCALE=scales.q is not None,
        HAS_K_SCALE=scales.k is not None,
        HAS_V_SCALE=scales.v is not None,
        Q_SCALE_GROUP=problem.q_scale_group,
    )


def scale_strides(problem: Fp8Problem, scales: Scales) -> BlockScaleStrides:
    """Return the strides of the scales of q, k and v. The strides of a scale that is None are 0."""
    strides: dict[str, int] = {}
    for name, scale in scales._asdict().items():
        batch = head = block = 0
        if scale is not None and not problem.block_scales:
            batch, head = scale.stride()
        elif scale is not None and problem.varlen:
            head, block = scale.stride()
        elif scale is not None:
            batch, head, block = scale.stride()
        strides |= {f"{name}_scale_batch": batch, f"{name}_scale_head": head, f"{name}_scale_block": block}
    return BlockScaleStrides(**strides)


def views(problem: Fp8Problem, variant: Fp8Variant, q: Tensor, k: Tensor, v: Tensor) -> dict[str, View]:
    """Return the TMA views of q, k, v and out by the names of the kernel's parameters."""
    if not problem.v_transposed:
        return forward.views(problem, variant, q, k, v, problem.out_dtype)
    of = forward.views(problem, variant, q, k, k, problem.out_dtype)
    block = [1] * (v.dim() - 2) + [variant.BLOCK_DV, variant.BLOCK_N]
    return of | {"v_desc": View(list(v.shape), list(v.stride()), block, problem.dtype)}
