"""Launches of the decoding kernels. Each serves tensors of one signature.

At the first call of a launch, the problem, the configuration and the tensors decide a :class:`DecodePlan`
(kind of grid, programs, operands); the plan gives the variant, which is the kernel's constants, and the
numbers of the launch. Later calls only allocate results and pass tensors::

    first call     plan_of -> decode_variant -> CachedLaunch of attention
                                             -> combine_tile -> combine_variant -> CachedLaunch of combining
    later calls    allocate out, lse, partial results; launch attention; launch combining, if work is split

Two ways to a launch save host time where a step is shorter than its launches:
:meth:`DecodeLaunch.by_address`, for the layers of a model that call with the same shapes, and
:meth:`DecodeLaunch.with_cache_length`, for a dense cache that has grown. :mod:`schedule` defines *m_block*,
*n_block*, *work tile* and *team*.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flashtile.backends.common.config import (
    QkvStrides,
    allocator,
    has_adjacent_tokens,
    is_aligned,
    largest_divisor,
    outer_stride,
    padded,
    tile_widths,
    token_strides,
)
from flashtile.backends.common.device import capability, is_capturing, multiprocessors
from flashtile.backends.common.launch import CachedLaunch, Outputs
from flashtile.backends.portable.config import family
from flashtile.backends.portable.decode.append import (
    AppendLengths,
    AppendPointers,
    AppendStrides,
    AppendVariant,
    CopyLengths,
    CopyPointers,
    CopyStrides,
    CopyVariant,
    append_kernel,
    copy_kernel,
)
from flashtile.backends.portable.decode.attend import (
    DecodeNumbers,
    DecodePointers,
    DecodeVariant,
    OuterStrides,
    WeightPointers,
    decode_kernel,
)
from flashtile.backends.portable.decode.combine import (
    CombineGivenVariant,
    CombinePointers,
    CombineVariant,
    GivenPointers,
    GivenSizes,
    GivenStrides,
    combine_given_kernel,
    combine_kernel,
)
from flashtile.backends.portable.decode.config import NARROW, DecodeConfig, bytes_to_read, operand_bytes
from flashtile.backends.portable.decode.schedule import DecodeLengths, Splits
from flashtile.problems.common import LOG2_E, UNLIMITED
from flashtile.problems.decode import (
    FP8,
    AppendProblem,
    AppendTensors,
    CacheTensors,
    CombineProblem,
    CopyProblem,
    CopyTensors,
    DecodeProblem,
)
from flashtile.problems.masking import KernelMask

SCAN_BLOCKS = 1, 32, 256, 1024
"""Numbers of m_blocks that a stream-K program may read at a time. They are few, because each is a kernel: at
256 sequences, Llama-3-8B in vLLM needs 88 kernels, and needed 210 when sizes were many."""
MAX_HEADS_PER_TEAM = 8
"""With 256 bytes per token and head, this many heads fill two pages of DRAM. 32 sequences of 4096 keys take
192.9 us with 8 heads, 193.9 with 4, 194.1 with 2 and 194.9 with 1 (H100)."""

COMBINE_TILE = 4096
"""Elements of partial results that four warps of a combining program load at a time. The program waits on a
multiprocessor for two attention programs to end, so its registers must fit next to theirs."""
MIN_SPLITS = 8
"""Fewest splits that a combining program loads at a time. The planned number is an average over work tiles,
so some work tiles have more splits."""
MIN_PAIRED_WIDTH = 32
"""Minimum columns of a tile that is read in pairs: half of them must still be the 16 of a product."""
PREFETCH = 2
"""Number of n_blocks to prefetch: as many as are in flight, so that memory stays busy between work tiles."""
FEW_N_BLOCKS = 4
"""A grid has one program per multiprocessor if there are at most this many n_blocks and at most one work tile
per multiprocessor. The programs of the next call then fit next to them. With more n_blocks, two programs per
multiprocessor keep more bytes in flight."""
FEW_N_BLOCKS_OF_ONE = 8
"""Used instead of FEW_N_BLOCKS for narrow tiles of one sequence whose length is known on the device only. Its
cache is seldom full: on an H200, a cache with room for 8192 tokens takes 14 % less time with 1024 tokens in
it, and 1 % more if it is full."""
MAX_APPENDING_WIDTH = 128
"""Largest head size of an attention kernel that appends (:func:`appends`)."""
MAX_BLOCK_N = 256
"""At least the largest BLOCK_N: the last tile of a cache may extend past it (:func:`extent`)."""
MIN_UNIFIED_N_BLOCKS = 8
"""Minimum n_blocks of the longest sequence for a unified maximum: with fewer, the check of a work tile costs
more than it saves."""


def has_dependent_launch(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch (compute capability 9.0 and up)."""
    return capability(device) >= (9, 0)


def converts_e4m3(device: torch.device) -> bool:
    """Whether the device converts e4m3 in hardware (compute capability 8.9 and up)."""
    return capability(device) >= (8, 9)


def cache_operands(k_cache: Tensor, v_cache: Tensor, config: DecodeConfig) -> tuple[Tensor, Tensor]:
    """View the caches in the dtype that the kernel is compiled for.

    FP8 caches are viewed as pairs of elements if :func:`has_pairs` is True for them and tiles are NARROW. The
    products of NARROW tiles take operands from registers. Products of taller tiles take operands from shared
    memory. They gain nothing from pairs, because converted elements must be written to shared memory in any
    case.
    """
    if k_cache.dtype != FP8:
        return k_cache, v_cache
    if config.tile.BLOCK_M == NARROW and has_pairs(k_cache) and has_pairs(v_cache):
        return k_cache.view(torch.uint16), v_cache.view(torch.uint16)
    if not converts_e4m3(k_cache.device):
        return k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    return k_cache, v_cache


def has_pairs(cache: Tensor) -> bool:
    """Whether an FP8 cache can be viewed as aligned pairs of elements, row by row.

    Pairs need only an even address. But the signature of a call (``op.operation.signatures``) records only
    whether an address is a multiple of 16, so the function checks for that. Elements of a row are neighbours,
    except in a cache without elements, which has no pairs.
    """
    *strides, last = cache.stride()
    return last == 1 and not (cache.data_ptr() % 16 or cache.shape[-1] % 2 or any(s % 2 for s in strides))


def m_blocks_of(problem: DecodeProblem, config: DecodeConfig) -> int:
    """Return the number of m_blocks of the longest sequence."""
    return -(-problem.seqlen_q * problem.group_size // config.tile.BLOCK_M)  # triton.cdiv takes 2 us


def most_work_tiles(problem: DecodeProblem, config: DecodeConfig) -> int:
    """Return the maximum number of work tiles of the batch."""
    m_blocks = problem.total_q * problem.group_size // config.tile.BLOCK_M + problem.batch
    return min(problem.batch * m_blocks_of(problem, config), m_blocks) * problem.num_heads_kv


def is_stream_k(problem: DecodeProblem, config: DecodeConfig) -> bool:
    """Whether programs share all n_blocks equally (stream-K).

    Otherwise each work tile is divided into splits, which depend on the length of its own sequence only.
    """
    if problem.num_splits != 0 or problem.split_size != 0:
        return False
    m_blocks, work_tiles = m_blocks_of(problem, config), most_work_tiles(problem, config)
    columns = problem.head_dim + problem.head_dim_v
    tile_bytes = bytes_to_read(keys_seen(problem), columns, operand_bytes(problem))
    even = not (problem.page_size or problem.lengths or problem.leftpad or problem.varlen)
    return config.takes_stream_k(
        m_blocks, work_tiles, multiprocessors(problem.device), tile_bytes, even, problem.mixed
    )


def keys_seen(problem: DecodeProblem) -> int:
    """Return the maximum number of keys that the rows of a work tile can see."""
    left = mask_of(problem).window_left
    return problem.capacity if left == UNLIMITED else min(problem.capacity, left + problem.seqlen_q)


def layout(problem: DecodeProblem, config: DecodeConfig, stream_k: bool) -> dict[str, Any]:
    """Return the fields of :class:`schedule.Layout`, by name. ``stream_k``: :func:`is_stream_k`."""
    m_blocks = heads = 1
    if stream_k:  # in other grids, programs do not scan m_blocks
        m_blocks = problem.batch * m_blocks_of(problem, config)
        # For tiles of few rows, reading adjacent heads together saves time. For taller tiles, a team is one
        # head: the grid consists of whole teams, so larger teams would leave multiprocessors idle.
        if config.tile.BLOCK_M <= NARROW:
            heads = largest_divisor(problem.num_heads_kv, MAX_HEADS_PER_TEAM)
    scan = next((block for block in SCAN_BLOCKS if m_blocks <= block), SCAN_BLOCKS[-1])
    return mask_of(problem).constants | {
        "HAS_LENGTHS": problem.lengths,
        "HAS_LEFTPAD": problem.leftpad,
        "VARLEN": problem.varlen,
        "VARLEN_NEW": problem.varlen_new,
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
    """Return the number of programs of a stream-K grid."""
    count = multiprocessors(problem.device)
    work_tiles = problem.batch * m_blocks_of(problem, config) * problem.num_heads_kv
    most_n_blocks = work_tiles * -(-problem.capacity // config.tile.BLOCK_N)
    one = problem.batch == 1 and problem.lengths and config.tile.BLOCK_M == NARROW
    few_n_blocks = FEW_N_BLOCKS_OF_ONE if one else FEW_N_BLOCKS
    few = work_tiles <= count and most_n_blocks <= few_n_blocks * count
    few = few and has_dependent_launch(problem.device)
    return count if few else config.stream_k_programs(work_tiles, count)


def num_splits_of(problem: DecodeProblem, config: DecodeConfig) -> tuple[int, int]:
    """Return (splits per work tile, n_blocks per split) for a grid without stream-K.

    The second number is 0 if the call gives the number of splits instead of their size.
    """
    split_n_blocks = triton.cdiv(problem.split_size, config.tile.BLOCK_N)
    if not split_n_blocks:
        return max(problem.num_splits, 1), 0
    n_blocks = triton.cdiv(problem.capacity, config.tile.BLOCK_N)
    return max(1, triton.cdiv(n_blocks, split_n_blocks)), split_n_blocks


def lengths_of(problem: DecodeProblem, config: DecodeConfig) -> DecodeLengths:
    m_blocks = m_blocks_of(problem, config)
    return DecodeLengths(
        m_blocks=problem.batch * m_blocks,
        m_blocks_per_sequence=m_blocks,
        num_heads_kv=problem.num_heads_kv,
        group_size=problem.group_size,
        seqlen_q=problem.seqlen_q,
        seqlen_new=problem.seqlen_new,
        total_q=problem.total_q,
        capacity=problem.capacity if problem.num_blocks else 0,
        mask=mask_of(problem),
    )


def mask_of(problem: DecodeProblem) -> KernelMask:
    """Return the mask as kernels take it."""
    return problem.for_kernels(problem.seqlen_q, problem.capacity)


def scales_scores(problem: DecodeProblem) -> bool:
    """Whether scores are more than raw products times a positive scale that all rows share."""
    changed = problem.softcap > 0 or problem.alibi or problem.softmax_scale <= 0
    return changed or problem.cache_dtype == FP8  # whose queries are scaled row by row


def softmax_max_kind(problem: DecodeProblem, config: DecodeConfig) -> str:
    """Return the kind of ``softmax_max`` that replaces the maxima of rows.

    "number" is one number for all heads, and "head" is one number per head. With "none", maxima are computed.
    """
    if problem.capacity < MIN_UNIFIED_N_BLOCKS * config.tile.BLOCK_N:
        return "none"
    if problem.softmax_max_by_head:
        return "head"
    return "none" if problem.softmax_max is None else "number"


class DecodePlan(NamedTuple):
    """Properties of the length and the strides of a cache that decide kernels and grids.

    Launches of one problem with equal plans can use the same compiled kernels, if the cache grows.
    """

    stored: torch.dtype
    """Dtype of the caches as the kernel reads them (:func:`cache_operands`)."""
    mask: dict[str, Any]
    """The constants of the mask (:class:`~flashtile.problems.masking.MaskConstants`)."""
    aligned: bool
    """Whether k and v are aligned for asynchronous loads. If not, their tiles get the same width."""
    adjacent: bool
    """Whether tokens of k or v lie one element apart, which decides this width (:func:`tile_widths`)."""
    wide: bool
    """Whether offsets into the cache need 64 bits."""
    wide_bytes: bool
    """Whether a cache has 2 GiB or more, for which Triton compiles other kernels on AMD's GPUs."""
    stream_k: bool
    programs: int
    """Programs of a stream-K grid, before they are divided into teams."""
    softmax_max: str
    split_capacity: int
    """The capacity, if it decides the number of splits; else 0."""


def plan_of(problem: DecodeProblem, config: DecodeConfig, k_cache: Tensor, v_cache: Tensor) -> DecodePlan:
    """Return the plan of a call. The caches are operands (:func:`cache_operands`)."""
    longest = max(extent(k_cache), extent(v_cache))
    return DecodePlan(
        stored=k_cache.dtype,
        mask=mask_of(problem).constants,
        aligned=problem.head_dim_v % 16 == 0 and is_aligned(k_cache) and is_aligned(v_cache),
        adjacent=has_adjacent_tokens(k_cache, v_cache),
        wide=longest >= 2**31,
        wide_bytes=longest * k_cache.element_size() >= 2**31,
        stream_k=is_stream_k(problem, config),
        programs=grid_size(problem, config),
        softmax_max=softmax_max_kind(problem, config),
        split_capacity=problem.split_size and problem.capacity,
    )


def extent(cache: Tensor) -> int:
    """Return the distance from the cache's first element to its last, plus one tile of rows, in elements."""
    size, stride = cache.shape, cache.stride()
    last = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return last + MAX_BLOCK_N * stride[1]


def decode_variant(
    problem: DecodeProblem, config: DecodeConfig, plan: DecodePlan, weights: bool = False
) -> DecodeVariant:
    """Return the constants of a launch, which stores probabilities if ``weights``."""
    e4m3, pairs = problem.cache_dtype == FP8, plan.stored == torch.uint16
    pdl = has_dependent_launch(problem.device)
    bound_by_bytes = plan.stream_k and config.tile.BLOCK_M == NARROW and problem.dtype.itemsize < 4
    least = MIN_PAIRED_WIDTH if pairs else 16
    block_d, block_dv = tile_widths(problem.head_dim, problem.head_dim_v, plan.aligned, plan.adjacent, least)
    return DecodeVariant(
        **layout(problem, config, plan.stream_k),
        PAGE_SIZE=problem.page_size,
        HAS_BATCH_IDX=problem.batch_idx,
        HAS_SOFTCAP=problem.softcap > 0,
        HAS_ALIBI=problem.alibi,
        HAS_SINK=problem.sink,
        HAS_TREE=problem.tree,
        HAS_PRIOR=problem.prior,
        HAS_QV=problem.qv,
        SCALED_SCORES=scales_scores(problem),
        SOFTMAX_MAX=plan.softmax_max,
        DESCALE=problem.descale,
        E4M3=e4m3,
        E4M3_BITS=e4m3 and not converts_e4m3(problem.device),
        E4M3_PAIRS=pairs,
        STREAM_K=plan.stream_k,
        SPLIT=plan.stream_k or num_splits_of(problem, config)[0] > 1,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        WIDE=plan.wide,
        PDL=pdl,
        PREFETCH=PREFETCH if pdl and bound_by_bytes else 0,
        PRECISION=config.precision,
        APPEND=None,
        WEIGHTS=weights,
    )


def appends(problem: DecodeProblem, config: DecodeConfig, append: AppendProblem) -> bool:
    """Whether the attention kernel also appends as described by ``append``, in place of a kernel before it.

    It does where this was faster on an H200: caches of 16 bits in pages, head sizes up to 128, tiles of 16
    rows, and one new token and one query of each sequence. One work tile then has all rows of a key head, so
    the token's key and value are written and read by one program only.
    """
    one_token = problem.seqlen_q == problem.seqlen_new == append.seqlen_new == 1
    packed = problem.varlen or problem.varlen_new or append.slots
    width = max(problem.head_dim, problem.head_dim_v)
    timed = family(problem.device) == "hopper" and operand_bytes(problem) == 2
    timed = timed and width <= MAX_APPENDING_WIDTH
    one_work_tile = problem.group_size <= config.tile.BLOCK_M == NARROW
    # With a left padding as long as the sequence, no program would attend to the token, and write it.
    in_pages = problem.page_size > 0 and not problem.leftpad
    return timed and one_token and one_work_tile and in_pages and not packed and 0 not in problem.out_shape


class CombineTile(NamedTuple):
    """Tile of a combining program: its rows, the splits that it loads at a time, and its warps.

    ``one_by_one``: whether each of these splits is a tile of its own (``combine.sum_few_splits``).
    """

    rows: int
    splits: int
    num_warps: int
    one_by_one: bool = False


def combine_tile(problem: DecodeProblem, config: DecodeConfig, programs: int | None) -> CombineTile:
    """Return the tile of the combining kernel.

    ``programs``: programs per work tile of a stream-K grid. If they are few, a tile has room for all rows of
    a work tile. Few combining programs then do the work, and all are resident before attention ends. If they
    are many, a combining program has twice as many warps. It then loads all results in fewer rounds, and each
    round waits for memory.

    For other grids, ``programs`` is None. The tile then must not depend on the rest of the batch, because the
    tile decides in which order results are summed.
    """
    width = padded(problem.head_dim_v)
    if programs is None:
        rows = max(1, config.tile.BLOCK_M // 32)
        return CombineTile(rows, max(2, COMBINE_TILE // (rows * width)), 4)
    num_warps = 8 if programs * width > COMBINE_TILE else 4
    most = max(2, COMBINE_TILE * num_warps // 4 // width)
    splits = min(most, max(MIN_SPLITS, triton.next_power_of_2(programs)))
    rows = min(config.tile.BLOCK_M, problem.seqlen_q * problem.group_size)
    return CombineTile(min(triton.next_power_of_2(rows), most // splits), splits, num_warps)


def combine_variant(
    problem: DecodeProblem,
    config: DecodeConfig,
    tile: CombineTile,
    stream_k: bool,
    by_work_tile: bool,
    pdl: bool,
) -> CombineVariant:
    return CombineVariant(
        **layout(problem, config, stream_k),
        STREAM_K=stream_k,
        BY_WORK_TILE=by_work_tile,
        HAS_SINK=problem.sink,
        HAS_PRIOR=problem.prior,
        PDL=pdl,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_DV=padded(problem.head_dim_v),
        ROWS=tile.rows,
        SPLITS=tile.splits,
        ONE_BY_ONE=tile.one_by_one,
    )


def strides_of(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> QkvStrides:
    return QkvStrides(*token_strides(q), *token_strides(k_cache), *token_strides(v_cache))


def outer_strides_of(tensors: CacheTensors) -> OuterStrides:
    tree_mask = tensors.tree_mask
    return OuterStrides(
        table_stride=0 if tensors.block_table is None else tensors.block_table.stride(0),
        alibi_stride=outer_stride(tensors.alibi_slopes),
        k_descale_stride=outer_stride(tensors.k_descale),
        v_descale_stride=outer_stride(tensors.v_descale),
        tree_stride=0 if tree_mask is None or tree_mask.shape[0] == 1 else tree_mask.stride(0),
    )


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_of_combine = itemgetter(*map(CacheTensors._fields.index, CombinePointers._fields[3:]))
"""Picks the tensors of :class:`CacheTensors` that the combining kernel takes."""


class Kept(NamedTuple):
    """Memory that a call leaves for later calls with the same lengths.

    In ``out`` and lse, rows that no work tile writes are filled.
    """

    out: Tensor
    lse: Tensor | None
    lse_to: Tensor | int | None
    """Where the kernels store lse."""
    scratch: Tensor | None
    """Partial results, and behind them the table of work tiles, if the kernels have one."""


class DecodeScalars(NamedTuple):
    """Arguments of the attention kernel that are not tensors, in its order."""

    strides: QkvStrides
    outer: OuterStrides
    lengths: DecodeLengths
    numbers: DecodeNumbers
    num_blocks: int
    splits: Splits
    new_strides: AppendStrides | None = None
    new_lengths: AppendLengths | None = None


class DecodeLaunch:
    """``(q, k_cache, v_cache, tensors[, out, lse]) -> (out, lse or None)`` for tensors of one signature.

    With ``stores_weights``, calls also pass :class:`attend.WeightPointers` as ``new``.

    Calls with the same tensors of lengths, such as those of a step's layers, may pass the same ``tables``,
    which is empty at first. Only the first of these calls fills what depends on the lengths: the table of
    work tiles, if the kernels have one, and rows that no work tile writes. Each call overwrites the results
    of the one before.
    """

    writes_into = takes_tables = True

    def __init__(self, problem: DecodeProblem, config: DecodeConfig, stores_weights: bool = False) -> None:
        self._problem = problem
        self._stores_weights = stores_weights
        self._config = config
        self._lse_shape = problem.lse_shape
        self._lse_size = math.prod(problem.lse_shape)
        self._outputs = Outputs(problem, all_written=not problem.varlen)
        self._device = problem.device
        self._clears = problem.varlen
        """Whether rows that no work tile writes are filled before the launch."""
        self._return_lse = problem.return_lse
        self._empty = 0 in problem.out_shape or problem.batch == 0 or problem.seqlen_q == 0
        self._partials = 0
        """Number of floats of partial results, rounded up so that the lse after them is aligned."""
        self._scratch_bytes = self._scratch_size = 0
        """Partial results and lse, in bytes and as elements of ``out``. Another dtype would take 0.2 us."""
        self._stores_lse = True
        self._keeps_table = False
        """Whether kernels leave a table of work tiles as the next call needs it."""
        self._append: tuple[AppendVariant, AppendStrides, AppendLengths] | None = None
        self._new_out: Any = None
        self._attend: Any = None
        self._combine: CachedLaunch | None = None
        self._addresses: tuple[Any, tuple] = None, ()
        """Addresses of the last call by address, and those of them that the combining kernel takes."""
        self._plan: DecodePlan | None = None
        self._scalars: DecodeScalars | None = None
        self._combine_scalars: tuple = ()
        """Scalars of the combining kernel except the lengths, which both kernels share."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tensors: CacheTensors,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: AppendPointers | WeightPointers | None = None,
        tables: dict[DecodeLaunch, Kept] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if self._empty:
            return self._outputs.cleared(q, out, lse)
        attend, combine, device = self._attend, self._combine, self._device
        return_lse = self._return_lse
        if attend is None:
            k_cache, v_cache = self._operands(k_cache, v_cache)
            attend, combine = self._prepare(q, k_cache, v_cache, tensors)
            return_lse = self._stores_lse  # to compile in the first call, Triton needs lse as a tensor
            self._new_out = allocator(q, self._problem.out_shape, self._problem.out_dtype)
        kept = None if tables is None else tables.get(self)
        if kept is not None:
            out, lse, lse_to, scratch = kept
        else:
            if self._clears:
                out, lse = self._outputs.cleared(q, out, lse)
            else:
                if out is None:
                    out = self._new_out(q)
                if return_lse and lse is None:
                    lse = q.new_empty(*self._lse_shape, dtype=torch.float32)
            scratch, lse_to = None, lse
            if lse is None and self._stores_lse:  # lse is not returned, but stored after the partial results
                scratch = q.new_empty(self._partials + self._lse_size, dtype=torch.float32)
                lse_to = scratch.data_ptr() + 4 * self._partials
            elif self._partials:
                scratch = q.new_empty(self._partials, dtype=torch.float32)
            if tables is not None and (self._keeps_table or self._clears):
                tables[self] = Kept(out, lse, lse_to, scratch)
        kernels = attend.after_table if kept is not None and self._keeps_table else attend
        kernels(device, q, k_cache, v_cache, out, lse_to, scratch, new, *tensors)
        if combine is not None:
            combine(device, scratch, out, lse_to, *_of_combine(tensors))
        if self._attend is None and attend.takes_addresses:
            self._scratch_bytes = 4 * (self._partials + self._lse_size)
            self._scratch_size = triton.cdiv(self._scratch_bytes, out.element_size())
            self._combine, self._attend = combine, attend
        return out, lse

    def by_address(
        self,
        out: Tensor,
        given: tuple[int, int, int, int],
        addresses: tuple,
        memory: dict[int, Tensor],
    ) -> None:
        """Write attention to ``out``. Requires :attr:`can_launch_by_address`.

        Only the address of ``out`` is used, so its shape may differ from that of the signature, with as many
        elements. Tokens after the last offset of packed sequences are not written, or filled with 0.

        Args:
            given: addresses of q, the two caches and ``out``.
            addresses: those of the fields of :class:`CacheTensors`.
            memory: partial results by stream, for calls that run one after the other on a stream.
        """
        attend, combine, partials = self._attend, self._combine, self._partials
        stream = attend.stream()
        if stream is None:
            with torch.cuda.device(self._device):
                self.by_address(out, given, addresses, memory)
            return
        lse = partial = None
        if self._stores_lse:  # after the partial results
            scratch = memory.get(stream)
            if scratch is None or scratch.nbytes < self._scratch_bytes or is_capturing(self._device):
                scratch = self._new_scratch(out, stream, memory)
            partial = scratch.data_ptr()
            lse = partial + 4 * partials
        attend.by_address(stream, (*given, lse, partial if partials else None, None), addresses)
        if combine is not None:
            known, of_combine = self._addresses
            if known is not addresses:
                of_combine = _of_combine(addresses)
                self._addresses = addresses, of_combine
            combine.by_address(stream, (partial, given[3], lse), of_combine)

    def _new_scratch(self, out: Tensor, stream: int, memory: dict[int, Tensor]) -> Tensor:
        """Return memory for partial results and lse. A captured graph has its own: it may live longer."""
        scratch = out.new_empty(self._scratch_size)
        if not is_capturing(self._device):
            memory[stream] = scratch
        return scratch

    @property
    def can_launch_by_address(self) -> bool:
        """Whether :meth:`by_address` may be called, which requires compiled kernels."""
        combine = self._combine
        return self._attend is not None and (combine is None or combine.takes_addresses)

    def with_append(self, append: Any) -> AppendingLaunch | None:
        """Return a launch that also does the work of the launch ``append``; None if the kernel does not."""
        if not isinstance(append, AppendLaunch) or not appends(self._problem, self._config, append.problem):
            return None
        return AppendingLaunch(self._problem, self._config, append)

    @property
    def takes_addresses(self) -> bool:
        """Whether later calls may give the addresses of q and of the caches instead of tensors.

        This requires a compiled kernel. Such calls also give ``out``.
        """
        return self._attend is not None and not self._problem.varlen

    def with_cache_length(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors
    ) -> DecodeLaunch | None:
        """Return a launch for dense caches of another length that uses the compiled kernels of this launch.

        None if the kernels do not serve that length or are not compiled yet. The tensors must be valid, and
        differ from those of this launch only in the length and the strides of the caches.
        """
        attend, combine, scalars = self._attend, self._combine, self._scalars
        if attend is None or scalars is None or self._problem.tma_obstacle is not None:
            return None
        problem = copy.copy(self._problem)  # takes 4 us; replace() takes 20 us
        object.__setattr__(problem, "capacity", k_cache.shape[1])
        caches = self._operands(k_cache, v_cache)
        if plan_of(problem, self._config, *caches) != self._plan:
            return None
        capacity = problem.capacity if problem.num_blocks else 0
        lengths = scalars.lengths._replace(capacity=capacity, mask=mask_of(problem))
        strides, outer = strides_of(q, *caches), outer_strides_of(tensors)
        scalars = scalars._replace(strides=strides, outer=outer, lengths=lengths)
        attend = attend.with_scalars(scalars)
        if combine is not None:
            combine = combine.with_scalars((lengths, *self._combine_scalars))
        if attend is None or (combine is None) != (self._combine is None):
            return None
        other = copy.copy(self)
        other._problem, other._scalars, other._attend, other._combine = problem, scalars, attend, combine
        return other

    def _operands(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        return cache_operands(k_cache, v_cache, self._config)

    def _prepare(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors
    ) -> tuple[CachedLaunch, CachedLaunch | None]:
        """Return the attention kernel and, if it leaves partial results, the kernel that combines them."""
        problem, config = self._problem, self._config
        self._plan = plan = plan_of(problem, config, k_cache, v_cache)
        variant = decode_variant(problem, config, plan, self._stores_weights)
        lengths = lengths_of(problem, config)
        work_tiles = lengths.m_blocks * problem.num_heads_kv
        num_splits, split_n_blocks = num_splits_of(problem, config)
        programs, teams = work_tiles * num_splits, 0
        if plan.stream_k:
            teams = max(1, plan.programs // variant.HEADS_PER_TEAM)
            programs = teams * variant.HEADS_PER_TEAM
        new_strides, new_lengths = None, None
        if self._append is not None:
            of_append, new_strides, new_lengths = self._append
            of_append = replace(  # the attention kernel itself rotates the queries
                of_append, BLOCK_D=variant.BLOCK_D, BLOCK_DV=variant.BLOCK_DV, ROTATE_Q=False,
                ROTATE_Q_BY_TOKEN=False,
            )  # fmt: skip
            variant = replace(variant, APPEND=of_append)
        scale = problem.softmax_scale
        softmax_max = problem.softmax_max if variant.SOFTMAX_MAX == "number" else None
        self._scalars = scalars = DecodeScalars(
            strides_of(q, k_cache, v_cache),
            outer_strides_of(tensors),
            lengths,
            DecodeNumbers(scale, scale * LOG2_E, problem.softcap, softmax_max),
            max(problem.num_blocks, 1),
            Splits(
                partial_rows=min(config.tile.BLOCK_M, problem.seqlen_q * problem.group_size),
                slots=2 * programs if plan.stream_k else programs,
                num_splits=num_splits,
                split_n_blocks=split_n_blocks,
            ),
            new_strides=new_strides,
            new_lengths=new_lengths,
        )
        # With dependent launch, a kernel may start before the previous kernel has ended. It then waits on the
        # device until the previous kernel has ended.
        options: dict[str, Any] = {"launch_pdl": True} if variant.PDL else {}
        attend = CachedLaunch(
            decode_kernel, programs, scalars, (variant,), config.tile, pointers=DecodePointers, **options
        )
        if not variant.SPLIT:
            self._stores_lse = self._return_lse or problem.varlen
            return attend, None
        slots, rows = scalars.splits.slots, scalars.splits.partial_rows
        self._partials = round_up(slots * rows * (problem.head_dim_v + 1), 64)  # outputs, then lse

        tile = combine_tile(problem, config, triton.cdiv(programs, work_tiles) if teams else None)
        # One program for the rows of a work tile, or for a boundary between two teams: the fewer of the two.
        by_work_tile = not teams or work_tiles < programs
        units = work_tiles if by_work_tile else programs - programs // teams
        row_blocks = triton.cdiv(rows, tile.rows)
        self._combine_scalars = (scalars.splits, teams, row_blocks)
        combine = CachedLaunch(
            combine_kernel,
            units * row_blocks,
            (lengths, *self._combine_scalars),
            (combine_variant(problem, config, tile, plan.stream_k, by_work_tile, variant.PDL),),
            None,
            pointers=CombinePointers,
            num_warps=tile.num_warps,
            **options,
        )
        return attend, combine


class AppendingLaunch:
    """``(q, k_cache, v_cache, k, v, appended, tensors) -> (out, lse or None)`` in one attention kernel.

    The kernel appends k and v, the new tokens of each sequence, and rotates the queries q.
    """

    def __init__(self, problem: DecodeProblem, config: DecodeConfig, append: AppendLaunch) -> None:
        self._launch = DecodeLaunch(problem, config)
        self._new = append

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor,
        v: Tensor,
        appended: AppendTensors,
        tensors: CacheTensors,
    ) -> tuple[Tensor, Tensor | None]:
        given = (k_cache, v_cache, k, v, appended)
        if self._launch._append is None:
            self._launch._append = self._new.arguments(*given)
        return self._launch(q, k_cache, v_cache, tensors, new=self._new.pointers(*given))


class CombineLaunch:
    """``(out_partial, lse_partial) -> (out, lse)`` for tensors of one signature."""

    def __init__(self, problem: CombineProblem) -> None:
        self._problem = problem
        self._kernel: CachedLaunch | None = None

    def __call__(
        self, out_partial: Tensor, lse_partial: Tensor, tensors: None = None
    ) -> tuple[Tensor, Tensor]:
        problem = self._problem
        shape = (problem.batch, problem.seqlen, problem.num_heads, problem.head_dim)
        out = out_partial.new_empty(shape, dtype=problem.out_dtype)
        lse_shape = (problem.batch, problem.num_heads, problem.seqlen)
        lse = lse_partial.new_empty(lse_shape, dtype=torch.float32)
        rows = lse.numel()
        if rows == 0:
            return out, lse
        if self._kernel is None:
            width = padded(problem.head_dim)
            splits = min(16, triton.next_power_of_2(max(problem.num_splits, 1)))
            rows_of_program = max(1, COMBINE_TILE // (splits * width))
            strides = GivenStrides(*out_partial.stride()[:-1], *lse_partial.stride())
            self._kernel = CachedLaunch(
                combine_given_kernel,
                triton.cdiv(rows, rows_of_program),
                (strides, GivenSizes(problem.num_splits, problem.seqlen, problem.num_heads, rows)),
                (CombineGivenVariant(problem.head_dim, width, rows_of_program, splits),),
                None,
                pointers=GivenPointers,
            )
        self._kernel(problem.device, out_partial, lse_partial, out, lse)
        return out, lse


APPEND_ROWS = 16
"""Maximum tokens of an appending program. Not measured against others."""
COPY_TILE = 8192
"""Elements of keys, and of values, that a copying program moves at a time. Not measured against others."""


class AppendLaunch:
    """``(k_cache, v_cache, k, v, tensors) -> None``, in place, for tensors of one signature."""

    def __init__(self, problem: AppendProblem) -> None:
        self.problem = problem
        self._as_bits = problem.cache_dtype == FP8 and not converts_e4m3(problem.device)
        # (sequences, tokens of each): packed sequences are divided as one. Without sequences, all packed
        # tokens are padding and nothing is launched: tensors with an entry per sequence have no memory.
        batch = problem.batch
        new = (min(batch, 1), problem.total_new) if problem.varlen else (batch, problem.seqlen_new)
        queries = (min(batch, 1), problem.total_q) if problem.varlen_q else (batch, problem.seqlen_q)
        self._rows = min(APPEND_ROWS, triton.next_power_of_2(max(new[1], queries[1], 1)))
        self._programs = new[0] * triton.cdiv(new[1], self._rows) * problem.num_heads_kv
        self._programs_q = queries[0] * triton.cdiv(queries[1], self._rows) * problem.num_heads_q
        self._device = problem.device
        self._kernel: CachedLaunch | None = None

    def __call__(
        self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors
    ) -> None:
        if self._programs + self._programs_q == 0:
            return
        if self._kernel is None:
            self._kernel = self._prepare(k_cache, v_cache, k, v, tensors)
        self._kernel(self._device, *self.pointers(k_cache, v_cache, k, v, tensors))

    def by_address(
        self,
        k_cache: int,
        v_cache: int,
        k: int,
        v: int,
        slots: int,
        k_descale: int | None = None,
        v_descale: int | None = None,
    ) -> None:
        """Append by a slot mapping, with the addresses of the tensors.

        Requires :attr:`can_launch_by_address`.
        """
        kernel = self._kernel
        assert kernel is not None
        stream = kernel.stream()
        if stream is None:
            with torch.cuda.device(self._device):
                self.by_address(k_cache, v_cache, k, v, slots, k_descale, v_descale)
            return
        kernel.by_address(
            stream,
            (
                k_cache, v_cache, k, v, None, slots, None, None, None, None, None, None, k_descale, v_descale,
                None, None, None,
            ),
        )  # fmt: skip

    @property
    def can_launch_by_address(self) -> bool:
        """Whether :meth:`by_address` may be called, which requires a compiled kernel."""
        return self._kernel is not None and self._kernel.takes_addresses

    def pointers(
        self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors
    ) -> AppendPointers:
        """Return the tensors of a call as the kernel takes them."""
        if self._as_bits:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        return AppendPointers(k_cache, v_cache, k, v, *tensors)

    def arguments(
        self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors
    ) -> tuple[AppendVariant, AppendStrides, AppendLengths]:
        """Return the kernel's arguments that are not tensors."""
        problem = self.problem
        q, block_table = tensors.q, tensors.block_table
        variant = AppendVariant(
            HAS_SLOTS=problem.slots,
            HAS_LENGTHS=tensors.cache_seqlens is not None,
            HAS_BATCH_IDX=problem.batch_idx,
            VARLEN=problem.varlen,
            VARLEN_Q=problem.varlen_q,
            PAGE_SIZE=k_cache.shape[1] if problem.page_size or problem.slots else 0,
            DESCALE=problem.descale,
            QUANTISED=problem.cache_dtype == FP8,
            E4M3_BITS=self._as_bits,
            ROTARY_DIM=problem.rotary_dim,
            INTERLEAVED=problem.rotary_interleaved,
            HAS_ROTARY_SEQLENS=problem.rotary_seqlens,
            ROTATE_Q=self._programs_q > 0,
            ROTATE_Q_BY_TOKEN=problem.rotate_q_by_token,
            HEAD_DIM=problem.head_dim,
            HEAD_DIM_V=problem.head_dim_v,
            BLOCK_D=padded(problem.head_dim),
            BLOCK_DV=padded(problem.head_dim_v),
            ROWS=self._rows,
        )
        strides = AppendStrides(
            *token_strides(k_cache),
            *token_strides(v_cache),
            *token_strides(k),
            *token_strides(v),
            *((0, 0, 0) if q is None else token_strides(q)),
        )
        lengths = AppendLengths(
            table_stride=0 if block_table is None else block_table.stride(0),
            k_descale_stride=outer_stride(tensors.k_descale),
            v_descale_stride=outer_stride(tensors.v_descale),
            seqlen_new=problem.seqlen_new,
            total_new=problem.total_new,
            num_heads_kv=problem.num_heads_kv,
            seqlen_q=problem.seqlen_q,
            total_q=problem.total_q,
            num_heads_q=problem.num_heads_q,
            capacity=problem.capacity,
            num_blocks=problem.num_blocks,
            rotary_rows=problem.rotary_rows,
            batch=problem.batch,
            new_programs=self._programs,
        )
        return variant, strides, lengths

    def _prepare(self, *tensors: Any) -> CachedLaunch:
        variant, strides, lengths = self.arguments(*tensors)
        programs = self._programs + self._programs_q
        return CachedLaunch(
            append_kernel, programs, (strides, lengths), (variant,), None, pointers=AppendPointers
        )


class CopyLaunch:
    """``(k_cache, v_cache, block_pairs, tensors) -> None``, in place, for tensors of one signature."""

    def __init__(self, problem: CopyProblem) -> None:
        self._problem = problem
        self._kernel: CachedLaunch | None = None

    def __call__(self, k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor, tensors: CopyTensors) -> None:
        problem = self._problem
        if problem.num_pairs == 0 or 0 in k_cache.shape[:-1]:
            return
        if problem.dtype == FP8:  # bytes are copied, also on GPUs without FP8
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        if self._kernel is None:
            self._kernel = self._prepare(k_cache, v_cache, block_pairs, tensors)
        self._kernel(problem.device, k_cache, v_cache, block_pairs, *tensors)

    def _prepare(
        self, k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor, tensors: CopyTensors
    ) -> CachedLaunch:
        problem = self._problem
        _, num_blocks, page_size, heads, head_dim = k_cache.shape
        head_dim_v = v_cache.shape[-1]
        rows = page_size * heads
        block = min(triton.next_power_of_2(rows), max(1, COPY_TILE // padded(max(head_dim, head_dim_v))))
        parts = triton.cdiv(rows, block)
        strides = CopyStrides(*k_cache.stride()[:-1], *v_cache.stride()[:-1])
        pair_stride, pair_column_stride = block_pairs.stride()
        k_scale_strides, v_scale_strides = (
            (0, 0) if scales is None else scales.stride()[:2]
            for scales in (tensors.k_descale, tensors.v_descale)
        )
        lengths = CopyLengths(
            pair_stride=pair_stride,
            pair_column_stride=pair_column_stride,
            k_descale_stride_l=k_scale_strides[0],
            k_descale_stride_b=k_scale_strides[1],
            v_descale_stride_l=v_scale_strides[0],
            v_descale_stride_b=v_scale_strides[1],
            num_layers=problem.num_layers,
            num_blocks=num_blocks,
            page_size=page_size,
            num_heads=heads,
            parts=parts,
        )
        variant = CopyVariant(
            HAS_DESCALES=problem.descales,
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            BLOCK_D=padded(head_dim),
            BLOCK_DV=padded(head_dim_v),
            BLOCK_HEADS=triton.next_power_of_2(heads),
            BLOCK=block,
        )
        programs = parts * problem.num_layers * problem.num_pairs
        return CachedLaunch(
            copy_kernel, programs, (strides, lengths), (variant,), None, pointers=CopyPointers
        )
