"""Ring attention (Liu et al. 2023, arXiv:2310.01889): queries stay, keys and values come from rank to rank.

In step t, rank r has the keys of rank r - t, and those of rank r - t - 1 are on their way. Each rank sends
its own keys to the one that needs them next, and not what it was sent: as many bytes as in a ring, but a rank
gets only the keys that its queries see, and none where the mask hides all. The backward pass goes the same
way; gradients of keys return to their rank in float32, and are added up in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.parallel.attend import Saved, State, Total, attend_once, covers, sink_gradient
from flashtile.parallel.blocks import Pair, Ranges
from flashtile.parallel.methods import Forward, Gradients, Shards
from flashtile.parallel.ranks import Message, Pending, Spec, as_bytes, from_bytes, num_bytes


@dataclass(frozen=True)
class Ring:
    """Attention of this rank's queries with the keys of all ranks of a group. Of one rank it is plain
    attention."""

    shards: Shards

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Forward:
        shards, ranks = self.shards, self.shards.ranks
        if ranks.size == 1:
            out, lse = attend_once(q, k, v, shards.pair(0, 0), shards.scores, sink)
            return Forward(out, lse, (q, k, v, out, lse))
        state = State(q, v.shape[-1], shards.scores, sink)
        for pair, keys, values in _Travel(shards, k, v):
            state.attend(keys, values, pair)
        out, lse = state.finish()
        return Forward(out, lse, (q, k, v, out, lse))

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...], sink: Tensor | None
    ) -> Gradients:
        q, k, v, out, lse = saved
        shards, ranks = self.shards, self.shards.ranks
        alone = ranks.size == 1 and not shards.keys_shared and covers(shards.pair(0, 0), q, k)
        rows = Saved(q, dout, dlse, out, lse, shards.scores, partial=not alone)
        dq, dk, dv = (Total(t, rows.dtype) for t in (q, k, v))
        returning: _Returning | None = None
        for t, (pair, keys, values) in enumerate(_Travel(shards, k, v)):
            parts = [Total(of, rows.dtype) for of in (keys, values)]
            rows.differentiate(keys, values, pair, dq, *parts)
            if t == 0:
                _add(pair.ranges, [part.value() for part in parts], dk, dv)
                continue
            if returning is not None:  # of the step before, under way beside this one
                returning.add_to(dk, dv)
            returning = self._return(t, [part.value() for part in parts], [k, v])
        if returning is not None:
            returning.add_to(dk, dv)
        dsink = None if sink is None else sink_gradient(sink, dout, dlse, out, lse)
        of_keys = rows.dtype if shards.keys_shared else k.dtype
        return Gradients(dq.value().to(q.dtype), dk.value().to(of_keys), dv.value().to(of_keys), dsink)

    def _return(self, t: int, parts: list[Tensor], of: list[Tensor]) -> _Returning:
        """Of step ``t``: gradients of the keys of rank - t go there, those of own keys come from rank + t."""
        shards, ranks = self.shards, self.shards.ranks
        receiver, sender = (ranks.rank - t) % ranks.size, (ranks.rank + t) % ranks.size
        own = shards.pair(sender, ranks.rank)
        specs = [((x.shape[0], own.tokens, *x.shape[2:]), parts[0].dtype) for x in of]
        incoming = Message(sender, of[0].new_empty(num_bytes(specs), dtype=torch.uint8))
        pending = ranks.post([Message(receiver, as_bytes(parts))], [incoming], shards.timeout)
        return _Returning(pending, own.ranges, incoming.buffer, specs)


class _Returning(NamedTuple):
    """Gradients of this rank's keys, on their way."""

    pending: Pending
    ranges: Ranges
    buffer: Tensor
    specs: list[Spec]

    def add_to(self, dk: Total, dv: Total) -> None:
        self.pending.wait()
        _add(self.ranges, from_bytes(self.buffer, self.specs), dk, dv)


class _Travel:
    """(pair, keys, values) of each step; the next ones are on their way while the caller computes."""

    def __init__(self, shards: Shards, k: Tensor, v: Tensor) -> None:
        self._shards, self._k, self._v = shards, k, v
        self._outgoing: dict[Ranges, Tensor] = {}

    def __iter__(self) -> Iterator[tuple[Pair, Tensor, Tensor]]:
        rank, size = self._shards.ranks.rank, self._shards.ranks.size
        pair = self._shards.pair(rank, rank)
        keys, values = (_at(pair.ranges, x) for x in (self._k, self._v))
        for t in range(size):
            pending = incoming = None
            if t + 1 < size:
                pending, incoming = self._post(t + 1)
            yield pair, keys, values
            if pending is not None and incoming is not None:
                pending.wait()
                pair = self._shards.pair(rank, (rank - t - 1) % size)
                keys, values = from_bytes(incoming.buffer, self._specs(pair))

    def _post(self, t: int) -> tuple[Pending, Message]:
        shards, ranks = self._shards, self._shards.ranks
        to, of = (ranks.rank + t) % ranks.size, (ranks.rank - t) % ranks.size
        ranges = shards.pair(to, ranks.rank).ranges
        if ranges not in self._outgoing:
            self._outgoing[ranges] = as_bytes([_at(ranges, x) for x in (self._k, self._v)])
        specs = self._specs(shards.pair(ranks.rank, of))
        incoming = Message(of, self._k.new_empty(num_bytes(specs), dtype=torch.uint8))
        return ranks.post([Message(to, self._outgoing[ranges])], [incoming], shards.timeout), incoming

    def _specs(self, pair: Pair) -> list[Spec]:
        return [((x.shape[0], pair.tokens, *x.shape[2:]), x.dtype) for x in (self._k, self._v)]


def _at(ranges: Ranges, x: Tensor) -> Tensor:
    """The tokens of ``ranges``, side by side."""
    if len(ranges) == 1:
        return x[:, ranges[0][0] : ranges[0][1]]
    return torch.cat([x[:, :0], *(x[:, start:stop] for start, stop in ranges)], dim=1)


def _add(ranges: Ranges, parts: list[Tensor], dk: Total, dv: Total) -> None:
    """Add gradients of the tokens of ``ranges``, which lie side by side."""
    for part, total in zip(parts, (dk, dv), strict=True):
        at = 0
        for start, stop in ranges:
            total.add(part[:, at : at + stop - start], start, stop)
            at += stop - start
