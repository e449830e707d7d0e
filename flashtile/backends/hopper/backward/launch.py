"""The launch of the Hopper backward, prepared once per signature.

Its kernels are, in this order: the preprocess; the products, in one kernel of five for head sizes up to 128,
and in two for larger ones (dK and dV, then dQ); the sum of parts, if several programs share a block of keys;
the gradient of a bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.common.config import contiguous_strides, outer_stride, scales_scores
from flashtile.backends.common.counters import zeroed_counters
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tma import View, cells_view, dense_view, ragged_view, rows_between_sequences
from flashtile.backends.hopper.backward.bias_gradient import BiasGradient, writes_ds
from flashtile.backends.hopper.backward.config import (
    GRADIENT_PART,
    POSTPROCESS_CHUNK,
    BackwardConfig,
    BackwardVariant,
    WideBackwardConfig,
)
from flashtile.backends.hopper.backward.costs import (
    as_scheduled,
    key_heads,
    l2_swizzle,
    last_heads,
    resident_heads,
    sorted_by_cost,
)
from flashtile.backends.hopper.backward.dq_accum import AccumSizes, BackwardScalars
from flashtile.backends.hopper.backward.halves_dq import halves_dq_kernel
from flashtile.backends.hopper.backward.kernel import BackwardNumbers, backward_kernel
from flashtile.backends.hopper.backward.preprocess import Preprocess, statistics_shape, statistics_view
from flashtile.backends.hopper.backward.schedule import BackwardPointers, BackwardSchedule
from flashtile.backends.hopper.backward.sum_parts import SumParts, shape_of_parts
from flashtile.backends.hopper.backward.wide_dkv import DkvPointers, dkv_kernel
from flashtile.backends.hopper.backward.wide_dq import DqPointers, dq_kernel
from flashtile.backends.hopper.bias import SQUARE
from flashtile.backends.hopper.config import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    WARPGROUP_ROWS,
    has_lists,
    padded_columns,
    persistent_programs,
    score_numbers,
    tile_widths,
)
from flashtile.backends.hopper.forward import launch as forward
from flashtile.backends.hopper.forward.config import ForwardVariant
from flashtile.backends.hopper.forward.rounds import ForwardPlan, plan_of
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
from flashtile.problems.masks import MAX_CAPTURED

SMALLEST_SCALE = 1e-6
"""Below this softmax_scale, lse in units of raw products would lose precision or overflow."""


def backward_variant(problem: Problem, config: BackwardConfig, bias: Tensor | None = None) -> BackwardVariant:
    """Return the variant that the kernels are compiled for."""
    mask = problem.for_kernels(problem.seqlen_q, problem.seqlen_k)
    even = not (problem.varlen or problem.seqused_k) and problem.seqlen_k % config.BLOCK_N == 0
    # A causal mask hides the keys past the end from all rows. The steps of a block mask's list apply no mask.
    even |= mask.window_right == 0 and not has_lists(problem)
    block_d, block_dv = tile_widths(problem)
    flags = modifier_flags(problem, fixed=True)
    masked = any(mask.constants.values()) or not even
    scaled = scales_scores(problem) or problem.softmax_scale < SMALLEST_SCALE
    if problem.mods is not None:  # without a block mask, a block of it is one of the kernel
        size_q, size_kv = problem.mods.block_size or (config.BLOCK_M, config.BLOCK_N)
        flags |= {"MASK_BLOCK": size_kv, "TILES_PER_MASK_BLOCK": size_q // config.BLOCK_M}
        masked |= flags["HAS_CUTS"]
        scaled |= flags["SCORE_MOD"] is not None
    return BackwardVariant(
        VARLEN=problem.varlen,
        SEQUSED=problem.seqused_k,
        **mask.constants,
        SOFTCAP=problem.softcap > 0,
        ALIBI=problem.alibi,
        SCALED_SCORES=scaled,  # if not, scores are scaled products, which may start at -lse
        EVEN_N=even,
        MASKED=masked,
        DETERMINISTIC=problem.deterministic and not config.ONE_BLOCK,
        ONE_BLOCK=config.ONE_BLOCK,
        GROUPED=problem.group_size > config.HEAD_SPLITS,  # if all heads are divided, each is alone
        SHARED=config.parts > 1,
        COLUMN_SPLITS=config.COLUMN_SPLITS,
        EXTRA_Q=config.EXTRA_Q,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        STAGES=config.STAGES,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[2],
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        SEQUENCES_FIRST=is_shared(problem, bias) and not problem.varlen,
        STORES_DS=bias is not None and writes_ds(problem, bias),
        **flags,
    )


@dataclass(frozen=True)
class DqVariant(ForwardVariant):
    """Constants that the kernel of dQ is compiled for."""

    HEAD_DIM: int
    HEAD_DIM_V: int


def dq_variant(problem: Problem, plan: ForwardPlan) -> DqVariant:
    """Return the variant of the kernel of dQ for head sizes over 128, which has the forward's schedule."""
    # lse contains the sink, so P needs nothing else of it; its own gradient comes from the preprocess kernel.
    variant = replace(forward.forward_variant(problem, plan), SINK=False)
    return DqVariant(**vars(variant), HEAD_DIM=problem.head_dim, HEAD_DIM_V=problem.head_dim_v)


def key_tile_table(problem: Problem, config: BackwardConfig) -> TileTable | None:
    """Return the tile table of packed sequences, with blocks of keys as work tiles; None for a dense call."""
    if not problem.varlen:
        return None
    heads, d, dv = problem.num_heads_kv * config.parts, problem.head_dim, problem.head_dim_v
    sizes = UnwrittenSizes(heads * d // 8, heads * dv // 8, problem.num_heads_q * d // 8)
    return TileTable(
        problem.batch, problem.seqlen_k, problem.total_k, problem.total_q, config.BLOCK_N, sizes,
        by_cost=sorted_by_cost(problem, config),
    )  # fmt: skip


def schedule_of(
    problem: Problem,
    config: BackwardConfig,
    table: TileTable | None,
    k: Tensor,
    alibi_slopes: Tensor | None,
    swizzle: int = 1,
    bias: Tensor | None = None,
) -> BackwardSchedule:
    """Return the :class:`BackwardSchedule` of a launch.

    ``problem`` is from :func:`as_scheduled`, and ``table`` from :func:`key_tile_table`.
    """
    num_blocks = math.ceil(problem.seqlen_k / config.BLOCK_N)
    tiles = problem.batch * num_blocks if table is None else table.capacity
    return BackwardSchedule(
        num_tiles=tiles * problem.num_heads_kv,
        num_blocks=num_blocks,
        num_heads=problem.num_heads_kv,
        group=problem.group_size,
        head_splits=config.HEAD_SPLITS,
        row_shift=config.ROW_SPLITS.bit_length() - 1,  # log2 of a power of two
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        batch_rows_k=rows_between_sequences(k),
        mask=problem.for_kernels(problem.seqlen_q, problem.seqlen_k),
        alibi_stride=outer_stride(alibi_slopes),
        swizzle=swizzle,
        **modifier_integers(problem, bias),
    )


def numbers_of(problem: Problem) -> BackwardNumbers:
    """Return the :class:`BackwardNumbers` of a launch.

    With a score_mod, ``scale_log2`` is softmax_scale, without the factor log2(e).
    """
    numbers = BackwardNumbers(scale=problem.softmax_scale, **score_numbers(problem), zero=0.0)
    # A score_mod takes scores in natural units; the kernel multiplies its result by log2(e).
    if problem.mods is not None and problem.mods.score_mod:
        numbers = numbers._replace(scale_log2=problem.softmax_scale)
    if problem.dropout_p:
        keep = 1 - problem.dropout_p
        numbers = numbers._replace(scale=numbers.scale / keep, keep_scale=1 / keep, keep=keep)
    return numbers


class BackwardKernels(NamedTuple):
    """The prepared launches of one signature, in launch order, and the values that they take."""

    preprocess: Preprocess
    fill_table: TileTable | None
    products: CachedLaunch
    """``backward_kernel``, or ``dkv_kernel`` if there is a kernel of dQ."""
    dq: forward.ForwardKernels | None
    """The kernel of dQ for head sizes over 128, whose work tiles are those of the forward."""
    sum_parts: SumParts | None
    functions: FunctionTensors | None
    """Prepares the tensors that score and mask functions read; None without functions."""
    last: CachedLaunch
    """The last kernel of products: once it is compiled, all take addresses."""
    dq_semaphores: int = 0
    """Number of semaphores if deterministic: one for each block of padded query rows."""
    bias_gradient: BiasGradient | None = None
    """Launch of the bias's gradient; None if the call does not need it."""
    stores_ds: bool = False
    """Whether ``backward_kernel`` writes the bias's gradient."""
    scalars: BackwardScalars | None = None


class HopperBackwardLaunch:
    """Launch for tensors of one signature:
    ``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink, dbias)``.

    With score or mask functions, None follows for each of MAX_CAPTURED captured tensors.
    """

    def __init__(self, problem: Problem, config: BackwardConfig) -> None:
        self._problem = problem
        self._config = config
        self._kernels: BackwardKernels | None = None

    def __call__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        extras: OptionalTensors,
    ) -> tuple[Tensor | None, ...]:
        kernels = self._kernels
        if kernels is None:  # assigned only when complete, since other threads may read it
            prepare = self._prepare_wide if self._config.wide else self._prepare
            kernels = self._kernels = prepare(dlse, q, k, v, extras)
        bias, dbias = extras.bias, None
        biases: tuple[Tensor, ...] = ()
        if bias is not None:
            biases = (bias,)
            if kernels.bias_gradient is not None:
                dbias = kernels.bias_gradient.allocate(bias)
                if kernels.stores_ds:
                    biases = (bias, dbias)
        # ``workspace`` must stay alive until all kernels that get addresses of its parts are launched.
        dout, dq, dk, dv, dsink, workspace, neg_lse, neg_delta, counters, dq_accum = kernels.preprocess(
            kernels.last, dout, dlse, q, k, v, out, lse, extras
        )
        written = dk, dv  # by the products: the gradients, or their float32 parts
        if kernels.sum_parts is not None:
            written = kernels.sum_parts.allocate(k, v)
        device, seqused_k, alibi_slopes = q.device, extras.seqused_k, extras.alibi_slopes
        table = lists = captured = None
        if kernels.fill_table is not None:
            unwritten = Unwritten(*written, dq if kernels.dq is None else None)
            table = kernels.fill_table(extras.cu_seqlens_k, extras.cu_seqlens_q, None, unwritten)
        if kernels.functions is not None:
            # ``_tensors`` must stay alive until the kernel that gets their addresses is launched.
            lists, captured, _tensors = kernels.functions(extras, lse, kernels.products.takes_addresses)
        if kernels.dq is None:
            dq_semaphores = counters  # not read unless deterministic, but a pointer
            if kernels.dq_semaphores:
                dq_semaphores = q.new_zeros(kernels.dq_semaphores, dtype=torch.int32)
            # dq_accum twice: as halves of dQ to add to, and as chunks to load and zero.
            halves = (dq,) if self._config.ONE_BLOCK else (dq_accum, dq_accum)
            kernels.products(
                device, q, k, v, dout, neg_lse, neg_delta, *halves, *written, *biases, table,
                seqused_k, alibi_slopes, counters, dq_semaphores, dq, extras.rng_state, lists, captured,
                kernels.scalars,
            )  # fmt: skip
        else:
            kernels.products(
                device, q, k, v, dout, neg_lse, neg_delta, *written, table, seqused_k, alibi_slopes, counters,
                lists, captured,
            )  # fmt: skip
            fill_table, compute_dq, functions, queued = kernels.dq
            table = None
            if fill_table is not None:
                table = fill_table(extras.cu_seqlens_q, extras.cu_seqlens_k, seqused_k, Unwritten(dq))
            if functions is not None:
                lists, captured, _tensors = functions(extras, lse, compute_dq.takes_addresses)
            if queued:  # the kernel resets the counter (leave_queue)
                table = zeroed_counters(device, TABLE_WIDTH.value)
            compute_dq(
                device, q, k, v, dout, dq, neg_lse, neg_delta, table, seqused_k, alibi_slopes, lists, captured
            )
        if kernels.sum_parts is not None:
            kernels.sum_parts(*written, dk, dv)
        if kernels.functions is not None:
            return dq, dk, dv, dsink, None, *(None,) * MAX_CAPTURED
        if kernels.bias_gradient is not None and dbias is not None:
            kernels.bias_gradient(dbias, dout, q, k, v, workspace, extras)
        return dq, dk, dv, dsink, dbias

    def _prepare(self, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, extras: Any) -> BackwardKernels:
        problem, config = self._problem, self._config
        variant = backward_variant(problem, config, extras.bias)
        # Heads of the schedule, their number and the room for them in dq_accum are those of ``scheduled``;
        # views and numbers are those of the call.
        scheduled = as_scheduled(problem, config.HEAD_SPLITS)
        swizzle = l2_swizzle(scheduled)
        table = key_tile_table(problem, config)
        schedule = schedule_of(scheduled, config, table, k, extras.alibi_slopes, swizzle, extras.bias)
        programs = persistent_programs(schedule.num_tiles * config.ROW_SPLITS, q.device)
        # The field ``swizzle`` has two meanings (``schedule.head_and_block``).
        if not variant.DETERMINISTIC:
            last = last_heads(scheduled, variant.BLOCK_N, programs, config.ROW_SPLITS)
            schedule = schedule._replace(swizzle=last)
        resident = 0 if config.ONE_BLOCK else resident_heads(scheduled, config, swizzle, programs)
        heads, rows = statistics_shape(problem)
        sizes = AccumSizes(
            row_blocks=rows // variant.BLOCK_M,
            total_heads=key_heads(scheduled),
            resident_heads=resident,
            row_vectors=problem.head_dim // 8,
        )
        products = CachedLaunch(
            backward_kernel,
            programs,
            (),
            (variant,),
            None,
            (
                *views(problem, variant, q, k, v, resident * scheduled.group_size, config.parts).values(),
                *bias_views(problem, variant, extras.bias),
            ),
            BackwardPointers,
            maxnreg=LAUNCH_REGISTERS[2],  # before warp_specialize shares them out
            launch_pdl=True,  # programs start while the preprocess kernel ends (``wait_for_preprocess``)
        )
        preprocess = Preprocess(
            scheduled,
            has_dlse=dlse is not None,
            lse_factor=LOG2_E if variant.SCALED_SCORES else 1 / problem.softmax_scale,
            counters=2 + 2 * sizes.total_heads,  # those of ``dq_accum.accum_of``
            resident_heads=resident,
            # The columns past head_dim as well: dQ is added in whole tiles.
            columns=0 if config.ONE_BLOCK else variant.BLOCK_D,
        )
        return BackwardKernels(
            preprocess=preprocess,
            fill_table=table,
            products=products,
            dq=None,
            sum_parts=SumParts(problem, config.parts) if config.parts > 1 else None,
            functions=None if problem.mods is None else FunctionTensors(problem.mods, extras, by_keys=True),
            last=products,
            dq_semaphores=heads * sizes.row_blocks if variant.DETERMINISTIC else 0,
            bias_gradient=BiasGradient(problem, variant) if problem.bias and problem.bias_grad else None,
            stores_ds=variant.STORES_DS,
            scalars=BackwardScalars(schedule, sizes, numbers_of(problem)),
        )

    def _prepare_wide(
        self, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, extras: Any
    ) -> BackwardKernels:
        """Return the kernels for head sizes over 128. Both sum in registers only, so they are deterministic
        without an order of additions."""
        problem, config = self._problem, self._config
        assert isinstance(config, WideBackwardConfig)
        # The two kernels divide the call in different ways: by blocks of keys, and as the forward by blocks
        # of rows.
        plan = plan_of(problem, config.rows, "dq")
        dkv, dq = replace(backward_variant(problem, config), DETERMINISTIC=False), dq_variant(problem, plan)
        of_dkv = wide_views(problem, dkv, config.parts, q, k, v)
        of_dq = wide_views(problem, dkv, config.parts, q, k, v, of_dq=True)
        numbers = numbers_of(problem)
        scheduled = as_scheduled(problem, config.HEAD_SPLITS)
        unwritten = UnwrittenSizes(problem.num_heads_q * problem.head_dim // 8)
        table_k, table_q = key_tile_table(problem, config), forward.tile_table(problem, plan, unwritten)
        blocks_k = schedule_of(scheduled, config, table_k, k, extras.alibi_slopes)
        blocks_q = forward.schedule_of(problem, plan, table_q, k, extras.alibi_slopes)
        per_block = config.ROW_SPLITS * dkv.COLUMN_SPLITS  # work tiles of a block of keys of a head
        programs = persistent_programs(blocks_k.num_tiles * per_block, q.device)
        last = last_heads(scheduled, dkv.BLOCK_N, programs, per_block)
        compute_dkv = CachedLaunch(
            dkv_kernel,
            programs,
            (blocks_k._replace(swizzle=last), numbers),
            (dkv,),
            None,
            tuple(view for name, view in of_dkv.items() if name != "dq_desc"),
            DkvPointers,
            maxnreg=LAUNCH_REGISTERS[2],
        )
        compute_dq = CachedLaunch(
            dq_kernel if dkv.COLUMN_SPLITS == 1 else halves_dq_kernel,
            persistent_programs(blocks_q.num_tiles, q.device),
            (statistics_shape(problem)[1], blocks_q, numbers),
            (dq,),
            None,
            tuple(of_dq[name] for name in ("q_desc", "k_desc", "v_desc", "do_desc", "dq_desc")),
            DqPointers,
            maxnreg=LAUNCH_REGISTERS[2],
        )
        of_keys = of_queries = None
        if problem.mods is not None:
            of_keys = FunctionTensors(problem.mods, extras, by_keys=True)
            of_queries = FunctionTensors(problem.mods, extras, by_keys=False)
        return BackwardKernels(
            # lse in log2 units, because no product starts at it, and no dq_accum.
            preprocess=Preprocess(problem, dlse is not None, LOG2_E, counters=1),
            fill_table=table_k,
            products=compute_dkv,
            dq=forward.ForwardKernels(table_q, compute_dq, of_queries, plan.queued),
            sum_parts=SumParts(problem, config.parts) if config.parts > 1 else None,
            functions=of_keys,
            last=compute_dq,
        )


def bias_views(
    problem: Problem, variant: BackwardVariant, bias: Tensor | None
) -> tuple[View | None, View | None]:
    """Return the TMA views of (the bias, its gradient). A view is None if the kernel does not need it."""
    if bias is None:
        return None, None
    block = SQUARE.value, SQUARE.value
    gradient = None
    if variant.STORES_DS:
        gradient = cells_view(bias.shape, contiguous_strides(bias.shape), *block, problem.dtype)
    return cells_view(own_sizes(bias), bias.stride(), *block, problem.dtype), gradient


def views(
    problem: Problem, variant: BackwardVariant, q: Tensor, k: Tensor, v: Tensor, resident: int, parts: int
) -> dict[str, View | None]:
    """Return the TMA view of each tensor, by the name of the kernel's parameter.

    Args:
        resident: number of query heads for which ``dq_accum`` has room.
        parts: number of partial sums of dK and dV.
    """
    dtype = problem.dtype
    d, dv = variant.BLOCK_D, variant.BLOCK_DV
    block_m, block_n = variant.BLOCK_M, variant.BLOCK_N
    view_q = ragged_view if problem.varlen else dense_view
    view_k = ragged_view if problem.varlen or problem.seqused_k else dense_view
    statistics = statistics_view(problem, block_m)
    tiles = resident * statistics_shape(problem)[1] // WARPGROUP_ROWS  # of 64 rows; rows are padded to 128
    # Each warpgroup adds one half of a block to dQ: half of the columns if the block has 64 rows, 64 of the
    # rows if it has 128.
    columns = d // (2 * WARPGROUP_ROWS // block_m)
    # Both views are of the order of registers (``dq_accum.in_register_order``): plain, without a swizzle.
    # A chunk is a quarter of a tile or less (``dq_accum.convert_part``).
    part, chunk = [columns // 4, 256], [d // 8, min(POSTPROCESS_CHUNK // (8 * d), 2), 64]
    halves: View | None = View([tiles * d // 4, 256], [256, 1], part, torch.float32, swizzled=False)
    accum: View | None = View([tiles * d // 8, 8, 64], [512, 64, 1], chunk, torch.float32, swizzled=False)
    if variant.ONE_BLOCK:
        halves, accum = view_q(q.shape, contiguous_strides(q.shape), WARPGROUP_ROWS, columns, dtype), None
    return {
        "q_desc": view_q(q.shape, q.stride(), block_m, d, dtype),
        "k_desc": view_k(k.shape, k.stride(), block_n, d, dtype),
        "v_desc": view_k(v.shape, v.stride(), block_n, dv, dtype),
        "do_desc": view_q(problem.out_shape, contiguous_strides(problem.out_shape), block_m, dv, dtype),
        "neg_lse_desc": statistics,
        "neg_delta_desc": statistics,
        "dq_add_desc": halves,
        "dq_accum_desc": accum,
        "dk_desc": gradient_view(problem, parts, k.shape, min(GRADIENT_PART, d)),
        "dv_desc": gradient_view(problem, parts, v.shape, min(GRADIENT_PART, dv)),
    }


def gradient_view(problem: Problem, parts: int, shape: tuple[int, ...], columns: int) -> View:
    """Return the view through which the kernel writes the gradient of keys or values of ``shape``.

    Each TMA store writes 64 rows. It writes ``columns`` columns of a 16-bit gradient, and half as many of a
    float32 gradient. Programs that share a block of keys write their partial sums in float32.
    """
    view = ragged_view if problem.varlen or problem.seqused_k else dense_view
    # Rows per store are those of a warpgroup; the bytes of a row are the same for both dtypes.
    dtype = problem.out_dtype if parts == 1 else torch.float32
    shape = shape_of_parts(shape, parts)
    return view(shape, contiguous_strides(shape), WARPGROUP_ROWS, 2 * columns // dtype.itemsize, dtype)


def gradient_columns(head_dim: int) -> int:
    """Return the columns of a gradient that one TMA store writes, for head sizes up to 256.

    These are all columns, or 64 for head sizes of 129 to 192.
    """
    return GRADIENT_PART if 128 < head_dim <= 192 else padded_columns(head_dim)


def wide_views(
    problem: Problem, dkv: BackwardVariant, parts: int, q: Tensor, k: Tensor, v: Tensor, of_dq: bool = False
) -> dict[str, View]:
    """Return the TMA view of each tensor, by the name of the kernels' parameter.

    Blocks have 64 rows. With COLUMN_SPLITS they have half of the columns, and blocks of the tensors that a
    work tile walks have 32 rows: k and v in the kernel of dQ (``of_dq``), else q and dO.
    """
    dtype, resident = problem.dtype, WARPGROUP_ROWS
    rows_q, rows_k = (resident, dkv.BLOCK_M) if of_dq else (dkv.BLOCK_M, resident)
    block_d, block_dv = dkv.BLOCK_D // dkv.COLUMN_SPLITS, dkv.BLOCK_DV // dkv.COLUMN_SPLITS
    dk_columns, dv_columns = block_d, block_dv
    if dkv.COLUMN_SPLITS == 1:
        dk_columns, dv_columns = gradient_columns(problem.head_dim), gradient_columns(problem.head_dim_v)
    view_q = ragged_view if problem.varlen else dense_view
    view_k = ragged_view if problem.varlen or problem.seqused_k else dense_view
    statistics = statistics_view(problem, rows_q)
    return {
        "q_desc": view_q(q.shape, q.stride(), rows_q, block_d, dtype),
        "k_desc": view_k(k.shape, k.stride(), rows_k, block_d, dtype),
        "v_desc": view_k(v.shape, v.stride(), rows_k, block_dv, dtype),
        "do_desc": view_q(problem.out_shape, contiguous_strides(problem.out_shape), rows_q, block_dv, dtype),
        "neg_lse_desc": statistics,
        "neg_delta_desc": statistics,
        "dq_desc": view_q(q.shape, contiguous_strides(q.shape), resident, block_d, dtype),
        "dk_desc": gradient_view(problem, parts, k.shape, dk_columns),
        "dv_desc": gradient_view(problem, parts, v.shape, dv_columns),
    }
