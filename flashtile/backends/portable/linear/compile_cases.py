"""Products with a weight, for compilation ahead of time (``flashtile inspect``, tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from flashtile.backends.common.compile_cases import case_of
from flashtile.backends.common.compile_report import CompileCase, architecture, types_of
from flashtile.backends.common.device import Target
from flashtile.backends.common.linear import (
    EpilogueCacheStrides,
    EpilogueSizes,
    EpilogueStrides,
    ProductDepth,
    ProductPointers,
    epilogue_variant,
)
from flashtile.backends.common.tiles import CAPABILITY
from flashtile.backends.portable.fp8 import NATIVE_CAPABILITY
from flashtile.backends.portable.linear.config import (
    MAX_FLAT_ROWS,
    LinearConfig,
    adapted,
    candidates,
    default,
)
from flashtile.backends.portable.linear.kernel import Shares, epilogue_kernel, grouped_ahead, product_kernel
from flashtile.backends.portable.linear.launch import EPILOGUE_PLACES, EPILOGUE_ROWS, product_variant
from flashtile.hardware.linear_table import FLAT, GEMV
from flashtile.problems.linear import E4M3, QKV, SWIGLU, Heads, LinearProblem

_HEADS = Heads(32, 8, 128, 128, False, 4096, 16, 1024, 0)


def plain_problem(rows: int, capability: tuple[int, int]) -> LinearProblem:
    """Return the problem of Llama-3-8B's QKV projection, without an epilogue, on a GPU of this capability."""
    target = Target("card", capability, 132)
    return LinearProblem(rows, 6144, 4096, torch.bfloat16, torch.bfloat16, target, prefetch=True)


def everything(problem: LinearProblem) -> dict[str, LinearProblem]:
    """Return variants of the problem that together use every epilogue, keyed by the name of the case."""
    return {
        "norm swiglu": replace(problem, epilogue=SWIGLU, norm=True, bias=True, residual=True),
        "norm qkv": replace(problem, epilogue=QKV, norm=True, heads=_HEADS),
        "before norm": replace(problem, x_scale=True, residual=True, next_norm=True),
        "e4m3": replace(problem, weight_dtype=E4M3, scales="channel"),
    }


def pointer_types(problem: LinearProblem, native: bool, split: bool = False) -> ProductPointers:
    """Return the Triton types of a call's tensors.

    ``split``: whether K is divided among several programs.
    """
    heads = problem.heads
    weight = "*bf16" if problem.weight_dtype != E4M3 else "*fp8e4nv" if native else "*u8"
    given = {
        "norm_weight": ("*bf16", problem.norm),
        "block_scale": ("*fp32", problem.scales == "block"),
        "partial": ("*fp32", split),
        "arrived": ("*i32", split or problem.next_norm),
        "bias": ("*bf16", problem.bias),
        "residual": ("*bf16", problem.residual),
        "scales": ("*fp32", problem.scales == "channel"),
        **dict.fromkeys(("cos", "sin"), ("*fp32", heads is not None)),
        "positions": ("*i32", heads is not None),
        "slots": ("*i64", heads is not None and heads.table_width == 0),
        "block_table": ("*i32", heads is not None and heads.table_width > 0),
        **dict.fromkeys(("k_cache", "v_cache"), ("*bf16", heads is not None)),
        "x_scale": ("*fp32", problem.x_scale),
        **dict.fromkeys(("next_norm_weight", "scaled"), ("*bf16", problem.next_norm)),
        **dict.fromkeys(("squares", "next_factor"), ("*fp32", problem.next_norm)),
    }
    present = {name: kind for name, (kind, there) in given.items() if there}
    return types_of(ProductPointers, None, x="*bf16", w=weight, y="*bf16", **present)


EPILOGUE_TYPES = {
    "places": "i32",
    "strides": types_of(EpilogueStrides, "i32"),
    "cache_strides": types_of(EpilogueCacheStrides, "i32"),
    "sizes": types_of(EpilogueSizes, "i32", next_eps="fp32"),
}
"""Types of an epilogue's scalars."""
PRODUCT_TYPES = {"depth": types_of(ProductDepth, "i32"), "eps": "fp32"} | EPILOGUE_TYPES
ALIGNED = frozenset(("depth", "strides"))


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Yield the product kernel with default tiles and every epilogue, and kernels of epilogues and experts.

    For Hopper and later GPUs, also yield the candidates that ``flashtile profile`` measures.
    """
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
        many = plain_problem(MAX_FLAT_ROWS, capability)
        for problem, kind in ((few, GEMV), (many, FLAT)):
            for config in candidates(problem):
                if config.kind == kind:
                    waves = " whole waves" * config.whole_waves
                    profiled = _case(f"profiled{waves} {problem.M} rows", problem, config)
                    yield replace(profiled, exhaustive=config.whole_waves)
    ended = everything(few)["norm qkv"]
    pointers = pointer_types(ended, True)._replace(w=None, norm_weight=None)
    yield CompileCase(
        name="linear epilogue qkv",
        kernel=epilogue_kernel,
        signature={"pointers": pointers, "sums_stride": "i32", **EPILOGUE_TYPES},
        constants={
            "BLOCK_M": EPILOGUE_ROWS,
            "BLOCK_P": EPILOGUE_PLACES,
            "E": epilogue_variant(ended, norm=False),
        },
        divisible_by_16=frozenset(("places", "sums_stride", "strides")),
        tensor_cores=False,
    )
    yield from _experts(capability)


def _experts(capability: tuple[int, int]) -> Iterator[CompileCase]:
    """Yield the products of Qwen3-30B-A3B's experts, by way of storing the weight."""
    target = Target("card", capability, 132)
    for scales, stored in enumerate(("bf16", "e4m3", "e4m3 block scales")):
        for gather, way in ((True, "gather"), (False, "scatter")):
            shape = (128, 1536, 2048) if gather else (128, 2048, 768)
            for launched in grouped_ahead(target, torch.bfloat16, shape, not gather, gather, scales):
                case = case_of(launched, "")
                yield replace(case, name=f"linear experts {stored} {way} {case.constants['C'].BLOCK_M} rows")


def _case(name: str, problem: LinearProblem, config: LinearConfig) -> CompileCase:
    native = problem.device.capability >= NATIVE_CAPABILITY
    variant = product_variant(problem, config)
    pointers = pointer_types(problem, native, variant.SPLIT)
    tile = f"{config.BLOCK_M}x{config.BLOCK_N}x{config.BLOCK_K} stages {config.num_stages}"
    return CompileCase(
        name=f"linear {config.kind} {name} {tile} warps {config.num_warps} splits {config.splits}",
        kernel=product_kernel,
        signature={"pointers": pointers, "shares": types_of(Shares, "i32"), **PRODUCT_TYPES},
        constants={"C": variant, "E": epilogue_variant(problem)},
        divisible_by_16=ALIGNED,
        num_warps=config.num_warps,
        spill_budget=SPILL_BUDGETS.get((config.kind, name), 0),
        tensor_cores=variant.DOT,
    )


SPILL_BUDGETS: dict[tuple[str, str], int] = {}
"""Accepted bytes of spills, by (kind, case). A comment at each gives the measurement that justifies it."""
