"""One head of attention in HBM and which keys its queries see: what all algorithms here start from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.algorithms.memory import Array, Memory, Sram, SramExceededError
from flashtile.backends.cpu.blocks import sees_all, split, visible_keys
from flashtile.checks.attention import check_call
from flashtile.problems.attention import NO_EXTRAS, Options, Problem

LOWEST = torch.finfo(torch.float32).min
"""Where a running maximum starts: finite, so that exp(-inf - LOWEST) of a hidden score is 0 and not NaN."""


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees, aligned at the bottom right; a window side of -1 is unlimited."""

    seqlen_q: int
    seqlen_k: int
    left: int = -1
    right: int = -1

    def sees_any(self, rows: range, keys: range) -> bool:
        """Whether a tile of the score matrix has work at all; FlashAttention-2 skips those that have none."""
        seen = visible_keys(rows, self.seqlen_k, self.seqlen_k - self.seqlen_q, self.left, self.right)
        return max(seen.start, keys.start) < min(seen.stop, keys.stop)

    def hide(self, scores: Tensor, rows: range, keys: range) -> Tensor:
        """A tile of scores, (rows, keys), with -inf where a query does not see a key."""
        offset = self.seqlen_k - self.seqlen_q
        if sees_all(rows, keys, offset, self.left, self.right):
            return scores
        own = torch.arange(rows.start, rows.stop)[:, None] + offset
        distance = torch.arange(keys.start, keys.stop)[None, :] - own
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.left >= 0:
            hidden |= distance < -self.left
        if self.right >= 0:
            hidden |= distance > self.right
        return scores.masked_fill(hidden, -torch.inf)


@dataclass(frozen=True)
class Call:
    """Q, K and V in HBM, how scores are scaled and what they see."""

    Q: Array  # (seqlen_q, head_dim)
    K: Array  # (seqlen_k, head_dim)
    V: Array  # (seqlen_k, head_dim_v)
    scale: float
    mask: Mask

    def load_keys(self, sram: Sram, keys: range) -> tuple[Tensor, Tensor]:
        """K and V of some keys, (keys, head_dim) and (keys, head_dim_v)."""
        return sram.load(self.K, keys), sram.load(self.V, keys)


def place(
    memory: Memory,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    element_bytes: int | None = None,
) -> Call:
    """Check the arguments that every algorithm takes and put q, k and v into HBM.

    Args:
        memory: where.
        q: (seqlen_q, head_dim), one head of one sequence; float32 or float64. How many bytes a number counts
            is ``memory.element_bytes``.
        k: (seqlen_k, head_dim), as q.
        v: (seqlen_k, head_dim_v), as q.
        causal, window_size, softmax_scale: as for :func:`flashtile.attention`.
        element_bytes: of a number of q, k and v, where it differs from the memory's.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument.
    """
    problem = check(q, k, v, causal, window_size, softmax_scale)
    return Call(
        memory.place("Q", q, element_bytes),
        memory.place("K", k, element_bytes),
        memory.place("V", v, element_bytes),
        problem.softmax_scale,
        Mask(q.shape[0], k.shape[0], *problem.effective_window(q.shape[0], k.shape[0])),
    )


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
) -> Problem:
    """The call that the arguments of :func:`place` describe, as attention with one head; its errors."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 2:
            raise ValueError(
                f"{name} must have 2 dimensions (seqlen, head_dim), got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} must be float32 or float64, got {tensor.dtype}")
    left, right = window_size
    options = Options(softmax_scale=softmax_scale, causal=causal, window_left=left, window_right=right)
    one_head = (q[None, :, None], k[None, :, None], v[None, :, None])
    check_call(*one_head, NO_EXTRAS, options)
    return Problem.from_tensors(*one_head, options=options)


def chosen_blocks(block_m: int | None, block_n: int | None, default: tuple[int, int]) -> tuple[int, int]:
    """(Br, Bc): the caller's where given.

    Raises:
        ValueError: one is not positive.
    """
    for name, size in (("block_m", block_m), ("block_n", block_n)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    return block_m or default[0], block_n or default[1]


def blocks(length: int, size: int) -> Iterator[range]:
    """0 to ``length`` in blocks of ``size``, the last one shorter."""
    return split(range(length), size)


def block_size(memory: Memory, elements_per_row: int) -> int:
    """How many rows of a block fit into SRAM if each takes so many elements, with all that belongs to it.

    Raises:
        SramExceededError: not even one.
    """
    rows = memory.sram_elements // elements_per_row
    if rows < 1:
        raise SramExceededError(
            f"sram_bytes must be at least {elements_per_row * memory.element_bytes} for blocks of one row, "
            f"got {memory.sram_bytes}"
        )
    return rows


def zeros(rows: int, cols: int, like: Tensor) -> Tensor:
    """An accumulator (rows, cols) of the dtype of ``like``."""
    return like.new_zeros((rows, cols))


def lowest(rows: int, like: Tensor) -> Tensor:
    """A running maximum (rows, 1) that has seen nothing."""
    return like.new_full((rows, 1), LOWEST)


def row_max(scores: Tensor) -> Tensor:
    """(rows, 1), finite for a row that is hidden altogether."""
    return scores.amax(-1, keepdim=True).clamp(min=LOWEST)


def nonzero(row_sum: Tensor) -> Tensor:
    """A divisor: the sum of a row's exponentials, 1 for a row that sees no key (whose output is then 0)."""
    return torch.where(row_sum == 0, 1.0, row_sum)


def log_sum_exp(m: Tensor, l: Tensor) -> Tensor:
    """lse = m + log(l), -inf for a row that sees no key."""
    return torch.where(l == 0, -torch.inf, m + torch.log(nonzero(l)))
