"""Launchers of attention over a cache and of its combination: from tensors to kernel arguments.

Each is for tensors of one signature; grids, sizes of partial results and constants are settled at its first
call.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from flashtile.backends.portable.config import padded
from flashtile.backends.portable.decode.attend import decode_kernel
from flashtile.backends.portable.decode.combine import combine_given_kernel, combine_kernel
from flashtile.backends.portable.decode.config import DecodeConfig, multiprocessors
from flashtile.backends.portable.decode.schedule import Layout
from flashtile.backends.portable.decode.steps import Features
from flashtile.backends.portable.launch import KeptKernel
from flashtile.decode.problem import FP8, CombineProblem, DecodeProblem
from flashtile.problem import LOG2_E, UNLIMITED

MAX_BLOCK_PAIRS = 1024
BALANCED_ROW_BLOCKS = 16
"""Up to so many row blocks a sequence, the grid is balanced. More are a prefill: work enough for any grid."""

COMBINE_TILE = 4096
"""Elements of partial results that a combining program loads at a time."""
COMBINE_NUM_WARPS = 4


class DependentKernel(KeptKernel):
    """A kernel that may start before the one that it follows has ended, and waits for its results itself."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._options["launch_pdl"] = True


def has_dependent_launch(device: torch.device) -> bool:
    """Whether the device knows programmatic dependent launch (compute capability 9.0 and up)."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def converts_e4m3(device: torch.device) -> bool:
    """Whether the device converts e4m3 itself (compute capability 8.9 and up)."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 9)
    )


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
    block_pairs = min(MAX_BLOCK_PAIRS, max(16, triton.next_power_of_2(pairs)))
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
    )


def effective_window(problem: DecodeProblem) -> tuple[int, int]:
    """(left, right), a side that hides no key as unlimited (-1)."""
    return (
        UNLIMITED if problem.window_left >= problem.capacity - 1 else problem.window_left,
        UNLIMITED if problem.window_right >= problem.seqlen_q - 1 else problem.window_right,
    )


def features(
    problem: DecodeProblem, config: DecodeConfig, *, native_e4m3: bool, pdl: bool, wide: bool, aligned: bool
) -> Features:
    """What the attention kernel is compiled for."""
    balanced = is_balanced(problem, config)
    e4m3 = problem.cache_dtype == FP8
    block_d, block_dv = padded(problem.head_dim), padded(problem.head_dim_v)
    if not aligned:  # as in flashtile.backends.portable.launch.constants
        block_d = block_dv = max(block_d, block_dv)
    return Features(
        PAGE_SIZE=problem.page_size,
        HAS_BATCH_IDX=problem.batch_idx,
        HAS_SOFTCAP=problem.softcap > 0,
        HAS_ALIBI=problem.alibi,
        HAS_SINK=problem.sink,
        HAS_TREE=problem.tree,
        BENT=problem.softcap > 0 or problem.alibi or problem.softmax_scale <= 0 or e4m3,
        DESCALE=problem.descale,
        E4M3=e4m3,
        E4M3_BITS=e4m3 and not native_e4m3,
        BALANCED=balanced,
        SPLIT=balanced or problem.num_splits > 1 or problem.split_size > 0,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        WIDE=wide,
        PDL=pdl,
        PRECISION=config.precision,
    )


def combine_tile(BLOCK_M: int, head_dim_v: int) -> tuple[int, int]:
    """(rows that a combining program owns, splits that it loads at a time)."""
    rows = max(1, BLOCK_M // 32)
    return rows, max(2, COMBINE_TILE // (rows * padded(head_dim_v)))


class DecodeLaunch:
    """``(q, k_cache, v_cache, *CacheTensors) -> (out, lse)`` for tensors of one signature."""

    def __init__(self, problem: DecodeProblem, config: DecodeConfig) -> None:
        self._problem = problem
        self._config = config
        self._out_shape = problem.out_shape
        self._lse_shape = problem.lse_shape
        self._device = problem.device
        self._as_bits = problem.cache_dtype == FP8 and not converts_e4m3(problem.device)
        self._empty = 0 in problem.out_shape or problem.batch == 0 or problem.seqlen_q == 0
        self._workspace = 0
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
    ) -> tuple[Tensor, Tensor]:
        problem, device = self._problem, self._device
        if cu_seqlens_q is None and not self._empty:
            out = torch.empty(self._out_shape, dtype=problem.out_dtype, device=device)
            lse = torch.empty(self._lse_shape, dtype=torch.float32, device=device)
        else:  # tokens that belong to no sequence are written by no program
            out = torch.zeros(self._out_shape, dtype=problem.out_dtype, device=device)
            lse = torch.full(self._lse_shape, -torch.inf, dtype=torch.float32, device=device)
        if self._empty:
            return out, lse
        if self._as_bits:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        if self._attend is None:
            self._prepare(q, k_cache, v_cache, block_table, alibi_slopes, k_descale, v_descale, tree_mask)
            assert self._attend is not None
        workspace = None
        if self._workspace:
            workspace = torch.empty(self._workspace, dtype=torch.float32, device=device)
        self._attend(
            device, q, k_cache, v_cache, out, lse, workspace, cache_seqlens, cache_leftpad, cache_batch_idx,
            block_table, cu_seqlens_q, cu_seqlens_k_new, alibi_slopes, sink, k_descale, v_descale, tree_mask,
        )  # fmt: skip
        if self._combine is not None:
            self._combine(
                device, workspace, out, lse, sink, cache_seqlens, cache_leftpad, cu_seqlens_q,
                cu_seqlens_k_new,
            )  # fmt: skip
        return out, lse

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
    ) -> None:
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
        programs = items * num_splits
        if balanced:
            programs = multiprocessors(device) * config.programs_per_sm
        slots = 2 * programs if balanced else programs
        static_layout = layout(problem, config)
        static = features(
            problem,
            config,
            native_e4m3=not self._as_bits,
            pdl=has_dependent_launch(device),
            wide=any(tile.BLOCK_N * cache.stride(1) >= 2**31 for cache in (k_cache, v_cache)),
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
            _stride_of_two(alibi_slopes), _stride_of_two(k_descale), _stride_of_two(v_descale),
            0 if tree_mask is None or tree_mask.shape[0] == 1 else tree_mask.stride(0),
        )  # fmt: skip
        scale = problem.softmax_scale
        scalars = (*strides, *lengths, scale, scale * LOG2_E, problem.softcap, problem.num_blocks, *splits)
        self._attend = KeptKernel(decode_kernel, programs, scalars, (static_layout, static), tile)
        if not static.SPLIT:
            return
        self._workspace = slots * rows * (problem.head_dim_v + 1)
        rows_at_once, splits_at_once = combine_tile(tile.BLOCK_M, problem.head_dim_v)
        by_item = not balanced or items < programs
        units = items if by_item else programs - 1
        blocks = triton.cdiv(rows, rows_at_once)
        kind = DependentKernel if static.PDL else KeptKernel
        self._combine = kind(
            combine_kernel,
            units * blocks,
            (*lengths, *splits, programs, blocks),
            (
                static_layout, balanced, by_item, static.HAS_SINK, static.PDL, problem.head_dim_v,
                padded(problem.head_dim_v), rows_at_once, splits_at_once,
            ),
            None,
        )  # fmt: skip


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


def is_aligned(cache: Tensor) -> bool:
    """Whether Triton loads rows of the cache asynchronously: pointer and strides that are multiples of 16."""
    return cache.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in cache.stride()[:-1])


def _stride_of_two(tensor: Tensor | None) -> int:
    """The first stride of a tensor that may have one dimension (for all) or two."""
    return tensor.stride(0) if tensor is not None and tensor.dim() == 2 else 0
