"""Compile cases of the flat product on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashtile.backends.hopper.linear.config import DEFAULT, MAX_ROWS, TILES, FlatConfig, make
from flashtile.backends.hopper.linear.launch import FlatLaunch
from flashtile.problems.linear import LinearProblem
from flashtile.tools.inspection.hopper import HOPPER
from flashtile.tools.inspection.portable_linear import everything, plain_problem, recorded
from flashtile.tools.inspection.report import CompileCase


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
            yield _case(name, problem, make(problem, tile))
    most = plain_problem(MAX_ROWS, (9, 0))
    for name, ended in everything(most).items():
        if name != "e4m3":
            yield _case(name, ended, make(ended, DEFAULT[MAX_ROWS, 2]))
    yield _case("K of 8 times an odd number", replace(most, K=4104), make(most, DEFAULT[MAX_ROWS, 2]))


def _case(name: str, problem: LinearProblem, config: FlatConfig) -> CompileCase:
    tile = f"{config.BLOCK_M}x{config.BLOCK_N}x{config.BLOCK_K} stages {config.num_stages}"
    name = f"hopper linear {name} {tile} warps {config.num_warps} x {config.programs_per_sm}"
    return replace(recorded(problem, FlatLaunch(problem, config)), name=name)
