"""Launchers of attention over a cache and of its combination: from tensors to kernel arguments.

Each is for tensors of one signature; grids, sizes of partial results and constants are settled at its first
call.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flashtile.backends.common.device import capability, multiprocessors
from flashtile.backends.common.kept_kernel import KeptKernel
from flashtile.backends.common.launch import contiguous_strides, largest_divisor, padded, stride_of_two
from flashtile.backends.portable.decode.attend import decode_kernel
from flashtile.backends.portable.decode.combine import combine_given_kernel, combine_kernel
from flashtile.backends.portable.decode.config import NARROW, DecodeConfig
from flashtile.backends.portable.decode.schedule import Layout
from flashtile.backends.portable.decode.steps import Features
from flashtile.decode.problem import FP8, CombineProblem, DecodeProblem
from flashtile.problem import LOG2_E, UNLIMITED

MAX_BLOCK_PAIRS = 1024
BALANCED_ROW_BLOCKS = 16
"""Up to so many row blocks a sequence, the grid is balanced. More are a prefill: work enough for any grid."""

MOST_HEADS_IN_STEP = 8
"""Of 256 bytes a token, they fill two pages of DRAM."""

COMBINE_TILE = 4096
"""Elements of partial results that four warps of a combining program load at a time. Its registers must fit
beside two attention programs of a multiprocessor: it waits there for their end."""
LEAST_SPLITS = 8
"""Parts that it loads at a time at least: in a batch of unequal lengths, some items have many."""
LEAST_PAIRED_WIDTH = 32
TILES_AHEAD = 2
"""As many as are on their way: what is prefetched then follows them without a gap."""
FEW_TILES = 16
"""For each multiprocessor. With so few, the programs of the next call find room beside this one's, if there
is one of them on each; with more, two keep more bytes on their way."""
MOST_KEYS = 256
"""Of a tile."""


def has_dependent_launch(device: torch.device) -> bool:
    """Whether the device knows programmatic dependent launch (compute capability 9.0 and up)."""
    return capability(device) >= (9, 0)


def converts_e4m3(device: torch.device) -> bool:
    """Whether the device converts e4m3 itself (compute capability 8.9 and up)."""
    return capability(device) >= (8, 9)


def as_operands(k_cache: Tensor, v_cache: Tensor, config: DecodeConfig) -> tuple[Tensor, Tensor]:
    """The caches as the kernel is compiled for them.

    FP8 comes in pairs of elements where rows consist of pairs and products take their operands from
    registers; those of more rows take them from shared memory, where what is converted is written anyway.
    """
    if k_cache.dtype != FP8:
        return k_cache, v_cache
    if config.tile.BLOCK_M == NARROW and has_pairs(k_cache) and has_pairs(v_cache):
        return k_cache.view(torch.uint16), v_cache.view(torch.uint16)
    if not converts_e4m3(k_cache.device):
        return k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    return k_cache, v_cache


def has_pairs(cache: Tensor) -> bool:
    """Whether each row of an FP8 cache is a row of aligned pairs."""
    return not (cache.data_ptr() % 2 or cache.shape[-1] % 2 or any(s % 2 for s in cache.stride()[:-1]))


def row_blocks_of(problem: DecodeProblem, config: DecodeConfig) -> int:
    """Row blocks of the longest sequence."""
    return triton.cdiv(problem.seqlen_q * problem.group_size, config.tile.BLOCK_M)


def is_balanced(problem: DecodeProblem, config: DecodeConfig) -> bool:
    """Whether programs share all tiles equally; else an item's splits depend on its own length only."""
    free = problem.num_splits == 0 and problem.split_size == 0
    return free and row_blocks_of(problem, config) <= BALANCED_ROW_BLOCKS


def layout(problem: DecodeProblem, config: DecodeConfig) -> Layout:
    """What the schedule is compiled for."""
    left, right = effective_window(problem)
    pairs = problem.batch * row_blocks_of(problem, config)
    block_pairs = min(MAX_BLOCK_PAIRS, max(16, triton.next_power_of_2(pairs))) if pairs > 1 else 1
    in_step = heads_in_step(problem, config)
    return Layout(
        HAS_LENGTHS=problem.lengths,
        HAS_LEFTPAD=problem.leftpad,
        VARLEN=problem.varlen,
        VARLEN_NEW=problem.varlen_new,
        HAS_LEFT=left != UNLIMITED,
        HAS_RIGHT=right != UNLIMITED,
        BLOCK_M=config.tile.BLOCK_M,
        BLOCK_N=config.tile.BLOCK_N,
        BLOCK_PAIRS=block_pairs,
        ONE_BLOCK=pairs <= block_pairs,
        ONE_ROW_BLOCK=row_blocks_of(problem, config) <= 1,
        ONE_TOKEN=problem.seqlen_q == 1,
        HEADS_IN_STEP=in_step,
        ONE_HEAD_BLOCK=in_step == problem.num_heads_kv,
    )


def grid_size(problem: DecodeProblem, config: DecodeConfig) -> int:
    """Programs of a balanced grid, in teams or not."""
    count = multiprocessors(problem.device)
    items = problem.batch * row_blocks_of(problem, config) * problem.num_heads_kv
    most_tiles = items * triton.cdiv(problem.capacity, config.tile.BLOCK_N)
    few = has_dependent_launch(problem.device) and most_tiles <= FEW_TILES * count
    return count if few else count * config.programs_per_sm


def heads_in_step(problem: DecodeProblem, config: DecodeConfig) -> int:
    """Key/value heads that as many programs read side by side: a divisor of them all.

    With few rows, reading is all that counts. With more, a grid of whole teams would leave programs idle.
    """
    if not is_balanced(problem, config) or config.tile.BLOCK_M > NARROW:
        return 1
    return largest_divisor(problem.num_heads_kv, MOST_HEADS_IN_STEP)


def effective_window(problem: DecodeProblem) -> tuple[int, int]:
    """(left, right), a side that hides no key as unlimited (-1)."""
    return (
        UNLIMITED if problem.window_left >= problem.capacity - 1 else problem.window_left,
        UNLIMITED if problem.window_right >= problem.seqlen_q - 1 else problem.window_right,
    )


def features(
    problem: DecodeProblem,
    config: DecodeConfig,
    *,
    native_e4m3: bool,
    pairs: bool,
    pdl: bool,
    wide: bool,
    aligned: bool,
) -> Features:
    """What the attention kernel is compiled for."""
    balanced = is_balanced(problem, config)
    e4m3 = problem.cache_dtype == FP8
    bound_by_bytes = balanced and config.tile.BLOCK_M == NARROW and problem.dtype.itemsize < 4
    block_d, block_dv = padded(problem.head_dim), padded(problem.head_dim_v)
    if pairs:  # halves of a row are still as wide as a product must be
        block_d, block_dv = max(block_d, LEAST_PAIRED_WIDTH), max(block_dv, LEAST_PAIRED_WIDTH)
    if not aligned:  # as in flashtile.backends.portable.launch.constants
        block_d = block_dv = max(block_d, block_dv)
    return Features(
        PAGE_SIZE=problem.page_size,
        HAS_BATCH_IDX=problem.batch_idx,
        HAS_SOFTCAP=problem.softcap > 0,
        HAS_ALIBI=problem.alibi,
        HAS_SINK=problem.sink,
        HAS_TREE=problem.tree,
        HAS_PRIOR=problem.prior,
        BENT=problem.softcap > 0 or problem.alibi or problem.softmax_scale <= 0 or e4m3,
        DESCALE=problem.descale,
        E4M3=e4m3,
        E4M3_BITS=e4m3 and not native_e4m3,
        PAIRS=pairs,
        BALANCED=balanced,
        SPLIT=balanced or problem.num_splits > 1 or problem.split_size > 0,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        WIDE=wide,
        PDL=pdl,
        AHEAD=TILES_AHEAD if pdl and bound_by_bytes else 0,
        PRECISION=config.precision,
    )


class CombineTile(NamedTuple):
    """Rows that a combining program owns, splits that it loads at a time, and its warps."""

    rows: int
    splits: int
    num_warps: int


def combine_tile(problem: DecodeProblem, config: DecodeConfig, programs_per_item: int | None) -> CombineTile:
    """How parts are combined.

    ``programs_per_item``: of a balanced grid. A few splits leave room for all rows of an item, so that few
    programs do the work, and these are there before attention ends; many are loaded by twice as many warps,
    since a second round would wait for memory once more. None: the tile must depend on nothing that another
    batch could change, since the order of its sums does.
    """
    width = padded(problem.head_dim_v)
    if programs_per_item is None:
        rows = max(1, config.tile.BLOCK_M // 32)
        return CombineTile(rows, max(2, COMBINE_TILE // (rows * width)), 4)
    num_warps = 8 if programs_per_item * width > COMBINE_TILE else 4
    most = max(2, COMBINE_TILE * num_warps // 4 // width)
    splits = min(most, max(LEAST_SPLITS, triton.next_power_of_2(programs_per_item)))
    rows = min(config.tile.BLOCK_M, problem.seqlen_q * problem.group_size)
    return CombineTile(min(triton.next_power_of_2(rows), most // splits), splits, num_warps)


class DecodeLaunch:
    """``(q, k_cache, v_cache, *CacheTensors, return_lse=True) -> (out, lse)`` for one signature."""

    def __init__(self, problem: DecodeProblem, config: DecodeConfig) -> None:
        self._problem = problem
        self._config = config
        self._out_shape = problem.out_shape
        self._out_dtype = problem.out_dtype
        self._out_strides = contiguous_strides(problem.out_shape)
        self._lse_shape = problem.lse_shape
        self._lse_strides = contiguous_strides(problem.lse_shape)
        self._lse_size = math.prod(problem.lse_shape)
        self._device = problem.device
        self._varlen = problem.varlen
        self._empty = 0 in problem.out_shape or problem.batch == 0 or problem.seqlen_q == 0
        self._partials = 0
        """Floats of partial results, rounded up to keep what follows them aligned."""
        self._out_is_as_q = False
        """Whether torch's fastest way to allocate gives what is wanted."""
        self._attend: KeptKernel | None = None
        self._combine: KeptKernel | None = None

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | None,
        cache_leftpad: Tensor | None,
        cache_batch_idx: Tensor | None,
        block_table: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k_new: Tensor | None,
        alibi_slopes: Tensor | None,
        sink: Tensor | None,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
        tree_mask: Tensor | None,
        prior_out: Tensor | None,
        prior_lse: Tensor | None,
        *,
        return_lse: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        if self._empty:
            return self._cleared(q)
        attend, combine, device = self._attend, self._combine, self._device
        if attend is None:
            k_cache, v_cache = as_operands(k_cache, v_cache, self._config)
            attend, combine = self._prepare(
                q, k_cache, v_cache, block_table, alibi_slopes, k_descale, v_descale, tree_mask
            )
            return_lse = True  # the first call compiles, for which Triton wants tensors
            self._out_is_as_q = (q.shape, q.stride(), q.dtype) == (
                self._out_shape, self._out_strides, self._out_dtype
            )  # fmt: skip
        if self._varlen:
            out, lse = self._cleared(q)
        else:
            if self._out_is_as_q:
                out = torch.empty_like(q)
            else:
                out = q.new_empty_strided(self._out_shape, self._out_strides, dtype=self._out_dtype)
            lse = None
            if return_lse:
                lse = q.new_empty_strided(self._lse_shape, self._lse_strides, dtype=torch.float32)
        scratch = None
        lse_to: Tensor | int | None = lse
        if lse is None:  # what is not wanted goes behind the partial results
            scratch = q.new_empty_strided((self._partials + self._lse_size,), (1,), dtype=torch.float32)
            lse_to = scratch.data_ptr() + 4 * self._partials
        elif self._partials:
            scratch = q.new_empty_strided((self._partials,), (1,), dtype=torch.float32)
        attend(
            device, q, k_cache, v_cache, out, lse_to, scratch, cache_seqlens, cache_leftpad, cache_batch_idx,
            block_table, cu_seqlens_q, cu_seqlens_k_new, alibi_slopes, sink, k_descale, v_descale, tree_mask,
            prior_out, prior_lse,
        )  # fmt: skip
        if combine is not None:
            combine(
                device, scratch, out, lse_to, sink, prior_out, prior_lse, cache_seqlens, cache_leftpad,
                cu_seqlens_q, cu_seqlens_k_new,
            )  # fmt: skip
        if self._attend is None and attend.takes_addresses:
            self._attend, self._combine = attend, combine
        return out, lse

    def _cleared(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) for tokens that no program writes, of no sequence or without keys to look at."""
        out = q.new_zeros(self._out_shape, dtype=self._out_dtype)
        return out, q.new_full(self._lse_shape, -torch.inf, dtype=torch.float32)

    def _prepare(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor | None,
        alibi_slopes: Tensor | None,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
        tree_mask: Tensor | None,
    ) -> tuple[KeptKernel, KeptKernel | None]:
        """The attention kernel and, if it leaves parts, the one that combines them."""
        problem, config, device = self._problem, self._config, self._device
        tile = config.tile
        num_m = row_blocks_of(problem, config)
        pairs = problem.batch * num_m
        items = pairs * problem.num_heads_kv
        rows = min(tile.BLOCK_M, problem.seqlen_q * problem.group_size)
        balanced = is_balanced(problem, config)
        split_tiles = triton.cdiv(problem.split_size, tile.BLOCK_N)
        num_splits = max(problem.num_splits, 1)
        if split_tiles:
            num_splits = max(1, triton.cdiv(triton.cdiv(problem.capacity, tile.BLOCK_N), split_tiles))
        programs, teams, in_step = items * num_splits, 0, 1
        if balanced:
            in_step = heads_in_step(problem, config)
            teams = max(1, grid_size(problem, config) // in_step)
            programs = teams * in_step
        slots = 2 * programs if balanced else programs
        static_layout = layout(problem, config)
        static = features(
            problem,
            config,
            native_e4m3=converts_e4m3(device),
            pairs=k_cache.dtype == torch.uint16,
            pdl=has_dependent_launch(device),
            wide=any(extent(cache) >= 2**31 for cache in (k_cache, v_cache)),
            aligned=problem.head_dim_v % 16 == 0 and all(map(is_aligned, (k_cache, v_cache))),
        )
        if num_splits == 1 and not balanced:
            static = static._replace(SPLIT=False)
        left, right = effective_window(problem)
        lengths = (
            pairs, num_m, problem.num_heads_kv, problem.group_size, problem.seqlen_q, problem.seqlen_new,
            problem.total_q, problem.capacity, left, right,
        )  # fmt: skip
        splits = (rows, slots, num_splits, split_tiles)
        q_stride_b = 0 if problem.varlen else q.stride(0)
        strides = (
            q_stride_b, *q.stride()[-3:-1], *k_cache.stride()[:-1], *v_cache.stride()[:-1],
            0 if block_table is None else block_table.stride(0),
            stride_of_two(alibi_slopes), stride_of_two(k_descale), stride_of_two(v_descale),
            0 if tree_mask is None or tree_mask.shape[0] == 1 else tree_mask.stride(0),
        )  # fmt: skip
        scale = problem.softmax_scale
        scalars = (*strides, *lengths, scale, scale * LOG2_E, problem.softcap, problem.num_blocks, *splits)
        # With it, a kernel may start before the one that it follows has ended, and waits for that end itself.
        options: dict[str, Any] = {"launch_pdl": True} if static.PDL else {}
        attend = KeptKernel(decode_kernel, programs, scalars, (static_layout, static), tile, **options)
        if not static.SPLIT:
            return attend, None
        self._partials = round_up(slots * rows * (problem.head_dim_v + 1), 64)
        programs_per_item = triton.cdiv(programs, items) if balanced else None
        combined = combine_tile(problem, config, programs_per_item)
        by_item = not balanced or items < programs
        units = items if by_item else programs - in_step
        blocks = triton.cdiv(rows, combined.rows)
        combine = KeptKernel(
            combine_kernel,
            units * blocks,
            (*lengths, *splits, teams, blocks),
            (
                static_layout, balanced, by_item, static.HAS_SINK, static.HAS_PRIOR, static.PDL,
                problem.head_dim_v, padded(problem.head_dim_v), combined.rows, combined.splits,
            ),
            None,
            num_warps=combined.num_warps,
            **options,
        )  # fmt: skip
        return attend, combine


class CombineLaunch:
    """``(out_partial, lse_partial) -> (out, lse)`` for tensors of one signature."""

    def __init__(self, problem: CombineProblem) -> None:
        self._problem = problem
        self._kernel: KeptKernel | None = None

    def __call__(self, out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
        problem = self._problem
        shape = (problem.batch, problem.seqlen, problem.num_heads, problem.head_dim)
        out = torch.empty(shape, dtype=problem.out_dtype, device=problem.device)
        lse_shape = (problem.batch, problem.num_heads, problem.seqlen)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=problem.device)
        rows = lse.numel()
        if rows == 0:
            return out, lse
        if self._kernel is None:
            width = padded(problem.head_dim)
            splits_at_once = min(16, triton.next_power_of_2(max(problem.num_splits, 1)))
            rows_at_once = max(1, COMBINE_TILE // (splits_at_once * width))
            self._kernel = KeptKernel(
                combine_given_kernel,
                triton.cdiv(rows, rows_at_once),
                (
                    *out_partial.stride()[:-1], *lse_partial.stride(), problem.num_splits, problem.seqlen,
                    problem.num_heads, rows,
                ),
                (problem.head_dim, width, rows_at_once, splits_at_once),
                None,
            )  # fmt: skip
        self._kernel(problem.device, out_partial, lse_partial, out, lse)
        return out, lse


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def is_aligned(cache: Tensor) -> bool:
    """Whether Triton loads rows of the cache asynchronously: pointer and strides that are multiples of 16."""
    return cache.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in cache.stride()[:-1])


def extent(cache: Tensor) -> int:
    """Elements from the first to the last, and room for a tile of rows behind them."""
    size, stride = cache.shape, cache.stride()
    last = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return last + MOST_KEYS * stride[1]
