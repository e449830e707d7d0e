"""Tiles of an additive bias, from TMA to the scores that they are added to.

A bias is (batch or 1, query heads or 1, seqlen_q, seqlen_k); its last dimension has stride 1. TMA loads a
tile of it for each tile of scores; elements outside of the bias arrive as zeros. In the forward, tiles of the
bias have shared memory of their own. In the backward they use the shared memory of dS of the same step: a
warpgroup reads its part of the bias, then overwrites it with dS. If each element of the bias belongs to one
score, dS is the bias's gradient, and TMA stores it from there.

    pass      slots        written by, full after     read by, empty after
    forward   BIAS_STAGES  producer: TMA              consumers: the bias is in registers
    backward  2, of dS     producer: TMA              consumers: dQ of the step is computed from dS
                                                      accumulate_dq: TMA has stored dS (with STORES_DS)

The forward's functions come first, then the backward's.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashtile.backends.hopper.compat import async_load, async_store, gluon, reinterpret
from flashtile.backends.hopper.inline_asm import to_fp32
from flashtile.backends.hopper.layouts import LOG2_E, WARPGROUP_ROWS, accumulator_layout
from flashtile.backends.hopper.pipeline import make_ring

SQUARE = gl.constexpr(64)
"""Number of rows and of columns of a tile in the backward; a row takes 128 bytes."""


@gluon.jit
def load_row_tiles(C: gl.constexpr, bias, desc, work, block, n, i, schedule):
    """Producer of the forward: load the bias of key block ``n`` for the rows of all warpgroups.

    This is the ``i``-th write to the channel of the bias.
    """
    slot = bias.acquire(i)
    barrier = bias.full.index(slot)
    mbarrier.expect(barrier, C.WARPGROUPS * desc.block_type.nbytes)
    # A bias that sequences or heads share has one of them: index 0.
    sequence, head = min(work.sequence, schedule.bias_batch - 1), min(work.head, schedule.bias_heads - 1)
    # A tile for each warpgroup, so that each reads one of its own rows; one barrier for all of them.
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    for w in gl.static_range(WARPGROUPS):
        row = block * C.BLOCK_M + w * WARPGROUP_ROWS
        tile = bias.tiles.index(slot * C.WARPGROUPS + w)
        async_load(desc, [sequence, head, row, n * C.BLOCK_N], barrier, tile)


@gluon.jit
def read_rows(C: gl.constexpr, W: gl.constexpr, bias, i, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Consumer W of the forward: load its rows of the ``i``-th bias tile to registers.

    The result is [WARPGROUP_ROWS, WIDTH] in 16 bits, for the first WIDTH keys of the tile.
    The caller waits for these loads (``wait_for_loads``) before it releases the tile.
    """
    slot = bias.wait(i)
    tile = bias.tiles.index(slot * C.WARPGROUPS + W).reshape([WARPGROUP_ROWS, C.BLOCK_N])
    if WIDTH < C.BLOCK_N:  # a masked block may be computed in parts (``forward.kernel.attend_masked``)
        tile = tile.slice(0, WIDTH, dim=1)
    return tile.load(layout)


@gluon.jit
def over_ds(C: gl.constexpr, desc, ds):
    """Make the channel (ring of shared-memory tiles) of the backward's bias.

    The channel has two slots, which occupy the memory of dS. With STORES_DS, ``accumulate_dq`` also reads dS.
    """
    SQUARES: gl.constexpr = 4 * C.BLOCK_M // SQUARE  # two slots, of two warpgroups of 64 keys each
    # Shared memory is full, and a tile of the bias has the size of dS, whose memory is free until dS is
    # stored.
    squares = reinterpret(ds, ds.dtype, [SQUARES] + desc.block_type.shape, desc.layout)
    READERS: gl.constexpr = 3 if C.STORES_DS else 2  # consumers, and accumulate_dq
    return make_ring(squares, 2, READERS)


@gluon.jit
def square_of(C: gl.constexpr, W: gl.constexpr, c: gl.constexpr, bias, slot):
    """Return a bias tile [1, 1, 64, 64] in ``slot``: rows 64 c to 64 c + 63 and the keys of warpgroup W.

    The tile occupies the memory of dS of the same rows and keys. Without STORES_DS, dS is stored as [keys,
    rows], in blocks of 64 rows and all keys. With STORES_DS, dS is stored as [rows, keys], in blocks of 64
    keys and all rows.
    """
    SQUARES: gl.constexpr = C.BLOCK_M // SQUARE
    if C.STORES_DS:
        return bias.tiles.index((slot * 2 + W) * SQUARES + c)
    else:
        return bias.tiles.index((slot * SQUARES + c) * 2 + W)


@gluon.jit
def read_square(C: gl.constexpr, W: gl.constexpr, c: gl.constexpr, bias, slot, layout: gl.constexpr):
    """Load a tile of the bias to registers, with keys as rows."""
    # ldmatrix transposes as it reads, so this costs no shuffles.
    return square_of(C, W, c, bias, slot).reshape([SQUARE, SQUARE]).permute((1, 0)).load(layout)


@gluon.jit
def load_key_tiles(C: gl.constexpr, bias, desc, work, head, row, i, schedule):
    """Producer of the backward: load the bias of BLOCK_M rows, from ``row`` on.

    This is the ``i``-th write to the channel of the bias.
    """
    slot = bias.acquire(i)  # every reader has released dS of step i - 2
    barrier = bias.full.index(slot)
    SQUARES: gl.constexpr = C.BLOCK_M // SQUARE
    mbarrier.expect(barrier, 2 * SQUARES * desc.block_type.nbytes)
    sequence, head = min(work.sequence, schedule.bias_batch - 1), min(head, schedule.bias_heads - 1)
    for w in gl.static_range(2):
        for c in gl.static_range(SQUARES):
            key = work.tile_in_head * C.BLOCK_N + w * SQUARE
            tile = square_of(C, w, c, bias, slot)
            async_load(desc, [sequence, head, row + c * SQUARE, key], barrier, tile)


@gluon.jit
def read_keys(C: gl.constexpr, W: gl.constexpr, bias, i, layout: gl.constexpr):
    """Consumer W of the backward: load its keys of the ``i``-th bias tile to registers.

    The result is [64 keys, BLOCK_M rows], in 16 bits.
    """
    # No wait for these loads before the memory is overwritten: that is dS of the same warpgroup, by plain
    # stores.
    slot = bias.wait(i)
    if C.BLOCK_M == SQUARE:
        return read_square(C, W, 0, bias, slot, layout)
    else:
        # Two accumulators of 64 columns hold the same registers as one of 128, so the convert is free.
        half: gl.constexpr = accumulator_layout(SQUARE)
        left = read_square(C, W, 0, bias, slot, half)
        right = read_square(C, W, 1, bias, slot, half)
        both = gl.join(left, right).permute((0, 2, 1)).reshape([SQUARE, 2 * SQUARE])
        return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def store_ds(C: gl.constexpr, bias, gradient_desc, ds_full, work, head, row, i):
    """Store dS of step ``i`` by TMA. It is the bias's gradient for BLOCK_M rows, from ``row`` on.

    Waits until both consumers have written dS, and returns when TMA has read dS from shared memory.
    """
    slot = i & 1
    mbarrier.wait(ds_full.index(slot), (i >> 1) & 1)  # consumers have fenced their stores of dS for TMA
    # Plain stores, not additions: each element of the bias belongs to one score, and so to one step.
    SQUARES: gl.constexpr = C.BLOCK_M // SQUARE
    for w in gl.static_range(2):
        for c in gl.static_range(SQUARES):
            key = work.tile_in_head * C.BLOCK_N + w * SQUARE
            tile = square_of(C, w, c, bias, slot)
            async_store(gradient_desc, [work.sequence, head, row + c * SQUARE, key], tile)
    tma.store_wait(0)  # the next bias is loaded over this dS
    bias.release(i)


@gluon.jit
def in_log2(added):
    """Convert the values of :func:`read_keys` to log2 units."""
    return to_fp32(added) * LOG2_E


@gluon.jit
def hide_rows(C: gl.constexpr, p, m, work, layout: gl.constexpr):
    """Return P of row block ``m``, with 0 in rows past the end of a packed sequence.

    The bias of these rows may have any values.
    """
    if C.VARLEN:
        rows = m * C.BLOCK_M + gl.arange(0, C.BLOCK_M, layout=gl.SliceLayout(0, layout))
        p = gl.where((rows < work.seqlen_q)[None, :], p, 0.0)
    return p
