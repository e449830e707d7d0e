"""The launch of the Hopper backward, prepared once per signature.

Its kernels are the preprocess, the main kernel with all five matrix products, and a sum of parts if several
programs share a block of keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.common.config import contiguous_strides, has_score_mod, outer_stride
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tma import View, cells_view, dense_view, ragged_view, rows_between_sequences
from flashtile.backends.hopper.backward.bias_gradient import BiasGradient, writes_ds
from flashtile.backends.hopper.backward.config import (
    GRADIENT_PART,
    POSTPROCESS_CHUNK,
    BackwardConfig,
    BackwardVariant,
)
from flashtile.backends.hopper.backward.costs import (
    as_scheduled,
    has_lists,
    key_heads,
    l2_swizzle,
    last_heads,
    resident_heads,
)
from flashtile.backends.hopper.backward.dq_accum import AccumSizes, BackwardScalars
from flashtile.backends.hopper.backward.kernel import BackwardNumbers, backward_kernel
from flashtile.backends.hopper.backward.preprocess import Preprocess, statistics_shape
from flashtile.backends.hopper.backward.schedule import BackwardPointers, BackwardSchedule
from flashtile.backends.hopper.backward.sum_parts import SumParts, shape_of_parts
from flashtile.backends.hopper.bias import SQUARE
from flashtile.backends.hopper.config import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    WARPGROUP_ROWS,
    persistent_programs,
    score_numbers,
    tile_widths,
)
from flashtile.backends.hopper.modifiers import (
    FunctionTensors,
    is_shared,
    modifier_flags,
    modifier_integers,
    own_sizes,
)
from flashtile.backends.hopper.work_tiles import TileTable
from flashtile.problems.attention import OptionalTensors, Problem
from flashtile.problems.common import LOG2_E, UNLIMITED
from flashtile.problems.masks import MAX_CAPTURED

SMALLEST_SCALE = 1e-6
"""Below this softmax_scale, lse in units of raw products would lose precision or overflow."""


def variant_of(problem: Problem, config: BackwardConfig, bias: Tensor | None = None) -> BackwardVariant:
    """Return the variant that the kernels are compiled for."""
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    even = not (problem.varlen or problem.seqused_k) and problem.seqlen_k % config.BLOCK_N == 0
    # A causal mask hides the keys past the end from all rows. The steps of a block mask's list apply no mask.
    even |= right == 0 and not has_lists(problem)
    block_d, block_dv = tile_widths(problem)
    flags = modifier_flags(problem, fixed=True)
    masked = left != UNLIMITED or right != UNLIMITED or not even
    scaled = has_score_mod(problem) or problem.softmax_scale < SMALLEST_SCALE
    if problem.mods is not None:
        size_q, size_kv = problem.mods.block_size or (config.BLOCK_M, config.BLOCK_N)
        flags |= {"MASK_BLOCK": size_kv, "TILES_PER_MASK_BLOCK": size_q // config.BLOCK_M}
        masked |= flags["HAS_CUTS"]
        scaled |= flags["SCORE_MOD"] is not None
    return BackwardVariant(
        VARLEN=problem.varlen,
        SEQUSED=problem.seqused_k,
        HAS_LEFT=left != UNLIMITED,
        HAS_RIGHT=right != UNLIMITED,
        SOFTCAP=problem.softcap > 0,
        ALIBI=problem.alibi,
        HAS_SCORE_MOD=scaled,
        EVEN_N=even,
        MASKED=masked,
        DETERMINISTIC=problem.deterministic,
        GROUPED=problem.group_size > config.HEAD_SPLITS,
        SHARED=config.parts > 1,
        COLUMN_SPLITS=config.COLUMN_SPLITS,
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


def key_tile_table(problem: Problem, block_n: int) -> TileTable | None:
    """Return the tile table of packed sequences, with blocks of keys as work tiles; None for a dense call."""
    if not problem.varlen:
        return None
    return TileTable(problem.batch, problem.seqlen_k, problem.total_k, problem.total_q, block_n)


def schedule_of(
    problem: Problem,
    config: BackwardConfig,
    k: Tensor,
    alibi_slopes: Tensor | None,
    swizzle: int = 1,
    bias: Tensor | None = None,
) -> BackwardSchedule:
    """Return the :class:`BackwardSchedule` of a launch. ``problem`` is from :func:`as_scheduled`."""
    num_blocks = math.ceil(problem.seqlen_k / config.BLOCK_N)
    table = key_tile_table(problem, config.BLOCK_N)
    tiles = problem.batch * num_blocks if table is None else table.capacity
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    return BackwardSchedule(
        num_tiles=tiles * problem.num_heads_kv,
        num_blocks=num_blocks,
        num_heads=problem.num_heads_kv,
        group=problem.group_size,
        head_splits=config.HEAD_SPLITS,
        row_shift=config.ROW_SPLITS.bit_length() - 1,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        batch_rows_k=rows_between_sequences(k),
        window_left=left,
        window_right=right,
        alibi_stride=outer_stride(alibi_slopes),
        swizzle=swizzle,
        **modifier_integers(problem, bias),
    )


def numbers_of(problem: Problem) -> BackwardNumbers:
    """Return the :class:`BackwardNumbers` of a launch.

    With a score_mod, ``scale_log2`` is softmax_scale, without the factor log2(e).
    """
    numbers = BackwardNumbers(scale=problem.softmax_scale, **score_numbers(problem), zero=0.0)
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
    sum_parts: SumParts | None
    dq_semaphores: int
    """Number of semaphores if deterministic: one for each block of padded query rows."""
    functions: FunctionTensors | None
    """Prepares the tensors that score and mask functions read; None without functions."""
    bias_gradient: BiasGradient | None
    """Launch of the bias's gradient; None if the call does not need it."""
    stores_ds: bool
    """Whether ``backward_kernel`` writes the bias's gradient."""
    scalars: BackwardScalars


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
            kernels = self._kernels = self._prepare(dlse, q, k, v, extras)
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
            kernels.products, dout, dlse, q, k, v, out, lse, extras
        )
        dq_semaphores = counters
        if self._problem.deterministic:
            dq_semaphores = q.new_zeros(kernels.dq_semaphores, dtype=torch.int32)
        written = dk, dv
        if kernels.sum_parts is not None:
            written = kernels.sum_parts.allocate(k, v)
        table = lists = captured = None
        if kernels.fill_table is not None:
            table = kernels.fill_table(extras.cu_seqlens_k, extras.cu_seqlens_q, None)
        if kernels.functions is not None:
            # ``_tensors`` must stay alive until the kernel that gets their addresses is launched.
            lists, captured, _tensors = kernels.functions(extras, lse, kernels.products.takes_addresses)
        kernels.products(
            q.device,
            q,
            k,
            v,
            dout,
            neg_lse,
            neg_delta,
            dq_accum,
            dq_accum,
            *written,
            *biases,
            table,
            extras.seqused_k,
            extras.alibi_slopes,
            counters,
            dq_semaphores,
            dq,
            extras.rng_state,
            lists,
            captured,
            kernels.scalars,
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
        variant = variant_of(problem, config, extras.bias)
        scheduled = as_scheduled(problem, config.HEAD_SPLITS)
        swizzle = l2_swizzle(scheduled)
        schedule = schedule_of(scheduled, config, k, extras.alibi_slopes, swizzle, extras.bias)
        programs = persistent_programs(schedule.num_tiles * config.ROW_SPLITS, q.device)
        if not variant.DETERMINISTIC:
            last = last_heads(scheduled, variant.BLOCK_N, programs, config.ROW_SPLITS)
            schedule = schedule._replace(swizzle=last)
        resident = resident_heads(scheduled, config, swizzle, programs)
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
            maxnreg=LAUNCH_REGISTERS[2],
            launch_pdl=True,
        )
        preprocess = Preprocess(
            scheduled,
            has_dlse=dlse is not None,
            lse_factor=LOG2_E if variant.HAS_SCORE_MOD else 1 / problem.softmax_scale,
            counters=2 + 2 * sizes.total_heads,
            resident_heads=resident,
            columns=variant.BLOCK_D,
        )
        return BackwardKernels(
            preprocess,
            key_tile_table(problem, variant.BLOCK_N),
            products,
            SumParts(problem, config.parts) if config.parts > 1 else None,
            heads * sizes.row_blocks,
            None if problem.mods is None else FunctionTensors(problem.mods, extras, by_keys=True),
            BiasGradient(problem, variant) if problem.bias and problem.bias_grad else None,
            variant.STORES_DS,
            BackwardScalars(schedule, sizes, numbers_of(problem)),
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
) -> dict[str, View]:
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
    heads, rows = statistics_shape(problem)
    statistics = View([heads, rows], [rows, 1], [1, block_m], torch.float32, swizzled=False)
    tiles = resident * rows // WARPGROUP_ROWS
    # Each warpgroup adds one half of a block to dQ: half of the columns if the block has 64 rows, 64 of the
    # rows if it has 128.
    columns = d // (2 * WARPGROUP_ROWS // block_m)
    part, chunk = [columns // 4, 256], [d // 8, POSTPROCESS_CHUNK // (8 * d), 64]
    return {
        "q_desc": view_q(q.shape, q.stride(), block_m, d, dtype),
        "k_desc": view_k(k.shape, k.stride(), block_n, d, dtype),
        "v_desc": view_k(v.shape, v.stride(), block_n, dv, dtype),
        "do_desc": view_q(problem.out_shape, contiguous_strides(problem.out_shape), block_m, dv, dtype),
        "neg_lse_desc": statistics,
        "neg_delta_desc": statistics,
        "dq_add_desc": View([tiles * d // 4, 256], [256, 1], part, torch.float32, swizzled=False),
        "dq_accum_desc": View([tiles * d // 8, 8, 64], [512, 64, 1], chunk, torch.float32, swizzled=False),
        "dk_desc": gradient_view(problem, parts, k.shape, GRADIENT_PART),
        "dv_desc": gradient_view(problem, parts, v.shape, GRADIENT_PART),
    }


def gradient_view(problem: Problem, parts: int, shape: tuple[int, ...], columns: int) -> View:
    """Return the view through which the kernel writes the gradient of keys or values of ``shape``.

    Each TMA store writes 64 rows. It writes ``columns`` columns of a 16-bit gradient, and half as many of a
    float32 gradient. Programs that share a block of keys write their partial sums in float32.
    """
    view = ragged_view if problem.varlen or problem.seqused_k else dense_view
    dtype = problem.out_dtype if parts == 1 else torch.float32
    shape = shape_of_parts(shape, parts)
    return view(shape, contiguous_strides(shape), WARPGROUP_ROWS, 2 * columns // dtype.itemsize, dtype)
