"""Products with a weight, for compilation ahead of time (``flashtile inspect``, tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flashtile.backends.common.compile_report import CompileCase, architecture
from flashtile.backends.common.dependent_launch import CAPABILITY
from flashtile.backends.common.device import Target
from flashtile.backends.common.linear_launch import end_variant
from flashtile.backends.portable.fp8 import NATIVE_CAPABILITY
from flashtile.backends.portable.linear.config import (
    MOST_FLAT_ROWS,
    LinearConfig,
    adapted,
    candidates,
    default,
)
from flashtile.backends.portable.linear.kernel import end_kernel, product_kernel
from flashtile.backends.portable.linear.launch import END_PLACES, END_ROWS, variant_of
from flashtile.hardware.linear_table import FLAT, GEMV
from flashtile.problems.linear import E4M3, QKV, SWIGLU, Heads, LinearProblem

_HEADS = Heads(32, 8, 128, 128, False, 4096, 16, 1024, 0)
FLOATS = (
    "scales", "block_scale", "partial", "cos", "sin", "eps", "x_scale", "squares", "next_factor",
    "next_eps",
)  # fmt: skip
INTEGERS = {"arrived": "*i32", "positions": "*i32", "block_table": "*i32", "slots": "*i64"}
HALF_POINTERS = (
    "x", "w", "y", "norm_weight", "bias", "residual", "k_cache", "v_cache", "sums", "next_norm_weight",
    "scaled",
)  # fmt: skip


def plain_problem(rows: int, capability: tuple[int, int]) -> LinearProblem:
    """A product of Llama-3-8B on a card of this capability."""
    target = Target("card", capability, 132)
    return LinearProblem(rows, 6144, 4096, torch.bfloat16, torch.bfloat16, target, prefetch=True)


def everything(problem: LinearProblem) -> dict[str, LinearProblem]:
    """The problem with the ends that there are, by what a case is called."""
    return {
        "norm swiglu": replace(problem, end=SWIGLU, norm=True, bias=True, residual=True),
        "norm qkv": replace(problem, end=QKV, norm=True, heads=_HEADS),
        "before norm": replace(problem, x_scale=True, residual=True, next_norm=True),
        "e4m3": replace(problem, weight_dtype=E4M3, scales="channel"),
    }


def types_of(kernel: Any, problem: LinearProblem, native: bool) -> dict[str, str]:
    """Triton's type of each argument of a kernel with these ends; constants are left out."""
    types = dict.fromkeys(HALF_POINTERS, "*bf16") | INTEGERS
    types |= {name: "fp32" if name.endswith("eps") else "*fp32" for name in FLOATS}
    if problem.weight_dtype == E4M3:
        types["w"] = "*fp8e4nv" if native else "*u8"
    return {name: types.get(name, "i32") for name in kernel.arg_names if name not in ("C", "E")}


def absent(problem: LinearProblem, split: bool) -> dict[str, None]:
    """Arguments that a call does not have."""
    heads = problem.heads
    given = {
        "bias": problem.bias,
        "residual": problem.residual,
        "norm_weight": problem.norm,
        "scales": problem.scales == "channel",
        "block_scale": problem.scales == "block",
        "partial": split,
        "arrived": split or problem.next_norm,
        "x_scale": problem.x_scale,
        **dict.fromkeys(("next_norm_weight", "scaled", "squares", "next_factor"), problem.next_norm),
        "slots": heads is not None and heads.table_width == 0,
        "block_table": heads is not None and heads.table_width > 0,
        **dict.fromkeys(("cos", "sin", "positions", "k_cache", "v_cache"), heads is not None),
    }
    return {name: None for name, present in given.items() if not present}


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """The rule's tiles with every end, what ``flashtile profile`` tries on Hopper, and the end alone."""
    capability = divmod(architecture(arch).capability, 10)
    few = plain_problem(1, capability)
    for name, ended in {"plain": few, "norm qkv": everything(few)["norm qkv"]}.items():
        yield _case(f"{name} 1 rows", ended, default(ended, GEMV))
    for name, ended in everything(plain_problem(16, capability)).items():
        yield _case(f"{name} 16 rows", ended, default(ended, FLAT))
    split = plain_problem(64, capability)
    yield _case(
        "block scales split 64 rows",
        replace(split, weight_dtype=E4M3, scales="block", N=1024),
        adapted(split, FLAT, 64, 128, 4, 3, 4, 0),
    )
    if capability >= CAPABILITY:
        many = plain_problem(MOST_FLAT_ROWS, capability)
        for problem, kind in ((few, GEMV), (many, FLAT)):
            for config in candidates(problem):
                if config.kind == kind:
                    waves = " whole waves" * config.whole_waves
                    profiled = _case(f"profiled{waves} {problem.M} rows", problem, config)
                    yield replace(profiled, exhaustive=config.whole_waves)
    ended = everything(few)["norm qkv"]
    signature = types_of(end_kernel, ended, True)
    constants = {"BLOCK_M": END_ROWS, "BLOCK_P": END_PLACES, "E": end_variant(ended, norm=False)}
    constants |= {name: None for name in absent(ended, False) if name in signature}
    yield CompileCase(
        name="linear end qkv",
        kernel=end_kernel,
        signature={name: kind for name, kind in signature.items() if name not in constants},
        constants=constants,
        divisible_by_16=frozenset(("places", "sums_stride", "y_stride")),
        tensor_cores=False,
    )


def _case(name: str, problem: LinearProblem, config: LinearConfig) -> CompileCase:
    native = problem.device.capability >= NATIVE_CAPABILITY
    variant = variant_of(problem, config)
    constants = {"C": variant, "E": end_variant(problem), **absent(problem, variant.SPLIT)}
    signature = types_of(product_kernel, problem, native)
    tile = f"{config.BLOCK_M}x{config.BLOCK_N}x{config.BLOCK_K} stages {config.num_stages}"
    return CompileCase(
        name=f"linear {config.kind} {name} {tile} warps {config.num_warps} splits {config.splits}",
        kernel=product_kernel,
        signature={name: kind for name, kind in signature.items() if name not in constants},
        constants=constants,
        divisible_by_16=frozenset(("K", "x_stride", "w_stride", "y_stride", "residual_stride")),
        num_warps=config.num_warps,
        spill_budget=SPILL_BUDGETS.get((config.kind, name), 0),
        tensor_cores=variant.DOT,
    )


SPILL_BUDGETS: dict[tuple[str, str], int] = {}
"""Bytes by (kind, case), beside a measurement."""
