"""Attention of few query rows over a cache: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023) in portable
Triton.

Its time is bound by reading the cache, so the cache is read once: all query heads of a key/value head and all
query tokens form one tile of rows. The work is a list of *n_blocks* (BLOCK_N keys of one sequence and head),
which :mod:`schedule` divides among the programs; it also defines *m_block* and *work tile*. Two kinds of
grid::

    STREAM_K    attend_stream_k     an equal, contiguous share of all n_blocks, over any number of work tiles
    otherwise   attend_split        one split of one work tile, which depends on its own length only

    work tiles      |   A    |        B        |  C |           three sequences, one head
    n_blocks        0  1  2  3  4  5  6  7  8  9  10 11
    share of        -- 0 --  -- 1 --  -- 2 --  --- 3 ---        four programs of a stream-K grid

For each of its work tiles a program (attend_work_tile) takes these steps::

    load lengths                                       where the keys are
    load Q, scales, the block table of n_blocks 0, 1   all at once, then a barrier
    m = -inf, l = 0, acc = 0
    for each n_block n:                                attend_n_blocks: the forward pass' inner loop
        load the block table of n + 2                  two ahead of the keys that it leads to
        load K by table;  S = Q K^T;  mask;  online softmax: P, m, l, alpha
        load V by table;  acc = alpha acc + P V
    whole work tile:   out = acc / l, lse              sink and prior results are added here
    part of one:       normalised partial result and its log-sum-exp in base 2, for :mod:`combine`

*Prior* results are the caller's, over keys that this call does not have, such as a shared prefix.

With PREFETCH, loads run ahead of this order: before the preceding kernel has ended (prefetch_first), and two
n_blocks before the end of each work tile (prefetch_next), so that memory stays busy while lengths and tables
are loaded.

The cache is dense or in *pages* (PagedAttention, Kwon et al. 2023, arXiv:2309.06180). Entries of the block
table are read only for keys that a row sees. Pages and lengths from the caller are clamped to the cache; an
invalid one makes the result of its work tile NaN.

The unified maximum (FlashDecoding++, Hong et al. 2023, arXiv:2311.01282, section 3): the number subtracted
from scores need not be their maximum. Any number phi gives the same quotient, as long as no sum overflows or
is so small that it has lost bits. With phi given, no maximum is computed and nothing is rescaled. The sums
are checked once, at the end of a work tile. If they are out of range, the same program computes the tile
again with the online softmax.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.tiles import LOG2_E, decode_bits, split_pairs, tile_index
from flashtile.backends.portable.decode.append import (
    AppendVariant,
    append_tokens,
    load_rotated,
    start_of_rotation,
)
from flashtile.backends.portable.decode.schedule import (
    Layout,
    Rows,
    WorkTile,
    heads_of_rows,
    load_sequence,
    lse_places,
    normalised,
    packed_tokens,
    reach_of,
    sequence_of,
    share_start,
    split_size,
    store_results,
    store_rows,
    stream_k_start,
    with_prior,
    work_tile_at,
)
from flashtile.backends.portable.masking import visible, window_at
from flashtile.backends.portable.tiles import softcap_and_alibi, softmax_step
from flashtile.problems.decode import CacheTensors


@dataclass(frozen=True)
class DecodeVariant(Layout):
    """Constants of the attention kernel, passed as one argument."""

    PAGE_SIZE: int
    """Tokens per page; 0 for a dense cache."""
    HAS_BATCH_IDX: bool
    HAS_SOFTCAP: bool
    HAS_ALIBI: bool
    HAS_SINK: bool
    HAS_TREE: bool
    HAS_PRIOR: bool
    HAS_QV: bool
    """Whether scores include the products of ``qv`` with the values. Not with a cache in e4m3."""
    SCALED_SCORES: bool
    """Whether scores are more than raw products times a positive scale, so that their order may differ. True
    for e4m3, whose scale differs from row to row."""
    SOFTMAX_MAX: str
    """Kind of unified maximum: "none", "number" (one for all heads) or "head" (one for each query head)."""
    DESCALE: str
    """Scales of the cache: "none", "head" (one per head), "block" (per head of each page, or of each row of a
    dense cache) or "sequence" (per head of each sequence)."""
    E4M3: bool
    """Whether the cache is in FP8; products are then in float16, unless queries are in float32."""
    E4M3_BITS: bool
    """Whether e4m3 elements are decoded in software."""
    E4M3_PAIRS: bool
    """Whether the cache is viewed as pairs of elements; even and odd columns are multiplied separately."""
    STREAM_K: bool
    """Whether programs share all n_blocks equally (stream-K, :mod:`schedule`)."""
    SPLIT: bool
    """Whether a work tile may have several splits; always True if STREAM_K."""
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    WIDE: bool
    """Whether offsets into the cache need 64 bits."""
    PDL: bool
    """Programmatic dependent launch: the combining kernel may start before this one has ended."""
    PREFETCH: int
    """How many n_blocks before the end of a work tile the next work tile's first n_blocks are prefetched to
    the L2 cache. In a program's last work tile, dependent kernels are launched at this point instead. 0: no
    prefetch; dependent kernels are launched at the start."""
    PRECISION: str
    APPEND: AppendVariant | None
    """How the kernel appends a new token of each sequence and rotates the queries. None: it does neither."""
    WEIGHTS: bool
    """Whether the kernel stores P of each n_block and the maxima that it is relative to, for :mod:`mass`. Not
    with APPEND, nor with a unified maximum."""

    @property
    def faults_ahead(self) -> bool:
        """Whether a work tile's pages are checked before the loop over its n_blocks.

        Within the loop the check is free for small tiles: 8 sequences of 8192 keys take 70.1 us with it and
        without (H200). For other tiles, the loop has no register to spare: with the check, e4m3 of head_dim
        64 had 168 registers instead of 128, and took 41.6 instead of 37.8 us.
        """
        return self.PAGE_SIZE != 0 and (self.BLOCK_M > 16 or self.E4M3)

    @property
    def one_page(self) -> bool:
        """Whether an n_block lies within one page."""
        return self.PAGE_SIZE % self.BLOCK_N == 0

    @property
    def sums_late(self) -> bool:
        """Whether a row's exponentials are summed over columns only after the last n_block.

        In tiles of few rows, several warps share a row and would have to exchange sums in each n_block. Tiles
        of 64 rows gained nothing from it.
        """
        return self.BLOCK_M < 64


def decode_pointers(name: str, own: str, module: str) -> Any:
    """Return a NamedTuple type for a kernel's tensors, which the named module keeps under its name.

    ``own`` names the tensors of this kernel, separated by spaces. Those of :class:`CacheTensors` follow.
    """
    return namedtuple(name, (*own.split(), *CacheTensors._fields), module=module)


DecodePointers = decode_pointers("DecodePointers", "q k v out lse partial new", __name__)
"""``new`` is :class:`append.AppendPointers` of the new tokens, if C.APPEND is given, :class:`WeightPointers`
with C.WEIGHTS, else None."""


class WeightPointers(NamedTuple):
    """Memory of the probabilities of a call, by rows of lse, with room for the n_blocks of the capacity."""

    weights: Any
    """(rows, n_blocks * BLOCK_N), in the dtype of products: exp2(score - maximum), not normalised."""
    maxima: Any
    """(rows, n_blocks) float32: the maximum of each n_block, in log2 units."""


class OuterStrides(NamedTuple):
    """Strides between sequences (for scales of an FP8 cache: pages or sequences), in elements; 0 if all
    share one entry. The kernel is not specialized on their values, since no wide load depends on them."""

    table_stride: Any
    alibi_stride: Any
    k_descale_stride: Any
    v_descale_stride: Any
    tree_stride: Any


class DecodeNumbers(NamedTuple):
    """Floating-point scalars of the call, applied to scores."""

    softmax_scale: Any
    scale_log2: Any
    """softmax_scale * log2(e)."""
    softcap: Any
    softmax_max: Any
    """Unified maximum, subtracted from scores in natural units; None for the online maximum."""


class DecodeCall(NamedTuple):
    """The kernel's arguments, as its step functions pass them on."""

    pointers: Any
    strides: Any
    outer: Any
    lengths: Any
    numbers: Any
    num_blocks: Any
    """Pages, or rows of a dense cache."""
    splits: Any
    """:class:`schedule.Splits`; in the kernel for mass, :class:`mass.MassSizes`."""
    new_strides: Any
    """:class:`append.AppendStrides` of the new tokens, or None, like ``new_lengths``."""
    new_lengths: Any


@kernel(do_not_specialize=("outer", "lengths", "num_blocks", "splits", "new_lengths"))
def decode_kernel(
    pointers, strides, outer, lengths, numbers, num_blocks, splits, new_strides, new_lengths, C: tl.constexpr
):
    """Compute attention over a cache, after appending a new token of each sequence if C.APPEND is given.

    A program stores the results ``out`` and ``lse`` of each work tile that it computes alone. Of a work tile
    that several programs share, each program stores a partial result.

    Grid: (teams * HEADS_PER_TEAM,) if STREAM_K, else (m_blocks * splits * heads_kv * batch,).

    q is (batch, seqlen_q, heads_q, HEAD_DIM), or (total_q, heads_q, HEAD_DIM) when VARLEN. Caches are (rows,
    capacity, heads_kv, ...) or (num_blocks, PAGE_SIZE, heads_kv, ...). out is like q, with HEAD_DIM_V
    columns. lse is (batch, heads_q, seqlen_q) or (heads_q, total_q). out and lse are contiguous. Partial
    results are float32: outputs (slots, partial_rows, HEAD_DIM_V), then log-sum-exps (slots, partial_rows).
    """
    call = DecodeCall(
        pointers, strides, outer, lengths, numbers, num_blocks, splits, new_strides, new_lengths
    )
    program = tl.program_id(0)
    if C.PREFETCH != 0:
        prefetch_first(program, call, C)
    if C.PDL:
        # This point may be reached before the preceding kernel has ended. What was read before the wait has
        # only chosen what to prefetch, so it may be out of date. The combining kernel reads lengths as soon
        # as it starts. So it may start only after this wait: here, or later if the program prefetches
        # (prefetch_next).
        tl.extra.cuda.gdc_wait()
        if C.PREFETCH == 0:
            tl.extra.cuda.gdc_launch_dependents()
    if C.STREAM_K:
        attend_stream_k(program, call, C)
    else:
        attend_split(program, call, C)


@triton.jit
def attend_stream_k(program, call, C: tl.constexpr):
    """Do the work of a program in a stream-K grid: attend to an equal, contiguous share of all n_blocks."""
    HEADS: tl.constexpr = C.HEADS_PER_TEAM
    pointers, lengths = call.pointers, call.lengths
    team = program // HEADS
    teams = tl.num_programs(0) // HEADS
    total, position, m_block, m_block_start = stream_k_start(
        tl.arange(0, C.SCAN_BLOCK), team, teams, pointers, lengths, C
    )
    end = share_start(team + 1, teams, total)
    # The condition is not checked before the first iteration. So values that do not depend on the lengths are
    # computed while the lengths are loaded.
    more = tl.full([], True, tl.int1)
    while more:
        work, nth, m_block_end = work_tile_at(program, position, m_block, m_block_start, pointers, lengths, C)
        count = min(work.n_blocks - nth, end - position)
        position += count
        more = position < end
        # If a team covers all heads, every work tile of a program is in a new m_block. The next m_block is
        # then known before the lengths are loaded. A share that ends within a tile does not need it.
        finished = (position >= m_block_end) | C.ONE_TEAM
        m_block += finished.to(tl.int32)
        m_block_start = tl.where(finished, m_block_end, m_block_start)
        next_work, next_first = work, nth  # placeholders: loops and calls do not take None
        if C.PREFETCH != 0:
            next_work, next_first, _ = work_tile_at(
                program, position, m_block, m_block_start, pointers, lengths, C
            )
            next_first = next_work.keys.first // C.BLOCK_N + next_first
        if count > 0:  # a share is empty if there are fewer n_blocks than teams
            # A program has two slots for partial results: the first for a work tile that an earlier program
            # began, the second for a work tile that it begins itself. It has at most one of each.
            slot = 2 * program + (nth == 0).to(tl.int32)
            attend_work_tile(
                work, work.keys.first // C.BLOCK_N + nth, count, slot, count == work.n_blocks, next_work,
                next_first, more, call, C,
            )  # fmt: skip


@triton.jit
def attend_split(program, call, C: tl.constexpr):
    """Do the work of a program in a grid without stream-K: attend to one split of a work tile.

    The split depends only on the length of the tile's sequence. The m_blocks of a sequence run concurrently
    and share keys in the L2 cache; the last ones start first, because they see the most keys.
    """
    lengths, splits = call.lengths, call.splits
    m_blocks, num_splits = lengths.m_blocks_per_sequence, splits.num_splits
    m = m_blocks - 1 - program % m_blocks  # m_blocks vary fastest, then splits: split_parts relies on it
    split = (program // m_blocks) % num_splits
    head_kv = program // (m_blocks * num_splits) % lengths.num_heads_kv
    b = program // (m_blocks * num_splits * lengths.num_heads_kv)
    sequence = load_sequence(b, True, call.pointers, lengths, C)
    num_rows, keys, n_blocks = reach_of(m, sequence, lengths, C)
    each = n_blocks
    if C.SPLIT:
        each = split_size(n_blocks, splits)
    nth = split * each
    if nth < n_blocks:
        work = WorkTile(b * m_blocks + m, head_kv, sequence, num_rows, keys, n_blocks)
        attend_work_tile(
            work, keys.first // C.BLOCK_N + nth, min(each, n_blocks - nth), program, each >= n_blocks, work,
            nth, False, call, C,
        )  # fmt: skip


@triton.jit
def attend_work_tile(
    work, first, count, slot, whole, next_work_tile, next_first, more, call, C: tl.constexpr
):
    """Attend to ``count`` n_blocks of a work tile, from n_block ``first`` on.

    If ``whole``, these n_blocks are the whole work tile, and the result goes to ``out``. Otherwise it goes to
    ``slot`` of the partial results. If ``more``, the program continues with ``next_work_tile`` from n_block
    ``next_first`` on, and the first n_blocks of that work tile are prefetched.
    """
    pointers, lengths = call.pointers, call.lengths
    sequence = work.sequence

    # Prologue: all that depends on the lengths alone, in one round trip to memory.
    b, m = sequence_of(work.m_block, lengths, C)
    b = b.to(tl.int64)
    index = tl.arange(0, C.BLOCK_M)
    exists = index < work.num_rows
    tokens, heads = heads_of_rows(m * C.BLOCK_M + index, work.head_kv, lengths, C)
    rows = Rows(b, sequence.start_q, tokens, heads, exists)
    cache = cache_of(work, first, call, C)
    next_cache = cache  # a placeholder, like tree_rows below: a tuple carried by a loop must not hold None
    if C.PREFETCH != 0:  # the next work tile's block table is loaded with this one's, long before its keys
        next_cache = cache_of(next_work_tile, next_first, call, C)
    q, qv = load_queries(rows, call, C)
    slope, k_scale, v_scale, tree_rows = load_terms(rows, work.head_kv, call, C)
    if C.SOFTMAX_MAX != "none":
        phi = call.numbers.softmax_max
        if C.SOFTMAX_MAX == "head":
            phi = tl.load(pointers.softmax_max + heads, mask=exists, other=0.0)
        # In log2 units; an integer, so that its exp2 is exact (shifted_exponentials needs it for float32).
        shift = tl.floor(phi * LOG2_E + 0.5)
    faults = find_faults(cache, first, first + count, work.keys, C)
    if C.APPEND is not None:
        APPEND: tl.constexpr = C.APPEND
        # Only the program of the last n_block writes the token, and no other program reads it: all rows of a
        # key head are in one work tile (launch.appends).
        if first + count == work.keys.first // C.BLOCK_N + work.n_blocks:
            token = tl.arange(0, APPEND.ROWS)
            append_tokens(
                work.head_kv, b, token, tl.zeros([], tl.int64), token == 0, pointers.new, call.new_strides,
                call.new_lengths, APPEND,
            )  # fmt: skip
    # The first loads of a work tile are issued together. Without a barrier, the compiler would move each load
    # to its use, and their latencies would add up: 430 instead of 732 instructions before the first keys, and
    # 64 sequences of 512 keys take 60.1 instead of 64.0 us on an H100. The barrier also orders the stores of
    # the new token before the loads of the cache by other threads.
    tl.debug_barrier()
    dtype: tl.constexpr = pointers.q.dtype.element_ty
    q, k_scale = as_operands(q, k_scale, C)
    next_work = NextWork(next_cache, next_first, next_work_tile.keys, more)
    score_rows = score_rows_of(rows, slope, k_scale, tree_rows, sequence, lengths, C)
    last = first + count

    # Main loop.
    if C.SOFTMAX_MAX == "none":
        acc, row_max, row_sum = attend_n_blocks(
            q, first, last, work.keys, cache, faults, next_work, score_rows, call, dtype, C, C.PREFETCH, qv
        )
    else:
        acc, _, row_sum = attend_n_blocks(
            q, first, last, work.keys, cache, faults, next_work, score_rows, call, dtype, C, C.PREFETCH, qv,
            shift,
        )  # fmt: skip
        row_max = shift + tl.zeros_like(row_sum)
        OPERAND: tl.constexpr = dtype if C.DESCALE == "block" else q.dtype  # what P was rounded to
        if is_in_range(acc, row_sum, exists, count * C.BLOCK_N, OPERAND) == 0:
            # Compute the cache and the faults again. This is rare, and values that are kept for this case
            # would occupy registers in the first loop. If all tiles came here, a call would take 1.5 to 2
            # times as long. PREFETCH is 0: the first loop has prefetched and launched the dependents.
            again = cache_of(work, first, call, C)
            faults = find_faults(again, first, last, work.keys, C)
            acc, row_max, row_sum = attend_n_blocks(
                q, first, last, work.keys, again, faults, next_work, score_rows, call, dtype, C, 0, qv
            )
        if C.HAS_SINK or C.HAS_PRIOR:
            # Make row_sum 1 and row_max the log-sum-exp (base 2), as if by the online softmax. What is added
            # then may have scores far from phi. Rows without keys keep the sum 0.
            empty = row_sum == 0.0
            total = tl.where(empty, 1.0, row_sum)
            new_max = tl.where(empty, -float("inf"), row_max + tl.log2(total))
            acc, row_max, row_sum = acc / total[:, None], new_max, tl.where(empty, 0.0, 1.0)

    # Epilogue.
    if C.DESCALE == "head" or C.DESCALE == "sequence":  # one number: once here, instead of in each n_block
        acc = acc * v_scale
    # Results over other keys (``prior_out``) and the sink are added once: here if the work tile is whole,
    # otherwise where its partial results are combined.
    if C.HAS_PRIOR:  # noqa: SIM102 - HAS_PRIOR is a constant, ``whole`` is not
        if whole:
            acc, row_max, row_sum = with_prior(
                acc, row_max, row_sum, pointers.prior_out, pointers.prior_lse, rows, lengths, C
            )
    out, lse = normalised(acc, row_max, row_sum)
    if whole:
        store_results(pointers, out, lse, rows, lengths, C)
    elif C.SPLIT:
        # Normalised, so that combining needs one number per row instead of a maximum and a sum.
        splits = call.splits
        partial_row = slot.to(tl.int64) * splits.partial_rows + index
        offsets = partial_row * C.HEAD_DIM_V
        store_rows(pointers.partial, offsets, exists, out, C.HEAD_DIM_V, C.BLOCK_DV)
        partial_lse = pointers.partial + splits.slots.to(tl.int64) * splits.partial_rows * C.HEAD_DIM_V
        tl.store(partial_lse + partial_row, lse, mask=exists)


@triton.jit
def load_queries(rows, call, C: tl.constexpr):
    """Load (q [BLOCK_M, BLOCK_D], qv [BLOCK_M, BLOCK_DV]). Without qv, return (q, q).

    If C.APPEND has rotary embedding, q is rotated.
    """
    pointers, strides, lengths = call.pointers, call.strides, call.lengths
    tokens = rows.start_q.to(tl.int64) + rows.tokens
    columns = tl.arange(0, C.BLOCK_D)
    offsets = rows.b * strides.q_batch + tokens * strides.q_token
    offsets += rows.heads.to(tl.int64) * strides.q_head
    q = tl.load(
        pointers.q + offsets[:, None] + columns[None, :],
        mask=rows.exists[:, None] & (columns < C.HEAD_DIM)[None, :],
        other=0.0,
    )
    if C.APPEND is not None:
        APPEND: tl.constexpr = C.APPEND
        if APPEND.ROTARY_DIM > 0:
            dtype: tl.constexpr = q.dtype
            new, rotary_rows = pointers.new, call.new_lengths.rotary_rows
            positions = rows.tokens * 0 + start_of_rotation(rows.b, new, APPEND)
            q = load_rotated(pointers.q, offsets, rows.exists, positions, new, rotary_rows, APPEND)
            q = q.to(dtype)
    qv = q
    if C.HAS_QV:
        columns_v = tl.arange(0, C.BLOCK_DV)
        num_heads_q = lengths.num_heads_kv * lengths.group_size
        qv_rows = packed_tokens(rows, lengths, C) * num_heads_q + rows.heads
        qv = tl.load(
            pointers.qv + qv_rows[:, None] * C.HEAD_DIM_V + columns_v[None, :],
            mask=rows.exists[:, None] & (columns_v < C.HEAD_DIM_V)[None, :],
            other=0.0,
        )
    return q, qv


@triton.jit
def load_terms(rows, head_kv, call, C: tl.constexpr):
    """Load what scores of ``rows`` depend on, in addition to products: (slope, k_scale, v_scale, tree_rows).

    Scales per head and per sequence are numbers of the work tile. Those per block come with the keys.
    """
    pointers, lengths, outer = call.pointers, call.lengths, call.outer
    tree_rows = rows.tokens
    slope = tl.zeros([], tl.float32)
    if C.HAS_ALIBI:
        slopes = pointers.alibi_slopes + rows.b * outer.alibi_stride + rows.heads
        slope = tl.load(slopes, mask=rows.exists, other=0.0)[:, None]
    k_scale = tl.full([], 1.0, tl.float32)
    v_scale = k_scale
    if C.DESCALE == "head":
        k_scale = tl.load(pointers.k_descale + head_kv)
        v_scale = tl.load(pointers.v_descale + head_kv)
    if C.DESCALE == "sequence":
        k_scale = tl.load(pointers.k_descale + rows.b * outer.k_descale_stride + head_kv)
        v_scale = tl.load(pointers.v_descale + rows.b * outer.v_descale_stride + head_kv)
    if C.HAS_TREE:
        tree_rows = pointers.tree_mask + rows.b * outer.tree_stride + rows.tokens * lengths.seqlen_q
    return slope, k_scale, v_scale, tree_rows


@triton.jit
def as_operands(q, k_scale, C: tl.constexpr):
    """Return (q in the dtype of products, k_scale times what q was divided by)."""
    IN_FLOAT16: tl.constexpr = C.E4M3 and q.dtype != tl.float32
    if IN_FLOAT16:
        # Products with a cache in e4m3 are in float16: the conversion is exact and cheap, while bfloat16
        # would take the slowest conversion unit. Dividing q by the power of two at or below the largest
        # element of its row brings it into float16's range. The quotient is exact, except for elements that
        # are more than 2^24 times smaller than the largest.
        q = q.to(tl.float32)
        largest = tl.max(tl.abs(q), 1)
        # The exponent alone, as a float32: a power of two. 0 means that the row is 0 or subnormal.
        q_scale = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        q_scale = tl.where(q_scale == 0.0, 1.0, q_scale)
        q = (q / q_scale[:, None]).to(tl.float16)
        k_scale = (k_scale * q_scale)[:, None]
    return q, k_scale


class ScoreRows(NamedTuple):
    """Properties of a tile's rows that scores depend on: [BLOCK_M], or a scalar for all rows."""

    tokens: Any
    offset: Any
    """len_k - len_q: token i stands at key i + offset."""
    slope: Any
    k_scale: Any
    tree_rows: Any
    """Pointers to the tokens' rows of the tree mask."""
    len_q: Any
    window: Any
    """How far a token sees, as ``window_at`` returns it: scalars or [BLOCK_M, 1]."""
    places: Any
    """Places of the rows in lse, -1 for rows that do not exist; a dummy unless C.WEIGHTS."""


@triton.jit
def score_rows_of(rows, slope, k_scale, tree_rows, sequence, lengths, C: tl.constexpr):
    """Return the :class:`ScoreRows` of the rows of a tile."""
    tokens = rows.tokens
    offset = sequence.len_k - sequence.len_q
    window = window_at((tokens + offset)[:, None], sequence.leftpad, lengths.mask, C)
    places = tokens
    if C.WEIGHTS:
        places = lse_places(rows, lengths, C).to(tl.int32)
        places = tl.where(rows.exists, places, -1)
    return ScoreRows(tokens, offset, slope, k_scale, tree_rows, sequence.len_q, window, places)


@triton.jit
def weight_places(n, places, lengths, C: tl.constexpr):
    """Return the place of n_block ``n`` in the maxima, for rows at ``places`` in lse.

    In the weights, the n_block begins at BLOCK_N times this place.
    """
    n_blocks = (lengths.capacity + C.BLOCK_N - 1) // C.BLOCK_N
    return places.to(tl.int32) * n_blocks + n  # the memory of weights is bounded (mass.MAX_STORED_BYTES)


class NextWork(NamedTuple):
    """The work tile that a program attends to after the present one."""

    cache: Any
    n_block: Any
    keys: Any
    exists: Any


@triton.jit
def attend_n_blocks(
    q, first, last, keys, cache, faults, next_work, rows, call, dtype: tl.constexpr, C: tl.constexpr,
    PREFETCH: tl.constexpr, qv, shift=None,
):  # fmt: skip
    """Attend to ``keys`` in n_blocks ``first`` to ``last`` (exclusive).

    Returns (acc [BLOCK_M, BLOCK_DV], row_max [BLOCK_M], row_sum [BLOCK_M]). Sums are NaN if ``faults`` of
    :func:`find_faults` are not 0, or if a page is not in the cache.

    ``dtype`` is the dtype of the call's queries. If pages have scales, values are multiplied by the scales
    and rounded to ``dtype``. If ``shift`` is given, it is subtracted from scores instead of their maximum.
    ``qv`` [BLOCK_M, BLOCK_DV]: queries that are multiplied by the values, if C.HAS_QV.
    """
    PAGE_SIZE: tl.constexpr = C.PAGE_SIZE
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    BLOCK_N: tl.constexpr = C.BLOCK_N
    operand: tl.constexpr = q.dtype
    q_odd = tl.zeros([], tl.float32)  # a dummy, unless the cache is read in pairs of columns
    acc_odd = q_odd
    if C.E4M3_PAIRS:  # even and odd columns of q, and of the output, each by itself (multiply_keys)
        q, q_odd = tl.split(tl.reshape(q, [BLOCK_M, C.BLOCK_D // 2, 2]))
        acc = tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = 0.0
    if C.faults_ahead:  # with a fault the sum begins as NaN, and stays NaN: [BLOCK_N], like the faults
        row_sum = tl.where(faults == 0, 0.0, float("nan"))
    if C.sums_late:  # a sum for each row and column of the tile
        row_sum += tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        if C.faults_ahead:
            row_sum = tl.sum(row_sum, 0)
        row_sum += tl.zeros([BLOCK_M], tl.float32)
    # Block-table entries are loaded two n_blocks ahead of their keys, so that the latencies of both loads do
    # not add up. Triton could pipeline both loads, but then entries and keys would share the stages, and half
    # as many bytes of keys would be in flight. Entries are clamped to the cache before they become addresses;
    # given ^ clamped is not 0 if one was invalid.
    current, upcoming = cache.pages
    if PAGE_SIZE != 0:
        given = current
        current = in_cache(given, cache.num_blocks)
        if not C.faults_ahead:
            faults = faults | (given ^ current)
    for n in range(first, last):
        if PREFETCH != 0:
            prefetch_next(n, first, last, next_work, call.strides, PREFETCH, C)
        start = n * C.BLOCK_N
        seen = is_seen(start + tl.arange(0, BLOCK_N), keys, C)
        page = cache.row  # in a dense cache, the row of the sequence takes the place of the page
        if PAGE_SIZE != 0:
            page = page_of_keys(current, C)
            current = in_cache(upcoming, cache.num_blocks)
            if not C.faults_ahead:
                faults = faults | (upcoming ^ current)
            upcoming = load_pages(cache.block_table, n + 2, keys, C)
        scores, values = scores_of(q, q_odd, qv, n, cache, page, seen, rows, call, C)

        # Softmax. Sums over columns are late (sums_late) where they would be an exchange between warps. The
        # maximum cannot be late: P needs it.
        if shift is not None:
            p = shifted_exponentials(scores, shift, call.numbers.scale_log2, C, dtype)
            if C.sums_late:
                row_sum += p
            else:
                row_sum += tl.sum(p, 1)
        else:
            p, row_max, alpha = softmax_step(scores, row_max, call.numbers.scale_log2, C.SCALED_SCORES, True)
            if C.WEIGHTS:
                # Rows that see no key have an n_block, which may begin where the cache ends.
                exist = (rows.places >= 0) & (start < call.lengths.capacity)
                to = call.pointers.new
                maxima = weight_places(n, rows.places, call.lengths, C)
                weights = maxima[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                # Kept in L2 while keys and values pass: 5 to 6 % of a step if P takes 8 MB. With 0.5 or 34 MB
                # it neither gains nor costs (H200).
                tl.store(to.maxima + maxima, row_max, mask=exist, eviction_policy="evict_last")
                tl.store(
                    to.weights + weights, p.to(operand), mask=exist[:, None], eviction_policy="evict_last"
                )
            if C.sums_late:
                row_sum = row_sum * alpha[:, None] + p
            else:
                row_sum = row_sum * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            if C.E4M3_PAIRS:
                acc_odd = acc_odd * alpha[:, None]
        acc, acc_odd = add_values(acc, acc_odd, p, values, seen, operand, dtype, C)
    if C.E4M3_PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, BLOCK_DV])
    if C.sums_late:
        row_sum = tl.sum(row_sum, 1)
    if not C.faults_ahead:
        if PAGE_SIZE != 0 and not C.one_page:
            faults = tl.max((faults != 0).to(tl.int32), 0)
        # NaN in the sum reaches out and lse, and combining keeps it.
        row_sum = tl.where(faults == 0, row_sum, float("nan"))
    return acc, row_max, row_sum


@triton.jit
def scores_of(q, q_odd, qv, n, cache, page, seen, rows, call, C: tl.constexpr):
    """Return the scores [BLOCK_M, BLOCK_N] of ``rows`` with the keys of n_block ``n``, and its values.

    Scores are -inf where a row does not see a key; in log2 units if SCALED_SCORES, else raw products. Values
    are what :func:`add_values` takes: pointer, offsets, tile if C.HAS_QV, and scale.
    """
    start = n * C.BLOCK_N
    positions = start + tl.arange(0, C.BLOCK_N)
    k, v, k_offsets, v_offsets = rows_of_n_block(cache, page, start, call.strides, C)
    scores = multiply_keys(q, q_odd, k, k_offsets, seen, C)
    v_tile = v
    if C.HAS_QV:  # latent attention (MLA): scores have two terms, q k^T and qv v^T
        v_tile = load_rows(v, v_offsets, seen, C.HEAD_DIM_V, C.BLOCK_DV)  # loaded once for both products
        scores = tl.dot(qv, tl.trans(v_tile), scores, input_precision=C.PRECISION)
    v_scale = 1.0
    if C.DESCALE == "block":
        # A scalar of the page, or one number for each key: [1, BLOCK_N] for k, [BLOCK_N, 1] for v.
        k_scale = tl.load(cache.k_descale + page.to(tl.int64) * call.outer.k_descale_stride)
        v_scale = tl.load(cache.v_descale + page.to(tl.int64) * call.outer.v_descale_stride)
        if C.PAGE_SIZE != 0 and not C.one_page:
            k_scale = k_scale[None, :]
            v_scale = v_scale[:, None]
        scores = scores * k_scale
    distance = positions[None, :] - (rows.tokens + rows.offset)[:, None]
    if C.SCALED_SCORES:
        scores, _ = softcap_and_alibi(
            scores * rows.k_scale, distance, rows.slope, call.numbers.softmax_scale, call.numbers.softcap,
            C.HAS_SOFTCAP, C.HAS_ALIBI,
        )  # fmt: skip
        scores = scores * LOG2_E
    allowed = visible(distance, rows.window, call.lengths.mask, C)
    allowed = allowed & seen[None, :]
    if C.HAS_TREE:  # the mask covers the query tokens among the keys; keys before them are visible
        columns = (positions - rows.offset)[None, :]
        in_tree = (columns >= 0) & (columns < rows.len_q) & (rows.tokens < rows.len_q)[:, None]
        allowed = allowed & (tl.load(rows.tree_rows[:, None] + columns, mask=in_tree, other=1) != 0)
    return tl.where(allowed, scores, -float("inf")), (v, v_offsets, v_tile, v_scale)


@triton.jit
def multiply_keys(q, q_odd, base, offsets, seen, C: tl.constexpr):
    """Return the raw products [BLOCK_M, BLOCK_N] of queries with the keys at ``offsets``."""
    if C.E4M3_PAIRS:
        # Loads of operands from shared memory can transpose 16-bit elements, but not bytes. So the cache is
        # read in pairs, and Q K^T is the sum over even columns and over odd columns: 391 instead of 781
        # instructions for an n_block.
        pairs = load_rows(base, offsets, seen, C.HEAD_DIM // 2, C.BLOCK_D // 2)
        even, odd = split_pairs(pairs, C.E4M3_BITS)
        products = tl.dot(q, tl.trans(even.to(q.dtype)), input_precision=C.PRECISION)
        odd = tl.trans(odd.to(q.dtype))
        products = tl.dot(q_odd, odd, products, input_precision=C.PRECISION)
    else:
        k = load_rows(base, offsets, seen, C.HEAD_DIM, C.BLOCK_D)
        k = tl.trans(as_dtype(k, q.dtype, C))
        products = tl.dot(q, k, input_precision=C.PRECISION)
    return products


@triton.jit
def add_values(
    acc, acc_odd, p, values, seen, dtype: tl.constexpr, scaled_dtype: tl.constexpr, C: tl.constexpr
):
    """Return (acc + p V, acc_odd + p V_odd) for the ``values`` of :func:`scores_of`.

    Operands are in ``dtype``, or in ``scaled_dtype`` if values are multiplied by the scales of their pages.
    V_odd are the odd columns if E4M3_PAIRS; otherwise ``acc_odd`` is unused.
    """
    SCALED: tl.constexpr = C.DESCALE == "block"
    operand: tl.constexpr = scaled_dtype if SCALED else dtype
    base, offsets, v, page_scale = values
    if C.E4M3_PAIRS:
        pairs = load_rows(base, offsets, seen, C.HEAD_DIM_V // 2, C.BLOCK_DV // 2)
        v, v_odd = split_pairs(pairs, C.E4M3_BITS)
        if SCALED:
            v_odd = v_odd.to(tl.float32) * page_scale
        acc_odd = tl.dot(p.to(operand), v_odd.to(operand), acc_odd, input_precision=C.PRECISION)
    elif not C.HAS_QV:
        v = as_dtype(load_rows(base, offsets, seen, C.HEAD_DIM_V, C.BLOCK_DV), dtype, C)
    if SCALED:
        v = v.to(tl.float32) * page_scale
    return tl.dot(p.to(operand), v.to(operand), acc, input_precision=C.PRECISION), acc_odd


@triton.jit
def as_dtype(tile, dtype: tl.constexpr, C: tl.constexpr):
    """Convert a tile of k or v to ``dtype``. The cache must not be viewed as pairs of elements."""
    if C.E4M3_BITS:
        tile = decode_bits(tile)
    return tile.to(dtype)


MIN_SUM = tl.constexpr(2.0**-32)
"""Least accepted sum of a row's exponentials: terms that exp2 flushes to zero, below 2^-126, are below 2^-94
of it."""
MAX_SUM = tl.constexpr(2.0**120)
"""Largest accepted sum, of exponentials and of values. float32 overflows from 2^128 on."""
MIN_MEAN_FLOAT16 = tl.constexpr(2.0**-10)
"""Least accepted mean of the exponentials if they are rounded to float16, which has fewer bits below 2^-14.
Above 2^16 float16 is infinite, and so are the sums of values."""
MAX_SUM_FLOAT32 = tl.constexpr(2.0**16)
"""Bound on sums, and on their inverse, if operands are float32: the logarithm is then as exact as with the
online softmax."""
MIN_VALUE = tl.constexpr(2.0**-60)
"""Least accepted magnitude of the largest output sum of a tile. Smaller sums may lack terms that were flushed
to zero."""


@triton.jit
def shifted_exponentials(scores, shift, scale_log2, C: tl.constexpr, dtype: tl.constexpr):
    """Return exp2(scores - shift). Scores are in log2 units if C.SCALED_SCORES, else raw products."""
    if C.SOFTMAX_MAX == "head":  # otherwise a scalar
        shift = shift[:, None]
    if not C.SCALED_SCORES:
        scores = scores * scale_log2
    if dtype == tl.float32:
        # The difference of a score near zero and a large shift would lose bits of the score.
        p = tl.exp2(scores) * tl.exp2(-shift)
    else:
        p = tl.exp2(scores - shift)
    return p


@triton.jit
def is_in_range(acc, row_sum, exists, keys, operand: tl.constexpr):
    """Return whether acc and row_sum are as exact as with the online softmax, in all rows: one bool.

    acc [BLOCK_M, BLOCK_DV] and row_sum [BLOCK_M] are sums over at most ``keys`` keys. A row_sum of 0 is out
    of range: the row may have seen no key, or its terms may have been flushed to zero.
    """
    least = MIN_SUM
    most = MAX_SUM
    if operand == tl.float16:
        least = keys.to(tl.float32) * MIN_MEAN_FLOAT16
    elif operand == tl.float32:
        least = 1 / MAX_SUM_FLOAT32
        most = MAX_SUM_FLOAT32
    sums = (row_sum >= least) & (row_sum <= most)  # False for NaN
    size = tl.abs(acc)
    size = tl.where(size <= MAX_SUM, size, float("inf"))  # also NaN, which tl.max would drop
    largest = tl.max(tl.max(tl.where(exists[:, None], size, 0.0), 1), 0)
    right = tl.min((sums | (exists == 0)).to(tl.int32), 0) != 0
    return right & (largest >= MIN_VALUE) & (largest <= MAX_SUM)


class Cache(NamedTuple):
    """One sequence's keys and values of one head. Fields that the call does not use hold a dummy number,
    since tuples that are carried through a loop must not hold None."""

    k: Any
    """Pointer to the head in the first page, or in the first row of a dense cache."""
    v: Any
    row: Any
    """The sequence's row of a dense cache."""
    block_table: Any
    """Pointer to the sequence's row of the block table."""
    pages: Any
    """Pages of the first two n_blocks, as :func:`load_pages` returns them."""
    k_descale: Any
    """Pointer to the head's scale in the first page."""
    v_descale: Any
    num_blocks: Any
    """Pages, or rows of a dense cache."""
    fault: Any
    """int32, 0 if the sequence's row and lengths are valid. :func:`find_faults` and the loop check pages."""


@triton.jit
def cache_of(work, n, call, C: tl.constexpr, EARLY: tl.constexpr = False):
    """Return the :class:`Cache` of a work tile, for a loop over its n_blocks from ``n`` on.

    EARLY: an earlier kernel may still be writing the tables, so they must not be kept in the L1 cache. The
    modifier .cg reads them from L2.
    """
    pointers, strides, outer = call.pointers, call.strides, call.outer
    b, _ = sequence_of(work.m_block, call.lengths, C)
    b = b.to(tl.int64)
    row = b
    fault = work.sequence.fault
    if C.HAS_BATCH_IDX:
        given = tl.load(pointers.cache_batch_idx + b, cache_modifier=".cg" if EARLY else "")
        row = in_cache(given, call.num_blocks)
        fault = fault | (given ^ row)  # not 0 if clamping changed it
        row = row.to(tl.int64)
    block_table = b
    pages = (b, b)
    k_descale = b
    v_descale = b
    if C.PAGE_SIZE != 0:
        block_table = pointers.block_table + b * outer.table_stride
        pages = (
            load_pages(block_table, n, work.keys, C, EARLY),
            load_pages(block_table, n + 1, work.keys, C, EARLY),
        )
    if C.DESCALE == "block":
        k_descale = pointers.k_descale + work.head_kv
        v_descale = pointers.v_descale + work.head_kv
    head64 = work.head_kv.to(tl.int64)
    k = pointers.k + head64 * strides.k_head
    v = pointers.v + head64 * strides.v_head
    return Cache(k, v, row, block_table, pages, k_descale, v_descale, call.num_blocks, fault)


@triton.jit
def load_pages(block_table, n, keys, C: tl.constexpr, EARLY: tl.constexpr = False):
    """Load the pages of n_block ``n`` from the block table.

    The result is a scalar if the n_block lies within one page. It has one number per page if the n_block
    consists of whole pages, else one number per key. Entries of keys that are not visible are not read.
    EARLY: an earlier kernel may still be writing the table, so it must not be kept in the L1 cache.
    """
    PAGE_SIZE: tl.constexpr = C.PAGE_SIZE
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    start = n * C.BLOCK_N
    # As few entries as possible: one per page instead of one per key saved 288 of 2184 instructions. The loop
    # loads entries up to two n_blocks past its end: the mask hides them. keys.first needs no comparison here,
    # because the loop's first n_block, and with it the page, holds that key.
    if C.one_page:
        return tl.load(block_table + start // PAGE_SIZE, mask=start < keys.end, other=0, cache_modifier=CACHE)
    elif C.BLOCK_N % PAGE_SIZE == 0:
        columns = n * (C.BLOCK_N // PAGE_SIZE) + tl.arange(0, C.BLOCK_N // PAGE_SIZE)
        held = columns * PAGE_SIZE < keys.end
        if C.HAS_LEFT or C.HAS_LEFTPAD:
            held = held & ((columns + 1) * PAGE_SIZE > keys.first)
        return tl.load(block_table + columns, mask=held, other=0, cache_modifier=CACHE)
    else:
        positions = start + tl.arange(0, C.BLOCK_N)
        seen = is_seen(positions, keys, C)
        return tl.load(block_table + positions // PAGE_SIZE, mask=seen, other=0, cache_modifier=CACHE)


@triton.jit
def page_of_keys(page, C: tl.constexpr):
    """Convert the result of :func:`load_pages` to one page for the n_block, or one per key [BLOCK_N]."""
    if C.PAGE_SIZE != 0:
        # Offsets of rows have 64 bits only if the cache needs them (WIDE): with 32, an n_block takes 352
        # instead of 476 instructions. A page that holds the whole n_block is a scalar, and always has 64.
        if C.one_page or C.WIDE:
            page = page.to(tl.int64)
        if C.BLOCK_N % C.PAGE_SIZE == 0 and not C.one_page:
            PAGES: tl.constexpr = C.BLOCK_N // C.PAGE_SIZE
            page = tl.broadcast_to(page[:, None], [PAGES, C.PAGE_SIZE])
            page = tl.reshape(page, [C.BLOCK_N])
    return page


@triton.jit
def rows_of_n_block(cache, page, start, strides, C: tl.constexpr):
    """Return (k, v, k_offsets, v_offsets) of the n_block whose first key is ``start``.

    k and v are pointers. k_offsets and v_offsets [BLOCK_N] are the offsets of the n_block's rows from these
    pointers, in elements.
    """
    k = cache.k
    v = cache.v
    PAGE_SIZE: tl.constexpr = C.PAGE_SIZE
    position = tile_index(C.BLOCK_N, C.WIDE)
    # If all rows are in one page, it goes into the pointer, a scalar of 64 bits, and offsets stay small.
    if PAGE_SIZE == 0:
        k += page * strides.k_batch + start.to(tl.int64) * strides.k_token
        v += page * strides.v_batch + start.to(tl.int64) * strides.v_token
        k_offsets = position * strides.k_token
        v_offsets = position * strides.v_token
    elif C.one_page:
        within = (start % PAGE_SIZE).to(tl.int64)
        k += page * strides.k_batch + within * strides.k_token
        v += page * strides.v_batch + within * strides.v_token
        k_offsets = position * strides.k_token
        v_offsets = position * strides.v_token
    else:
        if C.BLOCK_N % PAGE_SIZE != 0:  # otherwise an n_block begins with a page
            position += start
        position = position % PAGE_SIZE
        k_offsets = page * strides.k_batch + position * strides.k_token
        v_offsets = page * strides.v_batch + position * strides.v_token
    return k, v, k_offsets, v_offsets


@triton.jit
def load_rows(base, offsets, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows [BLOCK_N, BLOCK_D] of a cache at ``offsets``; zeros where not ``seen``."""
    columns = tl.arange(0, BLOCK_D)
    # Keys that no row sees are not loaded: they may lie beyond the sequence, or outside of the window.
    inside = seen[:, None]
    if HEAD_DIM != BLOCK_D:
        inside = inside & (columns < HEAD_DIM)[None, :]
    return tl.load(base + offsets[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def is_seen(positions, keys, C: tl.constexpr):
    """Return which positions are among ``keys``, the keys that at least one row of a work tile sees."""
    seen = positions < keys.end
    if C.HAS_LEFT or C.HAS_LEFTPAD:
        seen = seen & (positions >= keys.first)
    return seen


@triton.jit
def in_cache(pages, num_blocks):
    """Replace invalid pages, which are the caller's mistake, by the last page of the cache.

    An unsigned comparison also catches negative numbers.
    """
    last = (num_blocks - 1).to(tl.uint32, bitcast=True)
    return tl.minimum(pages.to(tl.uint32, bitcast=True), last).to(tl.int32, bitcast=True)


@triton.jit
def find_faults(cache, first, last, keys, C: tl.constexpr):
    """Return int32, a scalar or [BLOCK_N]: all 0 if the sequence's lengths and row in the cache are valid.

    With C.faults_ahead, the result is 0 only if the pages of ``keys`` in n_blocks ``first`` to ``last``
    (exclusive) are valid as well.
    """
    faults = cache.fault
    if C.faults_ahead:
        # Loads that are in flight together. Taller tiles have registers for only one.
        LOADS: tl.constexpr = 4 if C.BLOCK_M < 64 else 1
        BLOCK_N: tl.constexpr = C.BLOCK_N
        start = first * BLOCK_N
        if C.HAS_LEFT or C.HAS_LEFTPAD:
            start = tl.maximum(start, keys.first)
        end = tl.minimum(last * BLOCK_N, keys.end)
        column = start // C.PAGE_SIZE
        end_column = tl.where(start < end, (end + C.PAGE_SIZE - 1) // C.PAGE_SIZE, column)
        outside = tl.zeros([BLOCK_N], tl.int32)
        while column < end_column:
            columns = column + tl.arange(0, LOADS)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            pages = tl.load(cache.block_table + columns, mask=columns < end_column, other=0)
            outside |= tl.max((pages != in_cache(pages, cache.num_blocks)).to(tl.int32), 0)
            column += LOADS * BLOCK_N
        faults = faults | outside
    return faults


@triton.jit
def prefetch_first(program, call, C: tl.constexpr):
    """Prefetch the n_blocks with which a program probably begins.

    An earlier kernel may still be writing the lengths and tables, so they may be wrong. All reads stay within
    the tensors, even if lengths and tables have invalid values. The values that are read only select which
    part of the cache is prefetched to the L2 cache. Since all writes go through L2, no stale data remains.
    """
    HEADS: tl.constexpr = C.HEADS_PER_TEAM
    pointers, lengths = call.pointers, call.lengths
    team = program // HEADS
    teams = tl.num_programs(0) // HEADS
    total, position, m_block, m_block_start = stream_k_start(
        tl.arange(0, C.SCAN_BLOCK), team, teams, pointers, lengths, C, True
    )
    work, nth, _ = work_tile_at(program, position, m_block, m_block_start, pointers, lengths, C, True)
    n = work.keys.first // C.BLOCK_N + nth
    cache = cache_of(work, n, call, C, True)
    if position < share_start(team + 1, teams, total):  # the share is not empty
        for i in tl.static_range(2):  # table entries of two n_blocks are loaded
            page = cache.row
            if C.PAGE_SIZE != 0:
                page = cache.pages[i]
            prefetch_n_block(cache, page, n + i, work.keys, call.strides, C)


@triton.jit
def prefetch_next(n, first, last, next_work, strides, PREFETCH: tl.constexpr, C: tl.constexpr):
    """Prefetch the first two n_blocks of the program's next work tile.

    The loop over n_blocks calls this function in each iteration ``n``. Two consecutive iterations prefetch
    one n_block each: they begin at ``last - PREFETCH``, or at ``first`` if the loop is shorter. In a
    program's last work tile, these two iterations launch the dependent kernels instead.
    """
    # Not earlier: what the GPU reads meanwhile would evict it from L2 again. One sequence of 8192 keys takes
    # 21.5 us without a prefetch on an H100, 17.5 two n_blocks ahead, 18.3 one or three ahead.
    i = n - tl.maximum(first, last - PREFETCH)
    # One n_block in each of two iterations; a loop of one n_block prefetches one.
    if (i == 0) | (i == 1):
        if next_work.exists:
            page = next_work.cache.row
            if C.PAGE_SIZE != 0:
                page = tl.where(i == 0, next_work.cache.pages[0], next_work.cache.pages[1])
            prefetch_n_block(next_work.cache, page, next_work.n_block + i, next_work.keys, strides, C)
        else:  # this is the last work tile: the combining programs may start
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_n_block(cache, page, n, keys, strides, C: tl.constexpr):
    """Prefetch the keys and values of n_block ``n``.

    ``page``: the sequence's row of a dense cache, or the result of :func:`load_pages`.
    """
    PER_ELEMENT: tl.constexpr = 2 if C.E4M3_PAIRS else 1
    start = not_hoisted(n) * C.BLOCK_N
    seen = is_seen(start + tl.arange(0, C.BLOCK_N), keys, C)
    if C.PAGE_SIZE != 0:
        page = page_of_keys(in_cache(not_hoisted(page), cache.num_blocks), C)
    k, v, k_offsets, v_offsets = rows_of_n_block(cache, page, start, strides, C)
    prefetch_rows(k, k_offsets, seen, C.HEAD_DIM // PER_ELEMENT, C.BLOCK_D // PER_ELEMENT)
    prefetch_rows(v, v_offsets, seen, C.HEAD_DIM_V // PER_ELEMENT, C.BLOCK_DV // PER_ELEMENT)


@triton.jit
def prefetch_rows(base, offsets, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Prefetch the rows of a cache at ``offsets`` to the L2 cache, where ``seen``."""
    # One instruction for each sector of 32 bytes, the unit in which L2 is filled.
    SECTOR: tl.constexpr = 256 // base.dtype.element_ty.primitive_bitwidth
    SECTORS: tl.constexpr = max(BLOCK_D // SECTOR, 1)
    columns = tl.arange(0, SECTORS) * SECTOR
    inside = seen[:, None] & (columns < HEAD_DIM)[None, :]
    addresses = (base + offsets[:, None] + columns[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        """{
        .reg .pred inside;
        setp.ne.b32 inside, $2, 0;
        @inside prefetch.global.L2 [$1];
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [addresses, inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def not_hoisted(number):
    """Return an int32 unchanged, and keep the compiler from hoisting uses of it out of a loop.

    Hoisted results would occupy registers during the loop.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
    )
