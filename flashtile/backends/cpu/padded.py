"""Key padding, as dense calls on the visible keys only: padding costs no work.

Without a window, any keys can be left out. Under a causal mask, all keys between the first and the last must
be visible: rows up to the last key then see a causal part of them, and later rows see all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.cpu.optional_inputs import OptionalInputs
from flashtile.problems.attention import OptionalTensors, Problem
from flashtile.problems.common import UNLIMITED

Dense = Callable[..., Any]


def covers(problem: Problem) -> bool:
    """Whether key padding is the only mask except a causal one: torch's kernel then serves the rest."""
    distances = problem.alibi or problem.window_left != UNLIMITED or problem.window_right > 0
    ragged = problem.varlen or problem.seqused_q or problem.seqused_k
    cells = problem.mask or problem.bias or problem.dropout_p > 0 or problem.attention_chunk > 0
    return problem.key_padding_mask and not (cells or distances or ragged)


def forward(
    dense: Dense, fallback: Dense, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: OptionalTensors
) -> tuple[Tensor, Tensor]:
    """Return (out, lse). ``dense(problem, q, k, v, options)`` takes no masks, ``fallback`` takes any."""
    parts = list(_parts(problem, extras))
    if _are_all(parts, problem):
        return dense(parts[0].problem, q, k, v, OptionalInputs())
    rows_with_keys = sum(_length(part.sequences) * _length(part.rows) for part in parts)
    make = q.new_empty if rows_with_keys == problem.batch * problem.seqlen_q else q.new_zeros
    out = make(problem.out_shape)
    lse = q.new_full(problem.lse_shape, -torch.inf, dtype=problem.lse_dtype)
    for part in parts:
        at = part.sequences, part.rows
        own = part.sequences, slice(None), part.rows
        function = dense if part.optional.masks == () else fallback
        out[at], lse[own] = function(part.problem, q[at], part.of_keys(k), part.of_keys(v), part.optional)
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
    extras: OptionalTensors,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv). Both functions are as in :func:`forward` but take dout, dlse, ..., out, lse."""
    parts = list(_parts(problem, extras))
    if _are_all(parts, problem):
        return dense(parts[0].problem, dout, dlse, q, k, v, out, lse, OptionalInputs())
    dq = q.new_zeros(q.shape)
    # A key may get two terms: from rows up to the last key and from the rows after it.
    dk, dv = (t.new_zeros(t.shape, dtype=problem.lse_dtype) for t in (k, v))
    for part in parts:
        at = part.sequences, part.rows
        own = part.sequences, slice(None), part.rows
        function = dense if part.optional.masks == () else fallback
        dq[at], dk_term, dv_term = function(
            part.problem,
            dout[at],
            None if dlse is None else dlse[own],
            q[at],
            part.of_keys(k),
            part.of_keys(v),
            out[at],
            lse[own],
            part.optional,
        )
        part.add(dk, dk_term)
        part.add(dv, dv_term)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


class _Part(NamedTuple):
    """Rows of sequences and the keys they attend to: a slice, or indices where keys are left out."""

    problem: Problem
    sequences: slice
    rows: slice
    keys: slice | Tensor
    optional: OptionalInputs

    def of_keys(self, tensor: Tensor) -> Tensor:
        some = tensor[self.sequences]
        return some[:, self.keys] if isinstance(self.keys, slice) else some.index_select(1, self.keys)

    def add(self, gradient: Tensor, term: Tensor) -> None:
        some = gradient[self.sequences]
        if isinstance(self.keys, slice):
            some[:, self.keys] += term
        else:
            some.index_add_(1, self.keys, term.to(gradient.dtype))


def _parts(problem: Problem, extras: OptionalTensors) -> Iterator[_Part]:
    """Yield the calls that compute all sequences with a visible key."""
    assert extras.key_padding_mask is not None
    causal = problem.window_right == 0
    offset = problem.seqlen_k - problem.seqlen_q
    for sequences, first, end, whole in _runs(extras.key_padding_mask):
        b = sequences.start
        plain = replace(problem, key_padding_mask=False, batch=sequences.stop - b)
        keys = slice(first, end) if whole else extras.key_padding_mask[b].nonzero().flatten()
        if not causal:
            yield _Part(plain, sequences, slice(0, problem.seqlen_q), keys, OptionalInputs())
            continue
        if not whole:
            optional = OptionalInputs.of(problem, extras).of_sequence(b, problem.seqlen_q, problem.seqlen_k)
            yield _Part(problem, sequences, slice(0, problem.seqlen_q), slice(None), optional)
            continue
        # Row i stands at key i + offset. Rows start to stop stand between the first key and the last.
        start, stop = max(0, first - offset), max(0, min(problem.seqlen_q, end - offset))
        if start < stop:
            yield _Part(plain, sequences, slice(start, stop), slice(first, stop + offset), OptionalInputs())
        if stop < problem.seqlen_q:
            everything = replace(plain, window_right=UNLIMITED)
            yield _Part(everything, sequences, slice(stop, problem.seqlen_q), keys, OptionalInputs())


def _length(of: slice) -> int:
    return of.stop - of.start


def _are_all(parts: list[_Part], problem: Problem) -> bool:
    """Whether nothing is padded: one part is the whole call."""
    everything = slice(0, problem.batch), slice(0, problem.seqlen_q), slice(0, problem.seqlen_k)
    return len(parts) == 1 and (parts[0].sequences, parts[0].rows, parts[0].keys) == everything


def _runs(seen: Tensor) -> Iterator[tuple[slice, int, int, bool]]:
    """Yield (sequences, first key, end of keys, whether all keys between are visible).

    Sequences without a visible key are left out. Neighbours with the same range of keys form one run; a
    sequence with hidden keys in between is a run of its own.
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
