"""FlashAttention-2 in torch: online softmax over key blocks, backward by recomputation from the saved lse.

Dao 2023, arXiv:2307.08691, Algorithms 1 and 2. Blocks of queries are the outer loop in both passes. Key
blocks that the window hides are skipped, and only those on its edge are masked. The query heads of a group
are folded into the rows of a tile, so that GQA reads each key once and copies no keys. Tiles are computed in
float32 (float64 for float64 inputs). The largest temporaries are a few tiles, and the keys, values and their
gradients of TILE_HEADS heads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flashtile.backends.cpu.config import Tiled
from flashtile.backends.cpu.parts import OptionalInputs
from flashtile.problems.attention import Problem, clear_lse, new_lse
from flashtile.problems.masking import Masking, split


def forward(
    problem: Problem,
    config: Tiled,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    optional: OptionalInputs,
    moving: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Return (out, lse); q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, ...).

    Lengths are those of the tensors and may be 0; only masks and options are taken from ``problem``. With
    ``moving``, the tangents of q, k and v, those of out and lse follow.
    """
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    shape = (q.shape[0], q.shape[2], q.shape[1])
    lse = clear_lse(new_lse(q, shape, problem.lse_dtype, problem.statistics), problem.statistics)
    results: tuple[Tensor, ...] = out, lse
    tangents: Iterator[Chunk | None] = itertools.repeat(None)
    if moving is not None:
        results = out, lse, torch.zeros_like(out), torch.zeros_like(lse)
        tangents = chunks(problem, config, *moving, optional)
    for chunk, of_tangents in zip(chunks(problem, config, q, k, v, optional), tangents, strict=False):
        for rows in chunk.row_blocks():
            chunk.store(rows, results, _forward_rows(chunk, rows, problem.statistics, of_tangents))
    return results


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
    optional: OptionalInputs,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), contiguous, from the gradients of out and of lse (None stands for zeros)."""
    dq = q.new_zeros(q.shape)
    # With score or mask functions, each query head may be a chunk, and then several chunks add to the
    # gradient of one key. Their sum is too coarse in 16 bits.
    wide = optional.functions is not None
    dk, dv = (t.new_zeros(t.shape, dtype=problem.lse_dtype if wide else t.dtype) for t in (k, v))
    for chunk in chunks(problem, config, q, k, v, optional):
        dk_chunk, dv_chunk = torch.zeros_like(chunk.k), torch.zeros_like(chunk.v)
        for rows in chunk.row_blocks():
            dout_tile = chunk.folded(dout, rows)
            # P = exp(S - lse) and dS = P * (dP - delta), where delta = rowsum(dout * out) - dlse. Both are
            # negated, so that the products below can add them (baddbmm) without a pass over the tile.
            minus_delta = -(dout_tile * chunk.folded(out, rows)).sum(-1, keepdim=True)
            minus_dentropy = None
            if dlse is not None:
                of_lse = chunk.statistics(dlse, rows)
                if problem.entropy:  # operators.statistics.for_kernels
                    of_lse, of_entropy = of_lse.unbind(-1)
                    minus_dentropy = -of_entropy.reshape(minus_delta.shape)
                minus_delta += of_lse.reshape(minus_delta.shape)
            minus_lse = -chunk.statistics(lse, rows).reshape(minus_delta.shape)
            if chunk.may_hide_rows:
                # A row without a visible key has lse -inf, and its dlse may be anything: exp(S - lse) and
                # delta would be NaN or infinite.
                empty = minus_lse == torch.inf
                minus_lse, minus_delta = (t.masked_fill(empty, 0.0) for t in (minus_lse, minus_delta))
            row_gradients = minus_delta, minus_lse, minus_dentropy
            dq_tile = _backward_rows(chunk, rows, dout_tile, *row_gradients, dk_chunk, dv_chunk)
            chunk.tokens(dq, rows).copy_(chunk.unfolded(dq_tile, rows))
        chunk.keys_of(dk).add_(dk_chunk.view(chunk.keys_of(dk).shape))
        chunk.keys_of(dv).add_(dv_chunk.view(chunk.keys_of(dv).shape))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _forward_rows(
    chunk: Chunk, rows: range, statistics: Sequence[str], moving: Chunk | None
) -> tuple[Tensor, ...]:
    """Run Algorithm 1 for one block of rows. Return out (heads, rows, head_dim_v) and lse (heads, rows).

    lse has a last dimension for itself and the ``statistics``, if there are any. With ``moving``, a chunk of
    the tangents of q, k and v, the tangents of out and lse follow.
    """
    q = chunk.folded(chunk.q, rows)
    heads, num_rows, _ = q.shape
    # Start at the lowest finite number instead of -inf: hidden scores then give exp(-inf - lowest) = 0, not
    # NaN.
    row_max = q.new_full((heads, num_rows, 1), torch.finfo(q.dtype).min)
    row_sum = q.new_zeros((heads, num_rows, 1))
    # sum(P log P), for P in units of exp(row_max), as row_sum and acc.
    moment = torch.zeros_like(row_sum) if "entropy" in statistics else None
    acc = q.new_zeros((heads, num_rows, chunk.v.shape[-1]))
    if moving is not None:  # with S', the tangent of S: sum(P S' V + P V') and sum(P S')
        q_tangent = chunk.folded(moving.q, rows)
        acc_tangent, sum_tangent = torch.zeros_like(acc), torch.zeros_like(row_sum)
    for keys in chunk.key_blocks(rows):
        block = slice(keys.start, keys.stop)
        seen = chunk.seen(rows, keys)
        if seen is not None and not seen.any():
            continue
        scores = chunk.scores(q, rows, keys, None, seen)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        # In place, as all passes over a tile: passes over memory are what the fused kernel saves.
        scores.sub_(new_max)
        shift = row_max.sub_(new_max)
        if moment is not None:
            moment.addcmul_(row_sum, shift.masked_fill(row_sum == 0, 0.0)).mul_(shift.exp())
            moment += times_log(scores.exp(), scores).sum(-1, keepdim=True)
        p = scores.exp_()
        correction = shift.exp_()
        row_sum.mul_(correction).add_(p.sum(-1, keepdim=True))
        kept = chunk.kept(rows, keys)
        if moving is not None:
            ds = chunk.tile("dscores", num_rows, len(keys))
            torch.baddbmm(ds, q_tangent, chunk.k[:, block].mT, beta=0, alpha=chunk.softmax_scale, out=ds)
            ds.baddbmm_(q, moving.k[:, block].mT, alpha=chunk.softmax_scale)
            chunk.through_functions(ds, p, rows, keys)
            if chunk.softcap > 0:  # d tanh(x) = 1 - tanh(x)^2; scores() has left tanh(x) in the buffer "tanh"
                ds.addcmul_(ds * (tanh := chunk.tile("tanh", num_rows, len(keys))), tanh, value=-1)
            # What moves a hidden score need not be finite.
            ds.mul_(p).masked_fill_(p == 0, 0.0)
            sum_tangent.mul_(correction).add_(ds.sum(-1, keepdim=True))
            if kept is not None:
                ds.mul_(kept)
        if kept is not None:  # only after row_sum: dropout does not change the denominator
            p.mul_(kept)
        acc.mul_(correction).baddbmm_(p, chunk.v[:, block])
        if moving is not None:
            acc_tangent.mul_(correction).baddbmm_(ds, chunk.v[:, block]).baddbmm_(p, moving.v[:, block])
        row_max = new_max
    found = []
    if "max_logits" in statistics:
        found.append(row_max.masked_fill(row_sum == 0, -torch.inf))
    log_sum = row_sum.log()
    if moment is not None:
        found.append((log_sum - moment / row_sum).masked_fill_(row_sum == 0, 0.0))
    lse = row_max.add_(log_sum)  # -inf for a row without a visible key, because log(0) is
    if statistics:
        lse = torch.cat([lse, *found], -1)
    if chunk.may_hide_rows:
        row_sum.masked_fill_(row_sum == 0, 1.0)
    if moving is not None:
        lse_tangent = sum_tangent / row_sum
    # Kept probabilities are divided by 1 - p here, once a row and not once a score.
    out = acc.div_(row_sum.mul_(chunk.keep_share))
    if moving is None:
        return out, lse.squeeze(-1)
    out_tangent = acc_tangent.div_(row_sum).addcmul_(lse_tangent, out, value=-1)
    return out, lse.squeeze(-1), out_tangent, lse_tangent.squeeze(-1)


def times_log(p: Tensor, log_p: Tensor) -> Tensor:
    """Return p log p, which is 0 where p is 0, also for log_p -inf."""
    return p * log_p.masked_fill(p == 0, 0.0)


def _backward_rows(
    chunk: Chunk,
    rows: range,
    dout: Tensor,
    minus_delta: Tensor,
    minus_lse: Tensor,
    minus_dentropy: Tensor | None,
    dk: Tensor,
    dv: Tensor,
) -> Tensor:
    """Run Algorithm 2 for one block of rows. Return its dq, and add its terms to dk and dv."""
    q = chunk.folded(chunk.q, rows)
    dq = torch.zeros_like(q)
    for keys in chunk.key_blocks(rows):
        block = slice(keys.start, keys.stop)
        seen = chunk.seen(rows, keys)
        if seen is not None and not seen.any():
            continue
        log_p = chunk.scores(q, rows, keys, minus_lse, seen)
        of_entropy = None
        if minus_dentropy is not None:
            of_entropy = minus_dentropy * times_log(log_p.exp(), log_p)
        p = log_p.exp_()
        ds = chunk.tile("dscores", q.shape[1], len(keys))
        kept = chunk.kept(rows, keys)
        if kept is None:
            dv[:, block] += torch.bmm(p.mT, dout)
            torch.baddbmm(minus_delta, dout, chunk.v[:, block].mT, out=ds)
        else:
            scale = 1 / chunk.keep_share
            torch.mul(p, kept, out=ds)
            dv[:, block].add_(torch.bmm(ds.mT, dout), alpha=scale)
            torch.bmm(dout, chunk.v[:, block].mT, out=ds)
            torch.addcmul(minus_delta, ds, kept, value=scale, out=ds)
        ds.mul_(p)  # p without dropout: its factors are in dP
        if of_entropy is not None:
            ds += of_entropy
        chunk.through_functions(ds, p, rows, keys)
        if chunk.optional.dbias is not None:
            dbias = chunk.broadcast(chunk.optional.dbias, rows, keys)
            dbias += chunk.by_heads(ds, rows, keys).sum_to_size(dbias.shape)
        if chunk.softcap > 0:
            # d tanh(x) = 1 - tanh(x)^2; scores() has left tanh(x) in the buffer "tanh".
            tanh = chunk.tile("tanh", q.shape[1], len(keys))
            ds.addcmul_(p.copy_(ds).mul_(tanh), tanh, value=-1)
        dq.baddbmm_(ds, chunk.k[:, block], alpha=chunk.softmax_scale)
        dk[:, block].add_(torch.bmm(ds.mT, q), alpha=chunk.softmax_scale)
    return dq


def chunks(
    problem: Problem, config: Tiled, q: Tensor, k: Tensor, v: Tensor, optional: OptionalInputs
) -> Iterator[Chunk]:
    """Split the call into chunks of at most TILE_HEADS pairs (sequence, key/value head).

    A chunk has whole sequences, or some heads of one sequence.
    """
    if optional.functions is not None:
        yield from optional.functions.chunks(problem, config, q, k, v, optional)
        return
    batch, _, heads_kv, _ = k.shape
    sequences = max(1, config.TILE_HEADS // heads_kv)
    for b in split(range(batch), sequences):
        for h in split(range(heads_kv), config.TILE_HEADS):
            yield Chunk(problem, config, q, k, v, optional, slice(b.start, b.stop), slice(h.start, h.stop))


class Chunk:
    """Some sequences and key/value heads of a call, folded to three dimensions.

    The dimensions of a tensor are (sequences * heads_kv, rows or keys, head_dim).
    """

    def __init__(
        self,
        problem: Problem,
        config: Tiled,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        optional: OptionalInputs,
        batch: slice,
        heads_kv: slice,
        heads_q: slice | None = None,
    ):
        """``heads_q`` is one query head of the key/value head, or None for all its query heads."""
        # The query heads of a group are rows of one tile, so that its keys are read and converted once.
        group = problem.group_size if heads_q is None else 1
        self.group = group
        self.batch, self.heads_kv = batch, heads_kv
        self.heads_q = heads_q or slice(heads_kv.start * group, heads_kv.stop * group)
        self.softmax_scale, self.softcap = problem.softmax_scale, problem.softcap
        self.masking: Masking = problem
        self.seqlen_q, self.seqlen_k = q.shape[1], k.shape[1]
        self.offset = self.seqlen_k - self.seqlen_q
        self.block_m = max(1, config.BLOCK_M // group)
        self.block_n = config.BLOCK_N
        self.dtype = config.compute_dtype
        self.q = q
        # Keys are converted once a chunk, because each block of rows reads them. A batched product needs one
        # dimension for all pairs of a sequence and a head, so they are also copied if they have the dtype.
        self.k, self.v = (self.keys_of(t).to(self.dtype).contiguous().flatten(0, 1) for t in (k, v))
        self.minus_slopes: Tensor | None = None
        self.optional = optional
        self.may_hide_rows = optional.may_hide_rows or problem.beyond_window is not None
        if optional.alibi_slopes is not None:
            slopes = optional.alibi_slopes.expand(q.shape[0], -1)[batch, self.heads_q]
            self.minus_slopes = -slopes.to(self.dtype).reshape(-1, group, 1, 1)
        self.keep_share = 1.0 if optional.dropout is None else 1 - optional.dropout.p
        # Tiles are written into the same memory again and again. With new memory for each, the forward pass
        # takes 1.25 times as long, both passes 1.2 times (2048 tokens, 4 heads of 64, one core of a Xeon).
        self.buffers: dict[str, Tensor] = {}

    def visible_rows(self) -> range:
        rows = self.masking.row_range(self.positions(range(self.seqlen_q)), range(self.seqlen_k))
        return range(rows.start - self.offset, rows.stop - self.offset)

    def positions(self, rows: range) -> range:
        return range(rows.start + self.offset, rows.stop + self.offset)

    def visible_keys(self, rows: range) -> range:
        return self.masking.key_range(self.positions(rows), range(self.seqlen_k))

    def row_blocks(self) -> Iterator[range]:
        return split(self.visible_rows(), self.block_m)

    def key_blocks(self, rows: range) -> Iterator[range]:
        return split(self.visible_keys(rows), self.block_n)

    def keys_of(self, tensor: Tensor) -> Tensor:
        """View this chunk's part of k, v, dk or dv as (sequences, heads_kv, seqlen_k, head_dim)."""
        return tensor[self.batch, :, self.heads_kv].transpose(1, 2)

    def tokens(self, tensor: Tensor, rows: range) -> Tensor:
        """View ``rows`` of this chunk's q, out, dq or dout as (sequences, heads_q, rows, head_dim)."""
        return tensor[self.batch, rows.start : rows.stop, self.heads_q].transpose(1, 2)

    def statistics(self, tensor: Tensor, rows: range) -> Tensor:
        """View ``rows`` of this chunk's lse, or of its gradient, as (sequences, heads_q, rows)."""
        return tensor[self.batch, self.heads_q, rows.start : rows.stop]

    def store(self, rows: range, results: Sequence[Tensor], tiles: Sequence[Tensor]) -> None:
        """Write the tiles of ``rows`` to their results: in turns, one like out and one like lse."""
        for i, (result, tile) in enumerate(zip(results, tiles, strict=True)):
            if i % 2 == 0:
                self.tokens(result, rows).copy_(self.unfolded(tile, rows))
            else:
                own = self.statistics(result, rows)
                own.copy_(tile.view(own.shape))

    def folded(self, tensor: Tensor, rows: range) -> Tensor:
        """Copy ``rows`` of q, out or dout to a tile in the compute dtype.

        The tile has shape (sequences * heads_kv, group * rows, head_dim).
        """
        tile = self.tokens(tensor, rows).to(self.dtype).contiguous()
        return tile.view(-1, self.group * len(rows), tile.shape[-1])

    def unfolded(self, tile: Tensor, rows: range) -> Tensor:
        """View a tile in the shape of :meth:`tokens`, (sequences, heads_q, rows, head_dim)."""
        heads = self.heads_q.stop - self.heads_q.start
        return tile.view(-1, heads, len(rows), tile.shape[-1])

    def tile(self, name: str, num_rows: int, num_keys: int) -> Tensor:
        """Return a tile in the buffer ``name``. The next tile in this buffer overwrites it.

        The tile has shape (sequences * heads_kv, num_rows, num_keys).
        """
        pairs = self.k.shape[0]
        if name not in self.buffers:
            rows = self.group * min(self.block_m, self.seqlen_q)
            self.buffers[name] = self.k.new_empty(pairs * rows * min(self.block_n, self.seqlen_k))
        return self.buffers[name][: pairs * num_rows * num_keys].view(pairs, num_rows, num_keys)

    def by_heads(self, tile: Tensor, rows: range, keys: range) -> Tensor:
        """View a tile of scores as (sequences, heads_kv, group, rows, keys)."""
        heads = self.heads_kv.stop - self.heads_kv.start
        return tile.view(-1, heads, self.group, len(rows), len(keys))

    def broadcast(self, tensor: Tensor, rows: range, keys: range) -> Tensor:
        """View the part of a mask or bias that belongs to a tile. It broadcasts to :meth:`by_heads`."""
        batch, heads, seqlen_q, _ = tensor.shape
        part = tensor[
            self.batch if batch > 1 else slice(None),
            self.heads_q if heads > 1 else slice(None),
            slice(rows.start, rows.stop) if seqlen_q > 1 else slice(None),
            keys.start : keys.stop,
        ]
        return part.unflatten(1, (-1, self.group)) if heads > 1 else part[:, :, None]

    def seen(self, rows: range, keys: range) -> Tensor | None:
        """Return a bool mask of a tile, True where a score is visible, or None without masks.

        The mask broadcasts to the shape of :meth:`by_heads`.
        """
        parts = [self.broadcast(mask, rows, keys) for mask in self.optional.masks]
        return functools.reduce(torch.logical_and, parts) if parts else None

    def kept(self, rows: range, keys: range) -> Tensor | None:
        """Return a tile that is 1 where dropout keeps a probability, else 0. None without dropout.

        The tile has shape (sequences * heads_kv, group * rows, keys).
        """
        if self.optional.dropout is None:
            return None
        kept = self.optional.dropout.kept(self.batch, self.heads_q, rows, keys)
        # Converting bytes is several times as fast as converting bool.
        return kept.view(torch.uint8).to(self.dtype).reshape(self.k.shape[0], -1, len(keys))

    def scores(
        self, q: Tensor, rows: range, keys: range, added: Tensor | None, seen: Tensor | None
    ) -> Tensor:
        """Return a tile of scores (sequences * heads_kv, group * rows, keys), -inf where hidden.

        ``added`` (sequences * heads_kv, group * rows, 1) is added to the scores, if given.
        """
        tile = self.tile("scores", q.shape[1], len(keys))
        k = self.k[:, keys.start : keys.stop].mT
        if self.softcap > 0:
            tanh = self.tile("tanh", q.shape[1], len(keys))
            torch.baddbmm(tanh, q, k, beta=0, alpha=self.softmax_scale / self.softcap, out=tanh)
            torch.mul(tanh.tanh_(), self.softcap, out=tile)
            if added is not None:
                tile += added
        elif added is None:
            torch.baddbmm(tile, q, k, beta=0, alpha=self.softmax_scale, out=tile)
        else:
            torch.baddbmm(added, q, k, alpha=self.softmax_scale, out=tile)

        at = self.positions(rows)
        if self.minus_slopes is not None:
            own = torch.arange(at.start, at.stop, dtype=self.dtype, device="cpu")
            distance = torch.arange(keys.start, keys.stop, dtype=self.dtype, device="cpu") - own[:, None]
            by_head = tile.view(-1, self.group, len(rows), len(keys))
            by_head.addcmul_(self.minus_slopes, distance.abs_())
        by_heads = self.by_heads(tile, rows, keys)
        if self.optional.bias is not None:
            by_heads += self.broadcast(self.optional.bias, rows, keys)
        self.modify(tile, rows, keys)
        if not self.masking.sees_all(at, keys):
            by_heads.masked_fill_(self.masking.visible(at, keys).logical_not_(), -torch.inf)
        if seen is not None:
            by_heads.masked_fill_(~seen, -torch.inf)
        return tile

    def modify(self, tile: Tensor, rows: range, keys: range) -> None:
        """Apply ``score_mod`` to a tile of scores, in place. A chunk without functions does nothing.

        The backward pass of this step is :meth:`through_functions`.
        """

    def through_functions(self, ds: Tensor, p: Tensor, rows: range, keys: range) -> None:
        """Turn ``ds``, the gradient of the scores after ``score_mod``, into that of the scores before it.

        ``ds`` is changed in place. ``p`` has the probabilities.
        """
