"""Every configuration of the portable kernels, for compilation ahead of time (``flashtile inspect``,
tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flashtile.backends.common.compile_cases import preprocess_case
from flashtile.backends.common.config import KernelConfig
from flashtile.backends.common.preprocess import ROW_PAD
from flashtile.backends.portable import launch
from flashtile.backends.portable.backward_dkdv import dkdv_kernel
from flashtile.backends.portable.backward_dq import dq_kernel
from flashtile.backends.portable.config import HEAD_DIMS, family_of_capability, row
from flashtile.backends.portable.forward import forward_kernel
from flashtile.compile_report import CompileCase, architecture
from flashtile.problem import Problem

_PLAIN = Problem(
    batch=2,
    seqlen_q=4096,
    seqlen_k=4096,
    total_q=8192,
    total_k=8192,
    num_heads_q=8,
    num_heads_kv=8,
    head_dim=64,
    head_dim_v=64,
    dtype=torch.bfloat16,
    device=torch.device("meta"),
    softmax_scale=1.0,
)
_VARIANTS: dict[str, Problem] = {
    "full": _PLAIN,
    "causal": replace(_PLAIN, window_right=0),
    "features": replace(
        _PLAIN,
        varlen=True,
        seqused_k=True,
        window_left=64,
        window_right=64,
        softcap=1.0,
        alibi=True,
        sink=True,
    ),
}
"""Plain problems as most calls have them, and one with every feature at once."""

_FLOAT_ROWS = ("lse_ptr", "dlse_ptr", "neg_lse_ptr", "neg_delta_ptr", "alibi_slopes", "sink")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_FLOATS = ("softmax_scale", "scale_log2", "softcap", "lse_factor")


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Each row of the table that serves ``arch``, for each kernel and variant."""
    table_family = family_of_capability(*divmod(architecture(arch).capability, 10))
    for dtype, element_bytes in (("bf16", 2), ("fp32", 4)):
        for head_dim in HEAD_DIMS:
            for variant, any_head_dim in _VARIANTS.items():
                problem = replace(any_head_dim, head_dim=head_dim, head_dim_v=head_dim)
                config = row(table_family, element_bytes, head_dim, windowed=variant != "full")
                for name, kernel, tile in (
                    ("forward", forward_kernel, config.forward),
                    ("dkdv", dkdv_kernel, config.dkdv),
                    ("dq", dq_kernel, config.dq),
                ):
                    yield CompileCase(
                        name=f"{name} {dtype} head_dim {head_dim} {variant}",
                        kernel=kernel,
                        **_arguments(
                            kernel, dtype, problem, _constants(kernel, problem, tile, config.precision)
                        ),
                        num_warps=tile.num_warps,
                        num_stages=tile.num_stages,
                        spill_budget=tile.features_spill_budget
                        if variant == "features"
                        else tile.spill_budget,
                        tensor_cores=config.precision != "ieee",
                    )
            plain = replace(_PLAIN, head_dim=head_dim, head_dim_v=head_dim)
            yield preprocess_case(f"preprocess {dtype} head_dim {head_dim}", plain, dtype)


def _constants(kernel: Any, problem: Problem, tile: KernelConfig, precision: str) -> dict[str, Any]:
    values = launch.constants(problem, tile, precision, wide=False, aligned=True)
    return values | ({"ROW_PAD": ROW_PAD} if "ROW_PAD" in kernel.arg_names else {})


def _arguments(kernel: Any, dtype: str, problem: Problem, constants: dict[str, Any]) -> dict[str, Any]:
    """Signature and constants of a launch with contiguous tensors; absent tensors are constants None."""
    given = {
        "cu_seqlens_q": problem.varlen,
        "cu_seqlens_k": problem.varlen,
        "seqused_k": problem.seqused_k,
        "alibi_slopes": problem.alibi,
        "sink": problem.sink,
    }
    constants |= {name: None for name in kernel.arg_names if not given.get(name, True)}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        if name in _FLOAT_ROWS:
            signature[name] = "*fp32"
        elif name in _LENGTHS:
            signature[name] = "*i32"
        elif name.endswith("_ptr"):
            signature[name] = f"*{dtype}"
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
    strides = frozenset(name for name in signature if name[:2] in ("q_", "k_", "v_") and "stride" in name)
    return {"signature": signature, "constants": constants, "divisible_by_16": strides}
