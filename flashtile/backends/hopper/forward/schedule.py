"""The tile scheduler of the Hopper forward: which work tiles a program computes, and which blocks of keys it
visits for each.

A *work tile* is one block of BLOCK_M query rows of a head, or a pair of them. Producer and consumers of a
program walk the same work tiles, each with its own step::

    producer   produce(load_block)                     consumer   consume(attend_tile)
      tile index: serpentine, or atomic -> queue          tile index: serpentine, or <- queue
      walk_work_tile                                      walk_work_tile
        find_work_tile: sequence, head                      find_work_tile
        load_block for each block                           attend_tile for each block
          tile_blocks: key blocks of the tile                 own_range: key blocks of 64 of its rows

Python can call the functions on integers through ``.fn`` (``rounds``, tests, documentation).
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper import pipeline
from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.layouts import WARPGROUP_ROWS
from flashtile.backends.hopper.masking import key_range
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH, TAKEN, WorkTile, num_work_tiles


class ForwardPointers(NamedTuple):
    """Pointers to memory that the kernel accesses without TMA descriptors; None for those a call lacks."""

    lse: Any
    """(batch, heads, seqlen_q) or (heads, total_q), fp32."""
    table: Any
    """The tile table of packed sequences, or only its header; int32."""
    seqused_k: Any
    alibi_slopes: Any
    sink: Any
    rng_state: Any
    """Seed and offset of dropout, int64."""
    lists: Any
    """Lists of a block mask, :class:`~flashtile.backends.portable.attention.functions.Lists`."""
    captured: Any
    """Tensors that functions of scores and masks read,
    :class:`~flashtile.backends.hopper.modifiers.CapturedTensors`."""
    max_logits: Any
    """Largest score of each row, in the shape of lse."""
    entropy: Any
    """Entropy of each row's probabilities, in the shape of lse."""


class ForwardSchedule(NamedTuple):
    """Integers of the launch that determine its work tiles and the modifiers of their scores."""

    num_tiles: Any
    """Number of work tiles of all heads and sequences; for packed sequences only an upper bound."""
    num_blocks: Any
    """Blocks of query rows of the longest sequence."""
    num_heads: Any
    """Number of heads in the schedule: query heads, divided by PACKED_HEADS, times COLUMN_SPLITS."""
    swizzle: Any
    """Number of heads whose work tiles are interleaved for the L2 cache; divides the heads of the batch."""
    seqlen_q: Any
    seqlen_k: Any
    total_q: Any
    batch_rows_k: Any
    """Rows from the start of one sequence of k to the next; read only if ``seqused_k`` shortens sequences."""
    mask: Any
    """A :class:`~flashtile.problems.masking.KernelMask`."""
    alibi_stride: Any
    """Elements from the slopes of one sequence to those of the next; 0 if all sequences share them."""
    kv_group: Any = 1
    """Heads of the schedule per key head: its query heads, divided by PACKED_HEADS, times COLUMN_SPLITS."""
    bias_batch: Any = None
    """Number of sequences with a bias of their own; 1 if all sequences share one."""
    bias_heads: Any = None
    """Number of query heads with a bias of their own; 1 if all query heads share one."""
    drop_threshold: Any = None
    """Dropout drops a probability whose random number of 15 bits is below this threshold."""


class ForwardCall(NamedTuple):
    """Arguments of the launch that all partitions need."""

    pointers: Any
    """:class:`ForwardPointers`."""
    schedule: Any
    """:class:`ForwardSchedule`."""
    numbers: Any
    """:class:`ForwardNumbers`."""


class OwnBlocks(NamedTuple):
    """Blocks of keys that a warpgroup's rows see, counted from the beginning of the sequence."""

    begin: Any
    end: Any
    """Blocks [begin, end), at least one."""
    full_begin: Any
    full_end: Any
    """No edge of the mask cuts blocks [full_begin, full_end). The last block is never among them."""


class Numbers(NamedTuple):
    """Floats of the launch, for scores in log2 units. Decoding and FP8 have no modifiers and need no more."""

    scale_log2: Any
    """Factor from raw products to scores in log2 units, softmax_scale * log2(e). With a soft-cap it is
    softcap * log2(e), the factor from the tanh of the soft-cap."""
    softcap_rate: Any
    """softmax_scale / softcap."""
    softcap_log2: Any
    """softcap * log2(e)."""


class ForwardNumbers(NamedTuple):
    """The fields of :class:`Numbers` and those of modifiers. With a bias or SCORE_MOD, scores are in natural
    units, and ``scale_log2`` is log2(e)."""

    scale_log2: Any
    softcap_rate: Any
    softcap_log2: Any
    scale: Any = None
    """Factor to scores in natural units: softmax_scale for raw products, or softcap for the tanh of a
    soft-cap."""
    keep_scale: Any = None
    """Factor of dropout, 1 / (1 - dropout_p)."""


@gluon.jit
def serpentine_order(t, program, programs):
    """Return the ``t``-th work tile of ``program``, one of ``programs``.

    Work tiles come in order of falling cost. They are assigned in serpentine order, 0 1 2 2 1 0 0 1 2, so
    that no program always has the longer ones. The work queue replaces this order for packed sequences, for
    functions, and for long causal calls where it was faster (1.00 to 1.05 times at head_dim 128, 0.95 to 1.00
    at 64).
    """
    forwards = t * programs + program
    backwards = t * programs + programs - 1 - program
    return backwards if t % 2 else forwards


@gluon.jit
def num_own_tiles(program, programs, num_tiles):
    """Return the number of work tiles that ``program`` computes in :func:`serpentine_order`."""
    full = num_tiles // programs
    turn = programs - 1 - program if full % 2 else program
    return full + 1 if turn < num_tiles % programs else full


@gluon.jit
def next_tile(pointers, programs):
    """Take a work tile from the queue and return its index.

    The first work tile of each program does not come from the queue: its index is the program's number. The
    counter starts at 0 for every grid, so ``programs`` is added here.
    """
    return programs + gl.atomic_add(pointers.table + TAKEN, 1)


@gluon.jit
def leave_queue(pointers, tile_index, num_tiles, programs):
    """Reset the counter for the next launch. ``tile_index`` is the program's first index past the work tiles.

    A program takes an index after each work tile that it computes, so all programs together take
    ``num_tiles`` indices: ``programs`` to ``programs + num_tiles - 1``. The program that gets the last of
    these is the last to use the counter.
    """
    if tile_index == programs + num_tiles - 1:
        gl.store(pointers.table + TAKEN, 0)


@gluon.jit
def num_parts(num_blocks, tile_in_head, PAIRED: gl.constexpr):
    """Return the number of blocks of query rows in a work tile: 2 if it is a pair, else 1.

    Under a causal mask, block m of queries costs m + 1 blocks of keys. A pair consists of the longest and the
    shortest remaining block. All pairs of a sequence cost the same, and concurrent pairs read the same keys.
    """
    return 2 if PAIRED and 2 * tile_in_head + 1 < num_blocks else 1


@gluon.jit
def block_of_part(num_blocks, tile_in_head, part, PAIRED: gl.constexpr):
    """Return the index of block ``part`` of query rows of a work tile.

    In a pair, part 0 is the longer block and part 1 is the shorter block.
    """
    return tile_in_head if PAIRED and part > 0 else num_blocks - 1 - tile_in_head


@gluon.jit
def tiles_of_head(num_blocks, PAIRED: gl.constexpr):
    """Return how many work tiles one head has if its sequence has ``num_blocks`` blocks of query rows."""
    return (num_blocks + 1) // 2 if PAIRED else num_blocks


@gluon.jit
def dense_tile(tile_index, tiles_per_head, num_heads, swizzle):
    """Return (sequence, head, tile_in_head) of a work tile.

    Work tiles of ``swizzle`` heads are interleaved: first the longest of each of these heads, then the second
    of each, and so on. With all heads, the longest tiles of the call come first. Few heads at a time keep
    their keys and values in the L2 cache (``rounds`` chooses).
    """
    per_swizzle = tiles_per_head * swizzle
    head_of_batch = tile_index // per_swizzle * swizzle + tile_index % swizzle
    return head_of_batch // num_heads, head_of_batch % num_heads, tile_index % per_swizzle // swizzle


@gluon.jit
def query_blocks(C: gl.constexpr, work, schedule):
    """Return how many blocks of query rows the sequence of work tile ``work`` has."""
    num_blocks = schedule.num_blocks
    if C.VARLEN:
        TOKENS: gl.constexpr = C.BLOCK_M // C.PACK
        num_blocks = min((work.seqlen_q + TOKENS - 1) // TOKENS, num_blocks)
    return num_blocks


@gluon.jit
def find_work_tile(C: gl.constexpr, tile_index, pointers, schedule):
    """Return the :class:`WorkTile` of an index. For packed sequences it is read from the tile table."""
    if C.VARLEN:  # a row of the table serves all heads, whose indices are adjacent
        row = pointers.table + (1 + tile_index // schedule.num_heads) * TABLE_WIDTH
        head = tile_index % schedule.num_heads
        return WorkTile(
            gl.load(row),
            head,
            head // schedule.kv_group,
            gl.load(row + 1),
            gl.load(row + 2),
            gl.load(row + 3),
            gl.load(row + 4),
            gl.load(row + 5),
        )
    tiles_per_head = tiles_of_head(schedule.num_blocks, C.PAIRED)
    if C.SEQUENCES_FIRST:  # sequences share the bias of a head, which then stays in the L2 cache
        sequences = schedule.num_tiles // (tiles_per_head * schedule.num_heads)
        head, sequence, tile_in_head = dense_tile(tile_index, tiles_per_head, sequences, schedule.swizzle)
    else:
        sequence, head, tile_in_head = dense_tile(
            tile_index, tiles_per_head, schedule.num_heads, schedule.swizzle
        )
    start_k = sequence * schedule.batch_rows_k
    seqlen_k = schedule.seqlen_k
    if C.SEQUSED:  # clamped: the numbers are the caller's, and no row may lie outside of the tensor
        seqlen_k = gl.minimum(gl.maximum(gl.load(pointers.seqused_k + sequence), 0), seqlen_k)
    head_kv = head // schedule.kv_group
    return WorkTile(sequence, head, head_kv, tile_in_head, 0, start_k, schedule.seqlen_q, seqlen_k)


@gluon.jit
def key_blocks(C: gl.constexpr, first_row, last_row, seqlen_q, seqlen_k, mask):
    """Return (begin, end), the blocks of keys that at least one of the rows sees (:func:`key_range`).

    There is at least one block, so that prologue and epilogue need no case for none. If the rows see no key,
    the result is the block past the last key, which loads as zeros and is masked as a whole.
    """
    begin, end, _, _ = key_range(C, first_row, last_row, seqlen_q, seqlen_k, mask)
    n_begin = begin // C.BLOCK_N
    n_end = (end + C.BLOCK_N - 1) // C.BLOCK_N
    behind = (seqlen_k + C.BLOCK_N - 1) // C.BLOCK_N
    none = begin >= end
    return behind if none else n_begin, behind + 1 if none else n_end


@gluon.jit
def own_blocks(C: gl.constexpr, first_row, last_row, n_begin, n_end, seqlen_q, seqlen_k, mask):
    """Return the blocks of keys that rows [first_row, last_row] see, as :class:`OwnBlocks`.

    They are limited to the blocks [n_begin, n_end) of the tile.
    """
    begin, end, full_begin, full_end = key_range(C, first_row, last_row, seqlen_q, seqlen_k, mask)
    # At least one block, even for rows that see no key: the loops then need no case for it.
    end = min(max((end + C.BLOCK_N - 1) // C.BLOCK_N, n_begin + 1), n_end)
    begin = min(max(begin // C.BLOCK_N, n_begin), end - 1)
    # The last block is never full: the prologue of the loop masks it.
    full_end = min(max(full_end // C.BLOCK_N, begin), end - 1)
    full_begin = min(max((full_begin + C.BLOCK_N - 1) // C.BLOCK_N, begin), full_end)
    return OwnBlocks(begin, end, full_begin, full_end)


@gluon.jit
def lacking_tokens(seqlen_q, WARPGROUP: gl.constexpr, BLOCK: gl.constexpr):
    """Return how many tokens the first block of query rows lacks with FIRST_BLOCK_PARTIAL.

    It lacks whole warpgroups, so the same 64 rows share a warpgroup as without, and their bits are equal.
    WARPGROUP and BLOCK are the tokens of a warpgroup and of a whole block.
    """
    filled = (seqlen_q + WARPGROUP - 1) // WARPGROUP * WARPGROUP
    return (filled + BLOCK - 1) // BLOCK * BLOCK - filled


@gluon.jit
def first_token(C: gl.constexpr, W: gl.constexpr, work, block):
    """Return the first token of warpgroup W in a block of query rows."""
    first = (block * C.BLOCK_M + W * WARPGROUP_ROWS) // C.PACK
    if C.FIRST_BLOCK_PARTIAL:
        first -= lacking_tokens(work.seqlen_q, WARPGROUP_ROWS // C.PACK, C.BLOCK_M // C.PACK)
        # A warpgroup without rows is past the last query, where zeros are loaded and nothing is stored.
        first = first if first >= 0 else work.seqlen_q - first
    return first


@gluon.jit
def tile_blocks(C: gl.constexpr, work, block, mask):
    """Return (n_begin, n_end), the range of blocks of keys that a tile visits.

    The producer loads these blocks, and every consumer releases each of them.
    """
    first = block * (C.BLOCK_M // C.PACK)
    if C.FIRST_BLOCK_PARTIAL:
        first -= lacking_tokens(work.seqlen_q, WARPGROUP_ROWS // C.PACK, C.BLOCK_M // C.PACK)
    last = min(first + C.BLOCK_M // C.PACK, work.seqlen_q) - 1
    return key_blocks(C, first, last, work.seqlen_q, work.seqlen_k, mask)


@gluon.jit
def own_range(C: gl.constexpr, W: gl.constexpr, work, block, schedule):
    """Return (first row, last row, n_begin, n_end, own) of warpgroup W.

    Rows are tokens: with PACK > 1, PACK rows of the tile have the same mask. The whole tile visits key blocks
    n_begin to n_end - 1 (:func:`tile_blocks`). ``own`` is the range that the rows of the warpgroup see, as
    :class:`OwnBlocks`.
    """
    n_begin, n_end = tile_blocks(C, work, block, schedule.mask)
    first = first_token(C, W, work, block)
    last = min(first + WARPGROUP_ROWS // C.PACK, work.seqlen_q) - 1
    own = own_blocks(C, first, last, n_begin, n_end, work.seqlen_q, work.seqlen_k, schedule.mask)
    return first, last, n_begin, n_end, own


@gluon.jit
def whole_end(C: gl.constexpr, work, last, begin, end, schedule):
    """Return ``end``, or ``end`` - 1 if a warpgroup's rows see at most the first half of the last block."""
    last_key = min(last + work.seqlen_k - work.seqlen_q + schedule.mask.window_right, work.seqlen_k - 1)
    half = last_key < (end - 1) * C.BLOCK_N + C.BLOCK_N // 2 and end - 1 > begin
    # A block that is the only one stays whole, because attend_blocks needs one.
    return end - 1 if half else end


@gluon.jit
def walk_work_tile(C: gl.constexpr, STEP: gl.constexpr, tile_index, i, j, arguments, call):
    """Call STEP for each block of query rows of a work tile.

    In the producer STEP loads the block, in a consumer it computes the block. ``i`` counts the blocks of keys
    that have passed through the channels of k and v, ``j`` the blocks of query rows that have passed through
    the channel of q. STEP returns the new ``i``. This function returns the new ``i`` and ``j``.

    STEP is called as ``STEP(C, *arguments, work, block, i, j, call)``.
    """
    work = find_work_tile(C, tile_index, call.pointers, call.schedule)
    num_blocks = query_blocks(C, work, call.schedule)
    for part in range(num_parts(num_blocks, work.tile_in_head, C.PAIRED)):
        block = block_of_part(num_blocks, work.tile_in_head, part, C.PAIRED)
        i = STEP(C, *arguments, work, block, i, j, call)
        j += 1
    return i, j


@gluon.jit
def walk_own_tiles(C: gl.constexpr, STEP: gl.constexpr, num_tiles, arguments, call):
    """Call :func:`walk_work_tile` for the program's work tiles, in serpentine order.

    Returns ``i``, the number of key blocks that have passed through the channels of k and v.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    i = 0
    j = 0
    for t in range(num_own_tiles(program, programs, num_tiles)):
        tile_index = serpentine_order(t, program, programs)
        i, j = walk_work_tile(C, STEP, tile_index, i, j, arguments, call)
    return i


@gluon.jit
def consume(C: gl.constexpr, STEP: gl.constexpr, queue, arguments, call):
    """A consumer's loop: call :func:`walk_work_tile` for each work tile of its program.

    The work tiles come from the work queue, or in a fixed order. With the queue, the first index past the
    work tiles ends the loop. A consumer has four warps.
    """
    num_tiles = num_work_tiles(C, call.pointers, call.schedule)
    if C.QUEUED:
        i = 0
        j = 0
        t = 0
        tile_index = pipeline.take(queue, t, 4)
        while tile_index < num_tiles:
            i, j = walk_work_tile(C, STEP, tile_index, i, j, arguments, call)
            t += 1
            tile_index = pipeline.take(queue, t, 4)
    else:
        walk_own_tiles(C, STEP, num_tiles, arguments, call)


@gluon.jit
def produce(C: gl.constexpr, LOAD: gl.constexpr, queue, arguments, call):
    """The producer's loop: call :func:`walk_work_tile` for each work tile of its program.

    The producer takes work tiles from the work queue's counter, or in a fixed order. Returns the number of
    blocks of keys that it has loaded, for the FP8 producer, which then transposes the last one.
    """
    num_tiles = num_work_tiles(C, call.pointers, call.schedule)
    if C.QUEUED:
        program, programs = gl.program_id(0), gl.num_programs(0)
        i = 0
        j = 0
        t = 0
        # A program's first tile is that of its number: it need not wait for the counter.
        tile_index = program
        pipeline.put(queue, t, tile_index, C.PRODUCER_WARPS)
        while tile_index < num_tiles:
            i, j = walk_work_tile(C, LOAD, tile_index, i, j, arguments, call)
            t += 1
            # The latency of the atomic is hidden: the consumers still work on the tiles that are loaded. At
            # later moments it was not faster (1.100 and 1.102 times the fixed order, for 1.105).
            tile_index = next_tile(call.pointers, programs)
            pipeline.put(queue, t, tile_index, C.PRODUCER_WARPS)
        # With functions, calls share the counters of their stream, so the last program resets them. Without,
        # each launch has a new counter: with Triton 3.6 the reset spilled up to 40 bytes more.
        if C.HAS_MODS:
            leave_queue(call.pointers, tile_index, num_tiles, programs)
        return i
    else:
        return walk_own_tiles(C, LOAD, num_tiles, arguments, call)
