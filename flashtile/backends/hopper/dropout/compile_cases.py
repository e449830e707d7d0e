"""The Hopper kernels with dropout, for compilation ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashtile.backends.common.compile_report import CompileCase
from flashtile.backends.hopper.backward.launch import views as backward_views
from flashtile.backends.hopper.compile_cases import HOPPER, PLAIN, attention_case, tensors
from flashtile.backends.hopper.config import LAUNCH_REGISTERS
from flashtile.backends.hopper.dropout.config import choose_backward, choose_forward
from flashtile.backends.hopper.dropout.kernels import backward_kernel, forward_kernel
from flashtile.backends.hopper.dropout.launch import backward_variant_of, variant_of
from flashtile.backends.hopper.forward.launch import views
from flashtile.problems.attention import Problem

_FULL = replace(PLAIN, num_heads_kv=PLAIN.num_heads_q, dropout_p=0.1)
_VARIANTS = {
    "full": _FULL,
    "causal": replace(_FULL, window_right=0),
    "features": replace(
        _FULL,
        num_heads_kv=PLAIN.num_heads_kv,
        varlen=True,
        seqused_k=True,
        window_left=64,
        window_right=64,
        softcap=1.0,
        alibi=True,
        sink=True,
        deterministic=True,
    ),
}
_SPILLS = {
    "forward": {64: (0, 0, 44), 128: (0, 72, 132)},
    "backward": {64: (32, 60, 104), 128: (100, 212, 864)},
}
"""Bytes by pass, head size and variant, in their order, the most of Triton 3.6 and 3.7."""


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Each variant at the head sizes of most models."""
    if arch != HOPPER:
        return
    for head_dim in (64, 128):
        for number, (name, any_head_dim) in enumerate(_VARIANTS.items()):
            problem = replace(any_head_dim, head_dim=head_dim, head_dim_v=head_dim)
            for part, case in (("forward", _forward), ("backward", _backward)):
                compiled = case(name, problem, _SPILLS[part][head_dim][number])
                yield replace(
                    compiled,
                    signature=compiled.signature | {"rng_state": "*i64"},
                    exhaustive=head_dim == 64 or name != "causal",
                )


def _forward(name: str, problem: Problem, spill_budget: int) -> CompileCase:
    variant = variant_of(problem, choose_forward(problem))
    return attention_case(
        f"dropout forward head_dim {problem.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N} {name}",
        forward_kernel,
        views(problem, variant, *tensors(problem)),
        variant,
        LAUNCH_REGISTERS[variant.WARPGROUPS],
        spill_budget,
    )


def _backward(name: str, problem: Problem, spill_budget: int) -> CompileCase:
    variant = backward_variant_of(problem, choose_backward(problem))
    return attention_case(
        f"dropout backward head_dim {problem.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N} {name}",
        backward_kernel,
        backward_views(problem, variant, *tensors(problem), resident_heads=3),
        variant,
        LAUNCH_REGISTERS[2],
        spill_budget,
    )
