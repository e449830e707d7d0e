"""Work partitioning of decoding: which program attends to which keys, computed on the device.

Query rows are packed: row ``r`` of a sequence is token ``r // group_size``, query head ``r % group_size``
of its group. So all query heads of a key/value head form one tile. BLOCK_M rows of a sequence are an
*m_block*, BLOCK_N keys an *n_block*. m_blocks are numbered consecutively through the batch. A *work tile* is
an m_block and a key/value head::

    m_block        0      1           2         of sequences with 2, 3 and 1 n_blocks, 4 heads in teams of 2
    heads 0, 1     a a    c c c       e
    heads 2, 3     b b    d d d       f         a..f: the n_blocks of a group of heads in one m_block

    list           a a b b c c c d d d e f      12 n_blocks of 2 heads each, for 3 teams of 2 programs
    team           0 0 0 0 1 1 1 1 2 2 2 2      a partial result of d from team 1, and one from team 2

If STREAM_K, programs work in *teams* of HEADS_PER_TEAM, one program per head of a group of adjacent heads.
Keys of these heads are adjacent in memory and are read at about the same time. The n_blocks of all work tiles
are flattened into one list, ordered by m_block, then by group of heads, then by key. Every team takes an
equal, contiguous share of that list for any lengths, as stream-K does for matrix products (Osama et al. 2023,
arXiv:2301.03598). So a long sequence among short ones is divided over many teams. A share may begin and end
within work tiles. So a program leaves at most two partial results: one for a tile that an earlier team began,
and one for a tile that a later team continues.

If not STREAM_K, each work tile is cut into splits that depend on its own length only. So its result is
independent of the rest of the batch.

Lengths are read from device memory by every program: no host synchronisation, and one captured CUDA graph
serves growing sequences. They are int32 tensors in ``pointers``, None where a call does not use one:
``cache_seqlens``, ``cache_leftpad``, ``cu_seqlens_q`` and ``cu_seqlens_k_new``.

The attention kernel and the combining kernel both find their work here, and store their results here: the
functions from :func:`with_prior` on normalise rows, and add what the caller has computed over other keys and
the sink.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.jit import triton
from flashtile.backends.common.tiles import LN_2, LOG2_E
from flashtile.backends.portable.masking import window_at
from flashtile.backends.portable.tiles import with_sink
from flashtile.problems.masking import MaskConstants


class DecodeLengths(NamedTuple):
    """Integers of a launch. Kernels are not specialized on their values."""

    m_blocks: Any
    """Number of m_blocks of the batch."""
    m_blocks_per_sequence: Any
    num_heads_kv: Any
    group_size: Any
    """Query heads per key/value head."""
    seqlen_q: Any
    """Tokens of the longest sequence of queries."""
    seqlen_new: Any
    """New tokens after ``cache_seqlens``."""
    total_q: Any
    capacity: Any
    """Maximum number of keys of a sequence."""
    mask: Any
    """A :class:`~flashtile.problems.masking.KernelMask`."""


@dataclass(frozen=True)
class Layout(MaskConstants):
    """Constants of a kernel about lengths. Features that a call does not use cost nothing."""

    HAS_LENGTHS: bool
    HAS_LEFTPAD: bool
    VARLEN: bool
    VARLEN_NEW: bool
    BLOCK_M: int
    BLOCK_N: int
    SCAN_BLOCK: int
    """m_blocks whose lengths a program reads at a time."""
    ONE_SCAN: bool
    """Whether SCAN_BLOCK covers all m_blocks."""
    ONE_M_BLOCK: bool
    """Whether a sequence has one m_block."""
    ONE_TOKEN: bool
    """Whether a sequence has at most one query token."""
    HEADS_PER_TEAM: int
    """Programs per team; a divisor of num_heads_kv."""
    ONE_TEAM: bool
    """Whether a team covers all heads."""


class Sequence(NamedTuple):
    """One sequence (or a vector of them). Keys are the positions leftpad <= j < len_k of its cache, and query
    token i stands at position i + len_k - len_q."""

    start_q: Any
    """First row of the sequence in q, if sequences are packed."""
    len_q: Any
    len_k: Any
    leftpad: Any
    fault: Any
    """int32, 0 if the sequence's lengths are within the capacity."""


class KeyRange(NamedTuple):
    """Keys ``first <= j < end``."""

    first: Any
    end: Any


class WorkTile(NamedTuple):
    """An m_block and a key/value head, over whose keys one softmax is taken."""

    m_block: Any
    head_kv: Any
    sequence: Any
    num_rows: Any
    """Number of valid rows of the m_block."""
    keys: Any
    """KeyRange of the keys that at least one of its rows sees."""
    n_blocks: Any
    """Number of n_blocks of these keys; the first is ``keys.first // BLOCK_N``."""


@triton.jit
def sequence_of(m_block, lengths, C: tl.constexpr):
    """Return (sequence, index in the sequence) of m_blocks that are given by their index in the batch.

    If ONE_M_BLOCK, this takes no division.
    """
    b = m_block
    m = m_block * 0  # 0 as a scalar or a vector, like m_block
    if not C.ONE_M_BLOCK:
        b = m_block // lengths.m_blocks_per_sequence
        m = m_block % lengths.m_blocks_per_sequence
    return b, m


@triton.jit
def heads_of_rows(row, head_kv, lengths, C: tl.constexpr):
    """Return (token, query head) of packed rows."""
    if C.ONE_TOKEN:
        return row * 0, head_kv * lengths.group_size + row
    else:
        return row // lengths.group_size, head_kv * lengths.group_size + row % lengths.group_size


@triton.jit
def load_sequence(b, exists, pointers, lengths, C: tl.constexpr, EARLY: tl.constexpr = False):
    """Load the :class:`Sequence` with index ``b`` in the batch. ``b`` is a scalar or a vector.

    len_q is 0 where ``exists`` is False. Lengths are clamped to the tensors; invalid lengths set ``fault``.
    EARLY: an earlier kernel may still be writing the lengths, so they must not be kept in the L1 cache.
    """
    # All loads are independent, so their latencies overlap. .cg reads L2 and leaves no line in L1.
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    # b * 0 is a zero in the shape of b. These fields cannot be None: tuples are carried through loops.
    start_q = b * 0
    leftpad = b * 0
    fault = b * 0
    len_q = tl.where(exists, lengths.seqlen_q, 0)
    len_k = b * 0 + lengths.capacity
    if C.VARLEN:
        cu_seqlens_q = pointers.cu_seqlens_q + b
        start_q = tl.load(cu_seqlens_q, mask=exists, other=0, cache_modifier=CACHE)
        start_q = tl.minimum(tl.maximum(start_q, 0), lengths.total_q)
        end_q = tl.minimum(
            tl.load(cu_seqlens_q + 1, mask=exists, other=0, cache_modifier=CACHE), lengths.total_q
        )
        len_q = tl.minimum(tl.maximum(end_q - start_q, 0), lengths.seqlen_q)
    if C.HAS_LENGTHS:
        cached = tl.load(pointers.cache_seqlens + b, mask=exists, other=0, cache_modifier=CACHE)
        len_k = cached + lengths.seqlen_new
    if C.VARLEN_NEW:
        cu_seqlens_k_new = pointers.cu_seqlens_k_new + b
        len_k += tl.load(cu_seqlens_k_new + 1, mask=exists, other=0, cache_modifier=CACHE)
        len_k -= tl.load(cu_seqlens_k_new, mask=exists, other=0, cache_modifier=CACHE)
    # Clamped lengths lead to memory of the cache. ``fault`` keeps that they were wrong, and makes the result
    # NaN.
    if C.HAS_LENGTHS or C.VARLEN_NEW:
        given = len_k
        len_k = tl.minimum(tl.maximum(given, 0), lengths.capacity)
        fault = given ^ len_k  # 0 if clamping changed nothing
    if C.HAS_LEFTPAD:
        given = tl.load(pointers.cache_leftpad + b, mask=exists, other=0, cache_modifier=CACHE)
        leftpad = tl.minimum(tl.maximum(given, 0), lengths.capacity)
        fault = fault | (given ^ leftpad)
    return Sequence(start_q, len_q, len_k, leftpad, fault)


@triton.jit
def reach_of(m, sequence, lengths, C: tl.constexpr):
    """Return (number of rows, KeyRange that they see, number of n_blocks) for m_block ``m`` of a sequence.

    An m_block with rows has at least one n_block, so that rows without keys are written as well.
    """
    # Packed rows: a token has group_size rows.
    row = m * C.BLOCK_M
    num_rows = tl.minimum(sequence.len_q * lengths.group_size - row, C.BLOCK_M)
    offset = sequence.len_k - sequence.len_q
    first = sequence.leftpad
    end = sequence.len_k
    # Rows of an m_block are ordered by token: the first row's window begins first, and the last row's ends
    # last.
    if C.HAS_LEFT:
        position = row // lengths.group_size + offset
        left, _ = window_at(position, sequence.leftpad, lengths.mask, C)
        first = tl.maximum(first, position - left)
    if C.HAS_RIGHT:
        last_position = (row + num_rows - 1) // lengths.group_size + offset
        _, right = window_at(last_position, sequence.leftpad, lengths.mask, C)
        end = tl.minimum(end, last_position + right + 1)
    first = tl.maximum(first, 0)
    if C.HAS_LEFT or C.HAS_LEFTPAD:
        end = tl.where(first < end, end, 0)  # no page is loaded for an empty range
    n_blocks = tl.maximum((end + C.BLOCK_N - 1) // C.BLOCK_N - first // C.BLOCK_N, 1)
    return num_rows, KeyRange(first, end), tl.where(num_rows > 0, n_blocks, 0)


@triton.jit
def keys_of_sequence(sequence, lengths, C: tl.constexpr):
    """Return the KeyRange that the rows of all m_blocks of a sequence see, empty without rows."""
    last = tl.maximum(sequence.len_q * lengths.group_size - 1, 0) // C.BLOCK_M
    _, of_first, _ = reach_of(0, sequence, lengths, C)
    _, of_last, _ = reach_of(last, sequence, lengths, C)
    return KeyRange(of_first.first, tl.where(sequence.len_q > 0, of_last.end, 0))


@triton.jit
def count_n_blocks(m_blocks, pointers, lengths, C: tl.constexpr, EARLY: tl.constexpr = False):
    """Return how many n_blocks each m_block has in the list that is divided among the teams, [SCAN_BLOCK].

    This is the number of n_blocks of the m_block times the number of groups of HEADS_PER_TEAM heads.
    """
    b, m = sequence_of(m_blocks, lengths, C)
    sequence = load_sequence(b, m_blocks < lengths.m_blocks, pointers, lengths, C, EARLY)
    _, _, n_blocks = reach_of(m, sequence, lengths, C)
    if not C.ONE_TEAM:
        n_blocks = n_blocks * (lengths.num_heads_kv // C.HEADS_PER_TEAM)
    return n_blocks


@triton.jit
def share_start(team, teams, total):
    """Return the first n_block of ``team``'s share of ``total``.

    The first ``total % teams`` teams take one n_block more than the others. All arguments are integers, so
    Python can call this function as ``share_start.fn``, and the next one likewise.
    """
    return team * (total // teams) + min(team, total % teams)


@triton.jit
def share_of(position, teams, total):
    """Return the team that takes the n_block at ``position``: the inverse of :func:`share_start`."""
    each = total // teams
    more = total % teams
    # The first ``more`` teams have each + 1 n_blocks.
    if position < more * (each + 1):
        team = position // (each + 1)
    else:
        team = more + (position - more * (each + 1)) // max(each, 1)
    return team


@triton.jit
def split_size(n_blocks, splits):
    """Return the n_blocks per split of a work tile with ``n_blocks``, in a grid without stream-K."""
    each = splits.split_n_blocks
    if splits.split_n_blocks == 0:
        each = max((n_blocks + splits.num_splits - 1) // splits.num_splits, 1)
    return each


@triton.jit
def locate_m_block(m_block, pointers, lengths, C: tl.constexpr):
    """Return (total number of n_blocks, position of the first n_block of ``m_block``)."""
    total = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    for start in range(0, lengths.m_blocks, C.SCAN_BLOCK):
        m_blocks = start + tl.arange(0, C.SCAN_BLOCK)
        n_blocks = count_n_blocks(m_blocks, pointers, lengths, C)
        total += tl.sum(n_blocks)
        before += tl.sum(tl.where(m_blocks < m_block, n_blocks, 0))
    return total, before


@triton.jit
def scan(n_blocks, m_blocks, counted, position, m_block, m_block_start, lengths, C: tl.constexpr):
    """Search the next ``m_blocks`` [SCAN_BLOCK] for the one that holds ``position``.

    ``n_blocks`` are the results of :func:`count_n_blocks` for these m_blocks, and ``counted`` is the number
    of n_blocks before them. Returns (m_block, m_block_start): the index of the m_block and the position of
    its first n_block. If ``position`` lies behind these m_blocks, the result is the m_block that follows
    them, and the next call continues the search.
    """
    ends = counted + tl.cumsum(n_blocks, 0)
    # m_blocks that end at or before the position, those without n_blocks included. The scan may be longer
    # than the batch.
    before = (ends <= position) & (m_blocks < lengths.m_blocks)
    m_block += tl.sum(before.to(tl.int32))
    m_block_start = tl.maximum(m_block_start, tl.max(tl.where(before, ends, 0)))
    return m_block, m_block_start


@triton.jit
def stream_k_start(index, team, teams, pointers, lengths, C: tl.constexpr, EARLY: tl.constexpr = False):
    """Return where the share of ``team`` begins: (total, position, m_block, m_block_start).

    ``total`` is the number of n_blocks of all shares. ``position`` is the index of the team's first n_block
    in the list of these n_blocks. ``m_block`` is the m_block that contains this n_block. The first n_block of
    ``m_block`` is at position ``m_block_start``. ``index``: the integers from 0 to SCAN_BLOCK (exclusive), in
    any layout.
    """
    m_block = team * 0
    m_block_start = team * 0
    # The total decides where the share begins, so lengths are read twice, unless one scan holds them all.
    if C.ONE_SCAN:
        n_blocks = count_n_blocks(index, pointers, lengths, C, EARLY)
        total = tl.sum(n_blocks)
        position = share_start(team, teams, total)
        m_block, m_block_start = scan(n_blocks, index, 0, position, m_block, m_block_start, lengths, C)
    else:
        total = team * 0
        for start in range(0, lengths.m_blocks, C.SCAN_BLOCK):
            total += tl.sum(count_n_blocks(start + index, pointers, lengths, C, EARLY))
        position = share_start(team, teams, total)
        counted = team * 0
        for start in range(0, lengths.m_blocks, C.SCAN_BLOCK):
            n_blocks = count_n_blocks(start + index, pointers, lengths, C, EARLY)
            m_block, m_block_start = scan(
                n_blocks, start + index, counted, position, m_block, m_block_start, lengths, C
            )
            counted += tl.sum(n_blocks)
    return total, position, m_block, m_block_start


@triton.jit
def work_tile_at(
    program, position, m_block, m_block_start, pointers, lengths, C: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Return the work tile that a program processes at ``position``.

    ``position`` is an index in the list of all n_blocks. The list is divided among the teams of programs, as
    the module's docstring describes. The result is (work tile, index of the n_block within the work tile,
    position where the m_block ends). The m_block's first n_block is at position ``m_block_start``.
    """
    HEADS: tl.constexpr = C.HEADS_PER_TEAM
    m_block = tl.minimum(m_block, lengths.m_blocks - 1)  # after the last work tile, this one is not used
    b, m = sequence_of(m_block, lengths, C)
    sequence = load_sequence(b, True, pointers, lengths, C, EARLY)
    num_rows, keys, n_blocks = reach_of(m, sequence, lengths, C)
    # The difference may be negative after a program's last work tile, or if lengths change while they are
    # read. A negative index would address memory before the block table.
    nth = tl.maximum(position - m_block_start, 0)
    m_block_end = m_block_start + n_blocks
    head_kv = program % HEADS
    if not C.ONE_TEAM:  # the list has an m_block's n_blocks once for each group of HEADS heads
        head_kv += nth // tl.maximum(n_blocks, 1) * HEADS
        nth = nth % tl.maximum(n_blocks, 1)
        m_block_end = m_block_start + n_blocks * (lengths.num_heads_kv // HEADS)
    return WorkTile(m_block, head_kv, sequence, num_rows, keys, n_blocks), nth, m_block_end


class Rows(NamedTuple):
    """The packed rows of a work tile. Each field is [rows], or a scalar."""

    b: Any
    """Number of the sequence."""
    start_q: Any
    """First row of the sequence in q, if sequences are packed."""
    tokens: Any
    heads: Any
    """Query heads."""
    exists: Any


class Splits(NamedTuple):
    """Integers that describe the layout of partial results."""

    partial_rows: Any
    """Rows per partial result."""
    slots: Any
    """Number of partial results that are allocated."""
    num_splits: Any
    """Splits per work tile, without stream-K."""
    split_n_blocks: Any
    """n_blocks per split. 0: each work tile is divided into ``num_splits`` splits instead."""


@triton.jit
def with_prior(acc, row_max, row_sum, prior_out, prior_lse, rows, lengths, C: tl.constexpr):
    """Add results that the caller has computed over other keys to (acc, maximum, sum).

    prior_out is (tokens, heads, HEAD_DIM_V); prior_lse is (heads, tokens), natural log. Tokens are packed
    even if q is (batch, seqlen_q, ...).
    """
    tokens = packed_tokens(rows, lengths, C)
    lse_rows = rows.heads.to(tl.int64) * lengths.total_q + tokens
    lse = tl.load(prior_lse + lse_rows, mask=rows.exists, other=-float("inf")) * LOG2_E
    columns = tl.arange(0, C.BLOCK_DV)
    offsets = (tokens * (lengths.num_heads_kv * lengths.group_size) + rows.heads) * C.HEAD_DIM_V
    # prior_out is not initialised for rows without keys.
    inside = (rows.exists & (lse != -float("inf")))[:, None] & (columns < C.HEAD_DIM_V)[None, :]
    out = tl.load(prior_out + offsets[:, None] + columns[None, :], mask=inside, other=0.0)
    # One more step of the online softmax: normalised rows have lse as the maximum and 1 as the sum.
    new_max = tl.maximum(row_max, lse)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # -inf - (-inf) would be NaN
    factor = tl.exp2(row_max - shift)
    weight = tl.exp2(lse - shift)
    return acc * factor[:, None] + out * weight[:, None], new_max, row_sum * factor + weight


@triton.jit
def packed_tokens(rows, lengths, C: tl.constexpr):
    """Return the index of each row's token among all tokens of the batch, int64."""
    if C.VARLEN:
        return rows.start_q.to(tl.int64) + rows.tokens
    else:
        return rows.b.to(tl.int64) * lengths.seqlen_q + rows.tokens


@triton.jit
def lse_places(rows, lengths, C: tl.constexpr):
    """Return the index of each row in lse, int64."""
    if C.VARLEN:
        tokens = packed_tokens(rows, lengths, C)
        return rows.heads.to(tl.int64) * lengths.total_q + tokens
    else:
        num_heads_q = lengths.num_heads_kv * lengths.group_size
        return (rows.b.to(tl.int64) * num_heads_q + rows.heads) * lengths.seqlen_q + rows.tokens


@triton.jit
def normalised(acc, row_max, row_sum):
    """Return (out, lse in base 2). Rows without keys get 0 and -inf."""
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    return acc / total[:, None], tl.where(empty, -float("inf"), row_max + tl.log2(total))


@triton.jit
def store_rows(base, row_offsets, exists, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write the rows of ``tile`` [rows, BLOCK_D] that exist, each at its ``row_offsets`` in elements."""
    # Offsets per row, not a stride: packed rows of a work tile are tokens and heads.
    columns = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(base + row_offsets[:, None] + columns[None, :], tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def store_results(pointers, out, lse, rows, lengths, C: tl.constexpr):
    """Add the sink to the tile ``out`` [rows, BLOCK_DV] and ``lse`` [rows], and store them.

    ``lse`` is a logarithm to base 2. The natural logarithm is stored, unless ``pointers.lse`` is None.
    """
    if C.HAS_SINK:  # in natural units: the product of a large sink and log2(e) may be infinite
        sink = tl.load(pointers.sink + rows.heads, mask=rows.exists, other=0.0)
        out, lse = with_sink(out, lse * LN_2, sink)
    num_heads_q = lengths.num_heads_kv * lengths.group_size
    out_rows = packed_tokens(rows, lengths, C)
    lse_rows = lse_places(rows, lengths, C)
    offsets = (out_rows * num_heads_q + rows.heads) * C.HEAD_DIM_V
    store_rows(pointers.out, offsets, rows.exists, out, C.HEAD_DIM_V, C.BLOCK_DV)
    if pointers.lse is not None:
        if not C.HAS_SINK:
            lse = lse * LN_2
        tl.store(pointers.lse + lse_rows, lse, mask=rows.exists)
