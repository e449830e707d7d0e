"""Ring attention (Liu et al. 2023, arXiv:2310.01889): queries stay, keys and values travel between ranks.

In step t, rank r attends to the keys of rank r - t while those of rank r - t - 1 are in transit. Each rank
sends its own keys directly to the rank that needs them next, instead of forwarding what it has received. This
sends at most as many bytes as forwarding, because a rank receives only the keys that its queries see. The
backward pass uses the same steps, but processes a rank's own keys last. The return of the last gradients then
overlaps with a matrix product. Returned gradients are float32, and are added in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from flashtile.parallel.attend import (
    Forward,
    Gradients,
    Method,
    Saved,
    Shards,
    State,
    Total,
    add_at_ranges,
    at_ranges,
    attend_once,
    covers,
)
from flashtile.parallel.blocks import Pair, Ranges
from flashtile.parallel.gather import AllGather, needs_of
from flashtile.parallel.ranks import Message, Pending, as_bytes


def ring_of(shards: Shards) -> Method:
    """Return the ring, or a single exchange of keys where each rank sees few keys of others.

    Under a window shorter than a rank's tokens, a ring would compute all rows twice, in float32 and with a
    merge, for the few rows that also see keys of a neighbour. Both methods hold keys of at most two ranks.
    """
    few = shards.ranks.size > 1 and needs_of(shards).few
    return AllGather(shards) if few else Ring(shards)


@dataclass(frozen=True)
class Ring:
    """Attention of this rank's queries over the keys of all ranks of a group. With one rank it is plain
    attention."""

    shards: Shards

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Forward:
        shards, ranks = self.shards, self.shards.ranks
        if ranks.size == 1:
            pair = shards.pair(0, 0)
            keys, values = (at_ranges(pair.ranges, x) for x in (k, v))  # ``pair`` counts keys within these
            out, lse = attend_once(q, keys, values, pair, shards.options, sink)
        else:
            state = State(q, v.shape[-1], shards.options, sink)
            for _, pair, keys, values in _travel(shards, k, v, range(ranks.size)):
                state.attend(keys, values, pair)
            out, lse = state.finish()
        return Forward(out, lse, (q, k, v, out, lse))

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...], sink: Tensor | None
    ) -> Gradients:
        q, k, v, out, lse = saved
        shards, ranks = self.shards, self.shards.ranks
        alone = ranks.size == 1 and not shards.keys_shared and covers(shards.pair(0, 0), q, k)
        rows = Saved(q, dout, dlse, out, lse, shards.options, partial=not alone)
        dq, dk, dv = (Total(t, rows.dtype) for t in (q, k, v))
        returning: tuple[Pending, list[Tensor], Ranges] | None = None
        for t, pair, keys, values in _travel(shards, k, v, [*range(1, ranks.size), 0]):
            parts = rows.differentiate(keys, values, pair, dq)
            if returning is not None:  # gradients of the previous step, still in transit
                pending, incoming, ranges = returning
                pending.wait()
                add_at_ranges(ranges, incoming, (dk, dv))
            gradients = [part.value() for part in parts]
            if t == 0:
                add_at_ranges(pair.ranges, gradients, (dk, dv))
            else:
                returning = self._return(t, gradients)
        of_keys = rows.dtype if shards.keys_shared else k.dtype
        dsink = rows.sink_gradient(sink)
        return Gradients(dq.rounded(q.dtype), dk.rounded(of_keys), dv.rounded(of_keys), dsink)

    def _return(self, t: int, parts: list[Tensor]) -> tuple[Pending, list[Tensor], Ranges]:
        """Start the exchange of the gradients of keys and values that step ``t`` has computed.

        Returns (messages, gradients of this rank's keys, ranges of these keys).

        In step t this rank attends to the keys of rank ``rank - t``, and rank ``rank + t`` attends to this
        rank's keys. So gradients are sent to rank ``rank - t`` and received from rank ``rank + t``.
        """
        shards, ranks = self.shards, self.shards.ranks
        receiver, sender = (ranks.rank - t) % ranks.size, (ranks.rank + t) % ranks.size
        own = shards.pair(sender, ranks.rank)
        return *_exchange(shards, receiver, parts, sender, own.tokens), own.ranges


def _travel(
    shards: Shards, k: Tensor, v: Tensor, steps: Sequence[int]
) -> Iterator[tuple[int, Pair, Tensor, Tensor]]:
    """Yield (t, pair, keys, values) for each step ``t``.

    In step t, rank r gets the keys and values of rank r - t. ``pair`` holds the attention calls of the step.
    While the caller computes them, the keys and values of the next step are in transit.
    """
    rank, size = shards.ranks.rank, shards.ranks.size
    outgoing: dict[Ranges, list[Tensor]] = {}

    def post(t: int) -> tuple[Pending, list[Tensor]] | None:
        if t == 0:
            return None
        to, of = (rank + t) % size, (rank - t) % size
        ranges = shards.pair(to, rank).ranges
        if ranges not in outgoing:
            outgoing[ranges] = [at_ranges(ranges, x).contiguous() for x in (k, v)]
        return _exchange(shards, to, outgoing[ranges], of, shards.pair(rank, of).tokens)

    coming = post(steps[0])
    for i, t in enumerate(steps):
        pair = shards.pair(rank, (rank - t) % size)
        if coming is None:
            keys, values = (at_ranges(pair.ranges, x) for x in (k, v))
        else:
            pending, (keys, values) = coming
            pending.wait()
        coming = post(steps[i + 1]) if i + 1 < size else None
        yield t, pair, keys, values


def _exchange(
    shards: Shards, to: int, parts: list[Tensor], of: int, tokens: int
) -> tuple[Pending, list[Tensor]]:
    """Start sending ``parts`` to rank ``to``, and receiving as many of ``tokens`` tokens from rank ``of``."""
    incoming = [part.new_empty((part.shape[0], tokens, *part.shape[2:])) for part in parts]
    sent = [Message(to, as_bytes([part])) for part in parts]
    received = [Message(of, as_bytes([part])) for part in incoming]
    return shards.ranks.post(sent, received, shards.timeout), incoming
