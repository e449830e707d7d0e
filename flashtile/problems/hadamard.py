"""Incoherent processing: random signs and a Hadamard transform preserve q k^T and spread outliers.

FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), section 3.3, after QuIP (Chee et al. 2023,
arXiv:2307.13304). Written in torch, with the kernels' order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

HEADROOM = 2.0**-8
"""Factor that keeps a sum of 256 numbers of the largest magnitude finite."""


def signs(columns: int, seed: int, device: torch.device | str | None = None) -> Tensor:
    """Return (columns,) float32 of -1 and 1, the same on every device.

    The signs of 32 columns are the bits of one word: MurmurHash3's 32-bit finaliser (Appleby 2011) of the
    word's index and the seed.
    """
    column = torch.arange(columns, device=device)
    h = _low_32(column // 32 * 0x9E3779B1 + seed)
    h = _low_32((h ^ (h >> 16)) * 0x85EBCA6B)
    h = _low_32((h ^ (h >> 13)) * 0xC2B2AE35)
    return 1.0 - 2.0 * ((h ^ (h >> 16)) >> (column % 32) & 1).to(torch.float32)


def _low_32(x: Tensor) -> Tensor:
    return x & 0xFFFFFFFF


def transform(x: Tensor, seed: int) -> Tensor:
    """Multiply x (..., columns) by signs and Sylvester's Hadamard matrix; columns must be a power of 2.

    The result is not normalised: multiply it by :func:`normalizer` to make the transform orthogonal.
    """
    columns = x.shape[-1]
    x = x * (signs(columns, seed, x.device).to(x.dtype) * HEADROOM)
    apart = 1
    while apart < columns:
        a, b = x.unflatten(-1, (-1, 2, apart)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        apart *= 2
    return x


def normalizer(columns: int) -> float:
    """Return the factor that makes :func:`transform` orthogonal."""
    return 1 / (HEADROOM * columns**0.5)
