"""torch's flash kernel over blocks of rows, for windows and ALiBi, which depend only on the distance of query
and key.

Each block of rows attends to the keys within its window, with a (BLOCK_M, keys) bias: minus the ALiBi slope
times the distance, or -inf for hidden scores. This bias is constant along diagonals. So the biases of all
blocks are views of one table, whose columns are the distances from a block's first row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.backends.cpu.blocks import split
from flashtile.backends.cpu.config import Fused
from flashtile.backends.cpu.flash import attend, differentiate
from flashtile.problems.attention import Problem
from flashtile.problems.masking import Masking, positions


def forward(
    problem: Problem, config: Fused, q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse); q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, ...)."""
    out = q.new_zeros(q.shape)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=problem.lse_dtype)
    for tile in _tiles(problem, config, q, k, alibi_slopes):
        out[tile.queries], lse[tile.statistics] = attend(
            config.compute_dtype,
            q[tile.queries],
            k[tile.keys],
            v[tile.keys],
            False,
            problem.softmax_scale,
            tile.bias,
        )
    return out, lse


def backward(
    problem: Problem,
    config: Fused,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), contiguous, from the gradient of out."""
    dq = q.new_zeros(q.shape)
    # A key gets a term from each block of rows that sees it, so the sum needs at least float32.
    dk, dv = (t.new_zeros(t.shape, dtype=problem.lse_dtype) for t in (k, v))
    for tile in _tiles(problem, config, q, k, alibi_slopes):
        dq[tile.queries], dk_term, dv_term = differentiate(
            config.compute_dtype,
            dout[tile.queries],
            q[tile.queries],
            k[tile.keys],
            v[tile.keys],
            out[tile.queries],
            lse[tile.statistics],
            False,
            problem.softmax_scale,
            tile.bias,
        )
        dk[tile.keys] += dk_term
        dv[tile.keys] += dv_term
    return dq, dk.to(k.dtype), dv.to(v.dtype)


class _Tile(NamedTuple):
    """Indices of one call of the kernel, and its bias (1, heads or 1, rows, keys).

    The bias is None if the call needs no bias.
    """

    queries: tuple[slice, slice, slice]  # into q and out
    keys: tuple[slice, slice, slice]  # into k and v
    statistics: tuple[slice, slice, slice]  # into lse
    bias: Tensor | None


def _tiles(
    problem: Problem, config: Fused, q: Tensor, k: Tensor, alibi_slopes: Tensor | None
) -> Iterator[_Tile]:
    batch, seqlen_q = q.shape[:2]
    seqlen_k = k.shape[1]
    masking: Masking = problem
    offset = seqlen_k - seqlen_q
    own = masking.row_range(positions(seqlen_q, seqlen_k), range(seqlen_k))
    all_rows = range(own.start - offset, own.stop - offset)
    if not all_rows:
        return
    block_m = min(config.BLOCK_M, len(all_rows))
    distances = _distances(masking, own, block_m, seqlen_k)
    heads_kv = range(k.shape[2])
    if alibi_slopes is None:
        parts = [(slice(0, batch), heads_kv)]
    else:
        # Each head needs its own table of biases. If the slopes differ between sequences, each sequence also
        # needs its own tables. A few heads are computed at a time, to bound the size of the tables.
        heads = max(1, config.TABLE_ELEMENTS // (block_m * len(distances) * problem.group_size))
        sequences = split(range(batch), 1 if alibi_slopes.dim() == 2 else max(1, batch))
        parts = [(_slice(b), h) for b in sequences for h in split(heads_kv, heads)]
    for sequence, part in parts:
        heads_q = slice(part.start * problem.group_size, part.stop * problem.group_size)
        slopes = None if alibi_slopes is None else alibi_slopes.expand(batch, -1)[sequence.start, heads_q]
        table = _table(masking, distances, block_m, slopes, config.compute_dtype)
        for rows in split(all_rows, block_m):
            at = range(rows.start + offset, rows.stop + offset)
            keys = masking.key_range(at, range(seqlen_k))
            unbiased = slopes is None and masking.sees_all(at, keys)
            first = keys.start - at.start - distances.start
            yield _Tile(
                (sequence, _slice(rows), heads_q),
                (sequence, _slice(keys), _slice(part)),
                (sequence, heads_q, _slice(rows)),
                None if unbiased else table[:, :, : len(rows), first : first + len(keys)],
            )


def _distances(masking: Masking, rows: range, block_m: int, seqlen_k: int) -> range:
    """Return the range of distances from a block's first row to the keys that the block's rows may see.

    ``rows`` are the positions of all rows.
    """
    farthest = range(-(rows.stop - 1), seqlen_k - rows.start)
    return masking.key_range(range(block_m), farthest)


def _table(
    masking: Masking, distances: range, block_m: int, slopes: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return a table of the biases for a block of rows, (1, heads or 1, block_m, distances).

    Its last dimension is the distance of a key from the block's first row.
    """
    rows = range(block_m)  # what a window hides, and ALiBi, depend on distances alone
    if slopes is None:
        table = torch.zeros((1, 1, block_m, len(distances)), dtype=dtype, device="cpu")
    else:
        own = torch.arange(block_m, dtype=torch.int32, device="cpu")[:, None]
        distance = torch.arange(distances.start, distances.stop, dtype=torch.int32, device="cpu") - own
        table = -slopes[None, :, None, None].to(dtype) * distance.abs().to(dtype)
    if masking.has_window:
        table.masked_fill_(masking.visible(rows, distances).logical_not_(), -torch.inf)
    return table


def _slice(extent: range) -> slice:
    return slice(extent.start, extent.stop)
