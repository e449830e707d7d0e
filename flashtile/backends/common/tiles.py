"""Step functions that kernels of all backends share: addresses of sequences, and loads of tiles."""

from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.problems import common

LOG2_E = tl.constexpr(common.LOG2_E)
LN_2 = tl.constexpr(common.LN_2)


@triton.jit
def sequence(cu_seqlens, b, seqlen, total, VARLEN: tl.constexpr):
    """Return (first row, length) of sequence ``b``, clamped to the tensor.

    The first row is 0 if sequences are not packed.
    """
    if VARLEN:
        start = min(max(tl.load(cu_seqlens + b), 0), total)
        end = min(max(tl.load(cu_seqlens + b + 1), start), total)
        return start.to(tl.int64), end - start
    else:
        return tl.zeros([], tl.int64), seqlen


@triton.jit
def row_of_token(b, start, heads, seqlen, VARLEN: tl.constexpr):
    """Return the index of the first head of a sequence's first token, int64.

    The index counts rows of a tensor that is viewed as (tokens * heads, head_dim).
    """
    if VARLEN:
        return start * heads
    else:
        return b.to(tl.int64) * seqlen * heads


@triton.jit
def row_of_head(b, head, start, heads, seqlen, total, VARLEN: tl.constexpr):
    """Return the index of a head's first token in a tensor of row statistics, int64.

    The tensor has shape (batch, heads, seqlen), or (heads, total) if VARLEN.
    """
    if VARLEN:
        return head.to(tl.int64) * total + start
    else:
        return (b.to(tl.int64) * heads + head) * seqlen


@triton.jit
def tile_index(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return the row numbers within a tile, [BLOCK].

    They are int64 if WIDE, for tiles that span 2^31 elements or more.
    """
    index = tl.arange(0, BLOCK)
    if WIDE:
        index = index.to(tl.int64)
    return index


class Matrix(NamedTuple):
    """One head of one sequence in memory: ``length`` rows, ``stride`` elements apart."""

    base: Any
    stride: Any
    length: Any


@triton.jit
def load_tile(
    matrix, start, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, ONCE: tl.constexpr = False,
):  # fmt: skip
    """Load a tile [BLOCK, BLOCK_D]: the rows from ``start`` on.

    Elements past the last row (if MASKED) and past column HEAD_DIM are 0. If ONCE, the rows are read only
    once, so they are the first that the caches evict.
    """
    policy: tl.constexpr = "evict_first" if ONCE else ""
    rows = tile_index(BLOCK, WIDE)
    columns = tl.arange(0, BLOCK_D)
    stride = matrix.stride
    pointers = matrix.base + start.to(tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    if MASKED:
        inside_rows = start + rows < matrix.length
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers, mask=inside_rows[:, None], other=0.0, eviction_policy=policy)
        else:
            inside = inside_rows[:, None] & (columns < HEAD_DIM)[None, :]
            return tl.load(pointers, mask=inside, other=0.0, eviction_policy=policy)
    else:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers, eviction_policy=policy)
        else:
            return tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0, eviction_policy=policy)
