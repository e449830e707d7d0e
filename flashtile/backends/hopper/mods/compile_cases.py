"""The Hopper kernels with functions, for compilation ahead of time: a learned bias under a document mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashtile.backends.common.compile_report import CompileCase
from flashtile.backends.hopper.backward.launch import views as backward_views
from flashtile.backends.hopper.compile_cases import HOPPER, PLAIN, attention_case, tensors
from flashtile.backends.hopper.config import LAUNCH_REGISTERS
from flashtile.backends.hopper.forward.launch import views
from flashtile.backends.hopper.mods.backward import backward_kernel
from flashtile.backends.hopper.mods.config import choose_backward, choose_forward
from flashtile.backends.hopper.mods.forward import LISTS, forward_kernel
from flashtile.backends.hopper.mods.launch import backward_variant_of, variant_of
from flashtile.backends.portable.mods.arguments import CAPTURED
from flashtile.backends.portable.mods.compile_cases import WITH_MODS
from flashtile.problems.attention import Problem

_MODS = WITH_MODS.mods
assert _MODS is not None
_VARIANTS = {
    "block mask": replace(PLAIN, mods=replace(_MODS, score_mod="")),
    "block mask, score_mod": replace(PLAIN, mods=_MODS),
    "mask_mod": replace(PLAIN, window_right=0, mods=replace(_MODS, score_mod="", block_size=None)),
    "score_mod": replace(
        PLAIN, window_right=0, mods=replace(_MODS, mask_mod="", ranks=(2,), block_size=None)
    ),
    "ragged, all": replace(PLAIN, seqlen_k=4001, sink=True, mods=replace(_MODS, block_size=(256, 256))),
}

_SPILLS = {
    "forward": {64: (0, 100, 0, 0, 16), 128: (4, 104, 76, 80, 48)},
    "backward": {64: (132, 48, 200, 60, 52), 128: (128, 244, 144, 240, 324)},
}
"""Bytes by pass, head size and variant, in their order, the most of Triton 3.6 and 3.7."""


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Each variant at the head sizes of most models."""
    if arch != HOPPER:
        return
    for head_dim in (64, 128):
        for number, (name, any_head_dim) in enumerate(_VARIANTS.items()):
            problem = replace(any_head_dim, head_dim=head_dim, head_dim_v=head_dim)
            yield _forward(name, problem, _SPILLS["forward"][head_dim][number])
            yield _backward(name, problem, _SPILLS["backward"][head_dim][number])


def _forward(name: str, problem: Problem, spill_budget: int) -> CompileCase:
    config = choose_forward(problem)
    variant = variant_of(problem, config)
    case = attention_case(
        f"mods forward head_dim {problem.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N} {name}",
        forward_kernel,
        views(problem, variant, *tensors(problem)),
        variant,
        LAUNCH_REGISTERS[variant.WARPGROUPS],
        spill_budget,
    )
    return replace(with_functions(case), exhaustive=name != "block mask" or problem.head_dim != 64)


def _backward(name: str, problem: Problem, spill_budget: int) -> CompileCase:
    config = choose_backward(problem)
    variant = backward_variant_of(problem, config)
    case = attention_case(
        f"mods backward head_dim {problem.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N} {name}",
        backward_kernel,
        backward_views(problem, variant, *tensors(problem), resident_heads=3),
        variant,
        LAUNCH_REGISTERS[2],
        spill_budget,
    )
    return replace(with_functions(case), exhaustive=True)


def with_functions(case: CompileCase) -> CompileCase:
    """The case with the types of captured tensors and lists."""
    types = dict.fromkeys((*LISTS, *CAPTURED[1:]), "*i32") | {CAPTURED[0]: "*fp32"}
    return replace(case, signature=case.signature | types)
