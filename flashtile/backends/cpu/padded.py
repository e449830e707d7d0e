"""Key padding, computed as dense calls on only the visible keys.

Without a causal mask, any keys can be left out. With a causal mask, keys of a sequence are left out only if
all keys between its first and its last visible key are visible. Rows up to the last visible key then see a
causal part of the visible keys, and later rows see all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from flashtile.backends.cpu.optional_inputs import OptionalInputs
from flashtile.backends.cpu.parts import Part
from flashtile.problems.attention import OptionalTensors, Problem
from flashtile.problems.common import UNLIMITED


def covers(problem: Problem) -> bool:
    """Whether a problem has key padding and, apart from a causal mask, no other mask, bias or dropout."""
    distances = problem.alibi or problem.window_left != UNLIMITED or problem.window_right > 0
    ragged = problem.varlen or problem.seqused_q or problem.seqused_k
    scores = problem.mask or problem.bias or problem.dropout_p > 0 or problem.beyond_window is not None
    return problem.key_padding_mask and not (scores or distances or ragged)


def parts(problem: Problem, extras: OptionalTensors) -> Iterator[Part]:
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
        if not whole:
            optional = OptionalInputs.of(problem, extras).of_sequence(b, problem.seqlen_q, problem.seqlen_k)
            yield Part(problem, b, sequences, all_rows, slice(None), optional)
            continue
        # Row i is aligned with key i + offset. Rows ``start`` to ``stop`` are aligned with visible keys.
        start, stop = max(0, first - offset), max(0, min(problem.seqlen_q, end - offset))
        if start < stop:
            own = slice(first, stop + offset)
            yield Part(plain, b, sequences, slice(start, stop), own, OptionalInputs())
        if stop < problem.seqlen_q:
            everything = replace(plain, window_right=UNLIMITED)
            yield Part(everything, b, sequences, slice(stop, problem.seqlen_q), keys, OptionalInputs())


def _runs(seen: Tensor) -> Iterator[tuple[slice, int, int, bool]]:
    """Yield (sequences, first key, end of keys, whether all keys between are visible).

    Sequences without a visible key are left out. Adjacent sequences with the same range of keys are yielded
    together. A sequence with hidden keys within its range is yielded alone.
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
