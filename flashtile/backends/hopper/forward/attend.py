"""A tile of the Hopper forward: 64 query rows of a block, from shared memory to out and lse."""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.constants import (
    LOG2_E,
    WARPGROUP_ROWS,
    accumulator_layout,
    left_operand_layout,
)
from flashtile.backends.hopper.forward.products import (
    own_queries,
    pv_product,
    pv_wait,
    qk_block,
    qk_wait,
    rescale_output,
    round_output,
    scale_output,
    scale_rows,
    tile_of_v,
    zero_output,
)
from flashtile.backends.hopper.forward.rows import mask_rows, own_rows, row_modifiers, rows_in
from flashtile.backends.hopper.forward.schedule import OwnBlocks, own_range, whole_end
from flashtile.backends.hopper.forward.scores import (
    apply_score_mod,
    drop_probabilities,
    dropout_bits,
    load_bias,
    mask,
    online_softmax,
    quad_sums,
    release_bias,
    to_log2,
    to_natural,
    visited,
)
from flashtile.backends.hopper.forward.tiles import store_lse, store_tile
from flashtile.backends.hopper.inline_asm import copy_registers, pin
from flashtile.backends.hopper.modifiers.functions import load_columns
from flashtile.backends.hopper.work_tiles import slope_of


class QueryTile(NamedTuple):
    """Inputs of the loops over blocks of keys, for 64 query rows."""

    q: Any
    """[64, BLOCK_D] in shared memory; a tuple of tiles if D_PARTS > 1."""
    q_head: Any
    """The first Q_IN_REGISTERS columns of q, in registers."""
    k: Any
    v: Any
    """Channels of blocks of keys and values."""
    ping_pong: Any
    rows: Any
    """:class:`~flashtile.backends.hopper.forward.rows.Rows`."""
    numbers: Any
    """Floats of the launch, as :class:`~flashtile.backends.hopper.forward.schedule.ForwardNumbers`."""


class SoftmaxState(NamedTuple):
    """The online softmax of 64 query rows after some blocks of keys."""

    o: Any
    """Output, not yet divided by the sums; a tuple of two accumulators if DV_PARTS > 1."""
    l: Any
    """[64, 4]: for each row, the sums of the probabilities that each of its four threads holds."""
    m: Any
    """[64]: maximum of the scores, in log2 units."""


@gluon.constexpr_function
def output_layout(C):
    """Return the register layout of O. If DV_PARTS > 1, it is the layout of the first accumulator of O."""
    return accumulator_layout(C.BLOCK_DV if C.DV_PARTS == 1 else C.O_WIDE)


@gluon.jit
def attend_unmasked(C: gl.constexpr, W: gl.constexpr, tile, state, p, i, n_from, n_to, n_masked=0):
    """Attend to blocks n_from - 1 down to n_to, which no edge of the mask cuts.

    If there is a block mask (LISTED), it is applied to blocks n >= n_masked. Q K^T of block n overlaps P V of
    block n + 1, the block of the previous iteration. ``p`` is P of block n_from. Block n_from - 1 is the
    ``i``-th in the channels of k and v. Returns the new state, P of block n_to, and the new ``i``.
    """
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N)
    p_layout: gl.constexpr = left_operand_layout(output_layout(C))
    k, v, ping_pong, rows, numbers = tile.k, tile.v, tile.ping_pong, tile.rows, tile.numbers
    o, l, m = state
    for n in range(n_from - 1, n_to - 1, -1):
        ping_pong.wait(W, i)
        s = qk_block(C, C.BLOCK_N, tile.q, tile.q_head, k, i, s_layout)
        o = pv_product(C, p, tile_of_v(C, v, i - 1), o)
        ping_pong.pass_on(W)
        block, is_full = visited(C, rows, n)
        columns = load_columns(C, block, rows, C.BLOCK_N)
        bits = dropout_bits(C, rows, block, C.BLOCK_N, s_layout)
        added = load_bias(C, W, C.BLOCK_N, rows, i, s_layout)
        s = qk_wait(C, s, k, i, 1 if C.DV_PARTS == 1 else 2)
        added = release_bias(C, rows, i, added)
        s = apply_score_mod(C, s, block, rows, numbers, s_layout, added)
        if C.LISTED:  # noqa: SIM102 - a constexpr condition needs an if of its own
            if n >= n_masked:
                s = mask(C, s, block, rows, s_layout, is_full, columns, C.EVEN_N)
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
    return SoftmaxState(o, l, m), p, i


@gluon.jit
def block_scores(
    C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, MASKED: gl.constexpr, tile, rows, i, n
):  # fmt: skip
    """Return (scores of the first ``WIDTH`` keys of block ``n``, random bits for dropout).

    Scores are Q K^T with all modifiers, and with the mask if MASKED. Block ``n`` is the ``i``-th in the
    channel of k, counted from 0. ``rows`` are the query tile's rows in the layout of these scores.
    """
    s_layout: gl.constexpr = accumulator_layout(WIDTH)
    tile.ping_pong.wait(W, i)
    s = qk_block(C, WIDTH, tile.q, tile.q_head, tile.k, i, s_layout)
    tile.ping_pong.pass_on(W)
    block, is_full = visited(C, rows, n)
    columns = load_columns(C, block, rows, WIDTH)
    bits = dropout_bits(C, rows, block, WIDTH, s_layout)
    added = load_bias(C, W, WIDTH, rows, i, s_layout)
    s = qk_wait(C, s, tile.k, i, 0)
    added = release_bias(C, rows, i, added)
    s = apply_score_mod(C, s, block, rows, tile.numbers, s_layout, added)
    if MASKED:
        s = mask(C, s, block, rows, s_layout, is_full, columns, not C.LISTED)
    return s, bits


@gluon.jit
def attend_masked(C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, tile, state, i, n_from, n_to):
    """Attend to the first ``WIDTH`` keys of blocks n_from - 1 down to n_to, which an edge of the mask cuts.

    ``i`` counts the key blocks that have passed through the channels of k and v. Returns the new state and
    the new ``i``. Q K^T and P V do not overlap here, because such blocks are few. To overlap them, this loop
    would have to pass P to the loop over unmasked blocks, and both loops would repack P in every step.
    """
    p_layout: gl.constexpr = left_operand_layout(output_layout(C))
    row: gl.constexpr = gl.SliceLayout(1, accumulator_layout(WIDTH))
    rows = rows_in(C, tile.rows, row)
    v = tile.v
    o, l, m = state
    for n in range(n_from - 1, n_to - 1, -1):
        s, bits = block_scores(C, W, WIDTH, True, tile, rows, i, n)
        weights, m_new, alpha = online_softmax(C, s, gl.convert_layout(m, row), tile.numbers.scale_log2)
        m = gl.convert_layout(m_new, m.type.layout)
        l = scale_rows(l, alpha) + gl.convert_layout(quad_sums(weights), l.type.layout)
        p = gl.convert_layout(drop_probabilities(C, weights.to(v.tiles.dtype), bits, rows), p_layout)
        o = pv_product(C, p, tile_of_v(C, v, i), scale_output(C, o, alpha))
        o = pv_wait(C, o)
        v.release(i)
        i += 1
    return SoftmaxState(o, l, m), i


@gluon.jit
def attend_blocks(C: gl.constexpr, W: gl.constexpr, tile, state, i, blocks):
    """Attend to all ``blocks`` (:class:`~flashtile.backends.hopper.forward.schedule.OwnBlocks`) of a tile.

    Blocks under the right edge of the mask come first, then those that every row sees, then those under the
    left edge. ``i`` counts the key blocks that have passed through the channels of k and v. Returns the new
    state and the new ``i``. Without HAS_LEFT, the last P V is still in flight.
    """
    begin, end, full_begin, full_end = blocks
    CUTS_FIRST: gl.constexpr = C.HAS_RIGHT or C.HAS_TREE or (C.HAS_CUTS and not C.LISTED)
    n = end - 1
    if CUTS_FIRST:
        n = min(max(full_end, begin), end - 1)
        state, i = attend_masked(C, W, C.BLOCK_N, tile, state, i, end, n + 1)

    # An edge of the mask may cut the first block of the pipeline, but not the blocks after it.
    MAY_BE_CUT: gl.constexpr = C.HAS_LEFT or C.HAS_RIGHT or not C.EVEN_N or C.HAS_CUTS
    s, bits = block_scores(C, W, C.BLOCK_N, MAY_BE_CUT, tile, tile.rows, i, n)
    o, l, m = state
    weights, m, alpha = online_softmax(C, s, m, tile.numbers.scale_log2)
    l = scale_rows(l, alpha) + quad_sums(weights)
    if CUTS_FIRST:
        o = scale_output(C, o, alpha)
    dropped = drop_probabilities(C, weights.to(tile.v.tiles.dtype), bits, tile.rows)
    p = gl.convert_layout(dropped, left_operand_layout(output_layout(C)))
    i += 1
    full_begin = min(full_begin, n)
    state, p, i = attend_unmasked(C, W, tile, SoftmaxState(o, l, m), p, i, n, full_begin, full_end)
    o, l, m = state
    o = pv_product(C, p, tile_of_v(C, tile.v, i - 1), o)
    if C.HAS_LEFT:
        o = pv_wait(C, o)
        tile.v.release(i - 1)
        return attend_masked(C, W, C.BLOCK_N, tile, SoftmaxState(o, l, m), i, full_begin, begin)
    else:
        return SoftmaxState(o, l, m), i


@gluon.jit
def skip_blocks(
    count, i, k, v, ping_pong, W: gl.constexpr, bias=0, HAS_BIAS: gl.constexpr = False,
    K_BY_PARTS: gl.constexpr = False,
):  # fmt: skip
    """Release ``count`` blocks of keys that no row of this warpgroup sees, and return the new ``i``.

    With HAS_BIAS, the same number of tiles of the bias is released. With K_BY_PARTS, ``k`` is a tuple of
    channels.
    """
    for _ in range(count):
        ping_pong.wait(W, i)
        ping_pong.pass_on(W)
        if K_BY_PARTS:
            for part in gl.static_range(len(k)):
                k[part].wait(i)
                k[part].release(i)
        else:
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
def first_state(C: gl.constexpr, head, pointers):
    """Return the :class:`SoftmaxState` before the first block.

    With a sink, the sink's score is the first maximum of a row, so its unnormalised probability is 1. A
    quarter of it is added to each of the row's four partial sums (one for each thread that shares the row).
    """
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N)
    m = gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    if C.SINK:
        sink = gl.load(pointers.sink + head).to(gl.float32)
        m = sink * to_log2(C, sink, LOG2_E)
    o = zero_output(C, C.BLOCK_DV if C.DV_PARTS == 1 else C.O_WIDE)
    l = quad_sums(gl.full([WARPGROUP_ROWS, C.BLOCK_N], 0.0, gl.float32, s_layout))
    if C.SINK:
        l += 0.25
    return SoftmaxState(o, l, m)


@gluon.jit
def attend_tile(C: gl.constexpr, W: gl.constexpr, channels, ping_pong, output, work, block, i, j, call):
    """Compute and store out and lse of 64 rows: those of warpgroup W in ``block`` of work tile ``work``.

    ``i`` counts the blocks of keys that have passed through the channels of k and v, ``j`` the blocks of
    queries that have passed through the channel of q. Returns the new ``i``.
    """
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_N)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    q, k, v, bias = channels
    pointers, schedule, numbers = call

    first, last, n_begin, n_end, own = own_range(C, W, work, block, schedule)
    positions, head = own_rows(C, work, first, row_layout)
    slope = slope_of(C, work, head, pointers, schedule)
    modifiers = row_modifiers(C, work, block, first, bias, pointers, schedule)
    if C.LISTED:  # blocks are numbered by their order in the block mask's list
        listed = modifiers.blocks
        n_begin, n_end = 0, listed.count
        own = OwnBlocks(0, listed.count, 0, listed.count - listed.masked_count)
    elif C.MASK_MOD is not None:  # any key may be hidden
        own = OwnBlocks(own.begin, own.end, own.begin, own.begin)
    rows = mask_rows(C, work, positions, slope, schedule, modifiers)
    state = first_state(C, head, pointers)

    i = skip_blocks(n_end - own.end, i, k, v, ping_pong, W, bias, C.HAS_BIAS, C.K_BY_PARTS)
    q_part, q_tile, q_head = own_queries(C, W, q, j, s_layout)
    tile = QueryTile(q_tile, q_head, k, v, ping_pong, rows, numbers)
    if C.HAS_RIGHT and C.BLOCK_N > WARPGROUP_ROWS:
        whole = whole_end(C, work, last, own.begin, own.end, schedule)
        HALF: gl.constexpr = C.BLOCK_N // 2
        state, i = attend_masked(C, W, HALF, tile, state, i, own.end, whole)
        own = OwnBlocks(own.begin, whole, own.full_begin, own.full_end)
    state, i = attend_blocks(C, W, tile, state, i, own)
    if not C.Q_HOLDS_O:
        q.release(j)

    o, l, m = state
    sums = gl.convert_layout(gl.sum(l, 1), row_layout)
    store_lse(C, to_natural(C, m) + gl.log(sums), work, head, positions, pointers, schedule)
    if not C.HAS_LEFT:
        o = pv_wait(C, o)
        v.release(i - 1)
    i = skip_blocks(own.begin - n_begin, i, k, v, ping_pong, W, bias, C.HAS_BIAS, C.K_BY_PARTS)
    kept = 1.0
    if C.HAS_DROPOUT:
        kept = numbers.keep_scale
    o = round_output(C, scale_output(C, o, gl.where(sums > 0, kept / sums, 0.0)), output.desc.dtype)
    store_tile(C, W, o, q, q_part, j, output, work, first)
    return i
