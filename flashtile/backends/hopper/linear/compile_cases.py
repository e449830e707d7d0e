"""Configurations of the flat product for compilation ahead of time (``flashtile inspect``, tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashtile.backends.common.compile_report import CompileCase
from flashtile.backends.common.linear import epilogue_variant
from flashtile.backends.hopper.compile_cases import HOPPER
from flashtile.backends.hopper.linear.config import DEFAULT, MAX_ROWS, TILES, FlatConfig, make
from flashtile.backends.hopper.linear.kernel import flat_kernel
from flashtile.backends.hopper.linear.launch import flat_variant
from flashtile.backends.portable.linear.compile_cases import (
    ALIGNED,
    PRODUCT_TYPES,
    everything,
    plain_problem,
    pointer_types,
)
from flashtile.problems.linear import LinearProblem


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Yield each tile with the plain epilogue, and the default tile of 16 rows with every other epilogue.

    The tiles that TILES lists for e4m3 weights are compiled with e4m3 weights. The last case has K = 4104,
    which is 8 times an odd number.
    """
    if arch != HOPPER:
        return
    for (rows, width), tiles in TILES.items():
        name, problem = "plain", plain_problem(rows, (9, 0))
        if width == 1:
            name, problem = "e4m3", everything(problem)["e4m3"]
        for tile in tiles:
            config = make(problem, tile)
            default = config == make(problem, DEFAULT[rows, width])
            yield replace(_case(name, problem, config), exhaustive=not default)
    most = plain_problem(MAX_ROWS, (9, 0))
    for name, ended in everything(most).items():
        if name != "e4m3":
            yield _case(name, ended, make(ended, DEFAULT[MAX_ROWS, 2]))
    odd = _case("K of 8 times an odd number", replace(most, K=4104), make(most, DEFAULT[MAX_ROWS, 2]))
    yield replace(odd, divisible_by_16=frozenset())


def _case(name: str, problem: LinearProblem, config: FlatConfig) -> CompileCase:
    tile = f"{config.BLOCK_M}x{config.BLOCK_N}x{config.BLOCK_K} stages {config.num_stages}"
    return CompileCase(
        name=f"hopper linear {name} {tile} warps {config.num_warps} x {config.programs_per_sm}",
        kernel=flat_kernel,
        signature={"pointers": pointer_types(problem, True), **PRODUCT_TYPES},
        constants={"C": flat_variant(problem, config), "E": epilogue_variant(problem)},
        divisible_by_16=ALIGNED,
        num_warps=config.num_warps,
    )
