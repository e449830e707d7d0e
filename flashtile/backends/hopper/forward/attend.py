"""A tile of the Hopper forward: 64 query rows of a block, from shared memory to out and lse."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from flashtile.backends.hopper.columns import store_part
from flashtile.backends.hopper.dropout.cells import generator_of
from flashtile.backends.hopper.forward.products import (
    load_parts,
    output_parts,
    parts_of,
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
from flashtile.backends.hopper.forward.rows import mask_rows, own_rows, rows_in
from flashtile.backends.hopper.forward.schedule import WARPGROUP_ROWS, own_range, whole_end
from flashtile.backends.hopper.forward.scores import (
    LN_2,
    apply_score_mod,
    drop_cells,
    dropout_words,
    load_bias,
    mask,
    online_softmax,
    quad_sums,
    release_bias,
    visited,
)
from flashtile.backends.hopper.forward.tiles import store_lse, store_parts, store_rows
from flashtile.backends.hopper.inline_asm import copy_registers, pin
from flashtile.backends.hopper.mods.cells import query_mods


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
