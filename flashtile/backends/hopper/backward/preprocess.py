"""The first part of every backward: the tensors of the gradients, two floats for each row, zeroed
counters."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.common.cached_launch import CachedLaunch
from flashtile.backends.common.launch import allocator
from flashtile.backends.common.preprocess import padded_rows, preprocess_launch, preprocess_rows
from flashtile.problems.attention import OptionalTensors, Problem

LINE = 32
"""Floats of a line of the L2 cache; each part of the workspace begins with a line."""


class Preprocess:
    """One launch of the preprocess kernel, and all that it writes to.

    What it leaves to later kernels is one allocation: with one for each part, and views of them, a call took
    a fifth longer on the host.

    Args:
        has_dlse: whether there is a gradient into lse.
        lse_factor: what lse is multiplied by: log2(e), or 1 / softmax_scale for raw products.
        counters: int32 counters of the programs, 0 at the start.
        resident_heads, columns: key heads and columns of ``dq_accum``; 0 without one.
    """

    def __init__(
        self,
        problem: Problem,
        has_dlse: bool,
        lse_factor: float,
        counters: int,
        resident_heads: int = 0,
        columns: int = 0,
    ) -> None:
        resident = resident_heads * problem.group_size
        self._kernel = preprocess_launch(problem, has_dlse, lse_factor, counters, columns, resident)
        self._out_dtype = problem.out_dtype
        self._some_unwritten = problem.varlen or problem.seqused_k
        count = math.prod(statistics_shape(problem))
        accum = resident * statistics_shape(problem)[1] * columns
        self._sizes = [count, count, math.ceil(counters / LINE) * LINE, accum]
        self._offsets = [4 * offset for offset in accumulate(self._sizes, initial=0)]
        self._floats = sum(self._sizes)
        self._allocate: list[Callable[[Tensor], Tensor]] | None = None
        """Allocators of the gradients of q, k and v."""

    def __call__(
        self,
        last: CachedLaunch,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        extras: OptionalTensors,
    ) -> tuple[Any, ...]:
        """(dout, dq, dk, dv, dsink, workspace, neg_lse, neg_delta, counters, dq_accum): what the kernels that
        follow are given in addition to the call's tensors. ``workspace`` is the memory of the last four.

        ``last``: the last of these kernels; once it is compiled, all take addresses.
        """
        if dout.data_ptr() % 16:
            dout = dout.clone()
        allocate = self._allocate
        if allocate is None:
            # Tokens that no sequence has or uses are written by no program.
            allocate = self._allocate = [
                allocator(t, t.shape, self._out_dtype, zeroed=self._some_unwritten) for t in (q, k, v)
            ]
        new_dq, new_dk, new_dv = allocate
        dq, dk, dv = new_dq(q), new_dk(k), new_dv(v)
        workspace = q.new_empty(self._floats, dtype=torch.float32)
        parts = self._addresses(workspace) if last.takes_addresses else self._tensors(workspace)
        neg_lse, neg_delta, counters, dq_accum = parts
        dsink = preprocess_rows(
            self._kernel, neg_lse, neg_delta, out, dout, lse, dlse, extras, dq_accum, counters
        )
        return dout, dq, dk, dv, dsink, workspace, *parts

    def _addresses(self, workspace: Tensor) -> tuple[int, int, int, int | None]:
        start = workspace.data_ptr()
        neg_lse, neg_delta, counters, dq_accum, end = self._offsets
        accum = start + dq_accum if dq_accum < end else None
        return start + neg_lse, start + neg_delta, start + counters, accum

    def _tensors(self, workspace: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The first call compiles, for which Triton wants tensors."""
        neg_lse, neg_delta, counters, dq_accum = workspace.split_with_sizes(self._sizes)
        return neg_lse, neg_delta, counters.view(torch.int32), dq_accum if dq_accum.numel() else None


def dense_batch(problem: Problem) -> int:
    """Sequences along the first dimension of dense tensors; 1 for packed ones."""
    return 1 if problem.varlen else problem.batch


def statistics_shape(problem: Problem) -> tuple[int, int]:
    """(query heads, counted through a dense batch; padded rows of each) of ``neg_lse`` and ``neg_delta``."""
    rows = padded_rows(problem.seqlen_q, problem.total_q, problem.batch, problem.varlen)
    return dense_batch(problem) * problem.num_heads_q, rows
