"""Configurations of the portable attention kernels, by architecture, element size and head size.

Timed configurations were found offline with ``python -m benchmarks.tune``. Nothing is tuned at run time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from flashtile.backends.common.config import KernelConfig, padded, scales_scores
from flashtile.backends.common.device import Target, capability
from flashtile.problems.attention import Problem
from flashtile.problems.common import UNLIMITED


@dataclass(frozen=True)
class Config:
    """Configuration of a call. It does not depend on ``deterministic``."""

    forward: KernelConfig
    dkdv: KernelConfig
    dq: KernelConfig
    precision: str
    """Triton's ``input_precision`` of the matrix products. It has no effect on 16-bit operands. "tf32x3"
    computes an fp32 product as three tf32 products on the tensor cores, which measured as exact as "ieee"."""


K = KernelConfig

# (family, element bytes, padded head_dim) -> (forward, forward with a window or causal, dkdv, dq).
_TABLE: dict[tuple[str, int, int], tuple[KernelConfig, KernelConfig, KernelConfig, KernelConfig]] = {
    # H100, tuned at sequence lengths of 512, 2048 and 8192, causal and not: the fastest of each search.
    ("hopper", 2, 16): (K(64, 64, 4, 3), K(64, 64, 4, 3), K(64, 64, 4, 3), K(128, 32, 4, 3)),
    ("hopper", 2, 32): (K(64, 64, 4, 3), K(64, 64, 4, 3), K(64, 64, 4, 3), K(128, 32, 4, 3)),
    ("hopper", 2, 64): (K(128, 64, 8, 3), K(64, 64, 4, 3), K(64, 64, 4, 3), K(128, 64, 4, 3)),
    ("hopper", 2, 128): (K(128, 128, 8, 3), K(64, 64, 4, 3), K(64, 128, 8, 3), K(128, 64, 8, 3)),
    ("hopper", 2, 256): (K(128, 64, 8, 2), K(128, 64, 8, 2), K(64, 64, 8, 2), K(128, 32, 8, 3)),
    # fp32 has 64 rows and 4 warps, or 32 rows: with 8 warps, 64 rows reached 14 TFLOP/s, and a tile of 64 x
    # 16 at head_dim 256 read outside of its memory with Triton 3.6.
    ("hopper", 4, 16): (K(64, 32, 4, 2), K(64, 32, 4, 2), K(32, 64, 4, 1), K(64, 32, 4, 1)),
    ("hopper", 4, 32): (K(64, 32, 4, 2), K(64, 32, 4, 2), K(32, 64, 4, 1), K(64, 32, 4, 1)),
    ("hopper", 4, 64): (K(64, 64, 4, 1), K(64, 64, 4, 1), K(32, 32, 4, 1), K(64, 32, 4, 1)),
    ("hopper", 4, 128): (K(32, 32, 4, 1), K(32, 32, 4, 1), K(32, 32, 8, 1), K(32, 32, 4, 1)),
    ("hopper", 4, 256): (K(32, 32, 8, 1), K(32, 32, 8, 1), K(16, 16, 4, 1), K(16, 32, 8, 1)),
    # Heads over 256: tiles are small because they span the whole head. Compiled only, not timed.
    ("hopper", 2, 512): (K(32, 32, 8, 1), K(32, 32, 8, 1), K(32, 16, 8, 1), K(32, 32, 8, 1)),
    ("hopper", 4, 512): (K(16, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
    ("hopper", 2, 1024): (K(32, 32, 8, 1), K(32, 32, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
    # A100: tiles that fit with few spills; not timed.
    ("ampere", 2, 16): (K(128, 64, 4, 3), K(128, 64, 4, 3), K(64, 64, 4, 2), K(64, 64, 4, 2)),
    ("ampere", 2, 32): (K(128, 64, 4, 3), K(128, 64, 4, 3), K(64, 64, 4, 2), K(64, 64, 4, 2)),
    ("ampere", 2, 64): (K(128, 64, 4, 3), K(128, 64, 4, 3), K(64, 64, 4, 2), K(64, 64, 4, 2)),
    ("ampere", 2, 128): (K(128, 64, 8, 2), K(128, 64, 8, 2), K(64, 64, 8, 2), K(64, 64, 8, 2)),
    ("ampere", 2, 256): (K(64, 32, 8, 1), K(64, 32, 8, 1), K(32, 32, 8, 1), K(32, 32, 8, 1)),
    ("ampere", 4, 16): (K(64, 32, 4, 2), K(64, 32, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("ampere", 4, 32): (K(64, 32, 4, 2), K(64, 32, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("ampere", 4, 64): (K(64, 32, 4, 2), K(64, 32, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("ampere", 4, 128): (K(32, 32, 4, 1), K(32, 32, 4, 1), K(32, 32, 8, 1), K(32, 32, 8, 1)),
    ("ampere", 4, 256): (K(32, 32, 8, 1), K(32, 32, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
    ("ampere", 2, 512): (K(32, 32, 8, 1), K(32, 32, 8, 1), K(32, 16, 8, 1), K(32, 16, 8, 1)),
    ("ampere", 4, 512): (K(16, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
    ("ampere", 2, 1024): (K(32, 16, 8, 1), K(32, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
    # Any other GPU: small tiles that fit 64 KiB of shared memory a block; not timed.
    ("other", 2, 16): (K(64, 64, 4, 2), K(64, 64, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 2, 32): (K(64, 64, 4, 2), K(64, 64, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 2, 64): (K(64, 64, 4, 2), K(64, 64, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 2, 128): (K(64, 32, 4, 1), K(64, 32, 4, 1), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 2, 256): (K(32, 32, 4, 1), K(32, 32, 4, 1), K(32, 16, 8, 1), K(16, 32, 8, 1)),
    ("other", 4, 16): (K(32, 32, 4, 1), K(32, 32, 4, 1), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 4, 32): (K(32, 32, 4, 1), K(32, 32, 4, 1), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 4, 64): (K(32, 32, 4, 1), K(32, 32, 4, 1), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 4, 128): (K(32, 16, 4, 1), K(32, 16, 4, 1), K(16, 16, 4, 1), K(16, 16, 4, 1)),
    ("other", 4, 256): (K(16, 16, 4, 1), K(16, 16, 4, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
    ("other", 2, 512): (K(16, 16, 4, 1), K(16, 16, 4, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
    ("other", 4, 512): (K(16, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
    # Heads over 512, for the interpreter only: they do not fit on a GPU.
    ("other", 2, 1024): (K(16, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
    ("other", 4, 1024): (K(16, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
}
HEAD_DIMS = (16, 32, 64, 128, 256, 512, 576)
"""Head sizes of which each row of the table is compiled in tests. 576 (MLA) is the one with a row of 1024."""


def dbias_tile(config: Config) -> KernelConfig:
    """Return the tile of the kernel that computes the bias's gradient.

    This kernel holds a tile of each of q, k, v and dout at the same time. Its tile sizes were not timed.
    """
    # Three stages of dkdv stand for enough shared memory: 128 x 64 in two stages then compile without spills.
    if config.dkdv.num_stages < 3:
        return replace(config.dkdv, num_stages=1)
    return K(128, 64, 8, 2)


def family(device: torch.device | Target) -> str:
    """Return the device's family, a key of the tables of configurations: "hopper", "ampere" or "other".

    CPU tensors (Triton's interpreter) belong to "other", which has the smallest tiles.
    """
    return family_of_capability(*capability(device))


def family_of_capability(major: int, minor: int) -> str:
    # 8.0 and 8.7 have at least 160 KiB of shared memory per block, other GPUs of compute capability 8 have
    # 99.
    if major in (9, 10):
        return "hopper"
    return "ampere" if (major, minor) in ((8, 0), (8, 7)) else "other"


def precision_of(table_family: str, element_bytes: int) -> str:
    """Return Triton's ``input_precision`` for a family of GPUs.

    "tf32x3" needs tensor cores with tf32. With 16-bit operands the value has no effect, but Triton refuses
    "tf32" for most of AMD's GPUs. These belong to the family "other", which gets "ieee".
    """
    if table_family == "other":
        return "ieee"
    return "tf32x3" if element_bytes == 4 else "tf32"


def row(table_family: str, element_bytes: int, width: int, windowed: bool) -> Config:
    """Return the configuration in the table for these arguments; ``width`` is a padded head_dim."""
    forward, forward_windowed, dkdv, dq = _TABLE[table_family, element_bytes, width]
    # The three products of "tf32x3" need too many registers at this width.
    precision = "ieee" if (element_bytes, width) == (4, 512) else precision_of(table_family, element_bytes)
    return Config(forward_windowed if windowed else forward, dkdv, dq, precision)


def row_for(capability: tuple[int, int], element_bytes: int, width: int, windowed: bool) -> Config:
    """The configuration for devices of this compute capability; ``width`` is a padded head_dim."""
    config = row(family_of_capability(*capability), element_bytes, width, windowed)
    if capability[0] == 10 and element_bytes == 2 and width >= 256:
        # On compute capability 10, Hopper's backward tiles exceed the shared memory of a block.
        smaller = row("ampere", element_bytes, width, windowed)
        return replace(config, dkdv=smaller.dkdv, dq=smaller.dq)
    return config


SCORES_A_THREAD = 32
"""Maximum scores per thread with masks, biases or dropout. Found by counting spills, not by timing."""


_DQ_FOR_GENERAL_MASKS = {K(128, 64, 4, 3): K(64, 32, 4, 3), K(128, 64, 8, 3): K(128, 64, 8, 3)}
"""Hopper's dq tile at head_dim 64 and 128 -> the tile that was fastest with dropout and with a bias.

On an H200 with S 2048, 64 x 32 with four warps took 1166 instead of 1628 us with dropout, and 996 instead of
1543 us with a bias. At head_dim 128, keeping three stages took 529 instead of 657 us."""


def for_general_masks(config: Config) -> Config:
    """Adapt ``config`` to masks, biases and dropout, which need additional registers and shared memory."""
    dq = config.dq
    if dq in _DQ_FOR_GENERAL_MASKS:
        return replace(config, dq=_DQ_FOR_GENERAL_MASKS[dq])
    if SCORES_A_THREAD * 32 * dq.num_warps < dq.BLOCK_M * dq.BLOCK_N:
        dq = replace(dq, num_warps=min(2 * dq.num_warps, 8))
    return replace(config, dq=replace(dq, num_stages=max(dq.num_stages - 1, 1)))


_HOPPER_WITH_FUNCTIONS: dict[int, tuple[KernelConfig, KernelConfig, KernelConfig]] = {
    16: (K(64, 64, 4, 3), K(64, 64, 8, 2), K(128, 64, 8, 2)),
    32: (K(64, 64, 4, 3), K(64, 64, 8, 2), K(128, 64, 8, 2)),
    64: (K(64, 64, 4, 3), K(64, 64, 8, 2), K(128, 64, 8, 2)),
    128: (K(64, 64, 4, 3), K(64, 64, 8, 2), K(128, 64, 8, 2)),
    256: (K(64, 64, 8, 2), K(64, 32, 8, 1), K(64, 32, 8, 2)),
    512: (K(32, 32, 8, 1), K(32, 16, 8, 1), K(32, 32, 8, 1)),
    1024: (K(32, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
}
"""Configurations with score or mask functions on Hopper, for 16-bit inputs: padded head_dim -> forward, dkdv,
dq.

They compile with few spills or none. None was timed."""


def row_with_functions(problem: Problem, table_family: str, element_bytes: int, width: int) -> Config:
    """Return the configuration of a call with ``score_mod``, ``mask_mod`` or a block mask.

    16-bit inputs on Hopper have a table of their own. Other calls use the configuration for windows, with at
    most two stages. Tile sizes are reduced until they divide the block sizes of the block mask.
    """
    assert problem.mods is not None
    plain = row(table_family, element_bytes, width, windowed=True)
    kernels = (plain.forward, plain.dkdv, plain.dq)
    if table_family == "hopper" and element_bytes == 2:
        kernels = _HOPPER_WITH_FUNCTIONS[width]
    else:
        kernels = tuple(replace(one, num_stages=min(one.num_stages, 2)) for one in kernels)  # type: ignore[assignment]
    size_q, size_kv = problem.mods.block_size or (0, 0)  # without a block mask, gcd(n, 0) is n
    forward, dkdv, dq = (
        replace(one, BLOCK_M=math.gcd(one.BLOCK_M, size_q), BLOCK_N=math.gcd(one.BLOCK_N, size_kv))
        for one in kernels
    )
    return Config(forward, dkdv, dq, plain.precision)


_WITH_TANGENTS: dict[tuple[str, int, int], KernelConfig] = {
    ("hopper", 2, 16): K(64, 64, 4, 2),
    ("hopper", 2, 32): K(64, 64, 4, 2),
    ("hopper", 2, 64): K(128, 64, 8, 3),
    ("hopper", 2, 128): K(128, 32, 8, 3),
    ("hopper", 2, 256): K(32, 32, 8, 1),
    ("hopper", 4, 16): K(64, 32, 4, 2),
    ("hopper", 4, 32): K(64, 32, 4, 2),
    ("hopper", 4, 64): K(64, 32, 4, 1),
    ("hopper", 4, 128): K(16, 16, 4, 1),
    ("ampere", 2, 128): K(64, 32, 8, 2),
    # Any other GPU, and A100 at other head sizes.
    ("other", 2, 16): K(64, 32, 4, 2),
    ("other", 2, 32): K(64, 32, 4, 2),
    ("other", 2, 64): K(64, 32, 4, 2),
    ("other", 2, 128): K(64, 32, 8, 1),
    ("other", 2, 256): K(32, 32, 8, 1),
    ("other", 4, 16): K(32, 32, 4, 1),
    ("other", 4, 32): K(32, 32, 4, 1),
    ("other", 4, 64): K(32, 32, 4, 1),
    ("other", 4, 128): K(16, 16, 4, 1),
}
"""Configurations of the forward kernel in forward mode, by family, element bytes and padded head_dim.

It has two accumulators, and twice as many tiles in shared memory. Found by counting spills. The third stage
of Hopper's tiles was timed: 0.89 of the time of two stages at head_dim 64, and 0.78 at 128 (H200, 8,192
tokens, no mask)."""

_WIDE_WITH_TANGENTS = {(2, 64): K(128, 128, 8, 3), (2, 128): K(128, 64, 8, 2)}
"""Tiles in forward mode on compute capability 9 of calls that :func:`_has_bare_blocks` accepts, by element
bytes and padded head_dim.

The accumulators are corrected once per block of keys. Blocks of half as many keys, also in two stages, took
1.26 times as long at head_dim 64, and 1.43 times at 128. Two stages at head_dim 64 took 1.08 times as long; a
third one does not fit at 128. Other calls would spill up to 1,600 bytes. Compute
capability 10 has 512 columns of tensor memory, and these tiles need 640 and more."""


def has_tangents(element_bytes: int, head_dim: int) -> bool:
    """Whether heads of this size have a configuration in forward mode. Wider ones would spill everything."""
    return ("other", element_bytes, padded(head_dim)) in _WITH_TANGENTS


def _has_bare_blocks(problem: Problem) -> bool:
    """Whether a score is its product alone, and a row sees all keys up to its last one.

    Only the last blocks of keys are then masked.
    """
    changed = problem.mods is not None or scales_scores(problem)
    return not changed and problem.needs_general_mask is None and problem.window_left == UNLIMITED


def choose_tangents(problem: Problem) -> Config:
    """The configuration for a problem in forward mode. Only its forward kernel is used."""
    config = choose(problem)
    key = problem.dtype.itemsize, padded(max(problem.head_dim, problem.head_dim_v))
    rows = [_WITH_TANGENTS.get((name, *key)) for name in (family(problem.device), "other")]
    if capability(problem.device)[0] == 9 and _has_bare_blocks(problem):
        rows.insert(0, _WIDE_WITH_TANGENTS.get(key))
    # Only Triton's interpreter takes heads that have no row.
    tile = next(filter(None, rows), K(16, 16, 8, 1))
    if problem.mods is not None and problem.mods.block_size is not None:
        size_q, size_kv = problem.mods.block_size
        tile = replace(tile, BLOCK_M=math.gcd(tile.BLOCK_M, size_q), BLOCK_N=math.gcd(tile.BLOCK_N, size_kv))
    return replace(config, forward=tile)


def choose(problem: Problem) -> Config:
    """The configuration for a problem."""
    width = padded(max(problem.head_dim, problem.head_dim_v))
    if problem.mods is not None:
        return row_with_functions(problem, family(problem.device), problem.dtype.itemsize, width)
    needs_general_mask = problem.needs_general_mask is not None
    windowed = problem.has_window or needs_general_mask
    config = row_for(capability(problem.device), problem.dtype.itemsize, width, windowed)
    return for_general_masks(config) if needs_general_mask else config
