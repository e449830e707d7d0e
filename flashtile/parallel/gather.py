"""All-gather: each rank gathers the keys and values that its queries see (Llama 3, arXiv:2407.21783, section
3.3.2).

There is one exchange, and no partial results are merged. This suits models with few key heads. Messages are
received directly into the tensors that attention reads. Gradients of keys and values are sent directly from
the tensors that the backward pass wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.parallel.attend import Forward, Gradients, Saved, Shards, Total, attend_once
from flashtile.parallel.blocks import Pair, pair_of
from flashtile.parallel.layout import Piece, joined
from flashtile.parallel.ranks import Message, as_bytes


class _Part(NamedTuple):
    """Consecutive tokens of one rank that another rank needs.

    Attributes:
        own: index of the first token among the owner's tokens.
        gathered: index of the first token among the tokens that the other rank gathers.
        tokens: number of tokens.
    """

    own: int
    gathered: int
    tokens: int

    def of_owner(self, x: Tensor) -> Tensor:
        return x[:, self.own : self.own + self.tokens]

    def of_gathered(self, x: Tensor) -> Tensor:
        return x[:, self.gathered : self.gathered + self.tokens]


@dataclass(frozen=True)
class AllGather:
    """Attention over keys and values gathered from all ranks. The backward pass gathers them again."""

    shards: Shards

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Forward:
        keys, values = self._gather([k, v])
        out, lse = attend_once(q, keys, values, self._pair(self._rank), self.shards.scores, sink)
        return Forward(out, lse, (q, k, v, out, lse))

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...], sink: Tensor | None
    ) -> Gradients:
        q, k, v, out, lse = saved
        keys, values = self._gather([k, v])
        rows = Saved(q, dout, dlse, out, lse, self.shards.scores)
        dq, dk, dv = (Total(t, rows.dtype) for t in (q, keys, values))
        rows.differentiate(keys, values, self._pair(self._rank), dq, dk, dv)
        of_keys, of_values = self._sums([dk.value(), dv.value()], [k, v])
        dk_own, dv_own = of_keys.rounded(k.dtype), of_values.rounded(v.dtype)
        return Gradients(dq.rounded(q.dtype), dk_own, dv_own, rows.sink_gradient(sink))

    @property
    def _rank(self) -> int:
        return self.shards.ranks.rank

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.shards.ranks.size) if rank != self._rank]

    def _pair(self, rank: int) -> Pair:
        """Return the :class:`Pair` (attention calls) of one rank's queries and the keys of all ranks.

        The keys are in the order of the sequence. In the layout "striped" they are ordered by rank instead.
        """
        keys: tuple[Piece, ...] = tuple(piece for pieces in self.shards.pieces_k for piece in pieces)
        if all(piece.step == 1 for piece in keys):
            keys = joined(sorted(keys))
        return pair_of(self.shards.pieces_q[rank], keys, self.shards.mask)

    def _parts(self, owner: int, needed_by: int) -> list[_Part]:
        pieces, ranges = self.shards.pieces_k, self._pair(needed_by).ranges
        in_order = all(piece.step == 1 for of_rank in pieces for piece in of_rank)
        own, before, found = 0, sum(self.shards.lengths_k[:owner]), []
        for piece in pieces[owner]:
            first = piece.start if in_order else before + own  # index among the keys of all ranks
            gathered = 0
            for start, stop in ranges:
                begin, end = max(start, first), min(stop, first + piece.length)
                if begin < end:
                    found.append(_Part(own + begin - first, gathered + begin - start, end - begin))
                gathered += stop - start
            own += piece.length
        return found

    def _gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """Gather from all ranks the keys and values that this rank's queries see.

        Each of ``tensors`` is (batch, tokens of this rank, heads, head_dim). The results are (batch, gathered
        tokens, heads, head_dim).
        """
        tokens = self._pair(self._rank).tokens
        gathered = [t.new_empty((t.shape[0], tokens, *t.shape[2:])) for t in tensors]
        sent = [
            Message(other, as_bytes([part.of_owner(t)]))
            for other in self._others
            for t in tensors
            for part in self._parts(self._rank, other)
        ]
        incoming = [
            (other, part.of_gathered(t))
            for other in self._others
            for t in gathered
            for part in self._parts(other, self._rank)
        ]
        buffers = [torch.empty_like(x) if not x.is_contiguous() else x for _, x in incoming]
        received = [
            Message(other, as_bytes([buffer])) for (other, _), buffer in zip(incoming, buffers, strict=True)
        ]
        pending = self.shards.ranks.post(sent, received, self.shards.timeout)
        for t, to in zip(tensors, gathered, strict=True):
            for part in self._parts(self._rank, self._rank):
                part.of_gathered(to).copy_(part.of_owner(t))
        pending.wait()
        for (_, x), buffer in zip(incoming, buffers, strict=True):
            if buffer is not x:
                x.copy_(buffer)
        return gathered

    def _sums(self, gradients: list[Tensor], like: list[Tensor]) -> list[Total]:
        """Sum the gradients of this rank's own tokens over all ranks.

        This rank's own term is added first, and the terms of the others follow in the order of ranks.
        """
        dtype = gradients[0].dtype
        sent = [
            Message(other, as_bytes([part.of_gathered(t)]))
            for other in self._others
            for t in gradients
            for part in self._parts(other, self._rank)
        ]
        sums = [Total(t, dtype) for t in like]
        incoming = [
            (other, i, part, t.new_empty((t.shape[0], part.tokens, *t.shape[2:]), dtype=dtype))
            for other in self._others
            for i, t in enumerate(like)
            for part in self._parts(self._rank, other)
        ]
        received = [Message(other, as_bytes([buffer])) for other, _, _, buffer in incoming]
        pending = self.shards.ranks.post(sent, received, self.shards.timeout)
        for t, of_own, total in zip(gradients, like, sums, strict=True):
            own = Total(of_own, dtype)
            for part in self._parts(self._rank, self._rank):
                own.add(part.of_gathered(t), part.own, part.own + part.tokens)
            total.add(own.value(), 0, of_own.shape[1])
        pending.wait()
        for _, i, part, buffer in incoming:
            sums[i].add(buffer, part.own, part.own + part.tokens)
        return sums
