"""Memory layout of FP8 operands: blocks that share a scale, and V transposed in the kernels' key order.

Blocks are aligned to the kernels' tiles (FlashAttention-3, Shah et al. 2024, arXiv:2407.08608, section 3.3).
All scores of a row in a tile therefore have one scale, the product of a scale of q and one of k. Each packed
sequence starts a new block. Block i of sequence b has the index ``cu_seqlens[b] // rows + b + i`` among all
blocks. The index depends only on ``cu_seqlens[b]`` and is unique.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0

MAX_HEAD_DIM = 256
ROLES = ("q", "k", "v")
METHODS = ("block", "head", "tensor")

QUERY_BLOCK = 64
"""Number of rows of q that share a scale: the rows that one Hopper warpgroup computes."""
KEY_BLOCK = 128
"""Number of keys that share a scale of k and a scale of v, a multiple of the key tile."""
KEY_GROUP = 32
"""Number of keys within which V^T is permuted (:func:`key_order`)."""

SMALLEST_LARGEST = 2.0**-100
"""Lower bound for the largest magnitude of a block, so that scales are positive and inverses finite."""
LARGEST_RATIO = 2.0**64
"""Upper bound of the largest scale of v so far, divided by the unit of the accumulator.

The unit is the scale of v of the current block, unless this exceeds the bound. Then the unit is the largest
scale so far divided by ``LARGEST_RATIO``, and P is multiplied by the block's scale divided by the unit.
"""
P_EXPONENT = 8
"""Probabilities are multiplied by 2**8 before rounding. The products are at most 256, within e4m3's range."""


def rows_of(role: str) -> int:
    """Return the number of rows that share a scale under the method "block"."""
    return QUERY_BLOCK if role == "q" else KEY_BLOCK


def num_blocks(length: int, rows: int) -> int:
    return -(-length // rows)


def num_blocks_varlen(total: int, batch: int, rows: int) -> int:
    """Return a number that exceeds all block indices of packed sequences with ``total`` rows altogether."""
    return total // rows + batch


def first_block(start: int, b: int, rows: int) -> int:
    """Return the index of the first block of packed sequence ``b``, which starts at row ``start``."""
    return start // rows + b


def stored_head_dim(head_dim: int, transformed: bool) -> int:
    """Return the number of columns in which FP8 values of q or k are stored, a multiple of 16.

    TMA requires multiples of 16 bytes, and an element is one byte. If the values are Hadamard-transformed,
    the number is a power of 2. Columns beyond head_dim are zero before the transform, so products of q and k
    are unchanged.
    """
    if transformed:
        return max(16, 1 << (int(head_dim) - 1).bit_length())
    return -(-head_dim // 16) * 16


def key_order(num_keys: int, device: torch.device | str) -> Tensor:
    """Return the index of the key in each column of a stored V^T, (num_keys,) int64.

    ``num_keys`` is a multiple of 32. Within 32 columns, column ``16 a + 4 b + 2 c + d`` holds key
    ``16 a + 8 c + 2 b + d``. Each thread of a Hopper warpgroup then holds its scores of a row in the order in
    which the product P V reads P. Therefore P can stay in registers.
    """
    column = torch.arange(num_keys, device=device)
    a, b, c, d = column // 16 % 2, column // 4 % 4, column // 2 % 2, column % 2
    return column // KEY_GROUP * KEY_GROUP + 16 * a + 8 * c + 2 * b + d


HEADROOM = 2.0**-8
"""Factor on the transform's input. The sum of 256 of the largest float32 numbers is then finite."""


def hadamard_signs(columns: int, seed: int, device: torch.device | str) -> Tensor:
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


def hadamard_transform(x: Tensor, seed: int) -> Tensor:
    """Multiply x (..., columns) by signs and Sylvester's Hadamard matrix; columns must be a power of 2.

    The result is not normalised: multiply it by :func:`hadamard_normalizer` for an orthogonal transform.
    """
    columns = x.shape[-1]
    x = x * (hadamard_signs(columns, seed, x.device).to(x.dtype) * HEADROOM)
    apart = 1
    while apart < columns:
        a, b = x.unflatten(-1, (-1, 2, apart)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        apart *= 2
    return x


def hadamard_normalizer(columns: int) -> float:
    """Return the factor that makes :func:`hadamard_transform` orthogonal."""
    return 1 / (HEADROOM * columns**0.5)
