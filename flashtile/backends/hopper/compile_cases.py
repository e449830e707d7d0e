"""What all Hopper kernels need to be compiled ahead of time (``flashtile inspect``, tests), and the tile
table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flashtile.backends.common.compile_report import CompileCase
from flashtile.backends.common.tma import View
from flashtile.backends.hopper.tile_table import CHUNK, tile_table_kernel
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH
from flashtile.problems.attention import Problem
from flashtile.problems.fp8 import Fp8Problem

HOPPER = "sm_90a"
PLAIN = Problem(
    batch=2,
    seqlen_q=4096,
    seqlen_k=4096,
    total_q=8192,
    total_k=8192,
    num_heads_q=8,
    num_heads_kv=2,
    head_dim=64,
    head_dim_v=64,
    dtype=torch.bfloat16,
    device=torch.device("meta"),
    softmax_scale=1.0,
)
TYPES = {
    "*i32": ("table", "seqused_k", "dq_semaphores", "next_tile", "counters"),
    "*fp32": ("lse", "alibi_slopes", "sink", "neg_lse", "neg_delta", "q_scale", "k_scale", "v_scale"),
    "*bf16": ("dq",),
    "fp32": (
        "scale", "scale_log2", "softcap_rate", "softcap_log2", "zero", "keep_scale", "keep", "lse_scale"
    ),
}  # fmt: skip
"""Of the kernels' parameters, by name; descriptors have their views', all others are integers."""
_TYPE_OF = {name: type_name for type_name, names in TYPES.items() for name in names}


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """The kernel that fills the tile table."""
    if arch != HOPPER:
        return
    pointers = ("table", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    integers = ("batch", "num_blocks", "total_q", "total_k", "capacity")
    yield CompileCase(
        name="hopper tile table",
        kernel=tile_table_kernel,
        signature=dict.fromkeys(pointers, "*i32") | dict.fromkeys(integers, "i32"),
        constants={
            "SEQUSED": True,
            "PAIRED": True,
            "BLOCK_M": 128,
            "WIDTH": TABLE_WIDTH.value,
            "CHUNK": CHUNK,
        },
        tensor_cores=False,
    )


def attention_case(
    name: str, kernel: Any, views: Mapping[str, View], variant: Any, maxnreg: int, spill_budget: int
) -> CompileCase:
    """One of the warp-specialised kernels; ``views`` by the names of its parameters."""
    signature = {}
    for parameter in kernel.arg_names:
        if parameter in views:
            signature[parameter] = views[parameter].type_name
        elif parameter != "C":
            signature[parameter] = _TYPE_OF.get(parameter, "i32")
    return CompileCase(
        name=f"hopper {name}",
        kernel=kernel,
        signature=signature,
        constants={"C": variant},
        options={"maxnreg": maxnreg},
        spill_budget=spill_budget,
    )


def tensors(problem: Problem | Fp8Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of the problem's shapes, row by row, without memory."""
    rows = (problem.total_q,) if problem.varlen else (problem.batch, problem.seqlen_q)
    keys = (problem.total_k,) if problem.varlen else (problem.batch, problem.seqlen_k)
    q = torch.empty(*rows, problem.num_heads_q, problem.head_dim, dtype=problem.dtype, device="meta")
    k = torch.empty(*keys, problem.num_heads_kv, problem.head_dim, dtype=problem.dtype, device="meta")
    v = torch.empty(*keys, problem.num_heads_kv, problem.head_dim_v, dtype=problem.dtype, device="meta")
    return q, k, v


def words(named: Mapping[str, Any]) -> list[str]:
    """The names of what is there."""
    return [name for name, present in named.items() if present]
