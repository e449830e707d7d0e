"""Attention over a cache on the CPU: online softmax over blocks of keys that are gathered one at a time.

Sequences are computed one after another, so that results do not depend on the rest of the batch. The query
heads of a key/value head are rows of one tile. Tiles are computed in float32 (float64 for float64 inputs).
Keys and values are converted to this dtype block by block. The largest temporaries are a tile of scores and a
block of keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashtile.backends.cpu.blocks import split
from flashtile.backends.cpu.decode.cache import lengths_of, pages_of, tokens_of_pages, tokens_of_row
from flashtile.problems.decode import CacheTensors, CombineProblem, DecodeProblem

BLOCK_ROWS = 256
"""Rows of a tile: query tokens times heads per group."""
TILE_ELEMENTS = 1 << 18
"""Elements in a tile of scores over all heads, so that the tile stays in the L2 cache."""
MIN_SUM, MAX_SUM = 2.0**-16, 2.0**16
"""Accepted range for a row's sum of exponentials with a unified maximum. Within it, the sum's logarithm is
small, as with online softmax, and terms that exp flushes to zero are negligible."""
MIN_VALUE = 2.0**-60
"""Minimum magnitude of the largest weighted sum of values. Smaller sums may lack terms flushed to zero."""


def attend(
    problem: DecodeProblem, q: Tensor, k_cache: Tensor, v_cache: Tensor, given: CacheTensors
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the whole batch; lse is always computed."""
    out = q.new_zeros(problem.out_shape, dtype=problem.out_dtype)
    lse = q.new_full(problem.lse_shape, -torch.inf, dtype=problem.lse_dtype)
    with torch.autocast("cpu", enabled=False):  # autocast would round the products of tiles
        lengths = lengths_of(problem, given)
        for b, (rows, out_rows, lse_rows) in enumerate(_sequences(problem, q, out, lse, given.cu_seqlens_q)):
            sequence = _Sequence(problem, b, lengths[b], rows, k_cache, v_cache, given)
            for block in split(range(rows.shape[0]), max(1, BLOCK_ROWS // problem.group_size)):
                out_tile, lse_tile = sequence.attend(block)
                out_rows[block.start : block.stop] = out_tile
                lse_rows[:, block.start : block.stop] = lse_tile
    return out, lse


def _sequences(
    problem: DecodeProblem, q: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield views of each sequence: q and out (seqlen_q, heads, head_dim), lse (heads, seqlen_q)."""
    if cu_seqlens_q is None:
        yield from zip(q, out, lse, strict=True)
        return
    starts = cu_seqlens_q.tolist()
    for b in range(problem.batch):
        rows = slice(starts[b], starts[b + 1])
        yield q[rows], out[rows], lse[:, rows]


Sums = tuple[Tensor, Tensor, Tensor]
"""(maximum, sum, accumulator) of an online softmax, each (heads_kv, group * rows, 1 or head_dim_v)."""


class _Sequence:
    """One sequence: its queries, the location of its keys, and its options."""

    def __init__(
        self,
        problem: DecodeProblem,
        b: int,
        seqlen_k: int,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        given: CacheTensors,
    ) -> None:
        self.problem = problem
        self.q, self.k_cache, self.v_cache = q, k_cache, v_cache
        self.k_descale, self.v_descale = given.k_descale, given.v_descale
        if problem.descale == "sequence" and given.k_descale is not None and given.v_descale is not None:
            self.k_descale, self.v_descale = given.k_descale[b, 0], given.v_descale[b, 0]
        self.dtype = problem.lse_dtype
        self.seqlen_q, self.seqlen_k = q.shape[0], seqlen_k
        self.offset = self.seqlen_k - self.seqlen_q
        self.first_key = 0 if given.cache_leftpad is None else int(given.cache_leftpad[b])
        self.blocks = None if given.block_table is None else given.block_table[b]
        self.row = b if given.cache_batch_idx is None else int(given.cache_batch_idx[b])
        slopes = given.alibi_slopes
        self.slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        self.sink = given.sink
        self.phi = given.softmax_max
        if problem.softmax_max is not None:
            heads, phi = (problem.num_heads_q,), problem.softmax_max
            self.phi = torch.full(heads, phi, dtype=torch.float32, device="cpu")
        self.prior = None
        if given.prior_out is not None and given.prior_lse is not None:
            first = b * self.seqlen_q if given.cu_seqlens_q is None else int(given.cu_seqlens_q[b])
            tokens = slice(first, first + self.seqlen_q)
            self.prior = given.prior_out[tokens].transpose(0, 1), given.prior_lse[:, tokens].unsqueeze(-1)
        self.qv = None
        if given.qv is not None:
            starts = given.cu_seqlens_q
            self.qv = given.qv[b] if starts is None else given.qv[int(starts[b]) : int(starts[b + 1])]
        self.tree = None if given.tree_mask is None else given.tree_mask[min(b, given.tree_mask.shape[0] - 1)]

    def attend(self, rows: range) -> tuple[Tensor, Tensor]:
        """Return out (rows, heads_q, head_dim_v) and lse (heads_q, rows) of the query tokens ``rows``."""
        heads_kv, group = self.problem.num_heads_kv, self.problem.group_size
        q = self.q[rows.start : rows.stop]
        if self.qv is not None:  # one product gives q k^T + qv v^T
            q = torch.cat([q, self.qv[rows.start : rows.stop]], -1)
        q = q.to(self.dtype) * self.problem.softmax_scale
        q = q.transpose(0, 1).reshape(heads_kv, group * len(rows), -1)
        start = self._start(rows)
        sums = None if self.phi is None else self._unified(start, q, rows)
        row_max, row_sum, acc = self._online(start, q, rows) if sums is None else sums
        empty = row_sum == 0
        out = acc.div_(row_sum.masked_fill(empty, 1.0)).view(heads_kv * group, len(rows), -1)
        lse = (row_max + row_sum.log()).view(heads_kv * group, len(rows))
        return out.transpose(0, 1), lse

    def _online(self, start: Sums, q: Tensor, rows: range) -> Sums:
        row_max, row_sum, acc = start
        for scores, keys in self._tiles(q, rows):
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            p = scores.sub_(new_max).exp_()
            correction = torch.exp(row_max - new_max)
            row_sum = row_sum * correction + p.sum(-1, keepdim=True)
            v = self._gather(self.v_cache, self.v_descale, keys)
            acc = acc.mul_(correction).baddbmm_(p, v.transpose(0, 1))
            row_max = new_max
        return row_max, row_sum, acc

    def _unified(self, start: Sums, q: Tensor, rows: range) -> Sums | None:
        """Return the same sums as :meth:`_online`, or None if the scores are too far from phi.

        phi is the unified maximum of FlashDecoding++ (Hong et al. 2023, section 3). It is subtracted from all
        scores in place of a row's maximum.
        """
        row_max, row_sum, acc = start
        assert self.phi is not None
        phi = self.phi.to(self.dtype).view(row_sum.shape[0], -1, 1, 1).expand(-1, -1, len(rows), 1)
        phi = phi.reshape(row_sum.shape)
        # Multiplying exp(score) by exp(-phi) is more accurate than exp(score - phi), because the subtraction
        # rounds scores near zero.
        factor = torch.exp(-phi)
        total, values = torch.zeros_like(row_sum), torch.zeros_like(acc)
        for scores, keys in self._tiles(q, rows):
            p = scores.exp_().mul_(factor)
            total += p.sum(-1, keepdim=True)
            values.baddbmm_(p, self._gather(self.v_cache, self.v_descale, keys).transpose(0, 1))
        largest = values.abs().amax()  # NaN if any value is NaN
        in_range = ((total >= MIN_SUM) & (total <= MAX_SUM)).all() & (largest >= MIN_VALUE)
        if not (in_range and largest.isfinite()):
            return None
        # ``start`` holds a sink or attention over other keys, whose maximum may be far from phi. So both sums
        # are scaled to the larger of the two maxima before they are added.
        lse = phi + total.log()
        new_max = torch.maximum(row_max, lse)
        before, here = torch.exp(row_max - new_max), torch.exp(lse - new_max)
        return new_max, row_sum * before + here, acc * before + values / total * here

    def _tiles(self, q: Tensor, rows: range) -> Iterator[tuple[Tensor, range]]:
        """Yield the masked scores of each block of keys, and the block's range of keys.

        Scores are (heads_kv, group * rows, keys). The blocks cover the keys that any of ``rows`` sees.
        """
        first = self.first_key
        seen = self.problem.key_range(self._positions(rows), range(self.seqlen_k - first))
        seen = range(seen.start + first, seen.stop + first)
        for keys in split(seen, max(256, TILE_ELEMENTS // (q.shape[0] * q.shape[1]))):
            k = self._gather(self.k_cache, self.k_descale, keys)
            if self.qv is not None:
                k = torch.cat([k, self._gather(self.v_cache, self.v_descale, keys)], -1)
            yield self._masked(torch.matmul(q, k.permute(1, 2, 0)), rows, keys), keys

    def _start(self, rows: range) -> Sums:
        """Return the :data:`Sums` that the online softmax starts with, before the first key.

        They contain the sink, and the result of attention over other keys (``prior``).
        """
        heads_kv, group = self.problem.num_heads_kv, self.problem.group_size
        size = (heads_kv, group * len(rows))
        # The lowest finite number instead of -inf: hidden scores then give exp(-inf - lowest) = 0, not NaN.
        lowest = torch.finfo(self.dtype).min
        row_max = torch.full((*size, 1), lowest, dtype=self.dtype, device="cpu")
        row_sum = torch.zeros_like(row_max)
        acc = torch.zeros((*size, self.problem.head_dim_v), dtype=self.dtype, device="cpu")
        if self.prior is not None:
            out, lse = (part[:, rows.start : rows.stop].reshape(*size, -1) for part in self.prior)
            row_max = lse.clamp(min=lowest)
            row_sum = torch.exp(lse - row_max)
            acc = out.masked_fill(row_sum == 0, 0.0)
        if self.sink is not None:
            sink = self.sink.to(self.dtype).view(heads_kv, group, 1).expand(-1, -1, len(rows))
            sink = sink.reshape(*size, 1)
            new_max = torch.maximum(row_max, sink)
            correction = torch.exp(row_max - new_max)
            row_sum = row_sum * correction + torch.exp(sink - new_max)
            row_max, acc = new_max, acc * correction
        return row_max, row_sum, acc

    def _gather(self, cache: Tensor, descale: Tensor | None, keys: range) -> Tensor:
        """Return the sequence's tokens at positions ``keys`` of a cache, multiplied by their scales.

        The result has shape (keys, heads_kv, head_dim) and the dtype of computation.
        """
        if self.blocks is None:
            return tokens_of_row(cache, self.row, keys, descale, self.dtype)
        page_size = cache.shape[1]
        columns = pages_of(keys, page_size)
        memory = cache.new_empty((len(columns), *cache.shape[1:]), dtype=self.dtype)
        tokens = tokens_of_pages(cache, self.blocks[columns.start : columns.stop], descale, memory)
        first = columns.start * page_size
        return tokens[keys.start - first : keys.stop - first]

    def _masked(self, scores: Tensor, rows: range, keys: range) -> Tensor:
        """Apply soft-cap, ALiBi and masks to a tile of scores (heads_kv, group * rows, keys), in place."""
        problem = self.problem
        if problem.softcap > 0:
            scores.div_(problem.softcap).tanh_().mul_(problem.softcap)
        by_head = scores.view(problem.num_heads_q, len(rows), len(keys))
        own, at = self._positions(rows), range(keys.start - self.first_key, keys.stop - self.first_key)
        if self.slopes is not None:
            row = torch.arange(own.start, own.stop, device="cpu")[:, None]
            distance = (torch.arange(at.start, at.stop, device="cpu") - row).abs()
            by_head.sub_(self.slopes.to(self.dtype)[:, None, None] * distance)
        hidden = None
        if self.tree is not None:
            hidden = self._hidden_by_tree(rows, keys)
        elif not problem.sees_all(own, at):
            hidden = ~problem.visible(own, at)
        if hidden is not None:
            by_head.masked_fill_(hidden, -torch.inf)
        return scores

    def _positions(self, rows: range) -> range:
        """Return the positions of rows, counted from the first key, at which the first chunk begins."""
        offset = self.offset - self.first_key
        return range(rows.start + offset, rows.stop + offset)

    def _hidden_by_tree(self, rows: range, keys: range) -> Tensor | None:
        start = max(keys.start, self.offset)  # the first key of this tile that belongs to the tree
        if start >= keys.stop:
            return None
        assert self.tree is not None
        hidden = torch.zeros((len(rows), len(keys)), dtype=torch.bool, device="cpu")
        mask = self.tree[rows.start : rows.stop, start - self.offset : keys.stop - self.offset]
        hidden[:, start - keys.start :] = ~mask
        return hidden


def combine(
    problem: CombineProblem | DecodeProblem, out_partial: Tensor, lse_partial: Tensor, tensors: None = None
) -> tuple[Tensor, Tensor]:
    """Merge partial results by their log-sum-exps, in the order of the parts.

    Args:
        out_partial: (parts, batch, seqlen, heads, head_dim).
        lse_partial: (parts, batch, seqlen, heads).

    Returns:
        out (batch, seqlen, heads, head_dim), and lse (batch, heads, seqlen).
    """
    lse_partial = lse_partial.masked_fill(lse_partial == torch.inf, -torch.inf)
    largest = lse_partial.amax(0)
    empty = largest == -torch.inf
    largest = largest.masked_fill(empty, 0.0)
    total = torch.zeros_like(largest)
    out = torch.zeros(out_partial.shape[1:], dtype=lse_partial.dtype, device="cpu")
    for out_part, lse_part in zip(out_partial, lse_partial, strict=True):
        weight = torch.exp(lse_part - largest)
        total += weight
        # If a part has no keys, its out was not written and may hold NaN. A weight of 0 would not remove NaN.
        part = out_part.to(out.dtype).masked_fill((lse_part == -torch.inf).unsqueeze(-1), 0.0)
        out.addcmul_(part, weight.unsqueeze(-1))
    out /= total.masked_fill(empty, 1.0).unsqueeze(-1)
    lse = (largest + total.log()).masked_fill(empty, -torch.inf)
    return out.to(problem.out_dtype), lse.transpose(1, 2).contiguous().detach()
