"""The launch of attention over a cache: tensors to kernel arguments, prepared once for each signature."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
from torch import Tensor

from flashtile.backends.common.config import token_strides
from flashtile.backends.common.device import multiprocessors
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tma import View, packed_view, ragged_view, rows_between_sequences
from flashtile.backends.hopper.config import WARPGROUP_ROWS, padded_columns, score_numbers
from flashtile.backends.hopper.decode.combine import (
    RECORD_WIDTH,
    combine_divided_kernel,
    combine_recorded_kernel,
)
from flashtile.backends.hopper.decode.config import (
    DIVIDED_M_BLOCKS,
    DIVIDED_SLOTS,
    MAX_LOADERS,
    MAX_SHARED,
    HopperDecodeConfig,
    HopperDecodeVariant,
    gathers,
    pack_of,
    packed,
    takes_any_splits,
)
from flashtile.backends.hopper.decode.kernel import (
    GATHER_WARPS,
    CacheRows,
    CacheStrides,
    HopperDecodePointers,
    attend_kernel,
)
from flashtile.backends.hopper.decode.work import CHUNKS, TablePointers, table_kernel
from flashtile.backends.hopper.forward.schedule import Numbers
from flashtile.backends.hopper.work_tiles import FILLERS, TABLE_WIDTH
from flashtile.backends.portable.decode.combine import CombinePointers, combine_kernel
from flashtile.backends.portable.decode.launch import (
    CombineTile,
    DecodeLaunch,
    combine_tile,
    combine_variant,
    layout,
    lengths_of,
    m_blocks_of,
    most_work_tiles,
    num_splits_of,
    outer_strides_of,
    round_up,
    scales_scores,
)
from flashtile.backends.portable.decode.launch import is_stream_k as shares_blocks
from flashtile.backends.portable.decode.schedule import DecodeLengths, Splits
from flashtile.problems.common import UNLIMITED
from flashtile.problems.decode import FP8, CacheTensors, DecodeProblem

FAR = 2**30
"""A left window that hides no key."""
COMBINE_TILES = {4: 2048, 8: 8192}
"""Warps of a combining program of more than FEW_SPLITS parts -> elements of partial results that it loads at
a time."""
COMBINING_PROGRAMS = 4
"""Programs per multiprocessor of the kernel that combines divided work tiles (:func:`divides`). They are
as many as run at a time, because they mostly find nothing to combine."""
MANY_PARTS = 16
"""With more parts per work tile, a combining program has 8 warps instead of 4."""
MIN_SPLITS = 4
"""Minimum of the parts that a combining program loads at a time, if there are several sequences. The planned
number is an average over work tiles, so long sequences have more parts."""
FEW_SPLITS = 8
"""Up to this many parts per work tile are combined one by one (``combine.sum_few_splits``)."""
FEW_SPLITS_TILE = 4096
"""Elements that a combining program of few parts loads at a time. Its 4 warps hold 32 each in a thread. All
combining programs then run at a time, and each reads 16 KB at once."""


def is_stream_k(problem: DecodeProblem, config: HopperDecodeConfig) -> bool:
    """Whether programs share all n_blocks of the :func:`packed` problem equally (stream-K)."""
    return shares_blocks(packed(problem), config)


def copy_rows(problem: DecodeProblem, config: HopperDecodeConfig) -> int:
    """Return the number of keys per TMA load, a power of two. These keys are contiguous in memory.

    For a kernel that copies keys one by one, without TMA, the result is BLOCK_N.
    """
    if gathers(problem):
        return config.tile.BLOCK_N
    return gcd(problem.page_size, config.tile.BLOCK_N)  # BLOCK_N over a dense cache: page_size is 0


def balanced_programs(problem: DecodeProblem, config: HopperDecodeConfig) -> int:
    """Return the number of programs of a stream-K grid."""
    problem = packed(problem)
    work_tiles = problem.batch * m_blocks_of(problem, config) * problem.num_heads_kv
    return config.stream_k_programs(work_tiles, multiprocessors(problem.device))


def divides(problem: DecodeProblem, config: HopperDecodeConfig) -> bool:
    """Whether long work tiles are divided into parts, each of which is an entry of the work queue.

    They are divided unless the call chooses splits, the grid is stream-K, or there are many work tiles
    (:data:`DIVIDED_M_BLOCKS`).
    """
    if not takes_any_splits(problem) or is_stream_k(problem, config):
        return False
    of_heads, programs = packed(problem), multiprocessors(problem.device) * config.programs_per_sm
    m_blocks = m_blocks_of(of_heads, config)
    fills = m_blocks * of_heads.num_heads_kv >= programs  # the longest sequence does
    if problem.mixed:
        fills &= most_work_tiles(of_heads, config) >= MAX_SHARED * programs
    return m_blocks < DIVIDED_M_BLOCKS or (problem.varlen and not fills)


def hopper_decode_variant(problem: DecodeProblem, config: HopperDecodeConfig) -> HopperDecodeVariant:
    stream_k = is_stream_k(problem, config)
    divided = divides(problem, config)
    pack, of_heads = pack_of(problem.group_size), packed(problem)
    work_tiles = problem.batch * m_blocks_of(of_heads, config) * of_heads.num_heads_kv
    consumer, loader, _ = config.registers
    copies = config.tile.BLOCK_N // copy_rows(problem, config)
    loaders = min(copies, MAX_LOADERS)
    fields = layout(of_heads, config, stream_k)
    fields["HAS_LEFT"] = fields["HAS_LEFT"] or problem.leftpad  # padding hides keys as a left window does
    return HopperDecodeVariant(
        **fields,
        PAGE_SIZE=problem.page_size,
        COPY_ROWS=copy_rows(problem, config),
        LOADERS=loaders,
        COPIES=copies // loaders,
        GATHER=gathers(problem),
        LOADER_WARPS=GATHER_WARPS.value if gathers(problem) else 1,
        HAS_BATCH_IDX=problem.batch_idx,
        SOFTCAP=problem.softcap > 0,
        ALIBI=problem.alibi,
        SINK=problem.sink,
        HAS_TREE=problem.tree,
        SCALED_SCORES=scales_scores(problem),
        INVARIANT=problem.invariant,
        E4M3=problem.cache_dtype == FP8,
        DESCALE=problem.descale,
        KEY_SCALES=problem.descale == "block",
        STREAM_K=stream_k,
        DIVIDES=divided,
        SPLIT=stream_k or divided or num_splits_of(problem, config)[0] > 1,
        # Whichever makes fewer partial records. Each costs programs of the combining kernel.
        BY_WORK_TILE=work_tiles < balanced_programs(problem, config),
        PDL=not stream_k,  # only the queue has a kernel before it, which fills its table
        PACK=pack,
        COPIES_Q=WARPGROUP_ROWS % pack != 0,
        KV_GROUP=problem.group_size // pack,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=padded_columns(problem.head_dim),
        BLOCK_DV=padded_columns(problem.head_dim_v),
        WARPGROUPS=config.warpgroups,
        STAGES=config.STAGES,
        Q_STAGES=config.Q_STAGES,
        LAZY_RESCALE=config.LAZY_RESCALE,
        PIN_WAIT=config.PIN_WAIT,
        CONSUMER_REGISTERS=consumer,
        LOADER_REGISTERS=loader,
    )


def recorded_tile(programs: int, work_tiles: int, rows: int, width: int, least: int) -> CombineTile:
    """Return the tile of the kernel that combines partial results of ``programs`` stream-K programs.

    ``rows``: rows of a work tile, rounded up to a power of two. ``width``: columns of a row. ``least``:
    minimum of the parts that a program loads at a time.
    """
    parts = triton.cdiv(programs, work_tiles)
    if programs % work_tiles:  # shares may begin within work tiles, so a work tile may have one part more
        parts += 1
    splits = max(triton.next_power_of_2(parts), least)
    if splits <= FEW_SPLITS:
        return few_splits_tile(splits, rows, width)
    num_warps = 8 if splits > MANY_PARTS else 4
    most = COMBINE_TILES[num_warps] // width
    splits = min(splits, most)
    return CombineTile(min(rows, most // splits), splits, num_warps)


def few_splits_tile(splits: int, rows: int, width: int) -> CombineTile:
    """Return the combining tile of ``splits`` parts, at most FEW_SPLITS, and of at most ``rows`` rows."""
    return CombineTile(min(rows, FEW_SPLITS_TILE // width // splits), splits, 4, one_by_one=True)


def views(
    problem: DecodeProblem, variant: HopperDecodeVariant, q: Tensor, k: Tensor, v: Tensor
) -> tuple[View, View, View]:
    """Return the TMA views of q, k and v."""
    shape = (1, *q.shape) if problem.varlen else q.shape
    strides = (0, *q.stride()) if problem.varlen else q.stride()
    rows = variant.COPY_ROWS
    pack = 1 if variant.COPIES_Q else variant.PACK  # without TMA loads, only the type of the view is used
    return (
        packed_view(shape, strides, pack, WARPGROUP_ROWS, variant.BLOCK_D, problem.dtype),
        ragged_view(k.shape, k.stride(), rows, variant.BLOCK_D, problem.cache_dtype),
        ragged_view(v.shape, v.stride(), rows, variant.BLOCK_DV, problem.cache_dtype),
    )


class HopperDecodeLaunch(DecodeLaunch):
    """The portable launch with Hopper's attention kernel and its combining kernels."""

    def _operands(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        return k_cache, v_cache

    def _prepare(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors) -> tuple[Any, Any]:
        problem, config = packed(self._problem), self._config
        assert isinstance(config, HopperDecodeConfig)
        variant = hopper_decode_variant(self._problem, config)
        lengths = lengths_of(problem, config)
        mask = lengths.mask
        if variant.HAS_LEFT and mask.window_left == UNLIMITED:  # HAS_LEFT is due to padding on the left
            lengths = lengths._replace(mask=mask._replace(window_left=FAR))
        strides = CacheStrides(*token_strides(k_cache), *token_strides(v_cache))
        if variant.COPIES_Q:
            strides = CacheStrides(*strides[:6], *token_strides(q))
        num_splits, split_n_blocks = num_splits_of(problem, config)
        programs = multiprocessors(self._device) * config.programs_per_sm
        work_tiles = lengths.m_blocks * problem.num_heads_kv
        if variant.STREAM_K:
            programs = balanced_programs(self._problem, config)
            # A share leaves parts of at most two work tiles: one that it continues and one that it begins.
            slots = 2 * programs
        elif variant.DIVIDES:
            slots = DIVIDED_SLOTS * programs
        else:
            programs = min(programs, work_tiles * num_splits)
            slots = work_tiles * num_splits if variant.SPLIT else 0
        rows = min(config.tile.BLOCK_M, problem.seqlen_q * problem.group_size)
        splits = Splits(rows, slots, num_splits, split_n_blocks)
        attend = CachedLaunch(
            attend_kernel,
            programs,
            (
                strides,
                lengths,
                splits,
                CacheRows(
                    problem.num_blocks, rows_between_sequences(k_cache), rows_between_sequences(v_cache)
                ),
                outer_strides_of(tensors),
                Numbers(**score_numbers(problem)),
            ),
            (variant,),
            None,
            views(problem, variant, q, k_cache, v_cache),
            HopperDecodePointers,
            launch_pdl=variant.PDL,
            maxnreg=config.registers[-1],  # before consumers and loaders share them
        )
        floats = slots * rows * (problem.head_dim_v + 1)
        table = None
        # Behind the partial results is memory for records or the queue's table (``behind_partials``).
        if variant.STREAM_K:  # a record for each program or, with BY_WORK_TILE, for each work tile
            behind = min(programs, work_tiles) * RECORD_WIDTH.value
        else:
            self._clears = False  # the table's kernel fills what no work tile writes
            self._keeps_table = variant.DIVIDES  # otherwise no later kernel resets the queue's counter
            # A header, an entry for each m_block, and further ones for the parts of divided m_blocks.
            entries = 1 + lengths.m_blocks + (slots // problem.num_heads_kv if variant.DIVIDES else 0)
            behind = entries * TABLE_WIDTH.value
            table = CachedLaunch(
                table_kernel,
                problem.batch + FILLERS * problem.varlen,
                (problem.batch, programs, lengths, splits),
                (variant, TABLE_WIDTH.value, CHUNKS[problem.batch > CHUNKS[0]]),
                None,
                pointers=TablePointers,
            )
        self._partials = round_up(floats + behind, 64)
        combine = None
        if variant.SPLIT:
            combine = self._combining(problem, config, variant, lengths, splits, programs)
        return Attend(attend, table, variant), combine

    def _combining(
        self,
        problem: DecodeProblem,
        config: HopperDecodeConfig,
        variant: HopperDecodeVariant,
        lengths: DecodeLengths,
        splits: Splits,
        programs: int,
    ) -> CachedLaunch:
        """Return the launch that combines the partial results of the attention kernel's ``programs``."""
        width, work_tiles = padded_columns(problem.head_dim_v), lengths.m_blocks * problem.num_heads_kv
        if variant.STREAM_K:
            least = MIN_SPLITS if problem.batch > 1 else 1
            rows = triton.next_power_of_2(splits.partial_rows)
            tile = recorded_tile(programs, work_tiles, rows, width, least)
        elif variant.DIVIDES:
            tile = few_splits_tile(FEW_SPLITS, config.tile.BLOCK_M, width)
        else:  # each work tile has its own number of splits
            tile = combine_tile(problem, config, None)
        row_blocks = triton.cdiv(splits.partial_rows, tile.rows)
        by_work_tile = not variant.STREAM_K or variant.BY_WORK_TILE
        scalars: tuple[Any, ...] = (lengths, splits, row_blocks)
        constants: tuple[Any, ...] = (
            combine_variant(problem, config, tile, variant.STREAM_K, by_work_tile, pdl=True),
        )
        if variant.STREAM_K:
            kernel, grid = combine_recorded_kernel, min(programs, work_tiles) * row_blocks
        elif variant.DIVIDES:
            kernel, grid = combine_divided_kernel, COMBINING_PROGRAMS * multiprocessors(self._device)
            constants += (TABLE_WIDTH.value,)
        else:
            kernel, grid, scalars = combine_kernel, work_tiles * row_blocks, (lengths, splits, 0, row_blocks)
        return CachedLaunch(
            kernel,
            grid,
            scalars,
            constants,
            None,
            pointers=CombinePointers,
            num_warps=tile.num_warps,
            launch_pdl=True,  # programs are placed while attention still runs, and wait for its end
        )


class Attend:
    """Launches the attention kernel.

    If it has a work queue, the kernel that fills the queue's table is launched first. It also fills the rows
    of packed sequences' results that no work tile writes. Calls have the signature of the portable kernel's
    launch.
    """

    def __init__(
        self, kernel: CachedLaunch, fill_table: CachedLaunch | None, variant: HopperDecodeVariant
    ) -> None:
        self._kernel = kernel
        self._fill_table = fill_table
        self._gathers, self._copies_q = variant.GATHER, variant.COPIES_Q
        self._varlen = variant.VARLEN
        self.after_table: Attend = self if fill_table is None else Attend(kernel, None, variant)
        """Launches the attention kernel alone, with a table that an earlier call has filled."""

    @property
    def takes_addresses(self) -> bool:
        return self._kernel.takes_addresses

    def __call__(
        self, device: torch.device, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Any, partial: Any,
        new: None, *tensors: Tensor | None,
    ) -> None:  # fmt: skip
        if self._fill_table is not None:
            self._fill_table(device, *self._of_table(out, lse, partial, CacheTensors(*tensors)))
        self._kernel(device, q, k, v, out, lse, partial, *tensors, *self._copied(q, k, v))

    def stream(self) -> int | None:
        return self._kernel.stream()

    def by_address(self, stream: int, addresses: tuple[Any, ...], further: tuple[Any, ...]) -> None:
        q, k, v, out, lse, partial, _ = addresses
        if self._fill_table is not None:
            self._fill_table.by_address(stream, self._of_table(out, lse, partial, CacheTensors(*further)))
        self._kernel.by_address(stream, (q, k, v, out, lse, partial, *further, *self._copied(q, k, v)))

    def _of_table(self, out: Any, lse: Any, partial: Any, given: CacheTensors) -> TablePointers:
        """Return what the kernel that fills the table takes."""
        if not self._varlen:  # every row is written, and one kernel serves results of all dtypes
            out = lse = None
        return TablePointers(
            out, lse, partial, given.cache_seqlens, given.cache_leftpad, given.cu_seqlens_q,
            given.cu_seqlens_k_new,
        )  # fmt: skip

    def _copied(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Return (k, v, q), each None unless threads copy it: they need its address, TMA has a descriptor."""
        keys = (k, v) if self._gathers else (None, None)
        return (*keys, q if self._copies_q else None)
