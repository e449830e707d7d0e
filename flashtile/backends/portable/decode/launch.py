"""Launchers of attention over a cache and of its combination: from tensors to kernel arguments.

Each is for tensors of one signature; grids, sizes of partial results and constants are worked out at its
first call.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flashtile.backends.common.device import capability, multiprocessors
from flashtile.backends.common.kept_kernel import KeptKernel
from flashtile.backends.common.launch import allocator, largest_divisor, outer_stride, padded
from flashtile.backends.portable.decode.attend import decode_kernel
from flashtile.backends.portable.decode.combine import (
    CombineGivenVariant,
    CombineVariant,
    GivenStrides,
    combine_given_kernel,
    combine_kernel,
)
from flashtile.backends.portable.decode.config import (
    NARROW,
    DecodeConfig,
    bytes_to_read,
    operand_bytes,
)
from flashtile.backends.portable.decode.results import Splits
from flashtile.backends.portable.decode.schedule import Lengths
from flashtile.backends.portable.decode.steps import Strides, Variant
from flashtile.problems.common import LOG2_E, UNLIMITED
from flashtile.problems.decode import FP8, CacheTensors, CombineProblem, DecodeProblem

MAX_SCAN_BLOCK = 1024
MAX_HEADS_PER_TEAM = 8
"""Of 256 bytes a token, they fill two pages of DRAM."""

COMBINE_TILE = 4096
"""Elements of partial results that four warps of a combining program load at a time. Its registers must fit
beside two attention programs of a multiprocessor: it waits there for their end."""
LEAST_SPLITS = 8
"""Parts that it loads at a time at least: in a batch of unequal lengths, some work tiles have many."""
LEAST_PAIRED_WIDTH = 32
PREFETCH = 2
"""n_blocks: as many as are on their way: what is prefetched then follows them without a gap."""
FEW_N_BLOCKS = 4
"""For each multiprocessor. With so few, of as few work tiles, the programs of the next call find room beside
this one's, if there is one of them on each; with more, two keep more bytes on their way."""
MAX_BLOCK_N = 256
LEAST_UNIFIED_N_BLOCKS = 8
"""Of the longest sequence: with fewer, the check of a work tile costs more than a unified maximum saves."""


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
    """Whether each row of an FP8 cache is a row of aligned pairs.

    Of its address a signature knows only whether 16 divides it, so the launch must ask for no less.
    """
    return not (cache.data_ptr() % 16 or cache.shape[-1] % 2 or any(s % 2 for s in cache.stride()[:-1]))


def m_blocks_of(problem: DecodeProblem, config: DecodeConfig) -> int:
    """m_blocks of the longest sequence."""
    return -(-problem.seqlen_q * problem.group_size // config.tile.BLOCK_M)  # triton.cdiv takes 2 us


def is_balanced(problem: DecodeProblem, config: DecodeConfig) -> bool:
    """Whether programs share all n_blocks equally; else the splits of a work tile depend on its own length
    only."""
    if problem.num_splits != 0 or problem.split_size != 0:
        return False
    m_blocks = m_blocks_of(problem, config)
    most = problem.total_q * problem.group_size // config.tile.BLOCK_M + problem.batch
    work_tiles = min(problem.batch * m_blocks, most) * problem.num_heads_kv
    columns = problem.head_dim + problem.head_dim_v
    tile_bytes = bytes_to_read(keys_seen(problem), columns, operand_bytes(problem))
    even = not (problem.page_size or problem.lengths or problem.leftpad or problem.varlen)
    return config.balances(m_blocks, work_tiles, multiprocessors(problem.device), tile_bytes, even)


def keys_seen(problem: DecodeProblem) -> int:
    """By the rows of a work tile, at most."""
    left, _ = effective_window(problem)
    return problem.capacity if left == UNLIMITED else min(problem.capacity, left + problem.seqlen_q)


def layout(problem: DecodeProblem, config: DecodeConfig) -> dict[str, Any]:
    """The fields of :class:`schedule.Layout`, by name."""
    left, right = effective_window(problem)
    m_blocks = problem.batch * m_blocks_of(problem, config)
    scan = min(MAX_SCAN_BLOCK, max(16, triton.next_power_of_2(m_blocks))) if m_blocks > 1 else 1
    heads = heads_per_team(problem, config)
    return {
        "HAS_LENGTHS": problem.lengths,
        "HAS_LEFTPAD": problem.leftpad,
        "VARLEN": problem.varlen,
        "VARLEN_NEW": problem.varlen_new,
        "HAS_LEFT": left != UNLIMITED,
        "HAS_RIGHT": right != UNLIMITED,
        "BLOCK_M": config.tile.BLOCK_M,
        "BLOCK_N": config.tile.BLOCK_N,
        "SCAN_BLOCK": scan,
        "ONE_SCAN": m_blocks <= scan,
        "ONE_M_BLOCK": m_blocks_of(problem, config) <= 1,
        "ONE_TOKEN": problem.seqlen_q == 1,
        "HEADS_PER_TEAM": heads,
        "ONE_TEAM": heads == problem.num_heads_kv,
    }


def grid_size(problem: DecodeProblem, config: DecodeConfig) -> int:
    """Programs of a balanced grid, in teams or not."""
    count = multiprocessors(problem.device)
    work_tiles = problem.batch * m_blocks_of(problem, config) * problem.num_heads_kv
    most_n_blocks = work_tiles * -(-problem.capacity // config.tile.BLOCK_N)
    few = work_tiles <= count and most_n_blocks <= FEW_N_BLOCKS * count
    few = few and has_dependent_launch(problem.device)
    return count if few else count * config.programs_per_sm


def heads_per_team(problem: DecodeProblem, config: DecodeConfig) -> int:
    """Key/value heads that as many programs read side by side: a divisor of them all.

    With few rows, reading is all that counts. With more, a grid of whole teams would leave programs idle.
    """
    if not is_balanced(problem, config) or config.tile.BLOCK_M > NARROW:
        return 1
    return largest_divisor(problem.num_heads_kv, MAX_HEADS_PER_TEAM)


def effective_window(problem: DecodeProblem) -> tuple[int, int]:
    """(left, right), a side that hides no key as unlimited (-1)."""
    return (
        UNLIMITED if problem.window_left >= problem.capacity - 1 else problem.window_left,
        UNLIMITED if problem.window_right >= problem.seqlen_q - 1 else problem.window_right,
    )


def softmax_max_kind(problem: DecodeProblem, config: DecodeConfig) -> str:
    """Whether scores are taken over the caller's ``softmax_max``, "number" or "head", or "none"."""
    if problem.capacity < LEAST_UNIFIED_N_BLOCKS * config.tile.BLOCK_N:
        return "none"
    if problem.softmax_max_by_head:
        return "head"
    return "none" if problem.softmax_max is None else "number"


def variant_of(
    problem: DecodeProblem,
    config: DecodeConfig,
    *,
    native_e4m3: bool,
    pairs: bool,
    pdl: bool,
    wide: bool,
    aligned: bool,
) -> Variant:
    balanced = is_balanced(problem, config)
    e4m3 = problem.cache_dtype == FP8
    bound_by_bytes = balanced and config.tile.BLOCK_M == NARROW and problem.dtype.itemsize < 4
    block_d, block_dv = padded(problem.head_dim), padded(problem.head_dim_v)
    if pairs:  # halves of a row are still as wide as a product must be
        block_d, block_dv = max(block_d, LEAST_PAIRED_WIDTH), max(block_dv, LEAST_PAIRED_WIDTH)
    if not aligned:  # as in flashtile.backends.portable.launch
        block_d = block_dv = max(block_d, block_dv)
    return Variant(
        **layout(problem, config),
        PAGE_SIZE=problem.page_size,
        HAS_BATCH_IDX=problem.batch_idx,
        HAS_SOFTCAP=problem.softcap > 0,
        HAS_ALIBI=problem.alibi,
        HAS_SINK=problem.sink,
        HAS_TREE=problem.tree,
        HAS_PRIOR=problem.prior,
        HAS_QV=problem.qv,
        HAS_SCORE_MOD=problem.softcap > 0 or problem.alibi or problem.softmax_scale <= 0 or e4m3,
        SOFTMAX_MAX=softmax_max_kind(problem, config),
        DESCALE=problem.descale,
        E4M3=e4m3,
        E4M3_BITS=e4m3 and not native_e4m3,
        E4M3_PAIRS=pairs,
        BALANCED=balanced,
        SPLIT=balanced or problem.num_splits > 1 or problem.split_size > 0,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        WIDE=wide,
        PDL=pdl,
        PREFETCH=PREFETCH if pdl and bound_by_bytes else 0,
        PRECISION=config.precision,
    )


class CombineTile(NamedTuple):
    """Rows that a combining program owns, splits that it loads at a time, and its warps."""

    rows: int
    splits: int
    num_warps: int


def combine_tile(problem: DecodeProblem, config: DecodeConfig, programs: int | None) -> CombineTile:
    """How parts are combined.

    ``programs``: of a balanced grid, for each work tile. A few splits leave room for all rows of a work tile,
    so that few programs do the work, and these are there before attention ends; many are loaded by twice as
    many warps, since a second round would wait for memory once more. None: the tile must depend on nothing
    that another batch could change, since the order of its sums does.
    """
    width = padded(problem.head_dim_v)
    if programs is None:
        rows = max(1, config.tile.BLOCK_M // 32)
        return CombineTile(rows, max(2, COMBINE_TILE // (rows * width)), 4)
    num_warps = 8 if programs * width > COMBINE_TILE else 4
    most = max(2, COMBINE_TILE * num_warps // 4 // width)
    splits = min(most, max(LEAST_SPLITS, triton.next_power_of_2(programs)))
    rows = min(config.tile.BLOCK_M, problem.seqlen_q * problem.group_size)
    return CombineTile(min(triton.next_power_of_2(rows), most // splits), splits, num_warps)


def combine_variant(
    problem: DecodeProblem, config: DecodeConfig, tile: CombineTile, by_work_tile: bool, pdl: bool
) -> CombineVariant:
    return CombineVariant(
        **layout(problem, config),
        BALANCED=is_balanced(problem, config),
        BY_WORK_TILE=by_work_tile,
        HAS_SINK=problem.sink,
        HAS_PRIOR=problem.prior,
        PDL=pdl,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_DV=padded(problem.head_dim_v),
        ROWS=tile.rows,
        SPLITS=tile.splits,
    )


class Scalars(NamedTuple):
    """Arguments of the kernels that are not tensors, in their order."""

    strides: Strides
    lengths: Lengths
    behind: tuple
    """Those of the attention kernel that come behind lengths."""
    behind_in_combine: tuple

    def of_attend(self) -> tuple:
        return (*self.strides, *self.lengths, *self.behind)

    def of_combine(self) -> tuple:
        return (*self.lengths, *self.behind_in_combine)


class DecodeLaunch:
    """``(q, k_cache, v_cache, tensors[, out, lse]) -> (out, lse or None)`` for tensors of one signature."""

    writes_into = True

    def __init__(self, problem: DecodeProblem, config: DecodeConfig) -> None:
        self._problem = problem
        self._config = config
        self._out_shape = problem.out_shape
        self._out_dtype = problem.out_dtype
        self._lse_shape = problem.lse_shape
        self._lse_size = math.prod(problem.lse_shape)
        self._device = problem.device
        self._varlen = problem.varlen
        self._return_lse = problem.return_lse
        self._empty = 0 in problem.out_shape or problem.batch == 0 or problem.seqlen_q == 0
        self._partials = 0
        """Floats of partial results, rounded up to keep what follows them aligned."""
        self._stores_lse = True
        self._new_out: Any = None
        self._attend: KeptKernel | None = None
        self._combine: KeptKernel | None = None
        self._by_capacity: tuple = ()
        self._scalars: Scalars | None = None

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tensors: CacheTensors,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if self._empty:
            return self._cleared(q, out, lse)
        attend, combine, device = self._attend, self._combine, self._device
        return_lse = self._return_lse
        if attend is None:
            k_cache, v_cache = self._operands(k_cache, v_cache)
            attend, combine = self._prepare(q, k_cache, v_cache, tensors)
            return_lse = self._stores_lse  # the first call compiles, for which Triton needs tensors
            self._new_out = allocator(q, self._out_shape, self._out_dtype)
        if self._varlen:
            out, lse = self._cleared(q, out, lse)
        else:
            if out is None:
                out = self._new_out(q)
            if return_lse and lse is None:
                lse = q.new_empty(*self._lse_shape, dtype=torch.float32)
        scratch = None
        lse_to: Tensor | int | None = lse
        if lse is None and self._stores_lse:  # nobody asked for it: it goes behind the partial results
            scratch = q.new_empty(self._partials + self._lse_size, dtype=torch.float32)
            lse_to = scratch.data_ptr() + 4 * self._partials
        elif self._partials:
            scratch = q.new_empty(self._partials, dtype=torch.float32)
        attend(device, q, k_cache, v_cache, out, lse_to, scratch, *tensors)
        if combine is not None:
            combine(
                device, scratch, out, lse_to, tensors.sink, tensors.prior_out, tensors.prior_lse,
                tensors.cache_seqlens, tensors.cache_leftpad, tensors.cu_seqlens_q, tensors.cu_seqlens_k_new,
            )  # fmt: skip
        if self._attend is None and attend.takes_addresses:
            self._combine, self._attend = combine, attend
        return out, lse

    @property
    def takes_addresses(self) -> bool:
        """Whether it is compiled, and looks at nothing of q and the caches but where they begin, if it is
        given ``out``."""
        return self._attend is not None and not self._varlen

    def resized(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors
    ) -> DecodeLaunch | None:
        """This launch for dense caches of another length, by the kernels that it has. None if they do not
        serve, or if there are none yet.

        The tensors are right, and differ from those of this launch in that length and their strides alone.
        """
        attend, combine, scalars = self._attend, self._combine, self._scalars
        if attend is None or scalars is None or self._problem.tma_obstacle is not None:
            return None
        problem = copy.copy(self._problem)  # as replace() does it, in a fifth of its 20 us
        object.__setattr__(problem, "capacity", k_cache.shape[1])
        caches = self._operands(k_cache, v_cache)
        if self._decided(problem, *caches) != self._by_capacity:
            return None
        left, right = effective_window(problem)
        capacity = problem.capacity if problem.num_blocks else 0
        lengths = scalars.lengths._replace(capacity=capacity, window_left=left, window_right=right)
        scalars = scalars._replace(strides=strides_of(q, *caches, tensors), lengths=lengths)
        attend = attend.with_scalars(scalars.of_attend())
        if combine is not None:
            combine = combine.with_scalars(scalars.of_combine())
        if attend is None or (combine is None) != (self._combine is None):
            return None
        other = copy.copy(self)
        other._problem, other._scalars, other._attend, other._combine = problem, scalars, attend, combine
        return other

    def _decided(self, problem: DecodeProblem, k_cache: Tensor, v_cache: Tensor) -> tuple:
        """What the length and strides of a dense cache decide of the kernels and their grids."""
        left, right = effective_window(problem)
        longest = max(extent(k_cache), extent(v_cache))
        return (
            left != UNLIMITED, right != UNLIMITED, aligned(problem, k_cache, v_cache), longest >= 2**31,
            longest * k_cache.element_size() >= 2**31, is_balanced(problem, self._config),
            grid_size(problem, self._config),
            softmax_max_kind(problem, self._config), problem.split_size and problem.capacity, k_cache.dtype,
        )  # fmt: skip

    def _operands(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        return as_operands(k_cache, v_cache, self._config)

    def _cleared(self, q: Tensor, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse) for tokens that no program writes, of no sequence or without keys to look at."""
        out = q.new_zeros(self._out_shape, dtype=self._out_dtype) if out is None else out.zero_()
        if lse is None:
            return out, q.new_full(self._lse_shape, -torch.inf, dtype=torch.float32)
        return out, lse.fill_(-torch.inf)

    def _prepare(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors
    ) -> tuple[KeptKernel, KeptKernel | None]:
        """The attention kernel and, if it leaves parts, the one that combines them."""
        problem, config, device = self._problem, self._config, self._device
        tile = config.tile
        m_blocks = m_blocks_of(problem, config)
        work_tiles = problem.batch * m_blocks * problem.num_heads_kv
        rows = min(tile.BLOCK_M, problem.seqlen_q * problem.group_size)
        balanced = is_balanced(problem, config)
        split_n_blocks = triton.cdiv(problem.split_size, tile.BLOCK_N)
        num_splits = max(problem.num_splits, 1)
        if split_n_blocks:
            num_splits = max(1, triton.cdiv(triton.cdiv(problem.capacity, tile.BLOCK_N), split_n_blocks))
        programs, teams, team = work_tiles * num_splits, 0, 1
        if balanced:
            team = heads_per_team(problem, config)
            teams = max(1, grid_size(problem, config) // team)
            programs = teams * team
        splits = Splits(
            partial_rows=rows,
            slots=2 * programs if balanced else programs,
            num_splits=num_splits,
            split_n_blocks=split_n_blocks,
        )
        variant = variant_of(
            problem,
            config,
            native_e4m3=converts_e4m3(device),
            pairs=k_cache.dtype == torch.uint16,
            pdl=has_dependent_launch(device),
            wide=any(extent(cache) >= 2**31 for cache in (k_cache, v_cache)),
            aligned=aligned(problem, k_cache, v_cache),
        )
        if num_splits == 1 and not balanced:
            variant = replace(variant, SPLIT=False)
        left, right = effective_window(problem)
        lengths = Lengths(
            m_blocks=problem.batch * m_blocks,
            m_blocks_per_sequence=m_blocks,
            num_heads_kv=problem.num_heads_kv,
            group_size=problem.group_size,
            seqlen_q=problem.seqlen_q,
            seqlen_new=problem.seqlen_new,
            total_q=problem.total_q,
            capacity=problem.capacity if problem.num_blocks else 0,
            window_left=left,
            window_right=right,
        )
        scale = problem.softmax_scale
        numbers = (scale, scale * LOG2_E, problem.softcap)
        softmax_max = problem.softmax_max if variant.SOFTMAX_MAX == "number" else None
        strides = strides_of(q, k_cache, v_cache, tensors)
        scalars = Scalars(
            strides, lengths, (*numbers, max(problem.num_blocks, 1), *splits, softmax_max), splits
        )
        # With it, a kernel may start before the one that it follows has ended, and waits for that end itself.
        options: dict[str, Any] = {"launch_pdl": True} if variant.PDL else {}
        attend = KeptKernel(decode_kernel, programs, scalars.of_attend(), (variant,), tile, **options)
        self._scalars, self._by_capacity = scalars, self._decided(problem, k_cache, v_cache)
        if not variant.SPLIT:
            self._stores_lse = self._return_lse or self._varlen
            return attend, None
        self._partials = round_up(splits.slots * rows * (problem.head_dim_v + 1), 64)
        combined = combine_tile(problem, config, triton.cdiv(programs, work_tiles) if balanced else None)
        by_work_tile = not balanced or work_tiles < programs
        units = work_tiles if by_work_tile else programs - team
        row_blocks = triton.cdiv(rows, combined.rows)
        self._scalars = scalars = scalars._replace(behind_in_combine=(*splits, teams, row_blocks))
        combine = KeptKernel(
            combine_kernel,
            units * row_blocks,
            scalars.of_combine(),
            (combine_variant(problem, config, combined, by_work_tile, variant.PDL),),
            None,
            num_warps=combined.num_warps,
            **options,
        )
        return attend, combine


class CombineLaunch:
    """``(out_partial, lse_partial) -> (out, lse)`` for tensors of one signature."""

    def __init__(self, problem: CombineProblem) -> None:
        self._problem = problem
        self._kernel: KeptKernel | None = None

    def __call__(
        self, out_partial: Tensor, lse_partial: Tensor, tensors: None = None
    ) -> tuple[Tensor, Tensor]:
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
            splits = min(16, triton.next_power_of_2(max(problem.num_splits, 1)))
            rows_of_program = max(1, COMBINE_TILE // (splits * width))
            strides = GivenStrides(*out_partial.stride()[:-1], *lse_partial.stride())
            self._kernel = KeptKernel(
                combine_given_kernel,
                triton.cdiv(rows, rows_of_program),
                (*strides, problem.num_splits, problem.seqlen, problem.num_heads, rows),
                (CombineGivenVariant(problem.head_dim, width, rows_of_program, splits),),
                None,
            )
        self._kernel(problem.device, out_partial, lse_partial, out, lse)
        return out, lse


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def row_strides(tensor: Tensor) -> tuple[int, int, int]:
    """(sequence, token, head) strides of (batch, seqlen, heads, head_dim) or (total, heads, head_dim)."""
    return tensor.stride(0) if tensor.dim() == 4 else 0, tensor.stride(-3), tensor.stride(-2)


def is_aligned(cache: Tensor) -> bool:
    """Whether Triton loads rows of the cache asynchronously: pointer and strides that are multiples of 16."""
    return cache.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in cache.stride()[:-1])


def aligned(problem: DecodeProblem, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether tiles of k and v may differ in width."""
    return problem.head_dim_v % 16 == 0 and is_aligned(k_cache) and is_aligned(v_cache)


def strides_of(q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors) -> Strides:
    tree_mask = tensors.tree_mask
    return Strides(
        *row_strides(q),
        *row_strides(k_cache),
        *row_strides(v_cache),
        0 if tensors.block_table is None else tensors.block_table.stride(0),
        outer_stride(tensors.alibi_slopes),
        outer_stride(tensors.k_descale),
        outer_stride(tensors.v_descale),
        0 if tree_mask is None or tree_mask.shape[0] == 1 else tree_mask.stride(0),
    )


def extent(cache: Tensor) -> int:
    """Elements from the first to the last, and room for a tile of rows behind them."""
    size, stride = cache.shape, cache.stride()
    last = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return last + MAX_BLOCK_N * stride[1]
