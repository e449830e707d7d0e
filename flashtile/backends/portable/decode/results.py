"""How results are finished and written, whole or combined."""

import triton
import triton.language as tl

from flashtile.backends.common.tiles import LN_2, LOG2_E


@triton.jit
def with_sink(acc, row_max, row_sum, sink):
    """(acc, maximum, sum) with a virtual key of score ``sink`` [rows], in natural units, that has no
    value.
    """
    sink = sink * LOG2_E
    new_max = tl.maximum(row_max, sink)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    factor = tl.exp2(row_max - shift)
    return acc * factor[:, None], new_max, row_sum * factor + tl.exp2(sink - shift)


@triton.jit
def with_prior(
    acc,
    row_max,
    row_sum,
    prior,
    b,
    start_q,
    tokens,
    heads,
    exists,
    shape,
    VARLEN: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """(acc, maximum, sum) with what attention over other keys gave: ``prior`` is its (out, lse), of all
    tokens in one line.
    """
    prior_out, prior_lse = prior
    _, _, num_heads_kv, group_size, _, _, total_q, _, _, _ = shape
    rows = token_rows(b, start_q, tokens, shape, VARLEN)
    lse = tl.load(prior_lse + heads.to(tl.int64) * total_q + rows, mask=exists, other=-float("inf")) * LOG2_E
    columns = tl.arange(0, BLOCK_DV)
    offsets = (rows * (num_heads_kv * group_size) + heads) * HEAD_DIM_V
    # Where there was no key, out may hold anything.
    inside = (exists & (lse != -float("inf")))[:, None] & (columns < HEAD_DIM_V)[None, :]
    out = tl.load(prior_out + offsets[:, None] + columns[None, :], mask=inside, other=0.0)
    new_max = tl.maximum(row_max, lse)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    factor = tl.exp2(row_max - shift)
    weight = tl.exp2(lse - shift)
    return acc * factor[:, None] + out * weight[:, None], new_max, row_sum * factor + weight


@triton.jit
def token_rows(b, start_q, tokens, shape, VARLEN: tl.constexpr):
    """Where ``tokens`` of sequence ``b`` stand among those of the batch, int64."""
    if VARLEN:
        return start_q.to(tl.int64) + tokens
    else:
        return b.to(tl.int64) * shape[4] + tokens


@triton.jit
def normalised(acc, row_max, row_sum):
    """(out, lse in base 2): 0 and -inf for rows without keys."""
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    return acc / total[:, None], tl.where(empty, -float("inf"), row_max + tl.log2(total))


@triton.jit
def store_rows(base, row_offsets, exists, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write rows [rows, BLOCK_D], those that exist, at ``row_offsets`` [rows] in elements."""
    columns = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(base + row_offsets[:, None] + columns[None, :], tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def store_results(
    out_ptr,
    lse_ptr,
    out,
    lse,
    b,
    start_q,
    tokens,
    heads,
    exists,
    shape,
    VARLEN: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Write rows of sequence ``b``: out [rows, BLOCK_DV] and lse [rows], in base 2, as the caller gets
    them.
    """
    _, _, num_heads_kv, group_size, seqlen_q, _, total_q, _, _, _ = shape
    num_heads_q = num_heads_kv * group_size
    out_rows = token_rows(b, start_q, tokens, shape, VARLEN)
    if VARLEN:
        lse_rows = heads.to(tl.int64) * total_q + out_rows
    else:
        lse_rows = (b.to(tl.int64) * num_heads_q + heads) * seqlen_q + tokens
    store_rows(out_ptr, (out_rows * num_heads_q + heads) * HEAD_DIM_V, exists, out, HEAD_DIM_V, BLOCK_DV)
    tl.store(lse_ptr + lse_rows, lse * LN_2, mask=exists)
