"""Configurations of the portable kernels: data, chosen by architecture, element size and head size.

Found offline with ``flashtile bench --tune``; nothing is tuned at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashtile.problem import Problem


@dataclass(frozen=True)
class KernelConfig:
    """Tile and launch of one kernel; ``spill_budget`` is the bytes of register spills that were accepted for it."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    spill_budget: int = 0


@dataclass(frozen=True)
class Config:
    """What one call gets. The portable backward is deterministic by construction, so both modes share it."""

    forward: KernelConfig
    dkdv: KernelConfig
    dq: KernelConfig
    precision: str
    """Of the matrix products: "ieee" is Triton's name for the exact product of the operands' own dtype."""


K = KernelConfig

# (family, element bytes, padded head_dim) -> (forward, dkdv, dq)
_TABLE: dict[tuple[str, int, int], tuple[KernelConfig, KernelConfig, KernelConfig]] = {
    # H100, measured.
    ("hopper", 2, 16): (K(128, 128, 4, 3), K(64, 64, 4, 2), K(64, 64, 4, 2)),
    ("hopper", 2, 32): (K(128, 128, 4, 3), K(64, 64, 4, 2), K(64, 64, 4, 2)),
    ("hopper", 2, 64): (K(128, 128, 4, 3), K(64, 64, 4, 3), K(64, 64, 4, 3)),
    ("hopper", 2, 128): (K(128, 128, 8, 3), K(64, 64, 4, 2), K(64, 64, 4, 2)),
    ("hopper", 2, 256): (K(64, 64, 4, 2), K(64, 64, 8, 1), K(64, 64, 8, 1)),
    ("hopper", 4, 16): (K(64, 32, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("hopper", 4, 32): (K(64, 32, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("hopper", 4, 64): (K(64, 32, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("hopper", 4, 128): (K(32, 32, 4, 1), K(32, 32, 8, 1), K(32, 32, 8, 1)),
    ("hopper", 4, 256): (K(32, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
    # A100.
    ("ampere", 2, 16): (K(128, 64, 4, 3), K(64, 64, 4, 2), K(64, 64, 4, 2)),
    ("ampere", 2, 32): (K(128, 64, 4, 3), K(64, 64, 4, 2), K(64, 64, 4, 2)),
    ("ampere", 2, 64): (K(128, 64, 4, 3), K(64, 64, 4, 2), K(64, 64, 4, 2)),
    ("ampere", 2, 128): (K(128, 64, 8, 2), K(64, 64, 8, 2), K(64, 64, 8, 2)),
    ("ampere", 2, 256): (K(64, 32, 8, 1), K(32, 32, 8, 1), K(32, 32, 8, 1)),
    ("ampere", 4, 16): (K(64, 32, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("ampere", 4, 32): (K(64, 32, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("ampere", 4, 64): (K(64, 32, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("ampere", 4, 128): (K(32, 32, 4, 1), K(32, 32, 8, 1), K(32, 32, 8, 1)),
    ("ampere", 4, 256): (K(32, 16, 8, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
    # Any other GPU: small tiles that fit 64 KiB of shared memory a block.
    ("other", 2, 16): (K(64, 64, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 2, 32): (K(64, 64, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 2, 64): (K(64, 64, 4, 2), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 2, 128): (K(64, 32, 4, 1), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 2, 256): (K(32, 32, 4, 1), K(32, 16, 8, 1), K(16, 32, 8, 1)),
    ("other", 4, 16): (K(32, 32, 4, 1), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 4, 32): (K(32, 32, 4, 1), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 4, 64): (K(32, 32, 4, 1), K(32, 32, 4, 1), K(32, 32, 4, 1)),
    ("other", 4, 128): (K(32, 16, 4, 1), K(16, 16, 4, 1), K(16, 16, 4, 1)),
    ("other", 4, 256): (K(16, 16, 4, 1), K(16, 16, 8, 1), K(16, 16, 8, 1)),
}


def padded(head_dim: int) -> int:
    """The power of two, at least 16, that a tile of ``head_dim`` columns takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def family(device: torch.device) -> str:
    """The part of the table for a device; the interpreter (CPU tensors) takes the smallest tiles."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "other"
    return family_of_capability(*torch.cuda.get_device_capability(device))


def family_of_capability(major: int, minor: int) -> str:
    if major in (9, 10):
        return "hopper"
    return "ampere" if (major, minor) in ((8, 0), (8, 7)) else "other"


def precision_of(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def choose(problem: Problem) -> Config:
    """The row of the table for a problem."""
    width = padded(max(problem.head_dim, problem.head_dim_v))
    rows = _TABLE[family(problem.device), problem.dtype.itemsize, width]
    return Config(*rows, precision=precision_of(problem.dtype))
