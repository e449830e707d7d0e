"""The launch of the Hopper forward kernel, prepared once per signature."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.common.config import contiguous_strides, outer_stride, scales_scores
from flashtile.backends.common.counters import zeroed_counters
from flashtile.backends.common.launch import CachedLaunch, Outputs, row_pointers
from flashtile.backends.common.tma import (
    View,
    cells_view,
    dense_view,
    packed_view,
    ragged_view,
    rows_between_sequences,
)
from flashtile.backends.hopper.config import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    MAX_COLUMNS_OF_V,
    PRODUCER_REGISTERS,
    SHARING_REGISTERS,
    WARPGROUP_ROWS,
    padded_columns,
    persistent_programs,
    rows_of_token,
    score_numbers,
)
from flashtile.backends.hopper.forward.config import (
    O_PART,
    PARTS_OF,
    ForwardConfig,
    ForwardVariant,
    accumulators,
    tile_columns,
)
from flashtile.backends.hopper.forward.kernel import forward_kernel
from flashtile.backends.hopper.forward.rounds import ForwardPlan, plan_of
from flashtile.backends.hopper.forward.schedule import (
    ForwardNumbers,
    ForwardPointers,
    ForwardSchedule,
)
from flashtile.backends.hopper.modifiers import (
    FunctionTensors,
    is_shared,
    modifier_flags,
    modifier_integers,
    own_sizes,
)
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH, TileTable, Unwritten, UnwrittenSizes
from flashtile.problems.attention import OptionalTensors, Problem
from flashtile.problems.common import LOG2_E


def forward_variant(problem: Problem, plan: ForwardPlan, bias: Tensor | None = None) -> ForwardVariant:
    """Return the variant that a kernel with the forward's schedule is compiled for.

    The kernels other than the forward's pad tiles to 64, 128 or 256 columns, and scale modified scores to
    log2 units.
    """
    config = plan.config
    mask_constants = plan.mask.constants
    block_d, block_dv = padded_columns(problem.head_dim), padded_columns(problem.head_dim_v)
    columns, scaled = block_d, scales_scores(problem)
    if plan.kernel == "forward":
        block_d, block_dv = tile_columns(problem)
        columns = block_d if problem.invariant else problem.head_dim  # decode.kernel multiplies the padding
        scaled = problem.alibi or (scaled and not problem.softcap)
    block_dv = min(block_dv, MAX_COLUMNS_OF_V)
    o_left, o_right = accumulators(block_dv, problem.head_dim_v)
    windowed = any(mask_constants.values())
    # A windowed kernel is the same for either answer, so it is always False: more lengths share a kernel.
    even = not (windowed or problem.varlen or problem.seqused_k) and problem.seqlen_k % config.BLOCK_N == 0
    flags = modifier_flags(problem, fixed=False)
    if problem.has_natural_scores:  # the softmax itself scales scores in natural units
        scaled = False
    if problem.mods is not None:
        size_q, size_kv = problem.mods.block_size or (config.BLOCK_M, config.BLOCK_N)
        flags |= {"MASK_BLOCK": size_q, "TILES_PER_MASK_BLOCK": size_kv // config.BLOCK_N}
        if flags["LISTED"]:
            even = problem.seqlen_k % size_kv == 0
    return ForwardVariant(
        VARLEN=problem.varlen,
        SEQUSED=problem.seqused_k,
        **mask_constants,
        SOFTCAP=problem.softcap > 0,
        TANH_APPROX=problem.softcap > 0 and problem.dtype == torch.bfloat16,
        ALIBI=problem.alibi,
        SINK=problem.sink,
        MAX_LOGITS=plan.kernel == "forward" and problem.max_logits,
        ENTROPY=plan.kernel == "forward" and problem.entropy,
        INVARIANT=problem.invariant,
        EVEN_N=even,
        QUEUED=plan.queued,
        PAIRED=plan.paired,
        FIRST_BLOCK_PARTIAL=plan.first_partial,
        PACK=rows_of_token(plan.pack),
        PACKED_HEADS=plan.pack,
        SCALED_SCORES=scaled,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        D_PARTS=PARTS_OF.get(block_d, 1),
        DV_PARTS=PARTS_OF.get(block_dv, 1),
        O_LEFT=o_left,
        O_RIGHT=o_right,
        QK_COLUMNS=columns,
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
        K_BY_PARTS=config.STAGES == 1,
        COLUMN_SPLITS=plan.column_splits,
        PROGRAMS=config.PROGRAMS,
        CONSUMER_REGISTERS=(
            CONSUMER_REGISTERS[config.warpgroups]
            if config.PROGRAMS == 1
            else SHARING_REGISTERS[config.warpgroups, config.PROGRAMS][0]
        ),
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        PRODUCER_WARPS=1,
        BIAS_STAGES=config.BIAS_STAGES,
        LATE_BITS=config.LATE_BITS,
        SEQUENCES_FIRST=is_shared(problem, bias) and not problem.varlen,
        **flags,
    )


def launch_registers(variant: ForwardVariant) -> int:
    """Return the number of registers per thread with which the kernel is launched."""
    if variant.PROGRAMS == 1:
        return LAUNCH_REGISTERS[variant.WARPGROUPS]
    return SHARING_REGISTERS[variant.WARPGROUPS, variant.PROGRAMS][1]


def tile_table(problem: Problem, plan: ForwardPlan, unwritten: UnwrittenSizes) -> TileTable | None:
    """Return the tile table of packed sequences; None for a dense call."""
    if not problem.varlen:
        return None
    return TileTable(
        problem.batch,
        problem.seqlen_q,
        problem.total_q,
        problem.total_k,
        plan.config.BLOCK_M // rows_of_token(plan.pack),
        unwritten,
        problem.seqused_k,
        plan.paired,
    )


def schedule_of(
    problem: Problem,
    plan: ForwardPlan,
    table: TileTable | None,
    k: Tensor,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
) -> ForwardSchedule:
    """Return the integers of the launch. ``table``: its :func:`tile_table`."""
    num_heads = problem.num_heads_q // plan.pack * plan.column_splits
    return ForwardSchedule(
        num_tiles=plan.tiles if table is None else table.capacity * num_heads,
        num_blocks=plan.blocks,
        num_heads=num_heads,
        kv_group=problem.group_size // plan.pack * plan.column_splits,
        swizzle=plan.interleaved,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        total_q=problem.total_q,
        batch_rows_k=rows_between_sequences(k),
        mask=plan.mask,
        alibi_stride=outer_stride(alibi_slopes),
        **modifier_integers(problem, bias),
    )


def numbers_of(problem: Problem) -> ForwardNumbers:
    """Return the floats of the launch."""
    numbers = score_numbers(problem)
    if problem.has_natural_scores:
        numbers |= {"scale_log2": LOG2_E, "scale": problem.softcap or problem.softmax_scale}
    if problem.dropout_p:
        numbers["keep_scale"] = 1 / (1 - problem.dropout_p)
    return ForwardNumbers(**numbers)


class ForwardKernels(NamedTuple):
    """The prepared launches of one signature, in launch order, and how to prepare their arguments."""

    fill_table: TileTable | None
    attend: CachedLaunch
    functions: FunctionTensors | None = None
    """Prepares the tensors that score and mask functions read; None without functions."""
    queued: bool = False
    """Programs take work tiles from the work queue."""


class HopperForwardLaunch:
    """Launch for tensors of one signature: ``(q, k, v, extras[, out, lse]) -> (out, lse)``."""

    writes_into = True

    def __init__(self, problem: Problem, config: ForwardConfig) -> None:
        self._problem = problem
        self._config = config
        self._statistics = problem.statistics
        self._outputs = Outputs(problem, all_written=True)  # the tile table's kernel fills other rows
        self._kernels: ForwardKernels | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        extras: OptionalTensors,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._outputs(q, out, lse)
        own, *statistics = row_pointers(lse, self._statistics)
        kernels = self._kernels
        if kernels is None:  # assigned only when complete, since other threads may read it
            kernels = self._kernels = self._prepare(q, k, v, extras)
        fill_table, attend, functions, queued = kernels
        table = lists = captured = None
        if fill_table is not None:
            unwritten = Unwritten(out, lse=lse)  # the statistics are behind lse
            table = fill_table(extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_k, unwritten)
        elif functions is not None:
            # _tensors keeps the tensors alive until the launch of the kernel, which gets only addresses.
            lists, captured, _tensors = functions(extras, lse, attend.takes_addresses)
            if queued:  # the kernel resets the counters (leave_queue)
                table = zeroed_counters(q.device, TABLE_WIDTH.value)
        elif queued:
            # A new counter, so a memset, for each launch. Without functions the kernel does not reset its
            # counter: in ``produce`` the reset (leave_queue) costs register spills in the plain kernels.
            table = q.new_zeros(TABLE_WIDTH.value, dtype=torch.int32)
        attend(
            q.device,
            q,
            k,
            v,
            out,
            *(() if extras.bias is None else (extras.bias,)),
            own,
            table,
            extras.seqused_k,
            extras.alibi_slopes,
            extras.sink,
            extras.rng_state,
            lists,
            captured,
            *statistics,
        )
        return out, lse

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, extras: Any) -> ForwardKernels:
        problem = self._problem
        plan = plan_of(problem, self._config)
        variant = forward_variant(problem, plan, extras.bias)
        heads = problem.num_heads_q
        unwritten = UnwrittenSizes(
            heads * problem.head_dim_v // 8,
            heads=heads * (1 + problem.max_logits),
            entropies=heads * problem.entropy,
        )
        table = tile_table(problem, plan, unwritten)
        schedule = schedule_of(problem, plan, table, k, extras.alibi_slopes, extras.bias)
        attend = CachedLaunch(
            forward_kernel,
            persistent_programs(schedule.num_tiles, q.device, variant.PROGRAMS),
            (schedule, numbers_of(problem)),
            (variant,),
            None,
            (*views(problem, variant, q, k, v).values(), bias_view(problem, variant, extras.bias)),
            ForwardPointers,
            maxnreg=launch_registers(variant),
        )
        functions = None
        if problem.mods is not None:
            functions = FunctionTensors(problem.mods, extras, by_keys=False)
        return ForwardKernels(table, attend, functions, plan.queued)


def bias_view(problem: Problem, variant: ForwardVariant, bias: Tensor | None) -> View | None:
    """Return the TMA view of the bias, in blocks of 64 rows and BLOCK_N keys; None without a bias."""
    if bias is None:
        return None
    return cells_view(own_sizes(bias), bias.stride(), WARPGROUP_ROWS, variant.BLOCK_N, problem.dtype)


def views(
    problem: Problem,
    variant: ForwardVariant,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_dtype: torch.dtype | None = None,
) -> dict[str, View]:
    """Return the TMA views of q, k, v and out by the name of the kernel's parameter.

    ``out_dtype`` defaults to the problem's.
    """
    out_dtype = problem.out_dtype if out_dtype is None else out_dtype
    dtype, rows = problem.dtype, WARPGROUP_ROWS
    d, dv = variant.BLOCK_D // variant.D_PARTS, variant.BLOCK_DV // variant.DV_PARTS
    part = dv
    if variant.O_IN_PARTS:
        part = min(2 * O_PART // out_dtype.itemsize, dv)
    elif variant.Q_HOLDS_O and variant.D_PARTS > 1:
        part = d
    out_strides = contiguous_strides(problem.out_shape)
    if problem.varlen:
        view_q = ragged_view(q.shape, q.stride(), rows, d, dtype, variant.PACK)
        view_o = ragged_view(
            problem.out_shape, out_strides, rows, part, out_dtype, variant.PACK, variant.PACKED_HEADS
        )
    elif variant.PACK > 1:
        view_q = packed_view(q.shape, q.stride(), variant.PACK, rows, d, dtype)
        view_o = packed_view(problem.out_shape, out_strides, variant.PACK, rows, part, out_dtype)
    else:
        view_q = dense_view(q.shape, q.stride(), rows, d, dtype)
        view_o = dense_view(problem.out_shape, out_strides, rows, part, out_dtype)
    view_keys = ragged_view if problem.varlen or problem.seqused_k else dense_view
    view_k = view_keys(k.shape, k.stride(), variant.BLOCK_N, d, dtype)
    view_v = view_keys(v.shape, v.stride(), variant.BLOCK_N, dv, dtype)
    return {"q_desc": view_q, "k_desc": view_k, "v_desc": view_v, "o_desc": view_o}
