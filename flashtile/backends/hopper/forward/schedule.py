"""Which tiles a program computes, and which key blocks a tile meets.

The functions on integers are the kernel's own; Python calls them through ``.fn`` (tests, documentation).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import aggregate

TABLE_WIDTH = gl.constexpr(8)
"""Integers of a row of the tile table of a variable-length batch; row 0 holds the number of the others, and
the items that were taken from the queue."""
TAKEN = gl.constexpr(1)
"""Where in row 0; a call that has no table but a queue has this row alone."""


class Pointers(NamedTuple):
    """Those of the kernel. What a call has not (all but lse) is never followed."""

    lse: Any
    table: Any
    seqused_k: Any
    alibi_slopes: Any
    sink: Any


class Schedule(NamedTuple):
    """Integers of the kernel."""

    items: Any
    """Of the launch; a variable-length batch has them in its table."""
    blocks: Any
    """Blocks of query rows of the longest sequence."""
    heads: Any
    """Of tiles: query heads, divided by those that share a tile."""
    section: Any
    """Heads whose items are dealt out together."""
    seqlen_q: Any
    seqlen_k: Any
    total_q: Any
    rows_k: Any
    """From one sequence of k to the next; used where ``seqused_k`` ends them early."""
    left: Any
    right: Any
    alibi_stride: Any


class Numbers(NamedTuple):
    """Of the scores: softmax_scale, 2 softmax_scale / softcap and softcap, each times log2(e)."""

    scale_log2: Any
    softcap_rate: Any
    softcap_log2: Any


@aggregate
class Work:
    """Blocks of query rows of one head that a program computes in one turn, and where their sequence lies."""

    sequence: gl.tensor
    head: gl.tensor
    place: gl.tensor
    start_q: gl.tensor
    start_k: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor

    @gluon.constexpr_function
    def __init__(self, sequence, head, place, start_q, start_k, seqlen_q, seqlen_k):
        self.sequence = sequence
        self.head = head
        self.place = place
        self.start_q = start_q
        self.start_k = start_k
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k


@gluon.jit
def work_item(turn, program, programs):
    """The item that ``program`` takes in its ``turn``: forth and back, so that falling costs even out."""
    forth = turn * programs + program
    back = turn * programs + programs - 1 - program
    return back if turn % 2 else forth


@gluon.jit
def turns_of(program, programs, items):
    """How many items ``program`` takes in all."""
    full = items // programs
    place = programs - 1 - program if full % 2 else program
    return full + 1 if place < items % programs else full


@gluon.jit
def next_item(pointers, programs):
    """One that nobody has: of a queue, of which each of ``programs`` had one to begin with."""
    return programs + gl.atomic_add(pointers.table + TAKEN, 1)


@gluon.jit
def blocks_of(blocks, place, PAIRED: gl.constexpr):
    """How many blocks of query rows an item has, of a sequence with ``blocks`` of them.

    Under a causal mask block m costs m + 1 blocks of keys. So an item is the pair of the dearest and the
    cheapest that are left: all items of a sequence cost the same, and those at work together read the same
    keys.
    """
    return 2 if PAIRED and 2 * place + 1 < blocks else 1


@gluon.jit
def block_of(blocks, place, part, PAIRED: gl.constexpr):
    """Block number ``part`` of the item, the dearer first."""
    return place if PAIRED and part > 0 else blocks - 1 - place


@gluon.jit
def items_of(blocks, PAIRED: gl.constexpr):
    """Items of a head of a sequence with ``blocks`` blocks of query rows."""
    return (blocks + 1) // 2 if PAIRED else blocks


@gluon.jit
def dense_item(item, items, heads, section):
    """Item -> (sequence, head, place): section by section of all heads of the batch, in a section place by
    place. ``section`` divides batch * heads."""
    per_section = items * section
    head_of_batch = item // per_section * section + item % section
    return head_of_batch // heads, head_of_batch % heads, item % per_section // section


@gluon.jit
def item_count(C: gl.constexpr, pointers, schedule):
    """All items of the launch."""
    items = schedule.items
    if C.VARLEN:
        items = gl.load(pointers.table) * schedule.heads
    return items


@gluon.jit
def block_count(C: gl.constexpr, work, schedule):
    """Blocks of query rows of the sequence of ``work``."""
    blocks = schedule.blocks
    if C.VARLEN:
        blocks = min((work.seqlen_q + C.BLOCK_M - 1) // C.BLOCK_M, blocks)
    return blocks


@gluon.jit
def find_work(C: gl.constexpr, item, pointers, schedule):
    """From the table of a variable-length batch, or by arithmetic."""
    if C.VARLEN:
        row = pointers.table + (1 + item // schedule.heads) * TABLE_WIDTH
        return Work(
            gl.load(row),
            item % schedule.heads,
            gl.load(row + 1),
            gl.load(row + 2),
            gl.load(row + 3),
            gl.load(row + 4),
            gl.load(row + 5),
        )
    items = items_of(schedule.blocks, C.PAIRED)
    sequence, head, place = dense_item(item, items, schedule.heads, schedule.section)
    zero = item * 0
    seqlen_k = schedule.seqlen_k + zero
    if C.SEQUSED:
        seqlen_k = gl.minimum(gl.maximum(gl.load(pointers.seqused_k + sequence), 0), seqlen_k)
    return Work(sequence, head, place, zero, sequence * schedule.rows_k, schedule.seqlen_q + zero, seqlen_k)


@gluon.jit
def key_range(
    first_row, last_row, seqlen_q, seqlen_k, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr
):
    """Keys [begin, end) that some row of [first_row, last_row] sees, and [full_begin, full_end)
    that all of them see."""
    offset = seqlen_k - seqlen_q
    begin = 0
    end = seqlen_k
    full_begin = 0
    full_end = seqlen_k
    if HAS_RIGHT:
        end = max(min(end, last_row + offset + right + 1), 0)
        full_end = max(min(full_end, first_row + offset + right + 1), 0)
    if HAS_LEFT:
        begin = max(first_row + offset - left, 0)
        full_begin = max(last_row + offset - left, 0)
    return begin, end, full_begin, full_end


@gluon.jit
def key_blocks(
    first_row, last_row, seqlen_q, seqlen_k, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Blocks [begin, end) of the keys of :func:`key_range`; never none.

    Rows that see no key get the block behind the last key: it loads as zeros and is masked as a whole.
    """
    begin, end, _, _ = key_range(first_row, last_row, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
    n_begin = begin // BLOCK_N
    n_end = (end + BLOCK_N - 1) // BLOCK_N
    behind = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    none = begin >= end
    return behind if none else n_begin, behind + 1 if none else n_end


@gluon.jit
def own_blocks(
    first_row, last_row, n_begin, n_end, seqlen_q, seqlen_k, left, right, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Of a tile's blocks [n_begin, n_end), those [begin, end) that rows [first_row, last_row] need,
    never none, and the uncut ones [full_begin, full_end) among those before the last, ``end - 1``."""
    begin, end, full_begin, full_end = key_range(
        first_row, last_row, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT
    )
    end = min(max((end + BLOCK_N - 1) // BLOCK_N, n_begin + 1), n_end)
    begin = min(max(begin // BLOCK_N, n_begin), end - 1)
    full_end = min(max(full_end // BLOCK_N, begin), end - 1)
    full_begin = min(max((full_begin + BLOCK_N - 1) // BLOCK_N, begin), full_end)
    return begin, end, full_begin, full_end
