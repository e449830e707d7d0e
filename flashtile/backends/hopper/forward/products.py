"""The two products of the Hopper forward, S = Q K^T and O += P V, and the accumulators of O.

The columns of q and k are divided into D_PARTS tiles, those of v into DV_PARTS tiles; both are often 1.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.hopper.columns import column_parts, count_products, product_of_rows
from flashtile.backends.hopper.compat import gluon, reinterpret
from flashtile.backends.hopper.constants import WARPGROUP_ROWS, accumulator_layout, left_operand_layout
from flashtile.backends.hopper.inline_asm import rescale


@gluon.jit
def qk_product(C: gl.constexpr, WIDTH: gl.constexpr, q, q_head, k_tile, s_layout: gl.constexpr):
    """Return S = Q K^T for the first WIDTH keys of a tile, left in flight.

    q: [64, BLOCK_D] in shared memory. q_head: the first Q_IN_REGISTERS columns of q, in registers.
    """
    ROWS: gl.constexpr = q.shape[0]
    HEAD: gl.constexpr = C.Q_IN_REGISTERS
    s = gl.zeros([ROWS, WIDTH], gl.float32, s_layout)
    k = k_tile.reshape([C.BLOCK_N, C.BLOCK_D])
    if WIDTH < C.BLOCK_N:
        k = k.slice(0, WIDTH, dim=0)
    if HEAD > 0:
        s = warpgroup_mma(q_head, k.slice(0, HEAD, dim=1).permute((1, 0)), s, use_acc=False, is_async=True)
        if HEAD < C.QK_COLUMNS:
            s = product_of_rows(q, k, s, C.QK_COLUMNS, True, HEAD)
    else:
        s = product_of_rows(q, k, s, C.QK_COLUMNS, False)
    return s


@gluon.constexpr_function
def least(a, b):
    return min(a, b)


@gluon.constexpr_function
def products_after(C, part):
    """Return the number of products that :func:`qk_block` starts after that of part ``part``."""
    columns = C.BLOCK_D // C.D_PARTS
    firsts = range((part + 1) * columns, C.QK_COLUMNS, columns)
    return sum(count_products(min(C.QK_COLUMNS - first, columns)) for first in firsts)


@gluon.jit
def qk_block(C: gl.constexpr, WIDTH: gl.constexpr, q, q_head, k, i, s_layout: gl.constexpr):
    """Wait for the ``i``-th block in the channel of k, and start the product Q K^T. Return S, in flight.

    If D_PARTS > 1, ``q`` is the tuple of tiles from :func:`own_queries`, and ``q_head`` that of the tiles in
    registers. With K_BY_PARTS, ``k`` is a tuple of channels, one for each part.
    """
    if C.D_PARTS == 1:
        return qk_product(C, WIDTH, q, q_head, k.tiles.index(k.wait(i)), s_layout)
    else:
        if not C.K_BY_PARTS:
            slot = k.wait(i)
        PARTS: gl.constexpr = C.D_PARTS
        COLUMNS: gl.constexpr = C.BLOCK_D // PARTS
        s = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, s_layout)
        for n in gl.static_range(PARTS):
            if C.K_BY_PARTS:
                zero = i >> 30  # not a constant, so that the tiles' addresses do not stay in registers
                q_part = q[0].index(q[1] + n + zero).reshape([WARPGROUP_ROWS, COLUMNS])
                k_part = k[n].tiles.index(k[n].wait(i) + zero)
            else:
                q_part = q[n]
                k_part = k.tiles.index(slot * PARTS + n)
            k_part = k_part.reshape([C.BLOCK_N, COLUMNS])
            if WIDTH < C.BLOCK_N:
                k_part = k_part.slice(0, WIDTH, dim=0)
            if n * COLUMNS < C.Q_IN_REGISTERS:
                s = warpgroup_mma(q_head[n], k_part.permute((1, 0)), s, use_acc=n > 0, is_async=True)
            elif n * COLUMNS < C.QK_COLUMNS:
                s = product_of_rows(q_part, k_part, s, least(C.QK_COLUMNS - n * COLUMNS, COLUMNS), n > 0)
        return s


@gluon.jit
def qk_wait(C: gl.constexpr, s, k, i, LATER: gl.constexpr):
    """Wait for S, release the ``i``-th block in the channel of k, and return S.

    LATER products, which may still be in flight, were started after Q K^T.
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


@gluon.jit
def own_queries(C: gl.constexpr, W: gl.constexpr, q, j, s_layout: gl.constexpr):
    """Wait for the ``j``-th block in the channel of q, and return the queries of warpgroup W.

    Returns (index of the warpgroup's first tile, tile, head). ``head`` is the first Q_IN_REGISTERS columns of
    the tile, in registers. If D_PARTS > 1, q is divided into D_PARTS tiles of fewer columns, and ``tile`` and
    ``head`` are tuples. With K_BY_PARTS, ``tile`` is (tiles of the channel, index of the warpgroup's first).
    """
    part = (q.wait(j) * C.WARPGROUPS + W) * C.D_PARTS
    if C.D_PARTS == 1:
        tile = q.tiles.index(part).reshape([WARPGROUP_ROWS, C.BLOCK_D])
    else:
        tile = parts_of(q.tiles, part, C.D_PARTS)
    head = tile
    if C.Q_IN_REGISTERS > 0:
        layout: gl.constexpr = left_operand_layout(s_layout, 32 // q.tiles.dtype.primitive_bitwidth)
        if C.D_PARTS == 1:
            head = tile.slice(0, C.Q_IN_REGISTERS, dim=1).load(layout)
        else:
            head = load_parts(tile, C.Q_IN_REGISTERS * C.D_PARTS // C.BLOCK_D, layout)
    if C.K_BY_PARTS:
        tile = (q.tiles, part)
    return part, tile, head


@gluon.jit
def tile_of_v(C: gl.constexpr, v, i):
    """Wait for the ``i``-th block in the channel of v, and return its tile.

    If DV_PARTS > 1, return a tuple of two tiles, one for each accumulator of O.
    """
    slot = v.wait(i)
    if C.DV_PARTS == 1:
        if C.K_BY_PARTS:
            slot += i >> 30  # as in qk_block
        return v.tiles.index(slot)
    else:
        first = slot * C.DV_PARTS
        COLUMNS: gl.constexpr = C.BLOCK_DV // C.DV_PARTS
        layout: gl.constexpr = gl.NVMMASharedLayout(v.tiles.layout.swizzle_byte_width, 16, 2)
        wide = reinterpret(v.tiles.index(first), v.tiles.dtype, [C.BLOCK_N, C.O_WIDE], layout)
        others = v.tiles.index(first + C.O_WIDE // COLUMNS).reshape([C.BLOCK_N, COLUMNS])
        if C.O_COLUMNS < COLUMNS:
            others = others.slice(0, C.O_COLUMNS, dim=1)
        return (wide, others)


@gluon.jit
def pv_product(C: gl.constexpr, p, v_tile, o):
    """Return O + P V, left in flight.

    p: P [64, WIDTH] in registers. If v's tile has more than WIDTH rows, the others are not multiplied.
    """
    if C.DV_PARTS == 1:
        return pv_part(C, p, v_tile.reshape([C.BLOCK_N, C.BLOCK_DV]), o)
    else:
        layout: gl.constexpr = left_operand_layout(o[1].type.layout)
        wide = pv_part(C, p, v_tile[0], o[0])
        return (wide, pv_part(C, gl.convert_layout(p, layout, assert_trivial=True), v_tile[1], o[1]))


@gluon.jit
def pv_part(C: gl.constexpr, p, v, o):
    """Return o + p v for one accumulator of O, left in flight. v has at least as many rows as p columns."""
    WIDTH: gl.constexpr = p.shape[1]
    if WIDTH < C.BLOCK_N:
        v = v.slice(0, WIDTH, dim=0)
    return warpgroup_mma(p, v, o, is_async=True)


@gluon.jit
def pv_wait(C: gl.constexpr, o):
    """Wait until the products of O are complete, and return O."""
    if C.DV_PARTS == 1:
        return warpgroup_mma_wait(0, deps=[o])
    else:
        return warpgroup_mma_wait(0, deps=[o[0], o[1]])


@gluon.jit
def zero_output(C: gl.constexpr, WIDTH: gl.constexpr):
    """Return zeros for O of a warpgroup's rows.

    If DV_PARTS > 1, O is a tuple of two accumulators, with O_WIDE and with O_COLUMNS columns.
    """
    layout: gl.constexpr = accumulator_layout(WIDTH)
    o = gl.full([WARPGROUP_ROWS, WIDTH], 0.0, gl.float32, layout)
    if C.DV_PARTS > 1 and WIDTH == C.O_WIDE:
        return (o, zero_output(C, C.O_COLUMNS))
    else:
        return o


@gluon.jit
def scale_rows(x, factor):
    """Return x [rows, n] times factor [rows], in any layouts."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def scale_output(C: gl.constexpr, o, factor):
    """Apply :func:`scale_rows` to every accumulator of O."""
    if C.DV_PARTS == 1:
        return scale_rows(o, factor)
    else:
        return (scale_rows(o[0], factor), scale_rows(o[1], factor))


@gluon.jit
def rescale_output(C: gl.constexpr, o, alpha):
    """Apply :func:`rescale` to every accumulator of O."""
    if C.DV_PARTS == 1:
        return rescale(o, alpha)
    else:
        return (rescale(o[0], alpha), rescale(o[1], alpha))


@gluon.jit
def round_output(C: gl.constexpr, o, dtype: gl.constexpr):
    """Convert every accumulator of O to ``dtype``."""
    if C.DV_PARTS == 1:
        return o.to(dtype)
    else:
        return (o[0].to(dtype), o[1].to(dtype))


@gluon.jit
def output_parts(C: gl.constexpr, o, PART: gl.constexpr):
    """Return O as a tuple of tiles of PART columns, from left to right. The last tile may have fewer."""
    if C.DV_PARTS == 1:
        return column_parts(o, PART)
    else:
        return column_parts(o[0], PART) + (o[1],)
