"""How FP8 operands lie in memory: blocks that share a scale, and V transposed in the kernels' key order.

Blocks are those of a tile (FlashAttention-3, Shah et al. 2024, arXiv:2407.08608, section 3.3), so that a tile
of scores takes one product of scales. Packed sequences begin a block each: block i of sequence b
is number ``cu_seqlens[b] // rows + b + i``, which needs no look at other lengths and never overlaps.
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
"""Rows of q that share a scale: those of one warpgroup."""
KEY_BLOCK = 128
"""Keys that share a scale of k and one of v; a tile of keys divides it."""
KEY_GROUP = 32
"""Keys of a V^T that change places among each other (:func:`key_order`)."""

SMALLEST_LARGEST = 2.0**-100
"""Scales are made for magnitudes of at least this: they stay positive, and their inverses finite."""
LARGEST_RATIO = 2.0**64
"""How far apart, in an accumulator, blocks of v may lie in scale."""
P_EXPONENT = 8
"""Probabilities are rounded times 2**8: at most 256, they use e4m3's range."""


def rows_of(role: str) -> int:
    """Rows that share a scale under the method "block"."""
    return QUERY_BLOCK if role == "q" else KEY_BLOCK


def num_blocks(length: int, rows: int) -> int:
    return -(-length // rows)


def num_blocks_varlen(total: int, batch: int, rows: int) -> int:
    """Numbers that the blocks of ``batch`` sequences of ``total`` rows need, whatever their lengths."""
    return total // rows + batch


def first_block(start: int, b: int, rows: int) -> int:
    """The number of the first block of sequence ``b``, whose first row is ``start`` of all rows."""
    return start // rows + b


def stored_head_dim(head_dim: int, transformed: bool) -> int:
    """Columns of a stored q or k: whole 16 bytes, as TMA wants, and a power of 2 for the transform.

    Columns beyond head_dim are zeros before the transform, so that products of q and k stay what they are.
    """
    if transformed:
        return max(16, 1 << (int(head_dim) - 1).bit_length())
    return -(-head_dim // 16) * 16


def key_order(num_keys: int, device: torch.device | str | None = None) -> Tensor:
    """(num_keys,) int64, a multiple of 32: which key lies in each column of a stored V^T.

    Within 32 columns, column ``16 a + 4 b + 2 c + d`` holds key ``16 a + 8 c + 2 b + d``: the order in which
    a thread of a Hopper warpgroup holds a row of scores is then that in which the second product takes it,
    and P stays in its registers.
    """
    column = torch.arange(num_keys, device=device)
    a, b, c, d = column // 16 % 2, column // 4 % 4, column // 2 % 2, column % 2
    return column // KEY_GROUP * KEY_GROUP + 16 * a + 8 * c + 2 * b + d
