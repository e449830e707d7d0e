"""Padding of keys, as calls of the keys that there are: no work on the others.

Without a window any keys can be left out. Under a causal mask those between the first and the last must be
there: the rows up to the last key then see a causal part of them, and those behind it see all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.attn.problem import Extras, Problem
from flashtile.backends.cpu.beside import Beside
from flashtile.problem import UNLIMITED

Dense = Callable[..., Any]


def covers(problem: Problem) -> bool:
    """Whether the call is attention to fewer keys, for torch's own kernel."""
    distances = problem.alibi or problem.window_left != UNLIMITED or problem.window_right > 0
    ragged = problem.varlen or problem.seqused_q or problem.seqused_k
    cells = problem.mask or problem.bias or problem.dropout_p > 0 or problem.attention_chunk > 0
    return problem.key_padding_mask and not (cells or distances or ragged)


def forward(
    dense: Dense, fallback: Dense, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras
) -> tuple[Tensor, Tensor]:
    """(out, lse). ``dense(problem, q, k, v, beside)`` attends without padding, ``fallback`` with any mask."""
    out = q.new_zeros(problem.out_shape)
    lse = q.new_full(problem.lse_shape, -torch.inf, dtype=problem.lse_dtype)
    for part in _parts(problem, extras):
        rows, own = part.rows, (slice(part.b, part.b + 1), slice(None), part.rows)
        function = dense if part.beside.masks == () else fallback
        out[part.b : part.b + 1, rows], lse[own] = function(
            part.problem, q[part.b : part.b + 1, rows], part.of_keys(k), part.of_keys(v), part.beside
        )
    return out, lse


def backward(
    dense: Dense,
    fallback: Dense,
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), by functions as in :func:`forward` that take dout, dlse, q, k, v, out, lse."""
    dq = q.new_zeros(q.shape)
    # A key may get a term from rows up to it and one from those behind all keys.
    dk, dv = (t.new_zeros(t.shape, dtype=problem.lse_dtype) for t in (k, v))
    for part in _parts(problem, extras):
        at = (slice(part.b, part.b + 1), part.rows)
        own = (at[0], slice(None), part.rows)
        function = dense if part.beside.masks == () else fallback
        dq[at], dk_term, dv_term = function(
            part.problem,
            dout[at],
            None if dlse is None else dlse[own],
            q[at],
            part.of_keys(k),
            part.of_keys(v),
            out[at],
            lse[own],
            part.beside,
        )
        part.add(dk, dk_term)
        part.add(dv, dv_term)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


class _Part(NamedTuple):
    """Rows of a sequence and the keys that they attend to: a slice, or numbers where some are left out."""

    problem: Problem
    b: int
    rows: slice
    keys: slice | Tensor
    beside: Beside

    def of_keys(self, tensor: Tensor) -> Tensor:
        one = tensor[self.b]
        return (one[self.keys] if isinstance(self.keys, slice) else one.index_select(0, self.keys))[None]

    def add(self, gradient: Tensor, term: Tensor) -> None:
        if isinstance(self.keys, slice):
            gradient[self.b, self.keys] += term[0]
        else:
            gradient[self.b].index_add_(0, self.keys, term[0].to(gradient.dtype))


def _parts(problem: Problem, extras: Extras) -> Iterator[_Part]:
    """What remains to do of each sequence that has a key."""
    assert extras.key_padding_mask is not None
    plain = replace(problem, key_padding_mask=False, batch=1)
    causal = problem.window_right == 0
    offset = problem.seqlen_k - problem.seqlen_q
    for b, seen in enumerate(extras.key_padding_mask):
        numbers = seen.nonzero().flatten()
        if numbers.shape[0] == 0:
            continue
        first, end = int(numbers[0]), int(numbers[-1]) + 1
        whole = numbers.shape[0] == end - first
        keys: slice | Tensor = slice(first, end) if whole else numbers
        if not causal:
            yield _Part(plain, b, slice(0, problem.seqlen_q), keys, Beside())
            continue
        if not whole:
            beside = Beside.of(problem, extras).of_sequence(b, problem.seqlen_q, problem.seqlen_k)
            yield _Part(problem, b, slice(0, problem.seqlen_q), slice(None), beside)
            continue
        # Row i stands at key i + offset: the first not before the first key, the last before their end.
        start, stop = max(0, first - offset), max(0, min(problem.seqlen_q, end - offset))
        if start < stop:
            yield _Part(plain, b, slice(start, stop), slice(first, stop + offset), Beside())
        if stop < problem.seqlen_q:
            everything = replace(plain, window_right=UNLIMITED)
            yield _Part(everything, b, slice(stop, problem.seqlen_q), keys, Beside())
