"""Tiles of the kernels with functions: those of the plain kernels, with fewer stages and more warps.

On Hopper they are tiles that compile with few spills or none. None was timed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from flashtile.backends.common.config import KernelConfig
from flashtile.backends.common.launch import padded
from flashtile.backends.portable.config import Config, family, row
from flashtile.problems.attention import Problem

K = KernelConfig

_HOPPER: dict[int, tuple[KernelConfig, KernelConfig, KernelConfig]] = {
    16: (K(64, 64, 4, 3), K(64, 64, 8, 2), K(128, 64, 8, 2)),
    32: (K(64, 64, 4, 3), K(64, 64, 8, 2), K(128, 64, 8, 2)),
    64: (K(64, 64, 4, 3), K(64, 64, 8, 2), K(128, 64, 8, 2)),
    128: (K(64, 64, 4, 3), K(64, 64, 8, 2), K(128, 64, 8, 2)),
    256: (K(64, 64, 8, 2), K(64, 32, 8, 1), K(64, 32, 8, 2, 24)),
    512: (K(32, 32, 8, 1), K(32, 16, 8, 1), K(32, 32, 8, 1)),
    1024: (K(32, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
}
"""Configurations for 16-bit inputs, by padded head_dim: forward, dkdv, dq."""


def choose(problem: Problem) -> Config:
    """Return the configuration of a call with score or mask functions."""
    width = padded(max(problem.head_dim, problem.head_dim_v))
    return of_row(problem, family(problem.device), problem.dtype.itemsize, width)


def of_row(problem: Problem, table_family: str, element_bytes: int, width: int) -> Config:
    """Return the configuration for a row of the table. Tiles divide the blocks of a block mask."""
    assert problem.mods is not None
    plain = row(table_family, element_bytes, width, windowed=True)
    kernels = (plain.forward, plain.dkdv, plain.dq)
    if table_family == "hopper" and element_bytes == 2:
        kernels = _HOPPER[width]
    else:
        kernels = tuple(replace(one, num_stages=min(one.num_stages, 2)) for one in kernels)  # type: ignore[assignment]
    size_q, size_kv = problem.mods.block_size or (0, 0)  # gcd(n, 0) is n
    forward, dkdv, dq = (
        replace(one, BLOCK_M=math.gcd(one.BLOCK_M, size_q), BLOCK_N=math.gcd(one.BLOCK_N, size_kv))
        for one in kernels
    )
    return Config(forward, dkdv, dq, plain.precision)
