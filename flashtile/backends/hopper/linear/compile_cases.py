"""The flat product with a ring, for compilation ahead of time (``flashtile inspect``, tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashtile.backends.common.linear_launch import end_variant
from flashtile.backends.hopper.compile_cases import HOPPER
from flashtile.backends.hopper.linear.config import DEFAULT, TILES, WARPS, FlatConfig, make
from flashtile.backends.hopper.linear.kernel import flat_kernel
from flashtile.backends.hopper.linear.launch import variant_of
from flashtile.backends.portable.linear.compile_cases import absent, everything, plain_problem, types_of
from flashtile.compile_report import CompileCase
from flashtile.linear.problem import LinearProblem


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Each tile with room for 16 rows without ends, and the default one with each."""
    if arch != HOPPER:
        return
    few, most = (plain_problem(rows, (9, 0)) for rows in TILES)
    yield _case("plain", few, make(few, DEFAULT[few.M]))
    for tile in TILES[most.M]:
        yield _case("plain", most, make(most, tile))
    for name, ended in everything(most).items():
        yield _case(name, ended, make(ended, DEFAULT[most.M]))
    narrow = _case("K of 8 times an odd number", most, make(most, DEFAULT[most.M]))
    yield replace(narrow, divisible_by_16=frozenset())


def _case(name: str, problem: LinearProblem, config: FlatConfig) -> CompileCase:
    signature = types_of(flat_kernel, problem, True)
    constants = {"C": variant_of(problem, config), "E": end_variant(problem)}
    constants |= {name: None for name in absent(problem, False) if name in signature}
    tile = f"{config.BLOCK_M}x{config.BLOCK_N}x{config.BLOCK_K} stages {config.num_stages}"
    return CompileCase(
        name=f"hopper linear {name} {tile}",
        kernel=flat_kernel,
        signature={name: kind for name, kind in signature.items() if name not in constants},
        constants=constants,
        divisible_by_16=frozenset(("K", "x_stride", "w_stride", "y_stride", "residual_stride")),
        num_warps=WARPS,
    )
