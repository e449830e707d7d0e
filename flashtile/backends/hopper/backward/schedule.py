"""Which blocks of keys a program of the Hopper backward takes, and which query rows they meet, in what order.

The functions on integers are the kernel's own; Python calls them through ``.fn``.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.common import launch, preprocess
from flashtile.backends.hopper.compat import async_load
from flashtile.backends.hopper.forward.schedule import TABLE_WIDTH, Work, key_range

RAGGED_ROWS = gl.constexpr(launch.RAGGED_ROWS)
ROW_PAD = gl.constexpr(preprocess.ROW_PAD)


class Pointers(NamedTuple):
    """Those of the kernel. What a call has not is never followed."""

    table: Any
    seqused_k: Any
    alibi_slopes: Any
    next_item: Any
    """The first item that no program has taken yet; 0 at the start."""


class Schedule(NamedTuple):
    """Integers of the kernel."""

    items: Any
    """Of the launch; a variable-length batch has them in its table."""
    blocks: Any
    """Blocks of keys of the longest sequence."""
    heads: Any
    """Of k."""
    seqlen_q: Any
    seqlen_k: Any
    rows_k: Any
    """From one sequence of k to the next; used where ``seqused_k`` ends them early."""
    left: Any
    right: Any
    alibi_stride: Any
    section: Any
    """Key heads whose blocks are taken in turn in a deterministic sum; it divides all heads of the batch."""


@gluon.jit
def block_of_item(C: gl.constexpr, item, blocks, schedule):
    """(key head, counted through the batch when dense; its block) of an item, with so many blocks a head.

    Heads one after the other: programs at work read the same rows. But in a deterministic sum a block follows
    its neighbour by two steps. Programs that come free together, as those of equal blocks in several heads
    do, therefore find blocks of several heads next, and not neighbours.
    """
    head = item // blocks
    block = item % blocks
    if C.DETERMINISTIC:
        in_section = item % (blocks * schedule.section)
        head = item // (blocks * schedule.section) * schedule.section + in_section % schedule.section
        block = in_section // schedule.section
    return head, block


@gluon.jit
def find_keys(C: gl.constexpr, item, pointers, schedule):
    """The block of keys (``place``) and key head of an item: from a table, or by arithmetic.

    Of a head the first blocks first, which cost most under a causal mask. But in a deterministic sum later
    items wait for earlier ones, and there block n meets its first rows ``BLOCK_N`` rows after block n - 1
    has: last blocks first, none waits long.
    """
    head, block = block_of_item(C, item, blocks_of_head(C, pointers, schedule), schedule)
    work, blocks = sequence_of(C, head, block, pointers, schedule)
    place, seqlen_k = work.place, work.seqlen_k
    if C.DETERMINISTIC:
        place = blocks - 1 - place
    if C.SEQUSED:
        seqlen_k = gl.minimum(gl.maximum(gl.load(pointers.seqused_k + work.sequence), 0), seqlen_k)
    return Work(work.sequence, work.head, place, work.start_q, work.start_k, work.seqlen_q, seqlen_k)


@gluon.jit
def blocks_of_head(C: gl.constexpr, pointers, schedule):
    """Blocks of keys, in all sequences that the table has."""
    blocks = schedule.blocks
    if C.VARLEN:
        blocks = gl.load(pointers.table)
    return blocks


@gluon.jit
def sequence_of(C: gl.constexpr, head, place, pointers, schedule):
    """(block ``place`` of a key head, counted through the batch when dense; blocks of its sequence)"""
    if C.VARLEN:
        row = pointers.table + (1 + place) * TABLE_WIDTH
        sequence = gl.load(row)
        place = gl.load(row + 1)
        start_k = gl.load(row + 2)
        start_q = gl.load(row + 3)
        # No longer than was said: others wait for every block of keys that a row sees.
        seqlen_k = gl.minimum(gl.load(row + 4), schedule.seqlen_k)
        seqlen_q = gl.minimum(gl.load(row + 5), schedule.seqlen_q)
        blocks = (seqlen_k + C.BLOCK_N - 1) // C.BLOCK_N
    else:
        sequence = head // schedule.heads
        head = head % schedule.heads
        start_q = place * 0
        start_k = sequence * schedule.rows_k
        seqlen_q = schedule.seqlen_q + start_q
        seqlen_k = schedule.seqlen_k + start_q
        blocks = schedule.blocks + start_q
    return Work(sequence, head, place, start_q, start_k, seqlen_q, seqlen_k), blocks


@gluon.jit
def row_blocks(C: gl.constexpr, work, left, right):
    """Blocks [begin, end) of query rows that see some key of the block, and [full_begin, full_end) of rows
    that all see all of them. The mirror image of ``schedule.key_blocks``."""
    first = work.place * C.BLOCK_N
    last = min(first + C.BLOCK_N, work.seqlen_k) - 1
    begin, end, full_begin, full_end = key_range(
        first, last, work.seqlen_k, work.seqlen_q, right, left, C.HAS_RIGHT, C.HAS_LEFT
    )
    none = (begin >= end) | (first > last)
    begin = begin // C.BLOCK_M
    end = (end + C.BLOCK_M - 1) // C.BLOCK_M
    full_begin = (full_begin + C.BLOCK_M - 1) // C.BLOCK_M
    # Rows behind the last have probability 0 anyway: the last block of rows needs no mask for them.
    full_end = (full_end + C.BLOCK_M - 1) // C.BLOCK_M if full_end == work.seqlen_q else full_end // C.BLOCK_M
    partial = first + C.BLOCK_N > work.seqlen_k
    return begin, begin if none else end, full_begin, full_begin if partial else full_end


@gluon.jit
def step_order(begin, end, full_begin, full_end):
    """(cut, count, left, full): of ``count`` blocks of rows the ``cut`` that a mask cuts come first, of these
    ``left`` from ``begin`` on; whole blocks begin at ``full``. See :func:`block_of_step`."""
    full = min(max(full_begin, begin), end)
    full_end = min(max(full_end, full), end)
    left = full - begin
    return left + end - full_end, end - begin, left, full


@gluon.jit
def block_of_step(j, begin, end, cut, left, full):
    """The block of rows of step ``j``."""
    before = begin + j
    behind = end - cut + j
    whole = full - cut + j
    return whole if j >= cut else (before if j < left else behind)


@gluon.jit
def turn_of(C: gl.constexpr, work, m, schedule):
    """How many blocks of keys add to block ``m`` of dQ before this one: the later ones that it sees."""
    first = m * C.BLOCK_M
    last = min(first + C.BLOCK_M, work.seqlen_q) - 1
    _, end, _, _ = key_range(
        first, last, work.seqlen_q, work.seqlen_k, schedule.left, schedule.right, C.HAS_LEFT, C.HAS_RIGHT
    )
    return (end - 1) // C.BLOCK_N - work.place


@gluon.jit
def head_of_batch(C: gl.constexpr, work, g, heads):
    """The query head ``g`` of those that share the key head, counted through the batch when dense."""
    head = work.head * C.GROUP + g
    if not C.VARLEN:
        head += work.sequence * (heads * C.GROUP)
    return head


@gluon.jit
def padded_row(C: gl.constexpr, work, row):
    """Where ``row`` of a sequence lies among the padded rows of its head (``common.preprocess``)."""
    if C.VARLEN:
        row += (work.start_q // ROW_PAD + work.sequence) * ROW_PAD
    return row


@gluon.jit
def load_rows(C: gl.constexpr, desc, work, row, head, barrier, tile):
    """TMA load of BLOCK_M rows of q or dO; rows behind the last query arrive as zeros."""
    if C.VARLEN:
        end = work.start_q + work.seqlen_q
        async_load(desc, [RAGGED_ROWS, end, RAGGED_ROWS - work.seqlen_q + row, head, 0], barrier, tile)
    else:
        async_load(desc, [work.sequence, row, head, 0], barrier, tile)


@gluon.jit
def load_keys(C: gl.constexpr, desc, work, barrier, tile):
    """TMA load of the block of keys or values; rows behind the last key arrive as zeros."""
    row = work.place * C.BLOCK_N
    if C.VARLEN or C.SEQUSED:
        end = work.start_k + work.seqlen_k
        async_load(desc, [RAGGED_ROWS, end, RAGGED_ROWS - work.seqlen_k + row, work.head, 0], barrier, tile)
    else:
        async_load(desc, [work.sequence, row, work.head, 0], barrier, tile)
