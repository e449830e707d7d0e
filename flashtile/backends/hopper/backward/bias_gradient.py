"""The gradient of an additive bias: dS = P * (dP - delta), summed over sequences and heads that share it.

A work tile is 128 rows by 128 keys of the bias. Its program visits the sequences and query heads that share
this tile, recomputes their P and dP, and sums dS in registers. It needs no atomics and no dS in global
memory. Two *consumer* warpgroups own 64 rows each. A *producer* warp loads the operands of one product at a
time: q, k and -lse, then dO, v and -delta.
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
from flashtile.backends.hopper.backward.kernel import BackwardDescriptors, soft_cap
from flashtile.backends.hopper.channels import make_channel, make_ring
from flashtile.backends.hopper.columns import product_of_rows
from flashtile.backends.hopper.compat import async_load, async_store, gluon
from flashtile.backends.hopper.constants import LOG2_E, WARPGROUP_ROWS, accumulator_layout
from flashtile.backends.hopper.inline_asm import to_fp32, wait_for_numbers


class BiasSizes(NamedTuple):
    """Integers of the launch."""

    num_tiles: Any
    row_blocks: Any
    key_blocks: Any
    batch: Any
    num_heads: Any
    """Query heads."""
    group: Any
    """Query heads per key head."""
    bias_batch: Any
    """Size of the bias in the batch dimension: 1 if all sequences share one bias."""
    bias_heads: Any
    """Size of the bias in the dimension of heads: 1 if all query heads share one bias."""
    window_left: Any
    window_right: Any
    offset: Any
    """seqlen_k - seqlen_q."""


class BiasTile(NamedTuple):
    """The position of a work tile in the bias, and the number of terms in its sum."""

    sequence: Any
    head: Any
    row: Any
    key: Any
    rounds: Any
    """Number of (sequence, query head) pairs that share the tile; 0 if the mask hides all of its scores."""


@gluon.jit
def find_tile(C: gl.constexpr, tile_index, sizes):
    """Return the :class:`BiasTile` with number ``tile_index``.

    Blocks of keys vary fastest, so programs that run at the same time read rows of few heads.
    """
    key = tile_index % sizes.key_blocks * C.BLOCK_N
    rest = tile_index // sizes.key_blocks
    row = rest % sizes.row_blocks * C.BLOCK_M
    rest = rest // sizes.row_blocks
    rounds = (sizes.batch // sizes.bias_batch) * (sizes.num_heads // sizes.bias_heads)
    position = row + sizes.offset
    if C.HAS_RIGHT:
        rounds = gl.where(key > position + C.BLOCK_M - 1 + sizes.window_right, 0, rounds)
    if C.HAS_LEFT:
        rounds = gl.where(key + C.BLOCK_N <= position - sizes.window_left, 0, rounds)
    return BiasTile(rest // sizes.bias_heads, rest % sizes.bias_heads, row, key, rounds)


@gluon.jit
def load_operands(rows_desc, keys_desc, numbers_desc, ring, keys, numbers, i, tile, b, head, sizes):
    """Producer: load the operands of product ``i`` into the ring.

    They are rows of a query head, keys of its key head, and a number (-lse or -delta) for each row.
    """
    slot = ring.acquire(i)
    barrier = ring.full.index(slot)
    nbytes: gl.constexpr = (
        rows_desc.block_type.nbytes + keys_desc.block_type.nbytes + numbers_desc.block_type.nbytes
    )
    mbarrier.expect(barrier, nbytes)
    async_load(rows_desc, [b, tile.row, head, 0], barrier, ring.tiles.index(slot))
    async_load(keys_desc, [b, tile.key, head // sizes.group, 0], barrier, keys.index(slot))
    async_load(numbers_desc, [b * sizes.num_heads + head, tile.row], barrier, numbers.index(slot))


@gluon.jit
def producer(C: gl.constexpr, ring, keys, numbers, bias, descs, sizes):
    """Load the operands of the work tiles, in the order in which the consumers use them."""
    q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, bias_desc = descs
    i = 0
    t = 0
    heads = sizes.num_heads // sizes.bias_heads
    for tile_index in range(gl.program_id(0), sizes.num_tiles, gl.num_programs(0)):
        tile = find_tile(C, tile_index, sizes)
        slot = bias.acquire(t)
        barrier = bias.full.index(slot)
        mbarrier.expect(barrier, 2 * bias_desc.block_type.nbytes)
        for w in gl.static_range(2):
            row = tile.row + w * WARPGROUP_ROWS
            async_load(bias_desc, [tile.sequence, tile.head, row, tile.key], barrier, bias.tiles.index(w))
        for n in range(tile.rounds):
            b, head = tile.sequence + n // heads, tile.head + n % heads
            load_operands(q_desc, k_desc, neg_lse_desc, ring, keys, numbers, i, tile, b, head, sizes)
            load_operands(do_desc, v_desc, neg_delta_desc, ring, keys, numbers, i + 1, tile, b, head, sizes)
            i += 2
        t += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def product(C: gl.constexpr, W: gl.constexpr, HEAD_DIM: gl.constexpr, ring, keys, i, layout: gl.constexpr):
    """Multiply warpgroup W's rows by the keys, as product ``i``. Return the accumulator [64, BLOCK_N].

    The wgmma instructions are asynchronous: wait for them before the accumulator is used.
    """
    slot = ring.wait(i)
    rows = ring.tiles.index(slot).reshape([C.BLOCK_M, C.BLOCK_D]).slice(W * WARPGROUP_ROWS, WARPGROUP_ROWS, 0)
    zero = gl.full([WARPGROUP_ROWS, C.BLOCK_N], 0.0, gl.float32, layout)
    return product_of_rows(rows, keys.index(slot).reshape([C.BLOCK_N, C.BLOCK_D]), zero, HEAD_DIM, False)


@gluon.jit
def number_of_rows(C: gl.constexpr, W: gl.constexpr, numbers, slot, layout: gl.constexpr):
    """Load a number (-lse or -delta) for each of warpgroup W's rows, [64]."""
    tile = numbers.index(slot).reshape([C.BLOCK_M]).slice(W * WARPGROUP_ROWS, WARPGROUP_ROWS)
    return tile.load(gl.SliceLayout(1, layout))


@gluon.jit
def hide(C: gl.constexpr, W: gl.constexpr, ds, tile, sizes, layout: gl.constexpr):
    """Set ``ds`` to 0 where a row does not see a key, and return it.

    ``ds`` is the sum of dS over the sequences and heads that share a work tile.
    """
    rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, layout))
    keys = gl.arange(0, C.BLOCK_N, layout=gl.SliceLayout(0, layout))[None, :]
    positions = rows + (tile.row + W * WARPGROUP_ROWS + sizes.offset - tile.key)
    if C.HAS_RIGHT:
        ds = gl.where(keys <= (positions + sizes.window_right)[:, None], ds, 0.0)
    if C.HAS_LEFT:
        ds = gl.where(keys >= (positions - sizes.window_left)[:, None], ds, 0.0)
    return ds


@gluon.jit
def consumer(
    C: gl.constexpr, W: gl.constexpr, ring, keys, numbers, bias, dbias_desc, sizes, scores, lse_scale
):
    """Consumer warpgroup W: compute rows 64 W to 64 W + 63 of dbias in each work tile.

    ``lse_scale`` scales -lse to log2 units.
    """
    layout: gl.constexpr = accumulator_layout(C.BLOCK_N)
    own_bias = bias.tiles.index(W).reshape([WARPGROUP_ROWS, C.BLOCK_N])
    i = 0
    t = 0
    for tile_index in range(gl.program_id(0), sizes.num_tiles, gl.num_programs(0)):
        tile = find_tile(C, tile_index, sizes)
        bias.wait(t)
        ds = gl.full([WARPGROUP_ROWS, C.BLOCK_N], 0.0, gl.float32, layout)
        for _ in range(tile.rounds):
            s = product(C, W, C.HEAD_DIM, ring, keys, i, layout)
            dp = product(C, W, C.HEAD_DIM_V, ring, keys, i + 1, layout)
            neg_lse = wait_for_numbers(number_of_rows(C, W, numbers, i % C.STAGES, layout)) * lse_scale
            neg_delta = wait_for_numbers(number_of_rows(C, W, numbers, (i + 1) % C.STAGES, layout))
            s = warpgroup_mma_wait(C.PRODUCTS, deps=[s])
            ring.release(i)
            added = to_fp32(own_bias.load(layout)) * LOG2_E + neg_lse[:, None]
            if C.HAS_SCORE_MOD:
                s, _ = soft_cap(C, s, scores)
                p = gl.exp2(s + added)
            else:
                p = gl.exp2(s * scores.scale_log2 + added)
            dp = warpgroup_mma_wait(0, deps=[dp])
            ds = ds + p * (dp + neg_delta[:, None])
            ring.release(i + 1)
            i += 2
        ds = hide(C, W, ds, tile, sizes, layout)
        own_bias.store(ds.to(own_bias.dtype))  # all warps have read the bias here
        fence_async_shared()
        row = tile.row + W * WARPGROUP_ROWS
        async_store(dbias_desc, [tile.sequence, tile.head, row, tile.key], bias.tiles.index(W))
        tma.store_wait(0)
        bias.release(t)
        t += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon_kernel(do_not_specialize=("sizes",))
def gradient_kernel(
    q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, bias_desc, dbias_desc, sizes, scores,
    lse_scale, C: gl.constexpr,
):  # fmt: skip
    """Compute dbias, which has the shape of the bias. Grid: at most one program per multiprocessor."""
    ring = make_channel(q_desc, C.STAGES, 2, 1)
    keys = gl.allocate_shared_memory(k_desc.dtype, [C.STAGES] + k_desc.block_type.shape, k_desc.layout)
    numbers = gl.allocate_shared_memory(
        gl.float32, [C.STAGES] + neg_lse_desc.block_type.shape, neg_lse_desc.layout
    )
    tiles = gl.allocate_shared_memory(bias_desc.dtype, [2] + bias_desc.block_type.shape, bias_desc.layout)
    bias = make_ring(tiles, 1, 2)
    descs = BackwardDescriptors(q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, bias_desc)
    gl.warp_specialize(
        [
            (consumer, (C, 0, ring, keys, numbers, bias, dbias_desc, sizes, scores, lse_scale)),
            (consumer, (C, 1, ring, keys, numbers, bias, dbias_desc, sizes, scores, lse_scale)),
            (producer, (C, ring, keys, numbers, bias, descs, sizes)),
        ],
        [4, 1],
        [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
    )  # fmt: skip
