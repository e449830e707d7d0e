"""From tensors to the Hopper backward's two kernels: prepare, and the five products with the sums of dQ."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.backends.common.kept_kernel import KeptKernel
from flashtile.backends.common.launch import (
    contiguous_strides,
    has_score_mod,
    largest_divisor,
    stride_of_two,
)
from flashtile.backends.common.preprocess import padded_rows, preprocess_launch, preprocess_rows
from flashtile.backends.common.tma import View, dense_view, ragged_view, rows_between_sequences
from flashtile.backends.hopper.backward.kernel import backward_kernel
from flashtile.backends.hopper.config import (
    CONSUMER_REGISTERS,
    GRADIENT_PART,
    KEEPER_CHUNK,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    WARPGROUP_ROWS,
    BackwardConfig,
    BackwardVariant,
    padded,
)
from flashtile.backends.hopper.forward import tile_table
from flashtile.backends.hopper.forward.launch import num_programs, score_numbers
from flashtile.backends.hopper.forward.schedule import TABLE_WIDTH
from flashtile.problem import LOG2_E, UNLIMITED, Extras, Problem

LINE = 32
"""Floats of a line of the L2 cache, between whose multiples each part of the workspace begins."""
SECTION_BYTES = {"even": 20 * 2**20, "uneven": 12 * 2**20}
"""Of the L2 cache's 50 MB; programs are at work on two sections at a time. With blocks of keys of equal cost
larger ones are faster, with the triangle of a causal mask, under which sums are complete later, smaller."""
SMALLEST_SCALE = 1e-6
"""Below it, lse in units of raw products would lose its digits, or overflow."""


def variant_of(problem: Problem, config: BackwardConfig) -> BackwardVariant:
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    even = not (problem.varlen or problem.seqused_k) and problem.seqlen_k % config.BLOCK_N == 0
    return BackwardVariant(
        VARLEN=problem.varlen,
        SEQUSED=problem.seqused_k,
        HAS_LEFT=left != UNLIMITED,
        HAS_RIGHT=right != UNLIMITED,
        SOFTCAP=problem.softcap > 0,
        ALIBI=problem.alibi,
        BENT=has_score_mod(problem) or problem.softmax_scale < SMALLEST_SCALE,
        EVEN_N=even,
        MASKED=left != UNLIMITED or right != UNLIMITED or not even,
        DETERMINISTIC=problem.deterministic,
        GROUP=problem.group_size,
        BLOCK_D=padded(problem.head_dim),
        BLOCK_DV=padded(problem.head_dim_v),
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        STAGES=config.STAGES,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[2],
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
    )


def part_columns(variant: BackwardVariant) -> int:
    """Columns of the 64 rows of dQ that a warpgroup makes in a step: of 64 rows half, of 128 all."""
    return variant.BLOCK_D // (2 * WARPGROUP_ROWS // variant.BLOCK_M)


def sequences(problem: Problem) -> int:
    """Along the first dimension of dense tensors; a variable-length batch is one."""
    return 1 if problem.varlen else problem.batch


def key_heads(problem: Problem) -> int:
    """Counted through the batch when dense."""
    return problem.num_heads_kv * sequences(problem)


def uneven(problem: Problem) -> bool:
    """Whether some blocks of keys meet more rows than others, as under a causal mask."""
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    return (left == UNLIMITED) != (right == UNLIMITED)


def section_of(problem: Problem) -> int:
    """Key heads whose blocks are taken in turn in a deterministic sum: as many as the L2 cache has room for,
    with q, dO and the sums of dQ, and a divisor of all heads."""
    row_bytes = problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v) + 4 * problem.head_dim
    room = SECTION_BYTES["uneven" if uneven(problem) else "even"]
    most = room // (row_bytes * problem.group_size * max(problem.seqlen_q, 1))
    return largest_divisor(key_heads(problem), most)


def heads_kept(problem: Problem, block_n: int, section: int, programs: int) -> int:
    """Key heads whose sums of dQ have room at a time.

    Twice as many as programs are at work on: while those of one are completed and converted, blocks of the
    next have begun. A deterministic sum completes its sections as a whole and needs more; never less than a
    section, whose heads must not wait for one another. Still more would leave the L2 cache.
    """
    blocks = math.ceil(problem.total_k / sequences(problem) / block_n)
    kept = math.ceil(2 * programs / max(blocks, 1)) + 1
    if problem.deterministic:
        kept = kept + section if uneven(problem) else max(kept, 5 * section // 2)
    return min(kept, key_heads(problem))


def key_items(problem: Problem, block_n: int) -> int:
    """Blocks of keys of a head, in all sequences; with a table, as many as it has rows for."""
    if problem.varlen:
        return tile_table.capacity(problem.total_k, problem.batch, block_n)
    return problem.batch * math.ceil(problem.seqlen_k / block_n)


def key_table_kernel(problem: Problem, block_n: int) -> KeptKernel:
    """``tile_table_kernel`` with the parts of queries and keys exchanged."""
    blocks = math.ceil(problem.seqlen_k / block_n)
    scalars = (problem.batch, blocks, problem.total_k, problem.total_q, key_items(problem, block_n))
    constants = (False, False, block_n, TABLE_WIDTH.value, tile_table.CHUNK)
    return KeptKernel(tile_table.tile_table_kernel, problem.batch, scalars, constants, None)


class Begun(NamedTuple):
    """What the preparation of a call leaves for its kernels; ``workspace`` is what the last four lie in."""

    dout: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None
    workspace: Tensor
    shift: Tensor | int
    dp_shift: Tensor | int
    counters: Tensor | int
    accumulator: Tensor | int | None


class Beginning:
    """The first part of every backward: the tensors of the gradients, and two floats for each row.

    What one kernel leaves to the next is one allocation: with one for each, and views of them, a call took a
    fifth longer on the host.

    Args:
        counters: of the programs, 0 at the start.
        kept, columns: of the sums of dQ, in fp32: key heads, and columns; 0 for none.
    """

    def __init__(self, problem: Problem, counters: int, kept: int = 0, columns: int = 0) -> None:
        rows = padded_rows(problem.seqlen_q, problem.total_q, problem.batch, problem.varlen)
        self.statistics_shape = (sequences(problem) * problem.num_heads_q, rows)
        self._some_unwritten = problem.varlen or problem.seqused_k
        count = math.prod(self.statistics_shape)
        sums = kept * problem.group_size * rows * columns
        self._sizes = [count, count, math.ceil(counters / LINE) * LINE, sums]
        self._offsets = [4 * offset for offset in accumulate(self._sizes, initial=0)]

    def __call__(
        self,
        prepare: KeptKernel,
        last: KeptKernel,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        extras: Extras,
    ) -> Begun:
        """``prepare`` is :func:`preprocess_launch`'s, ``last`` the last of the kernels that follow."""
        if dout.data_ptr() % 16:
            dout = dout.clone()
        # Tokens that no sequence has or uses are written by no program.
        allocate = q.new_zeros if self._some_unwritten else q.new_empty
        dq, dk, dv = allocate(*q.shape), allocate(*k.shape), allocate(*v.shape)
        workspace = q.new_empty(self._offsets[-1] // 4, dtype=torch.float32)
        parts = self._addresses(workspace) if last.takes_addresses else self._tensors(workspace)
        shift, dp_shift, counters, accumulator = parts
        dsink = preprocess_rows(prepare, shift, dp_shift, out, dout, lse, dlse, extras, accumulator, counters)
        return Begun(dout, dq, dk, dv, dsink, workspace, *parts)

    def _addresses(self, workspace: Tensor) -> tuple[int, int, int, int | None]:
        start = workspace.data_ptr()
        shift, dp_shift, counters, accumulator, end = self._offsets
        sums = start + accumulator if accumulator < end else None
        return start + shift, start + dp_shift, start + counters, sums

    def _tensors(self, workspace: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The first call compiles, for which Triton wants tensors."""
        shift, dp_shift, counters, accumulator = workspace.split_with_sizes(self._sizes)
        return shift, dp_shift, counters.view(torch.int32), accumulator if accumulator.numel() else None


class BackwardLaunch:
    """``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink)`` for tensors of one signature."""

    def __init__(self, problem: Problem, config: BackwardConfig) -> None:
        self._problem = problem
        self._variant = variant_of(problem, config)
        self._kernels: tuple[KeptKernel, KeptKernel] | None = None

    def __call__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        extras: Extras,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, _ = extras
        if self._kernels is None:
            self._kernels = self._prepare(dlse, q, k, v, alibi_slopes)
        prepare, products = self._kernels
        device = q.device
        dout, dq, dk, dv, dsink, _workspace, shift, dp_shift, counters, accumulator = self._begin(
            prepare, products, dout, dlse, q, k, v, out, lse, extras
        )
        turns = counters
        if self._problem.deterministic:
            turns = q.new_zeros(*self._turns_shape, dtype=torch.int32)
        table = lse
        if self._table_kernel is not None:
            table = q.new_empty(*self._table_shape, dtype=torch.int32)
            self._table_kernel(device, table, cu_seqlens_k, cu_seqlens_q, lse)
        products(
            device,
            q,
            k,
            v,
            dout,
            shift,
            dp_shift,
            accumulator,
            accumulator,
            dk,
            dv,
            table,
            lse if seqused_k is None else seqused_k,
            lse if alibi_slopes is None else alibi_slopes,
            turns,
            dq,
            counters,
        )
        return dq, dk, dv, dsink

    def _prepare(
        self,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alibi_slopes: Tensor | None,
    ) -> tuple[KeptKernel, KeptKernel]:
        problem, variant = self._problem, self._variant
        factor = LOG2_E if variant.BENT else 1 / problem.softmax_scale
        blocks = math.ceil(problem.seqlen_k / variant.BLOCK_N)
        items = key_items(problem, variant.BLOCK_N)
        self._table_kernel: KeptKernel | None = None
        if problem.varlen:
            self._table_shape = (1 + items, TABLE_WIDTH.value)
            self._table_kernel = key_table_kernel(problem, variant.BLOCK_N)
        left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
        section = section_of(problem)
        all_items, all_heads = items * problem.num_heads_kv, key_heads(problem)
        programs = num_programs((all_items,), q.device)
        kept = heads_kept(problem, variant.BLOCK_N, section, programs)
        counters = 2 + 2 * all_heads
        self._begin = Beginning(problem, counters, kept, variant.BLOCK_D)
        heads, rows = self._begin.statistics_shape
        q_blocks = rows // variant.BLOCK_M
        self._turns_shape = (heads * q_blocks,)
        scalars = (
            all_items,
            blocks,
            problem.num_heads_kv,
            problem.seqlen_q,
            problem.seqlen_k,
            rows_between_sequences(k),
            left,
            right,
            stride_of_two(alibi_slopes),
            section,
            q_blocks,
            all_heads,
            kept,
            problem.head_dim // 8,
            problem.softmax_scale,
            *score_numbers(problem),
            0.0,
        )
        products = KeptKernel(
            backward_kernel,
            programs,
            scalars,
            (variant,),
            None,
            views(problem, variant, q, k, v, rows, kept),
            maxnreg=LAUNCH_REGISTERS[2],
            launch_pdl=True,
        )
        prepare = preprocess_launch(
            problem, dlse is not None, factor, counters, variant.BLOCK_D, kept * problem.group_size
        )
        return prepare, products


def views(
    problem: Problem, variant: BackwardVariant, q: Tensor, k: Tensor, v: Tensor, rows: int, kept: int
) -> tuple[View, ...]:
    """Of q, k, v, dout, shift, dp_shift, the sums of dQ as they are added to and as they are converted, dk
    and dv."""
    dtype = problem.dtype
    d, dv = variant.BLOCK_D, variant.BLOCK_DV
    block_m, block_n = variant.BLOCK_M, variant.BLOCK_N
    heads_q = problem.num_heads_q
    view_q = ragged_view if problem.varlen else dense_view
    view_k = ragged_view if problem.varlen or problem.seqused_k else dense_view
    statistics = View(
        [sequences(problem) * heads_q, rows], [rows, 1], [1, block_m], torch.float32, swizzled=False
    )
    tiles = kept * problem.group_size * rows // WARPGROUP_ROWS
    part, chunk = [part_columns(variant) // 4, 256], [d // 8, KEEPER_CHUNK // (8 * d), 64]
    return (
        view_q(q.shape, q.stride(), block_m, d, dtype),
        view_k(k.shape, k.stride(), block_n, d, dtype),
        view_k(v.shape, v.stride(), block_n, dv, dtype),
        view_q(problem.out_shape, contiguous_strides(problem.out_shape), block_m, dv, dtype),
        statistics,
        statistics,
        View([tiles * d // 4, 256], [256, 1], part, torch.float32, swizzled=False),
        View([tiles * d // 8, 8, 64], [512, 64, 1], chunk, torch.float32, swizzled=False),
        view_k(k.shape, contiguous_strides(k.shape), WARPGROUP_ROWS, GRADIENT_PART, dtype),
        view_k(v.shape, contiguous_strides(v.shape), WARPGROUP_ROWS, GRADIENT_PART, dtype),
    )
