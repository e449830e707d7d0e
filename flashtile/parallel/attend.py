"""Attention of one rank's queries over some of the keys, block by block, and its backward pass.

The methods of context parallelism (:class:`Method`) exchange keys and values, and compute with the classes of
this module. Partial results for the same queries stay float32 (float64 for float64 inputs) until all have
been merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flashtile.api.merge import merge_into
from flashtile.operators.attention import BACKWARD, FORWARD, FORWARD_INTO
from flashtile.parallel.blocks import Block, Mask, Packed, Pair, Ranges, are_disjoint, outside, pair_of, union
from flashtile.parallel.layout import OfRanks
from flashtile.parallel.ranks import Ranks
from flashtile.problems.attention import NO_EXTRAS, OptionalTensors, Options
from flashtile.problems.masking import Masking
from flashtile.reference.attention import sink_gradient


@dataclass(frozen=True)
class Shards:
    """Description of a call that the ranks of one group make together.

    Args:
        ranks: the group.
        pieces_q: for each rank, the tokens of the sequence that its q holds.
        pieces_k: for each rank, the tokens of the sequence that its k and v hold.
        mask: the mask of the whole sequence.
        options: options of attention, with a ``softmax_scale``. Each attention call has its own mask.
        timeout: seconds to wait for a rank.
        keys_shared: whether ranks outside of the group attend to the same key heads. Gradients of keys and
            values are then returned in float32, and the caller sums them.
    """

    ranks: Ranks
    pieces_q: OfRanks
    pieces_k: OfRanks
    mask: Mask
    options: Options
    timeout: float
    keys_shared: bool = False

    def pair(self, rank_q: int, rank_k: int) -> Pair:
        """Return the attention calls of one rank's queries over another rank's keys."""
        return pair_of(self.pieces_q[rank_q], self.pieces_k[rank_k], self.mask)


class Forward(NamedTuple):
    """Result of a forward pass on one rank.

    Attributes:
        out: (batch, tokens, heads_q, head_dim_v), of this rank's queries over all keys.
        lse: (batch, heads_q, tokens).
        saved: tensors that the backward pass needs.
    """

    out: Tensor
    lse: Tensor
    saved: tuple[Tensor, ...]


class Gradients(NamedTuple):
    """Gradients of this rank's tokens, in the shapes of q, k and v.

    dsink (heads_q,) covers only this rank's computations: the sum over ranks is the gradient of the sink.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


class Method(Protocol):
    """A method of context parallelism.

    q, k and v are (batch, tokens, heads, head_dim), and lse is (batch, heads_q, tokens).
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Forward: ...

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...], sink: Tensor | None
    ) -> Gradients: ...


class State:
    """out and lse of a rank's queries over the keys that they have attended to so far.

    Args:
        q: (batch, tokens, heads_q, head_dim).
        head_dim_v: head size of the values.
        options: as for :class:`Shards`.
        sink: (heads_q,) or None. With a sink, lse of a row starts at the sink instead of -inf.

    A partial result is merged only when the next one arrives. So the last merge can also convert ``out`` to
    q's dtype.
    """

    def __init__(self, q: Tensor, head_dim_v: int, options: Options, sink: Tensor | None) -> None:
        self.q, self.options, self.sink = q, options, sink
        self._head_dim_v = head_dim_v
        self._merged: tuple[Tensor, Tensor] | None = None
        self._last: tuple[Tensor, Tensor, int] | None = None

    def attend(self, k: Tensor, v: Tensor, pair: Pair) -> None:
        """Run the attention calls of ``pair``, and merge their results into the state.

        ``k`` and ``v`` are the keys and values that these calls need, (batch, pair.tokens, heads_kv,
        head_dim).
        """
        for call in pair.calls:
            out, lse = _forward(self.q, k, v, call, self.options, partial=True)
            rows = _rows(call)
            if self._merged is None and self.sink is None and rows == (0, self.q.shape[1]):
                self._merged = out, lse
                continue
            self._merged = self._with_last(out.dtype)
            self._last = out, lse, rows[0]

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return out (batch, tokens, heads_q, head_dim_v), rounded to q's dtype, and lse (batch, heads_q,
        tokens)."""
        return self._with_last(self.q.dtype)

    def _with_last(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        out, lse = self._merged or first_state(self.q, self._head_dim_v, self.sink, wide(self.q.dtype))
        if self._last is None:
            return out.to(dtype), lse
        last, self._last = self._last, None
        return merge_into(out, lse, *last, dtype), lse


class Rows:
    """out and lse of a rank's queries, each of which is in at most one attention call: nothing is merged.

    Args:
        q, head_dim_v, options, sink: as for :class:`State`.
        calls: all calls to come. Queries in none of them see no key.
    """

    def __init__(
        self,
        q: Tensor,
        head_dim_v: int,
        options: Options,
        sink: Tensor | None,
        calls: Sequence[Block | Packed],
    ) -> None:
        self.q, self.options, self.sink = q, options, sink
        batch, tokens, heads, _ = q.shape
        if union([_rows(call) for call in calls]) == ((0, tokens),):
            self.out = q.new_empty((batch, tokens, heads, head_dim_v))
            self.lse = q.new_empty((batch, heads, tokens), dtype=wide(q.dtype))
        else:
            self.out, self.lse = first_state(q, head_dim_v, sink, q.dtype)

    def attend(self, k: Tensor, v: Tensor, pair: Pair) -> None:
        """Run the attention calls of ``pair``, and write their rows of out and lse."""
        for call in pair.calls:
            rows = slice(*_rows(call))
            _, self.lse[:, :, rows] = _forward(
                self.q, k, v, call, self.options, partial=False, sink=self.sink, out=self.out[:, rows]
            )


def attend_once(
    q: Tensor, k: Tensor, v: Tensor, pair: Pair, options: Options, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the attention calls of ``pair``, and return (out, lse) in the shapes of :meth:`State.finish`.

    ``pair`` has all keys that the queries see. If no query is in two calls, there are no partial
    results to merge, and the kernel itself converts ``out`` to q's dtype.
    """
    if not pair.disjoint:
        state = State(q, v.shape[-1], options, sink)
        state.attend(k, v, pair)
        return state.finish()
    if len(pair.calls) == 1 and _rows(pair.calls[0]) == (0, q.shape[1]):
        return _forward(q, k, v, pair.calls[0], options, partial=False, sink=sink)
    rows = Rows(q, v.shape[-1], options, sink, pair.calls)
    rows.attend(k, v, pair)
    return rows.out, rows.lse


def first_state(q: Tensor, head_dim_v: int, sink: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of queries q without any keys: out is 0 in ``dtype``, and lse is the sink or -inf."""
    batch, tokens, heads, _ = q.shape
    out = q.new_zeros((batch, tokens, heads, head_dim_v), dtype=dtype)
    lse = q.new_full((batch, heads, tokens), -torch.inf, dtype=wide(q.dtype))
    if sink is not None:
        lse.copy_(sink[:, None].expand(lse.shape))
    return out, lse


class Total:
    """Sum of gradients (batch, tokens, heads, head_dim), which is 0 for tokens to which nothing was added.

    Args:
        like: a tensor of the sum's shape and device.
        dtype: dtype of the addition.

    Up to two tensors are kept unsummed, so that one pass over memory can add the last two and round the sum.
    More are kept if they have no token in common, next to at most one of all tokens.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._whole = 0, like.shape[1]
        self._parts: list[tuple[tuple[int, int], Tensor]] = []

    def add(self, part: Tensor, start: int, stop: int) -> None:
        """Add ``part``, the gradients of tokens ``start`` to ``stop``.

        The sum may later be written into the memory of ``part``.
        """
        spans = [*(span for span, _ in self._parts), (start, stop)]
        some = [span for span in spans if span != self._whole]
        apart = len(some) >= len(self._parts) and are_disjoint(some)
        if len(self._parts) >= 2 and not apart:
            self._parts = [(self._whole, self.value())]
        self._parts.append(((start, stop), part))

    def value(self) -> Tensor:
        return self.rounded(self._dtype)

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """Return the sum in ``dtype``."""
        # In the order of their tokens. Gradients of all tokens come first.
        parts = sorted(self._parts, key=lambda of: (of[0][0], -of[0][1]))
        spans, total = tuple(span for span, _ in parts), self._whole[1]
        if spans == (self._whole,):
            return parts[0][1].to(dtype)
        if spans[:1] == (self._whole,):
            (_, first), *others = parts
            result = first if first.dtype == dtype else torch.empty_like(self._like, dtype=dtype)
            for (start, stop), part in others:
                torch.add(first[:, start:stop], part, out=result[:, start:stop])
            for start, stop in outside(spans[1:], total) if result is not first else ():
                result[:, start:stop] = first[:, start:stop]
            return result
        if are_disjoint(spans) and not outside(spans, total):
            result = torch.empty_like(self._like, dtype=dtype)
            for (start, stop), part in parts:
                result[:, start:stop] = part
            return result
        result = torch.zeros_like(self._like, dtype=self._dtype)
        for (start, stop), part in parts:
            result[:, start:stop] += part
        return result.to(dtype)


@dataclass
class Saved:
    """Tensors of a rank's queries that the backward pass needs. out and lse are results over all keys.

    With ``partial``, gradients stay float32 (float64 for float64 inputs), because the caller sums them over
    calls or ranks.
    """

    q: Tensor
    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor
    options: Options
    partial: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return wide(self.q.dtype) if self.partial else self.q.dtype

    def differentiate(self, k: Tensor, v: Tensor, pair: Pair, dq: Total) -> tuple[Total, Total]:
        """Return the gradients of ``k`` and ``v``, the keys of ``pair``. Those of queries are added to dq."""
        dk, dv = Total(k, self.dtype), Total(v, self.dtype)
        for call in pair.calls:
            rows, keys = _rows(call), _keys(call)
            of_rows, of_keys = slice(*rows), slice(*keys)
            parts = self._backward(k[:, of_keys], v[:, of_keys], call, of_rows)
            dq.add(parts[0], *rows)
            dk.add(parts[1], *keys)
            dv.add(parts[2], *keys)
        return dk, dv

    def sink_gradient(self, sink: Tensor | None) -> Tensor | None:
        """Return dsink (heads,), or None without a sink."""
        return None if sink is None else sink_gradient(self.dout, self.dlse, self.out, self.lse, sink)

    def _backward(self, k: Tensor, v: Tensor, call: Block | Packed, rows: slice) -> tuple[Tensor, ...]:
        dout, out, q = self.dout[:, rows], self.out[:, rows], self.q[:, rows]
        lse = self.lse[:, :, rows].contiguous()
        dlse = None if self.dlse is None else self.dlse[:, :, rows].contiguous()
        tensors = (dout, dlse, q, k, v, out.contiguous(), lse)
        options = _options_of(call, self.options, self.partial)
        if isinstance(call, Block):
            return BACKWARD.launch(tensors, NO_EXTRAS, options)[:3]
        extras = OptionalTensors(*call.offsets(self.q.device))
        flat = tuple(None if t is None else t.squeeze(0) for t in tensors)
        return tuple(t.unsqueeze(0) for t in BACKWARD.launch(flat, extras, options)[:3])


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Block | Packed,
    options: Options,
    partial: bool,
    sink: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one attention call. Return out (batch, rows, heads_q, head_dim_v) and lse (batch, heads_q, rows).

    With ``partial``, out is float32 (float64 for float64 inputs) instead of q's dtype. ``out``, if given,
    receives the result.
    """
    options = _options_of(call, options, partial)
    rows, keys = slice(*_rows(call)), slice(*_keys(call))
    tensors: tuple[Tensor, ...] = (q[:, rows], k[:, keys], v[:, keys])
    extras = NO_EXTRAS if sink is None else OptionalTensors(sink=sink)
    if isinstance(call, Packed):
        extras = OptionalTensors(*call.offsets(q.device), sink=sink)
        tensors = tuple(t.squeeze(0) for t in tensors)
        out = None if out is None else out.squeeze(0)
    if out is None:
        result = FORWARD.launch(tensors, extras, options)
    else:
        result = FORWARD_INTO.write(tensors, extras, options, (out, None))
    return tuple(t.unsqueeze(0) for t in result) if isinstance(call, Packed) else result


def _options_of(call: Block | Packed, options: Options, partial: bool) -> Options:
    block = call.blocks[0] if isinstance(call, Packed) else call
    longest_q, longest_k = call.longest if isinstance(call, Packed) else (None, None)
    return options._replace(
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        masking=Masking(window_left=block.left, window_right=block.right),
        partial=partial,
    )


def _rows(call: Block | Packed) -> tuple[int, int]:
    return call.q_start, call.q_stop


def _keys(call: Block | Packed) -> tuple[int, int]:
    return (0, call.tokens_k) if isinstance(call, Packed) else (call.k_start, call.k_stop)


def covers(pair: Pair, q: Tensor, k: Tensor) -> bool:
    """Whether ``pair`` is a single attention call over all queries of ``q`` and all keys of ``k``."""
    return len(pair.calls) == 1 and (_rows(pair.calls[0]), _keys(pair.calls[0])) == (
        (0, q.shape[1]),
        (0, k.shape[1]),
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of partial results and sums over ranks: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def at_ranges(ranges: Ranges, x: Tensor) -> Tensor:
    """Return the tokens of ``ranges``, concatenated."""
    if len(ranges) == 1:
        return x[:, ranges[0][0] : ranges[0][1]]
    return torch.cat([x[:, :0], *(x[:, start:stop] for start, stop in ranges)], dim=1)


def add_at_ranges(ranges: Ranges, parts: Sequence[Tensor], totals: Sequence[Total]) -> None:
    """Add each of ``parts``, gradients of the tokens in ``ranges``, concatenated, to one of ``totals``."""
    for part, total in zip(parts, totals, strict=True):
        at = 0
        for start, stop in ranges:
            total.add(part[:, at : at + stop - start], start, stop)
            at += stop - start
