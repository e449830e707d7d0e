"""Configurations of the Hopper FP8 kernel, for compilation ahead of time (``flashtile inspect``, tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flashtile.backends.common.compile_report import CompileCase, types_of
from flashtile.backends.hopper import compile_cases as shared
from flashtile.backends.hopper.compile_cases import HOPPER, words
from flashtile.backends.hopper.config import LAUNCH_REGISTERS
from flashtile.backends.hopper.forward.schedule import ForwardSchedule, Numbers
from flashtile.backends.hopper.fp8.config import Fp8Config, every_row
from flashtile.backends.hopper.fp8.kernel import BlockScaleStrides, Fp8ForwardPointers, fp8_forward_kernel
from flashtile.backends.hopper.fp8.launch import fp8_forward_variant, views
from flashtile.problems.fp8 import Fp8Problem, Scales
from flashtile.problems.fp8_layout import KEY_BLOCK, num_blocks, num_blocks_varlen

PLAIN = Fp8Problem(
    **vars(shared.PLAIN) | {"dtype": torch.float8_e4m3fn}, v_transposed=True, block_scales=True
)
_SCALE = torch.empty(1, device="meta")
ALL_SCALES = Scales(_SCALE, _SCALE, _SCALE)


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Yield the compile cases of each entry of the table of configurations, and two more.

    Entries without a window get a plain case. Entries with a window get a case with all features, and a
    causal case if v is transposed in memory. Entries for unequal head sizes have only a plain case. The two
    further cases, at head_dim 128, are a short causal q with several heads per tile, and a call without
    scales.
    """
    if arch != HOPPER:
        return
    for block_d, block_dv, windowed, v_transposed, config in every_row():
        plain = replace(PLAIN, head_dim=block_d, head_dim_v=block_dv, v_transposed=v_transposed)
        if not windowed:
            yield _case(plain, config, config.spill_budget)
            continue
        if v_transposed:
            yield _case(replace(plain, window_right=0), config, config.spill_budget)
        everything = replace(plain, varlen=True, window_left=64, window_right=64, softcap=1.0)
        everything = replace(everything, seqused_k=not v_transposed)
        yield _case(everything, config, config.features_spill_budget)
    square = replace(PLAIN, head_dim=128, head_dim_v=128)
    yield _case(replace(square, window_right=0, seqlen_q=4, total_q=8), Fp8Config(2, 128), 0)
    unscaled = replace(square, v_transposed=False, block_scales=False)
    yield _case(unscaled, Fp8Config(2, 128), 0, Scales())


def _case(
    problem: Fp8Problem, config: Fp8Config, spill_budget: int, scales: Scales = ALL_SCALES
) -> CompileCase:
    variant = fp8_forward_variant(problem, config, scales)
    q, k, v = shared.tensors(problem)
    v = _transposed(problem) if problem.v_transposed else v
    sizes, tile = f"{problem.head_dim}/{problem.head_dim_v}", f"{config.BLOCK_M}x{config.BLOCK_N}"
    features = "features" if problem.softcap else "causal" if problem.window_right == 0 else "full"
    more = words(
        {
            "ping-pong": config.PING_PONG,
            "q in registers": config.Q_IN_REGISTERS,
            "packed": problem.seqlen_q < config.BLOCK_M,
            "v row by row": not problem.v_transposed,
            "without scales": scales == Scales(),
        }
    )
    descriptors = {name: view.type_name for name, view in views(problem, variant, q, k, v).items()}
    return CompileCase(
        name=" ".join((f"hopper fp8 forward head_dim {sizes}", tile, features, *more)),
        kernel=fp8_forward_kernel,
        signature=descriptors
        | {
            "pointers": types_of(Fp8ForwardPointers, "*fp32", table="*i32", seqused_k="*i32"),
            "schedule": types_of(
                ForwardSchedule,
                "i32",
                alibi_stride=None,
                bias_batch=None,
                bias_heads=None,
                drop_threshold=None,
            ),
            "numbers": types_of(Numbers, "fp32"),
            "scale_strides": types_of(BlockScaleStrides, "i32"),
        },
        constants={"C": variant},
        options={"maxnreg": LAUNCH_REGISTERS[variant.WARPGROUPS]},
        spill_budget=spill_budget,
    )


def _transposed(problem: Fp8Problem) -> Tensor:
    """Return V^T of the problem's shape, on the "meta" device."""
    heads, head_dim_v = problem.num_heads_kv, problem.head_dim_v
    if problem.varlen:
        columns = num_blocks_varlen(problem.total_k, problem.batch, KEY_BLOCK) * KEY_BLOCK
        shape: tuple[int, ...] = (heads, head_dim_v, columns)
    else:
        shape = (problem.batch, heads, head_dim_v, num_blocks(problem.seqlen_k, KEY_BLOCK) * KEY_BLOCK)
    return torch.empty(shape, dtype=problem.dtype, device="meta")
