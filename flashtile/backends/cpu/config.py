"""Which algorithm serves a problem on the CPU, in what blocks and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashtile.problem import UNLIMITED, Problem

TILE_ELEMENTS = 512 * 1024
"""Scores of one tile of ``Tiled``: 2 MiB of float32, what two cores' L2 and their shared L3 feed well."""


@dataclass(frozen=True)
class Fused:
    """torch's own flash kernel.

    ``compute_dtype`` is the inputs' dtype, or float32 where the processor has no fast arithmetic for theirs
    or theirs would be too coarse. Windows and ALiBi go by blocks of ``BLOCK_M`` rows, whose tables of biases
    hold at most ``TABLE_ELEMENTS`` numbers (or those of one key/value head's group).
    """

    compute_dtype: torch.dtype
    BLOCK_M: int = 256
    TABLE_ELEMENTS: int = 8 * 1024 * 1024


@dataclass(frozen=True)
class Tiled:
    """Online softmax in torch: a tile of scores is (TILE_HEADS, BLOCK_M, BLOCK_N).

    ``BLOCK_M`` counts rows of queries (tokens times the heads of a group), ``BLOCK_N`` keys, ``TILE_HEADS``
    pairs of a sequence and a key/value head that one batched matrix product takes together.
    """

    BLOCK_M: int
    BLOCK_N: int
    TILE_HEADS: int
    compute_dtype: torch.dtype


@dataclass(frozen=True)
class Config:
    """``backward_lse`` serves a backward with a gradient into lse, which torch's kernel does not take."""

    forward: Fused | Tiled
    backward: Fused | Tiled
    backward_lse: Tiled


def configure(problem: Problem) -> Config:
    """The configuration that ``problem`` gets; its shapes are those of the longest sequence where varlen."""
    tiled = _tiled(problem)
    if not _fused_covers(problem):
        return Config(tiled, tiled, tiled)
    return Config(Fused(_forward_dtype(problem)), Fused(_backward_dtype(problem)), tiled)


def effective_window(problem: Problem, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(left, right) of the window, a side that hides no key at these lengths as unlimited (-1)."""
    left, right = problem.window_left, problem.window_right
    return (
        UNLIMITED if left >= seqlen_k - 1 else left,
        UNLIMITED if right >= seqlen_q - 1 else right,
    )


def _fused_covers(problem: Problem) -> bool:
    """Whether torch's kernel can compute this problem.

    It multiplies -inf by the scale where it masks causally, and takes a maximum before it scales: the scale
    must be positive.
    """
    return problem.softcap == 0 and problem.softmax_scale > 0 and problem.head_dim == problem.head_dim_v


def _forward_dtype(problem: Problem) -> torch.dtype:
    """Biases of ALiBi need float32: a bfloat16 holds no distance above 256."""
    return problem.dtype if _is_fast(problem.dtype) and not problem.alibi else _accumulation_dtype(problem)


def _backward_dtype(problem: Problem) -> torch.dtype:
    """torch's kernel sums dk and dv over the heads of a group in its compute dtype: 16 bits are too coarse."""
    return _forward_dtype(problem) if problem.group_size == 1 else _accumulation_dtype(problem)


def _accumulation_dtype(problem: Problem) -> torch.dtype:
    return torch.float64 if problem.dtype == torch.float64 else torch.float32


def _is_fast(dtype: torch.dtype) -> bool:
    """Whether matrix products in ``dtype`` are at least as fast as in float32 on this processor."""
    if dtype not in (torch.float16, torch.bfloat16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


def _tiled(problem: Problem) -> Tiled:
    BLOCK_N = min(512, max(problem.seqlen_k, 1))
    BLOCK_M = min(256, max(problem.seqlen_q * problem.group_size, 1))
    TILE_HEADS = max(1, TILE_ELEMENTS // (BLOCK_M * BLOCK_N))
    return Tiled(BLOCK_M, BLOCK_N, TILE_HEADS, _accumulation_dtype(problem))
