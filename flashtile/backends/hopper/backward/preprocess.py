"""The first step of the Hopper backward: it allocates the gradients, computes -lse and -delta of each row,
and zeroes counters and ``dq_accum``.

The kernel itself, which other backends share, is ``common.preprocess``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.common.config import allocator
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.preprocess import num_padded_rows, preprocess_launch, preprocess_rows
from flashtile.backends.common.tma import View
from flashtile.problems.attention import OptionalTensors, Problem

LINE = 32
"""Floats in a line of the L2 cache. Each part of the workspace begins at a line."""


class Preprocess:
    """The launch of the preprocess kernel, and the allocation of the tensors that it writes.

    Its results for later kernels share one allocation, the *workspace*. With an allocation and a view for
    each result, a call took a fifth longer on the host.

    Args:
        has_dlse: whether lse has a gradient.
        lse_factor: factor that converts lse to the unit of the kernel's scores. It is log2(e), or
            1 / softmax_scale if scores are products of q and k without the scale.
        counters: number of int32 counters, which are zeroed.
        resident_heads, columns: key heads and columns of ``dq_accum``; 0 if there is none.
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
        # ``dq_accum`` has query heads. ``problem`` is the one that is scheduled (``costs.as_scheduled``),
        # whose group is a work tile's.
        resident = resident_heads * problem.group_size
        self._kernel = preprocess_launch(problem, has_dlse, lse_factor, counters, columns, resident)
        self._out_dtype = problem.out_dtype
        self._some_unwritten = problem.seqused_k
        # The accumulator comes last: it needs no padding, and it is empty for head sizes over 128.
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
        """Return (dout, dq, dk, dv, dsink, workspace, neg_lse, neg_delta, counters, dq_accum).

        Later kernels take these results in addition to the call's tensors. ``workspace`` is the memory of the
        last four results. These four are tensors until ``last``, the last of the later kernels, has been
        compiled. From then on they are addresses.
        """
        if dout.data_ptr() % 16:  # TMA reads from multiples of 16 bytes
            dout = dout.clone()
        allocate = self._allocate
        if allocate is None:
            # No kernel writes unused tokens. Those after all sequences are the tile table's (``Unwritten``).
            allocate = self._allocate = [
                allocator(t, t.shape, self._out_dtype, zeroed=self._some_unwritten) for t in (q, k, v)
            ]
        new_dq, new_dk, new_dv = allocate
        dq, dk, dv = new_dq(q), new_dk(k), new_dv(v)
        workspace = q.new_empty(self._floats, dtype=torch.float32)
        # Addresses spare a call four views. ``last``, not this kernel, decides: all later ones must be
        # compiled.
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
        """Return (neg_lse, neg_delta, counters, dq_accum) as views of ``workspace``.

        The first call needs tensors, because Triton compiles a kernel for the dtypes of its arguments.
        """
        neg_lse, neg_delta, counters, dq_accum = workspace.split_with_sizes(self._sizes)
        return neg_lse, neg_delta, counters.view(torch.int32), dq_accum if dq_accum.numel() else None


def dense_batch(problem: Problem) -> int:
    """Return the number of sequences along the first dimension of dense tensors; 1 if packed."""
    return 1 if problem.varlen else problem.batch


def statistics_view(problem: Problem, rows: int) -> View:
    """Return the TMA view of ``neg_lse``, and of ``neg_delta``, in blocks of ``rows`` rows."""
    heads, padded_rows = statistics_shape(problem)
    return View([heads, padded_rows], [padded_rows, 1], [1, rows], torch.float32, swizzled=False)


def statistics_shape(problem: Problem) -> tuple[int, int]:
    """Return the shape of ``neg_lse`` and ``neg_delta``: (query heads, padded rows of a head).

    For a dense batch, the first dimension counts the query heads of all sequences.
    """
    rows = num_padded_rows(problem.seqlen_q, problem.total_q, problem.batch, problem.varlen)
    return dense_batch(problem) * problem.num_heads_q, rows
