"""Attention forward for Hopper: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, section 3) in Gluon.

A persistent program has two or three *consumer* warpgroups of 64 query rows each and one *producer* warp. The
producer moves tiles of q, k and v to shared memory by TMA. A consumer multiplies them on the tensor cores
(wgmma) and keeps its rows' running maximum, sum and output in registers. Two overlaps hide the softmax:

* within a warpgroup: the softmax of block j runs while the product P V of block j - 1 is in flight;
* between warpgroups: one multiplies while another exponentiates. They drift apart by themselves, or PING_PONG
  orders them.

Key blocks are walked from the last to the first: those that the mask's right edge cuts, those that every row
sees, those that the left edge cuts. Only cut blocks pay for a mask.

Scores are kept in log2 units, so that a probability is one FMA and one exp2. Not served here: fp32, and head
sizes whose rows TMA cannot address (multiples of 8 only).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.common import launch
from flashtile.backends.common.kernel_cache import gluon_kernel
from flashtile.backends.hopper import config, work_queue
from flashtile.backends.hopper.bias import tiles as bias_tiles
from flashtile.backends.hopper.channels import make_channel, make_ping_pong
from flashtile.backends.hopper.columns import column_parts, plus_columns, product_of_rows, store_part
from flashtile.backends.hopper.compat import async_load, async_store, reinterpret
from flashtile.backends.hopper.dropout.cells import drop, generator_of, make_here, words_of
from flashtile.backends.hopper.forward.schedule import (
    Numbers,
    Pointers,
    Schedule,
    block_of_part,
    find_work_tile,
    key_blocks,
    next_tile,
    num_own_tiles,
    num_parts,
    own_blocks,
    query_blocks,
    snake_order,
)
from flashtile.backends.hopper.inline_asm import copy_registers, pin, rescale
from flashtile.backends.hopper.mods.cells import hide_cells, modify_scores, query_mods
from flashtile.backends.hopper.mods.visits import key_block, key_visits
from flashtile.backends.hopper.soft_cap import tanh_of
from flashtile.backends.hopper.work_tiles import num_work_tiles

WARPGROUP_ROWS = gl.constexpr(config.WARPGROUP_ROWS)
LN_2 = gl.constexpr(0.6931471805599453)
RAGGED_ROWS = gl.constexpr(launch.RAGGED_ROWS)
LAG_LOG2 = gl.constexpr(8.0)
"""With LAZY_RESCALE, P is at most 2 ** 8: as exact as one of at most 1, and far from fp16's end."""


@gluon.jit
def load_keys(C: gl.constexpr, desc, work, n, barrier, slot, column: gl.constexpr = 0):
    """TMA load of block ``n`` of k or v, from ``column`` on; rows behind the last key arrive as zeros."""
    row, head = n * C.BLOCK_N, work.head // C.KV_GROUP
    if C.VARLEN or C.SEQUSED:
        end = work.start_k + work.seqlen_k
        async_load(desc, [RAGGED_ROWS, end, RAGGED_ROWS - work.seqlen_k + row, head, column], barrier, slot)
    else:
        async_load(desc, [work.sequence, row, head, column], barrier, slot)


@gluon.jit
def load_queries(
    C: gl.constexpr, w: gl.constexpr, desc, work, block, barrier, part, column: gl.constexpr = 0
):
    """TMA load of the rows of warpgroup ``w``, from ``column`` on; rows behind the last query arrive as
    zeros."""
    row = (block * C.BLOCK_M + w * WARPGROUP_ROWS) // C.PACK
    if C.VARLEN:
        end = work.start_q + work.seqlen_q
        row = RAGGED_ROWS - work.seqlen_q + row
        async_load(desc, [RAGGED_ROWS, end, row, work.head, column], barrier, part)
    elif C.PACK > 1:
        async_load(desc, [work.sequence, row, work.head, 0, column], barrier, part)
    else:
        async_load(desc, [work.sequence, row, work.head, column], barrier, part)


@gluon.jit
def store_rows(C: gl.constexpr, desc, work, row, part, column: gl.constexpr = 0):
    """TMA store of a warpgroup's rows of the output, from ``column`` on; rows behind the last query are not
    written."""
    if C.VARLEN:
        end = work.start_q + work.seqlen_q
        async_store(desc, [RAGGED_ROWS, end, RAGGED_ROWS - work.seqlen_q + row, work.head, column], part)
    elif C.PACK > 1:
        async_store(desc, [work.sequence, row, work.head, 0, column], part)
    else:
        async_store(desc, [work.sequence, row, work.head, column], part)


@gluon.jit
def qk_product(C: gl.constexpr, WIDTH: gl.constexpr, q, q_head, k_tile, s_layout: gl.constexpr):
    """S = Q K^T with the first WIDTH keys of a tile, left in flight. q: [64, BLOCK_D] in shared memory."""
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


@gluon.jit
def qk_block(C: gl.constexpr, WIDTH: gl.constexpr, q, q_head, k, i, s_layout: gl.constexpr):
    """:func:`qk_product` with use ``i`` of the channel of k, once it is there.

    Where tiles come in D_PARTS, ``q`` is a tuple of them, and ``q_head`` of those in registers.
    """
    slot = k.wait(i)
    if C.D_PARTS == 1:
        return qk_product(C, WIDTH, q, q_head, k.tiles.index(slot), s_layout)
    else:
        PARTS: gl.constexpr = C.D_PARTS
        COLUMNS: gl.constexpr = C.BLOCK_D // PARTS
        s = gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, s_layout)
        for n in gl.static_range(PARTS):
            k_part = k.tiles.index(slot * PARTS + n).reshape([C.BLOCK_N, COLUMNS])
            if WIDTH < C.BLOCK_N:
                k_part = k_part.slice(0, WIDTH, dim=0)
            if n * COLUMNS < C.Q_IN_REGISTERS:
                s = warpgroup_mma(q_head[n], k_part.permute((1, 0)), s, use_acc=n > 0, is_async=True)
            elif n * COLUMNS < C.QK_COLUMNS:
                s = product_of_rows(q[n], k_part, s, least(C.QK_COLUMNS - n * COLUMNS, COLUMNS), n > 0)
        return s


@gluon.jit
def parts_of(tiles, first, PARTS: gl.constexpr):
    """PARTS tiles of shared memory from ``first`` on: a tuple of [rows, columns]."""
    tile = tiles.index(first)
    tile = tile.reshape([WARPGROUP_ROWS, tile.shape[-1]])
    if PARTS == 1:
        return (tile,)
    else:
        return (tile,) + parts_of(tiles, first + 1, PARTS - 1)


@gluon.jit
def load_parts(tiles, COUNT: gl.constexpr, layout: gl.constexpr):
    """The first COUNT of a tuple of tiles, in registers."""
    if COUNT == 1:
        return (tiles[0].load(layout),)
    else:
        return load_parts(tiles, COUNT - 1, layout) + (tiles[COUNT - 1].load(layout),)


@gluon.jit
def tile_of_v(C: gl.constexpr, v, i):
    """Use ``i`` of the channel of v, once it is there. Where tiles come in DV_PARTS, a tuple, as O's
    accumulators."""
    slot = v.wait(i)
    if C.DV_PARTS == 1:
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
    """O += P V, left in flight. p: [64, WIDTH] in registers, for the first WIDTH rows of v's tile."""
    if C.DV_PARTS == 1:
        return pv_part(C, p, v_tile.reshape([C.BLOCK_N, C.BLOCK_DV]), o)
    else:
        layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o[1].type.layout, k_width=2)
        wide = pv_part(C, p, v_tile[0], o[0])
        return (wide, pv_part(C, gl.convert_layout(p, layout, assert_trivial=True), v_tile[1], o[1]))


@gluon.jit
def pv_part(C: gl.constexpr, p, v, o):
    """:func:`pv_product` with one of O's accumulators."""
    WIDTH: gl.constexpr = p.shape[1]
    if WIDTH < C.BLOCK_N:
        v = v.slice(0, WIDTH, dim=0)
    return warpgroup_mma(p, v, o, is_async=True)


@gluon.jit
def pv_wait(C: gl.constexpr, o):
    """O once its products are complete."""
    if C.DV_PARTS == 1:
        return warpgroup_mma_wait(0, deps=[o])
    else:
        return warpgroup_mma_wait(0, deps=[o[0], o[1]])


@gluon.jit
def zero_output(C: gl.constexpr, WIDTH: gl.constexpr):
    """O of a warpgroup's rows; with DV_PARTS a tuple, of the first O_WIDE columns and of O_COLUMNS more."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    o = gl.full([WARPGROUP_ROWS, WIDTH], 0.0, gl.float32, layout)
    if C.DV_PARTS > 1 and WIDTH == C.O_WIDE:
        return (o, zero_output(C, C.O_COLUMNS))
    else:
        return o


@gluon.jit
def scale_output(C: gl.constexpr, o, factor):
    """:func:`scale_rows` of all of O."""
    if C.DV_PARTS == 1:
        return scale_rows(o, factor)
    else:
        return (scale_rows(o[0], factor), scale_rows(o[1], factor))


@gluon.jit
def rescale_output(C: gl.constexpr, o, alpha):
    """:func:`rescale` of all of O."""
    if C.DV_PARTS == 1:
        return rescale(o, alpha)
    else:
        return (rescale(o[0], alpha), rescale(o[1], alpha))


@gluon.jit
def round_output(C: gl.constexpr, o, dtype: gl.constexpr):
    """All of O in ``dtype``."""
    if C.DV_PARTS == 1:
        return o.to(dtype)
    else:
        return (o[0].to(dtype), o[1].to(dtype))


@gluon.jit
def output_parts(C: gl.constexpr, o, PART: gl.constexpr):
    """O in tiles of PART columns, from left to right; the last may have fewer."""
    if C.DV_PARTS == 1:
        return column_parts(o, PART)
    else:
        return column_parts(o[0], PART) + (o[1],)


class Rows(NamedTuple):
    """A warpgroup's rows as masks and ALiBi see them: 64 numbers each."""

    positions: Any
    """Where a row stands among the keys."""
    first_key: Any
    last_key: Any
    """The last key that a row sees."""
    slope: Any
    """ALiBi's, of the row's head, in log2 units."""
    tree: Any
    """What a tree mask says, as a :class:`Tree`; 0 without one."""
    mods: Any
    """What functions of scores and masks need, as :class:`~flashtile.backends.hopper.mods.cells.CellMods`; or
    dropout, as :class:`~flashtile.backends.hopper.dropout.cells.Generator`; or a bias, as
    :class:`~flashtile.backends.hopper.bias.tiles.Bias`; 0 without any."""


class Tree(NamedTuple):
    """A tree mask of draft tokens (``decode``): which of a sequence's last tokens each row sees."""

    mask: Any
    """Pointer to the sequence's."""
    row: Any
    """Where a row's begins, [64]; -1 if the row is none."""
    first_key: Any
    """The key that its first column stands for."""
    columns: Any


@gluon.jit
def visited(C: gl.constexpr, rows, n):
    """(block, whether it is full): what the lists of a block mask call block ``n`` of a tile, early enough to
    arrive under a product."""
    if C.LISTED:
        return key_block(C, rows.mods.visits, n)
    return n, False


@gluon.jit
def dropout_words(C: gl.constexpr, rows, n, WIDTH: gl.constexpr, s_layout: gl.constexpr):
    """What decides which probabilities of block ``n`` are dropped. It needs no score, so that the product may
    be in flight; 0 without dropout."""
    if C.HAS_DROPOUT:
        words = words_of(rows.mods, n * C.BLOCK_N, WIDTH, False, C.FINE_DROPOUT, s_layout)
        make_here(words)
        return words
    else:
        return 0


@gluon.jit
def drop_cells(C: gl.constexpr, p, words, rows):
    """P in 16 bits without what dropout drops."""
    if C.HAS_DROPOUT:
        return drop(p, words, rows.mods, False)
    else:
        return p


@gluon.jit
def load_bias(C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, rows, i, s_layout: gl.constexpr):
    """What use ``i`` of the channel of the bias adds to scores; asked for early enough to arrive under a
    product."""
    if C.HAS_BIAS:
        return bias_tiles.read_rows(C, W, rows.mods, i, WIDTH, s_layout)
    else:
        return 0


@gluon.jit
def release_bias(C: gl.constexpr, rows, i, added):
    """What :func:`load_bias` has asked for, arrived; the tile is free."""
    if C.HAS_BIAS:
        added = bias_tiles.release_rows(rows.mods, i, added)
    return added


@gluon.jit
def apply_score_mod(C: gl.constexpr, s, n, rows, numbers, s_layout: gl.constexpr, added=0):
    """Soft-cap, bias and ALiBi: raw products of block ``n`` to scores in log2 units.

    Without HAS_SCORE_MOD products, the tanh of a soft-cap, or scores with a bias, which are in natural units,
    stay as they are, and the softmax scales them. With KEY_SCALES each key has a scale of its own, in
    shared memory.
    """
    if C.KEY_SCALES:
        s = s * numbers.key_scales.load(gl.SliceLayout(0, s_layout))[None, :]
    if C.SOFTCAP:
        s = tanh_of(s, numbers.softcap_rate, C.TANH_APPROX)
        if C.HAS_SCORE_MOD:
            s = s * numbers.softcap_log2
    elif C.HAS_SCORE_MOD:
        s = s * numbers.scale_log2
    if C.SCORE_MOD is not None:
        s = modify_scores(C, s, n, rows, numbers, s_layout)
    if C.HAS_BIAS:
        s = bias_tiles.plus_bias(s, added, numbers.scale)
    if C.ALIBI:
        between = (n * C.BLOCK_N - rows.positions).to(gl.float32)
        s = s - rows.slope[:, None] * gl.abs(plus_columns(between, s.shape[1], s_layout))
    return s


@gluon.jit
def mask(C: gl.constexpr, s, n, rows, s_layout: gl.constexpr, is_full=False):
    """-inf for keys of block ``n`` outside [first_key, last_key] of their row, and for what MASK_MOD hides
    unless the block mask says that it ``is_full``."""
    keys = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s_layout))[None, :]
    if C.MASK_MOD is not None:
        s = hide_cells(C, s, n, is_full, rows, s_layout)
    if C.MASK_MOD is None or not C.LISTED or not C.EVEN_N:
        s = gl.where(keys <= (rows.last_key - n * C.BLOCK_N)[:, None], s, float("-inf"))
    if C.HAS_LEFT:
        s = gl.where(keys >= (rows.first_key - n * C.BLOCK_N)[:, None], s, float("-inf"))
    if C.HAS_TREE:
        tree = rows.tree
        columns = keys + (n * C.BLOCK_N - tree.first_key)
        inside = (columns >= 0) & (columns < tree.columns) & (tree.row >= 0)[:, None]
        seen = gl.load(tree.mask + tree.row[:, None] + columns, mask=inside, other=1)
        s = gl.where(seen != 0, s, float("-inf"))
    return s


@gluon.jit
def online_softmax(C: gl.constexpr, s, m, scale_log2):
    """(unnormalised P, new row maximum, factor for what was summed before). ``scale_log2`` is positive.

    With LAZY_RESCALE (FlashAttention-4, Zadouri et al. 2026, arXiv:2603.05451) the maximum stays what it was
    until a score exceeds it by LAG_LOG2. P and the sums are in units of 2 ** m whatever m is, so that out and
    lse are the same.
    """
    top = gl.max(s, 1)
    if not C.HAS_SCORE_MOD:
        top = top * scale_log2
    if C.LAZY_RESCALE:
        m_new = gl.where(top > m + LAG_LOG2, top, m)
    else:
        m_new = gl.maximum(m, top)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has met no key yet
    if C.HAS_SCORE_MOD:
        p = gl.exp2(s - shift[:, None])
    else:
        p = gl.exp2(s * scale_log2 - shift[:, None])
    return p, m_new, gl.exp2(m - shift)


@gluon.jit
def quad_sums(p):
    """[rows, N] -> [rows, 4]: sums of what each of the four threads that share a row holds, without a
    shuffle.

    In wgmma's accumulator, column 8 a + 2 t + b belongs to thread t of the quad.
    """
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def scale_rows(x, factor):
    """x [rows, n] times factor [rows], in whatever layouts they are."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def attend_uncut(
    C: gl.constexpr, W: gl.constexpr, o, l, m, p, i, n_from, n_to, q, q_head, k, v, ping_pong, rows, numbers,
    s_layout: gl.constexpr, p_layout: gl.constexpr, n_cut=0,
):  # fmt: skip
    """Blocks n_from - 1 down to n_to, which no edge of the mask cuts: Q K^T of each beside P V of the last
    one. Those of a block mask from n_cut on are under its mask.

    ``p`` is P of block n_from, ``i`` the use of the channels of k and v that block n_from - 1 is.
    """
    for n in range(n_from - 1, n_to - 1, -1):
        ping_pong.wait(W, i)
        s = qk_block(C, C.BLOCK_N, q, q_head, k, i, s_layout)
        o = pv_product(C, p, tile_of_v(C, v, i - 1), o)
        ping_pong.pass_on(W)
        block, is_full = visited(C, rows, n)
        words = dropout_words(C, rows, block, C.BLOCK_N, s_layout)
        added = load_bias(C, W, C.BLOCK_N, rows, i, s_layout)
        s = warpgroup_mma_wait(1 if C.DV_PARTS == 1 else 2, deps=[s])
        k.release(i)
        added = release_bias(C, rows, i, added)
        s = apply_score_mod(C, s, block, rows, numbers, s_layout, added)
        if C.LISTED:  # noqa: SIM102 - one is known to the compiler, the other is not
            if n >= n_cut:
                s = mask(C, s, block, rows, s_layout, is_full)
        weights, m, alpha = online_softmax(C, s, m, numbers.scale_log2)
        l = scale_rows(l, alpha) + quad_sums(weights)
        if C.PIN_WAIT:
            l = pin(l)
        o = pv_wait(C, o)
        v.release(i - 1)
        p = gl.convert_layout(drop_cells(C, weights.to(p.dtype), words, rows), p_layout)
        if C.LAZY_RESCALE:
            p = copy_registers(p)
            o = rescale_output(C, o, alpha)
        else:
            o = scale_output(C, o, alpha)
        i += 1
    return o, l, m, p, i


@gluon.jit
def attend_cut(
    C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, o, l, m, i, n_from, n_to, q, q_head, k, v,
    ping_pong, rows, numbers, dtype: gl.constexpr,
):  # fmt: skip
    """Blocks n_from - 1 down to n_to under an edge of the mask, the first ``WIDTH`` keys of each.

    Without overlap: they are few, and a P that went from this loop to the next would be packed into registers
    anew in every step of both.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    O_WIDTH: gl.constexpr = C.BLOCK_DV if C.DV_PARTS == 1 else C.O_WIDE
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O_WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    row: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows = rows_in(C, rows, row)
    for n in range(n_from - 1, n_to - 1, -1):
        ping_pong.wait(W, i)
        s = qk_block(C, WIDTH, q, q_head, k, i, s_layout)
        ping_pong.pass_on(W)
        block, is_full = visited(C, rows, n)
        words = dropout_words(C, rows, block, WIDTH, s_layout)
        added = load_bias(C, W, WIDTH, rows, i, s_layout)
        s = warpgroup_mma_wait(0, deps=[s])
        k.release(i)
        added = release_bias(C, rows, i, added)
        s = apply_score_mod(C, s, block, rows, numbers, s_layout, added)
        s = mask(C, s, block, rows, s_layout, is_full)
        weights, m_new, alpha = online_softmax(C, s, gl.convert_layout(m, row), numbers.scale_log2)
        m = gl.convert_layout(m_new, m.type.layout)
        l = scale_rows(l, alpha) + gl.convert_layout(quad_sums(weights), l.type.layout)
        p = gl.convert_layout(drop_cells(C, weights.to(dtype), words, rows), p_layout)
        o = pv_product(C, p, tile_of_v(C, v, i), scale_output(C, o, alpha))
        o = pv_wait(C, o)
        v.release(i)
        i += 1
    return o, l, m, i


@gluon.jit
def tile_blocks(C: gl.constexpr, work, block, left, right):
    """Key blocks [n_begin, n_end) of a tile: the producer loads them, every consumer releases them."""
    first = block * (C.BLOCK_M // C.PACK)
    last = min(first + C.BLOCK_M // C.PACK, work.seqlen_q) - 1
    return key_blocks(
        first, last, work.seqlen_q, work.seqlen_k, left, right, C.HAS_LEFT, C.HAS_RIGHT, C.BLOCK_N
    )


@gluon.jit
def skip_blocks(count, i, k, v, ping_pong, W: gl.constexpr, bias=None):
    """Release ``count`` blocks of the tile that none of this warpgroup's rows sees; ``bias`` is its
    channel."""
    for _ in range(count):
        ping_pong.wait(W, i)
        ping_pong.pass_on(W)
        k.wait(i)
        k.release(i)
        if bias is not None:
            bias.wait(i)
            bias.release(i)
        v.wait(i)
        v.release(i)
        i += 1
    return i


@gluon.jit
def own_range(C: gl.constexpr, W: gl.constexpr, work, block, schedule):
    """(first and last row of warpgroup W, ``tile_blocks``, then ``own_blocks``)"""
    n_begin, n_end = tile_blocks(C, work, block, schedule.window_left, schedule.window_right)
    first = (block * C.BLOCK_M + W * WARPGROUP_ROWS) // C.PACK
    last = min(first + WARPGROUP_ROWS // C.PACK, work.seqlen_q) - 1
    my_begin, my_end, full_begin, full_end = own_blocks(
        first, last, n_begin, n_end, work.seqlen_q, work.seqlen_k, schedule.window_left,
        schedule.window_right, C.HAS_LEFT, C.HAS_RIGHT, C.BLOCK_N,
    )  # fmt: skip
    return first, last, n_begin, n_end, my_begin, my_end, full_begin, full_end


@gluon.jit
def own_rows(C: gl.constexpr, work, first, row_layout: gl.constexpr):
    """(position, query head) of each of a warpgroup's rows: rows of heads that share a tile alternate."""
    row = gl.arange(0, WARPGROUP_ROWS, layout=row_layout)
    return first + row // C.PACK, work.head * C.PACK + row % C.PACK


@gluon.jit
def mask_rows(C: gl.constexpr, work, positions, slope, schedule, mods=0):
    """The rows at ``positions`` of a sequence, as :class:`Rows`."""
    in_keys = positions + work.seqlen_k - work.seqlen_q
    last_key = gl.full([WARPGROUP_ROWS], 0, gl.int32, positions.type.layout) + work.seqlen_k - 1
    if C.HAS_RIGHT:
        last_key = gl.minimum(in_keys + schedule.window_right, last_key)
    return Rows(in_keys, in_keys - schedule.window_left, last_key, slope, 0, mods)


@gluon.jit
def rows_in(C: gl.constexpr, rows, layout: gl.constexpr):
    """The same rows in another layout."""
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
        rows.mods,
    )


@gluon.jit
def whole_end(C: gl.constexpr, work, last, my_begin, my_end, schedule):
    """``my_end``, or one less if only the first half of the last block is seen."""
    last_key = min(last + work.seqlen_k - work.seqlen_q + schedule.window_right, work.seqlen_k - 1)
    half = last_key < (my_end - 1) * C.BLOCK_N + C.BLOCK_N // 2 and my_end - 1 > my_begin
    return my_end - 1 if half else my_end


@gluon.jit
def store_lse(C: gl.constexpr, lse, work, head, positions, pointers, schedule):
    """Natural logarithm, a row's number each; rows behind the last query are not written."""
    if C.VARLEN:
        rows = head.to(gl.int64) * schedule.total_q + work.start_q + positions
    else:
        head_of_batch = work.sequence.to(gl.int64) * (schedule.num_heads * C.PACK) + head
        rows = head_of_batch * schedule.seqlen_q + positions
    gl.store(pointers.lse + rows, lse, mask=positions < work.seqlen_q)


@gluon.jit
def store_parts(C: gl.constexpr, W: gl.constexpr, o, o_tiles, o_desc, work, row):
    """TMA store of a warpgroup's rows, as many columns at a time as ``o_desc`` has, through two tiles in
    alternation."""
    PART: gl.constexpr = o_desc.block_type.shape[-1]
    COUNT: gl.constexpr = (C.BLOCK_DV + PART - 1) // PART
    parts = output_parts(C, o, PART)
    for n in gl.static_range(COUNT):
        tile = o_tiles.index(2 * W + n % 2)
        # Of the part before the last. After an odd number of parts, the last one had this tile, too.
        tma.store_wait(0 if n == 0 and COUNT % 2 == 1 else 1)
        store_part(parts[n], tile)
        store_rows(C, o_desc, work, row, tile, n * PART)


@gluon.jit
def attend_tile(
    C: gl.constexpr, W: gl.constexpr, work, block, i, j, q, k, v, ping_pong, o_tiles, o_desc, pointers,
    schedule, numbers,
):  # fmt: skip
    """64 rows of block ``block`` of ``work``, from shared memory to out and lse.

    ``i`` counts the program's blocks of keys, ``j`` its blocks of queries: the uses of their channels.
    Returns the new ``i``.
    """
    dtype: gl.constexpr = q.tiles.dtype
    ROWS: gl.constexpr = WARPGROUP_ROWS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
    O_WIDTH: gl.constexpr = C.BLOCK_DV if C.DV_PARTS == 1 else C.O_WIDE
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O_WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)

    first, last, n_begin, n_end, my_begin, my_end, full_begin, full_end = own_range(
        C, W, work, block, schedule
    )
    positions, head = own_rows(C, work, first, row_layout)
    slope = 0.0
    if C.ALIBI:
        slope = gl.load(pointers.alibi_slopes + work.sequence * schedule.alibi_stride + head) * (1 / LN_2)
    mods = 0
    skipped_bias = None
    if C.HAS_MODS:
        mods = query_mods(C, work, block, pointers)
    if C.HAS_DROPOUT:
        head_of_batch = work.sequence * schedule.num_heads + work.head
        mods = generator_of(head_of_batch, first, pointers.dropout)
    if C.HAS_BIAS:
        mods = pointers.bias
        skipped_bias = mods.tiles
    if C.LISTED:  # visits take the place of blocks
        visits = mods.visits  # type: ignore[attr-defined]
        n_begin, n_end = 0, visits.count
        my_begin, my_end, full_begin, full_end = 0, visits.count, 0, visits.count - visits.cut
    elif C.MASK_MOD is not None:  # whatever it hides
        full_begin, full_end = my_begin, my_begin
    rows = mask_rows(C, work, positions, slope, schedule, mods)
    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    if C.SINK:
        m = gl.load(pointers.sink + head).to(gl.float32) * (1 / LN_2)

    o = zero_output(C, O_WIDTH)
    l = quad_sums(gl.full([ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout))
    if C.SINK:  # a key of weight 1 so far, shared out among the quad
        l += 0.25

    i = skip_blocks(n_end - my_end, i, k, v, ping_pong, W, skipped_bias)
    q_part = (q.wait(j) * C.WARPGROUPS + W) * C.D_PARTS
    if C.D_PARTS == 1:
        q_tile = q.tiles.index(q_part).reshape([ROWS, C.BLOCK_D])
    else:
        q_tile = parts_of(q.tiles, q_part, C.D_PARTS)
    q_head = q_tile
    if C.Q_IN_REGISTERS > 0:
        q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
        if C.D_PARTS == 1:
            q_head = q_tile.slice(0, C.Q_IN_REGISTERS, dim=1).load(q_layout)
        else:
            q_head = load_parts(q_tile, C.Q_IN_REGISTERS * C.D_PARTS // C.BLOCK_D, q_layout)
    if C.HAS_RIGHT and C.BLOCK_N > ROWS:
        whole = whole_end(C, work, last, my_begin, my_end, schedule)
        HALF: gl.constexpr = C.BLOCK_N // 2
        o, l, m, i = attend_cut(
            C, W, HALF, o, l, m, i, my_end, whole, q_tile, q_head, k, v, ping_pong,
            rows, numbers, dtype,
        )  # fmt: skip
        my_end = whole
    n = my_end - 1
    CUTS_FIRST: gl.constexpr = C.HAS_RIGHT or (C.HAS_CUTS and not C.LISTED)
    if CUTS_FIRST:
        n = min(max(full_end, my_begin), my_end - 1)
        o, l, m, i = attend_cut(
            C, W, C.BLOCK_N, o, l, m, i, my_end, n + 1, q_tile, q_head, k, v, ping_pong,
            rows, numbers, dtype,
        )  # fmt: skip

    # The first block of the pipeline, the only one of it that an edge may cut.
    ping_pong.wait(W, i)
    s = qk_block(C, C.BLOCK_N, q_tile, q_head, k, i, s_layout)
    ping_pong.pass_on(W)
    first_block, is_full = visited(C, rows, n)
    words = dropout_words(C, rows, first_block, C.BLOCK_N, s_layout)
    added = load_bias(C, W, C.BLOCK_N, rows, i, s_layout)
    s = warpgroup_mma_wait(0, deps=[s])
    k.release(i)
    added = release_bias(C, rows, i, added)
    s = apply_score_mod(C, s, first_block, rows, numbers, s_layout, added)
    if C.HAS_LEFT or C.HAS_RIGHT or not C.EVEN_N or C.HAS_CUTS:
        s = mask(C, s, first_block, rows, s_layout, is_full)
    weights, m, alpha = online_softmax(C, s, m, numbers.scale_log2)
    l = scale_rows(l, alpha) + quad_sums(weights)
    if CUTS_FIRST:
        o = scale_output(C, o, alpha)
    p = gl.convert_layout(drop_cells(C, weights.to(dtype), words, rows), p_layout)
    i += 1
    full_begin = min(full_begin, n)
    o, l, m, p, i = attend_uncut(
        C, W, o, l, m, p, i, n, full_begin, q_tile, q_head, k, v, ping_pong, rows, numbers, s_layout,
        p_layout, full_end,
    )  # fmt: skip
    o = pv_product(C, p, tile_of_v(C, v, i - 1), o)
    if C.HAS_LEFT:
        o = pv_wait(C, o)
        v.release(i - 1)
        o, l, m, i = attend_cut(
            C, W, C.BLOCK_N, o, l, m, i, full_begin, my_begin, q_tile, q_head, k, v, ping_pong,
            rows, numbers, dtype,
        )  # fmt: skip
    if not C.Q_HOLDS_O:
        q.release(j)

    sums = gl.convert_layout(gl.sum(l, 1), row_layout)
    lse = m * LN_2 + gl.log(sums)
    store_lse(C, lse, work, head, positions, pointers, schedule)
    if not C.HAS_LEFT:
        o = pv_wait(C, o)
        v.release(i - 1)
    i = skip_blocks(my_begin - n_begin, i, k, v, ping_pong, W, skipped_bias)
    whole = 1.0
    if C.HAS_DROPOUT:
        whole = numbers.keep_scale
    o = round_output(C, scale_output(C, o, gl.where(sums > 0, whole / sums, 0.0)), o_desc.dtype)
    if C.Q_HOLDS_O and C.D_PARTS > 1:
        PART: gl.constexpr = o_desc.block_type.shape[-1]
        parts = output_parts(C, o, PART)
        for n in gl.static_range(C.BLOCK_DV // PART):
            store_part(parts[n], q.tiles.index(q_part + n))
            store_rows(C, o_desc, work, first, q.tiles.index(q_part + n), n * PART)
    elif C.O_IN_PARTS:
        store_parts(C, W, o, o_tiles, o_desc, work, first)
    else:
        if C.Q_HOLDS_O:
            o_tile = q.tiles.index(q_part)
        else:
            o_tile = o_tiles.index(W)
            tma.store_wait(0)  # of the tile before
        o_tile.reshape([ROWS, C.BLOCK_DV]).store(o)
        fence_async_shared()
        store_rows(C, o_desc, work, first, o_tile)
    if C.Q_HOLDS_O:
        tma.store_wait(0)
        q.release(j)
    return i


@gluon.jit
def attend_work_tile(
    C: gl.constexpr, W: gl.constexpr, tile_index, i, j, q, k, v, ping_pong, o_tiles, o_desc, pointers,
    schedule, numbers,
):  # fmt: skip
    """The blocks of query rows of a work tile; returns the new ``i`` and ``j`` of :func:`attend_tile`."""
    work = find_work_tile(C, tile_index, pointers, schedule)
    num_blocks = query_blocks(C, work, schedule)
    for part in range(num_parts(num_blocks, work.place, C.PAIRED)):
        block = block_of_part(num_blocks, work.place, part, C.PAIRED)
        i = attend_tile(
            C, W, work, block, i, j, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers
        )
        j += 1
    return i, j


@gluon.jit
def consumer(
    C: gl.constexpr, W: gl.constexpr, queue, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers
):
    """Warpgroup W: rows 64 W to 64 W + 63 of every block that this program computes."""
    num_tiles = num_work_tiles(C, pointers, schedule)
    i = 0
    j = 0
    if C.QUEUED:
        t = 0
        tile_index = work_queue.take(queue, t, 4)
        while tile_index < num_tiles:
            i, j = attend_work_tile(
                C, W, tile_index, i, j, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers
            )
            t += 1
            tile_index = work_queue.take(queue, t, 4)
    else:
        program, programs = gl.program_id(0), gl.num_programs(0)
        for t in range(num_own_tiles(program, programs, num_tiles)):
            tile_index = snake_order(t, program, programs)
            i, j = attend_work_tile(
                C, W, tile_index, i, j, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers
            )
    tma.store_wait(0)


@gluon.jit
def load_block(C: gl.constexpr, work, block, i, j, q, k, v, q_desc, k_desc, v_desc, pointers, schedule):
    """All that the consumers need for one block of query rows; returns the new ``i``."""
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    PARTS: gl.constexpr = C.D_PARTS
    COLUMNS: gl.constexpr = C.BLOCK_D // PARTS
    V_PARTS: gl.constexpr = C.DV_PARTS
    V_COLUMNS: gl.constexpr = C.BLOCK_DV // V_PARTS
    n_begin, n_end = tile_blocks(C, work, block, schedule.window_left, schedule.window_right)
    if C.LISTED:
        visits = key_visits(C, 1, work, block, pointers.lists)
        n_begin, n_end = 0, visits.count
    for n in range(n_end - 1, n_begin - 1, -1):
        key_number = n
        if C.LISTED:
            key_number, _ = key_block(C, visits, n)
        slot = k.acquire(i)
        mbarrier.expect(k.full.index(slot), PARTS * k_desc.block_type.nbytes)
        for part in gl.static_range(PARTS):
            k_part = k.tiles.index(slot * PARTS + part)
            load_keys(C, k_desc, work, key_number, k.full.index(slot), k_part, part * COLUMNS)
        if n == n_end - 1:  # the first keys may come before q's tile is free
            slot = q.acquire(j)
            mbarrier.expect(q.full.index(slot), WARPGROUPS * PARTS * q_desc.block_type.nbytes)
            for w in gl.static_range(WARPGROUPS):
                for part in gl.static_range(PARTS):
                    q_part = q.tiles.index((slot * WARPGROUPS + w) * PARTS + part)
                    load_queries(C, w, q_desc, work, block, q.full.index(slot), q_part, part * COLUMNS)
        if C.HAS_BIAS:
            bias_tiles.load_rows(C, pointers.bias, work, block, key_number, i)
        slot = v.acquire(i)
        mbarrier.expect(v.full.index(slot), V_PARTS * v_desc.block_type.nbytes)
        for part in gl.static_range(V_PARTS):
            v_part = v.tiles.index(slot * V_PARTS + part)
            load_keys(C, v_desc, work, key_number, v.full.index(slot), v_part, part * V_COLUMNS)
        i += 1
    return i


@gluon.jit
def load_work_tile(C: gl.constexpr, tile_index, i, j, q, k, v, q_desc, k_desc, v_desc, pointers, schedule):
    """What :func:`attend_work_tile` waits for."""
    work = find_work_tile(C, tile_index, pointers, schedule)
    num_blocks = query_blocks(C, work, schedule)
    for part in range(num_parts(num_blocks, work.place, C.PAIRED)):
        block = block_of_part(num_blocks, work.place, part, C.PAIRED)
        i = load_block(C, work, block, i, j, q, k, v, q_desc, k_desc, v_desc, pointers, schedule)
        j += 1
    return i, j


@gluon.jit
def producer(C: gl.constexpr, queue, q, k, v, q_desc, k_desc, v_desc, pointers, schedule):
    """One warp that keeps the tiles of q, k and v coming."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    num_tiles = num_work_tiles(C, pointers, schedule)
    i = 0
    j = 0
    if C.QUEUED:
        t = 0
        tile_index = program
        work_queue.put(queue, t, tile_index)
        while tile_index < num_tiles:
            i, j = load_work_tile(C, tile_index, i, j, q, k, v, q_desc, k_desc, v_desc, pointers, schedule)
            t += 1
            # The atomic takes its time, while the consumers work on the tiles that are loaded.
            tile_index = next_tile(pointers, programs)
            work_queue.put(queue, t, tile_index)
    else:
        for t in range(num_own_tiles(program, programs, num_tiles)):
            tile_index = snake_order(t, program, programs)
            i, j = load_work_tile(C, tile_index, i, j, q, k, v, q_desc, k_desc, v_desc, pointers, schedule)


@gluon.jit
def run_partitions(C: gl.constexpr, q_desc, k_desc, v_desc, o_desc, pointers, schedule, numbers):
    """All of a program: its shared memory, its consumers and its producer."""
    q = make_channel(q_desc, C.Q_STAGES, C.WARPGROUPS, C.WARPGROUPS * C.D_PARTS)
    k = make_channel(k_desc, C.STAGES, C.WARPGROUPS, C.D_PARTS)
    v = make_channel(v_desc, C.STAGES, C.WARPGROUPS, C.DV_PARTS)
    ping_pong = make_ping_pong(C.WARPGROUPS if C.PING_PONG else 1)
    queue = work_queue.make_work_queue(C.WARPGROUPS) if C.QUEUED else 0
    if C.Q_HOLDS_O:
        o_tiles = q.tiles
    else:
        O_TILES: gl.constexpr = 2 * C.WARPGROUPS if C.O_IN_PARTS else C.WARPGROUPS
        o_tiles = gl.allocate_shared_memory(o_desc.dtype, [O_TILES] + o_desc.block_type.shape, o_desc.layout)
    if C.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers)),
                (consumer, (C, 1, queue, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers)),
                (producer, (C, queue, q, k, v, q_desc, k_desc, v_desc, pointers, schedule)),
            ],
            [4, 1],
            [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (C, 0, queue, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers)),
                (consumer, (C, 1, queue, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers)),
                (consumer, (C, 2, queue, q, k, v, ping_pong, o_tiles, o_desc, pointers, schedule, numbers)),
                (producer, (C, queue, q, k, v, q_desc, k_desc, v_desc, pointers, schedule)),
            ],
            [4, 4, 1],
            [C.CONSUMER_REGISTERS, C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )


@gluon_kernel(do_not_specialize=Schedule._fields)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, table, seqused_k, alibi_slopes, sink,
    num_tiles, num_blocks, num_heads, swizzle, seqlen_q, seqlen_k, total_q, batch_rows_k, window_left,
    window_right, alibi_stride, scale_log2, softcap_rate, softcap_log2, C: gl.constexpr,
):  # fmt: skip
    """Grid: one program for each multiprocessor at most.

    Work tiles are dealt out in ``snake_order``, or taken from the work queue, whose counter lies in
    ``table``. A pointer to what a call has not (a table, used lengths, slopes, a sink) is never followed.
    """
    pointers = Pointers(lse, table, seqused_k, alibi_slopes, sink)
    schedule = Schedule(
        num_tiles, num_blocks, num_heads, swizzle, seqlen_q, seqlen_k, total_q, batch_rows_k, window_left,
        window_right, alibi_stride,
    )  # fmt: skip
    numbers = Numbers(scale_log2, softcap_rate, softcap_log2)
    run_partitions(C, q_desc, k_desc, v_desc, o_desc, pointers, schedule, numbers)
