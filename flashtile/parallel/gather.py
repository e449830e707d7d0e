"""All-gather: each rank gathers the keys and values that its queries see (Llama 3, arXiv:2407.21783, section
3.3.2).

There is one exchange, and no partial results are merged. This suits models with few key heads, and windows: a
rank then gathers only the keys just before its own, while it computes the rows that see its own keys only.
Messages are received directly into the tensors that attention reads. Gradients of keys and values are sent
directly from the tensors that the backward pass wrote.
A forward pass divides the work by rows, so that nothing is merged. Where few keys travel, the backward pass
divides it by keys: those of other ranks (the halo), then the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flashtile.parallel.attend import (
    Forward,
    Gradients,
    Rows,
    Saved,
    Shards,
    State,
    Total,
    add_at_ranges,
    at_ranges,
    attend_once,
    covers,
)
from flashtile.parallel.blocks import Mask, Pair, Ranges, outside, pair_of, union
from flashtile.parallel.layout import OfRanks, in_sequence, tokens_of
from flashtile.parallel.ranks import Message, Ranks, as_bytes

Item = TypeVar("Item")


class Part(NamedTuple):
    """Consecutive tokens of one rank that another rank needs.

    Attributes:
        own: index of the first token among the owner's tokens.
        gathered: index of the first token among the tokens that the other rank gathers.
        tokens: number of tokens.
        halo: as ``gathered``, but without the tokens that the other rank gathers from itself.
    """

    own: int
    gathered: int
    tokens: int
    halo: int

    def of_owner(self, x: Tensor) -> Tensor:
        return x[:, self.own : self.own + self.tokens]

    def of_gathered(self, x: Tensor) -> Tensor:
        return x[:, self.gathered : self.gathered + self.tokens]

    def of_halo(self, x: Tensor) -> Tensor:
        return x[:, self.halo : self.halo + self.tokens]


class Needs:
    """Which keys each rank needs from the others, and for which of its queries.

    Args:
        pieces_q, pieces_k, mask: as for :class:`Shards`.
    """

    def __init__(self, pieces_q: OfRanks, pieces_k: OfRanks, mask: Mask) -> None:
        self._q, self._k, self._mask = pieces_q, pieces_k, mask
        self._lengths_k = [tokens_of(pieces) for pieces in pieces_k]
        self._keys = in_sequence(chain.from_iterable(pieces_k))
        self._rows: dict[int, Ranges] = {}
        self._parts: dict[tuple[int, int], list[Part]] = {}

    def own(self, rank: int) -> Pair:
        """The attention calls of a rank's queries that see only keys of this rank, over these keys."""
        rows = outside(self._rows_of_others(rank), tokens_of(self._q[rank]))
        return pair_of(self._q[rank], self._k[rank], self._mask, rows)

    def gathered(self, rank: int) -> Pair:
        """The attention calls of a rank's other queries, over the keys of all ranks.

        The keys are in the order of the sequence. In the layout "striped" they are ordered by rank instead.
        """
        return pair_of(self._q[rank], self._keys, self._mask, self._rows_of_others(rank))

    def halo(self, rank: int) -> Pair:
        """The attention calls of a rank's queries over its halo: the keys of other ranks that they see.

        These are the keys of :meth:`gathered` without the rank's own.
        """
        # One pair with the keys of all others, which are few pieces: a pair with each would take hundreds
        # of milliseconds for 64 ranks, in every step on packed documents.
        others = chain.from_iterable(self._k[:rank] + self._k[rank + 1 :])
        return pair_of(self._q[rank], in_sequence(others), self._mask)

    def halo_ranges(self, rank: int) -> Ranges:
        """The halo's places among the keys that a rank gathers."""
        own = union([(part.gathered, part.gathered + part.tokens) for part in self.parts(rank, rank)])
        return outside(own, self.gathered(rank).tokens)

    @cached_property
    def few(self) -> bool:
        """Whether each rank gathers at most as many keys as it has, as with short windows."""
        return all(self.gathered(rank).tokens <= tokens for rank, tokens in enumerate(self._lengths_k))

    def parts(self, owner: int, needed_by: int) -> list[Part]:
        """The tokens of a rank that another rank gathers, or that it gathers itself next to others."""
        known = self._parts.get((owner, needed_by))
        if known is not None:
            return known
        found = self._parts[owner, needed_by] = list[Part]()
        ranges = self.gathered(needed_by).ranges
        own, before = 0, sum(self._lengths_k[:owner])
        of_itself = [] if owner == needed_by else self.parts(needed_by, needed_by)
        for piece in self._k[owner]:
            first = piece.start if piece.step == 1 else before + own  # index among the keys of all ranks
            gathered = 0
            for start, stop in ranges:
                begin, end = max(start, first), min(stop, first + piece.length)
                if begin < end:
                    at = gathered + begin - start
                    own_before = sum(part.tokens for part in of_itself if part.gathered < at)
                    found.append(Part(own + begin - first, at, end - begin, at - own_before))
                gathered += stop - start
            own += piece.length
        return found

    def _rows_of_others(self, rank: int) -> Ranges:
        """The queries of a rank that see keys of other ranks."""
        if rank not in self._rows:
            blocks = self.halo(rank).blocks
            self._rows[rank] = union([(block.q_start, block.q_stop) for block in blocks])
        return self._rows[rank]


_needs = lru_cache(maxsize=64)(Needs)


def needs_of(shards: Shards) -> Needs:
    return _needs(shards.pieces_q, shards.pieces_k, shards.mask)


@dataclass(frozen=True)
class Exchange:
    """The messages with which each rank gets the keys that it needs, and gives back their gradients."""

    ranks: Ranks
    needs: Needs
    timeout: float

    def gather(
        self, tensors: list[Tensor], before: Callable[[], None] | None = None
    ) -> Callable[[], list[Tensor]]:
        """Begin to gather the keys and values of the queries that see other ranks' keys.

        Each of ``tensors`` is (batch, tokens of this rank, heads, head_dim). ``before`` is that of
        :meth:`Ranks.post`. Returns a function that waits for the messages, and returns (batch, gathered
        tokens, heads, head_dim) for each tensor.
        """
        rank = self.ranks.rank
        tokens = self.needs.gathered(rank).tokens
        gathered = [t.new_empty((t.shape[0], tokens, *t.shape[2:])) for t in tensors]
        sent = [Message(other, as_bytes([part.of_owner(t)])) for other, t, part in self._parts(tensors, True)]
        places = [(other, part.of_gathered(t)) for other, t, part in self._parts(gathered, False)]
        incoming = [(other, x, x if x.is_contiguous() else torch.empty_like(x)) for other, x in places]
        received = [Message(other, as_bytes([buffer])) for other, _, buffer in incoming]
        for t, to in zip(tensors, gathered, strict=True):
            for part in self.needs.parts(rank, rank):
                part.of_gathered(to).copy_(part.of_owner(t))
        pending = self.ranks.post(sent, received, self.timeout, before)

        def arrive() -> list[Tensor]:
            pending.wait()
            for _, x, buffer in incoming:
                if buffer is not x:  # the message could not be received in place
                    x.copy_(buffer)
            return gathered

        return arrive

    def give_back(self, gradients: list[Tensor], sums: list[Total], halo: bool = False) -> Callable[[], None]:
        """Begin to send gradients of gathered keys and values to the ranks that own them.

        ``gradients`` are those of all gathered tokens, or of the halo only. Returns a function that waits for
        the gradients of this rank's tokens, and adds them to ``sums`` in the order of ranks.
        """
        of = Part.of_halo if halo else Part.of_gathered
        sent = [Message(other, as_bytes([of(part, t)])) for other, t, part in self._parts(gradients, False)]
        incoming = [
            (other, total, part, t.new_empty((t.shape[0], part.tokens, *t.shape[2:])))
            for other, (total, t), part in self._parts([*zip(sums, gradients, strict=True)], True)
        ]
        received = [Message(other, as_bytes([buffer])) for other, _, _, buffer in incoming]
        pending = self.ranks.post(sent, received, self.timeout)

        def add() -> None:
            pending.wait()
            for _, total, part, buffer in incoming:
                total.add(buffer, part.own, part.own + part.tokens)

        return add

    def add_own(self, gradients: list[Tensor], sums: list[Total]) -> None:
        """Add those gradients of gathered tokens to ``sums`` that are of this rank's own tokens."""
        for t, total in zip(gradients, sums, strict=True):
            for part in self.needs.parts(self.ranks.rank, self.ranks.rank):
                total.add(part.of_gathered(t), part.own, part.own + part.tokens)

    def _parts(self, items: Sequence[Item], own: bool) -> Iterator[tuple[int, Item, Part]]:
        """Yield (another rank, item, part) in the order of ranks.

        Parts are of this rank's ``own`` tokens that the other needs, or of the other's that this one needs.
        """
        rank = self.ranks.rank
        for other in range(self.ranks.size):
            if other != rank:
                parts = self.needs.parts(rank, other) if own else self.needs.parts(other, rank)
                yield from ((other, item, part) for item in items for part in parts)


@dataclass(frozen=True)
class AllGather:
    """Attention over keys and values gathered from all ranks.

    Queries that see only keys of their own rank are computed while the others' keys are in transit. The
    backward pass gathers keys again, unless each rank gathers at most as many as it has itself.
    """

    shards: Shards

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Forward:
        needs, rank = self._needs, self.shards.ranks.rank
        own, others = needs.own(rank), needs.gathered(rank)
        options, gather = self.shards.options, self._exchange.gather
        own_keys, own_values = (at_ranges(own.ranges, x) for x in (k, v))
        if not own.calls:
            keys, values = gather([k, v])()
            out, lse = attend_once(q, keys, values, others, options, sink)
        elif own.disjoint and others.disjoint:
            rows = Rows(q, v.shape[-1], options, sink, (*own.calls, *others.calls))
            first, rest = own.in_two
            # NCCL's kernel probably begins as the first rows leave their multiprocessors. Begun with a kernel
            # of all rows, it probably got none on one rank until that kernel ended. On the other rank it held
            # some meanwhile, so their share of the work tiles came late. Measured are only the times: where
            # the host was ahead, both passes took 15.3 instead of 12.9 ms on the second rank.
            coming = gather([k, v], partial(rows.attend, own_keys, own_values, first))
            rows.attend(own_keys, own_values, rest)
            keys, values = coming()
            rows.attend(keys, values, others)
            out, lse = rows.out, rows.lse
        else:
            coming = gather([k, v])
            state = State(q, v.shape[-1], options, sink)
            state.attend(own_keys, own_values, own)
            keys, values = coming()
            state.attend(keys, values, others)
            out, lse = state.finish()
        ranges = needs.halo_ranges(rank)
        halo = [at_ranges(ranges, x) for x in (keys, values)] if needs.few else []
        return Forward(out, lse, (q, k, v, out, lse, *halo))

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...], sink: Tensor | None
    ) -> Gradients:
        q, k, v, out, lse, *halo = saved
        shards, needs, exchange, rank = self.shards, self._needs, self._exchange, self.shards.ranks.rank
        rows = Saved(q, dout, dlse, out, lse, shards.options)
        dq, *sums = (Total(t, rows.dtype) for t in (q, k, v))

        def over_own_keys(queries: Saved, pair: Pair) -> None:
            keys, values = (at_ranges(pair.ranges, x) for x in (k, v))
            parts = queries.differentiate(keys, values, pair, dq)
            add_at_ranges(pair.ranges, [part.value() for part in parts], sums)

        if halo:
            keys, values = halo
            others = needs.halo(rank)
        else:
            coming = exchange.gather([k, v])
            over_own_keys(rows, needs.own(rank))
            keys, values = coming()
            others = needs.gathered(rank)
        of_others = [part.value() for part in rows.differentiate(keys, values, others, dq)]
        add_returned = exchange.give_back(of_others, sums, halo=bool(halo))
        if halo:
            # All of a rank's queries in one call over its own keys, while the gradients return. Only the
            # halo's rows of its gradients are summed, so the kernel rounds.
            own = shards.pair(rank, rank)
            over_own_keys(replace(rows, partial=shards.keys_shared or not covers(own, q, k)), own)
        else:
            exchange.add_own(of_others, sums)
        add_returned()
        of_keys = rows.dtype if shards.keys_shared else k.dtype
        dk, dv = (total.rounded(of_keys) for total in sums)
        return Gradients(dq.rounded(q.dtype), dk, dv, rows.sink_gradient(sink))

    @cached_property
    def _needs(self) -> Needs:
        return needs_of(self.shards)

    @cached_property
    def _exchange(self) -> Exchange:
        return Exchange(self.shards.ranks, self._needs, self.shards.timeout)
