"""The blocks that a block mask shows to a tile, in the order in which a Hopper kernel visits them.

Each partition that needs the lists of the block mask (``flashtile.masks.block_mask``) reads them on the
device. An *entry* of a list is a block of the block mask, which is TILES_PER_MASK_BLOCK adjacent blocks of
the kernel. Partial entries, whose blocks need masking, come first, and full entries follow. Without a block
mask the kernels have the same order: first the blocks at the edges of causality or a window, then the others.

The kernels' functions on integers can be called from Python through ``.fn``.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import gluon

SEARCHED = gl.constexpr(128)
"""Entries of a list that are compared at a time."""


class BlockList(NamedTuple):
    """The blocks that a tile visits: ``count`` of them, of which the first ``masked_count`` need a mask."""

    count: Any
    masked_count: Any
    partial: Any
    """Pointer to the list of partial entries, of which there are ``num_partial``."""
    full: Any
    """Pointer to the list of full entries."""
    num_partial: Any
    first_full: Any
    """Index, in the list of full entries, of the entry visited first. This is the entry in which the sequence
    ends, if listed, because that entry needs a mask; otherwise it is entry 0."""
    num_others: Any
    """Number of entries of the listed sequence (keys in the forward, queries in the backward). A list
    contains numbers from 0 to num_others - 1."""
    is_empty: Any
    """Whether no block is listed. A tile of queries then visits the block past the last key, which is masked
    as a whole."""


@gluon.jit
def list_index(lists, sequence, head, own, num_own):
    """Return the index of the list that belongs to block ``own``.

    Each head of each sequence has ``num_own`` lists: one per mask block of queries (forward) or of keys
    (backward). Sequences and heads may share lists.
    """
    return ((sequence % lists.batch) * lists.heads + head % lists.heads).to(gl.int64) * num_own + own


@gluon.jit
def index_of(listed, count, entry, WARPS: gl.constexpr):
    """Return the index of ``entry`` among the first ``count`` entries of a list; -1 if it is not there."""
    layout: gl.constexpr = gl.BlockedLayout([SEARCHED // 32], [32], [WARPS], [0])
    found = count * 0 - 1
    for first in range(0, count, SEARCHED):
        indices = first + gl.arange(0, SEARCHED, layout=layout)
        entries = gl.load(listed + indices, mask=indices < count, other=-1)
        found = gl.maximum(found, gl.max(gl.where(entries == entry, indices, -1), 0))
    return found


@gluon.jit
def read_lists(lists, index, num_others):
    """Return (pointer to partial entries, their number, pointer to full entries, their number).

    Numbers are clamped to the length of a list.
    """
    num_partial = min(max(gl.load(lists.num_blocks + index), 0), num_others)
    num_full = min(max(gl.load(lists.full_num_blocks + index), 0), num_others)
    return lists.indices + index * num_others, num_partial, lists.full_indices + index * num_others, num_full


@gluon.jit
def listed_keys(C: gl.constexpr, WARPS: gl.constexpr, work, block, lists):
    """Return the :class:`BlockList` of keys for a block of query rows; it has at least one block.

    The calling partition has WARPS warps.
    """
    ENTRY: gl.constexpr = C.BLOCK_N * C.TILES_PER_MASK_BLOCK
    num_others = (work.seqlen_k + ENTRY - 1) // ENTRY
    num_own = (work.seqlen_q + C.MASK_BLOCK - 1) // C.MASK_BLOCK
    index = list_index(lists, work.sequence, work.head, block * C.BLOCK_M // C.MASK_BLOCK, num_own)
    partial, num_partial, full, num_full = read_lists(lists, index, num_others)
    ends_full = num_partial * 0
    first_full = ends_full
    if not C.EVEN_N:
        found = index_of(full, num_full, num_others - 1, WARPS)
        ends_full = 1 if found >= 0 else 0
        first_full = max(found, 0)
    count = max((num_partial + num_full) * C.TILES_PER_MASK_BLOCK, 1)
    masked = (num_partial + ends_full) * C.TILES_PER_MASK_BLOCK
    is_empty = num_partial + num_full == 0
    return BlockList(count, masked, partial, full, num_partial, first_full, num_others, is_empty)


@gluon.jit
def listed_rows(C: gl.constexpr, work, head, lists):
    """Return the :class:`BlockList` of query rows for a block of keys; it may be empty.

    ``head`` is a query head of the key head. They all have the same list.
    """
    ENTRY: gl.constexpr = C.BLOCK_M * C.TILES_PER_MASK_BLOCK
    num_others = (work.seqlen_q + ENTRY - 1) // ENTRY
    num_own = (work.seqlen_k + C.MASK_BLOCK - 1) // C.MASK_BLOCK
    own = work.tile_in_head * C.BLOCK_N // C.MASK_BLOCK
    index = list_index(lists, work.sequence, head, own, num_own)
    partial, num_partial, full, num_full = read_lists(lists, index, num_others)
    count = (num_partial + num_full) * C.TILES_PER_MASK_BLOCK
    masked = num_partial * C.TILES_PER_MASK_BLOCK
    if not C.EVEN_N:  # the block of keys in which the sequence ends is masked for all rows
        masked = count if (work.tile_in_head + 1) * C.BLOCK_N > work.seqlen_k else masked
    return BlockList(count, masked, partial, full, num_partial, num_partial * 0, num_others, num_partial < 0)


@gluon.jit
def entry_of_visit(listed, i, TILES: gl.constexpr):
    """Return the list entry of the ``i``-th visit: (is_full, index in its list, block within the entry).

    A visit processes one block of the kernel, and an entry consists of TILES blocks. The full entry in which
    the sequence ends changes places with the first full entry, so it is visited before the other full
    entries.
    """
    entry = i // TILES
    index = entry - listed.num_partial
    is_full = index >= 0
    swapped = listed.first_full if index == 0 else (0 if index == listed.first_full else index)
    return is_full, swapped if is_full else entry, i % TILES


@gluon.jit
def visited_block(C: gl.constexpr, listed, i):
    """Return (index of the ``i``-th block to visit, whether its index comes from the list of full blocks).

    Blocks in the list of full blocks need no masking. The index is clamped to the sequence.
    """
    is_full, index, part = entry_of_visit(listed, i, C.TILES_PER_MASK_BLOCK)
    entry = gl.load((listed.full if is_full else listed.partial) + index)
    block = min(max(entry, 0), listed.num_others - 1) * C.TILES_PER_MASK_BLOCK + part
    return listed.num_others * C.TILES_PER_MASK_BLOCK if listed.is_empty else block, is_full


@gluon.jit
def key_block(C: gl.constexpr, listed, n):
    """Return :func:`visited_block` for the forward, whose loop index ``n`` counts down to 0."""
    return visited_block(C, listed, listed.count - 1 - n)
