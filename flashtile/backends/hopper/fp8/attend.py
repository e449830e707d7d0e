"""A tile of the FP8 forward: 64 query rows of a block, from shared memory to out and lse.

As in 16 bits (``forward.attend``), with each block's scales read one block ahead.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.hopper.forward.attend import skip_blocks
from flashtile.backends.hopper.forward.products import qk_product, scale_rows
from flashtile.backends.hopper.forward.rows import mask_rows, own_rows, rows_in
from flashtile.backends.hopper.forward.schedule import WARPGROUP_ROWS, Numbers, own_range, whole_end
from flashtile.backends.hopper.forward.scores import LN_2, apply_score_mod, mask
from flashtile.backends.hopper.forward.tiles import store_lse, store_rows
from flashtile.backends.hopper.fp8.scales import load_scales, score_factor, tile_scales, value_scale
from flashtile.backends.hopper.fp8.softmax import P_LOG2, as_operand, by_byte, exponentials, pack, sums_of
from flashtile.backends.hopper.inline_asm import copy_registers, rescale


class Fp8Tile(NamedTuple):
    """Inputs of the loops over blocks of keys, for 64 query rows."""

    q: Any
    """In shared memory; ``q_head``: its first columns, in registers if Q_IN_REGISTERS."""
    q_head: Any
    k: Any
    v: Any
    ping_pong: Any
    rows: Any
    scales: Any
    numbers: Any


@gluon.jit
def fp8_softmax(C: gl.constexpr, s, n, m, l, scales, k_scale, v_scale, rows, numbers, MASK: gl.constexpr,
                s_layout: gl.constexpr):  # fmt: skip
    """Raw products of block ``n`` to (P packed, new maximum, new sums, factor for O). ``m``: in s's rows."""
    row: gl.constexpr = gl.SliceLayout(1, s_layout)
    factor = gl.convert_layout(score_factor(C, scales, k_scale), row)
    value_log2, inverse = value_scale(v_scale)
    column = factor[:, None]
    s = apply_score_mod(C, s, n, rows, Numbers(column, column, numbers.softcap_log2), s_layout)
    if MASK:
        s = mask(C, s, n, rows, s_layout)
    b0, b1, b2, b3, m, alpha = exponentials(C, s, m, factor, value_log2)
    sums = sums_of(b0, b1, b2, b3)
    l = scale_rows(l, alpha) + gl.convert_layout(sums, l.type.layout) * inverse
    return pack(b0, b1, b2, b3), m, l, alpha


@gluon.jit
def pv_product(C: gl.constexpr, p, v_tile, o):
    """O += P V, left in flight. p: P of WIDTH keys; v_tile: V^T, keys in P's order."""
    WIDTH: gl.constexpr = p.shape[1]
    v = v_tile.reshape([C.BLOCK_DV, C.BLOCK_N])
    if WIDTH < C.BLOCK_N:
        v = v.slice(0, WIDTH, dim=1)
    return warpgroup_mma(p, v.permute((1, 0)), o, is_async=True)


@gluon.jit
def attend_unmasked(
    C: gl.constexpr, W: gl.constexpr, tile, o, l, m, packed, i, n_from, n_to, k_scale, v_scale,
    s_layout: gl.constexpr,
):  # fmt: skip
    """Blocks n_from - 1 down to n_to, which no edge of the mask cuts: Q K^T of each overlaps P V of the last
    one.

    ``k_scale`` and ``v_scale`` are those of block n_from - 1; returned are those of block n_to - 1.
    """
    k, v, ping_pong, scales = tile.k, tile.v, tile.ping_pong, tile.scales
    o_layout: gl.constexpr = o.type.layout
    for n in range(n_from - 1, n_to - 1, -1):
        p = as_operand(packed, o_layout)  # here: between two products in flight, it would part them
        ping_pong.wait(W, i)
        s = qk_product(C, C.BLOCK_N, tile.q, tile.q_head, k.tiles.index(k.wait(i)), s_layout)
        o = pv_product(C, p, v.tiles.index(v.wait(i - 1)), o)
        ping_pong.pass_on(W)
        next_scales = load_scales(C, scales, n - 1)
        s = warpgroup_mma_wait(1, deps=[s])
        k.release(i)
        fresh, m, l, alpha = fp8_softmax(
            C, s, n, m, l, scales, k_scale, v_scale, tile.rows, tile.numbers, False, s_layout
        )
        o = warpgroup_mma_wait(0, deps=[o])
        packed = copy_registers(fresh)
        v.release(i - 1)
        o = rescale(o, alpha)
        k_scale, v_scale = next_scales
        i += 1
    return o, l, m, packed, i, k_scale, v_scale


@gluon.jit
def attend_masked(
    C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, tile, o, l, m, i, n_from, n_to, k_scale, v_scale
):
    """Blocks n_from - 1 down to n_to under an edge of the mask, the first ``WIDTH`` keys of each.

    Without overlap, as in the 16-bit kernel. Scales as in :func:`attend_unmasked`.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    o_layout: gl.constexpr = o.type.layout
    row: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows = rows_in(C, tile.rows, row)
    k, v, ping_pong, scales = tile.k, tile.v, tile.ping_pong, tile.scales
    for n in range(n_from - 1, n_to - 1, -1):
        ping_pong.wait(W, i)
        s = qk_product(C, WIDTH, tile.q, tile.q_head, k.tiles.index(k.wait(i)), s_layout)
        ping_pong.pass_on(W)
        next_scales = load_scales(C, scales, n - 1)
        s = warpgroup_mma_wait(0, deps=[s])
        k.release(i)
        packed, m_new, l, alpha = fp8_softmax(
            C, s, n, gl.convert_layout(m, row), l, scales, k_scale, v_scale, rows, tile.numbers, True,
            s_layout,
        )  # fmt: skip
        m = gl.convert_layout(m_new, m.type.layout)
        o = pv_product(C, as_operand(packed, o_layout), v.tiles.index(v.wait(i)), scale_rows(o, alpha))
        o = warpgroup_mma_wait(0, deps=[o])
        v.release(i)
        k_scale, v_scale = next_scales
        i += 1
    return o, l, m, i, k_scale, v_scale


@gluon.jit
def attend_tile(
    C: gl.constexpr, W: gl.constexpr, work, block, i, j, q, k, v, ping_pong, o_tiles, o_desc, call
):
    """64 rows of block ``block`` of ``work``, from shared memory to out and lse.

    ``i`` counts the program's blocks of keys, ``j`` its blocks of queries: the uses of their channels.
    Returns the new ``i``.
    """
    ROWS: gl.constexpr = WARPGROUP_ROWS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_DV, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    schedule = call.schedule

    first, last, n_begin, n_end, my_begin, my_end, full_begin, full_end = own_range(
        C, W, work, block, schedule
    )
    positions, head = own_rows(C, work, first, row_layout)
    rows = mask_rows(C, work, positions, 0.0, schedule)
    scales = tile_scales(C, work, positions, head, call)
    k_scale, v_scale = load_scales(C, scales, my_end - 1)

    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    o = gl.full([ROWS, C.BLOCK_DV], 0.0, gl.float32, o_layout)
    zeros = gl.full([ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout)
    z0, z1, z2, z3 = by_byte(zeros)
    l = sums_of(z0, z1, z2, z3)

    i = skip_blocks(n_end - my_end, i, k, v, ping_pong, W)
    q_part = q.wait(j) * C.WARPGROUPS + W
    q_tile = q.tiles.index(q_part).reshape([ROWS, C.BLOCK_D])
    q_head = q_tile
    if C.Q_IN_REGISTERS > 0:
        q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=4)
        q_head = q_tile.slice(0, C.Q_IN_REGISTERS, dim=1).load(q_layout)
    tile = Fp8Tile(q_tile, q_head, k, v, ping_pong, rows, scales, call.numbers)
    if C.HAS_RIGHT and C.BLOCK_N > ROWS:
        whole = whole_end(C, work, last, my_begin, my_end, schedule)
        HALF: gl.constexpr = C.BLOCK_N // 2
        o, l, m, i, k_scale, v_scale = attend_masked(
            C, W, HALF, tile, o, l, m, i, my_end, whole, k_scale, v_scale
        )
        my_end = whole
    n = my_end - 1
    if C.HAS_RIGHT:
        n = min(max(full_end, my_begin), my_end - 1)
        o, l, m, i, k_scale, v_scale = attend_masked(
            C, W, C.BLOCK_N, tile, o, l, m, i, my_end, n + 1, k_scale, v_scale
        )

    # The first block of the pipeline, the only one of it that may be cut.
    ping_pong.wait(W, i)
    s = qk_product(C, C.BLOCK_N, q_tile, q_head, k.tiles.index(k.wait(i)), s_layout)
    ping_pong.pass_on(W)
    next_scales = load_scales(C, scales, n - 1)
    s = warpgroup_mma_wait(0, deps=[s])
    k.release(i)
    CUT: gl.constexpr = C.HAS_LEFT or C.HAS_RIGHT or not C.EVEN_N
    packed, m, l, alpha = fp8_softmax(
        C, s, n, m, l, scales, k_scale, v_scale, rows, call.numbers, CUT, s_layout
    )
    k_scale, v_scale = next_scales
    if C.HAS_RIGHT:
        o = scale_rows(o, alpha)
    i += 1
    full_begin = min(full_begin, n)
    o, l, m, packed, i, k_scale, v_scale = attend_unmasked(
        C, W, tile, o, l, m, packed, i, n, full_begin, k_scale, v_scale, s_layout
    )
    o = pv_product(C, as_operand(packed, o_layout), v.tiles.index(v.wait(i - 1)), o)
    o = warpgroup_mma_wait(0, deps=[o])
    v.release(i - 1)
    if C.HAS_LEFT:
        o, l, m, i, k_scale, v_scale = attend_masked(
            C, W, C.BLOCK_N, tile, o, l, m, i, full_begin, my_begin, k_scale, v_scale
        )
    q.release(j)

    sums = gl.convert_layout(gl.sum(l, 1), row_layout)
    lse = (m - P_LOG2) * LN_2 + gl.log(sums)
    store_lse(C, lse, work, head, positions, call.pointers, schedule)
    i = skip_blocks(my_begin - n_begin, i, k, v, ping_pong, W)
    # A row without keys met what lies behind the last one, which may be NaN.
    o = scale_rows(o, gl.where(sums > 0, 1 / sums, 0.0))
    o_sums = gl.convert_layout(sums, gl.SliceLayout(1, o_layout))
    o = gl.where((o_sums == 0)[:, None], 0.0, o)
    o_tile = o_tiles.index(W)
    tma.store_wait(0)  # of the tile before
    o_tile.reshape([ROWS, C.BLOCK_DV]).store(o.to(o_desc.dtype))
    fence_async_shared()
    store_rows(C, o_desc, work, first, o_tile)
    return i
