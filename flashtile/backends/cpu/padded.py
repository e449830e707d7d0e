"""Padding of keys, as calls of the keys that there are: no work on the others.

Without a window any keys can be left out. Under a causal mask those between the first and the last must be
there: the rows up to the last key then see a causal part of them, and those behind it see all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.cpu.beside import Beside
from flashtile.problems.attention import Extras, Problem
from flashtile.problems.common import UNLIMITED

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
    parts = list(_parts(problem, extras))
    if _are_all(parts, problem):
        return dense(parts[0].problem, q, k, v, Beside())
    rows_with_keys = sum(_length(part.sequences) * _length(part.rows) for part in parts)
    make = q.new_empty if rows_with_keys == problem.batch * problem.seqlen_q else q.new_zeros
    out = make(problem.out_shape)
    lse = q.new_full(problem.lse_shape, -torch.inf, dtype=problem.lse_dtype)
    for part in parts:
        at = part.sequences, part.rows
        own = part.sequences, slice(None), part.rows
        function = dense if part.beside.masks == () else fallback
        out[at], lse[own] = function(part.problem, q[at], part.of_keys(k), part.of_keys(v), part.beside)
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
    parts = list(_parts(problem, extras))
    if _are_all(parts, problem):
        return dense(parts[0].problem, dout, dlse, q, k, v, out, lse, Beside())
    dq = q.new_zeros(q.shape)
    # A key may get a term from rows up to it and one from those behind all keys.
    dk, dv = (t.new_zeros(t.shape, dtype=problem.lse_dtype) for t in (k, v))
    for part in parts:
        at = part.sequences, part.rows
        own = part.sequences, slice(None), part.rows
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
    """Rows of sequences and the keys that they attend to: a slice, or numbers where some are left out."""

    problem: Problem
    sequences: slice
    rows: slice
    keys: slice | Tensor
    beside: Beside

    def of_keys(self, tensor: Tensor) -> Tensor:
        some = tensor[self.sequences]
        return some[:, self.keys] if isinstance(self.keys, slice) else some.index_select(1, self.keys)

    def add(self, gradient: Tensor, term: Tensor) -> None:
        some = gradient[self.sequences]
        if isinstance(self.keys, slice):
            some[:, self.keys] += term
        else:
            some.index_add_(1, self.keys, term.to(gradient.dtype))


def _parts(problem: Problem, extras: Extras) -> Iterator[_Part]:
    """What remains to do of the sequences that have a key."""
    assert extras.key_padding_mask is not None
    causal = problem.window_right == 0
    offset = problem.seqlen_k - problem.seqlen_q
    for sequences, first, end, whole in _runs(extras.key_padding_mask):
        b = sequences.start
        plain = replace(problem, key_padding_mask=False, batch=sequences.stop - b)
        keys = slice(first, end) if whole else extras.key_padding_mask[b].nonzero().flatten()
        if not causal:
            yield _Part(plain, sequences, slice(0, problem.seqlen_q), keys, Beside())
            continue
        if not whole:
            beside = Beside.of(problem, extras).of_sequence(b, problem.seqlen_q, problem.seqlen_k)
            yield _Part(problem, sequences, slice(0, problem.seqlen_q), slice(None), beside)
            continue
        # Row i stands at key i + offset: the first not before the first key, the last before their end.
        start, stop = max(0, first - offset), max(0, min(problem.seqlen_q, end - offset))
        if start < stop:
            yield _Part(plain, sequences, slice(start, stop), slice(first, stop + offset), Beside())
        if stop < problem.seqlen_q:
            everything = replace(plain, window_right=UNLIMITED)
            yield _Part(everything, sequences, slice(stop, problem.seqlen_q), keys, Beside())


def _length(of: slice) -> int:
    return of.stop - of.start


def _are_all(parts: list[_Part], problem: Problem) -> bool:
    """Whether nothing is padded, and they are the whole call."""
    everything = slice(0, problem.batch), slice(0, problem.seqlen_q), slice(0, problem.seqlen_k)
    return len(parts) == 1 and (parts[0].sequences, parts[0].rows, parts[0].keys) == everything


def _runs(seen: Tensor) -> Iterator[tuple[slice, int, int, bool]]:
    """(sequences, first key, end of keys, whether all between are seen) of sequences that have a key.

    Neighbours whose keys are the same range go together; one that leaves out keys between goes alone.
    """
    if seen.numel() == 0:
        return
    numbers = seen.to(torch.uint8)
    first = numbers.argmax(1).tolist()
    end = (seen.shape[1] - numbers.flip(1).argmax(1)).tolist()
    counts = seen.sum(1).tolist()

    def keys_of(b: int) -> tuple[int, int, int]:
        alone = counts[b] != end[b] - first[b]
        return first[b], end[b], b if alone else -1

    for (start, stop, alone), members in groupby(range(len(counts)), keys_of):
        run = list(members)
        if counts[run[0]] > 0:
            yield slice(run[0], run[-1] + 1), start, stop, alone < 0
