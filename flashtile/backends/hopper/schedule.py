"""Which tile a program computes next, and which key blocks a tile meets.

The functions on integers are the kernel's own; Python calls them through ``.fn`` (tests, documentation).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import aggregate

TABLE_WIDTH = gl.constexpr(8)
"""Integers of a row of the tile table of a variable-length batch; row 0 holds the number of the others."""


@aggregate
class Tile:
    """One block of query rows of one head, and where its sequence lies in memory."""

    sequence: gl.tensor
    head: gl.tensor
    block: gl.tensor
    start_q: gl.tensor
    start_k: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor

    @gluon.constexpr_function
    def __init__(self, sequence, head, block, start_q, start_k, seqlen_q, seqlen_k):
        self.sequence = sequence
        self.head = head
        self.block = block
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
def dense_tile(item, blocks, heads, section):
    """Item -> (sequence, head, block): section by section of heads, and in a section the last block first,
    which under a causal mask costs the most.

    ``section`` divides batch * heads.
    """
    per_section = blocks * section
    first = item // per_section * section
    within = item % per_section
    head_of_batch = first + within % section
    return head_of_batch // heads, head_of_batch % heads, blocks - 1 - within // section


@gluon.jit
def turns_of(program, programs, items):
    """How many items ``program`` takes in all."""
    full = items // programs
    place = programs - 1 - program if full % 2 else program
    return full + 1 if place < items % programs else full


@gluon.jit
def find_tile(
    C: gl.constexpr, item, table, seqused_k, blocks, heads, section, seqlen_q, seqlen_k, rows_k
):
    """``rows_k``: from one sequence of k to the next, in rows; used where ``seqused_k`` ends them early."""
    if C.VARLEN:
        row = table + (1 + item // heads) * TABLE_WIDTH
        return Tile(
            gl.load(row),
            item % heads,
            gl.load(row + 1),
            gl.load(row + 2),
            gl.load(row + 3),
            gl.load(row + 4),
            gl.load(row + 5),
        )
    sequence, head, block = dense_tile(item, blocks, heads, section)
    zero = item * 0
    if C.SEQUSED:
        seqlen_k = gl.minimum(gl.maximum(gl.load(seqused_k + sequence), 0), seqlen_k)
    return Tile(sequence, head, block, zero, sequence * rows_k, seqlen_q + zero, seqlen_k + zero)


@gluon.jit
def key_range(
    first_row, last_row, seqlen_q, seqlen_k, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr
):
    """Keys [begin, end) that some row of [first_row, last_row] sees, and [full_begin, full_end) that all see."""
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
    """Of a tile's blocks [n_begin, n_end), those [begin, end) that rows [first_row, last_row] need, never none,
    and the uncut ones [full_begin, full_end) among those before the last, ``end - 1``."""
    begin, end, full_begin, full_end = key_range(
        first_row, last_row, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT
    )
    end = min(max((end + BLOCK_N - 1) // BLOCK_N, n_begin + 1), n_end)
    begin = min(max(begin // BLOCK_N, n_begin), end - 1)
    full_end = min(max(full_end // BLOCK_N, begin), end - 1)
    full_begin = min(max((full_begin + BLOCK_N - 1) // BLOCK_N, begin), full_end)
    return begin, end, full_begin, full_end
