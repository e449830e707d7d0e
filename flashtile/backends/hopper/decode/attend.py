"""A part of a work tile of attention over a cache: 64 query rows, in the forward's own steps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from flashtile.backends.hopper import work_queue
from flashtile.backends.hopper.channels import make_ping_pong
from flashtile.backends.hopper.decode.convert import query_operand, scales_of_head
from flashtile.backends.hopper.decode.results import store_partial, store_whole
from flashtile.backends.hopper.decode.rows import mask_rows, own_range, own_rows
from flashtile.backends.hopper.forward.attend import attend_masked, attend_unmasked, skip_blocks
from flashtile.backends.hopper.forward.products import pv_product, qk_product, scale_rows
from flashtile.backends.hopper.forward.schedule import WARPGROUP_ROWS
from flashtile.backends.hopper.forward.scores import LN_2, apply_score_mod, mask, online_softmax, quad_sums
from flashtile.backends.portable.decode.schedule import sequence_of


@gluon.jit
def store_part(C: gl.constexpr, o, m, sums, v_scale, part, own, call):
    """Normalise a part of a work tile, and write it where it belongs."""
    factor = gl.full([WARPGROUP_ROWS], 1.0, gl.float32, m.type.layout)
    if C.SINK:  # it enters once: here, or where parts are combined
        sink = gl.load(call.pointers.sink + own.head).to(gl.float32) * (1 / LN_2)
        top = gl.maximum(m, sink)
        shift = gl.where(top == float("-inf"), 0.0, top)
        with_sink = sums * gl.exp2(m - shift) + gl.exp2(sink - shift)
        sums = gl.where(part.whole, with_sink, sums)
        factor = gl.where(part.whole, gl.exp2(m - shift), factor)
        m = gl.where(part.whole, top, m)
    if C.DESCALE == "head" or C.DESCALE == "sequence":
        factor = factor * v_scale
    empty = sums == 0.0
    total = gl.where(empty, 1.0, sums)
    lse = gl.where(empty, float("-inf"), m + gl.log2(total))
    o = scale_rows(o, factor / total)
    if C.SPLIT:
        if part.whole:
            store_whole(C, o, lse, part.work, own, call)
        else:
            store_partial(C, o, lse, part.slot, own, call)
    else:
        store_whole(C, o, lse, part.work, own, call)


@gluon.jit
def attend_part(
    C: gl.constexpr, W: gl.constexpr, part, i, j, q, k, v, faults, call, numbers, dtype: gl.constexpr
):
    """A part of a work tile for the 64 rows of warpgroup W; to out and lse if it is the whole work tile, else
    to its partial result.

    ``i`` counts the program's n_blocks, ``j`` its parts of work tiles: the uses of their channels. Returns
    the new ``i``.
    """
    ROWS: gl.constexpr = WARPGROUP_ROWS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    ping_pong = make_ping_pong(1)
    work, n_begin, n_end, _, _ = part
    lengths = call.lengths

    my_begin, my_end, full_begin, full_end = own_range(C, W, work, n_begin, n_end, lengths)
    own = own_rows(C, W, work, lengths, row_layout)
    slope = 0.0
    if C.ALIBI:
        b, _ = sequence_of(work.m_block, lengths, C)
        slope = gl.load(call.pointers.alibi_slopes + b * call.outer.alibi_stride + own.head) * (1 / LN_2)
    rows = mask_rows(C, work, own, slope, call)
    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    o = gl.full([ROWS, C.BLOCK_DV], 0.0, gl.float32, o_layout)
    l = quad_sums(gl.full([ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout))

    i = skip_blocks(n_end - my_end, i, k, v, ping_pong, W)
    q_tile = q.tiles.index(q.wait(j) * C.WARPGROUPS + W).reshape([ROWS, C.BLOCK_D])
    v_scale = 1.0
    if C.E4M3:
        k_scale, v_scale = scales_of_head(C, work, call)
        q_tile, numbers = query_operand(C, q_tile, k, k_scale, numbers, row_layout)
    n = my_end - 1
    if C.HAS_RIGHT or C.HAS_TREE:
        n = min(max(full_end, my_begin), my_end - 1)
        o, l, m, i = attend_masked(
            C, W, C.BLOCK_N, o, l, m, i, my_end, n + 1, q_tile, q_tile, k, v, ping_pong, rows, numbers, dtype
        )

    # The first n_block of the pipeline, the only one of it that may be cut.
    s = qk_product(C, C.BLOCK_N, q_tile, q_tile, k.tiles.index(k.wait(i)), s_layout)
    s = warpgroup_mma_wait(0, deps=[s])
    k.release(i)
    s = apply_score_mod(C, s, n, rows, numbers, s_layout)
    s = mask(C, s, n, rows, s_layout)
    weights, m, alpha = online_softmax(C, s, m, numbers.scale_log2)
    l = scale_rows(l, alpha) + quad_sums(weights)
    if C.HAS_RIGHT or C.HAS_TREE:
        o = scale_rows(o, alpha)
    p = gl.convert_layout(weights.to(dtype), p_layout)
    i += 1
    full_begin = min(full_begin, n)
    o, l, m, p, i = attend_unmasked(
        C, W, o, l, m, p, i, n, full_begin, q_tile, q_tile, k, v, ping_pong, rows, numbers, s_layout, p_layout
    )
    o = pv_product(C, p, v.tiles.index(v.wait(i - 1)), o)
    if C.HAS_LEFT:
        o = warpgroup_mma_wait(0, deps=[o])
        v.release(i - 1)
        o, l, m, i = attend_masked(
            C, W, C.BLOCK_N, o, l, m, i, full_begin, my_begin, q_tile, q_tile, k, v, ping_pong, rows, numbers,
            dtype,
        )  # fmt: skip
    q.release(j)
    sums = gl.convert_layout(gl.sum(l, 1), row_layout)
    if not C.HAS_LEFT:
        o = warpgroup_mma_wait(0, deps=[o])
        v.release(i - 1)
    i = skip_blocks(my_begin - n_begin, i, k, v, ping_pong, W)

    fault = work_queue.take(faults, j, 4) | work.sequence.fault
    sums = gl.where(fault == 0, sums, float("nan"))
    store_part(C, o, m, sums, v_scale, part, own, call)
    return i
