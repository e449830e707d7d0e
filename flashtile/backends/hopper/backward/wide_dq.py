"""Attention backward for Hopper, head sizes of 129 to 256: dQ, in Gluon.

The other gradients come from ``wide_dkv``. This kernel has the forward's tile scheduler: a work tile is one
or two blocks of 128 query rows of a head. Its program visits the blocks of keys that these rows see, from the
last to the first. Two *consumer* warpgroups have 64 rows of a block each. Their q and dO stay in shared
memory; dQ takes half of their registers:

    S = Q K^T     P = exp2(S - lse)     dP = dO V^T     dS = P (dP - delta)     dQ += dS K

dS is computed in the registers from which the product dQ reads its left operand. A *producer* warp loads by
TMA. dQ is scaled, cast and stored once, through the shared memory of q.

    producer       K q V dO   K   V   K   V ...
    consumer 0, 1  [   S   ][   dP   ]                [      dQ      ]  [   S   ] of the next block of keys
                            (  P  )   (  dS  )

    ring    slots        written by                 released by
    q, do   2            TMA, one for each consumer its consumer: dQ is stored from q; the last dP
    k       STAGES       TMA                        both consumers: dQ of the block
    v       1 or 2       TMA                        both consumers: dP of the block
    queue   2            producer, an index         both consumers (with QUEUED)

The two consumers drift apart, so one multiplies while the other computes P or dS. They share k and v, and
nothing else: q and dO have a slot, and so barriers, for each.

The module is read from top to bottom: the kernel, the producer, a consumer's block of rows, its step over a
block of keys. Which work a program gets is in ``forward.schedule``.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from flashtile.backends.common.jit import gluon_kernel
from flashtile.backends.hopper import pipeline
from flashtile.backends.hopper.backward.kernel import Statistics, soft_cap, weights_of
from flashtile.backends.hopper.backward.schedule import padded_row
from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.forward.kernel import (
    has_modifiers,
    load_keys,
    load_queries,
    loaded_blocks,
    mask,
    mask_rows,
    row_modifiers,
    skip_blocks,
    store_rows,
)
from flashtile.backends.hopper.forward.schedule import consume, produce, tile_blocks
from flashtile.backends.hopper.inline_asm import to_16_bit
from flashtile.backends.hopper.layouts import (
    LOG2_E,
    WARPGROUP_ROWS,
    accumulator_layout,
    add_products,
    columns_of,
    count_products,
    plus_columns,
    product_of_rows,
    zero_sums,
)
from flashtile.backends.hopper.masking import key_range
from flashtile.backends.hopper.modifiers import key_block, load_columns, modify_scores
from flashtile.backends.hopper.pipeline import make_channel
from flashtile.backends.hopper.work_tiles import slope_of


class DqPointers(NamedTuple):
    """Pointers to memory that the kernel accesses without TMA descriptors; None for each that is not used."""

    neg_lse: Any
    """-lse of each padded row (``common.preprocess``), fp32."""
    neg_delta: Any
    """-delta of each padded row, fp32."""
    table: Any
    """The tile table of packed sequences, whose work tiles are blocks of rows, or only its header; int32."""
    seqused_k: Any
    alibi_slopes: Any
    lists: Any
    """Lists of a block mask, as in the forward's pointers."""
    captured: Any
    """Tensors that functions of scores and masks read, as in the forward's pointers."""


class DqTiles(NamedTuple):
    """The tensors that the producer loads: their channels to the consumers, or their descriptors."""

    q: Any
    do: Any
    k: Any
    v: Any


class DqCall(NamedTuple):
    """Arguments of the launch that all partitions need."""

    padded_rows: Any
    """Rows of a head in ``neg_lse`` and ``neg_delta``."""
    pointers: Any
    schedule: Any
    """:class:`~flashtile.backends.hopper.forward.schedule.ForwardSchedule`."""
    numbers: Any
    """:class:`~flashtile.backends.hopper.backward.kernel.BackwardNumbers`."""


@gluon_kernel(do_not_specialize=("pointers", "schedule", "padded_rows"))
def dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, pointers, padded_rows, schedule, numbers, C: gl.constexpr
):  # fmt: skip
    """Compute dQ.

    Grid: at most one program per multiprocessor; work tiles are assigned in ``serpentine_order``, or with a
    block mask taken from the work queue, whose counter is in ``pointers.table``.
    """
    # Channels have (slots, readers, tiles of a slot). Those of q and dO get two writes for each block of
    # rows: 64 rows for each warpgroup. Write number 2 j + W has warpgroup W's rows of the j-th block that the
    # program computes.
    q = make_channel(q_desc, 2, 1, 1)
    do = make_channel(do_desc, 2, 1, 1)
    k = make_channel(k_desc, C.STAGES, 2, 1)
    # With 256 columns, q and dO leave shared memory for three blocks of k and v: two of k, which is needed
    # for longer, and one of v. Equal widths are 256 here, because the main kernel has the smaller ones.
    V_STAGES: gl.constexpr = 1 if C.BLOCK_D == C.BLOCK_DV else 2
    v = make_channel(v_desc, V_STAGES, 2, 1)
    # Consumers have 240 registers a thread: dQ takes 128 of them, S and dP 32 each.
    queue = pipeline.make_work_queue(2) if C.QUEUED else 0
    channels = DqTiles(q, do, k, v)
    descs = DqTiles(q_desc, do_desc, k_desc, v_desc)
    call = DqCall(padded_rows, pointers, schedule, numbers)
    gl.warp_specialize(
        [
            (consumer, (C, 0, queue, channels, dq_desc, call)),
            (consumer, (C, 1, queue, channels, dq_desc, call)),
            (producer, (C, queue, channels, descs, call)),
        ],
        [4, 1],
        [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
    )


# The producer.


@gluon.jit
def producer(C: gl.constexpr, queue, channels, descs, call):
    """One warp that loads all tiles for the consumers."""
    produce(C, load_tile, queue, (channels, descs), call)


@gluon.jit
def load_tile(C: gl.constexpr, channels, descs, work, block, i, j, call):
    """Load all that the consumers need for one block of query rows; returns the new ``i``."""
    q, do, k, v = channels
    n_begin, n_end, listed = loaded_blocks(C, work, block, call)
    for n in range(n_end - 1, n_begin - 1, -1):
        key_number = n
        if C.LISTED:
            key_number, _ = key_block(C, listed, n)
        load_block(C, work, key_number, i, k, descs.k)
        if n == n_end - 1:  # the first keys may be loaded before the tiles of rows are free
            load_part(C, 0, work, block, j, q, descs.q)
            load_part(C, 1, work, block, j, q, descs.q)
        load_block(C, work, key_number, i, v, descs.v)
        if n == n_end - 1:  # dO comes last: the first product, S, needs only k and q
            load_part(C, 0, work, block, j, do, descs.do)
            load_part(C, 1, work, block, j, do, descs.do)
        i += 1
    return i


@gluon.jit
def load_part(C: gl.constexpr, W: gl.constexpr, work, block, j, ring, desc):
    """Load warpgroup W's 64 rows of q or dO by TMA.

    ``block`` is the number of the block of rows in its sequence. It is the ``j``-th that the program loads.
    """
    slot = ring.acquire(2 * j + W)
    mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes)
    load_queries(C, W, desc, work, block, ring.full.index(slot), ring.tiles.index(slot))


@gluon.jit
def load_block(C: gl.constexpr, work, n, i, ring, desc):
    """Load block ``n`` of k or v by TMA, as the ``i``-th write to the channel ``ring``."""
    slot = ring.acquire(i)
    mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes)
    load_keys(C, desc, work, n, ring.full.index(slot), ring.tiles.index(slot))


# A consumer.


@gluon.jit
def consumer(C: gl.constexpr, W: gl.constexpr, queue, channels, dq_desc, call):
    """Compute dQ in warpgroup W, for rows 64 W to 64 W + 63 of each block of rows that the program gets."""
    consume(C, differentiate_tile, queue, (W, channels, dq_desc), call)


@gluon.jit
def differentiate_tile(C: gl.constexpr, W: gl.constexpr, channels, dq_desc, work, block, i, j, call):
    """Compute and store dQ of 64 query rows: warpgroup W's half of a block of rows of the work tile.

    ``block`` is the number of the block in the sequence. ``i`` counts the blocks of keys that the program
    has visited, and ``j`` the blocks of rows that it has computed. Returns the new ``i``.
    """
    q, do, k, v = channels
    schedule, numbers = call.schedule, call.numbers
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N)
    n_begin, n_end = tile_blocks(C, work, block, schedule.mask)
    first = block * C.BLOCK_M + W * WARPGROUP_ROWS
    last = min(first + WARPGROUP_ROWS, work.seqlen_q) - 1
    begin, end, full_begin, full_end = key_range(C, first, last, work.seqlen_q, work.seqlen_k, schedule.mask)
    # A warpgroup without rows, or whose rows see no key, visits no block and releases all. Its dQ is 0.
    some = (first <= last) & (begin < end)
    my_end = min((end + C.BLOCK_N - 1) // C.BLOCK_N, n_end) if some else n_end
    # [n_begin, n_end) is what the producer loads, for the whole block of rows. These rows may see less of it.
    my_begin = begin // C.BLOCK_N if some else n_end
    full_begin = (full_begin + C.BLOCK_N - 1) // C.BLOCK_N
    full_end = full_end // C.BLOCK_N
    modifiers = 0
    if has_modifiers(C):
        modifiers = row_modifiers(C, work, block, first, 0, call.pointers, schedule)
    if C.LISTED:  # blocks are numbered by their order in the block mask's list
        listed = modifiers.blocks  # type: ignore[attr-defined]
        n_begin, n_end = 0, listed.count
        my_begin, my_end = n_begin, n_end
        # The loop counts down, and the masked blocks come first in the list: they have the largest numbers.
        # An empty list has one block, past the last key, which is masked.
        full_begin, full_end = 0, n_end - max(listed.masked_count, 1)
    elif C.MASK_MOD is not None:  # any key may be hidden
        full_end = full_begin

    # Rows past the last query have padded statistics, -lse = -inf, so their dS is 0. They are loaded plainly,
    # once for a block of rows, and stay in registers.
    row_numbers = first + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, s_layout))
    statistics = load_statistics(C, work, row_numbers, call)
    slope = slope_of(C, work, work.head, call.pointers, schedule)
    rows = mask_rows(C, work, row_numbers, slope, schedule, modifiers)

    # Main loop. Blocks that only the other warpgroup sees are released before and after it: a slot is free
    # only when both consumers have arrived.
    dq = zero_sums(C.HEAD_DIM)
    i = skip_blocks(C, W, n_end - my_end, i, k, v)
    q.wait(2 * j + W)
    do.wait(2 * j + W)
    q_tile = q.tiles.index(W).reshape([WARPGROUP_ROWS, C.BLOCK_D])
    for n in range(my_end - 1, my_begin - 1, -1):
        cut = (n < full_begin) | (n >= full_end)
        dq = dq_step(C, W, i, n, cut, rows, statistics, dq, channels, numbers)
        i += 1
    # Epilogue: dO is free for the next block of rows; q only when TMA has stored dQ from its memory.
    do.release(2 * j + W)
    i = skip_blocks(C, W, my_begin - n_begin, i, k, v)
    for part in gl.static_range(len(dq)):
        # softmax_scale multiplies the sums once, before they are rounded.
        columns_of(q_tile, dq, part).store((dq[part] * numbers.scale).to(dq_desc.dtype))
    # TMA reads through the asynchronous proxy, which does not see plain stores. For the stores of the other
    # warps the compiler has a barrier in front of the TMA store.
    fence_async_shared()
    store_rows(C, dq_desc, work, first, q.tiles.index(W))
    tma.store_wait(0)  # the next q is loaded into this memory
    q.release(2 * j + W)
    return i


@gluon.jit
def dq_step(C: gl.constexpr, W: gl.constexpr, i, n, cut, rows, statistics, dq, channels, numbers):
    """Return dQ plus the contribution of the keys of block ``n``, or of the ``n``-th of a block mask."""
    q, do, k, v = channels
    neg_lse, neg_delta = statistics
    dtype: gl.constexpr = q.tiles.dtype
    # The index is always W, but to the compiler it depends on the step. Otherwise it would keep the matrix
    # descriptors of these tiles in registers.
    q_tile = q.tiles.index(W + (i >> 30)).reshape([WARPGROUP_ROWS, C.BLOCK_D])
    do_tile = do.tiles.index(W + (i >> 30)).reshape([WARPGROUP_ROWS, C.BLOCK_DV])
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N)
    # Both products start from 0. A thread has -lse and -delta of two rows; in ``kernel``, with keys as rows,
    # it would need those of all its columns, which is why they are in the accumulators there.
    zero = gl.full([WARPGROUP_ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout)
    # S first: wgmma completes in order, so P can be computed while dP is in flight.
    k_tile = k.tiles.index(k.wait(i)).reshape([C.BLOCK_N, C.BLOCK_D])
    s = product_of_rows(q_tile, k_tile, zero, C.HEAD_DIM, False)
    v_tile = v.tiles.index(v.wait(i)).reshape([C.BLOCK_N, C.BLOCK_DV])
    dp = product_of_rows(do_tile, v_tile, zero, C.HEAD_DIM_V, False)
    is_full = False
    columns = 0  # what a mask function reads for each key: loaded here, behind the products
    if C.LISTED:
        n, is_full = key_block(C, rows.modifiers.blocks, n)
    if C.MASK_COLUMNS is not None:
        columns = load_columns(C, n, rows, C.BLOCK_N)
    s = warpgroup_mma_wait(count_products(C.HEAD_DIM_V), deps=[s])  # dP may stay in flight during P
    s, softcap_grad = scores_and_derivative_of_rows(C, s, n, rows, numbers, s_layout)
    s += neg_lse[:, None]
    if (C.HAS_LEFT or C.HAS_RIGHT or not C.EVEN_N or C.HAS_CUTS) and cut:
        s = mask(C, s, n, rows, s_layout, is_full, columns, not C.LISTED)
    p = weights_of(C, gl.exp2(s), softcap_grad)
    dp = warpgroup_mma_wait(0, deps=[dp])
    v.release(i)  # k is released later, because dQ needs it
    # The registers of an accumulator are those of the left operand: dS does not move. dQ is waited for here,
    # so it overlaps with nothing of this warpgroup; the other one computes P or dS meanwhile.
    dq = add_products(dq, to_16_bit(p * (dp + neg_delta[:, None]), dtype), k_tile)
    k.release(i)
    return dq


@gluon.jit
def load_statistics(C: gl.constexpr, work, row, call):
    """Load the :class:`Statistics` of rows ``row`` of the work tile's sequence and head."""
    head = work.head.to(gl.int64)  # rows of all heads may be more than 32 bits count
    if not C.VARLEN:
        head += work.sequence * call.schedule.num_heads
    where = head * call.padded_rows + padded_row(C, work, 0) + row
    return Statistics(gl.load(call.pointers.neg_lse + where), gl.load(call.pointers.neg_delta + where))


@gluon.jit
def scores_and_derivative_of_rows(C: gl.constexpr, s, n, rows, numbers, s_layout: gl.constexpr):
    """Return (scores in log2 units, derivative of the soft-cap or SCORE_MOD).

    ``s`` has the raw products of the query rows and the keys of block ``n``.
    """
    s, softcap_grad = soft_cap(C, s, numbers)
    if C.SCORE_MOD is not None:
        s, softcap_grad = modify_scores(C, s, n, rows, s_layout)
        s = s * LOG2_E
    if C.ALIBI:
        between = (n * C.BLOCK_N - rows.positions).to(gl.float32)
        s = s - rows.slope * gl.abs(plus_columns(between, C.BLOCK_N, s_layout))
    return s, softcap_grad
