"""Attention backward for Hopper, head sizes over 256: dQ, in Gluon.

A work tile is one or two blocks of 64 query rows of a head, in the forward's order. q and dO of a block take
128 KiB of shared memory, and dQ takes half of the registers of two *consumer* warpgroups. Each accumulates
half of its columns. Both need dS, of which each computes a factor, for 32 keys per step:

    scores:     S = Q K^T     P = exp2(S - lse)         dQ[:, :256] += dS K[:, :256]
    gradients:  dP = dO V^T   dS = P (dP - delta)       dQ[:, 256:] += dS K[:, 256:]

``scores`` passes P to ``gradients`` through shared memory, and gets dS back. It adds dS of a step to its half
of dQ while S of the next step is in flight, so it does not wait for dS. Nothing is computed twice. One
*producer* warp loads the halves of the tiles (``wide_dkv``) by TMA:

    producer   k right, v right, v left, k left of each step; q and dO once per block of rows
    scores     [  S i  ] ( P i ) -> weights             [ S i+1 ][ dQ i ]  ( P i+1 ) ...
    gradients     [  dP i  ]        ( dS i ) -> ds [ dQ i ]   [  dP i+1  ] ...

    ring      slots          written by               released by
    q, do     1              TMA, both halves         scores, gradients: a half of dQ is stored through it
    k         2 STAGES + 1   TMA, a half              right: scores after S, gradients after dQ
                                                      left: scores, for both, after dQ of the step
    v         2 STAGES       TMA, a half              gradients after dP
    weights   2              scores: P                gradients: P is in registers
    ds        2              gradients: dS            scores: dQ of the step

The two cannot deadlock: ``scores`` passes P of a step on before it waits for dS of the step before, and
``gradients`` waits only for P.

The module is read from top to bottom: the kernel, the producer, ``scores``, ``gradients``, the stores.
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
from flashtile.backends.hopper.backward.wide_dkv import from_chunks, in_chunks, product_of_tiles, tile_of
from flashtile.backends.hopper.backward.wide_dq import (
    DqCall,
    DqTiles,
    load_statistics,
    scores_and_derivative_of_rows,
)
from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.forward.kernel import load_keys, load_queries, mask, mask_rows, store_rows
from flashtile.backends.hopper.forward.schedule import consume, produce, tile_blocks
from flashtile.backends.hopper.inline_asm import to_16_bit, to_fp32
from flashtile.backends.hopper.layouts import (
    WARPGROUP_ROWS,
    accumulator_layout,
    add_products,
    columns_of,
    zero_sums,
)
from flashtile.backends.hopper.masking import key_range
from flashtile.backends.hopper.pipeline import make_channel, make_ring
from flashtile.backends.hopper.work_tiles import slope_of


class HalvesTiles(NamedTuple):
    """Channels of a program."""

    q: Any
    do: Any
    """q and dO: one block of rows, whose two halves are one write."""
    k: Any
    v: Any
    """k and v: a write is one half of a block of keys, and columns 256 to 511 come first."""
    weights: Any
    """P, times the soft-cap's derivative, from ``scores`` to ``gradients``, in the order of ``in_chunks``."""
    ds: Any
    """dS, from ``gradients`` to ``scores``."""


class RowBlock(NamedTuple):
    """Properties of a block of 64 query rows that the warpgroup ``scores`` needs."""

    rows: Any
    """:class:`~flashtile.backends.hopper.forward.kernel.Rows`."""
    neg_lse: Any
    full_begin: Any
    full_end: Any
    """No edge of the mask cuts blocks of keys [full_begin, full_end)."""


@gluon_kernel(do_not_specialize=("pointers", "schedule", "padded_rows"))
def halves_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, pointers, padded_rows, schedule, numbers, C: gl.constexpr
):  # fmt: skip
    """Compute dQ.

    Grid: at most one program per multiprocessor; work tiles are assigned in ``serpentine_order``.
    """
    # Channels have (slots, readers, tiles of a slot). One reader each: ``scores`` multiplies q, ``gradients``
    # dO. 128 KiB of shared memory leave no second slot.
    q = make_channel(q_desc, 1, 1, 2)
    do = make_channel(do_desc, 1, 1, 2)
    # One half more than of v: k is needed for dQ, a step later than for S.
    k = make_channel(k_desc, 2 * C.STAGES + 1, 2, 1)
    v = make_channel(v_desc, 2 * C.STAGES, 1, 1)
    # P is read back to registers by plain loads, so it is stored without bank conflicts in the order of the
    # registers (``in_chunks``). dS is an operand of wgmma, so it has the layout that wgmma reads.
    chunks: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    weights = gl.allocate_shared_memory(q_desc.dtype, [2, C.BLOCK_N // 16, 1024], chunks)
    operand: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.BLOCK_M, C.BLOCK_N], q_desc.dtype)
    ds = gl.allocate_shared_memory(q_desc.dtype, [2, C.BLOCK_M, C.BLOCK_N], operand)
    # Two slots each: ``scores`` writes P of the next step while ``gradients`` reads this one, and
    # ``gradients`` writes dS while dQ of ``scores`` still reads that of the step before.
    tiles = HalvesTiles(q, do, k, v, make_ring(weights, 2, 1), make_ring(ds, 2, 1))
    descs = DqTiles(q_desc, do_desc, k_desc, v_desc)
    call = DqCall(padded_rows, pointers, schedule, numbers)
    gl.warp_specialize(
        [
            (consumer, (C, 0, tiles, dq_desc, call)),
            (consumer, (C, 1, tiles, dq_desc, call)),
            (producer, (C, tiles, descs, call)),
        ],
        [4, 1],
        [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
    )


# The producer.


@gluon.jit
def producer(C: gl.constexpr, tiles, descs, call):
    """One warp that loads all tiles for the consumers."""
    produce(C, load_tile, 0, (tiles, descs), call)


@gluon.jit
def load_tile(C: gl.constexpr, tiles, descs, work, block, i, j, call):
    """Load all that the consumers need for one block of query rows; returns the new ``i``."""
    n_begin, n_end = tile_blocks(C, work, block, call.schedule.mask)
    # The right halves come first: ``scores`` reads them only for S, and ``gradients`` soon after for its dQ.
    # The left half of k waits for dQ of ``scores``, a step later.
    for n in range(n_end - 1, n_begin - 1, -1):
        load_half(C, 1, work, n, i, tiles.k, descs.k)
        if n == n_end - 1:  # the first keys may be loaded before the tiles of rows are free
            load_halves(C, work, block, j, tiles.q, descs.q)
        # The memory of v is free earlier than that of the left half of k.
        load_half(C, 1, work, n, i, tiles.v, descs.v)
        load_half(C, 0, work, n, i, tiles.v, descs.v)
        if n == n_end - 1:
            load_halves(C, work, block, j, tiles.do, descs.do)
        load_half(C, 0, work, n, i, tiles.k, descs.k)
        i += 1
    return i


@gluon.jit
def load_halves(C: gl.constexpr, work, block, j, ring, desc):
    """Load both halves of a block of rows of q or dO by TMA. It is the program's ``j``-th block."""
    COLUMNS: gl.constexpr = desc.block_type.shape[-1]
    full = ring.full.index(ring.acquire(j))
    mbarrier.expect(full, 2 * desc.block_type.nbytes)
    for part in gl.static_range(2):
        load_queries(C, 0, desc, work, block, full, ring.tiles.index(part), part * COLUMNS)


@gluon.jit
def load_half(C: gl.constexpr, PART: gl.constexpr, work, n, i, ring, desc):
    """Load half PART of block ``n`` of k or v by TMA, for step ``i``."""
    COLUMNS: gl.constexpr = desc.block_type.shape[-1]
    slot = ring.acquire(2 * i + 1 - PART)  # the right half, 1, is the first write of a step
    full = ring.full.index(slot)
    mbarrier.expect(full, desc.block_type.nbytes)
    load_keys(C, desc, work, n, full, ring.tiles.index(slot), PART * COLUMNS)


# The consumers: 0 is ``scores``, 1 is ``gradients``.


@gluon.jit
def consumer(C: gl.constexpr, W: gl.constexpr, tiles, dq_desc, call):
    """Warpgroup W: 0 is ``scores``, 1 is ``gradients``."""
    consume(C, score_tile if W == 0 else gradient_tile, 0, (tiles, dq_desc), call)


@gluon.jit
def score_tile(C: gl.constexpr, tiles, dq_desc, work, block, i, j, call):
    """``scores``: compute P of 64 query rows and the left half of their dQ.

    ``i`` counts the program's steps and ``j`` its blocks of rows. Returns the new ``i``.
    """
    # Prologue: S and P of the first step, which has no dS of a step before.
    n_begin, n_end = tile_blocks(C, work, block, call.schedule.mask)
    own = score_rows(C, work, block, call)
    COLUMNS: gl.constexpr = dq_desc.block_type.shape[-1]
    dq = gl.full([WARPGROUP_ROWS, COLUMNS], 0.0, gl.float32, accumulator_layout(COLUMNS))
    tiles.q.wait(j)
    s = warpgroup_mma_wait(0, deps=[start_scores(C, i, tiles)])
    pass_weights(C, i, n_end - 1, s, own, tiles, call.numbers)
    # Main loop: S of this step, then dQ of the step before, whose dS ``gradients`` has computed meanwhile.
    for n in range(n_end - 2, n_begin - 1, -1):
        i += 1
        s = start_scores(C, i, tiles)
        dq = start_dq(i - 1, dq, tiles)
        s = warpgroup_mma_wait(1, deps=[s])  # dQ of the step before may stay in flight during P
        pass_weights(C, i, n, s, own, tiles, call.numbers)
        dq = finish_dq(i - 1, dq, tiles)
    # Epilogue: dQ of the last step.
    dq = finish_dq(i, start_dq(i, dq, tiles), tiles)
    store_half(C, 0, dq_desc, work, block, j, (dq,), tiles.q, call.numbers.scale)
    return i + 1


@gluon.jit
def score_rows(C: gl.constexpr, work, block, call):
    """Return the :class:`RowBlock` of a block of query rows."""
    schedule = call.schedule
    first = block * C.BLOCK_M
    last = min(first + C.BLOCK_M, work.seqlen_q) - 1
    _, _, full_begin, full_end = key_range(C, first, last, work.seqlen_q, work.seqlen_k, schedule.mask)
    row = rows_of_block(C, block)
    rows = mask_rows(C, work, row, slope_of(C, work, work.head, call.pointers, schedule), schedule)
    neg_lse = load_statistics(C, work, row, call).neg_lse
    return RowBlock(rows, neg_lse, (full_begin + C.BLOCK_N - 1) // C.BLOCK_N, full_end // C.BLOCK_N)


@gluon.jit
def rows_of_block(C: gl.constexpr, block):
    """Return the rows of a block, [64], in the layout of scores."""
    layout: gl.constexpr = gl.SliceLayout(1, accumulator_layout(C.BLOCK_N))
    return block * C.BLOCK_M + gl.arange(0, WARPGROUP_ROWS, layout=layout)


@gluon.jit
def start_scores(C: gl.constexpr, i, tiles):
    """Start the product S = Q K^T of step ``i``, and return its accumulator."""
    s = gl.full([WARPGROUP_ROWS, C.BLOCK_N], 0.0, gl.float32, accumulator_layout(C.BLOCK_N))
    return product_of_tiles(tiles.q.tiles, tiles.k, i, 0, s, C.HEAD_DIM)  # 0: the left half is written last


@gluon.jit
def pass_weights(C: gl.constexpr, i, n, s, row_block, tiles, numbers):
    """Compute P of step ``i`` from S, which has been waited for, and pass it to ``gradients``.

    ``n`` is the step's block of keys, and ``row_block`` a :class:`RowBlock`.
    """
    s_layout: gl.constexpr = s.type.layout
    tiles.k.release(2 * i)  # the right half; the left half is kept for dQ of this step
    s, softcap_grad = scores_and_derivative_of_rows(C, s, n, row_block.rows, numbers, s_layout)
    s += row_block.neg_lse[:, None]
    if C.HAS_LEFT or C.HAS_RIGHT or not C.EVEN_N:  # noqa: SIM102 - a constexpr condition needs its own if
        if (n < row_block.full_begin) | (n >= row_block.full_end):
            s = mask(C, s, n, row_block.rows, s_layout)
    # Without the guard of ``weights_of``: there is no score_mod over head_dim 256, and a soft-cap's
    # derivative is finite.
    p = gl.exp2(s) * softcap_grad
    slot = tiles.weights.acquire(i)
    tiles.weights.tiles.index(slot).store(in_chunks(to_16_bit(p, tiles.q.tiles.dtype)))
    # No proxy fence: ``gradients`` reads by plain loads, which the barrier orders.
    mbarrier.arrive(tiles.weights.full.index(slot), count=1)


@gluon.jit
def start_dq(i, dq, tiles):
    """Start the product that adds step ``i`` to the left half of dQ, and return the accumulator."""
    ds = tiles.ds.tiles.index(tiles.ds.wait(i))
    # Not waited for: S of the step has read both halves of k.
    k_tile = tile_of(tiles.k.tiles.index((2 * i + 1) % tiles.k.STAGES))
    return warpgroup_mma(ds, k_tile, dq, is_async=True)


@gluon.jit
def finish_dq(i, dq, tiles):
    """Wait for the product of :func:`start_dq`, release what it read, and return the new sums."""
    dq = warpgroup_mma_wait(0, deps=[dq])
    tiles.ds.release(i)
    tiles.k.release(2 * i + 1, 2)  # only this warpgroup reads the left half
    return dq


@gluon.jit
def gradient_tile(C: gl.constexpr, tiles, dq_desc, work, block, i, j, call):
    """``gradients``: compute dS of 64 query rows and the right half of their dQ. Returns the new ``i``."""
    n_begin, n_end = tile_blocks(C, work, block, call.schedule.mask)
    neg_delta = load_statistics(C, work, rows_of_block(C, block), call).neg_delta
    COLUMNS: gl.constexpr = dq_desc.block_type.shape[-1]
    # The left half has 256 columns, and this one the rest, in steps of 64; none if head_dim is at most 256.
    dq = zero_sums(C.HEAD_DIM - COLUMNS) if C.HEAD_DIM > COLUMNS else ()
    # Prologue and epilogue need no code: a step begins with dP and ends with its dQ. P brings the mask with
    # it, so the number of the block of keys is not needed.
    tiles.do.wait(j)
    for _ in range(n_end - n_begin):
        dq = gradient_step(C, i, neg_delta, dq, tiles)
        i += 1
    store_half(C, 1, dq_desc, work, block, j, dq, tiles.do, call.numbers.scale)
    return i


@gluon.jit
def gradient_step(C: gl.constexpr, i, neg_delta, dq, tiles):
    """Compute dS of step ``i`` and pass it to ``scores``. Return the right half of dQ with the step added."""
    dtype: gl.constexpr = tiles.k.tiles.dtype
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N)
    chunks: gl.constexpr = in_chunks(gl.full([WARPGROUP_ROWS, C.BLOCK_N], 0.0, dtype, s_layout)).type.layout
    dp = gl.full([WARPGROUP_ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout)
    dp = product_of_tiles(tiles.do.tiles, tiles.v, i, 0, dp, C.HEAD_DIM_V)
    # Nothing else of this warpgroup to overlap: ``scores`` multiplies or computes exponentials meanwhile.
    dp = warpgroup_mma_wait(0, deps=[dp])
    tiles.v.release(2 * i)
    tiles.v.release(2 * i + 1)
    p = from_chunks(tiles.weights.tiles.index(tiles.weights.wait(i)).load(chunks), s_layout)
    # An arrival does not wait for loads, but P is overwritten by plain stores behind this barrier. Only TMA,
    # through the asynchronous proxy, could overtake them.
    tiles.weights.release(i)
    ds = to_16_bit(to_fp32(p) * (dp + neg_delta[:, None]), dtype)
    slot = tiles.ds.acquire(i)
    tiles.ds.tiles.index(slot).store(ds)
    fence_async_shared()  # the other warpgroup's wgmma reads dS through the asynchronous proxy
    mbarrier.arrive(tiles.ds.full.index(slot), count=1)  # before this half of dQ: ``scores`` waits for dS
    # Waited for even if this warpgroup has no columns: an arrival before the load would count for the
    # previous use.
    slot = tiles.k.wait(2 * i)
    if len(dq) > 0:
        dq = add_products(dq, ds, tile_of(tiles.k.tiles.index(slot)))
    tiles.k.release(2 * i)
    return dq


# The store of dQ.


@gluon.jit
def store_half(C: gl.constexpr, PART: gl.constexpr, dq_desc, work, block, j, sums, channel, scale):
    """Store a half of dQ by TMA, through the shared memory of the ``j``-th block of q or dO; release that."""
    COLUMNS: gl.constexpr = dq_desc.block_type.shape[-1]
    tile = tile_of(channel.tiles.index(0))
    if len(sums) > 0:  # the right half of dQ has no columns if only head_dim_v is over 256
        for n in gl.static_range(len(sums)):
            columns_of(tile, sums, n).store((sums[n] * scale).to(dq_desc.dtype))
        # TMA reads through the asynchronous proxy, which does not see plain stores. For the stores of the
        # other warps the compiler has a barrier in front of the TMA store.
        fence_async_shared()
        store_rows(C, dq_desc, work, block * C.BLOCK_M, channel.tiles.index(0), PART * COLUMNS)
        tma.store_wait(0)  # the producer loads the next rows into this memory
    channel.release(j)
