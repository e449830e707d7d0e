"""From tensors to the Hopper kernels' arguments, and compiled kernels kept after their first launch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashtile.backends.common.kept_kernel import KeptKernel
from flashtile.backends.common.launch import (
    contiguous_strides,
    has_score_mod,
    largest_divisor,
    stride_of_two,
)
from flashtile.backends.common.tma import View, dense_view, packed_view, ragged_view, rows_between_sequences
from flashtile.backends.hopper.config import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    O_PART,
    PRODUCER_REGISTERS,
    WARPGROUP_ROWS,
    ForwardConfig,
    Variant,
    padded,
)
from flashtile.backends.hopper.forward import tile_table
from flashtile.backends.hopper.forward.kernel import forward_kernel
from flashtile.backends.hopper.forward.schedule import TABLE_WIDTH, items_of
from flashtile.problem import LOG2_E, UNLIMITED, Extras, Problem

HEADS_IN_STEP = 8
ITEMS_IN_STEP = 2816
"""Items that fall in cost together: some 20 for each multiprocessor, so that they come out even, of few
enough heads that their keys stay in the L2 cache."""


def pack_of(problem: Problem, block_m: int) -> int:
    """Query heads of a key head to put into one tile: all of them if that saves a quarter of the tiles."""
    group = problem.group_size
    if problem.varlen or group & (group - 1) or group > WARPGROUP_ROWS:
        return 1
    apart = group * math.ceil(problem.seqlen_q / block_m)
    together = math.ceil(problem.seqlen_q * group / block_m)
    return group if together <= 0.75 * apart else 1


def variant_of(problem: Problem, config: ForwardConfig, has_queue: bool = True) -> Variant:
    """``has_queue``: of the kernel; without one, variable lengths are dealt out in pairs."""
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    pack = pack_of(problem, config.BLOCK_M)
    short = not has_queue if problem.varlen else problem.seqlen_k < config.paired_below
    one_edge = right != UNLIMITED and left == UNLIMITED
    return Variant(
        VARLEN=problem.varlen,
        SEQUSED=problem.seqused_k,
        HAS_LEFT=left != UNLIMITED,
        HAS_RIGHT=right != UNLIMITED,
        SOFTCAP=problem.softcap > 0,
        ALIBI=problem.alibi,
        SINK=problem.sink,
        EVEN_N=not (problem.varlen or problem.seqused_k) and problem.seqlen_k % config.BLOCK_N == 0,
        QUEUED=has_queue and (problem.varlen or (config.QUEUED and one_edge and not short)),
        PAIRED=right != UNLIMITED and short,
        PACK=pack,
        KV_GROUP=problem.group_size // pack,
        BENT=has_score_mod(problem),
        BLOCK_D=padded(problem.head_dim),
        BLOCK_DV=padded(problem.head_dim_v),
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        WARPGROUPS=config.warpgroups,
        STAGES=config.STAGES,
        Q_STAGES=config.Q_STAGES,
        PING_PONG=config.PING_PONG,
        Q_HOLDS_O=config.Q_HOLDS_O,
        Q_IN_REGISTERS=config.Q_IN_REGISTERS,
        O_IN_PARTS=config.O_IN_PARTS,
        LAZY_RESCALE=config.LAZY_RESCALE,
        PIN_WAIT=config.PIN_WAIT,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[config.warpgroups],
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
    )


def section_of(problem: Problem, variant: Variant) -> int:
    """Heads whose items are dealt out together: a divisor of all heads of the batch.

    Programs at work at the same time should read the same keys in step. Without a right edge that are all
    blocks of one key head. With pairs, those of one place in a few heads. With neither, costs fall from the
    last block to the first, and programs come out even only if those of many heads do so together.
    """
    heads = problem.batch * problem.num_heads_q // variant.PACK
    if variant.PAIRED or variant.QUEUED:
        most = max(HEADS_IN_STEP, variant.KV_GROUP)
    else:
        blocks = math.ceil(problem.seqlen_q * variant.PACK / variant.BLOCK_M)
        most = max(ITEMS_IN_STEP // blocks, variant.KV_GROUP) if variant.HAS_RIGHT else variant.KV_GROUP
    return largest_divisor(heads, most)


class ForwardLaunch:
    """``(q, k, v, extras) -> (out, lse)`` for tensors of one signature."""

    def __init__(self, problem: Problem, config: ForwardConfig) -> None:
        self._problem = problem
        self._config = config
        self._variant = variant_of(problem, config)
        self._out_shape = problem.out_shape
        self._lse_shape = problem.lse_shape
        self._varlen = problem.varlen
        self._kernel: KeptKernel | None = None
        self._table_kernel: KeptKernel | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink = extras
        if not self._varlen:
            out = q.new_empty(*self._out_shape)  # a tuple would take twice as long to read
            lse = q.new_empty(*self._lse_shape, dtype=torch.float32)
        else:  # tokens that belong to no sequence are written by no program
            out = q.new_zeros(self._out_shape)
            lse = q.new_full(self._lse_shape, -torch.inf, dtype=torch.float32)
        if self._kernel is None:
            self._prepare(q, k, v, alibi_slopes)
        kernel = self._kernel
        assert kernel is not None
        device = q.device
        table = lse
        if self._table_kernel is not None:
            table = q.new_empty(*self._table_shape, dtype=torch.int32)
            used = lse if seqused_k is None else seqused_k
            self._table_kernel(device, table, cu_seqlens_q, cu_seqlens_k, used)
        elif self._variant.QUEUED:
            table = q.new_zeros(TABLE_WIDTH.value, dtype=torch.int32)
        kernel(
            device,
            q,
            k,
            v,
            out,
            lse,
            table,
            lse if seqused_k is None else seqused_k,
            lse if alibi_slopes is None else alibi_slopes,
            lse if sink is None else sink,
        )
        return out, lse

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None) -> None:
        problem, variant = self._problem, self._variant
        if problem.varlen:
            self._table_shape = (1 + table_items(problem, variant), TABLE_WIDTH.value)
            self._table_kernel = table_kernel(problem, variant)
        scalars = (
            *schedule_scalars(problem, variant, rows_between_sequences(k)),
            stride_of_two(alibi_slopes),
            *score_numbers(problem),
        )
        programs = num_programs(scalars, q.device)
        registers = LAUNCH_REGISTERS[variant.WARPGROUPS]
        self._kernel = KeptKernel(
            forward_kernel,
            programs,
            scalars,
            (variant,),
            None,
            views(problem, variant, q, k, v),
            maxnreg=registers,
        )


def views(
    problem: Problem,
    variant: Variant,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_dtype: torch.dtype | None = None,
) -> tuple[View, View, View, View]:
    """Of q, k, v and out, which is in the dtype of q if no other is given."""
    out_dtype = problem.dtype if out_dtype is None else out_dtype
    dtype, rows = problem.dtype, WARPGROUP_ROWS
    d, dv = variant.BLOCK_D, variant.BLOCK_DV
    part = O_PART if variant.O_IN_PARTS else dv
    out_strides = contiguous_strides(problem.out_shape)
    if problem.varlen:
        view_q = ragged_view(q.shape, q.stride(), rows, d, dtype)
        view_o = ragged_view(problem.out_shape, out_strides, rows, part, out_dtype)
    elif variant.PACK > 1:
        view_q = packed_view(q.shape, q.stride(), variant.PACK, rows, d, dtype)
        view_o = packed_view(problem.out_shape, out_strides, variant.PACK, rows, part, out_dtype)
    else:
        view_q = dense_view(q.shape, q.stride(), rows, d, dtype)
        view_o = dense_view(problem.out_shape, out_strides, rows, part, out_dtype)
    if problem.varlen or problem.seqused_k:
        view_k, view_v = (
            ragged_view(t.shape, t.stride(), variant.BLOCK_N, block, dtype) for t, block in ((k, d), (v, dv))
        )
    else:
        view_k = dense_view(k.shape, k.stride(), variant.BLOCK_N, d, dtype)
        view_v = dense_view(v.shape, v.stride(), variant.BLOCK_N, dv, dtype)
    return view_q, view_k, view_v, view_o


def table_items(problem: Problem, variant: Variant) -> int:
    """The most items of one head that a variable-length batch can have, whatever its lengths."""
    return tile_table.capacity(problem.total_q, problem.batch, variant.BLOCK_M)


def _blocks(problem: Problem, variant: Variant) -> int:
    """Blocks of query rows of the longest sequence."""
    return math.ceil(problem.seqlen_q * variant.PACK / variant.BLOCK_M)


def table_kernel(problem: Problem, variant: Variant) -> KeptKernel:
    """``tile_table_kernel`` for one signature."""
    blocks, capacity = _blocks(problem, variant), table_items(problem, variant)
    scalars = (problem.batch, blocks, problem.total_q, problem.total_k, capacity)
    constants = (problem.seqused_k, variant.PAIRED, variant.BLOCK_M, TABLE_WIDTH.value, tile_table.CHUNK)
    return KeptKernel(tile_table.tile_table_kernel, problem.batch, scalars, constants, None)


def schedule_scalars(problem: Problem, variant: Variant, rows_apart_k: int) -> tuple[int, ...]:
    """The fields of ``schedule.Schedule`` up to ``right``, in their order."""
    blocks = _blocks(problem, variant)
    heads = problem.num_heads_q // variant.PACK
    if problem.varlen:
        items = table_items(problem, variant)
    else:
        items = problem.batch * items_of.fn(blocks, variant.PAIRED)
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    section = section_of(problem, variant)
    lengths = (problem.seqlen_q, problem.seqlen_k, problem.total_q, rows_apart_k)
    return (items * heads, blocks, heads, section, *lengths, left, right)


def score_numbers(problem: Problem) -> tuple[float, float, float]:
    """The fields of :class:`~flashtile.backends.hopper.forward.schedule.Numbers`."""
    scale, softcap = problem.softmax_scale * LOG2_E, problem.softcap
    return scale, 2 * scale / softcap if softcap else 0.0, softcap * LOG2_E


def num_programs(scalars: tuple, device: torch.device) -> int:
    """One for each multiprocessor, but no more than items, the first of ``scalars``."""
    return min(torch.cuda.get_device_properties(device).multi_processor_count, scalars[0])
