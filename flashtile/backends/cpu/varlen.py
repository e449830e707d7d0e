"""Packed sequences, and sequences with unused keys, as a loop over dense calls.

Rows outside all sequences, or in one without keys, have out 0, lse -inf and gradients 0. The gradients of
unused keys are 0 as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.backends.cpu.optional_inputs import OptionalInputs
from flashtile.problems.attention import OptionalTensors, Problem


def forward(
    dense: Callable[..., tuple[Tensor, Tensor]],
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: OptionalTensors,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) in the problem's shapes; ``dense(q, k, v, options)`` computes one sequence."""
    out = q.new_zeros(problem.out_shape)
    lse = q.new_full(problem.lse_shape, -torch.inf, dtype=problem.lse_dtype)
    q, k, v, all_out, all_lse = with_batch(problem, q, k, v, out, lse)
    for _, one in sequences(problem, extras):
        all_out[one.queries], all_lse[one.statistics] = dense(
            q[one.queries], k[one.keys], v[one.keys], one.optional
        )
    return out, lse


def backward(
    dense: Callable[..., tuple[Tensor, Tensor, Tensor]],
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: OptionalTensors,
    dbias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) and add to ``dbias`` if given.

    ``dense(dout, dlse, q, k, v, out, lse, options)`` computes one sequence.
    """
    gradients = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dq, dk, dv = with_batch(problem, *gradients)
    dout, q, k, v, out, lse = with_batch(problem, dout, q, k, v, out, lse)
    if dlse is not None:
        (dlse,) = with_batch(problem, dlse)
    for _, one in sequences(problem, extras, dbias):
        dq[one.queries], dk[one.keys], dv[one.keys] = dense(
            dout[one.queries],
            None if dlse is None else dlse[one.statistics],
            q[one.queries],
            k[one.keys],
            v[one.keys],
            out[one.queries],
            lse[one.statistics],
            one.optional,
        )
    return gradients


class Sequence(NamedTuple):
    """Indices of one sequence into tensors with a batch dimension, and its optional inputs."""

    queries: tuple[slice, slice]  # into q and out
    keys: tuple[slice, slice]  # into k and v
    statistics: tuple[slice, slice, slice]  # into lse
    optional: OptionalInputs


def with_batch(problem: Problem, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors with a batch dimension; packed sequences become a batch of one."""
    return [t[None] if problem.varlen else t for t in tensors]


def sequences(
    problem: Problem, extras: OptionalTensors, dbias: Tensor | None = None
) -> Iterator[tuple[int, Sequence]]:
    """Yield the number and indices of each sequence that has queries and keys."""
    optional, used = OptionalInputs.of(problem, extras, dbias), extras.seqused_k
    starts_q = None if extras.cu_seqlens_q is None else extras.cu_seqlens_q.tolist()
    starts_k = None if extras.cu_seqlens_k is None else extras.cu_seqlens_k.tolist()
    used_keys = None if used is None else used.tolist()
    used_rows = None if extras.seqused_q is None else extras.seqused_q.tolist()
    for b in range(problem.batch):
        batch = slice(b, b + 1) if starts_q is None else slice(0, 1)
        rows = slice(0, problem.seqlen_q) if starts_q is None else slice(starts_q[b], starts_q[b + 1])
        keys = slice(0, problem.seqlen_k) if starts_k is None else slice(starts_k[b], starts_k[b + 1])
        if used_rows is not None:
            rows = slice(rows.start, rows.start + used_rows[b])
        if used_keys is not None:
            keys = slice(keys.start, keys.start + used_keys[b])
        if rows.start < rows.stop and keys.start < keys.stop:
            own = optional.of_sequence(b, rows.stop - rows.start, keys.stop - keys.start)
            yield b, Sequence((batch, rows), (batch, keys), (batch, slice(None), rows), own)
