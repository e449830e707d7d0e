"""Computes a call as several dense calls, its parts.

A part is one sequence without its unused tokens, or some rows of several sequences and their keys without
padding. Rows in no part have out 0, lse -inf and gradient 0. Keys in no part have gradient 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.backends.cpu.optional_inputs import OptionalInputs
from flashtile.problems.attention import OptionalTensors, Problem


class Part(NamedTuple):
    """One dense call: some rows of some sequences, and the keys that they attend to.

    ``keys`` is a slice, or indices if keys in between are left out. Slices apply to tensors with a batch
    dimension (:func:`with_batch`). ``problem`` is that of the dense call.
    """

    problem: Problem
    b: int
    """Number of the first sequence. It differs from ``sequences.start`` if sequences are packed."""
    sequences: slice
    rows: slice
    keys: slice | Tensor
    optional: OptionalInputs

    @property
    def queries(self) -> tuple[slice, slice]:
        """Indices into q and out."""
        return self.sequences, self.rows

    @property
    def statistics(self) -> tuple[slice, slice, slice]:
        """Indices into lse."""
        return self.sequences, slice(None), self.rows

    def of_keys(self, tensor: Tensor) -> Tensor:
        some = tensor[self.sequences]
        return some[:, self.keys] if isinstance(self.keys, slice) else some.index_select(1, self.keys)

    def add(self, gradient: Tensor, term: Tensor) -> None:
        some = gradient[self.sequences]
        if isinstance(self.keys, slice):
            some[:, self.keys] += term
        else:
            some.index_add_(1, self.keys, term.to(gradient.dtype))


def forward(
    dense: Callable[..., tuple[Tensor, Tensor]],
    parts_of: Callable[..., Iterable[Part]],
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: OptionalTensors,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the whole call.

    ``parts_of(problem, extras)`` yields the dense calls (:class:`Part`) that make up the call.
    ``dense(problem, q, k, v, optional)`` returns (out, lse) of one part.
    """
    parts = list(parts_of(problem, extras))
    if _is_whole(parts, problem):
        return dense(parts[0].problem, q, k, v, parts[0].optional)
    out = q.new_zeros(problem.out_shape)
    lse = q.new_full(problem.lse_shape, -torch.inf, dtype=problem.lse_dtype)
    q, k, v, all_out, all_lse = with_batch(problem, q, k, v, out, lse)
    for part in parts:
        all_out[part.queries], all_lse[part.statistics] = dense(
            part.problem, q[part.queries], part.of_keys(k), part.of_keys(v), part.optional
        )
    return out, lse


def backward(
    dense: Callable[..., tuple[Tensor, Tensor, Tensor]],
    parts_of: Callable[..., Iterable[Part]],
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: OptionalTensors,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of the whole call.

    ``parts_of`` is as in :func:`forward`, and ``dense(problem, dout, dlse, q, k, v, out, lse, optional)``
    returns the gradients of one part. With key padding, a key may be in two parts. Its gradients from both
    parts are then added in float32 (float64 for float64 inputs).
    """
    parts = list(parts_of(problem, extras))
    if _is_whole(parts, problem):
        return dense(parts[0].problem, dout, dlse, q, k, v, out, lse, parts[0].optional)
    dtype = problem.lse_dtype if problem.key_padding_mask else k.dtype
    gradients = q.new_zeros(q.shape), k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
    dq, dk, dv = with_batch(problem, *gradients)
    dout, q, k, v, out, lse = with_batch(problem, dout, q, k, v, out, lse)
    if dlse is not None:
        (dlse,) = with_batch(problem, dlse)
    for part in parts:
        dq[part.queries], dk_term, dv_term = dense(
            part.problem,
            dout[part.queries],
            None if dlse is None else dlse[part.statistics],
            q[part.queries],
            part.of_keys(k),
            part.of_keys(v),
            out[part.queries],
            lse[part.statistics],
            part.optional,
        )
        part.add(dk, dk_term)
        part.add(dv, dv_term)
    return gradients[0], gradients[1].to(k.dtype), gradients[2].to(v.dtype)


def with_batch(problem: Problem, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors with a batch dimension; packed sequences become a batch of one."""
    return [t[None] if problem.varlen else t for t in tensors]


def sequences(problem: Problem, extras: OptionalTensors, dbias: Tensor | None = None) -> Iterator[Part]:
    """Yield a :class:`Part`, one dense call, for each sequence that has queries and keys.

    ``dbias`` accumulates the gradient of the bias.
    """
    optional = OptionalInputs.of(problem, extras, dbias)
    for b, rows, keys in spans(problem, extras):
        if rows.start < rows.stop and keys.start < keys.stop:
            own = optional.of_sequence(b, rows.stop - rows.start, keys.stop - keys.start)
            yield Part(problem, b, slice(0, 1) if problem.varlen else slice(b, b + 1), rows, keys, own)


def spans(problem: Problem, extras: OptionalTensors) -> Iterator[tuple[int, slice, slice]]:
    """Yield (index, slice of its rows, slice of its keys) for each sequence. Unused tokens are left out.

    If sequences are packed, the slices index the packed tensors.
    """
    offsets, used = (
        [None if t is None else t.tolist() for t in pair]
        for pair in ((extras.cu_seqlens_q, extras.cu_seqlens_k), (extras.seqused_q, extras.seqused_k))
    )
    lengths = problem.seqlen_q, problem.seqlen_k
    for b in range(problem.batch):
        found = []
        for starts, counts, length in zip(offsets, used, lengths, strict=True):
            start, stop = (0, length) if starts is None else (starts[b], starts[b + 1])
            found.append(slice(start, stop if counts is None else start + counts[b]))
        yield b, found[0], found[1]


def _is_whole(parts: list[Part], problem: Problem) -> bool:
    """Whether the call has a single part, which is the whole call. Always False for packed sequences."""
    everything = slice(0, problem.batch), slice(0, problem.seqlen_q), slice(0, problem.seqlen_k)
    return not problem.varlen and len(parts) == 1 and (*parts[0].queries, parts[0].keys) == everything
