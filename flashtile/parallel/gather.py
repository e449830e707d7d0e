"""Keys and values of all ranks gathered on each, for few key heads: one exchange, one call of attention, and
nothing to merge (Llama 3, arXiv:2407.21783, section 3.3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.parallel.attend import Saved, Total, attend_once, sink_gradient
from flashtile.parallel.blocks import Pair, pair_of
from flashtile.parallel.layout import Piece, joined, positions
from flashtile.parallel.methods import Forward, Gradients, Shards
from flashtile.parallel.ranks import as_bytes, from_bytes, num_bytes


@dataclass(frozen=True)
class AllGather:
    """Every rank's keys and values for a time on each; the backward pass gathers them again."""

    shards: Shards

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Forward:
        pair, order = self._pair(), self._order(q.device)
        keys, values = self._gather(k, v, order)
        out, lse = attend_once(q, keys, values, pair, self.shards.scores, sink)
        return Forward(out, lse, (q, k, v, out, lse))

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...], sink: Tensor | None
    ) -> Gradients:
        q, k, v, out, lse = saved
        pair, order = self._pair(), self._order(q.device)
        keys, values = self._gather(k, v, order)
        rows = Saved(q, dout, dlse, out, lse, self.shards.scores)
        dq, dk, dv = (Total(t, rows.dtype) for t in (q, keys, values))
        rows.differentiate(keys, values, pair, dq, dk, dv)
        of_keys, of_values = (self._sum(t.value(), order) for t in (dk, dv))
        dsink = None if sink is None else sink_gradient(sink, dout, dlse, out, lse)
        return Gradients(dq.rounded(q.dtype), of_keys.to(k.dtype), of_values.to(v.dtype), dsink)

    def _pieces(self) -> tuple[Piece, ...]:
        """Of the gathered keys as they come: rank after rank."""
        return tuple(piece for pieces in self.shards.pieces_k for piece in pieces)

    def _pair(self) -> Pair:
        own = self.shards.pieces_q[self.shards.ranks.rank]
        keys = self._pieces()
        if all(piece.step == 1 for piece in keys):  # in the sequence's order they are one piece
            keys = joined(sorted(keys))
        return pair_of(own, keys, self.shards.mask)

    def _order(self, device: torch.device) -> Tensor | None:
        """Where each key of the sequence's order stands as it comes; None: it stays as it comes."""
        keys = self._pieces()
        if any(piece.step > 1 for piece in keys) or list(keys) == sorted(keys):
            return None
        return torch.argsort(positions(keys, device))

    def _gather(self, k: Tensor, v: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor]:
        shards = self.shards
        flat = torch.cat([t.transpose(0, 1).flatten(1) for t in (k, v)], dim=1)  # (tokens, batch * elements)
        whole = torch.cat(shards.ranks.gather(flat, shards.lengths_k, shards.timeout))
        if order is not None:
            whole = whole[order]
        whole = _needed(self._pair(), whole)
        parts = whole.split([t.shape[0] * t.shape[2] * t.shape[3] for t in (k, v)], dim=1)
        keys, values = (
            part.unflatten(1, (t.shape[0], *t.shape[2:])).transpose(0, 1)
            for part, t in zip(parts, (k, v), strict=True)
        )
        return keys, values

    def _sum(self, gradient: Tensor, order: Tensor | None) -> Tensor:
        """The sum over ranks of the gradients of this rank's keys, in the order of ranks."""
        shards = self.shards
        total = sum(shards.lengths_k)
        whole = gradient.new_zeros((gradient.shape[0], total, *gradient.shape[2:]))
        at = 0
        for start, stop in self._pair().ranges:
            whole[:, start:stop] = gradient[:, at : at + stop - start]
            at += stop - start
        if order is not None:
            as_it_came = torch.empty_like(whole)
            as_it_came[:, order] = whole
            whole = as_it_came
        sent = [as_bytes([part]) for part in whole.split(shards.lengths_k, dim=1)]
        own = shards.lengths_k[shards.ranks.rank]
        spec = ((gradient.shape[0], own, *gradient.shape[2:]), gradient.dtype)
        parts = shards.ranks.all_to_all(sent, [num_bytes([spec])] * shards.ranks.size, shards.timeout)
        first, *others = (from_bytes(part, [spec])[0] for part in parts)
        for part in others:
            first = first + part
        return first


def _needed(pair: Pair, whole: Tensor) -> Tensor:
    """The keys of the pair's ranges, side by side."""
    if pair.ranges == ((0, whole.shape[0]),):
        return whole
    return torch.cat([whole[:0], *(whole[start:stop] for start, stop in pair.ranges)])
