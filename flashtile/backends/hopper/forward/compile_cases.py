"""Every configuration of the Hopper kernels, for compilation ahead of time (``flashtile inspect``, tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flashtile.attn.problem import Problem
from flashtile.backends.hopper.config import LAUNCH_REGISTERS, ForwardConfig, Variant, choose, every_row
from flashtile.backends.hopper.forward.kernel import forward_kernel
from flashtile.backends.hopper.forward.launch import variant_of, views
from flashtile.backends.hopper.forward.schedule import Numbers, Pointers, Schedule
from flashtile.backends.hopper.forward.tile_table import CHUNK, tile_table_kernel
from flashtile.compile_report import CompileCase

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
_CAUSAL = replace(PLAIN, window_right=0)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
"""Among which every row of the table finds its own."""


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Each row of the table with plain or causal problems, and with every feature at once."""
    if arch != HOPPER:
        return
    for block_d, block_dv, windowed, _, config in every_row():
        same = replace(_CAUSAL if windowed else PLAIN, head_dim=block_d, head_dim_v=block_dv)
        lengths = (replace(same, seqlen_q=length, seqlen_k=length) for length in LENGTHS)
        kernels = {variant_of(plain, config): plain for plain in lengths if choose(plain) is config}
        for plain in kernels.values():
            yield _forward_case(plain, config, config.spill_budget)
        if windowed:
            everything = replace(
                plain,
                varlen=True,
                seqused_k=True,
                window_left=64,
                window_right=64,
                softcap=1.0,
                alibi=True,
                sink=True,
            )
            yield _forward_case(everything, config, config.features_spill_budget)
    window = replace(_CAUSAL, head_dim=128, head_dim_v=128, window_left=1023, seqlen_q=16384, seqlen_k=16384)
    config = choose(window)
    yield _forward_case(window, config, config.features_spill_budget)
    packed = replace(_CAUSAL, head_dim=128, head_dim_v=128, seqlen_q=4, total_q=8)
    yield _forward_case(packed, ForwardConfig(2, 128), 0)
    yield _table_case()


def _forward_case(problem: Problem, config: ForwardConfig, spill_budget: int) -> CompileCase:
    variant = variant_of(problem, config)
    descriptors = (view.type_name for view in views(problem, variant, *tensors(problem)))
    signature = dict(zip(("q_desc", "k_desc", "v_desc", "o_desc"), descriptors, strict=True))
    signature |= dict.fromkeys(Pointers._fields, "*fp32") | dict.fromkeys(Schedule._fields, "i32")
    signature |= dict.fromkeys(Numbers._fields, "fp32")
    for name, present in (("table", variant.QUEUED), ("seqused_k", problem.seqused_k)):
        if present:
            signature[name] = "*i32"
    return CompileCase(
        name=f"hopper forward {_name(problem, variant)}",
        kernel=forward_kernel,
        signature=signature,
        constants={"C": variant},
        options={"maxnreg": LAUNCH_REGISTERS[variant.WARPGROUPS]},
        spill_budget=spill_budget,
    )


def tensors(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of the problem's shapes, without memory."""
    rows = (problem.total_q,) if problem.varlen else (problem.batch, problem.seqlen_q)
    keys = (problem.total_k,) if problem.varlen else (problem.batch, problem.seqlen_k)
    q = torch.empty(*rows, problem.num_heads_q, problem.head_dim, dtype=problem.dtype, device="meta")
    k = torch.empty(*keys, problem.num_heads_kv, problem.head_dim, dtype=problem.dtype, device="meta")
    v = torch.empty(*keys, problem.num_heads_kv, problem.head_dim_v, dtype=problem.dtype, device="meta")
    return q, k, v


def _name(problem: Problem, variant: Variant) -> str:
    tile = f"{variant.BLOCK_M}x{variant.BLOCK_N}"
    mask = "window" if variant.HAS_LEFT else "causal" if variant.HAS_RIGHT else "full"
    features = "features" if variant.SOFTCAP else mask
    more = [
        word
        for word, present in (
            ("ping-pong", variant.PING_PONG),
            ("q in registers", variant.Q_IN_REGISTERS),
            ("o in parts", variant.O_IN_PARTS),
            ("lazy", variant.LAZY_RESCALE),
            ("packed", variant.PACK > 1),
            ("pairs", variant.PAIRED),
            ("queue", variant.QUEUED),
        )
        if present
    ]
    return " ".join((f"head_dim {variant.BLOCK_D}/{variant.BLOCK_DV}", tile, features, *more))


def _table_case() -> CompileCase:
    constants: dict[str, Any] = {"SEQUSED": True, "PAIRED": True, "BLOCK_M": 128, "WIDTH": 8, "CHUNK": CHUNK}
    pointers = ("table", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    integers = ("batch", "blocks", "total_q", "total_k", "capacity")
    return CompileCase(
        name="hopper tile table",
        kernel=tile_table_kernel,
        signature=dict.fromkeys(pointers, "*i32") | dict.fromkeys(integers, "i32"),
        constants=constants,
        tensor_cores=False,
    )
