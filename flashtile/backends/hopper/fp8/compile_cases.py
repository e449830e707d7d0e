"""Configurations of the Hopper FP8 kernel, for compilation ahead of time (``flashtile inspect``, tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from flashtile.backends.hopper.config import LAUNCH_REGISTERS
from flashtile.backends.hopper.forward.compile_cases import HOPPER
from flashtile.backends.hopper.forward.schedule import Numbers, Schedule
from flashtile.backends.hopper.fp8.config import Fp8Config, every_row
from flashtile.backends.hopper.fp8.forward import ScaleArrays, forward_kernel
from flashtile.backends.hopper.fp8.launch import fp8_variant_of, views
from flashtile.compile_report import CompileCase
from flashtile.fp8.layout import KEY_BLOCK, num_blocks, num_blocks_varlen
from flashtile.fp8.problem import Fp8Problem

PLAIN = Fp8Problem(
    batch=2,
    seqlen_q=4096,
    seqlen_k=4096,
    total_q=8192,
    total_k=8192,
    num_heads_q=8,
    num_heads_kv=2,
    head_dim=64,
    head_dim_v=64,
    dtype=torch.float8_e4m3fn,
    device=torch.device("meta"),
    softmax_scale=1.0,
    v_transposed=True,
    block_scales=True,
)


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Each row of the table: without a mask as it is; under one with every feature at once, and causal where
    v is transposed in memory. Rows of unequal head sizes only as they are."""
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


def _case(problem: Fp8Problem, config: Fp8Config, spill_budget: int) -> CompileCase:
    variant = fp8_variant_of(problem, config)
    descriptors = (view.type_name for view in views(problem, variant, *_tensors(problem)))
    signature = dict(zip(("q_desc", "k_desc", "v_desc", "o_desc"), descriptors, strict=True))
    signature |= dict.fromkeys(("lse", "q_scale", "k_scale", "v_scale"), "*fp32")
    signature |= dict.fromkeys(("table", "seqused_k"), "*i32")
    integers = (*Schedule._fields, *ScaleArrays._fields)
    signature |= {name: "i32" for name in integers if name not in signature and name != "alibi_stride"}
    signature |= dict.fromkeys(Numbers._fields, "fp32")
    return CompileCase(
        name=f"hopper fp8 forward {_name(problem, config)}",
        kernel=forward_kernel,
        signature=signature,
        constants={"C": variant},
        options={"maxnreg": LAUNCH_REGISTERS[variant.WARPGROUPS]},
        spill_budget=spill_budget,
    )


def _tensors(problem: Fp8Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = (problem.total_q,) if problem.varlen else (problem.batch, problem.seqlen_q)
    keys = (problem.total_k,) if problem.varlen else (problem.batch, problem.seqlen_k)
    heads, head_dim_v = problem.num_heads_kv, problem.head_dim_v
    shape_v: tuple[int, ...] = (*keys, heads, head_dim_v)
    if problem.v_transposed and problem.varlen:
        blocks = num_blocks_varlen(problem.total_k, problem.batch, KEY_BLOCK)
        shape_v = (heads, head_dim_v, blocks * KEY_BLOCK)
    elif problem.v_transposed:
        shape_v = (problem.batch, heads, head_dim_v, num_blocks(problem.seqlen_k, KEY_BLOCK) * KEY_BLOCK)
    q, k, v = (
        torch.empty(shape, dtype=problem.dtype, device="meta")
        for shape in (
            (*rows, problem.num_heads_q, problem.head_dim),
            (*keys, heads, problem.head_dim),
            shape_v,
        )
    )
    return q, k, v


def _name(problem: Fp8Problem, config: Fp8Config) -> str:
    features = "features" if problem.softcap else "causal" if problem.window_right == 0 else "full"
    more = [
        word
        for word, present in (
            ("ping-pong", config.PING_PONG),
            ("q in registers", config.Q_IN_REGISTERS),
            ("packed", problem.seqlen_q < config.BLOCK_M),
            ("v row by row", not problem.v_transposed),
        )
        if present
    ]
    sizes = f"{problem.head_dim}/{problem.head_dim_v}"
    return " ".join((f"head_dim {sizes}", f"{config.BLOCK_M}x{config.BLOCK_N}", features, *more))
