"""Attention with ``score_mod`` and ``mask_mod``: FlashAttention-2 in torch, a tile of scores at a time.

The functions are evaluated on the indices of a tile. Empty blocks of a block mask are skipped, and full
blocks are not masked. Tiles are float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.cpu.blocks import split, visible_keys, visible_rows
from flashtile.backends.cpu.config import Tiled
from flashtile.masks.evaluate import evaluate
from flashtile.problems.attention import Problem
from flashtile.problems.mask_program import Load, Program, derivatives
from flashtile.problems.masks import MAX_CAPTURED


class Tile(NamedTuple):
    """A tile of scores: rows of some heads of one sequence, and keys."""

    b: int
    heads: range
    rows: range
    keys: range
    masked: bool
    """Whether ``mask_mod`` applies."""


class Scores(NamedTuple):
    """Scores of a tile (heads, rows, keys), and derivatives by the scaled product and by loaded values."""

    scores: Tensor
    factor: Tensor | float
    by_load: list[tuple[Load, Any, list[Any]]]
    """(load, derivative of the score by the loaded value, indices of the load)."""


def forward(
    problem: Problem, config: Tiled, q: Tensor, k: Tensor, v: Tensor, extras: Any
) -> tuple[Tensor, Tensor]:
    """Return (out, lse); q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, ...)."""
    call = Call(problem, config, q, k, v, extras, with_gradients=False)
    out = q.new_zeros(problem.out_shape)
    lse = q.new_full(problem.lse_shape, -torch.inf, dtype=problem.lse_dtype)
    lowest = torch.finfo(call.dtype).min  # a row whose first keys are all hidden gets exp(-inf - lowest) = 0
    for b, heads, rows in call.parts():
        q_rows = call.rows_of(q, b, heads, rows)
        row_max = q_rows.new_full((len(heads), len(rows), 1), lowest)
        row_sum = torch.zeros_like(row_max)
        acc = q_rows.new_zeros((len(heads), len(rows), v.shape[-1]))
        for tile in call.tiles(b, heads, rows):
            scores = call.scores(q_rows, tile).scores
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            p = torch.exp(scores - new_max)
            correction = torch.exp(row_max - new_max)
            row_sum = row_sum * correction + p.sum(-1, keepdim=True)
            acc = acc * correction + call.times_keys(p, call.keys_of(v, tile))
            row_max = new_max
        empty = row_sum == 0
        tokens = acc / row_sum.masked_fill(empty, 1.0)
        out[b, rows.start : rows.stop, heads.start : heads.stop] = tokens.transpose(0, 1).to(out.dtype)
        lse[b, heads.start : heads.stop, rows.start : rows.stop] = (row_max + row_sum.log()).squeeze(-1)
    return out, lse


def backward(
    problem: Problem,
    config: Tiled,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Any,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor | None, ...]]:
    """Return ((dq, dk, dv), gradients of the captured tensors); ``dlse`` None stands for zeros."""
    call = Call(problem, config, q, k, v, extras, with_gradients=True)
    dq = q.new_zeros(q.shape)
    dk, dv = (t.new_zeros(t.shape, dtype=call.dtype) for t in (k, v))
    for b, heads, rows in call.parts():
        q_rows, out_rows, dout_rows = (call.rows_of(t, b, heads, rows) for t in (q, out, dout))
        minus_delta = -(out_rows * dout_rows).sum(-1, keepdim=True)
        statistics = b, slice(heads.start, heads.stop), slice(rows.start, rows.stop)
        if dlse is not None:
            minus_delta += dlse[statistics][..., None]
        lse_rows = lse[statistics][..., None].to(call.dtype)
        empty = lse_rows == -torch.inf  # whose gradient of lse may be anything
        minus_delta, lse_rows = (t.masked_fill(empty, 0.0) for t in (minus_delta, lse_rows))
        dq_rows = torch.zeros_like(q_rows)
        for tile in call.tiles(b, heads, rows):
            modified = call.scores(q_rows, tile)
            p = torch.exp(modified.scores - lse_rows)
            keys = b, slice(tile.keys.start, tile.keys.stop), call.heads_kv(heads)
            dv[keys] += call.times_rows(p, dout_rows)
            ds = p * (call.times_keys(dout_rows, call.keys_of(v, tile).mT) + minus_delta)
            for load, partial, indices in modified.by_load:
                call.add_gradient(load, _finite(ds * partial, p), indices)
            ds = _finite(ds * modified.factor, p) * problem.softmax_scale
            dq_rows += call.times_keys(ds, call.keys_of(k, tile))
            dk[keys] += call.times_rows(ds, q_rows)
        dq[b, rows.start : rows.stop, heads.start : heads.stop] = dq_rows.transpose(0, 1).to(dq.dtype)
    captured = tuple(
        None if gradient is None else gradient.to(tensor.dtype)
        for tensor, gradient in zip(call.captured, call.gradients, strict=True)
    )
    return (dq, dk.to(k.dtype), dv.to(v.dtype)), captured + (None,) * (MAX_CAPTURED - len(captured))


class Call:
    """State that all tiles of a call share."""

    def __init__(
        self,
        problem: Problem,
        config: Tiled,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        extras: Any,
        with_gradients: bool,
    ) -> None:
        assert problem.mods is not None
        self.problem, self.mods, self.extras = problem, problem.mods, extras
        self.dtype = config.compute_dtype
        self.k, self.v = k, v
        self.seqlen_q, self.seqlen_k = q.shape[1], k.shape[1]
        self.offset = self.seqlen_k - self.seqlen_q
        self.window = problem.effective_window(self.seqlen_q, self.seqlen_k)
        self.block_m, self.block_n = self.mods.block_size or (max(1, config.BLOCK_M), config.BLOCK_N)
        self.captured = [getattr(extras, f"captured_{i}") for i in range(len(self.mods.ranks))]
        self.gradients: list[Tensor | None] = [
            t.new_zeros(t.shape, dtype=self.dtype) if i in self.mods.learned and with_gradients else None
            for i, t in enumerate(self.captured)
        ]
        self.loads: tuple[Load, ...] = ()
        self.score_program: Program | None = self.mods.score_program
        self.with_gradients = with_gradients
        if self.score_program is not None and with_gradients:
            self.score_program, self.loads = derivatives(self.score_program, frozenset(self.mods.learned))
        self.mask_program = self.mods.mask_program
        self.lists = None
        if self.mods.block_size is not None:
            self.lists = _walks(extras)

    def parts(self) -> Iterator[tuple[int, range, range]]:
        """Yield (sequence, query heads, rows) of each part with an accumulator of its own."""
        heads = range(self.problem.num_heads_q)
        together = self.lists is None or self.mods.list_heads == 1
        groups = [heads] if together else list(split(heads, 1))
        all_rows = visible_rows(self.seqlen_q, self.seqlen_k, *self.window)
        for b in range(self.problem.batch):
            for group in groups:
                for block in split(range(self.seqlen_q), self.block_m):
                    rows = range(max(block.start, all_rows.start), min(block.stop, all_rows.stop))
                    if rows:
                        yield b, group, rows

    def tiles(self, b: int, heads: range, rows: range) -> Iterator[Tile]:
        within = visible_keys(rows, self.seqlen_k, self.offset, *self.window)
        if self.lists is None:
            for keys in split(within, self.block_n):
                yield Tile(b, heads, rows, keys, self.mask_program is not None)
            return
        of_head = self.lists[b % len(self.lists)]
        partial, full = of_head[heads.start % len(of_head)][rows.start // self.block_m]
        for blocks, masked in ((full, False), (partial, True)):
            for n in blocks:
                keys = range(max(n * self.block_n, within.start), min((n + 1) * self.block_n, within.stop))
                if keys:
                    yield Tile(b, heads, rows, keys, masked and self.mask_program is not None)

    def rows_of(self, tensor: Tensor, b: int, heads: range, rows: range) -> Tensor:
        """(heads, rows, head_dim) of q, out or dout."""
        part = tensor[b, rows.start : rows.stop, heads.start : heads.stop]
        return part.transpose(0, 1).to(self.dtype)

    def heads_kv(self, heads: range) -> slice:
        group = self.problem.group_size
        return slice(heads.start // group, (heads.stop - 1) // group + 1)

    def keys_of(self, tensor: Tensor, tile: Tile) -> Tensor:
        """(heads_kv, keys, head_dim) of k or v."""
        part = tensor[tile.b, tile.keys.start : tile.keys.stop, self.heads_kv(tile.heads)]
        return part.transpose(0, 1).to(self.dtype)

    def times_keys(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply a (heads, rows, x) by b (heads_kv, x, y); each head of b serves a group of heads."""
        return torch.bmm(a.reshape(len(b), -1, a.shape[-1]), b).view(*a.shape[:-1], b.shape[-1])

    def times_rows(self, a: Tensor, b: Tensor) -> Tensor:
        """Sum a.T b over groups: a (heads, rows, keys), b (heads, rows, y), result (keys, heads_kv, y)."""
        heads_kv = max(1, len(a) // self.problem.group_size)
        a, b = (t.reshape(heads_kv, -1, t.shape[-1]) for t in (a, b))
        return torch.bmm(a.mT, b).transpose(0, 1)

    def scores(self, q_rows: Tensor, tile: Tile) -> Scores:
        """Compute the scores of a tile; hidden scores are -inf."""
        problem = self.problem
        scores = self.times_keys(q_rows * problem.softmax_scale, self.keys_of(self.k, tile).mT)
        factor: Tensor | float = 1.0
        if problem.softcap > 0:
            capped = torch.tanh(scores / problem.softcap)
            scores, factor = problem.softcap * capped, 1 - capped * capped
        rows = torch.arange(tile.rows.start, tile.rows.stop)[:, None]
        keys = torch.arange(tile.keys.start, tile.keys.stop)
        distance = keys - (rows + self.offset)
        slopes = self.extras.alibi_slopes
        if slopes is not None:
            own = slopes.expand(problem.batch, -1)[tile.b, tile.heads.start : tile.heads.stop]
            scores = scores - own[:, None, None].to(self.dtype) * distance.abs()
        inputs = {
            "score": scores,
            "b": torch.tensor(tile.b),
            "h": torch.arange(tile.heads.start, tile.heads.stop)[:, None, None],
            "q": rows,
            "kv": keys,
        }
        by_load = []
        if self.score_program is not None:
            results = evaluate(self.score_program, inputs, self.captured, self.dtype, "score_mod")
            scores = _spread(results[0], scores)
            if self.with_gradients:
                factor = factor * results[1]
                by_load = self._by_load(results[2:])
        hidden = self._hidden(distance)
        if tile.masked:
            assert self.mask_program is not None
            (seen,) = evaluate(self.mask_program, inputs, self.captured, self.dtype)
            masked = ~torch.as_tensor(seen)
            hidden = masked if hidden is None else hidden | masked
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return Scores(scores, factor, by_load)

    def _by_load(self, results: list[Any]) -> list[tuple[Load, Any, list[Any]]]:
        found = []
        for load in self.loads:
            partial, *indices = results[: 1 + load.indices]
            results = results[1 + load.indices :]
            found.append((load, partial, indices))
        return found

    def _hidden(self, distance: Tensor) -> Tensor | None:
        left, right = self.window
        hidden = None
        if left >= 0:
            hidden = distance < -left
        if right >= 0:
            hidden = distance > right if hidden is None else hidden | (distance > right)
        return hidden

    def add_gradient(self, load: Load, ds: Tensor, indices: list[Any]) -> None:
        """Add ``ds`` (heads, rows, keys) to the gradient's elements at ``indices``, which broadcast to it."""
        gradient = self.gradients[load.tensor]
        assert gradient is not None
        if not indices:
            gradient.add_(ds.sum())
            return
        where = torch.broadcast_tensors(*map(torch.as_tensor, indices))
        gradient.index_put_(where, ds.sum_to_size(where[0].shape), accumulate=True)


def _finite(gradient: Tensor, p: Tensor) -> Tensor:
    """Return ``gradient``, 0 where a score is hidden, since a derivative there may be inf or NaN."""
    return gradient.masked_fill(p == 0, 0.0)


def _spread(result: Any, like: Tensor) -> Tensor:
    """Expand the result of a function, which may have fewer dimensions, to a tile's shape and dtype."""
    return torch.as_tensor(result).to(like.dtype).expand(like.shape)


Walk = tuple[list[int], list[int]]
"""Partial and full blocks of keys of one block of rows."""


def _walks(extras: Any) -> list[list[list[Walk]]]:
    """Return a list by sequence, head and block of rows."""
    counts = zip(extras.kv_num_blocks.tolist(), extras.full_kv_num_blocks.tolist(), strict=True)
    blocks = zip(extras.kv_indices.tolist(), extras.full_kv_indices.tolist(), strict=True)
    return [
        [
            [
                (sorted(partial[:some]), sorted(full[:all_of]))
                for some, all_of, partial, full in zip(*of_head, strict=True)
            ]
            for of_head in zip(*of_counts, *of_blocks, strict=True)
        ]
        for of_counts, of_blocks in zip(counts, blocks, strict=True)
    ]
