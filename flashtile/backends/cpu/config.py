"""Choice of algorithm, block sizes and dtype of computation for a problem on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from flashtile.backends.cpu import parts
from flashtile.problems.attention import Problem
from flashtile.problems.decode import FP8, DecodeProblem
from flashtile.torch_private import has_fast_products

TILE_ELEMENTS = 512 * 1024
"""Scores of one tile of ``Tiled``, 2 MiB in float32. 128K to 1M are equally fast (Zen 4, head_dim 64)."""


@dataclass(frozen=True)
class Fused:
    """torch's own flash kernel.

    ``compute_dtype`` is the inputs' dtype, or float32 where that is faster or the inputs' dtype is too
    coarse. Windows and ALiBi are computed in blocks of ``BLOCK_M`` rows. On Zen 4, blocks of 128 rows are
    fastest for ALiBi. For a window of 256 keys, blocks of 64 rows are a tenth faster, and blocks of 256 a
    sixth slower. A table of biases holds at most ``TABLE_ELEMENTS`` elements, unless one key/value head needs
    more.
    """

    KERNEL: ClassVar[str] = "torch's flash kernel"
    compute_dtype: torch.dtype
    BLOCK_M: int = 128
    TABLE_ELEMENTS: int = 8 * 1024 * 1024


@dataclass(frozen=True)
class Tiled:
    """Online softmax in torch: a tile of scores is (TILE_HEADS, BLOCK_M, BLOCK_N).

    ``BLOCK_M`` counts rows of queries (tokens times heads per group) and ``BLOCK_N`` keys. ``TILE_HEADS``
    counts pairs of a sequence and a key/value head, which one batched matrix product computes together.
    """

    KERNEL: ClassVar[str] = "online softmax over tiles in torch"
    BLOCK_M: int
    BLOCK_N: int
    TILE_HEADS: int
    compute_dtype: torch.dtype


@dataclass(frozen=True)
class Config:
    """Configuration of a call. ``backward_lse`` is for gradients of lse and for parts of a call that need a
    mask tensor; torch's kernel supports neither."""

    forward: Fused | Tiled
    backward: Fused | Tiled
    backward_lse: Tiled


def configure(problem: Problem) -> Config:
    """Return the configuration for ``problem``.

    If sequences are packed, the problem's lengths are those of the longest sequence.
    """
    tiled = tiled_config(problem)
    # What torch's kernel lacks, or takes only as one tensor of all scores.
    per_score = problem.mask or problem.bias or problem.dropout_p > 0 or problem.mods is not None
    per_score = per_score or problem.statistics != ()
    padded = problem.key_padding_mask and not parts.has_only_padding(problem)
    if per_score or padded or problem.beyond_window is not None or not _fused_covers(problem):
        return Config(tiled, tiled, tiled)
    return Config(Fused(_forward_dtype(problem)), Fused(_backward_dtype(problem)), tiled)


def configure_decode(problem: DecodeProblem) -> Fused | None:
    """Return torch's kernel for steps of one query per sequence, or None if it cannot compute the call.

    16-bit keys are not converted to float32 if the processor multiplies 16-bit matrices fast. Converting a
    whole cache costs more than the products (three times as much on a Xeon with AVX512-BF16, 2048 keys).
    """
    one_query = problem.seqlen_q == 1 and not problem.varlen and problem.batch > 0
    extras = problem.alibi or problem.sink or problem.tree or problem.prior or problem.qv
    extras = extras or problem.descale == "sequence" or problem.invariant
    if not (one_query and problem.in_one_range) or extras or not _fused_covers(problem):
        return None
    wide = problem.dtype != problem.out_dtype or problem.cache_dtype == FP8
    return Fused(problem.lse_dtype if wide else _product_dtype(problem))


def _fused_covers(problem: Problem | DecodeProblem) -> bool:
    """Whether torch's kernel can compute this problem.

    The scale must be positive: the kernel multiplies -inf by the scale under a causal mask, and takes the
    maximum before scaling.
    """
    return problem.softcap == 0 and problem.softmax_scale > 0 and problem.head_dim == problem.head_dim_v


def _forward_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of the forward pass: float32 for a single row of 16-bit inputs, otherwise
    :func:`_product_dtype`.

    torch's kernel multiplies a single 16-bit row slowly: float32 is 2.2x as fast (Zen 4, bfloat16).
    """
    single_row = problem.seqlen_q * problem.group_size == 1
    return problem.lse_dtype if single_row else _product_dtype(problem)


def _backward_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of the backward pass: float32 for few 16-bit rows of small heads, otherwise
    :func:`_product_dtype`.

    Below 192 queries, torch's kernel computes 32 rows at a time, too few for fast 16-bit products. On Zen 4
    (bfloat16, head_dim 64), float32 is 2.6x as fast for 96 queries, 1.3x for 192 and 1.06x for 256.
    """
    few_rows = problem.seqlen_q < 192 and problem.head_dim <= 128
    return problem.lse_dtype if few_rows else _product_dtype(problem)


def _product_dtype(problem: Problem | DecodeProblem) -> torch.dtype:
    """Return the inputs' dtype, or float32 if 16 bits are slow on this processor or too coarse for ALiBi.

    ALiBi is a bias in the dtype of computation, and a slope times a distance of thousands of keys has more
    than the 8 or 11 bits of a 16-bit mantissa.
    """
    if problem.dtype == problem.lse_dtype or problem.alibi or not _multiplies_fast(problem.dtype):
        return problem.lse_dtype
    return problem.dtype


def _multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether this build of torch has fast matrix products in the 16-bit ``dtype`` on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    return has_fast_products(dtype)


def tiled_config(problem: Problem) -> Tiled:
    """Return tiles of at most 256 rows and 512 keys, and as many heads as fill TILE_ELEMENTS.

    Short calls get short tiles, and thereby more heads in one batched product. Only the size of a tile
    was measured, not its sides.
    """
    BLOCK_N = min(512, max(problem.seqlen_k, 1))
    BLOCK_M = min(256, max(problem.seqlen_q * problem.group_size, 1))
    TILE_HEADS = max(1, TILE_ELEMENTS // (BLOCK_M * BLOCK_N))
    return Tiled(BLOCK_M, BLOCK_N, TILE_HEADS, problem.lse_dtype)
