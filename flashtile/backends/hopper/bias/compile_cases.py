"""The Hopper kernels with an additive bias, for compilation ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from flashtile.backends.common.compile_report import CompileCase
from flashtile.backends.hopper.backward.config import choose as choose_backward
from flashtile.backends.hopper.backward.launch import views as backward_views
from flashtile.backends.hopper.bias.backward import backward_kernel
from flashtile.backends.hopper.bias.config import choose_forward
from flashtile.backends.hopper.bias.forward import forward_kernel
from flashtile.backends.hopper.bias.gradient import gradient_kernel
from flashtile.backends.hopper.bias.launch import (
    backward_variant_of,
    gradient_variant_of,
    gradient_views,
    rows_view,
    squares_views,
    variant_of,
)
from flashtile.backends.hopper.compile_cases import HOPPER, PLAIN, attention_case, tensors
from flashtile.backends.hopper.config import LAUNCH_REGISTERS
from flashtile.backends.hopper.forward.launch import views
from flashtile.problems.attention import Problem

_FULL = replace(PLAIN, bias=True)
_VARIANTS = {
    "full": _FULL,
    "causal": replace(_FULL, window_right=0),
    "features": replace(
        _FULL, varlen=True, seqused_k=True, window_left=64, window_right=64, softcap=1.0, sink=True,
        deterministic=True,
    ),
}  # fmt: skip
_SPILLS = {
    "forward": {64: (16, 0, 36), 128: (8, 84, 80)},
    "backward": {64: (60, 212, 508), 128: (132, 156, 316)},
    "gradient": {64: (40, 20, 4), 128: (40, 20, 8)},
}
"""Bytes by pass, head size and variant, in their order, the most of Triton 3.6 and 3.7."""


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Each variant at the head sizes of most models, with a bias that sequences share."""
    if arch != HOPPER:
        return
    for head_dim in (64, 128):
        for number, (name, any_head_dim) in enumerate(_VARIANTS.items()):
            problem = replace(any_head_dim, head_dim=head_dim, head_dim_v=head_dim)
            of_ds = _backward(name, problem, stores_ds=True)
            cases = _forward(name, problem), _backward(name, problem), _gradient(name, problem), of_ds
            for case in cases[: 3 if problem.varlen else 4]:
                kind = case.name.split()[2]
                budget = _SPILLS[kind][head_dim][number]
                telling = kind != "backward" and name == "causal" and head_dim == 64
                yield replace(case, spill_budget=budget, exhaustive=not telling)


def _bias(problem: Problem) -> torch.Tensor:
    return torch.empty(
        1, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k, dtype=problem.dtype, device="meta"
    )


def _forward(name: str, problem: Problem) -> CompileCase:
    variant = variant_of(problem, choose_forward(problem))
    bias = rows_view(problem, variant, _bias(problem))
    return attention_case(
        f"bias forward head_dim {problem.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N} {name}",
        forward_kernel,
        views(problem, variant, *tensors(problem)) | bias,
        variant,
        LAUNCH_REGISTERS[variant.WARPGROUPS],
        0,
    )


def _backward(name: str, problem: Problem, stores_ds: bool = False) -> CompileCase:
    variant = backward_variant_of(problem, choose_backward(problem), not stores_ds, stores_ds)
    bias = _bias(problem)
    if stores_ds:
        bias, name = bias.expand(problem.batch, -1, -1, -1).contiguous(), f"{name} dS"
    return attention_case(
        f"bias backward head_dim {problem.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N} {name}",
        backward_kernel,
        backward_views(problem, variant, *tensors(problem), resident_heads=3)
        | squares_views(problem, bias, stores_ds),
        variant,
        LAUNCH_REGISTERS[2],
        0,
    )


def _gradient(name: str, problem: Problem) -> CompileCase:
    problem = replace(problem, varlen=False, seqused_k=False)
    has_score_mod = backward_variant_of(problem, choose_backward(problem)).HAS_SCORE_MOD
    variant = gradient_variant_of(problem, has_score_mod)
    return attention_case(
        f"bias gradient head_dim {problem.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N} {name}",
        gradient_kernel,
        gradient_views(problem, variant, *tensors(problem), _bias(problem)),
        variant,
        LAUNCH_REGISTERS[2],
        0,
    )
