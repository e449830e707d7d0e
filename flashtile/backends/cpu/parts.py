"""Calls that are computed as several dense calls, their parts, and the optional inputs of each.

A part is one sequence without its unused tokens, or some rows of several sequences and their keys without
padding. Rows in no part have out 0, lse -inf and gradient 0. Keys in no part have gradient 0.

Padded keys are left out of the parts where this is exact: without a causal mask always, with one if all keys
between a sequence's first and its last visible key are visible. Rows up to the last visible key then see a
causal part of the visible keys, and later rows see all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.dropout import kept
from flashtile.problems.attention import OptionalTensors, Problem, clear_lse, new_lse
from flashtile.problems.common import UNLIMITED


class Dropout(NamedTuple):
    """Parameters of dropout.

    Which probabilities are dropped depends on the number of their sequence in the whole call. So a call that
    is computed in parts has the same result. ``first_sequence`` is the number of a part's first sequence.
    """

    rng_state: Tensor
    p: float
    heads_q: int
    first_sequence: int = 0

    def kept(self, batch: slice, heads: slice, rows: range, keys: range) -> Tensor:
        """Return (batch, heads, rows, keys) bool: True where a probability is kept."""
        first = self.first_sequence
        sequences = range(first + batch.start, first + batch.stop)
        heads_range = range(heads.start, heads.stop)
        return kept(self.rng_state, self.p, self.heads_q, sequences, heads_range, rows, keys)


class OptionalInputs(NamedTuple):
    """Optional inputs of a call. Masks broadcast to (batch, heads_q, seqlen_q, seqlen_k); True is visible."""

    alibi_slopes: Tensor | None = None
    masks: tuple[Tensor, ...] = ()
    bias: Tensor | None = None
    dbias: Tensor | None = None
    """Accumulator for the gradient of the bias; None if that gradient is not needed."""
    dropout: Dropout | None = None
    functions: Any = None
    """:class:`flashtile.backends.cpu.functions.EvaluatedFunctions` of a call with score or mask functions."""

    @classmethod
    def of(cls, problem: Problem, extras: OptionalTensors, dbias: Tensor | None = None) -> OptionalInputs:
        masks: tuple[Tensor, ...] = () if extras.mask is None else (extras.mask,)
        if extras.key_padding_mask is not None:
            masks += (extras.key_padding_mask[:, None, None],)
        dropout = None
        if problem.dropout_p > 0 and extras.rng_state is not None:
            dropout = Dropout(extras.rng_state, problem.dropout_p, problem.num_heads_q)
        return cls(extras.alibi_slopes, masks, extras.bias, dbias, dropout)

    def of_sequence(self, b: int) -> OptionalInputs:
        """Return the inputs of sequence ``b`` only. They may have more rows and keys than it."""
        slopes = self.alibi_slopes
        own_slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        masks = tuple(_of_sequence(mask, b) for mask in self.masks)
        bias, dbias = (None if t is None else _of_sequence(t, b) for t in (self.bias, self.dbias))
        dropout = self.dropout and self.dropout._replace(first_sequence=b)
        return OptionalInputs(own_slopes, masks, bias, dbias, dropout)

    @property
    def may_hide_rows(self) -> bool:
        """Whether a row may have no visible key although its window contains keys."""
        return self.masks != () or self.bias is not None


def _of_sequence(tensor: Tensor, b: int) -> Tensor:
    """Return a view of one sequence's mask or bias."""
    return tensor[b : b + 1] if tensor.shape[0] > 1 else tensor


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
        """Return the keys of k or v: a view if they are a range, otherwise a copy."""
        some = tensor[self.sequences]
        return some[:, self.keys] if isinstance(self.keys, slice) else some.index_select(1, self.keys)

    def add(self, gradient: Tensor, term: Tensor) -> None:
        some = gradient[self.sequences]
        if isinstance(self.keys, slice):
            some[:, self.keys] += term
        else:
            some.index_add_(1, self.keys, term.to(gradient.dtype))


def forward(
    dense: Callable[..., tuple[Tensor, ...]],
    parts_of: Callable[..., Iterable[Part]],
    problem: Problem,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    """Return (out, lse) of the whole call.

    ``parts_of(problem, extras)`` yields the dense calls (:class:`Part`) that make up the call.
    ``dense(problem, q, k, v, optional)`` returns (out, lse) of one part. ``arguments`` are q, k, v and
    extras. In forward mode, tangents follow q, k and v, and those of out and lse are returned as well.
    """
    *tensors, extras = arguments
    parts = list(parts_of(problem, extras))
    if _is_whole(parts, problem):  # nothing to copy results into
        return dense(parts[0].problem, *tensors, parts[0].optional)
    out = tensors[0].new_zeros(problem.out_shape)
    lse = new_lse(out, problem.lse_shape, problem.lse_dtype, problem.statistics)
    clear_lse(lse, problem.statistics)
    results = (out, lse) if len(tensors) == 3 else (out, lse, torch.zeros_like(out), torch.zeros_like(lse))
    tensors, of_batch = with_batch(problem, *tensors), with_batch(problem, *results)
    for part in parts:
        own = (t[part.queries] if i % 3 == 0 else part.of_keys(t) for i, t in enumerate(tensors))
        for i, found in enumerate(dense(part.problem, *own, part.optional)):
            of_batch[i][part.statistics if i % 2 else part.queries] = found
    return results


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
            of_batch = slice(0, 1) if problem.varlen else slice(b, b + 1)
            yield Part(problem, b, of_batch, rows, keys, optional.of_sequence(b))


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


def has_only_padding(problem: Problem) -> bool:
    """Whether a problem has key padding and, apart from a causal mask, no other mask, bias or dropout."""
    distances = problem.alibi or problem.window_left != UNLIMITED or problem.window_right > 0
    ragged = problem.varlen or problem.seqused_q or problem.seqused_k
    scores = problem.mask or problem.bias or problem.dropout_p > 0 or problem.beyond_window is not None
    return problem.key_padding_mask and not (scores or distances or ragged)


def without_padding(problem: Problem, extras: OptionalTensors) -> Iterator[Part]:
    """Yield the dense calls that together compute all sequences with a visible key."""
    assert extras.key_padding_mask is not None
    causal = problem.window_right == 0
    offset = problem.seqlen_k - problem.seqlen_q
    all_rows = slice(0, problem.seqlen_q)
    for sequences, first, end, whole in _runs(extras.key_padding_mask):
        b = sequences.start
        plain = replace(problem, key_padding_mask=False, batch=sequences.stop - b)
        keys = slice(first, end) if whole else extras.key_padding_mask[b].nonzero().flatten()
        if not causal:
            yield Part(plain, b, sequences, all_rows, keys, OptionalInputs())
            continue
        if not whole:  # no causal part has these keys, so they are masked in tiles
            optional = OptionalInputs.of(problem, extras).of_sequence(b)
            yield Part(problem, b, sequences, all_rows, slice(None), optional)
            continue
        # Row i is aligned with key i + offset. Rows ``start`` to ``stop`` are aligned with visible keys.
        start, stop = max(0, first - offset), max(0, min(problem.seqlen_q, end - offset))
        if start < stop:
            own = slice(first, stop + offset)
            yield Part(plain, b, sequences, slice(start, stop), own, OptionalInputs())
        if stop < problem.seqlen_q:
            # Rows past the last visible key see all visible keys: a call without a causal mask.
            everything = replace(plain, window_right=UNLIMITED)
            yield Part(everything, b, sequences, slice(stop, problem.seqlen_q), keys, OptionalInputs())


def _runs(seen: Tensor) -> Iterator[tuple[slice, int, int, bool]]:
    """Yield (sequences, first key, end of keys, whether all keys between are visible).

    Sequences without a visible key are left out. Adjacent sequences with the same range of keys are yielded
    together: a batch without padding is then one call, whose results need not be copied together, which took
    4 to 12 % (benchmarks/results/experiments/cpu.json). A sequence with hidden keys within its range is
    yielded alone.
    """
    if seen.numel() == 0:
        return
    numbers = seen.to(torch.uint8)  # argmax takes no bool
    first = numbers.argmax(1).tolist()
    end = (seen.shape[1] - numbers.flip(1).argmax(1)).tolist()
    counts = seen.sum(1).tolist()

    # The third element tells a sequence with hidden keys in between from all others, so that it stays alone.
    def keys_of(b: int) -> tuple[int, int, int]:
        alone = counts[b] != end[b] - first[b]
        return first[b], end[b], b if alone else -1

    for (start, stop, alone), members in groupby(range(len(counts)), keys_of):
        run = list(members)
        if counts[run[0]] > 0:
            yield slice(run[0], run[-1] + 1), start, stop, alone < 0
