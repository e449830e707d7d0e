"""Configuration of a kernel, sizes of tiles, and strides: what backends choose without Triton."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.problems.attention import Problem


@dataclass(frozen=True)
class KernelConfig:
    """Tile and launch of one kernel."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


RAGGED_ROWS = 2**30
"""Rows of a ragged descriptor (``tma.ragged_view``), and the maximum number of rows of its tensor."""


class TokenStrides(NamedTuple):
    """Strides of q, k, v or a cache, in elements.

    ``batch`` is the stride between pages in a paged cache, and 0 for packed sequences.
    """

    batch: Any
    token: Any
    head: Any


class QkvStrides(NamedTuple):
    """Strides of q, k (or its cache) and v, as :class:`TokenStrides` but in one structure.

    The fields are flat: after a branch, Triton 3.6 forgets a stride of 1 in a structure within a structure.
    For a transposed v, ``v_token`` is the stride from one feature to the next.
    """

    q_batch: Any
    q_token: Any
    q_head: Any
    k_batch: Any
    k_token: Any
    k_head: Any
    v_batch: Any
    v_token: Any
    v_head: Any


def token_strides(tensor: Tensor) -> TokenStrides:
    """Return the strides of a tensor (batch, seqlen, heads, head_dim) or (total, heads, head_dim)."""
    return TokenStrides(tensor.stride(0) if tensor.dim() == 4 else 0, tensor.stride(-3), tensor.stride(-2))


def is_aligned(tensor: Tensor) -> bool:
    """Whether Triton loads rows of ``tensor`` asynchronously.

    The address must be a multiple of 16 bytes, and all strides but the last multiples of 16 elements.
    """
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in tensor.stride()[:-1])


def padded(head_dim: int, least: int = 16) -> int:
    """Return ``head_dim`` rounded up to a power of two, at least ``least``."""
    return max(least, 1 << (head_dim - 1).bit_length())


def has_adjacent_tokens(*tensors: Tensor) -> bool:
    """Whether tokens of any of the tensors (..., seqlen, heads, head_dim) lie one element apart.

    So do those of one head with one column, a single token, whose stride may be any, and rows that overlap.
    """
    return any(tensor.stride(-3) == 1 for tensor in tensors)


def tile_widths(
    head_dim: int, head_dim_v: int, aligned: bool, adjacent: bool, least: int = 16
) -> tuple[int, int]:
    """Return the columns of the tiles of k and of v: head sizes rounded up to powers of two.

    ``aligned``: whether Triton loads both asynchronously (:func:`is_aligned`); ``adjacent``:
    :func:`has_adjacent_tokens` of k and v.

    Tiles that are not loaded asynchronously share one address in shared memory. If their swizzles also
    differ, the descriptors of Q K^T and P V differ in the upper half only. ptxas 12.8, which Triton 3.6 and
    3.7 bring, then takes the upper half for P V from registers that hold something else, so P V reads out of
    range. Such tiles get equal widths, which gives them equal swizzles. Adjacent tokens need 64 columns:
    Triton stores their tile transposed, in rows of BLOCK_N keys, which have the swizzle of 64 columns, 128
    bytes. Triton 3.8 (ptxas 12.9) needs none of this.
    """
    width, width_v = padded(head_dim, least), padded(head_dim_v, least)
    if not aligned:
        width = width_v = max(width, width_v, 64 if adjacent else 0)
    return width, width_v


def scales_scores(problem: Problem) -> bool:
    """Whether a score is more than the product q k^T times a positive scale.

    The largest score of a row then need not belong to the row's largest product.
    """
    return problem.softcap > 0 or problem.alibi or problem.bias or problem.softmax_scale <= 0


def outer_stride(tensor: Tensor | None) -> int:
    """Return the stride of the first dimension, from one sequence to the next, in elements.

    It is 0 if ``tensor`` is None, or if it has one dimension, because all sequences then share it.
    """
    return tensor.stride(0) if tensor is not None and tensor.dim() > 1 else 0


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def allocator(
    like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, zeroed: bool = False
) -> Callable[[Tensor], Tensor]:
    """Return the fastest torch function that allocates contiguous memory of this shape and dtype.

    The function takes a tensor that has the shape, strides and dtype of ``like``. It allocates on the device
    of that tensor.
    """
    if (like.shape, like.stride(), like.dtype) == (shape, contiguous_strides(shape), dtype):
        return torch.zeros_like if zeroed else torch.empty_like
    # The shape is passed as separate arguments: parsing a tuple takes twice as long.
    if zeroed:
        return lambda tensor: tensor.new_zeros(*shape, dtype=dtype)
    return lambda tensor: tensor.new_empty(*shape, dtype=dtype)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` >= 1 that is at most ``most``; 1 if ``most`` is below 1."""
    return next(size for size in range(max(min(most, number), 1), 0, -1) if number % size == 0)
