"""The tile scheduler of the Hopper backward: which blocks of keys a program takes, and which blocks of query
rows it visits for each block of keys.

If there are too few work tiles, several programs share a block of keys (``splits``). ``head_splits`` divides
the query heads of a group: the schedule counts each key head ``head_splits`` times, each time with another
part of its query heads. Only the loads of K and V use the actual key head. ``row_shift`` divides the query
rows that see the block: ``2 ** row_shift`` consecutive work tiles have the same keys, each with another part
of the rows. COLUMN_SPLITS (``wide_dkv``) divides the columns of dK and dV in the same way.

A work tile's index is made of its head, its block of keys, its *share* of the rows and its *part* of the
columns:

    tile_index = ((head * blocks + block << row_shift) + share) * COLUMN_SPLITS + part

The steps of a work tile visit first the blocks of rows that an edge of the mask cuts, then the others. Under
a causal mask with a window, for example, of the blocks [begin, end) = [3, 9) those from 5 to 7 are not cut:

    block    3    4    5    6    7    8
             cut  cut  full full full cut      before = 2, full = 5
    step     0    1    3    4    5    2        masked = 3, count = 6

The module is read from top to bottom: structures; from an index to a work tile; its query rows; the order of
its steps; heads and rows in memory. The kernels' functions on integers can be called from Python through
``.fn``.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.common import preprocess
from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.masking import key_range
from flashtile.backends.hopper.modifiers import listed_rows, visited_block
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH, WorkTile, num_work_tiles

ROW_PAD = gl.constexpr(preprocess.ROW_PAD)


class BackwardPointers(NamedTuple):
    """Pointers to memory that the kernel accesses without TMA descriptors; None for each that is not used."""

    table: Any
    """The tile table of packed sequences, whose work tiles are blocks of keys; int32."""
    seqused_k: Any
    alibi_slopes: Any
    counters: Any
    """Counters (``dq_accum.accum_of``), int32, 0 at the start. The first is that of the work queue."""
    dq_semaphores: Any
    """With DETERMINISTIC: for each block of padded rows, how many blocks of keys have added to it."""
    dq: Any
    rng_state: Any
    """Seed and offset of dropout, int64."""
    lists: Any
    """Lists of a block mask, :class:`~flashtile.backends.portable.attention.functions.Lists`."""
    captured: Any
    """Tensors that functions of scores and masks read,
    :class:`~flashtile.backends.hopper.modifiers.CapturedTensors`."""
    scalars: Any
    """Numbers of the launch, as :class:`~flashtile.backends.hopper.backward.dq_accum.BackwardScalars`."""


class BackwardSchedule(NamedTuple):
    """Integers of the launch that determine its work tiles and the modifiers of their scores."""

    num_tiles: Any
    """Number of blocks of keys of all heads and sequences; for packed sequences only an upper bound."""
    num_blocks: Any
    """Blocks of keys of the longest sequence."""
    num_heads: Any
    """Key heads, each counted ``head_splits`` times."""
    seqlen_q: Any
    seqlen_k: Any
    batch_rows_k: Any
    """Rows from the start of one sequence of k to the next; read only if ``seqused_k`` shortens sequences."""
    mask: Any
    """A :class:`~flashtile.problems.masking.KernelMask`."""
    alibi_stride: Any
    """Elements from the slopes of one sequence to those of the next; 0 if all sequences share them."""
    swizzle: Any
    """Number of key heads whose work tiles are interleaved. With DETERMINISTIC it divides the number of key
    heads of the batch. Otherwise only the last heads are interleaved, and only under a causal mask or a block
    mask."""
    group: Any = 1
    """Query heads per key head of the schedule; 1 unless GROUPED."""
    head_splits: Any = 1
    """Parts into which the query heads of a key head are divided; 1 unless SHARED."""
    row_shift: Any = 0
    """Log2 of the number of parts into which the rows of a block of keys are divided; 0 unless SHARED."""
    bias_batch: Any = None
    """Number of sequences with a bias of their own; 1 if all sequences share one."""
    bias_heads: Any = None
    """Number of query heads with a bias of their own; 1 if all query heads share one."""
    drop_threshold: Any = None
    """Dropout drops a probability whose random number of 15 bits is below this threshold."""


class RowBlocks(NamedTuple):
    """The blocks of query rows that a work tile visits, in the order of its steps (:func:`in_order`)."""

    begin: Any
    """Blocks [begin, end) are visited; with a block mask, positions [begin, end) of its list."""
    end: Any
    masked: Any
    """Number of steps with masked blocks. These steps come first."""
    count: Any
    before: Any
    """Number of masked blocks whose rows precede those of the unmasked blocks."""
    full: Any
    """The first unmasked block."""
    listed: Any
    """A :class:`~flashtile.backends.hopper.modifiers.BlockList`; 0 without a block mask."""


# From an index to a work tile.


@gluon.jit
def count_tiles(C: gl.constexpr, pointers, schedule):
    """Return the number of work tiles of the launch: COLUMN_SPLITS for each part of a block's query rows."""
    return (num_work_tiles(C, pointers, schedule) << row_shift(C, schedule)) * C.COLUMN_SPLITS


@gluon.jit
def head_and_block(C: gl.constexpr, tile_index, blocks, schedule):
    """Return (key head, block of keys) of a work tile.

    Each head has ``blocks`` blocks. Heads are counted over all sequences of a dense batch.

    All blocks of a head come before those of the next head, so programs that run at the same time read the
    same query rows. There are two exceptions:

    * With DETERMINISTIC, groups of ``swizzle`` heads are interleaved: consecutive work tiles belong to
      different heads of a group. Neighbouring blocks of one head add to the same rows of dQ in a fixed order.
      If programs started them at the same time, one would have to wait for the other.
    * Under a causal mask or a block mask, the last ``swizzle`` heads are interleaved. Otherwise the longest
      blocks of the last head would start when all other work is done.
    """
    tile_index = tile_index // C.COLUMN_SPLITS >> row_shift(C, schedule)
    head = tile_index // blocks
    block = tile_index % blocks
    # The longest blocks of all heads first passed the rows of all heads through DRAM: 119 to 371 TFLOP/s,
    # head after head 158 to 486 (causal, head_dim 128, lengths of 512 to 16384).
    if C.DETERMINISTIC:
        in_swizzle = tile_index % (blocks * schedule.swizzle)
        head = tile_index // (blocks * schedule.swizzle) * schedule.swizzle + in_swizzle % schedule.swizzle
        block = in_swizzle // schedule.swizzle
    elif C.LISTED or (C.HAS_RIGHT and not C.HAS_LEFT):
        all_blocks = schedule.num_tiles
        if C.VARLEN:  # ``num_tiles`` is only an upper bound
            all_blocks = blocks * schedule.num_heads
        first = all_blocks - blocks * schedule.swizzle
        in_last = tile_index - first
        head = head if in_last < 0 else first // blocks + in_last % schedule.swizzle
        block = block if in_last < 0 else in_last // schedule.swizzle
    return head, block


@gluon.jit
def find_work_tile(C: gl.constexpr, tile_index, pointers, schedule):
    """Return the :class:`WorkTile` of an index: from the tile table of packed sequences, or by arithmetic.

    The first blocks of keys of a head are taken first, because they are the longest under a causal mask.
    With DETERMINISTIC the order is reversed: the last block is taken first, and each block adds to a row of
    dQ after all later blocks. Under a causal mask a block waits only briefly for the later ones. Block n - 1
    begins with BLOCK_N rows that do not see block n. Meanwhile the program of block n, which started
    earlier, adds to the rows that see both blocks.
    """
    head, block = head_and_block(C, tile_index, blocks_of_head(C, pointers, schedule), schedule)
    work, blocks = sequence_of(C, head, block, pointers, schedule)
    tile_in_head, seqlen_k = work.tile_in_head, work.seqlen_k
    if C.DETERMINISTIC:
        tile_in_head = blocks - 1 - tile_in_head
    # Clamped, because the host does not read these lengths. The sequence keeps all of its blocks, since
    # ``dq_accum`` counts them. Those past the length visit no rows.
    if C.SEQUSED:
        seqlen_k = gl.minimum(gl.maximum(gl.load(pointers.seqused_k + work.sequence), 0), seqlen_k)
    return WorkTile(
        work.sequence, work.head, work.head_kv, tile_in_head, work.start_q, work.start_k, work.seqlen_q,
        seqlen_k,
    )  # fmt: skip


@gluon.jit
def blocks_of_head(C: gl.constexpr, pointers, schedule):
    """Return how many blocks of keys a head has: in one sequence, or in all sequences if they are packed."""
    blocks = schedule.num_blocks
    if C.VARLEN:  # the first number of the table's header
        blocks = gl.load(pointers.table)
    return blocks


@gluon.jit
def own_part(C: gl.constexpr, tile_index):
    """Return which of COLUMN_SPLITS parts of the columns of dK and dV a work tile computes."""
    return tile_index % C.COLUMN_SPLITS


@gluon.jit
def own_share(C: gl.constexpr, tile_index, schedule):
    """Return which share of the query rows a work tile visits."""
    return tile_index // C.COLUMN_SPLITS & ((1 << row_shift(C, schedule)) - 1)


@gluon.jit
def gradient_head(C: gl.constexpr, tile_index, work, schedule):
    """Return the head of dK and dV that a work tile writes.

    Work tiles that share keys write their partial sums as different heads, which ``sum_parts`` adds up.
    """
    return (work.head << row_shift(C, schedule)) + own_share(C, tile_index, schedule)


@gluon.jit
def sequence_of(C: gl.constexpr, head, block, pointers, schedule):
    """Return (work tile for block ``block`` of a key head, number of blocks in the work tile's sequence).

    The work tile's seqlen_k and the number of blocks still include keys that ``seqused_k`` excludes.
    """
    if C.VARLEN:
        row = pointers.table + (1 + block) * TABLE_WIDTH
        sequence = gl.load(row)
        tile_in_head = gl.load(row + 1)
        start_k = gl.load(row + 2)
        start_q = gl.load(row + 3)
        # The table has only blocks up to max_seqlen. With DETERMINISTIC, programs wait for each block of keys
        # that a row sees, so each of these blocks must be in the table.
        seqlen_k = gl.minimum(gl.load(row + 4), schedule.seqlen_k)
        seqlen_q = gl.minimum(gl.load(row + 5), schedule.seqlen_q)
        blocks = (seqlen_k + C.BLOCK_N - 1) // C.BLOCK_N
    else:
        tile_in_head = block
        # ``head`` counts over the batch. With a bias that sequences share, all sequences of a head come
        # before the next head, so that the head's bias stays in the L2 cache.
        if C.SEQUENCES_FIRST:
            sequences = schedule.num_tiles // (schedule.num_blocks * schedule.num_heads)
            sequence = head % sequences
            head = head // sequences
        else:
            sequence = head // schedule.num_heads
            head = head % schedule.num_heads
        start_q = tile_in_head * 0  # 0 as a tensor, and below the lengths as tensors: as they are in a table
        start_k = sequence * schedule.batch_rows_k  # gaps between the sequences of k are counted
        seqlen_q = schedule.seqlen_q + start_q
        seqlen_k = schedule.seqlen_k + start_q
        blocks = schedule.num_blocks + start_q
    # The schedule has head_splits heads for each head of k and v.
    head_kv = head // schedule.head_splits if C.SHARED else head
    return WorkTile(sequence, head, head_kv, tile_in_head, start_q, start_k, seqlen_q, seqlen_k), blocks


# The query rows of a work tile.


@gluon.jit
def row_blocks(C: gl.constexpr, work, mask):
    """Return (begin, end, full_begin, full_end), bounds of the blocks of query rows of a work tile.

    Only rows of blocks [begin, end) see keys of the work tile. All rows of blocks [full_begin, full_end) see
    all of its keys. This is the mirror image of the forward's ``key_blocks``: keys and queries change places,
    and so do left and right.
    """
    first = work.tile_in_head * C.BLOCK_N
    last = min(first + C.BLOCK_N, work.seqlen_k) - 1
    begin, end, full_begin, full_end = key_range(
        C, first, last, work.seqlen_k, work.seqlen_q, mask, MIRRORED=True
    )
    none = (begin >= end) | (first > last)
    begin = begin // C.BLOCK_M
    end = (end + C.BLOCK_M - 1) // C.BLOCK_M
    full_begin = (full_begin + C.BLOCK_M - 1) // C.BLOCK_M
    # Rows past the last query have probability 0 in any case, so the last block of rows needs no mask.
    full_end = (full_end + C.BLOCK_M - 1) // C.BLOCK_M if full_end == work.seqlen_q else full_end // C.BLOCK_M
    # The block of keys in which the sequence ends: keys past the end are masked in every step.
    partial = first + C.BLOCK_N > work.seqlen_k
    if C.HAS_CUTS:  # any key may be hidden
        full_end = full_begin
    if C.ONE_BLOCK:  # the others have no other block of keys that writes their dQ
        begin, end, none = 0, (work.seqlen_q + C.BLOCK_M - 1) // C.BLOCK_M, False
    return begin, begin if none else end, full_begin, full_begin if partial else full_end


@gluon.jit
def own_row_blocks(C: gl.constexpr, tile_index, work, schedule):
    """Return :func:`row_blocks` of a work tile.

    If several work tiles divide the blocks of rows, [begin, end) is the share of this one.
    """
    begin, end, full_begin, full_end = row_blocks(C, work, schedule.mask)
    if C.SHARED:
        # [full_begin, full_end) stays that of all rows: step_order clamps it to the share.
        share = own_share(C, tile_index, schedule)
        count = end - begin
        end = begin + (count * (share + 1) >> schedule.row_shift)
        begin += count * share >> schedule.row_shift
    return begin, end, full_begin, full_end


# The order of its steps, and of additions to dQ.


@gluon.jit
def step_order(begin, end, full_begin, full_end):
    """Return (cut, count, before, full), the order of ``count`` blocks of rows for :func:`block_of_step`.

    The first ``cut`` steps visit the blocks that the mask cuts. These are the first ``before`` blocks, then
    the blocks after the unmasked ones. The other steps visit the unmasked blocks, which begin at ``full``.
    """
    # Clamped, because a share of the rows may have none of the unmasked blocks.
    full = min(max(full_begin, begin), end)
    full_end = min(max(full_end, full), end)
    before = full - begin
    return before + end - full_end, end - begin, before, full


@gluon.jit
def block_of_step(j, begin, end, cut, before, full):
    """Return the block of query rows that step ``j`` visits, in the order of :func:`step_order`."""
    in_front = begin + j
    behind = end - cut + j  # steps [before, cut) end with block end - 1
    whole = full - cut + j
    return whole if j >= cut else (in_front if j < before else behind)


@gluon.jit
def row_list(C: gl.constexpr, work, pointers, schedule):
    """Return the ``BlockList`` of query rows that a block mask shows to a work tile; 0 without one."""
    if C.LISTED:
        return listed_rows(C, work, query_head(C, work, 0, schedule), pointers.lists)
    else:
        return 0


@gluon.jit
def in_order(C: gl.constexpr, ranges, listed):
    """Return the :class:`RowBlocks` of a work tile: the blocks of rows that it visits, and their order.

    With a block mask the blocks come from ``listed``, the work tile's :func:`row_list`. Otherwise they come
    from ``ranges``, the result of :func:`own_row_blocks`.
    """
    if C.LISTED:  # partial blocks come first in the list, so step j visits position j
        masked = listed.masked_count
        return RowBlocks(0, listed.count, masked, listed.count, masked, masked, listed)
    else:
        begin, end, full_begin, full_end = ranges
        masked, count, before, full = step_order(begin, end, full_begin, full_end)
        return RowBlocks(begin, end, masked, count, before, full, 0)


@gluon.jit
def has_rows(C: gl.constexpr, ranges, listed):
    """Return whether a work tile visits any rows."""
    begin, end, _, _ = ranges
    if C.LISTED:
        begin, end = 0, listed.count
    return begin < end


@gluon.jit
def own_rows(C: gl.constexpr, tile_index, work, pointers, schedule):
    """Return the :class:`RowBlocks` of a work tile.

    The consumers of the main kernel take its steps apart, because their modifiers hold the list.
    """
    ranges = own_row_blocks(C, tile_index, work, schedule)
    return in_order(C, ranges, row_list(C, work, pointers, schedule))


@gluon.jit
def step_block(rows, j):
    """Return :func:`block_of_step` for :class:`RowBlocks`: with a block mask, a position in its list."""
    return block_of_step(j, rows.begin, rows.end, rows.masked, rows.before, rows.full)


@gluon.jit
def row_block(C: gl.constexpr, rows, j):
    """Return the block of query rows that step ``j`` visits. ``rows`` are :class:`RowBlocks`."""
    m = step_block(rows, j)
    if C.LISTED:
        m, _is_full = visited_block(C, rows.listed, m)
    return m


@gluon.jit
def dq_order(C: gl.constexpr, work, m, schedule):
    """With DETERMINISTIC: return how many blocks of keys add to block ``m`` of dQ before this work tile.

    Blocks of later keys add first. So the result counts all later blocks that some row of block ``m`` sees.
    Programs that share a block of keys have different rows or heads, so they count once. There is no block
    mask: a deterministic call with one has the portable kernels.
    """
    first = m * C.BLOCK_M
    last = min(first + C.BLOCK_M, work.seqlen_q) - 1
    _, end, _, _ = key_range(C, first, last, work.seqlen_q, work.seqlen_k, schedule.mask)
    return (end - 1) // C.BLOCK_N - work.tile_in_head


# Heads and rows in memory.


@gluon.jit
def group_size(C: gl.constexpr, schedule):
    """Return the number of query heads per key head of the schedule. If it is 1, loops over it disappear."""
    # Other numbers are arguments of the launch: as constants they made a kernel for each ratio of heads.
    return schedule.group if C.GROUPED else 1


@gluon.jit
def row_shift(C: gl.constexpr, schedule):
    """Return log2 of the number of parts into which the query rows of a block of keys are divided."""
    return schedule.row_shift if C.SHARED else 0


@gluon.jit
def query_head(C: gl.constexpr, work, g, schedule):
    """Return query head ``g`` of the work tile's key head, counted over those of a sequence."""
    return work.head * group_size(C, schedule) + g


@gluon.jit
def head_of_batch(C: gl.constexpr, work, g, schedule):
    """Return query head ``g`` of the work tile's key head, counted over all sequences of a dense batch."""
    head = query_head(C, work, g, schedule)
    if not C.VARLEN:
        head += work.sequence * (schedule.num_heads * group_size(C, schedule))
    return head


@gluon.jit
def padded_row(C: gl.constexpr, work, row):
    """Return the index of a sequence's ``row`` among the padded rows of a head.

    ``neg_lse``, ``neg_delta`` and ``dq_accum`` have padded rows (``common.preprocess``).
    """
    if C.VARLEN:  # each sequence begins at a block of its own (``preprocess.statistics_offset``)
        row += (work.start_q // ROW_PAD + work.sequence) * ROW_PAD
    return row
