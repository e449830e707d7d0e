"""DeepSpeed Ulysses (Jacobs et al. 2023, arXiv:2309.14509): tokens are exchanged for heads, and back.

Each rank gets all tokens of its group for some heads. It then attends as a single device would, or in a ring
with the other groups (two dimensions: USP, Fang and Zhao 2024, arXiv:2405.07719). With fewer key heads than
ranks, a key head is sent to every rank that has some of its query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.parallel.attend import Forward, Gradients, Method, Shards, wide
from flashtile.parallel.layout import OfRanks, Piece, in_sequence, joined, positions, tokens_of
from flashtile.parallel.ranks import as_bytes, from_bytes, num_bytes

QUERIES, KEYS = True, False
"""Whether a tensor holds rows of queries (q, out, lse, their gradients), or of keys (k, v, dk, dv)."""


def query_heads(heads: int, size: int, rank: int) -> range:
    """Return the (consecutive) query heads of a rank. With more ranks than heads, some ranks have none."""
    return range(rank * heads // size, (rank + 1) * heads // size)


def key_heads(heads_q: int, heads_kv: int, size: int, rank: int) -> list[int]:
    """Return the key heads that a rank's query heads attend to.

    If all these key heads serve equally many query heads of the rank, which is usual, each of them is listed
    once. Otherwise the list has one entry for each query head, so key heads are repeated.
    """
    group = heads_q // heads_kv
    own = query_heads(heads_q, size, rank)
    distinct = sorted({head // group for head in own})
    counts = {sum(head // group == of for head in own) for of in distinct}
    return distinct if len(counts) <= 1 else [head // group for head in own]


def keys_shared(heads_q: int, heads_kv: int, size: int) -> bool:
    """Whether a key head is sent to several ranks, or several times to one rank."""
    return sum(len(key_heads(heads_q, heads_kv, size, rank)) for rank in range(size)) > heads_kv


@dataclass(frozen=True)
class Ulysses:
    """Exchange of tokens for heads within a group of ranks. An inner method computes attention in between.

    Args:
        inner: method that computes attention over the group's tokens, in the order of :func:`in_order`.
        shards: the group that exchanges tokens for heads.
        heads_q, heads_kv: numbers of heads of all ranks together.
    """

    inner: Method
    shards: Shards
    heads_q: int
    heads_kv: int

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Forward:
        q_heads, k_heads, v_heads = self._to_heads([q, k, v], [QUERIES, KEYS, KEYS])
        if q_heads.shape[2] == 0:
            inner = _nothing(q_heads, k_heads, v_heads)
        else:
            inner = self.inner.forward(q_heads, k_heads, v_heads, self._own(sink))
        lse, out = self._to_tokens([_as_rows(inner.lse), inner.out], [QUERIES, QUERIES])
        return Forward(torch.cat(out, dim=2), _as_lse(torch.cat(lse, dim=2)), inner.saved)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...], sink: Tensor | None
    ) -> Gradients:
        rows = [dout] if dlse is None else [_as_rows(dlse), dout]
        *of_lse, of_out = self._to_heads(rows, [QUERIES] * len(rows))
        if of_out.shape[2] == 0:
            shared = keys_shared(self.heads_q, self.heads_kv, self.shards.ranks.size)
            dtypes = [wide(t.dtype) if shared and i else t.dtype for i, t in enumerate(saved[:3])]
            dq, dk, dv = (torch.zeros_like(t, dtype=of) for t, of in zip(saved[:3], dtypes, strict=True))
            inner = Gradients(dq, dk, dv, None)
        else:
            lse_gradient = _as_lse(of_lse[0]) if of_lse else None
            inner = self.inner.backward(of_out, lse_gradient, saved, self._own(sink))
        # dk and dv come first, because they may have a wider dtype than dq.
        parts = self._to_tokens([inner.dk, inner.dv, inner.dq], [KEYS, KEYS, QUERIES])
        of_keys, of_values, of_queries = parts
        dsink = None
        if sink is not None:
            dsink = torch.zeros_like(sink)
            own = self._heads(self.shards.ranks.rank, QUERIES)
            if inner.dsink is not None:
                dsink[own[0] : own[-1] + 1] = inner.dsink
        dk, dv = (self._sum(of).to(dout.dtype) for of in (of_keys, of_values))
        return Gradients(torch.cat(of_queries, dim=2), dk, dv, dsink)

    def _heads(self, rank: int, of_queries: bool) -> list[int]:
        size = self.shards.ranks.size
        if of_queries:
            return list(query_heads(self.heads_q, size, rank))
        return key_heads(self.heads_q, self.heads_kv, size, rank)

    def _pieces(self, of_queries: bool) -> OfRanks:
        return self.shards.pieces_q if of_queries else self.shards.pieces_k

    def _lengths(self, of_queries: bool) -> list[int]:
        return [tokens_of(pieces) for pieces in self._pieces(of_queries)]

    def _own(self, sink: Tensor | None) -> Tensor | None:
        return None if sink is None else sink[self._heads(self.shards.ranks.rank, QUERIES)]

    def _to_heads(self, tensors: list[Tensor], of_queries: list[bool]) -> list[Tensor]:
        """Exchange this rank's tokens of all heads for all tokens of this rank's heads.

        Tensors of the widest dtype must come first.
        """
        rank, ranks = self.shards.ranks.rank, range(self.shards.ranks.size)
        sent = [
            [_take_heads(t, self._heads(to, of)) for t, of in zip(tensors, of_queries, strict=True)]
            for to in ranks
        ]
        sizes = [
            [(self._lengths(of)[other], len(self._heads(rank, of))) for of in of_queries] for other in ranks
        ]
        whole = [torch.cat(parts, dim=1) for parts in self._exchange(sent, sizes)]
        orders = [self._order(of, t.device) for t, of in zip(whole, of_queries, strict=True)]
        return [t if order is None else t[:, order] for t, order in zip(whole, orders, strict=True)]

    def _to_tokens(self, tensors: list[Tensor], of_queries: list[bool]) -> list[list[Tensor]]:
        """Undo :meth:`_to_heads`: exchange all tokens of this rank's heads for its own tokens of all heads.

        Returns a list for each tensor. Entry ``rank`` of the list has the heads of ``rank``.
        """
        rank, ranks = self.shards.ranks.rank, range(self.shards.ranks.size)
        as_they_came = []
        for t, of in zip(tensors, of_queries, strict=True):
            order = self._order(of, t.device)
            if order is not None:
                restored = torch.empty_like(t)
                restored[:, order] = t
                t = restored
            as_they_came.append(t.split(self._lengths(of), dim=1))
        sent = [list(parts) for parts in zip(*as_they_came, strict=True)]
        sizes = [
            [(self._lengths(of)[rank], len(self._heads(other, of))) for of in of_queries] for other in ranks
        ]
        return self._exchange(sent, sizes)

    def _exchange(self, sent: list[list[Tensor]], sizes: list[list[tuple[int, int]]]) -> list[list[Tensor]]:
        """Send the tensors ``sent[rank]`` to each rank, and receive as many tensors from each rank.

        ``sizes[rank]`` has (tokens, heads) of each tensor that comes from ``rank``. Entry ``[i][rank]`` of
        the result is the i-th tensor from ``rank``.
        """
        ranks = self.shards.ranks
        specs = [
            [((t.shape[0], *size, t.shape[3]), t.dtype) for t, size in zip(sent[0], of_rank, strict=True)]
            for of_rank in sizes
        ]
        outgoing = [as_bytes(parts) for parts in sent]
        received = ranks.all_to_all(outgoing, [num_bytes(spec) for spec in specs], self.shards.timeout)
        parts = [from_bytes(buffer, spec) for buffer, spec in zip(received, specs, strict=True)]
        return [list(of_ranks) for of_ranks in zip(*parts, strict=True)]

    def _order(self, of_queries: bool, device: torch.device) -> Tensor | None:
        """Return the indices that sort received tokens into the order of :func:`in_order`.

        Tokens are received rank after rank. The result is None if they are already in that order.
        """
        pieces = [piece for of_rank in self._pieces(of_queries) for piece in of_rank]
        if in_order(pieces) == joined(pieces):
            return None
        return torch.argsort(positions(pieces, device))

    def _sum(self, parts: list[Tensor]) -> Tensor:
        """Return the gradients of all key heads. ``parts[rank]`` are those of the key heads of ``rank``.

        If several ranks have the same key head, their gradients are added in the order of the ranks.
        """
        if not keys_shared(self.heads_q, self.heads_kv, self.shards.ranks.size):
            return torch.cat(parts, dim=2)
        first = parts[0]
        whole = first.new_zeros((*first.shape[:2], self.heads_kv, first.shape[3]))
        for rank, part in enumerate(parts):
            for i, head in enumerate(self._heads(rank, KEYS)):
                whole[:, :, head] += part[:, :, i]
        return whole


def in_order(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return the pieces of a group of ranks in the order in which Ulysses passes their tokens to attention.

    It is that of :func:`in_sequence`, but interleaved pieces (layout "striped") that together are the whole
    sequence become one piece.
    """
    ordered = in_sequence(pieces)
    # As many ranks have tokens as share the sequence.
    whole = any(piece.step > 1 for piece in ordered) and len(ordered) == ordered[0].step
    return (Piece(0, tokens_of(ordered)),) if whole else ordered


def _take_heads(x: Tensor, heads: list[int]) -> Tensor:
    if heads and heads == list(range(heads[0], heads[-1] + 1)):
        return x[:, :, heads[0] : heads[-1] + 1]
    return x[:, :, heads]


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """Return the empty results of a rank without heads."""
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=wide(q.dtype))
    return Forward(out, lse, (q, k, v, out, lse))


def _as_rows(lse: Tensor) -> Tensor:
    """Convert lse (batch, heads, tokens) to (batch, tokens, heads, 1)."""
    return lse.transpose(1, 2).unsqueeze(-1)


def _as_lse(rows: Tensor) -> Tensor:
    return rows.squeeze(-1).transpose(1, 2).contiguous()
