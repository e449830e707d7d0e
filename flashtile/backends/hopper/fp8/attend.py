"""A tile of the FP8 forward: 64 query rows of a block, from shared memory to out and lse.

The steps are those of the 16-bit kernel (``forward.kernel``). The scales of each block of keys are loaded one
block ahead.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.constants import LN_2, WARPGROUP_ROWS, accumulator_layout
from flashtile.backends.hopper.forward.kernel import (
    SoftmaxState,
    apply_score_mod,
    mask,
    mask_rows,
    own_queries,
    own_rows,
    rows_in,
    scale_rows,
    skip_blocks,
    start_qk,
    store_lse,
    store_tile,
)
from flashtile.backends.hopper.forward.schedule import Numbers, OwnBlocks, own_range, whole_end
from flashtile.backends.hopper.fp8.scales import load_scales, score_factor, tile_scales, value_scale
from flashtile.backends.hopper.fp8.softmax import P_LOG2, as_operand, by_byte, exponentials, pack, sums_of
from flashtile.backends.hopper.inline_asm import copy_registers, rescale


class Fp8Tile(NamedTuple):
    """Inputs of the loops over blocks of keys, for 64 query rows: the fields of
    :class:`~flashtile.backends.hopper.forward.kernel.QueryTile`, and the scales."""

    q: Any
    q_head: Any
    k: Any
    v: Any
    ping_pong: Any
    rows: Any
    scales: Any
    """:class:`~flashtile.backends.hopper.fp8.scales.TileScales`."""
    numbers: Any


@gluon.jit
def fp8_softmax(C: gl.constexpr, s, n, m, l, tile, rows, k_scale, v_scale, MASK: gl.constexpr):
    """Return (packed P, new m, new l, factor for earlier O) of the raw products s [64, keys] of block ``n``.

    ``m`` has the maximum of each row so far, ``l`` the partial sums of its probabilities. ``m`` and ``rows``
    are in s's layout. MASK: apply the mask to the block.
    """
    s_layout: gl.constexpr = s.type.layout
    factor = gl.convert_layout(score_factor(C, tile.scales, k_scale), gl.SliceLayout(1, s_layout))
    value_log2, inverse = value_scale(v_scale)
    column = factor[:, None]
    s = apply_score_mod(C, s, n, rows, Numbers(column, column, tile.numbers.softcap_log2), s_layout)
    if MASK:
        s = mask(C, s, n, rows, s_layout)
    b0, b1, b2, b3, m, alpha = exponentials(C, s, m, factor, value_log2)
    sums = sums_of(b0, b1, b2, b3)
    l = scale_rows(l, alpha) + gl.convert_layout(sums, l.type.layout) * inverse
    return pack(b0, b1, b2, b3), m, l, alpha


@gluon.jit
def pv_product(C: gl.constexpr, p, v_tile, o):
    """Start O += P V and return O before the product has ended.

    p: P [64, WIDTH]. v_tile: V^T with keys in P's order; only its first WIDTH keys are used.
    """
    WIDTH: gl.constexpr = p.shape[1]
    v = v_tile.reshape([C.BLOCK_DV, C.BLOCK_N])
    if WIDTH < C.BLOCK_N:
        v = v.slice(0, WIDTH, dim=1)
    return warpgroup_mma(p, v.permute((1, 0)), o, is_async=True)


@gluon.jit
def block_products(C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, tile, i, n):
    """Return (raw products with the first ``WIDTH`` keys of block ``n``, scales of block n - 1).

    Block ``n`` is the ``i``-th block that passes through k's channel.
    """
    tile.ping_pong.wait(W, i)
    s = start_qk(C, WIDTH, tile.q, tile.q_head, tile.k, i, accumulator_layout(WIDTH, 32))
    tile.ping_pong.pass_on(W)
    next_scales = load_scales(C, tile.scales, n - 1)
    s = warpgroup_mma_wait(0, deps=[s])
    tile.k.release(i)
    return s, next_scales


@gluon.jit
def attend_unmasked(C: gl.constexpr, W: gl.constexpr, tile, state, packed, i, n_from, n_to, block_scales):
    """Attend to blocks n_from - 1 down to n_to without a mask.

    Q K^T of block n overlaps P V of block n + 1, the block of the previous iteration. ``packed`` is P of
    block n_from, ``block_scales`` are the scales of (k, v) of block n_from - 1. Returns (state, packed P of
    block n_to, new ``i``, scales of block n_to - 1).
    """
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N, 32)
    k, v, ping_pong = tile.k, tile.v, tile.ping_pong
    o, l, m = state
    k_scale, v_scale = block_scales
    o_layout: gl.constexpr = o.type.layout
    for n in range(n_from - 1, n_to - 1, -1):
        # Convert P before Q K^T is issued: between Q K^T and P V, the conversion would delay P V.
        p = as_operand(packed, o_layout)
        ping_pong.wait(W, i)
        s = start_qk(C, C.BLOCK_N, tile.q, tile.q_head, k, i, s_layout)
        o = pv_product(C, p, v.tiles.index(v.wait(i - 1)), o)
        ping_pong.pass_on(W)
        next_scales = load_scales(C, tile.scales, n - 1)
        s = warpgroup_mma_wait(1, deps=[s])
        k.release(i)
        fresh, m, l, alpha = fp8_softmax(C, s, n, m, l, tile, tile.rows, k_scale, v_scale, False)
        o = warpgroup_mma_wait(0, deps=[o])
        packed = copy_registers(fresh)
        v.release(i - 1)
        o = rescale(o, alpha)
        k_scale, v_scale = next_scales
        i += 1
    return SoftmaxState(o, l, m), packed, i, (k_scale, v_scale)


@gluon.jit
def attend_masked(
    C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, tile, state, i, n_from, n_to, block_scales
):
    """Attend to the first ``WIDTH`` keys of blocks n_from - 1 down to n_to, with a mask.

    The two products of a block run one after the other. ``block_scales`` are the scales of block n_from - 1.
    Returns (state, new ``i``, scales of block n_to - 1).
    """
    row: gl.constexpr = gl.SliceLayout(1, accumulator_layout(WIDTH, 32))
    rows = rows_in(C, tile.rows, row)
    v = tile.v
    o, l, m = state
    o_layout: gl.constexpr = o.type.layout
    k_scale, v_scale = block_scales
    for n in range(n_from - 1, n_to - 1, -1):
        s, next_scales = block_products(C, W, WIDTH, tile, i, n)
        packed, m_new, l, alpha = fp8_softmax(
            C, s, n, gl.convert_layout(m, row), l, tile, rows, k_scale, v_scale, True
        )
        m = gl.convert_layout(m_new, m.type.layout)
        o = pv_product(C, as_operand(packed, o_layout), v.tiles.index(v.wait(i)), scale_rows(o, alpha))
        o = warpgroup_mma_wait(0, deps=[o])
        v.release(i)
        k_scale, v_scale = next_scales
        i += 1
    return SoftmaxState(o, l, m), i, (k_scale, v_scale)


@gluon.jit
def attend_blocks(C: gl.constexpr, W: gl.constexpr, tile, state, i, blocks, block_scales):
    """Attend to all key blocks that the rows of a warpgroup see. ``blocks``: an :class:`OwnBlocks`.

    ``i`` counts the key blocks that have passed through the channels of k and v. Returns the new state and
    the new ``i``.
    """
    begin, end, full_begin, full_end = blocks
    n = end - 1
    if C.HAS_RIGHT:
        n = min(max(full_end, begin), end - 1)
        state, i, block_scales = attend_masked(C, W, C.BLOCK_N, tile, state, i, end, n + 1, block_scales)

    # The first block of the pipeline may need a mask, the blocks after it do not.
    s, next_scales = block_products(C, W, C.BLOCK_N, tile, i, n)
    CUT: gl.constexpr = C.HAS_LEFT or C.HAS_RIGHT or not C.EVEN_N
    o, l, m = state
    k_scale, v_scale = block_scales
    packed, m, l, alpha = fp8_softmax(C, s, n, m, l, tile, tile.rows, k_scale, v_scale, CUT)
    if C.HAS_RIGHT:
        o = scale_rows(o, alpha)
    i += 1
    full_begin = min(full_begin, n)
    state, packed, i, block_scales = attend_unmasked(
        C, W, tile, SoftmaxState(o, l, m), packed, i, n, full_begin, next_scales
    )
    o, l, m = state
    v = tile.v
    o_layout: gl.constexpr = o.type.layout
    o = pv_product(C, as_operand(packed, o_layout), v.tiles.index(v.wait(i - 1)), o)
    o = warpgroup_mma_wait(0, deps=[o])
    v.release(i - 1)
    state = SoftmaxState(o, l, m)
    if C.HAS_LEFT:
        state, i, block_scales = attend_masked(
            C, W, C.BLOCK_N, tile, state, i, full_begin, begin, block_scales
        )
    return state, i


@gluon.jit
def attend_tile(C: gl.constexpr, W: gl.constexpr, channels, ping_pong, output, work, block, i, j, call):
    """Compute and store out and lse of warpgroup W's 64 rows of query block ``block`` of ``work``.

    ``i`` counts the blocks of keys that have passed through the channels of k and v, ``j`` the blocks of
    queries that have passed through the channel of q. Returns the new ``i``.
    """
    ROWS: gl.constexpr = WARPGROUP_ROWS
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N, 32)
    o_layout: gl.constexpr = accumulator_layout(C.BLOCK_DV, 32)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    q, k, v = channels
    schedule = call.schedule

    first, last, n_begin, n_end, own = own_range(C, W, work, block, schedule)
    positions, head = own_rows(C, work, first, row_layout)
    rows = mask_rows(C, work, positions, 0.0, schedule)
    scales = tile_scales(C, work, positions, head, call)
    block_scales = load_scales(C, scales, own.end - 1)

    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    o = gl.full([ROWS, C.BLOCK_DV], 0.0, gl.float32, o_layout)
    zeros = gl.full([ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout)
    z0, z1, z2, z3 = by_byte(zeros)
    state = SoftmaxState(o, sums_of(z0, z1, z2, z3), m)

    i = skip_blocks(n_end - own.end, i, k, v, ping_pong, W)
    q_part, q_tile, q_head = own_queries(C, W, q, j, s_layout)
    tile = Fp8Tile(q_tile, q_head, k, v, ping_pong, rows, scales, call.numbers)
    end = own.end
    if C.HAS_RIGHT and C.BLOCK_N > ROWS:
        end = whole_end(C, work, last, own.begin, own.end, schedule)
        HALF: gl.constexpr = C.BLOCK_N // 2
        state, i, block_scales = attend_masked(C, W, HALF, tile, state, i, own.end, end, block_scales)
    own = OwnBlocks(own.begin, end, own.full_begin, own.full_end)
    state, i = attend_blocks(C, W, tile, state, i, own, block_scales)
    q.release(j)

    o, l, m = state
    sums = gl.convert_layout(gl.sum(l, 1), row_layout)
    lse = (m - P_LOG2) * LN_2 + gl.log(sums)
    store_lse(C, lse, work, head, positions, call.pointers, schedule)
    i = skip_blocks(own.begin - n_begin, i, k, v, ping_pong, W)
    # Rows that see no key become 0. Their o may be NaN, because V may hold NaN after the last key.
    o = scale_rows(o, gl.where(sums > 0, 1 / sums, 0.0))
    o_sums = gl.convert_layout(sums, gl.SliceLayout(1, o_layout))
    o = gl.where((o_sums == 0)[:, None], 0.0, o)
    store_tile(C, W, (o.to(output.desc.dtype),), q, q_part, j, output, work, first)
    return i
