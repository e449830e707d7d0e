"""Configurations of the FP8 kernels, for compilation ahead of time (``flashtile inspect``, tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flashtile.backends.common.compile_report import CompileCase, architecture, types_of
from flashtile.backends.portable.fp8 import NATIVE_CAPABILITY
from flashtile.backends.portable.fp8 import config as configurations
from flashtile.backends.portable.fp8.attend import (
    Fp8AttendPointers,
    Fp8Lengths,
    Fp8Numbers,
    Fp8ScaleStrides,
    Fp8Strides,
    attend_kernel,
)
from flashtile.backends.portable.fp8.launch import fp8_attend_variant
from flashtile.backends.portable.fp8.quantize import (
    LARGEST_GIVEN,
    LARGEST_ONLY,
    ONE_PASS,
    QuantizeLengths,
    QuantizeNumbers,
    QuantizePointers,
    QuantizeScaleStrides,
    QuantizeStrides,
    quantize_kernel,
)
from flashtile.backends.portable.fp8.quantize_launch import compile_options, quantize_variant, spill_budget
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
    rotary = problem.rotary_dim > 0
    pointers = types_of(
        QuantizePointers,
        None,
        x="*bf16",
        quantized=_stored(native),
        scales="*fp32",
        largest="*fp32" if problem.method != "block" else None,
        cu_seqlens="*i32" if problem.varlen else None,
        seqused="*i32" if problem.seqused else None,
        cos="*fp32" if rotary else None,
        sin="*fp32" if rotary else None,
        rotary_offsets="*i32" if problem.varlen and rotary else None,
    )
    signature = {
        "pointers": pointers,
        "strides": types_of(QuantizeStrides, "i32"),
        "lengths": types_of(QuantizeLengths, "i32"),
        "scale_strides": types_of(QuantizeScaleStrides, "i32"),
        "numbers": types_of(QuantizeNumbers, "i32", normalizer="fp32"),
    }
    return _arguments(signature, quantize_variant(problem, native, number))


def _attend_arguments(problem: Fp8Problem, config: configurations.AttendConfig) -> dict[str, Any]:
    pointers = types_of(
        Fp8AttendPointers,
        "*fp32",
        **dict.fromkeys(("q", "k", "v"), _stored(config.native)),
        out="*bf16",
        cu_seqlens_q="*i32" if problem.varlen else None,
        cu_seqlens_k="*i32" if problem.varlen else None,
        seqused_k="*i32" if problem.seqused_k else None,
        alibi_slopes="*fp32" if problem.alibi else None,
        sink="*fp32" if problem.sink else None,
    )
    signature = {
        "pointers": pointers,
        "strides": types_of(Fp8Strides, "i32"),
        "scale_strides": types_of(Fp8ScaleStrides, "i32"),
        "lengths": types_of(Fp8Lengths, "i32"),
        "numbers": types_of(Fp8Numbers, "fp32"),
    }
    return _arguments(signature, fp8_attend_variant(problem, config))


def _stored(native: bool) -> str:
    return "*fp8e4nv" if native else "*u8"


def _arguments(signature: dict[str, Any], variant: Any) -> dict[str, Any]:
    return {
        "signature": signature,
        "constants": {"C": variant},
        "divisible_by_16": frozenset(("strides",)),
    }
