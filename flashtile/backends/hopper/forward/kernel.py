"""Attention forward for Hopper: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, section 3) in Gluon.

A persistent program has one *producer* warp and one to three *consumer* warpgroups of 64 query rows each. The
producer copies blocks of q, k and v to shared memory by TMA. A consumer multiplies them on the tensor cores
(wgmma) and keeps its rows' output O, sums l and maxima m in registers. One block of queries, with key blocks
2, 1 and 0 and no mask; time runs to the right:

    producer    K2 Q V2 K1 V1   K0                V0        K Q V of the next block of queries ...
    consumer 0
      wgmma     [S2]      [S1][P2 V2]             [S0][P1 V1]             [P0 V0]
      softmax       ( P2 )    (   P1   )              (   P0   )
      O                                 *a                      *a               /l, store
    consumer 1
      wgmma         [S2]            [S1][P2 V2]             [S0][P1 V1]             [P0 V0]
      ...                               (   P1   )              (   P0   )

    [Sn] S = Q Kn^T    [Pn Vn] O += Pn Vn    (Pn) exponentials, new m and l    *a  O times exp(old m - new m)

Two overlaps hide the softmax: within a warpgroup, the softmax of block n runs while P V of block n + 1 is in
flight (section 3.2); between warpgroups, one multiplies while another computes exponentials (section 3.1).
The warpgroups drift apart by themselves, or PING_PONG orders them.

Tiles pass through rings of shared memory (``channels``). Each slot has two mbarriers:

    ring    slots        written by, full after     read by, empty after
    q       Q_STAGES     TMA, all bytes             all consumers: S of the last block, or O stored from it
    k       STAGES       TMA, all bytes             all consumers: S of the block is complete
    v       STAGES       TMA, all bytes             all consumers: P V of the block is complete
    bias    BIAS_STAGES  TMA, all bytes             all consumers: the tile is in registers (with HAS_BIAS)
    queue   2            producer, an index         all consumers: the index is read (with QUEUED)

k and v have rings of their own: in each step the slot of k is free before the softmax, that of v after it.

``i`` counts the blocks of keys and ``j`` the blocks of queries that have passed through the rings since the
start of the kernel, so slots and phases follow from them and no ring is reset between work tiles.

Blocks of keys are visited from the last to the first: those that the right edge of the mask cuts, those that
every row sees, those that the left edge cuts. Only cut blocks are masked.

The module is read from top to bottom: the kernel, the producer, a consumer's block of queries, its loop over
blocks of keys, then the steps of the loop: products, scores, softmax, and the stores. Which work a program
gets is in ``schedule``. fp32, and head sizes whose rows TMA cannot address, go to other backends.

``C`` is the variant, :class:`~flashtile.backends.hopper.forward.config.ForwardVariant`, which explains each
flag. It is constant: a branch on it costs nothing, and the other side is not compiled. Where a variant lacks
a part (a bias, a queue, a modifier), 0 takes its place.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.common.jit import gluon_kernel
from flashtile.backends.hopper import bias as bias_tiles
from flashtile.backends.hopper import pipeline
from flashtile.backends.hopper.compat import async_load, async_store, gluon, reinterpret
from flashtile.backends.hopper.forward.schedule import (
    ForwardCall,
    OwnBlocks,
    consume,
    first_token,
    own_range,
    produce,
    tile_blocks,
    whole_end,
)
from flashtile.backends.hopper.inline_asm import (
    copy_registers,
    pin,
    rescale,
    rounded_product,
    to_fp32,
    wait_for_loads,
)
from flashtile.backends.hopper.layouts import (
    LN_2,
    LOG2_E,
    RAGGED_ROWS,
    WARPGROUP_ROWS,
    accumulator_layout,
    column_parts,
    count_products,
    left_operand_layout,
    plus_columns,
    product_of_rows,
    store_part,
)
from flashtile.backends.hopper.masking import hide_by_bounds, key_bounds
from flashtile.backends.hopper.modifiers import (
    Modifiers,
    drop,
    function_arguments,
    generator_of,
    hide_scores,
    key_block,
    listed_keys,
    load_columns,
    modify_scores,
    random_bits,
    schedule_barrier,
    tanh_of,
)
from flashtile.backends.hopper.pipeline import make_channel, make_channels, make_ping_pong
from flashtile.backends.hopper.work_tiles import slope_of


class ForwardInputs(NamedTuple):
    """The tensors that the producer loads: their rings to the consumers, or their descriptors."""

    q: Any
    k: Any
    v: Any
    bias: Any
    """0 (ring) or None (descriptor) without a bias."""


class Output(NamedTuple):
    """Shared memory and descriptor through which the consumers store out."""

    tiles: Any
    """One tile for each consumer, or two with O_IN_PARTS; with Q_HOLDS_O, the tiles of q."""
    desc: Any


# Lengths are plain numbers: specialised on divisibility by 16, as Triton does, each kernel would be compiled
# again (3 s) for lengths that differ in it.
@gluon_kernel(do_not_specialize=("pointers", "schedule"))
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, bias_desc, pointers, schedule, numbers, C: gl.constexpr
):  # fmt: skip
    """Compute out and lse. Grid: at most PROGRAMS programs per multiprocessor.

    Work tiles are assigned in ``serpentine_order``, or taken from the work queue, whose counter is in
    ``pointers.table``. Arguments that a call lacks (a bias, a table, slopes, a sink) are None.
    """
    # Rings, as (descriptor, slots, readers, tiles per slot). q and the bias have a tile for each consumer:
    # its 64 rows, the rows of one wgmma. With Q_HOLDS_O it later stores O from its own tile.
    bias = 0  # not None: jit functions of Triton 3.6 cannot return a structure that contains None
    if C.HAS_BIAS:
        bias = make_channel(bias_desc, C.BIAS_STAGES, C.WARPGROUPS, C.WARPGROUPS)
    q = make_channel(q_desc, C.Q_STAGES, C.WARPGROUPS, C.WARPGROUPS * C.D_PARTS)
    if C.K_BY_PARTS:  # a ring for each part, which is loaded again as soon as its own product is complete
        k = make_channels(k_desc, C.STAGES, C.WARPGROUPS, C.D_PARTS)
    else:
        k = make_channel(k_desc, C.STAGES, C.WARPGROUPS, C.D_PARTS)
    v = make_channel(v_desc, C.STAGES, C.WARPGROUPS, C.DV_PARTS)
    channels = ForwardInputs(q, k, v, bias)
    ping_pong = make_ping_pong(C.WARPGROUPS) if C.PING_PONG else 0
    queue = pipeline.make_work_queue(C.WARPGROUPS) if C.QUEUED else 0
    if C.Q_HOLDS_O:
        o_tiles = q.tiles
    else:  # O_IN_PARTS: one tile is filled while TMA reads the other
        O_TILES: gl.constexpr = 2 * C.WARPGROUPS if C.O_IN_PARTS else C.WARPGROUPS
        o_tiles = gl.allocate_shared_memory(o_desc.dtype, [O_TILES] + o_desc.block_type.shape, o_desc.layout)
    output = Output(o_tiles, o_desc)
    call = ForwardCall(pointers, schedule, numbers)
    descs = ForwardInputs(q_desc, k_desc, v_desc, bias_desc)
    # The first partition runs in the four warps with which the kernel is launched, so it is a consumer. The
    # lists after the functions are warps and registers of the other partitions. The first one keeps the
    # registers that they leave (``config``: why 240, 160 and 24). All barriers are initialised above, and all
    # warps meet where the partitions begin.
    # The lists are written out for each number of consumers: Triton 3.7 loses constants and functions of
    # tuples that are put together by + or by assignment.
    if C.WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, channels, ping_pong, output, call)),
                (producer, (C, queue, channels, descs, call)),
            ],
            [1],
            [C.PRODUCER_REGISTERS],
        )
    elif C.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, channels, ping_pong, output, call)),
                (consumer, (C, 1, queue, channels, ping_pong, output, call)),
                (producer, (C, queue, channels, descs, call)),
            ],
            [4, 1],
            [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, channels, ping_pong, output, call)),
                (consumer, (C, 1, queue, channels, ping_pong, output, call)),
                (consumer, (C, 2, queue, channels, ping_pong, output, call)),
                (producer, (C, queue, channels, descs, call)),
            ],
            [4, 4, 1],
            [C.CONSUMER_REGISTERS, C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )


# The producer.


@gluon.jit
def producer(C: gl.constexpr, queue, channels, descs, call):
    """One warp that loads all tiles for the consumers: :func:`load_block` for each block of query rows."""
    # It may end while its last loads are on their way: consumers wait for every tile, also for those that
    # they do not multiply, and the program's memory lasts until all partitions have ended.
    produce(C, load_block, queue, (channels, descs), call)


@gluon.jit
def load_block(C: gl.constexpr, channels, descs, work, block, i, j, call):
    """Load all that the consumers need for one block of query rows; returns the new ``i``.

    ``schedule.walk_work_tile`` calls it for each block of the program's work tiles.
    """
    q, k, v, bias = channels
    q_desc, k_desc, v_desc, bias_desc = descs
    schedule = call.schedule
    n_begin, n_end, listed = loaded_blocks(C, work, block, call)
    # In the order in which a consumer needs the tiles: k and q for S, the bias for the scores, v for P V.
    for n in range(n_end - 1, n_begin - 1, -1):
        key_number = n
        if C.LISTED:  # n is a position in the block mask's list
            key_number, _ = key_block(C, listed, n)
        load_k(C, k, k_desc, work, key_number, i)
        if n == n_end - 1:
            # After the first keys: their slots may be free while consumers still read the previous queries.
            load_q(C, q, q_desc, work, block, j)
        if C.HAS_BIAS:
            bias_tiles.load_row_tiles(C, bias, bias_desc, work, block, key_number, i, schedule)
        if not C.K_BY_PARTS:
            load_v(C, v, v_desc, work, key_number, i)
        elif n < n_end - 1:
            # k and v have one slot each. Q K^T of a block ends before P V of the block before it, so parts of
            # k are free before v. The next keys are therefore loaded first, and the values follow a block
            # later: those of block n + 1, the (i - 1)-th in the ring.
            load_v(C, v, v_desc, work, n + 1, i - 1)
        i += 1
    if C.K_BY_PARTS:
        load_v(C, v, v_desc, work, n_begin, i - 1)
    return i


@gluon.jit
def loaded_blocks(C: gl.constexpr, work, block, call):
    """Return (n_begin, n_end, listed): the producer loads blocks [n_begin, n_end) of keys for these rows.

    With a block mask they are positions in ``listed``, the list of the rows. Otherwise ``listed`` is 0.
    """
    n_begin, n_end = tile_blocks(C, work, block, call.schedule.mask)
    listed = 0
    if C.LISTED:
        listed = listed_keys(C, 1, work, block, call.pointers.lists)  # 1: the producer's warps
        n_begin, n_end = 0, listed.count
    return n_begin, n_end, listed


@gluon.jit
def load_q(C: gl.constexpr, q, desc, work, block, j):
    """Load the query rows of all consumers, D_PARTS tiles each, as the ``j``-th block in their ring."""
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    PARTS: gl.constexpr = C.D_PARTS
    COLUMNS: gl.constexpr = C.BLOCK_D // PARTS
    slot = q.acquire(j)
    # One barrier for all consumers. ``expect`` is the producer's arrival; the phase ends when as many bytes
    # have come. TMA counts the bytes of rows past the last query, zeros, like the others.
    mbarrier.expect(q.full.index(slot), WARPGROUPS * PARTS * desc.block_type.nbytes)
    for w in gl.static_range(WARPGROUPS):
        for part in gl.static_range(PARTS):
            q_part = q.tiles.index((slot * WARPGROUPS + w) * PARTS + part)
            load_queries(C, w, desc, work, block, q.full.index(slot), q_part, part * COLUMNS)


@gluon.jit
def load_k(C: gl.constexpr, k, desc, work, n, i):
    """Load block ``n`` of k, the ``i``-th in its ring, or in the ring of each part with K_BY_PARTS."""
    PARTS: gl.constexpr = C.D_PARTS
    COLUMNS: gl.constexpr = C.BLOCK_D // PARTS
    if C.K_BY_PARTS:
        for part in gl.static_range(PARTS):
            slot = k[part].acquire(i)
            full = k[part].full.index(slot)
            mbarrier.expect(full, desc.block_type.nbytes)
            load_keys(C, desc, work, n, full, k[part].tiles.index(slot), part * COLUMNS)
    else:
        slot = k.acquire(i)
        mbarrier.expect(k.full.index(slot), PARTS * desc.block_type.nbytes)
        for part in gl.static_range(PARTS):
            k_part = k.tiles.index(slot * PARTS + part)
            load_keys(C, desc, work, n, k.full.index(slot), k_part, part * COLUMNS)


@gluon.jit
def load_v(C: gl.constexpr, v, desc, work, n, i):
    """Load the work tile's columns of block ``n`` of v, the ``i``-th in its ring."""
    PARTS: gl.constexpr = C.DV_PARTS
    COLUMNS: gl.constexpr = C.BLOCK_DV // PARTS
    slot = v.acquire(i)
    mbarrier.expect(v.full.index(slot), PARTS * desc.block_type.nbytes)
    for part in gl.static_range(PARTS):
        v_part = v.tiles.index(slot * PARTS + part)
        column = first_column(C, work) + part * COLUMNS
        load_keys(C, desc, work, n, v.full.index(slot), v_part, column)


# A sequence may end inside its tensor: packed, or shortened by seqused_k. Its view is then that of
# ``ragged_view`` (common/tma.py), with rows counted from the end of the sequence. The third coordinate is
# RAGGED_ROWS, the extent of the view, minus the distance to that end. The first two move the address to the
# sequence's own rows. TMA then fills rows past the last one with zeros, and does not store them. Zeros are
# needed: P of a hidden key is 0, and 0 times a NaN that lies behind the sequence would be NaN.


@gluon.jit
def load_keys(C: gl.constexpr, desc, work, n, barrier, tile, column=0):
    """Load block ``n`` of k or v by TMA, from ``column`` on; rows past the last key arrive as zeros."""
    row, head = n * C.BLOCK_N, work.head_kv
    if C.VARLEN or C.SEQUSED:
        end = work.start_k + work.seqlen_k
        async_load(desc, [RAGGED_ROWS, end, RAGGED_ROWS - work.seqlen_k + row, head, column], barrier, tile)
    else:
        async_load(desc, [work.sequence, row, head, column], barrier, tile)


@gluon.jit
def load_queries(
    C: gl.constexpr, w: gl.constexpr, desc, work, block, barrier, tile, column: gl.constexpr = 0
):
    """Load the query rows of warpgroup ``w`` by TMA, from ``column`` on; rows past the last query arrive as
    zeros."""
    # A token is PACK rows of a tile. A head of the schedule is one of a query head's COLUMN_SPLITS parts,
    # which differ in their columns of v and O only: they load the same queries.
    row, head = first_token(C, w, work, block), work.head // C.COLUMN_SPLITS
    if C.VARLEN:
        end = work.start_q + work.seqlen_q
        row = RAGGED_ROWS - work.seqlen_q + row
        # This view counts heads; that of dense calls with PACK > 1 counts groups of heads. Unused rows of a
        # token get queries of the next heads, or zeros: they are computed, but not stored.
        head *= C.PACKED_HEADS
        async_load(desc, [RAGGED_ROWS, end, row, head, column], barrier, tile)
    elif C.PACK > 1:
        async_load(desc, [work.sequence, row, head, 0, column], barrier, tile)
    else:
        async_load(desc, [work.sequence, row, head, column], barrier, tile)


# A consumer: one block of query rows.


class Rows(NamedTuple):
    """Properties of a warpgroup's 64 rows that masks, ALiBi and modifiers need."""

    positions: Any
    """Position of each row among the keys, [64]."""
    first_key: Any
    """The first key that each row sees, [64]."""
    last_key: Any
    """The last key that each row sees, [64]."""
    slope: Any
    """ALiBi's slope of each row's head, in log2 units."""
    tree: Any
    """A tree mask, as a :class:`Tree`; 0 without one."""
    modifiers: Any
    """:class:`~flashtile.backends.hopper.modifiers.Modifiers`; 0 where the variant has none."""


class Tree(NamedTuple):
    """A tree mask of draft tokens (``decode``): which of a sequence's last tokens each row sees."""

    mask: Any
    """Pointer to the mask of the sequence."""
    row: Any
    """Offset of each row in the mask, in elements, [64]; -1 for a row that does not exist."""
    first_key: Any
    """Number of the key to which the first column of the mask refers."""
    columns: Any
    """Number of columns of the mask."""


class QueryTile(NamedTuple):
    """Inputs of the loops over blocks of keys, for 64 query rows."""

    q: Any
    """[64, BLOCK_D] in shared memory; a tuple of tiles if D_PARTS > 1."""
    q_registers: Any
    """The first Q_IN_REGISTERS columns of q, in registers; not read if there are none."""
    k: Any
    v: Any
    """Rings of blocks of keys and values."""
    ping_pong: Any
    """:class:`~flashtile.backends.hopper.pipeline.PingPong`; 0 without PING_PONG."""
    rows: Any
    """:class:`Rows`."""
    numbers: Any
    """Floats of the launch, as :class:`~flashtile.backends.hopper.forward.schedule.ForwardNumbers`."""


class SoftmaxState(NamedTuple):
    """The online softmax of 64 query rows after some blocks of keys."""

    o: Any
    """Output, not yet divided by the sums: a tuple of its accumulators, as from :func:`zero_output`."""
    l: Any
    """[64, 4]: for each row, the sums of the probabilities that each of its four threads holds (a thread of
    wgmma's accumulator has every fourth pair of columns)."""
    m: Any
    """[64]: maximum of the scores, in log2 units."""
    largest: Any = 0
    """[64]: largest score of a key, in log2 units, if :func:`keeps_largest`; else 0."""
    moment: Any = 0
    """[64, 4]: sums of P log2 P, in the units and the layout of l; 0 without ENTROPY."""


@gluon.constexpr_function
def keeps_largest(C):
    """Whether the largest score is kept apart from m, which may lag behind or be a sink. If not, it is m."""
    return C.MAX_LOGITS and (C.SINK or C.LAZY_RESCALE)


@gluon.jit
def consumer(C: gl.constexpr, W: gl.constexpr, queue, channels, ping_pong, output, call):
    """Warpgroup W: :func:`attend_tile` for rows 64 W to 64 W + 63 of every block of query rows."""
    consume(C, attend_tile, queue, (W, channels, ping_pong, output), call)
    tma.store_wait(0)  # the program's shared memory must not end before TMA has read it


@gluon.jit
def attend_tile(C: gl.constexpr, W: gl.constexpr, channels, ping_pong, output, work, block, i, j, call):
    """Compute and store out and lse of 64 rows: those of warpgroup W in ``block`` of work tile ``work``.

    ``schedule.walk_work_tile`` calls it for each block of the program's work tiles. Returns the new ``i``.
    """
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    q, k, v, bias = channels
    pointers, schedule, numbers = call

    # Rows [first, last], the whole tile's blocks [n_begin, n_end), and ``own``, those that these rows see. A
    # warpgroup whose rows are all past the last query computes like the others: without its work, calls of
    # 197 to 1024 queries were 0.86 to 1.04 times as fast.
    first, last, n_begin, n_end, own = own_range(C, W, work, block, schedule)
    positions, head = row_positions(C, work, first, row_layout)
    slope = slope_of(C, work, head, pointers, schedule)
    modifiers = 0
    if has_modifiers(C):
        modifiers = row_modifiers(C, work, block, first, bias, pointers, schedule)
    if C.LISTED:  # blocks are numbered by their order in the block mask's list, the masked ones last
        listed = modifiers.blocks  # type: ignore[attr-defined]
        n_begin, n_end = 0, listed.count
        # Without masked blocks the last block is full as well: the prologue looks at is_full.
        own = OwnBlocks(0, listed.count, 0, listed.count - listed.masked_count)
    elif C.MASK_MOD is not None:  # any key may be hidden: no block is full, all go through the masked loop
        own = OwnBlocks(own.begin, own.end, own.begin, own.begin)
    rows = mask_rows(C, work, positions, slope, schedule, modifiers)
    state = first_state(C, head, pointers)

    # The blocks of the whole tile are [n_begin, n_end); the consumers' own blocks differ under a mask.
    i = skip_blocks(C, W, n_end - own.end, i, k, v, ping_pong, bias)
    q_part, q_tile, q_registers = own_queries(C, W, q, j, s_layout)
    tile = QueryTile(q_tile, q_registers, k, v, ping_pong, rows, numbers)
    if C.HAS_RIGHT and C.BLOCK_N > WARPGROUP_ROWS:
        # Under a causal mask, every other warpgroup sees only the left half of its last 128 keys: of 128 rows
        # and keys on the diagonal, rows 0 to 63 see keys 0 to 63. Only that half is multiplied.
        whole = whole_end(C, work, last, own.begin, own.end, schedule)
        HALF: gl.constexpr = C.BLOCK_N // 2
        state, i = attend_masked(C, W, HALF, tile, state, i, own.end, whole)
        own = OwnBlocks(own.begin, whole, own.full_begin, own.full_end)
    state, i = attend_blocks(C, W, tile, state, i, own)
    if not C.Q_HOLDS_O:  # all S are complete, and the P V in flight does not read q
        q.release(j)

    # lse is stored while the last P V is in flight. The next block's first Q K^T is not issued here, although
    # the tensor cores are idle: its S would be 64 more live registers (0.93 to 0.98 times as fast).
    o, l, m, largest, moment = state
    sums = gl.convert_layout(gl.sum(l, 1), row_layout)
    lse = to_natural(C, m) + gl.log(sums)
    if C.INVARIANT:  # as decode.kernel, whose partial results have lse in base 2
        lse = (m + gl.log2(sums)) * LN_2
    if C.SINK:
        lse = at_least(lse, gl.load(pointers.sink + head).to(gl.float32))
    store_row(C, lse, work, head, positions, pointers.lse, schedule)
    if C.MAX_LOGITS:
        if not keeps_largest(C):
            largest = m
        store_row(C, to_natural(C, largest), work, head, positions, pointers.max_logits, schedule)
    if C.ENTROPY:
        mean = gl.convert_layout(gl.sum(moment, 1), row_layout) / gl.where(sums == 0, 1.0, sums)
        entropy = gl.where(sums == 0, 0.0, gl.log(sums) - LN_2 * mean)
        store_row(C, entropy, work, head, positions, pointers.entropy, schedule)
    o = finish_blocks(C, v, i, o)
    i = skip_blocks(C, W, own.begin - n_begin, i, k, v, ping_pong, bias)
    kept = 1.0
    if C.HAS_DROPOUT:  # 1 / (1 - dropout_p) multiplies O once, not each P
        kept = numbers.keep_scale
    # Rows that see no key become 0. Where a score is NaN, O itself is NaN and stays so.
    o = each(scale_rows, o, gl.where(sums > 0, kept / sums, 0.0))
    o = each(cast, o, output.desc.dtype)
    store_tile(C, W, o, q, q_part, j, output, work, first, schedule.num_heads)
    return i


@gluon.jit
def row_positions(C: gl.constexpr, work, first, row_layout: gl.constexpr):
    """Return (row of the sequence, query head) for each of a warpgroup's 64 rows.

    If PACK > 1, the query heads of a token are consecutive rows. If PACKED_HEADS is less than PACK, the other
    rows of a token get a position behind the sequence, where nothing is stored.
    """
    row = gl.arange(0, WARPGROUP_ROWS, layout=row_layout)
    position, head = first + row // C.PACK, row % C.PACK
    if C.PACKED_HEADS < C.PACK:
        position = gl.where(head < C.PACKED_HEADS, position, work.seqlen_q)
        head = gl.minimum(head, C.PACKED_HEADS - 1)
    return position, work.head // C.COLUMN_SPLITS * C.PACKED_HEADS + head


@gluon.constexpr_function
def has_modifiers(C):
    """Whether scores or probabilities have modifiers (``modifiers``)."""
    return C.HAS_MODS or C.HAS_DROPOUT or C.HAS_BIAS


@gluon.jit
def row_modifiers(C: gl.constexpr, work, block, first, bias, pointers, schedule):
    """Return the :class:`Modifiers` of a warpgroup's rows, which begin at row ``first`` and are in ``block``.

    ``bias`` is the ring of the bias.
    """
    generator = 0
    arguments = 0
    blocks = 0
    if C.LISTED:
        blocks = listed_keys(C, 4, work, block, pointers.lists)
    if C.HAS_MODS:
        arguments = function_arguments(work, work.head, pointers.captured, first)
    if C.HAS_DROPOUT:
        head_of_batch = work.sequence * schedule.num_heads + work.head
        generator = generator_of(head_of_batch, first, pointers, schedule)
    return Modifiers(bias, generator, arguments, blocks)


@gluon.jit
def mask_rows(C: gl.constexpr, work, positions, slope, schedule, modifiers=0):
    """Return the :class:`Rows` of query rows. ``positions``: the index of each row in its sequence."""
    in_keys = positions + work.seqlen_k - work.seqlen_q
    first_key, last_key = key_bounds(C, in_keys, 0, work.seqlen_k, schedule.mask)
    return Rows(in_keys, first_key, last_key, slope, 0, modifiers)


@gluon.jit
def rows_in(C: gl.constexpr, rows, layout: gl.constexpr):
    """Return ``rows`` with its tensors converted to ``layout``."""
    slope = rows.slope
    if C.ALIBI:
        slope = gl.convert_layout(slope, layout)
    tree = rows.tree
    if C.HAS_TREE:
        tree = Tree(tree.mask, gl.convert_layout(tree.row, layout), tree.first_key, tree.columns)
    return Rows(
        gl.convert_layout(rows.positions, layout),
        gl.convert_layout(rows.first_key, layout),
        gl.convert_layout(rows.last_key, layout),
        slope,
        tree,
        rows.modifiers,
    )


@gluon.jit
def first_state(C: gl.constexpr, head, pointers):
    """Return the :class:`SoftmaxState` before the first block.

    With a sink, the sink's score is the first maximum of a row, so its unnormalised probability is 1. A
    quarter of it is added to each of the row's four partial sums (one for each thread that shares the row).
    """
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N)
    m = gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    if C.SINK:
        sink = gl.load(pointers.sink + head).to(gl.float32)
        m = finite_log2(sink * to_log2(C, sink, LOG2_E))
    o = zero_output(C)
    # quad_sums of zeros, not zeros, so that l has the layout that quad_sums returns in the loop
    l = quad_sums(gl.full([WARPGROUP_ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout))
    moment = 0
    if C.ENTROPY:  # that of the sink's probability, 1, is 0 as well
        moment = l
    if C.SINK:
        l += 0.25
    largest = 0
    if keeps_largest(C):
        largest = gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, m.type.layout)
    return SoftmaxState(o, l, m, largest, moment)


@gluon.jit
def own_queries(C: gl.constexpr, W: gl.constexpr, q, j, s_layout: gl.constexpr):
    """Wait for the ``j``-th block in the ring of q, and return the queries of warpgroup W.

    Returns (index of the warpgroup's first tile, tile, registers). ``registers`` has the first Q_IN_REGISTERS
    columns of the tile. A wgmma with its left operand in registers reads only K from shared memory, whose
    bandwidth limits products of 64 x 64. If D_PARTS > 1, q is divided into D_PARTS tiles of fewer columns,
    and ``tile`` and ``registers`` are tuples. With K_BY_PARTS, ``tile`` is (tiles of the ring, index of the
    warpgroup's first), for :func:`start_qk`.
    """
    part = (q.wait(j) * C.WARPGROUPS + W) * C.D_PARTS  # the tiles of a slot: by warpgroup, then by part
    if C.D_PARTS == 1:
        tile = q.tiles.index(part).reshape([WARPGROUP_ROWS, C.BLOCK_D])
    else:
        tile = parts_of(q.tiles, part, C.D_PARTS)
    registers = tile
    if C.Q_IN_REGISTERS > 0:
        # 32 bits of a row share a register: two columns of 16 bits, or four of e4m3 (``fp8.kernel``).
        layout: gl.constexpr = left_operand_layout(s_layout, 32 // q.tiles.dtype.primitive_bitwidth)
        if C.D_PARTS == 1:
            registers = tile.slice(0, C.Q_IN_REGISTERS, dim=1).load(layout)
        else:
            registers = load_parts(tile, C.Q_IN_REGISTERS * C.D_PARTS // C.BLOCK_D, layout)
    if C.K_BY_PARTS:
        tile = (q.tiles, part)
    return part, tile, registers


@gluon.jit
def parts_of(tiles, first, PARTS: gl.constexpr):
    """Return a tuple of PARTS tiles of shared memory from ``first`` on, each [rows, columns]."""
    tile = tiles.index(first)
    tile = tile.reshape([WARPGROUP_ROWS, tile.shape[-1]])
    if PARTS == 1:
        return (tile,)
    else:
        return (tile,) + parts_of(tiles, first + 1, PARTS - 1)


@gluon.jit
def load_parts(tiles, COUNT: gl.constexpr, layout: gl.constexpr):
    """Load the first COUNT tiles of a tuple to registers, and return them as a tuple."""
    if COUNT == 1:
        return (tiles[0].load(layout),)
    else:
        return load_parts(tiles, COUNT - 1, layout) + (tiles[COUNT - 1].load(layout),)


# The loop over blocks of keys.


@gluon.jit
def attend_blocks(C: gl.constexpr, W: gl.constexpr, tile, state, i, blocks):
    """Attend to all ``blocks`` (:class:`~flashtile.backends.hopper.forward.schedule.OwnBlocks`) of a tile.

    This is the consumer of FlashAttention-3's Algorithm 2, over blocks without an edge of the mask::

        wait for Q and K of the last block;  S = Q K^T;  release K;  m, P, l from S     (prologue)
        for the blocks n before it:
            issue S = Q K_n^T;  issue O += P V_(n + 1)
            wait for S;  release K_n;  m, the next P, l from S
            wait for O;  release V_(n + 1);  O = O * exp(old m - new m)
        O += P V of the first block                                                    (epilogue)

    Blocks that the right edge cuts come before it, those that the left edge cuts after it, both through
    :func:`attend_masked`. Returns the new state and the new ``i``. Without HAS_LEFT, the last P V is still in
    flight, so that the caller can store lse meanwhile: the caller then calls :func:`finish_blocks`.
    """
    begin, end, full_begin, full_end = blocks
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N)
    k, v, ping_pong, rows, numbers = tile.k, tile.v, tile.ping_pong, tile.rows, tile.numbers
    # HAS_CUTS: a mask function may hide any key. Lists need no loop before: see the main loop.
    CUTS_FIRST: gl.constexpr = C.HAS_RIGHT or C.HAS_TREE or (C.HAS_CUTS and not C.LISTED)
    first = end - 1
    if CUTS_FIRST:
        # The leftmost of the cut blocks is left to the prologue, which masks anyway. Clamped, because after a
        # half block ``full_end`` may be ``end``.
        first = min(max(full_end, begin), end - 1)
        state, i = attend_masked(C, W, C.BLOCK_N, tile, state, i, end, first + 1)

    # Prologue: S and P of block ``first``. An edge of the mask may cut this block, but not those after it.
    s, block = block_scores(C, W, C.BLOCK_N, tile, rows, i, first)
    if C.HAS_LEFT or C.HAS_RIGHT or not C.EVEN_N or C.HAS_CUTS:
        s = mask(C, s, block.n, rows, s_layout, block.is_full, block.columns, not C.LISTED)
    o, l, m, largest, moment = state
    weights, alpha, l, m, largest, moment = online_softmax(
        C, s, l, m, largest, moment, numbers.scale_log2, True
    )
    if CUTS_FIRST:  # else O is 0
        o = each(scale_rows, o, alpha)
    p = as_operand(C, weights, block.bits, rows, v.tiles.dtype)
    i += 1

    # Main loop: Q K^T of block n overlaps P V of block n + 1, whose P is in registers.
    full_begin = min(full_begin, first)
    for n in range(first - 1, full_begin - 1, -1):
        # S = Q K_n^T first: wgmma completes in order, so the softmax of S can begin while P V is in flight.
        # In ping-pong order, a turn is the issue of both products; the softmax needs no turn.
        if C.PING_PONG:
            ping_pong.wait(W, i)
        s = start_qk(C, C.BLOCK_N, tile.q, tile.q_registers, k, i, s_layout)
        o = start_pv(C, p, tile_of_v(C, v, i - 1), o)
        if C.PING_PONG:
            ping_pong.pass_on(W)
        # What modifiers load or draw does not depend on S, and hides behind the products.
        block = Block(n, False, 0, 0, 0)
        if has_modifiers(C):
            block = prepare_block(C, W, C.BLOCK_N, rows, i, n, s_layout)
        # The P V that may stay in flight are one wgmma group for each accumulator of O. K_n is free now: when
        # it was released together with V below, calls took 0 to 6 % more time.
        s = finish_qk(C, s, k, i, 1 if C.O_RIGHT == 0 else 2)
        if changes_scores(C):
            s = modified(C, s, block, rows, i, numbers, s_layout)
        # Partial blocks of a block mask are masked here. With a loop of their own, without overlap, masks of
        # mostly partial blocks took up to 2.5 times as long, and the others gained 2 to 3 %. With EVEN_N all
        # of these blocks are partial. Otherwise one may be the full block in which the sequence ends.
        if C.LISTED:  # noqa: SIM102 - a constexpr condition needs an if of its own
            if n >= full_end:  # blocks that the block mask does not list as full come first
                s = mask(C, s, block.n, rows, s_layout, block.is_full, block.columns, C.EVEN_N)
        # m, P and l of block n. Without lists, no mask hides keys of these blocks.
        weights, alpha, l, m, largest, moment = online_softmax(
            C, s, l, m, largest, moment, numbers.scale_log2, C.LISTED
        )
        # ptxas may move the wait for P V before the exponentials. Keeping it behind them made calls 0.90 to
        # 1.09 times as fast, so the table of configurations says where.
        if C.PIN_WAIT:
            l = pin(l)
        # Only now: P V has had the whole softmax to complete.
        o = finish_pv(o)
        v.release(i - 1)
        # P V reads its left operand from registers until it is complete, so P is converted after the wait.
        # An earlier conversion would need registers for two P.
        p = as_operand(C, weights, block.bits, rows, v.tiles.dtype)
        # O is scaled here, with no product in flight. Under the next Q K^T it was 3 to 5 % slower.
        if C.LAZY_RESCALE:
            p = copy_registers(p)  # before the branches of rescale, past which ptxas would delay it
            o = each(rescale, o, alpha)
        else:
            o = each(scale_rows, o, alpha)
        i += 1

    # Epilogue: P V of the last of these blocks, then the blocks that the left edge of the mask cuts.
    o = start_pv(C, p, tile_of_v(C, v, i - 1), o)
    if C.HAS_LEFT:
        o = finish_pv(o)
        v.release(i - 1)
        state = SoftmaxState(o, l, m, largest, moment)
        return attend_masked(C, W, C.BLOCK_N, tile, state, i, full_begin, begin)
    else:
        return SoftmaxState(o, l, m, largest, moment), i


@gluon.jit
def finish_blocks(C: gl.constexpr, v, i, o):
    """Wait for the P V that :func:`attend_blocks` has left in flight, and return O."""
    if not C.HAS_LEFT:
        o = finish_pv(o)
        v.release(i - 1)
    return o


@gluon.jit
def attend_masked(C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, tile, state, i, n_from, n_to):
    """Attend to the first ``WIDTH`` keys of blocks n_from - 1 down to n_to, which an edge of the mask cuts.

    Returns the new state and the new ``i``. Q K^T and P V do not overlap here, because such blocks are few.
    To overlap them, this loop would have to pass P to the main loop, and both would repack P in every step:
    with two pipelined loops, causal calls at head_dim 128 reached 513 TFLOP/s instead of 597.
    """
    # The accumulator of half a block has another layout, so rows and statistics are converted. For a whole
    # block the layouts are equal, and the conversions vanish.
    s_layout: gl.constexpr = accumulator_layout(WIDTH)
    row: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows = rows_in(C, tile.rows, row)
    v = tile.v
    o, l, m, largest, moment = state
    for n in range(n_from - 1, n_to - 1, -1):
        s, block = block_scores(C, W, WIDTH, tile, rows, i, n)
        s = mask(C, s, block.n, rows, s_layout, block.is_full, block.columns, not C.LISTED)
        weights, alpha, l, m, largest, moment = online_softmax(
            C, s, l, m, largest, moment, tile.numbers.scale_log2, True
        )
        p = as_operand(C, weights, block.bits, rows, v.tiles.dtype)
        o = start_pv(C, p, tile_of_v(C, v, i), each(scale_rows, o, alpha))
        o = finish_pv(o)
        v.release(i)  # k was released by block_scores, as soon as S was complete
        i += 1
    return SoftmaxState(o, l, m, largest, moment), i


@gluon.jit
def skip_blocks(C: gl.constexpr, W: gl.constexpr, count, i, k, v, ping_pong=0, bias=0):
    """Release ``count`` blocks of keys that no row of this warpgroup sees, and return the new ``i``.

    A slot is free only after all consumers, so also after those that do not need it. With HAS_BIAS, the same
    number of tiles of the bias is released. With K_BY_PARTS, ``k`` is a tuple of rings. Each block is waited
    for: a slot's empty barrier counts one arrival of each consumer per use, and an arrival before the load
    would count for the previous use.
    """
    for _ in range(count):
        if C.PING_PONG:  # keeps the turns of the warpgroups in step with ``i``
            ping_pong.wait(W, i)
            ping_pong.pass_on(W)
        if C.K_BY_PARTS:
            for part in gl.static_range(len(k)):
                k[part].wait(i)
                k[part].release(i)
        else:
            k.wait(i)
            k.release(i)
        if C.HAS_BIAS:
            bias.wait(i)
            bias.release(i)
        v.wait(i)
        v.release(i)
        i += 1
    return i


class Block(NamedTuple):
    """A block of keys, and what modifiers of its scores load or draw while S is in flight."""

    n: Any
    is_full: Any
    """Whether a block mask lists the block as full."""
    columns: Any
    """Values that MASK_MOD reads for each key."""
    bits: Any
    """Random bits for dropout."""
    bias: Any
    """The warpgroup's tile of the bias, 16 bits."""


@gluon.jit
def block_scores(C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, tile, rows, i, n):
    """Return (scores of the first ``WIDTH`` keys of block ``n`` without the mask, :class:`Block`).

    Block ``n`` is the ``i``-th in the ring of k. ``rows`` are the query tile's rows in the layout of scores.
    """
    s_layout: gl.constexpr = accumulator_layout(WIDTH)
    if C.PING_PONG:
        tile.ping_pong.wait(W, i)
    s = start_qk(C, WIDTH, tile.q, tile.q_registers, tile.k, i, s_layout)
    if C.PING_PONG:
        tile.ping_pong.pass_on(W)
    block = Block(n, False, 0, 0, 0)
    if has_modifiers(C):
        block = prepare_block(C, W, WIDTH, rows, i, n, s_layout)
    s = finish_qk(C, s, tile.k, i, 0)
    if changes_scores(C):
        s = modified(C, s, block, rows, i, tile.numbers, s_layout)
    return s, block


@gluon.jit
def prepare_block(C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, rows, i, n, s_layout: gl.constexpr):
    """Return the :class:`Block` of the tile's block number ``n``, the ``i``-th in the rings.

    It is called between the issue of Q K^T and the wait for S, which hides its loads and its arithmetic. With
    a block mask, the number among all blocks of keys comes from the list of the block mask.
    """
    is_full = False
    columns = 0
    bits = 0
    added = 0
    if C.LISTED:
        n, is_full = key_block(C, rows.modifiers.blocks, n)
    if C.MASK_COLUMNS is not None:
        columns = load_columns(C, n, rows, WIDTH)
    if C.HAS_DROPOUT:
        bits = random_bits(rows.modifiers.dropout, n * C.BLOCK_N, WIDTH, False, s_layout)
        if not C.LATE_BITS:  # here, during the products; ptxas would delay them until P needs them
            schedule_barrier(bits)
    if C.HAS_BIAS:
        added = bias_tiles.read_rows(C, W, rows.modifiers.bias, i, WIDTH, s_layout)
    return Block(n, is_full, columns, bits, added)


@gluon.jit
def modified(C: gl.constexpr, s, block, rows, i, numbers, s_layout: gl.constexpr):
    """Return the scores of ``block`` from the raw products s, and release its tile of the bias."""
    added = block.bias
    if C.HAS_BIAS:
        # An arrival does not wait for them, and TMA loads the next tile over this. Without the wait, lse was
        # wrong by up to 0.1 where slow exponentials delayed the loads.
        added = wait_for_loads(added)
        rows.modifiers.bias.release(i)
    return apply_score_mod(C, s, block.n, rows, numbers, s_layout, added)


# The products. S is [64, WIDTH], WIDTH keys in the accumulator of one wgmma. O has one accumulator, or two
# where BLOCK_DV is no power of two, because shapes in Triton are: the left one has O_LEFT columns, the right
# one O_RIGHT. Each ``warpgroup_mma`` is one wgmma group, so the counts of waits are numbers of products.


@gluon.jit
def start_qk(C: gl.constexpr, WIDTH: gl.constexpr, q, q_registers, k, i, s_layout: gl.constexpr):
    """Wait for the ``i``-th block in the ring of k, and start S = Q K^T for its first WIDTH keys. Return S,
    in flight.

    If D_PARTS > 1, ``q`` is the tuple of tiles from :func:`own_queries`, and ``q_registers`` that of the
    tiles in registers. With K_BY_PARTS, ``k`` is a tuple of rings, one for each part.
    """
    LOADED: gl.constexpr = C.Q_IN_REGISTERS
    # ``warpgroup_mma`` takes an accumulator; the first product has use_acc False and does not read it.
    s = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, s_layout)
    if C.D_PARTS == 1:
        k_tile = k.tiles.index(k.wait(i)).reshape([C.BLOCK_N, C.BLOCK_D])
        if WIDTH < C.BLOCK_N:
            k_tile = k_tile.slice(0, WIDTH, dim=0)
        if LOADED == 0:
            return product_of_rows(q, k_tile, s, C.QK_COLUMNS, False)
        else:  # the columns of q that registers hold, then the others: one accumulator
            k_columns = k_tile.slice(0, LOADED, dim=1).permute((1, 0))
            s = warpgroup_mma(q_registers, k_columns, s, use_acc=False, is_async=True)
            if LOADED < C.QK_COLUMNS:
                s = product_of_rows(q, k_tile, s, C.QK_COLUMNS, True, LOADED)
            return s
    else:
        if not C.K_BY_PARTS:  # else each part is waited for where it is multiplied
            slot = k.wait(i)
        PARTS: gl.constexpr = C.D_PARTS
        COLUMNS: gl.constexpr = C.BLOCK_D // PARTS
        for n in gl.static_range(PARTS):
            if C.K_BY_PARTS:
                # Always 0, but not a constant: ptxas would keep the descriptors of all tiles in registers.
                zero = i >> 30
                q_part = q[0].index(q[1] + n + zero).reshape([WARPGROUP_ROWS, COLUMNS])
                k_part = k[n].tiles.index(k[n].wait(i) + zero)
            else:
                q_part = q[n]
                k_part = k.tiles.index(slot * PARTS + n)
            k_part = k_part.reshape([C.BLOCK_N, COLUMNS])
            if WIDTH < C.BLOCK_N:
                k_part = k_part.slice(0, WIDTH, dim=0)
            if n * COLUMNS < LOADED:
                s = warpgroup_mma(q_registers[n], k_part.permute((1, 0)), s, use_acc=n > 0, is_async=True)
            elif n * COLUMNS < C.QK_COLUMNS:  # columns past head_dim are zeros
                s = product_of_rows(q_part, k_part, s, min(C.QK_COLUMNS - n * COLUMNS, COLUMNS), n > 0)
        return s


@gluon.jit
def finish_qk(C: gl.constexpr, s, k, i, LATER: gl.constexpr):
    """Wait for S, release the ``i``-th block in the ring of k, and return S.

    LATER wgmma groups, which may still be in flight, were started after Q K^T. Groups complete in the order
    of their start.
    """
    if C.K_BY_PARTS:  # the memory of each part is free as soon as its product is complete
        PARTS: gl.constexpr = C.D_PARTS
        for n in gl.static_range(PARTS):
            s = warpgroup_mma_wait(LATER + products_after(C, n), deps=[s])
            k[n].release(i)
        return s
    else:
        s = warpgroup_mma_wait(LATER, deps=[s])
        k.release(i)
        return s


@gluon.constexpr_function
def products_after(C, part):
    """Return the number of products that :func:`start_qk` starts after that of part ``part``."""
    columns = C.BLOCK_D // C.D_PARTS
    firsts = range((part + 1) * columns, C.QK_COLUMNS, columns)
    return sum(count_products(min(C.QK_COLUMNS - first, columns)) for first in firsts)


@gluon.jit
def tile_of_v(C: gl.constexpr, v, i):
    """Wait for the ``i``-th block in the ring of v, and return a tuple of its tiles, one for each accumulator
    of O."""
    slot = v.wait(i)
    if C.O_RIGHT == 0:
        if C.K_BY_PARTS:
            slot += i >> 30  # as in start_qk
        return (v.tiles.index(slot).reshape([C.BLOCK_N, C.BLOCK_DV]),)
    else:
        # The block is DV_PARTS tiles of COLUMNS columns, one behind another in memory. The tiles of the first
        # O_LEFT columns are one right operand, by a view over several tiles (``compat.VIEWS_SPAN_TILES``).
        first = slot * C.DV_PARTS
        COLUMNS: gl.constexpr = C.BLOCK_DV // C.DV_PARTS
        layout: gl.constexpr = gl.NVMMASharedLayout(v.tiles.layout.swizzle_byte_width, 16, 2)
        left = reinterpret(v.tiles.index(first), v.tiles.dtype, [C.BLOCK_N, C.O_LEFT], layout)
        right = v.tiles.index(first + C.O_LEFT // COLUMNS).reshape([C.BLOCK_N, COLUMNS])
        if C.O_RIGHT < COLUMNS:
            right = right.slice(0, C.O_RIGHT, dim=1)
        return (left, right)


@gluon.jit
def start_pv(C: gl.constexpr, p, v_tiles, o):
    """Return O + P V, left in flight.

    p: P [64, WIDTH] in registers. If v's tiles have more than WIDTH rows, the others are not multiplied.
    """
    left = add_pv(C, p, v_tiles[0], o[0])
    if C.O_RIGHT == 0:
        return (left,)
    else:
        layout: gl.constexpr = left_operand_layout(o[1].type.layout)
        return (left, add_pv(C, gl.convert_layout(p, layout, assert_trivial=True), v_tiles[1], o[1]))


@gluon.jit
def add_pv(C: gl.constexpr, p, v, o):
    """Return o + p v for one accumulator of O, left in flight. v has at least as many rows as p columns."""
    WIDTH: gl.constexpr = p.shape[1]
    if WIDTH < C.BLOCK_N:
        v = v.slice(0, WIDTH, dim=0)
    return warpgroup_mma(p, v, o, is_async=True)


@gluon.jit
def finish_pv(o):
    """Wait until the products of O are complete, and return O."""
    if len(o) == 1:
        return (warpgroup_mma_wait(0, deps=[o[0]]),)
    else:
        return warpgroup_mma_wait(0, deps=[o[0], o[1]])


@gluon.jit
def zero_output(C: gl.constexpr):
    """Return zeros for O of a warpgroup's rows: a tuple of one or two accumulators."""
    left = gl.full([WARPGROUP_ROWS, C.O_LEFT], 0.0, gl.float32, accumulator_layout(C.O_LEFT))
    if C.O_RIGHT == 0:
        return (left,)
    else:
        return (left, gl.full([WARPGROUP_ROWS, C.O_RIGHT], 0.0, gl.float32, accumulator_layout(C.O_RIGHT)))


# Steps of O: :func:`each` applies one of ``scale_rows``, ``rescale`` and ``cast`` to its accumulators.


@gluon.jit
def each(function: gl.constexpr, o, x):
    """Return a tuple of ``function(accumulator, x)`` for each accumulator of O."""
    if len(o) == 1:
        return (function(o[0], x),)
    else:
        return (function(o[0], x), function(o[1], x))


@gluon.jit
def scale_rows(x, factor):
    """Return x [rows, n] times factor [rows], in any layouts."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def cast(x, dtype: gl.constexpr):
    return x.to(dtype)


# Scores: soft-cap, score functions, bias, ALiBi, masks.
#
# A score passes through up to three units: the raw product q k (or the tanh of a soft-cap), natural units, in
# which a SCORE_MOD and a bias are defined, and log2 units, for exp2. The variant decides in which of them the
# scores reach the softmax:
#
#   SCALED_SCORES        log2 units: for ALiBi, and for a softmax scale that is not positive (the maximum of
#                        the scaled scores is then not the scaled maximum). In decoding also for soft-caps
#                        and for FP8 caches, whose rows have scales.
#   has_natural_scores   natural units: there is a SCORE_MOD or a bias. scale_log2 is log2(e).
#   neither              raw products or tanh. scale_log2 has the softmax scale in it, so that a probability
#                        takes one FMA and one exp2.

LARGE = gl.constexpr(2.0**27)
"""From this magnitude on, scores of fp32 differ by at least 16, or not at all."""


@gluon.constexpr_function
def has_natural_scores(C):
    """Whether :func:`apply_score_mod` returns scores in natural units."""
    return C.SCORE_MOD is not None or C.HAS_BIAS


@gluon.constexpr_function
def changes_scores(C):
    """Whether :func:`apply_score_mod` changes the raw products. If not, the softmax alone scales them."""
    return C.KEY_SCALES or C.SOFTCAP or C.SCALED_SCORES or has_natural_scores(C) or C.ALIBI


@gluon.jit
def apply_score_mod(C: gl.constexpr, s, n, rows, numbers, s_layout: gl.constexpr, added=0):
    """Apply soft-cap, SCORE_MOD, bias and ALiBi to the raw products of block ``n``.

    With SCALED_SCORES, the results are scores in log2 units. Otherwise the results are raw products, the tanh
    of a soft-cap, or, with SCORE_MOD or a bias, scores in natural units. The softmax then multiplies them by
    ``scale_log2``. With KEY_SCALES (decoding), raw products are multiplied by the scales of their keys.
    """
    if C.KEY_SCALES:
        s = s * numbers.key_scales.load(gl.SliceLayout(0, s_layout))[None, :]
    if C.SOFTCAP:
        s = tanh_of(s, numbers.softcap_rate, C.TANH_APPROX)
        if C.SCALED_SCORES:
            s = scaled(C, s, numbers.softcap_log2)
    elif C.SCALED_SCORES:
        s = scaled(C, s, numbers.scale_log2)
    if has_natural_scores(C):
        s = s * numbers.scale
    if C.SCORE_MOD is not None:
        s, _ = modify_scores(C, s, n, rows, s_layout)
    if C.HAS_BIAS:
        s = s + to_fp32(added)
    if C.ALIBI:
        between = (n * C.BLOCK_N - rows.positions).to(gl.float32)
        s = s - rows.slope[:, None] * gl.abs(plus_columns(between, s.shape[1], s_layout))
    return s


@gluon.jit
def scaled(C: gl.constexpr, s, factor):
    """Return the scores s times ``factor``.

    The compiler fuses this product with the subtraction of the maximum, except where a mask stands between
    them. With INVARIANT neither is fused, since other calls mask other blocks of the same row.
    """
    if C.INVARIANT:
        return rounded_product(s, factor)
    else:
        return s * factor


@gluon.jit
def mask(
    C: gl.constexpr, s, n, rows, s_layout: gl.constexpr, is_full=False, columns=0,
    PARTIAL: gl.constexpr = True,
):  # fmt: skip
    """Return the scores of block ``n``, with -inf where a row does not see a key.

    A row sees the keys in [first_key, last_key] that neither a tree mask nor MASK_MOD hides. ``is_full`` says
    that a block mask lists the block as full, so that MASK_MOD hides none of its keys. PARTIAL says that it
    does not. ``columns`` is the result of ``modifiers.functions.load_columns``.
    """
    keys = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s_layout))[None, :]
    if C.MASK_MOD is not None:
        s = hide_scores(C, s, n, is_full, rows, columns, s_layout, PARTIAL)
    s = hide_by_bounds(C, s, keys, n * C.BLOCK_N, rows)
    if C.HAS_TREE:
        tree = rows.tree
        columns = keys + (n * C.BLOCK_N - tree.first_key)
        inside = (columns >= 0) & (columns < tree.columns) & (tree.row >= 0)[:, None]
        seen = gl.load(tree.mask + tree.row[:, None] + columns, mask=inside, other=1)
        s = gl.where(seen != 0, s, float("-inf"))
    return s


# The online softmax.

MAX_FLOAT = gl.constexpr(3.4028234663852886e38)

LAG_LOG2 = gl.constexpr(8.0)
"""Log2 of the largest P with LAZY_RESCALE. P has the same relative error as if it were at most 1, and is far
from the largest fp16."""


@gluon.jit
def online_softmax(C: gl.constexpr, s, l, m, largest, moment, scale_log2, MAY_HIDE: gl.constexpr):
    """Add the scores ``s`` of a block of keys to the fields l, m, largest and moment of a state.

    Returns (unnormalised P, the factor alpha for earlier sums and O, new l, m, largest, moment). P and alpha
    are in the layout of s. ``scale_log2`` is positive. MAY_HIDE: a mask may have hidden keys of the block.

    With LAZY_RESCALE (FlashAttention-4, Zadouri et al. 2026, arXiv:2603.05451), the maximum m changes only if
    a score exceeds it by LAG_LOG2. P and the sums are in units of 2 ** m, so out and lse do not depend on m.
    """
    m_old = gl.convert_layout(m, gl.SliceLayout(1, s.type.layout))
    # The factor is positive, so the maximum comes first: one product for a row, not one for each score.
    top = gl.max(s, 1)
    if not C.SCALED_SCORES:
        top = top * to_log2(C, top, scale_log2)
    if C.LAZY_RESCALE:  # alpha is then exactly 1 for most rows, which ``rescale`` skips
        m_new = gl.where(top > m_old + LAG_LOG2, top, m_old)
    else:
        m_new = gl.maximum(m_old, top)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # -inf: the row has seen no key so far
    if C.SCALED_SCORES:
        log_p = s - shift[:, None]
    elif has_natural_scores(C):
        factor = gl.where(is_large(m_new), 2.0, scale_log2)
        log_p = gl.fma(s, factor[:, None], -shift[:, None])
    else:  # one FMA, as above: floating-point fusion is on
        log_p = s * scale_log2 - shift[:, None]
    p, alpha = gl.exp2(log_p), gl.exp2(m_old - shift)
    if keeps_largest(C):
        largest = gl.maximum(largest, gl.convert_layout(top, largest.type.layout))
    if C.ENTROPY:
        # The logarithm of what is 0 is -inf, and 0 times -inf would be NaN. Far above -1000, exp2 is 0 too.
        if MAY_HIDE or has_natural_scores(C):
            log_p = gl.maximum(log_p, -1000.0)
        # P is relative to m, so the logarithms of earlier P change with it: the sums of P log2 P change by
        # the sums of P times the change.
        moment = scale_rows(moment + scale_rows(l, gl.maximum(m_old - shift, -1000.0)), alpha)
        moment = moment + gl.convert_layout(quad_dots(p, log_p), moment.type.layout)
    m = gl.convert_layout(m_new, m.type.layout)
    # l sums P in fp32, before it is rounded for P V, and with what dropout drops.
    l = scale_rows(l, alpha) + gl.convert_layout(quad_sums(p), l.type.layout)
    return p, alpha, l, m, largest, moment


@gluon.jit
def to_log2(C: gl.constexpr, top, scale_log2):
    """Return the factor of rows whose largest score is ``top``, from the softmax's scores to log2 units.

    It is log2(e), or 2 for LARGE scores in natural units. The maximum of a row is a rounded product. The
    exponents of P are not: an FMA subtracts the maximum from the exact product. They err by up to 2 ** -24 of
    the maximum. If all scores of a row are large, for example -1e9, P would leave the range of 16 bits.
    Products with 2 are exact. In place of log2(e), 2 is as good for LARGE scores: they are equal or differ by
    16 and more, so P is 1 or about 0. And 2 is greater than log2(e), so converted maxima keep their order.
    """
    if has_natural_scores(C):
        scale_log2 = gl.where(gl.abs(top) < LARGE, scale_log2, 2.0)
    return scale_log2


@gluon.jit
def finite_log2(sink):
    """Return ``sink``, a score in log2 units, or the largest float in place of infinity.

    The conversion of a large sink to log2 units overflows, and a difference of infinities would be NaN. So
    large a sink is larger than all scores. :func:`at_least` then returns it as lse.
    """
    return gl.where(sink == float("inf"), MAX_FLOAT, sink)


@gluon.jit
def at_least(lse, sink):
    """Return the maximum of lse and the sink, both in natural units. NaN remains NaN.

    The sink is part of lse, which is less only if the sink's value in log2 units is not a float.
    """
    return gl.where(lse < sink, sink, lse)


@gluon.jit
def is_large(m):
    """Whether the maximum ``m``, in log2 units, comes from a LARGE score, so that :func:`to_log2` was 2."""
    return gl.abs(m) >= 2 * LARGE


@gluon.jit
def to_natural(C: gl.constexpr, m):
    """Return the maximum ``m`` of each row in natural units, the inverse of :func:`to_log2`."""
    if has_natural_scores(C):
        return m * gl.where(is_large(m), 0.5, LN_2)
    else:
        return m * LN_2


@gluon.jit
def quad_sums(p):
    """Sum p [rows, N] to [rows, 4], one sum for each of the four threads that share a row.

    This takes no shuffle; the four sums are added once, after the last block. In wgmma's accumulator, column
    8 a + 2 t + b belongs to thread t of the quad.
    """
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def quad_dots(p, x):
    """Sum p x [rows, N] to [rows, 4], as :func:`quad_sums` does.

    Pairs are added last: the sums over N // 8 pairs are then chains of FMAs. Added first, a pair would take a
    product, an FMA, and an addition to the sum.
    """
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum((p * x).reshape([M, N // 8, 4, 2]), 1), 2)


@gluon.jit
def as_operand(C: gl.constexpr, weights, bits, rows, dtype: gl.constexpr):
    """Return P as the left operand of P V, in 16 bits, without the probabilities that dropout drops.

    The registers of an accumulator are those of the operand, two 16-bit numbers in one: nothing moves between
    threads.
    """
    p = weights.to(dtype)
    if C.HAS_DROPOUT:
        p = drop(p, bits, rows.modifiers.dropout, False)
    # The layout of the left accumulator's operand. The right one holds it in the same registers (start_pv).
    return gl.convert_layout(p, left_operand_layout(accumulator_layout(C.O_LEFT)))


# The stores.


@gluon.jit
def store_tile(C: gl.constexpr, W: gl.constexpr, o, q, q_part, j, output, work, first, num_heads=0):
    """Store warpgroup W's rows of O, a tuple of accumulators, by TMA, from row ``first`` on.

    The rows are written to shared memory before TMA stores them: to the tiles of q (Q_HOLDS_O), to small
    tiles a few columns at a time (O_IN_PARTS), or to a tile of their own. The queries are the ``j``-th block
    in the ring of q, and ``q_part`` is the index of the warpgroup's first tile of q. With Q_HOLDS_O, this
    function releases the block when the stores have read the tiles.

    One thread issues a store, and only it can wait for the store. Behind ``tma.store_wait`` the compiler lets
    all warps of the partition meet, so each may overwrite the tile then.
    """
    if C.Q_HOLDS_O and C.D_PARTS > 1:
        PART: gl.constexpr = output.desc.block_type.shape[-1]
        parts = output_parts(o, PART)
        for n in gl.static_range(C.BLOCK_DV // PART):
            # No wait: all S are complete, so nothing reads these tiles of q any more.
            store_part(parts[n], q.tiles.index(q_part + n))
            store_rows(C, output.desc, work, first, q.tiles.index(q_part + n), n * PART, num_heads)
    elif C.O_IN_PARTS:
        # A few columns at a time; the parts alternate between two tiles of shared memory.
        PART: gl.constexpr = output.desc.block_type.shape[-1]  # type: ignore[no-redef]
        COUNT: gl.constexpr = (C.BLOCK_DV + PART - 1) // PART
        parts = output_parts(o, PART)
        for n in gl.static_range(COUNT):
            tile = output.tiles.index(2 * W + n % 2)
            # Wait for the previous store from this tile, which is the last store but one. For part 0 and an
            # odd COUNT it is the last store, that of the previous rows.
            tma.store_wait(0 if n == 0 and COUNT % 2 == 1 else 1)
            store_part(parts[n], tile)
            store_rows(C, output.desc, work, first, tile, n * PART, num_heads)
    else:
        if C.Q_HOLDS_O:
            o_tile = q.tiles.index(q_part)
        else:
            o_tile = output.tiles.index(W)
            tma.store_wait(0)  # the tile may still hold the previous rows
        o_tile.reshape([WARPGROUP_ROWS, C.BLOCK_DV]).store(o[0])
        fence_async_shared()  # TMA reads through the asynchronous proxy, which does not see plain stores
        store_rows(C, output.desc, work, first, o_tile, 0, num_heads)
    if C.Q_HOLDS_O:  # the producer loads the next queries into these tiles
        tma.store_wait(0)
        q.release(j)


@gluon.jit
def output_parts(o, PART: gl.constexpr):
    """Return O as a tuple of tiles of PART columns, from left to right. The last tile may have fewer: the
    right accumulator, which is never wider than PART."""
    if len(o) == 1:
        return column_parts(o[0], PART)
    else:
        return column_parts(o[0], PART) + (o[1],)


@gluon.jit
def first_column(C: gl.constexpr, work):
    """Return the first column of v and of the output that work tile ``work`` computes."""
    return work.head % C.COLUMN_SPLITS * C.BLOCK_DV


@gluon.jit
def store_rows(C: gl.constexpr, desc, work, row, tile, column: gl.constexpr = 0, num_heads=0):
    """Store a warpgroup's rows of the output by TMA, from ``column`` of the work tile's columns on; rows past
    the last query are not written. ``num_heads``: heads of the schedule, for packed sequences with PACK > 1.
    """
    head, column = work.head // C.COLUMN_SPLITS, first_column(C, work) + column
    if C.VARLEN:
        end = work.start_q + work.seqlen_q
        if C.PACK > 1:  # one coordinate counts the groups of heads in all rows (``ragged_view``)
            end, head = end * (num_heads // C.COLUMN_SPLITS) + head, 0
        async_store(desc, [RAGGED_ROWS, end, RAGGED_ROWS - work.seqlen_q + row, head, column], tile)
    elif C.PACK > 1:
        async_store(desc, [work.sequence, row, head, 0, column], tile)
    else:
        async_store(desc, [work.sequence, row, head, column], tile)


@gluon.jit
def store_row(C: gl.constexpr, numbers, work, head, positions, pointer, schedule):
    """Store a number of each row, such as lse; rows past the last query are not written.

    ``pointer`` is that of a tensor in the shape of lse. Work tiles that divide the columns of v store the
    same numbers.
    """
    if C.VARLEN:  # int64: heads times tokens may exceed 2 ** 31
        rows = head.to(gl.int64) * schedule.total_q + work.start_q + positions
    else:
        heads = schedule.num_heads // C.COLUMN_SPLITS * C.PACK  # query heads: num_heads counts the schedule's
        head_of_batch = work.sequence.to(gl.int64) * heads + head
        rows = head_of_batch * schedule.seqlen_q + positions
    gl.store(pointer + rows, numbers, mask=positions < work.seqlen_q)
