"""A tile of the Hopper forward: 64 query rows of a block, from shared memory to out and lse."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from flashtile.backends.hopper.constants import LN_2, LOG2_E, WARPGROUP_ROWS
from flashtile.backends.hopper.forward.products import (
    own_queries,
    pv_product,
    pv_wait,
    qk_block,
    rescale_output,
    round_output,
    scale_output,
    scale_rows,
    tile_of_v,
    zero_output,
)
from flashtile.backends.hopper.forward.rows import mask_rows, own_rows, row_modifiers, rows_in
from flashtile.backends.hopper.forward.schedule import own_range, whole_end
from flashtile.backends.hopper.forward.scores import (
    apply_score_mod,
    drop_probabilities,
    dropout_bits,
    load_bias,
    mask,
    online_softmax,
    quad_sums,
    release_bias,
    visited,
)
from flashtile.backends.hopper.forward.tiles import store_lse, store_tile
from flashtile.backends.hopper.inline_asm import copy_registers, pin
from flashtile.backends.hopper.work_tiles import slope_of


@gluon.jit
def attend_unmasked(
    C: gl.constexpr, W: gl.constexpr, o, l, m, p, i, n_from, n_to, q, q_head, k, v, ping_pong, rows, numbers,
    s_layout: gl.constexpr, p_layout: gl.constexpr, n_cut=0,
):  # fmt: skip
    """Blocks n_from - 1 down to n_to, which no edge of the mask cuts: Q K^T of each overlaps P V of the last
    one. Those of a block mask from n_cut on are under its mask.

    ``p`` is P of block n_from, ``i`` the use of the channels of k and v that block n_from - 1 is.
    """
    for n in range(n_from - 1, n_to - 1, -1):
        ping_pong.wait(W, i)
        s = qk_block(C, C.BLOCK_N, q, q_head, k, i, s_layout)
        o = pv_product(C, p, tile_of_v(C, v, i - 1), o)
        ping_pong.pass_on(W)
        block, is_full = visited(C, rows, n)
        bits = dropout_bits(C, rows, block, C.BLOCK_N, s_layout)
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
        p = gl.convert_layout(drop_probabilities(C, weights.to(p.dtype), bits, rows), p_layout)
        if C.LAZY_RESCALE:
            p = copy_registers(p)
            o = rescale_output(C, o, alpha)
        else:
            o = scale_output(C, o, alpha)
        i += 1
    return o, l, m, p, i


@gluon.jit
def block_scores(
    C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, MASKED: gl.constexpr, i, n, q, q_head, k,
    ping_pong, rows, numbers, s_layout: gl.constexpr,
):  # fmt: skip
    """(scores of block ``n`` and the first ``WIDTH`` of its keys, bits for dropout): Q K^T, all that modifies
    it, and the mask if MASKED. Use ``i`` of the channel of k."""
    ping_pong.wait(W, i)
    s = qk_block(C, WIDTH, q, q_head, k, i, s_layout)
    ping_pong.pass_on(W)
    block, is_full = visited(C, rows, n)
    bits = dropout_bits(C, rows, block, WIDTH, s_layout)
    added = load_bias(C, W, WIDTH, rows, i, s_layout)
    s = warpgroup_mma_wait(0, deps=[s])
    k.release(i)
    added = release_bias(C, rows, i, added)
    s = apply_score_mod(C, s, block, rows, numbers, s_layout, added)
    if MASKED:
        s = mask(C, s, block, rows, s_layout, is_full)
    return s, bits


@gluon.jit
def attend_masked(
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
        s, bits = block_scores(
            C, W, WIDTH, True, i, n, q, q_head, k, ping_pong, rows, numbers, s_layout
        )  # fmt: skip
        weights, m_new, alpha = online_softmax(C, s, gl.convert_layout(m, row), numbers.scale_log2)
        m = gl.convert_layout(m_new, m.type.layout)
        l = scale_rows(l, alpha) + gl.convert_layout(quad_sums(weights), l.type.layout)
        p = gl.convert_layout(drop_probabilities(C, weights.to(dtype), bits, rows), p_layout)
        o = pv_product(C, p, tile_of_v(C, v, i), scale_output(C, o, alpha))
        o = pv_wait(C, o)
        v.release(i)
        i += 1
    return o, l, m, i


@gluon.jit
def skip_blocks(count, i, k, v, ping_pong, W: gl.constexpr, bias=0, HAS_BIAS: gl.constexpr = False):
    """Release ``count`` blocks of the tile that none of this warpgroup's rows sees, and with HAS_BIAS as many
    tiles of the bias."""
    for _ in range(count):
        ping_pong.wait(W, i)
        ping_pong.pass_on(W)
        k.wait(i)
        k.release(i)
        if HAS_BIAS:
            bias.wait(i)
            bias.release(i)
        v.wait(i)
        v.release(i)
        i += 1
    return i


@gluon.jit
def first_maximum(C: gl.constexpr, head, pointers, row_layout: gl.constexpr):
    """The running maximum before the first block of keys: that of the sink, if there is one."""
    m = gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, row_layout)
    if C.SINK:
        m = gl.load(pointers.sink + head).to(gl.float32) * LOG2_E
    return m


@gluon.jit
def first_sums(C: gl.constexpr, s_layout: gl.constexpr):
    """The sums before the first block. A sink is a key of weight 1 so far, shared out among the quad."""
    l = quad_sums(gl.full([WARPGROUP_ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout))
    if C.SINK:
        l += 0.25
    return l


@gluon.jit
def attend_tile(
    C: gl.constexpr, W: gl.constexpr, work, block, i, j, q, k, v, bias, ping_pong, o_tiles, o_desc, pointers,
    schedule, numbers,
):  # fmt: skip
    """64 rows of block ``block`` of ``work``, from shared memory to out and lse.

    ``i`` counts the program's blocks of keys, ``j`` its blocks of queries: the uses of their channels.
    Returns the new ``i``.
    """
    dtype: gl.constexpr = q.tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
    O_WIDTH: gl.constexpr = C.BLOCK_DV if C.DV_PARTS == 1 else C.O_WIDE
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O_WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)

    first, last, n_begin, n_end, my_begin, my_end, full_begin, full_end = own_range(
        C, W, work, block, schedule
    )
    positions, head = own_rows(C, work, first, row_layout)
    slope = slope_of(C, work, head, pointers, schedule)
    modifiers = row_modifiers(C, work, block, first, bias, pointers, schedule)
    if C.LISTED:  # visits take the place of blocks
        listed = modifiers.blocks
        n_begin, n_end = 0, listed.count
        my_begin, my_end, full_begin, full_end = 0, listed.count, 0, listed.count - listed.masked_count
    elif C.MASK_MOD is not None:  # whatever it hides
        full_begin, full_end = my_begin, my_begin
    rows = mask_rows(C, work, positions, slope, schedule, modifiers)
    m = first_maximum(C, head, pointers, row_layout)
    o = zero_output(C, O_WIDTH)
    l = first_sums(C, s_layout)

    i = skip_blocks(n_end - my_end, i, k, v, ping_pong, W, bias, C.HAS_BIAS)
    q_part, q_tile, q_head = own_queries(C, W, q, j, s_layout)
    if C.HAS_RIGHT and C.BLOCK_N > WARPGROUP_ROWS:
        whole = whole_end(C, work, last, my_begin, my_end, schedule)
        HALF: gl.constexpr = C.BLOCK_N // 2
        o, l, m, i = attend_masked(
            C, W, HALF, o, l, m, i, my_end, whole, q_tile, q_head, k, v, ping_pong, rows, numbers, dtype
        )
        my_end = whole
    n = my_end - 1
    CUTS_FIRST: gl.constexpr = C.HAS_RIGHT or (C.HAS_CUTS and not C.LISTED)
    if CUTS_FIRST:
        n = min(max(full_end, my_begin), my_end - 1)
        o, l, m, i = attend_masked(
            C, W, C.BLOCK_N, o, l, m, i, my_end, n + 1, q_tile, q_head, k, v, ping_pong, rows, numbers, dtype
        )

    # The first block of the pipeline, the only one of it that an edge may cut.
    MAY_BE_CUT: gl.constexpr = C.HAS_LEFT or C.HAS_RIGHT or not C.EVEN_N or C.HAS_CUTS
    s, bits = block_scores(
        C, W, C.BLOCK_N, MAY_BE_CUT, i, n, q_tile, q_head, k, ping_pong, rows, numbers, s_layout
    )
    weights, m, alpha = online_softmax(C, s, m, numbers.scale_log2)
    l = scale_rows(l, alpha) + quad_sums(weights)
    if CUTS_FIRST:
        o = scale_output(C, o, alpha)
    p = gl.convert_layout(drop_probabilities(C, weights.to(dtype), bits, rows), p_layout)
    i += 1
    full_begin = min(full_begin, n)
    o, l, m, p, i = attend_unmasked(
        C, W, o, l, m, p, i, n, full_begin, q_tile, q_head, k, v, ping_pong, rows, numbers, s_layout,
        p_layout, full_end,
    )  # fmt: skip
    o = pv_product(C, p, tile_of_v(C, v, i - 1), o)
    if C.HAS_LEFT:
        o = pv_wait(C, o)
        v.release(i - 1)
        o, l, m, i = attend_masked(
            C, W, C.BLOCK_N, o, l, m, i, full_begin, my_begin, q_tile, q_head, k, v, ping_pong, rows, numbers,
            dtype,
        )  # fmt: skip
    if not C.Q_HOLDS_O:
        q.release(j)

    sums = gl.convert_layout(gl.sum(l, 1), row_layout)
    store_lse(C, m * LN_2 + gl.log(sums), work, head, positions, pointers, schedule)
    if not C.HAS_LEFT:
        o = pv_wait(C, o)
        v.release(i - 1)
    i = skip_blocks(my_begin - n_begin, i, k, v, ping_pong, W, bias, C.HAS_BIAS)
    kept = 1.0
    if C.HAS_DROPOUT:
        kept = numbers.keep_scale
    o = round_output(C, scale_output(C, o, gl.where(sums > 0, kept / sums, 0.0)), o_desc.dtype)
    store_tile(C, W, o, q, q_part, j, o_tiles, o_desc, work, first)
    return i
