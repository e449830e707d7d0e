"""Attention over a cache: what one consumer warpgroup computes for its 64 rows of a part of a work tile.

The loops over n_blocks are those of the forward kernel (``hopper.forward.kernel``).
"""

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper import work_queue
from flashtile.backends.hopper.channels import make_ping_pong
from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.constants import LN_2, LOG2_E, WARPGROUP_ROWS, accumulator_layout
from flashtile.backends.hopper.decode.convert import query_operand, scales_of_head
from flashtile.backends.hopper.decode.rows import mask_rows, own_range, own_rows
from flashtile.backends.hopper.forward.kernel import (
    QueryTile,
    SoftmaxState,
    attend_blocks,
    finish_blocks,
    quad_sums,
    scale_rows,
    skip_blocks,
    zero_output,
)
from flashtile.backends.portable.decode.schedule import sequence_of


@gluon.jit
def store_rows(C: gl.constexpr, base, rows, exists, o):
    """Store the rows of o [64, BLOCK_DV] for which ``exists`` is true. Row i goes to row ``rows[i]`` of the
    matrix at ``base``."""
    layout: gl.constexpr = o.type.layout
    columns = gl.arange(0, C.BLOCK_DV, layout=gl.SliceLayout(0, layout))
    offsets = gl.convert_layout(rows, gl.SliceLayout(1, layout)) * C.HEAD_DIM_V
    exists = gl.convert_layout(exists, gl.SliceLayout(1, layout))
    inside = exists[:, None] & (columns < C.HEAD_DIM_V)[None, :]
    gl.store(base + offsets[:, None] + columns[None, :], o.to(base.dtype.element_ty), mask=inside)


@gluon.jit
def store_whole(C: gl.constexpr, o, lse, work, rows, call):
    """Store normalised o [64, BLOCK_DV] and lse [64] of a whole work tile to out and lse.

    The argument ``lse`` is in base 2. It is stored in base e.
    """
    lengths = call.lengths
    num_heads_q = lengths.num_heads_kv * C.PACK
    b, _ = sequence_of(work.m_block, lengths, C)
    if C.VARLEN:
        tokens = work.sequence.start_q.to(gl.int64) + rows.token
        lse_rows = rows.head.to(gl.int64) * lengths.total_q + tokens
    else:
        tokens = b.to(gl.int64) * lengths.seqlen_q + rows.token
        lse_rows = (b.to(gl.int64) * num_heads_q + rows.head) * lengths.seqlen_q + rows.token
    gl.store(call.pointers.lse + lse_rows, lse * LN_2, mask=rows.exists)
    store_rows(C, call.pointers.out, tokens * num_heads_q + rows.head, rows.exists, o)


@gluon.jit
def store_partial(C: gl.constexpr, o, lse, slot, rows, call):
    """Store o and lse (base 2) to ``slot`` of the partial results (``portable.decode.combine``)."""
    splits = call.splits
    partial = call.pointers.partial
    partial_rows = slot.to(gl.int64) * splits.partial_rows + rows.index
    partial_lse = partial + splits.slots.to(gl.int64) * splits.partial_rows * C.HEAD_DIM_V
    gl.store(partial_lse + partial_rows, lse, mask=rows.exists)
    store_rows(C, partial, partial_rows, rows.exists, o)


@gluon.jit
def store_part(C: gl.constexpr, o, m, sums, v_scale, part, own, call):
    """Normalise and store the result of a part.

    If the part is the whole work tile, the result goes to out and lse, otherwise to the slot of the part in
    the partial results.

    Args:
        o: [64, BLOCK_DV], the accumulator of the output.
        m: [64], row maxima in log2 units.
        sums: [64], row sums.
    """
    factor = gl.full([WARPGROUP_ROWS], 1.0, gl.float32, m.type.layout)
    if C.SINK:  # the sink is added once per row: here, or when parts are combined
        sink = gl.load(call.pointers.sink + own.head).to(gl.float32) * LOG2_E
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
def attend_part(C: gl.constexpr, W: gl.constexpr, part, i, j, q, k, v, faults, call, numbers):
    """Compute and store warpgroup W's 64 rows of ``part``, a part of a work tile.

    ``i`` counts the n_blocks that have passed through the channels of k and v. ``j`` counts the parts of work
    tiles that the program has computed. Returns the new ``i``.
    """
    ROWS: gl.constexpr = WARPGROUP_ROWS
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    ping_pong = make_ping_pong(1)
    work, n_begin, n_end, _, _ = part
    lengths = call.lengths

    blocks = own_range(C, W, work, n_begin, n_end, lengths)
    own = own_rows(C, W, work, lengths, row_layout)
    slope = 0.0
    if C.ALIBI:
        b, _ = sequence_of(work.m_block, lengths, C)
        slope = gl.load(call.pointers.alibi_slopes + b * call.outer.alibi_stride + own.head) * LOG2_E
    rows = mask_rows(C, work, own, slope, call)
    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    o = zero_output(C)
    l = quad_sums(gl.full([ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout))

    i = skip_blocks(n_end - blocks.end, i, k, v, ping_pong, W)
    q_tile = q.tiles.index(q.wait(j) * C.WARPGROUPS + W).reshape([ROWS, C.BLOCK_D])
    v_scale = 1.0
    if C.E4M3:
        k_scale, v_scale = scales_of_head(C, work, call)
        q_tile, numbers = query_operand(C, q_tile, k, k_scale, numbers, row_layout)
    tile = QueryTile(q_tile, q_tile, k, v, ping_pong, rows, numbers)
    state, i = attend_blocks(C, W, tile, SoftmaxState(o, l, m), i, blocks)
    q.release(j)
    o, l, m = state
    sums = gl.convert_layout(gl.sum(l, 1), row_layout)
    o = finish_blocks(C, v, i, o)
    i = skip_blocks(blocks.begin - n_begin, i, k, v, ping_pong, W)

    fault = work_queue.take(faults, j, 4) | work.sequence.fault
    sums = gl.where(fault == 0, sums, float("nan"))
    store_part(C, o[0], m, sums, v_scale, part, own, call)
    return i
