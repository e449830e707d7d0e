"""Compile cases of products with a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flashtile.backends.common.device import Target
from flashtile.backends.common.tiles import CAPABILITY
from flashtile.backends.hopper.linear.config import DEFAULT, MAX_ROWS, TILES, FlatConfig, make
from flashtile.backends.hopper.linear.launch import FlatLaunch
from flashtile.backends.portable.linear.config import (
    MAX_FLAT_ROWS,
    LinearConfig,
    adapted,
    candidates,
    default,
)
from flashtile.backends.portable.linear.kernel import grouped_ahead
from flashtile.backends.portable.linear.launch import LibraryLaunch, ProductLaunch
from flashtile.hardware.linear_table import FLAT, GEMV
from flashtile.problems.linear import (
    E4M3,
    QKV,
    SCALE_BLOCK,
    SWIGLU,
    BeforeNormTensors,
    Heads,
    LinearProblem,
    LinearTensors,
    QkvTensors,
)
from flashtile.tools.inspection.recording import case_of, cases_of, meta
from flashtile.tools.inspection.report import HOPPER, CompileCase, architecture

_HEADS = Heads(32, 8, 128, 128, False, 4096, 16, 1024, 0)


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
                    yield _case(f"profiled{waves} {problem.M} rows", problem, config)
    if arch == HOPPER:
        narrow = replace(everything(split)["before norm"], N=1024, K=2048)
        yield _case("few outputs 64 rows", narrow, default(narrow, FLAT))
    ended = everything(few)["norm qkv"]
    library = cases_of(ended.device, partial(LibraryLaunch(ended), *_inputs(ended)))
    for name, case in zip(("linear norm", "linear epilogue qkv"), library, strict=True):
        yield replace(case, name=name, tensor_cores=False)
    yield from _experts(capability)
    if arch == HOPPER:
        yield from _hopper_cases()


def plain_problem(rows: int, capability: tuple[int, int]) -> LinearProblem:
    """Return the problem of Llama-3-8B's QKV projection, without an epilogue, on a GPU of this capability."""
    target = Target("card", capability, 132)
    return LinearProblem(rows, 6144, 4096, torch.bfloat16, torch.bfloat16, target, prefetch=True)


def everything(problem: LinearProblem) -> dict[str, LinearProblem]:
    """Return variants of the problem that together use every epilogue, keyed by the name of the case."""
    return {
        "norm swiglu": replace(problem, epilogue=SWIGLU, norm=True, bias=True, residual=True),
        "norm qkv": replace(problem, epilogue=QKV, norm=True, heads=_HEADS),
        "head norm qkv": replace(problem, epilogue=QKV, x_scale=True, heads=replace(_HEADS, norm=True)),
        "before norm": replace(problem, x_scale=True, residual=True, next_norm=True),
        "e4m3": replace(problem, weight_dtype=E4M3, scales="channel"),
    }


def recorded(problem: LinearProblem, launch: Callable[..., Any]) -> CompileCase:
    """Return the compile case of the kernel that a launch of a product starts."""
    (case,) = cases_of(problem.device, partial(launch, *_inputs(problem)))
    return case


def _inputs(problem: LinearProblem) -> tuple[Any, ...]:
    """Return (x, weight[, k_cache, v_cache], tensors) of a call, contiguous and on the meta device."""
    M, N, K, heads, dtype = problem.M, problem.N, problem.K, problem.heads, problem.dtype
    blocks = (N // SCALE_BLOCK, K // SCALE_BLOCK)
    common = {
        "bias": meta(N, dtype=dtype) if problem.bias else None,
        "weight_scale": {"none": None, "channel": meta(N), "block": meta(*blocks)}[problem.scales],
        "norm_weight": meta(K, dtype=dtype) if problem.norm else None,
        "x_scale": meta(M) if problem.x_scale else None,
    }
    x, weight = meta(M, K, dtype=dtype), meta(N, K, dtype=problem.weight_dtype)
    if heads is not None:
        cache = meta(heads.num_blocks, heads.page_size, heads.num_heads_kv, heads.head_dim, dtype=dtype)
        angles = meta(heads.rotary_rows, heads.rotary_dim // 2)
        tensors = QkvTensors(
            **common, positions=meta(M, dtype=torch.int32), slot_mapping=meta(M, dtype=torch.int64),
            rotary_cos=angles, rotary_sin=angles,
            **{f"{one}_norm_weight": meta(heads.head_dim, dtype=dtype) for one in "qk" if heads.norm},
        )  # fmt: skip
        return x, weight, cache, cache, tensors
    residual = meta(M, problem.out_columns, dtype=dtype) if problem.residual else None
    if problem.next_norm:
        weight_after = meta(N, dtype=dtype)
        return x, weight, BeforeNormTensors(**common, residual=residual, next_norm_weight=weight_after)
    return x, weight, LinearTensors(**common, residual=residual)


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
    tile = f"{config.BLOCK_M}x{config.BLOCK_N}x{config.BLOCK_K} stages {config.num_stages}"
    name = f"linear {config.kind} {name} {tile} warps {config.num_warps} splits {config.splits}"
    case = recorded(problem, ProductLaunch(problem, config))
    return replace(case, name=name, tensor_cores=case.constants["C"].DOT)


def _hopper_cases() -> Iterator[CompileCase]:
    """Yield each tile with the plain epilogue, and the default tile of 16 rows with every other epilogue.

    The tiles that TILES lists for e4m3 weights are compiled with e4m3 weights. The last case has K = 4104,
    which is 8 times an odd number.
    """
    for (rows, width), tiles in TILES.items():
        name, problem = "plain", plain_problem(rows, (9, 0))
        if width == 1:
            name, problem = "e4m3", everything(problem)["e4m3"]
        for tile in tiles:
            yield _hopper_case(name, problem, make(problem, tile))
    most = plain_problem(MAX_ROWS, (9, 0))
    for name, ended in everything(most).items():
        if name not in ("e4m3", "head norm qkv"):
            yield _hopper_case(name, ended, make(ended, DEFAULT[MAX_ROWS, 2]))
    yield _hopper_case("K of 8 times an odd number", replace(most, K=4104), make(most, DEFAULT[MAX_ROWS, 2]))


def _hopper_case(name: str, problem: LinearProblem, config: FlatConfig) -> CompileCase:
    tile = f"{config.BLOCK_M}x{config.BLOCK_N}x{config.BLOCK_K} stages {config.num_stages}"
    name = f"hopper linear {name} {tile} warps {config.num_warps} x {config.programs_per_sm}"
    return replace(recorded(problem, FlatLaunch(problem, config)), name=name)
