"""Normalisation and stores of results, for the attention kernel and the combining kernel."""

from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.backends.common.tiles import LN_2, LOG2_E
from flashtile.backends.portable.tiles import with_sink


class Rows(NamedTuple):
    """The packed rows of a work tile. Each field is [rows], or a scalar."""

    b: Any
    """Number of the sequence."""
    start_q: Any
    """First row of the sequence in q, if sequences are packed."""
    tokens: Any
    heads: Any
    """Query heads."""
    exists: Any


class Splits(NamedTuple):
    """Integers that describe the layout of partial results."""

    partial_rows: Any
    """Rows per partial result."""
    slots: Any
    """Number of partial results that are allocated."""
    num_splits: Any
    """Splits per work tile, without stream-K."""
    split_n_blocks: Any
    """n_blocks per split. 0: each work tile is divided into ``num_splits`` splits instead."""


@triton.jit
def with_prior(acc, row_max, row_sum, prior_out, prior_lse, rows, lengths, C: tl.constexpr):
    """Add results that the caller has computed over other keys to (acc, maximum, sum).

    prior_out is (tokens, heads, HEAD_DIM_V); prior_lse is (heads, tokens), natural log. Tokens are packed
    even if q is (batch, seqlen_q, ...).
    """
    tokens = packed_tokens(rows, lengths, C)
    lse_rows = rows.heads.to(tl.int64) * lengths.total_q + tokens
    lse = tl.load(prior_lse + lse_rows, mask=rows.exists, other=-float("inf")) * LOG2_E
    columns = tl.arange(0, C.BLOCK_DV)
    offsets = (tokens * (lengths.num_heads_kv * lengths.group_size) + rows.heads) * C.HEAD_DIM_V
    # prior_out is not initialised for rows without keys.
    inside = (rows.exists & (lse != -float("inf")))[:, None] & (columns < C.HEAD_DIM_V)[None, :]
    out = tl.load(prior_out + offsets[:, None] + columns[None, :], mask=inside, other=0.0)
    new_max = tl.maximum(row_max, lse)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    factor = tl.exp2(row_max - shift)
    weight = tl.exp2(lse - shift)
    return acc * factor[:, None] + out * weight[:, None], new_max, row_sum * factor + weight


@triton.jit
def packed_tokens(rows, lengths, C: tl.constexpr):
    """Return the index of each row's token among all tokens of the batch, int64."""
    if C.VARLEN:
        return rows.start_q.to(tl.int64) + rows.tokens
    else:
        return rows.b.to(tl.int64) * lengths.seqlen_q + rows.tokens


@triton.jit
def normalised(acc, row_max, row_sum):
    """Return (out, lse in base 2). Rows without keys get 0 and -inf."""
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    return acc / total[:, None], tl.where(empty, -float("inf"), row_max + tl.log2(total))


@triton.jit
def store_rows(base, row_offsets, exists, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write the rows of ``tile`` [rows, BLOCK_D] that exist, each at its ``row_offsets`` in elements."""
    columns = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(base + row_offsets[:, None] + columns[None, :], tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def store_results(pointers, out, lse, rows, lengths, C: tl.constexpr):
    """Add the sink to the tile ``out`` [rows, BLOCK_DV] and ``lse`` [rows], and store them.

    ``lse`` is a logarithm to base 2. The natural logarithm is stored, unless ``pointers.lse`` is None.
    """
    if C.HAS_SINK:
        sink = tl.load(pointers.sink + rows.heads, mask=rows.exists, other=0.0)
        out, lse = with_sink(out, lse * LN_2, sink)
    num_heads_q = lengths.num_heads_kv * lengths.group_size
    out_rows = packed_tokens(rows, lengths, C)
    if C.VARLEN:
        lse_rows = rows.heads.to(tl.int64) * lengths.total_q + out_rows
    else:
        lse_rows = (rows.b.to(tl.int64) * num_heads_q + rows.heads) * lengths.seqlen_q + rows.tokens
    offsets = (out_rows * num_heads_q + rows.heads) * C.HEAD_DIM_V
    store_rows(pointers.out, offsets, rows.exists, out, C.HEAD_DIM_V, C.BLOCK_DV)
    if pointers.lse is not None:
        if not C.HAS_SINK:
            lse = lse * LN_2
        tl.store(pointers.lse + lse_rows, lse, mask=rows.exists)
