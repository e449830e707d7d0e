"""Who attends to which keys: the arithmetic by which decoding is shared out among programs, on the device.

Query rows are packed: row ``r`` of a sequence is token ``r // group_size``, query head ``r % group_size``
of its group, so that all query heads of a key/value head stand in one tile. The rows of a *pair* (a
sequence and a block of BLOCK_M of its rows) see a run of key tiles. An *item* is a pair and a key/value
head: what one softmax is taken over.

Balanced, programs work in *teams* of HEADS_IN_STEP, each program for one of as many neighbouring heads:
their keys lie side by side in memory and are read at about the same time. The tiles of all pairs stand in
one line, pair by pair, within it one block of HEADS_IN_STEP heads after the other, within it in the order
of the keys. Every team takes an equal run of that line, whatever the lengths (as stream-K does for matrix
products, Osama et al. 2023, arXiv:2301.03598): one long sequence among short ones costs what its bytes
cost. A run may begin within an item and end within another, so a program leaves at most two partial
results: one of an item that an earlier team began, one of an item that a later team goes on with. Otherwise
each item is cut into splits that depend on its own length only, which makes its result independent of the
rest of the batch.

Lengths are read from device memory by every program: no host synchronisation, and one captured CUDA graph
serves growing sequences.

Two tuples go through all functions. ``lengths`` are the int32 tensors (cache_seqlens, cache_leftpad,
cu_seqlens_q, cu_seqlens_k_new), None where absent. ``shape`` are the numbers (pairs, row blocks of a
sequence, num_heads_kv, group_size, seqlen_q, seqlen_new, total_q, capacity, window_left, window_right).
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Layout(NamedTuple):
    """What is known of the lengths when a kernel is compiled; what a call does not use costs it nothing."""

    HAS_LENGTHS: bool
    HAS_LEFTPAD: bool
    VARLEN: bool
    VARLEN_NEW: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_PAIRS: int
    """Pairs whose lengths a program reads at a time."""
    ONE_BLOCK: bool
    """Whether that is all of them."""
    ONE_ROW_BLOCK: bool
    """Whether a sequence has one block of rows, so that a pair is a sequence."""
    ONE_TOKEN: bool
    """Whether a sequence has at most one query token."""
    HEADS_IN_STEP: int
    """Programs of a team; they divide num_heads_kv."""
    ONE_HEAD_BLOCK: bool
    """Whether they are all heads."""


@triton.jit
def rows_of_pair(pair, num_m, LAYOUT: tl.constexpr):
    """(sequence, its block of rows) of pairs: a division less where there is nothing to divide."""
    b = pair
    m = pair * 0
    if not LAYOUT.ONE_ROW_BLOCK:
        b = pair // num_m
        m = pair % num_m
    return b, m


@triton.jit
def heads_of_rows(row, head_kv, group_size, LAYOUT: tl.constexpr):
    """(token, query head) of packed rows."""
    if LAYOUT.ONE_TOKEN:
        return row * 0, head_kv * group_size + row
    else:
        return row // group_size, head_kv * group_size + row % group_size


@triton.jit
def sequence(b, exists, lengths, shape, LAYOUT: tl.constexpr, EARLY: tl.constexpr = False):
    """(first row of q, len_q, len_k, leftpad) of ``b``, a number or a vector; len_q is 0 where not
    ``exists``.

    Within the tensors whatever the lengths say. EARLY: somebody may still write them, so nothing of them must
    stay in the L1 cache. Keys are the positions leftpad <= j < len_k of the cache, and
    query token i stands at position i + len_k - len_q.
    """
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new = lengths
    _, _, _, _, seqlen_q, seqlen_new, total_q, capacity, _, _ = shape
    start_q = b * 0
    leftpad = b * 0
    len_q = tl.where(exists, seqlen_q, 0)
    len_k = b * 0 + capacity
    if LAYOUT.VARLEN:
        start_q = tl.load(cu_seqlens_q + b, mask=exists, other=0, cache_modifier=CACHE)
        start_q = tl.minimum(tl.maximum(start_q, 0), total_q)
        end_q = tl.minimum(tl.load(cu_seqlens_q + b + 1, mask=exists, other=0, cache_modifier=CACHE), total_q)
        len_q = tl.minimum(tl.maximum(end_q - start_q, 0), seqlen_q)
    if LAYOUT.HAS_LENGTHS:
        len_k = tl.load(cache_seqlens + b, mask=exists, other=0, cache_modifier=CACHE) + seqlen_new
    if LAYOUT.VARLEN_NEW:
        len_k += tl.load(cu_seqlens_k_new + b + 1, mask=exists, other=0, cache_modifier=CACHE)
        len_k -= tl.load(cu_seqlens_k_new + b, mask=exists, other=0, cache_modifier=CACHE)
    if LAYOUT.HAS_LENGTHS or LAYOUT.VARLEN_NEW:
        len_k = tl.minimum(tl.maximum(len_k, 0), capacity)
    if LAYOUT.HAS_LEFTPAD:
        leftpad = tl.load(cache_leftpad + b, mask=exists, other=0, cache_modifier=CACHE)
        leftpad = tl.minimum(tl.maximum(leftpad, 0), capacity)
    return start_q, len_q, len_k, leftpad


@triton.jit
def tiles_of(m, len_q, len_k, leftpad, shape, LAYOUT: tl.constexpr):
    """(rows, first key, end of keys, tiles) of row block ``m``; the keys are those that any of its rows sees.

    The first tile is ``first key // BLOCK_N``. A block with rows has at least one tile, so that rows
    without keys are written, too.
    """
    _, _, _, group_size, _, _, _, _, window_left, window_right = shape
    row = m * LAYOUT.BLOCK_M
    rows = tl.minimum(len_q * group_size - row, LAYOUT.BLOCK_M)
    offset = len_k - len_q
    start = leftpad
    end = len_k
    if LAYOUT.HAS_LEFT:
        start = tl.maximum(start, row // group_size + offset - window_left)
    if LAYOUT.HAS_RIGHT:
        end = tl.minimum(end, (row + rows - 1) // group_size + offset + window_right + 1)
    start = tl.maximum(start, 0)
    tiles = tl.maximum((end + LAYOUT.BLOCK_N - 1) // LAYOUT.BLOCK_N - start // LAYOUT.BLOCK_N, 1)
    return rows, start, end, tl.where(rows > 0, tiles, 0)


@triton.jit
def tiles_of_pairs(start, lengths, shape, LAYOUT: tl.constexpr, EARLY: tl.constexpr = False):
    """[BLOCK_PAIRS]: tiles of the pairs from ``start`` on, over all blocks of heads."""
    num_pairs, num_m, num_heads_kv, _, _, _, _, _, _, _ = shape
    pairs = start + tl.arange(0, LAYOUT.BLOCK_PAIRS)
    b, m = rows_of_pair(pairs, num_m, LAYOUT)
    _, len_q, len_k, leftpad = sequence(b, pairs < num_pairs, lengths, shape, LAYOUT, EARLY)
    _, _, _, tiles = tiles_of(m, len_q, len_k, leftpad, shape, LAYOUT)
    if not LAYOUT.ONE_HEAD_BLOCK:
        tiles = tiles * (num_heads_kv // LAYOUT.HEADS_IN_STEP)
    return tiles


@triton.jit
def share_start(team, teams, total):
    """First of ``total`` tiles that ``team`` takes; the first ``total % teams`` teams take one more."""
    return team * (total // teams) + min(team, total % teams)


@triton.jit
def share_of(tile, teams, total):
    """The team that takes ``tile``: the inverse of :func:`share_start`."""
    each = total // teams
    more = total % teams
    if tile < more * (each + 1):
        team = tile // (each + 1)
    else:
        team = more + (tile - more * (each + 1)) // max(each, 1)
    return team


@triton.jit
def balanced_pair(pair, lengths, shape, LAYOUT: tl.constexpr):
    """(all tiles, first tile of ``pair``)."""
    num_pairs = shape[0]
    total = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    for start in range(0, num_pairs, LAYOUT.BLOCK_PAIRS):
        tiles = tiles_of_pairs(start, lengths, shape, LAYOUT)
        pairs = start + tl.arange(0, LAYOUT.BLOCK_PAIRS)
        total += tl.sum(tiles)
        before += tl.sum(tl.where(pairs < pair, tiles, 0))
    return total, before


@triton.jit
def locate(tiles, start, counted, position, pair, pair_start, num_pairs, LAYOUT: tl.constexpr):
    """Go on looking for the pair that holds tile ``position`` among the pairs from ``start`` on."""
    pairs = start + tl.arange(0, LAYOUT.BLOCK_PAIRS)
    ends = counted + tl.cumsum(tiles, 0)
    before = (ends <= position) & (pairs < num_pairs)
    pair += tl.sum(before.to(tl.int32))
    pair_start = tl.maximum(pair_start, tl.max(tl.where(before, ends, 0)))
    return pair, pair_start


@triton.jit
def balanced_start(team, teams, lengths, shape, LAYOUT: tl.constexpr, EARLY: tl.constexpr = False):
    """Where ``team`` begins: (all tiles, its first tile, the pair that holds it, that pair's first
    tile).
    """
    num_pairs = shape[0]
    pair = tl.zeros([], tl.int32)
    pair_start = tl.zeros([], tl.int32)
    if LAYOUT.ONE_BLOCK:
        tiles = tiles_of_pairs(0, lengths, shape, LAYOUT, EARLY)
        total = tl.sum(tiles)
        position = share_start(team, teams, total)
        pair, pair_start = locate(tiles, 0, 0, position, pair, pair_start, num_pairs, LAYOUT)
    else:
        total = tl.zeros([], tl.int32)
        for start in range(0, num_pairs, LAYOUT.BLOCK_PAIRS):
            total += tl.sum(tiles_of_pairs(start, lengths, shape, LAYOUT, EARLY))
        position = share_start(team, teams, total)
        counted = tl.zeros([], tl.int32)
        for start in range(0, num_pairs, LAYOUT.BLOCK_PAIRS):
            tiles = tiles_of_pairs(start, lengths, shape, LAYOUT, EARLY)
            pair, pair_start = locate(tiles, start, counted, position, pair, pair_start, num_pairs, LAYOUT)
            counted += tl.sum(tiles)
    return total, position, pair, pair_start


@triton.jit
def item_at(
    program, position, pair, pair_start, lengths, shape, LAYOUT: tl.constexpr, EARLY: tl.constexpr = False
):
    """(pair, head_kv, its tile at ``position``, tiles, (first row of q, len_q, len_k, rows), keys that are
    seen, end of the pair's tiles) of a program's item, whose pair's tiles begin at ``pair_start``.
    """
    num_pairs, num_m, num_heads_kv, _, _, _, _, _, _, _ = shape
    HEADS: tl.constexpr = LAYOUT.HEADS_IN_STEP
    pair = tl.minimum(pair, num_pairs - 1)
    b, m = rows_of_pair(pair, num_m, LAYOUT)
    start_q, len_q, len_k, leftpad = sequence(b, True, lengths, shape, LAYOUT, EARLY)
    rows, low, high, tiles = tiles_of(m, len_q, len_k, leftpad, shape, LAYOUT)
    # Behind a program's last item, and by lengths that change while they are read, it would lie before the
    # first, whose entry of the block table is the first there is.
    tile = tl.maximum(position - pair_start, 0)
    pair_end = pair_start + tiles
    head_kv = program % HEADS
    if not LAYOUT.ONE_HEAD_BLOCK:
        head_kv += tile // tl.maximum(tiles, 1) * HEADS
        tile = tile % tl.maximum(tiles, 1)
        pair_end = pair_start + tiles * (num_heads_kv // HEADS)
    return pair, head_kv, tile, tiles, (start_q, len_q, len_k, rows), (low, high), pair_end


@triton.jit
def first_tile(tile, keys_seen, LAYOUT: tl.constexpr):
    """Where ``tile`` of those that a pair sees stands in its cache."""
    return keys_seen[0] // LAYOUT.BLOCK_N + tile
