"""Configurations of the FP8 kernels, for compilation ahead of time (``flashtile inspect``, tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flashtile.backends.common.compile_report import CompileCase, architecture
from flashtile.backends.portable.fp8 import NATIVE_CAPABILITY
from flashtile.backends.portable.fp8 import config as configurations
from flashtile.backends.portable.fp8.attend import attend_kernel
from flashtile.backends.portable.fp8.launch import variant_of as attend_variant
from flashtile.backends.portable.fp8.quantize import LARGEST_GIVEN, LARGEST_ONLY, ONE_PASS, quantize_kernel
from flashtile.backends.portable.fp8.quantize_launch import compile_options, spill_budget
from flashtile.backends.portable.fp8.quantize_launch import variant_of as quantize_variant
from flashtile.problems.fp8 import Fp8Problem, QuantizeProblem
from flashtile.problems.fp8_layout import E4M3

_QUERIES = QuantizeProblem(
    role="q",
    method="block",
    batch=2,
    seqlen=4096,
    total=8192,
    num_heads=8,
    head_dim=128,
    dtype=torch.bfloat16,
    device=torch.device("meta"),
    seed=0,
)
_VALUES = replace(_QUERIES, role="v", seed=None)
_QUANTIZED: dict[str, QuantizeProblem] = {
    "q head_dim 128": _QUERIES,
    "q head_dim 80 features": replace(
        _QUERIES, head_dim=80, varlen=True, seqused=True, rotary_dim=40, rotary_interleaved=True
    ),
    "k head_dim 128 rotary by head": replace(_QUERIES, role="k", rotary_dim=128, method="head"),
    "k head_dim 256": replace(_QUERIES, role="k", head_dim=256),
    "k head_dim 256 rotary": replace(_QUERIES, role="k", head_dim=256, rotary_dim=256),
    "v head_dim 64": replace(_VALUES, head_dim=64),
    "v head_dim 256 varlen": replace(_VALUES, head_dim=256, varlen=True),
}

_PLAIN = Fp8Problem(
    batch=2,
    seqlen_q=4096,
    seqlen_k=4096,
    total_q=8192,
    total_k=8192,
    num_heads_q=8,
    num_heads_kv=8,
    head_dim=64,
    head_dim_v=64,
    dtype=E4M3,
    device=torch.device("meta"),
    softmax_scale=1.0,
    v_transposed=True,
    block_scales=True,
)
_FEATURES = replace(
    _PLAIN,
    varlen=True,
    seqused_k=True,
    window_left=64,
    window_right=64,
    softcap=1.0,
    alibi=True,
    sink=True,
)
_ATTENDED: dict[str, tuple[Fp8Problem, tuple[int, ...]]] = {
    "full": (_PLAIN, configurations.HEAD_DIMS),
    "rows causal": (replace(_PLAIN, v_transposed=False, block_scales=False, window_right=0), (64,)),
    "features": (_FEATURES, (32,)),
}
"""Problems, and the head sizes that each is compiled for."""

_FLOAT_ROWS = (
    "scales_ptr", "largest_ptr", "cos_ptr", "sin_ptr", "lse_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr",
    "alibi_slopes", "sink",
)  # fmt: skip
_INTEGER_ROWS = ("cu_seqlens", "seqused", "rotary_offsets", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_STORED_ROWS = ("values_ptr", "q_ptr", "k_ptr", "v_ptr")
_TYPES = {
    "x_ptr": "*bf16",
    "out_ptr": "*bf16",
    "normalizer": "fp32",
    "softmax_scale": "fp32",
    "softcap": "fp32",
    **dict.fromkeys(_FLOAT_ROWS, "*fp32"),
    **dict.fromkeys(_INTEGER_ROWS, "*i32"),
}


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Quantisation of each role, and attention with each row of the table that serves ``arch``."""
    native = divmod(architecture(arch).capability, 10) >= NATIVE_CAPABILITY
    for name, quantized in _QUANTIZED.items():
        passes = (
            {"": ONE_PASS}
            if quantized.method == "block"
            else {" pass 1": LARGEST_ONLY, " pass 2": LARGEST_GIVEN}
        )
        options = compile_options(quantized)
        for suffix, number in passes.items():
            yield CompileCase(
                name=f"fp8 quantize {name}{suffix}",
                kernel=quantize_kernel,
                **_quantize_arguments(quantized, number.value, native),
                spill_budget=spill_budget(quantized),
                num_warps=options["num_warps"],
                options={name: option for name, option in options.items() if name != "num_warps"},
                tensor_cores=False,
            )
    for name, (problem, head_dims) in _ATTENDED.items():
        for head_dim in head_dims:
            config = configurations.row(native, head_dim)
            attended = replace(problem, head_dim=head_dim, head_dim_v=head_dim)
            yield CompileCase(
                name=f"fp8 attend head_dim {head_dim} {name}",
                kernel=attend_kernel,
                **_attend_arguments(attended, config),
                num_warps=config.tile.num_warps,
                num_stages=config.tile.num_stages,
                spill_budget=config.tile.spill_budget,
            )


def _quantize_arguments(problem: QuantizeProblem, number: int, native: bool) -> dict[str, Any]:
    given = {
        "largest_ptr": problem.method != "block",
        "cu_seqlens": problem.varlen,
        "seqused": problem.seqused,
        "cos_ptr": problem.rotary_dim > 0,
        "sin_ptr": problem.rotary_dim > 0,
        "rotary_offsets": problem.varlen and problem.rotary_dim > 0,
    }
    variant = quantize_variant(problem, native, number)
    divisible = frozenset(("x_stride_b", "x_stride_s", "x_stride_h", "columns"))
    return _arguments(quantize_kernel, variant, given, native) | {"divisible_by_16": divisible}


def _attend_arguments(problem: Fp8Problem, config: configurations.AttendConfig) -> dict[str, Any]:
    given = {
        "cu_seqlens_q": problem.varlen,
        "cu_seqlens_k": problem.varlen,
        "seqused_k": problem.seqused_k,
        "alibi_slopes": problem.alibi,
        "sink": problem.sink,
    }
    arguments = _arguments(attend_kernel, attend_variant(problem, config), given, config.native)
    strides = [name for name in arguments["signature"] if name[:4] in ("q_st", "k_st", "v_st")]
    return arguments | {"divisible_by_16": frozenset(strides)}


def _arguments(
    kernel: Any, variant: Any, given: dict[str, bool], native: bool
) -> dict[str, Any]:
    """Signature and constants of a launch; absent tensors are constants None."""
    constants = {"C": variant} | {name: None for name, present in given.items() if not present}
    types = _TYPES | dict.fromkeys(_STORED_ROWS, "*fp8e4nv" if native else "*u8")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    return {"signature": signature, "constants": constants}
