"""Shared by the algorithms: one head of attention in HBM, its mask, block sizes, and row statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.checks.attention import check_call
from flashtile.learn.algorithms.memory import Array, Memory, Sram, SramExceededError
from flashtile.problems.attention import NO_EXTRAS, Options, Problem
from flashtile.problems.masking import EVERYTHING, Masking, split

LOWEST = torch.finfo(torch.float32).min
"""Initial running maximum: finite, so that exp(-inf - LOWEST) of a hidden score is 0 and not NaN."""


@dataclass(frozen=True)
class Mask:
    """Mask of one head, aligned to the bottom right of the score matrix."""

    seqlen_q: int
    seqlen_k: int
    masking: Masking = EVERYTHING

    def sees_any(self, rows: range, keys: range) -> bool:
        """Whether any score of the tile (rows, keys) is visible. FlashAttention-2 skips hidden tiles."""
        return len(self.masking.key_range(self._positions(rows), keys)) > 0

    def hide(self, scores: Tensor, rows: range, keys: range) -> Tensor:
        """Return a tile of scores (rows, keys) with -inf where a query does not attend to a key."""
        own = self._positions(rows)
        if self.masking.sees_all(own, keys):
            return scores
        return scores.masked_fill(~self.masking.visible(own, keys, scores.device), -torch.inf)

    def _positions(self, rows: range) -> range:
        offset = self.seqlen_k - self.seqlen_q
        return range(rows.start + offset, rows.stop + offset)


@dataclass(frozen=True)
class Head:
    """Q, K and V of one head in HBM, the softmax scale, and the mask."""

    Q: Array  # (seqlen_q, head_dim)
    K: Array  # (seqlen_k, head_dim)
    V: Array  # (seqlen_k, head_dim_v)
    scale: float
    mask: Mask

    def empty_results(self, memory: Memory) -> tuple[Array, Array]:
        """Allocate the results in HBM: O (seqlen_q, head_dim_v) and lse (seqlen_q, 1)."""
        rows, like = self.Q.rows, self.Q.tensor
        return memory.empty("O", rows, self.V.cols, like), memory.empty("lse", rows, 1, like)

    def load_keys(self, sram: Sram, keys: range) -> tuple[Tensor, Tensor]:
        """Load K (keys, head_dim) and V (keys, head_dim_v) of a range of keys."""
        return sram.load(self.K, keys), sram.load(self.V, keys)

    def visible_keys(self, sram: Sram, rows: range, key_blocks: Iterable[range]) -> Iterator[range]:
        """Yield the blocks of keys that some of ``rows`` attend to; record the others as skipped."""
        for keys in key_blocks:
            if self.mask.sees_any(rows, keys):
                yield keys
            else:
                sram.skip("S", rows, keys)


def place(
    memory: Memory,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    element_bytes: int | None = None,
) -> Head:
    """Check the arguments that every algorithm takes and put q, k and v into HBM.

    Args:
        memory: memory whose HBM gets q, k and v.
        q: (seqlen_q, head_dim), one head of one sequence; float32 or float64. An element counts as
            ``memory.element_bytes`` bytes, independent of its dtype.
        k: (seqlen_k, head_dim), as q.
        v: (seqlen_k, head_dim_v), as q.
        causal, window_size, softmax_scale: as for :func:`flashtile.attention`.
        element_bytes: bytes per element of q, k and v. None means ``memory.element_bytes``.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is wrong; the message names it.
    """
    problem = check(q, k, v, causal, window_size, softmax_scale)
    return Head(
        memory.place("Q", q, element_bytes),
        memory.place("K", k, element_bytes),
        memory.place("V", v, element_bytes),
        problem.softmax_scale,
        Mask(q.shape[0], k.shape[0], problem),
    )


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
) -> Problem:
    """Check the arguments of :func:`place`, with its errors, and return a ``Problem`` with one head."""
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
    masking = Masking(window_left=left, window_right=0 if causal else right)
    options = Options(softmax_scale=softmax_scale, masking=masking)
    one_head = (q[None, :, None], k[None, :, None], v[None, :, None])
    check_call(*one_head, NO_EXTRAS, options)
    return Problem.from_tensors(*one_head, options=options)


def chosen_blocks(block_m: int | None, block_n: int | None, default: tuple[int, int]) -> tuple[int, int]:
    """Return (Br, Bc): the caller's sizes if given, else ``default``.

    Raises:
        ValueError: a size is not positive.
    """
    for name, size in (("block_m", block_m), ("block_n", block_n)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    return block_m or default[0], block_n or default[1]


def blocks(length: int, size: int) -> Iterator[range]:
    """Cut the range from 0 to ``length`` into blocks of ``size``. The last block may be shorter."""
    return split(range(length), size)


def block_size(memory: Memory, elements_per_row: int) -> int:
    """Return how many rows fit into SRAM if all tiles together have ``elements_per_row`` elements per row.

    Raises:
        SramExceededError: not even one row fits.
    """
    rows = memory.sram_elements // elements_per_row
    if rows < 1:
        raise SramExceededError(
            f"sram_bytes must be at least {elements_per_row * memory.element_bytes} for blocks of one row, "
            f"got {memory.sram_bytes}"
        )
    return rows


def lowest(rows: int, like: Tensor) -> Tensor:
    """Return the initial running maximum (rows, 1)."""
    return like.new_full((rows, 1), LOWEST)


def start_softmax(sram: Sram, rows: int, cols: int, like: Tensor) -> None:
    """Start the online softmax of ``rows`` rows: tiles O (rows, cols) and l of zeros, and m of ``LOWEST``."""
    sram.start(O=like.new_zeros(rows, cols), l=like.new_zeros(rows, 1), m=lowest(rows, like))


def row_max(scores: Tensor) -> Tensor:
    """Return the maximum of each row, (rows, 1). It is finite even if all scores of the row are hidden."""
    return scores.amax(-1, keepdim=True).clamp(min=LOWEST)


def row_sum(x: Tensor) -> Tensor:
    """Return the sum of each row, (rows, 1)."""
    return x.sum(-1, keepdim=True)


def nonzero(divisor: Tensor) -> Tensor:
    """Return ``divisor`` with zeros replaced by 1, so that a row without visible keys has output 0."""
    return torch.where(divisor == 0, 1.0, divisor)


def log_sum_exp(m: Tensor, l: Tensor) -> Tensor:
    """Return lse = m + log(l); -inf for a row without visible keys."""
    return torch.where(l == 0, -torch.inf, m + torch.log(nonzero(l)))


def store_results(sram: Sram, O: Array, LSE: Array, rows: range) -> None:
    """Divide the tile O by l, and write it and lse = m + log(l) to the given rows of the results."""
    sram.store(O, sram.O / nonzero(sram.l), rows)
    sram.store(LSE, log_sum_exp(sram.m, sram.l), rows)
