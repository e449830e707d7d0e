"""The largest number of each sequence and head, from one number for each row, in one kernel.

The rows' numbers are few bytes: 4 of a row whose q and out have 512 with head_dim 128 in 16 bits. So the
launch and the latency of the loads count. For packed sequences, torch has no reduction by offsets that reads
each number once without atomics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tiles import sequence
from flashtile.problems.statistics import MaxLogitsProblem, MaxLogitsTensors

NUMBERS = 1024
"""Numbers that a program reads at a time: 8 for each of its 128 threads."""
PACKED_ROWS = 128
"""Rows of packed sequences that a program reads at a time, of NUMBERS / 128 heads. The host does not know the
lengths of the sequences, most of which are short."""


@dataclass(frozen=True)
class MaxLogitsVariant:
    """Constants of the kernel."""

    VARLEN: bool
    HEADS: int
    """Heads of a program."""
    ROWS: int
    """Rows of a head that a program reads at a time."""


class MaxLogitsStrides(NamedTuple):
    """Strides of rows, in elements."""

    batch: Any
    head: Any
    row: Any


@kernel(do_not_specialize=("num_heads", "length"))
def max_logits_kernel(rows, cu_seqlens, largest, strides, num_heads, length, C: tl.constexpr):
    """Store the largest number of the rows of each sequence and head, -inf if there are none.

    Grid: (groups of HEADS heads * sequences,). ``largest`` is (sequences, num_heads). NaN is larger than any
    number, as in torch.amax. Rows of no sequence are not read.
    """
    groups = tl.cdiv(num_heads, C.HEADS)
    b = tl.program_id(0) // groups
    heads = tl.program_id(0) % groups * C.HEADS + tl.arange(0, C.HEADS)
    exist = heads < num_heads
    start, count = sequence(cu_seqlens, b, length, length, C.VARLEN)
    of_heads = rows + b.to(tl.int64) * strides.batch + heads.to(tl.int64) * strides.head
    found = tl.full([C.HEADS, C.ROWS], -float("inf"), rows.dtype.element_ty)
    for first in range(0, count, C.ROWS):
        place = first + tl.arange(0, C.ROWS)
        numbers = of_heads[:, None] + ((start + place) * strides.row)[None, :]
        inside = exist[:, None] & (place < count)[None, :]
        found = larger(found, tl.load(numbers, mask=inside, other=-float("inf")))
    # Once, after the loop: a reduction is an exchange between threads.
    tl.store(largest + b.to(tl.int64) * num_heads + heads, tl.reduce(found, 1, larger), mask=exist)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


class MaxLogitsLaunch:
    """Launch for tensors of one signature: ``(rows, tensors) -> largest``."""

    def __init__(self, problem: MaxLogitsProblem) -> None:
        self._shape = problem.batch, problem.num_heads
        longest = PACKED_ROWS if problem.varlen else problem.length
        rows = min(max(triton.next_power_of_2(longest), PACKED_ROWS), NUMBERS)
        heads = min(NUMBERS // rows, triton.next_power_of_2(max(problem.num_heads, 1)))
        self._launch = CachedLaunch(
            max_logits_kernel,
            problem.batch * triton.cdiv(problem.num_heads, heads),
            (MaxLogitsStrides(*problem.strides), problem.num_heads, problem.length),
            (MaxLogitsVariant(problem.varlen, heads, rows),),
            None,
        )

    def __call__(self, rows: Tensor, tensors: MaxLogitsTensors) -> Tensor:
        largest = torch.empty(self._shape, dtype=rows.dtype, device=rows.device)
        if largest.numel():
            self._launch(rows.device, rows, tensors.cu_seqlens_q, largest)
        return largest
