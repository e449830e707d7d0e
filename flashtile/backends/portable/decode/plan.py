"""Plan of a call over a cache: operands, grids, variants and tiles of its kernels.

:mod:`schedule` defines *m_block*, *n_block*, *work tile* and *team*.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flashtile.backends.common.device import capability, multiprocessors
from flashtile.backends.common.launch import (
    is_aligned,
    largest_divisor,
    outer_stride,
    padded,
    tile_widths,
    token_strides,
)
from flashtile.backends.portable.config import family
from flashtile.backends.portable.decode.arguments import DecodeStrides, DecodeVariant, OuterStrides
from flashtile.backends.portable.decode.combine import CombineVariant
from flashtile.backends.portable.decode.config import NARROW, DecodeConfig, bytes_to_read, operand_bytes
from flashtile.backends.portable.decode.schedule import DecodeLengths
from flashtile.problems.common import UNLIMITED
from flashtile.problems.decode import FP8, AppendProblem, CacheTensors, DecodeProblem

SCAN_BLOCKS = 1, 32, 256, 1024
"""Numbers of m_blocks that a stream-K program may read at a time. They are few, because each is a kernel."""
MAX_HEADS_PER_TEAM = 8
"""With 256 bytes per token and head, this many heads fill two pages of DRAM."""

COMBINE_TILE = 4096
"""Elements of partial results that four warps of a combining program load at a time. The program waits on a
multiprocessor for two attention programs to end, so its registers must fit next to theirs."""
MIN_SPLITS = 8
"""Fewest splits that a combining program loads at a time. The planned number is an average over work tiles,
so some work tiles have more splits."""
MIN_PAIRED_WIDTH = 32
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
MIN_UNIFIED_N_BLOCKS = 8
"""Minimum n_blocks of the longest sequence for a unified maximum: with fewer, the check of a work tile costs
more than it saves."""


def has_dependent_launch(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch (compute capability 9.0 and up)."""
    return capability(device) >= (9, 0)


def converts_e4m3(device: torch.device) -> bool:
    """Whether the device converts e4m3 in hardware (compute capability 8.9 and up)."""
    return capability(device) >= (8, 9)


def as_operands(k_cache: Tensor, v_cache: Tensor, config: DecodeConfig) -> tuple[Tensor, Tensor]:
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
    whether an address is a multiple of 16, so the function checks for that.
    """
    return not (cache.data_ptr() % 16 or cache.shape[-1] % 2 or any(s % 2 for s in cache.stride()[:-1]))


def m_blocks_of(problem: DecodeProblem, config: DecodeConfig) -> int:
    """Return the number of m_blocks of the longest sequence."""
    return -(-problem.seqlen_q * problem.group_size // config.tile.BLOCK_M)  # triton.cdiv takes 2 us


def is_stream_k(problem: DecodeProblem, config: DecodeConfig) -> bool:
    """Whether programs share all n_blocks equally (stream-K).

    Otherwise each work tile is divided into splits, which depend on the length of its own sequence only.
    """
    if problem.num_splits != 0 or problem.split_size != 0:
        return False
    m_blocks = m_blocks_of(problem, config)
    most = problem.total_q * problem.group_size // config.tile.BLOCK_M + problem.batch
    work_tiles = min(problem.batch * m_blocks, most) * problem.num_heads_kv
    columns = problem.head_dim + problem.head_dim_v
    tile_bytes = bytes_to_read(keys_seen(problem), columns, operand_bytes(problem))
    even = not (problem.page_size or problem.lengths or problem.leftpad or problem.varlen)
    return config.takes_stream_k(m_blocks, work_tiles, multiprocessors(problem.device), tile_bytes, even)


def keys_seen(problem: DecodeProblem) -> int:
    """Return the maximum number of keys that the rows of a work tile can see."""
    left, _ = effective_window(problem)
    return problem.capacity if left == UNLIMITED else min(problem.capacity, left + problem.seqlen_q)


def layout(problem: DecodeProblem, config: DecodeConfig, stream_k: bool) -> dict[str, Any]:
    """Return the fields of :class:`schedule.Layout`, by name.

    ``stream_k``: whether the grid is stream-K. In other grids, programs do not scan m_blocks.
    """
    left, right = effective_window(problem)
    m_blocks = problem.batch * m_blocks_of(problem, config) if stream_k else 1
    scan = next((block for block in SCAN_BLOCKS if m_blocks <= block), SCAN_BLOCKS[-1])
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
    """Return the number of programs of a stream-K grid."""
    count = multiprocessors(problem.device)
    work_tiles = problem.batch * m_blocks_of(problem, config) * problem.num_heads_kv
    most_n_blocks = work_tiles * -(-problem.capacity // config.tile.BLOCK_N)
    one = problem.batch == 1 and problem.lengths and config.tile.BLOCK_M == NARROW
    few_n_blocks = FEW_N_BLOCKS_OF_ONE if one else FEW_N_BLOCKS
    few = work_tiles <= count and most_n_blocks <= few_n_blocks * count
    few = few and has_dependent_launch(problem.device)
    return count if few else count * config.programs_per_sm


def heads_per_team(problem: DecodeProblem, config: DecodeConfig) -> int:
    """Return the number of adjacent key/value heads per team, a divisor of ``num_heads_kv``.

    For tiles of few rows, reading adjacent heads together saves time. For taller tiles, a team is one head:
    the grid consists of whole teams, so larger teams would leave multiprocessors idle.
    """
    if not is_stream_k(problem, config) or config.tile.BLOCK_M > NARROW:
        return 1
    return largest_divisor(problem.num_heads_kv, MAX_HEADS_PER_TEAM)


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
    left, right = effective_window(problem)
    return DecodeLengths(
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
        attention_chunk=effective_chunk(problem),
    )


def effective_window(problem: DecodeProblem) -> tuple[int, int]:
    """Return the window (left, right). A side that hides no key is UNLIMITED. A chunk limits both sides."""
    left, right, chunk = problem.window_left, problem.window_right, effective_chunk(problem)
    if chunk is not None:
        left, right = (chunk - 1 if side == UNLIMITED else min(side, chunk - 1) for side in (left, right))
        return left, UNLIMITED if problem.seqlen_q == 1 else right
    return (
        UNLIMITED if left >= problem.capacity - 1 else left,
        UNLIMITED if right >= problem.seqlen_q - 1 else right,
    )


def effective_chunk(problem: DecodeProblem) -> int | None:
    """Return the chunk size, at most the capacity, or None if chunks do not change which keys are visible."""
    capacity = max(problem.capacity, 1)
    # If there are more queries than keys, the first queries come before all keys, and no key is in their
    # chunk. So a chunk that covers all keys may still hide them from these queries. It hides none if there is
    # one query, or if the window hides all keys after a query.
    one_chunk = problem.attention_chunk >= capacity and (problem.window_right == 0 or problem.seqlen_q == 1)
    return None if problem.attention_chunk == 0 or one_chunk else min(problem.attention_chunk, capacity)


def softmax_max_kind(problem: DecodeProblem, config: DecodeConfig) -> str:
    """Return the kind of ``softmax_max`` that replaces the maxima of rows.

    "number" is one number for all heads, and "head" is one number per head. With "none", maxima are computed.
    """
    if problem.capacity < MIN_UNIFIED_N_BLOCKS * config.tile.BLOCK_N:
        return "none"
    if problem.softmax_max_by_head:
        return "head"
    return "none" if problem.softmax_max is None else "number"


def decode_variant(
    problem: DecodeProblem,
    config: DecodeConfig,
    *,
    native_e4m3: bool,
    pairs: bool,
    pdl: bool,
    wide: bool,
    aligned: bool,
) -> DecodeVariant:
    stream_k = is_stream_k(problem, config)
    e4m3 = problem.cache_dtype == FP8
    bound_by_bytes = stream_k and config.tile.BLOCK_M == NARROW and problem.dtype.itemsize < 4
    least = MIN_PAIRED_WIDTH if pairs else 16  # half a row must still be wide enough for a product
    block_d, block_dv = tile_widths(problem.head_dim, problem.head_dim_v, aligned, least)
    return DecodeVariant(
        **layout(problem, config, stream_k),
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
        STREAM_K=stream_k,
        SPLIT=stream_k or problem.num_splits > 1 or problem.split_size > 0,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        WIDE=wide,
        PDL=pdl,
        PREFETCH=PREFETCH if pdl and bound_by_bytes else 0,
        PRECISION=config.precision,
        APPEND=None,
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


def aligned(problem: DecodeProblem, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether k and v are aligned for asynchronous loads.

    If they are not, :func:`decode_variant` gives the tiles of k and v the same width.
    """
    return problem.head_dim_v % 16 == 0 and is_aligned(k_cache) and is_aligned(v_cache)


def extent(cache: Tensor) -> int:
    """Return the distance from the cache's first element to its last, plus one tile of rows, in elements."""
    size, stride = cache.shape, cache.stride()
    last = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return last + MAX_BLOCK_N * stride[1]


def strides_of(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> DecodeStrides:
    return DecodeStrides(*token_strides(q), *token_strides(k_cache), *token_strides(v_cache))


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
