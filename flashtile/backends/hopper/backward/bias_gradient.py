"""The gradient of an additive bias, which comes from one of three kernels.

* The backward kernel stores dS if each element of the bias belongs to one score (:func:`writes_ds`). A bias
  with its gradient then costs 1.34 backward passes without one; ``gradient_kernel`` took 2.73 (head_dim 64).
* ``gradient_kernel``, below, recomputes the probabilities for other dense calls (:func:`has_own_gradient`).
* The portable backend's kernel serves the rest, such as packed sequences.

``gradient_kernel`` computes dS = P * (dP - delta), summed over the sequences and heads that share the bias. A
work tile is 128 rows by 128 keys of the bias. Its program visits the sequences and query heads that share
this tile, recomputes their P and dP, and sums dS in registers. It needs no atomics and no dS in global
memory. Two *consumer* warpgroups own 64 rows each. A *producer* warp loads the operands of one product at a
time: q, k and -lse, then dO, v and -delta. Product ``i`` has one slot of the ring:

    producer       q k -lse   dO v -delta   q k -lse of the next head   dO v -delta ...
    consumer 0, 1  [   S   ][   dP   ]      (  P  )  ds += P (dP - delta)
                   release slot of S        release slot of dP

            slots    written by, full after              read by, empty after
    ring    STAGES   TMA: rows, keys, a number for each  both consumers: the product, and their numbers
    bias    1        TMA: a tile for each consumer       both consumers: TMA has stored dbias from it

The bias has one tile for each consumer, which also holds the tile of dbias until TMA has stored it.

The module is read from top to bottom: the kernel and its work tiles, the producer, a consumer, zeros for
blocks that the backward kernel skips, the launches.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from flashtile.backends.common.config import contiguous_strides
from flashtile.backends.common.jit import gluon_kernel, kernel, triton
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tma import View, cells_view, dense_view
from flashtile.backends.hopper.backward.config import BackwardVariant
from flashtile.backends.hopper.backward.kernel import BackwardDescriptors, BackwardNumbers, soft_cap
from flashtile.backends.hopper.backward.preprocess import statistics_shape, statistics_view
from flashtile.backends.hopper.compat import async_load, async_store, gluon
from flashtile.backends.hopper.config import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    padded_columns,
    persistent_programs,
    score_numbers,
)
from flashtile.backends.hopper.inline_asm import to_fp32, wait_for_numbers
from flashtile.backends.hopper.layouts import (
    LOG2_E,
    WARPGROUP_ROWS,
    accumulator_layout,
    count_products,
    product_of_rows,
)
from flashtile.backends.hopper.masking import hide_by_window
from flashtile.backends.hopper.modifiers import own_sizes
from flashtile.backends.hopper.pipeline import make_channel, make_ring
from flashtile.problems.attention import Problem
from flashtile.problems.masking import MaskConstants


@dataclass(frozen=True)
class BiasGradientVariant(MaskConstants):
    """Compile-time parameters of the kernel of the bias's gradient."""

    SOFTCAP: bool
    SCALED_SCORES: bool
    """Scores are more than raw products times a positive scale (``BackwardVariant``)."""
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    """Columns of all operands in shared memory."""
    STAGES: int
    """Number of slots of the ring. A slot has rows, keys and statistics of one product."""
    PRODUCTS: int
    """Number of wgmma products that dO V^T takes (``count_products``)."""
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    BLOCK_M: int = 128
    BLOCK_N: int = 128


class BiasGradientSizes(NamedTuple):
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
    mask: Any
    """A :class:`~flashtile.problems.masking.KernelMask`."""
    offset: Any
    """seqlen_k - seqlen_q."""


@gluon_kernel(do_not_specialize=("sizes",))
def gradient_kernel(
    q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, bias_desc, dbias_desc, sizes, numbers,
    lse_scale, C: gl.constexpr,
):  # fmt: skip
    """Compute dbias, which has the shape of the bias. Grid: at most one program per multiprocessor."""
    # The ring has (slots, readers, tiles of a slot). ``keys`` and ``statistics`` have no barriers of their
    # own: they fill and empty with its slots.
    ring = make_channel(q_desc, C.STAGES, 2, 1)
    keys = gl.allocate_shared_memory(k_desc.dtype, [C.STAGES] + k_desc.block_type.shape, k_desc.layout)
    statistics = gl.allocate_shared_memory(
        gl.float32, [C.STAGES] + neg_lse_desc.block_type.shape, neg_lse_desc.layout
    )
    tiles = gl.allocate_shared_memory(bias_desc.dtype, [2] + bias_desc.block_type.shape, bias_desc.layout)
    bias = make_ring(tiles, 1, 2)  # no room for a second slot: operands take the rest (GRADIENT_STAGES)
    descs = BackwardDescriptors(q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, bias_desc)
    # Registers as in the backward kernel. A consumer has S, dP and the sum, 64 a thread each.
    gl.warp_specialize(
        [
            (consumer, (C, 0, ring, keys, statistics, bias, dbias_desc, sizes, numbers, lse_scale)),
            (consumer, (C, 1, ring, keys, statistics, bias, dbias_desc, sizes, numbers, lse_scale)),
            (producer, (C, ring, keys, statistics, bias, descs, sizes)),
        ],
        [4, 1],
        [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
    )  # fmt: skip


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
    # Tiles of 128 x 256 keys were measured: a backward with this kernel took 1.78 to 2.24 times as long as
    # one without a bias, not 1.65 to 1.89 times.
    key = tile_index % sizes.key_blocks * C.BLOCK_N
    rest = tile_index // sizes.key_blocks
    row = rest % sizes.row_blocks * C.BLOCK_M
    rest = rest // sizes.row_blocks
    rounds = (sizes.batch // sizes.bias_batch) * (sizes.num_heads // sizes.bias_heads)
    # A tile that the mask hides has no terms; the consumer stores its zeros.
    position = row + sizes.offset
    if C.HAS_RIGHT:
        rounds = gl.where(key > position + C.BLOCK_M - 1 + sizes.mask.window_right, 0, rounds)
    if C.HAS_LEFT:
        rounds = gl.where(key + C.BLOCK_N <= position - sizes.mask.window_left, 0, rounds)
    return BiasTile(rest // sizes.bias_heads, rest % sizes.bias_heads, row, key, rounds)


# The producer.


@gluon.jit
def producer(C: gl.constexpr, ring, keys, statistics, bias, descs, sizes):
    """Load the operands of the work tiles, in the order in which the consumers use them."""
    q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, bias_desc = descs
    i = 0
    t = 0
    heads = sizes.num_heads // sizes.bias_heads
    # Fixed tiles for each program: those that the mask does not hide cost the same. A queue was not measured.
    for tile_index in range(gl.program_id(0), sizes.num_tiles, gl.num_programs(0)):
        tile = find_tile(C, tile_index, sizes)
        slot = bias.acquire(t)  # both consumers have stored dbias of the work tile before
        barrier = bias.full.index(slot)
        mbarrier.expect(barrier, 2 * bias_desc.block_type.nbytes)
        for w in gl.static_range(2):
            row = tile.row + w * WARPGROUP_ROWS
            async_load(bias_desc, [tile.sequence, tile.head, row, tile.key], barrier, bias.tiles.index(w))
        for n in range(tile.rounds):
            # A bias that sequences or heads share has index 0 of them, so n counts from the first one.
            # Otherwise n adds nothing: ``rounds`` and ``heads`` have the factor 1.
            b, head = tile.sequence + n // heads, tile.head + n % heads
            load_operands(q_desc, k_desc, neg_lse_desc, ring, keys, statistics, i, tile, b, head, sizes)
            load_operands(
                do_desc, v_desc, neg_delta_desc, ring, keys, statistics, i + 1, tile, b, head, sizes
            )
            i += 2
        t += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def load_operands(rows_desc, keys_desc, statistics_desc, ring, keys, statistics, i, tile, b, head, sizes):
    """Producer: load the operands of product ``i`` into the ring.

    They are rows of a query head, keys of its key head, and a number (-lse or -delta) for each row.
    """
    slot = ring.acquire(i)
    barrier = ring.full.index(slot)
    nbytes: gl.constexpr = (
        rows_desc.block_type.nbytes + keys_desc.block_type.nbytes + statistics_desc.block_type.nbytes
    )
    mbarrier.expect(barrier, nbytes)
    async_load(rows_desc, [b, tile.row, head, 0], barrier, ring.tiles.index(slot))
    async_load(keys_desc, [b, tile.key, head // sizes.group, 0], barrier, keys.index(slot))
    async_load(statistics_desc, [b * sizes.num_heads + head, tile.row], barrier, statistics.index(slot))


# A consumer.


@gluon.jit
def consumer(
    C: gl.constexpr, W: gl.constexpr, ring, keys, statistics, bias, dbias_desc, sizes, numbers, lse_scale
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
        bias.wait(t)  # here, because a tile without rounds is also stored through the memory of the bias
        ds = gl.full([WARPGROUP_ROWS, C.BLOCK_N], 0.0, gl.float32, layout)
        for _ in range(tile.rounds):
            # S first: wgmma completes in order, so P can be computed while dP is in flight. Both start from
            # 0: that they start at -lse and -delta, as in the backward kernel, was not measured here.
            s = product(C, W, C.HEAD_DIM, ring, keys, i, layout)
            dp = product(C, W, C.HEAD_DIM_V, ring, keys, i + 1, layout)
            # Loaded before the release of their slots. An arrival does not wait for loads, so TMA could
            # overwrite the statistics while they are read.
            neg_lse = wait_for_numbers(statistic_of_rows(C, W, statistics, i % C.STAGES, layout)) * lse_scale
            neg_delta = wait_for_numbers(statistic_of_rows(C, W, statistics, (i + 1) % C.STAGES, layout))
            s = warpgroup_mma_wait(C.PRODUCTS, deps=[s])  # dP may stay in flight during P
            ring.release(i)
            # Read again in each round: shared memory keeps the bias, registers keep the sum.
            added = to_fp32(own_bias.load(layout)) * LOG2_E + neg_lse[:, None]
            if C.SCALED_SCORES:
                s, _ = soft_cap(C, s, numbers)
                p = gl.exp2(s + added)
            else:
                p = gl.exp2(s * numbers.scale_log2 + added)
            dp = warpgroup_mma_wait(0, deps=[dp])
            ds = ds + p * (dp + neg_delta[:, None])
            ring.release(i + 1)
            i += 2
        ds = hide(C, W, ds, tile, sizes, layout)  # once: all terms of the sum have the same mask
        own_bias.store(ds.to(own_bias.dtype))  # all warps have read the bias here
        fence_async_shared()  # TMA reads through the asynchronous proxy
        row = tile.row + W * WARPGROUP_ROWS
        async_store(dbias_desc, [tile.sequence, tile.head, row, tile.key], bias.tiles.index(W))
        tma.store_wait(0)
        bias.release(t)  # TMA has read dbias, so the next bias may be loaded over it
        t += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def product(C: gl.constexpr, W: gl.constexpr, HEAD_DIM: gl.constexpr, ring, keys, i, layout: gl.constexpr):
    """Multiply warpgroup W's rows by the keys, as product ``i``. Return the accumulator [64, BLOCK_N].

    The wgmma instructions are asynchronous: wait for them before the accumulator is used.
    """
    slot = ring.wait(i)
    rows = ring.tiles.index(slot).reshape([C.BLOCK_M, C.BLOCK_D]).slice(W * WARPGROUP_ROWS, WARPGROUP_ROWS, 0)
    zero = gl.full([WARPGROUP_ROWS, C.BLOCK_N], 0.0, gl.float32, layout)
    # The tile has rows of both warpgroups, and keys that both multiply.
    return product_of_rows(rows, keys.index(slot).reshape([C.BLOCK_N, C.BLOCK_D]), zero, HEAD_DIM, False)


@gluon.jit
def statistic_of_rows(C: gl.constexpr, W: gl.constexpr, statistics, slot, layout: gl.constexpr):
    """Load a number (-lse or -delta) for each of warpgroup W's rows, [64]."""
    tile = statistics.index(slot).reshape([C.BLOCK_M]).slice(W * WARPGROUP_ROWS, WARPGROUP_ROWS)
    return tile.load(gl.SliceLayout(1, layout))


@gluon.jit
def hide(C: gl.constexpr, W: gl.constexpr, ds, tile, sizes, layout: gl.constexpr):
    """Set ``ds`` to 0 where a row does not see a key, and return it.

    ``ds`` is the sum of dS over the sequences and heads that share a work tile.
    """
    rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, layout))
    keys = gl.arange(0, C.BLOCK_N, layout=gl.SliceLayout(0, layout))[None, :]
    positions = rows + (tile.row + W * WARPGROUP_ROWS + sizes.offset - tile.key)
    return hide_by_window(C, ds, keys, positions, sizes.mask)


# Blocks that the backward kernel skips, where it writes the gradient.


ZERO_BLOCK = 128
"""Rows and keys of a block that is zeroed; no block of the backward is larger."""


@kernel(do_not_specialize=("seqlen_q", "row_blocks", "mask"))
def zero_hidden_kernel(
    dbias,
    seqlen_q,
    seqlen_k,
    row_blocks,
    mask,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write zeros to all blocks of ``dbias`` in which a mask hides scores.

    Some of these blocks also have visible scores; the backward overwrites them later. Grid: one program for
    each block of rows of each head.
    """
    program = tl.program_id(0)
    first = program % row_blocks * BLOCK
    rows = first + tl.arange(0, BLOCK)
    # Zeros for blocks in which the last row hides a key on the left, and for blocks in which the first row
    # hides one on the right. The other rows hide fewer keys of a block.
    dbias += (program // row_blocks).to(tl.int64) * seqlen_q * seqlen_k
    key_blocks = tl.cdiv(seqlen_k, BLOCK)
    offset = seqlen_k - seqlen_q
    begin = 0
    if C.HAS_LEFT:
        hidden = tl.maximum(first + BLOCK - 1 + offset - mask.window_left, 0)
        begin = tl.minimum(tl.cdiv(hidden, BLOCK), key_blocks)
        zero_blocks(dbias, rows, 0, begin, seqlen_q, seqlen_k, BLOCK)
    if C.HAS_RIGHT:
        end = tl.maximum(first + offset + mask.window_right + 1, 0) // BLOCK
        zero_blocks(dbias, rows, tl.maximum(begin, end), key_blocks, seqlen_q, seqlen_k, BLOCK)


@triton.jit
def zero_blocks(dbias, rows, begin, end, seqlen_q, seqlen_k, BLOCK: tl.constexpr):
    """Write zeros to ``dbias`` of one head, at ``rows`` [BLOCK] and the keys of blocks [begin, end)."""
    for n in range(begin, end):
        keys = n * BLOCK + tl.arange(0, BLOCK)
        elements = dbias + rows[:, None].to(tl.int64) * seqlen_k + keys[None, :]
        zeros = tl.zeros([BLOCK, BLOCK], dbias.dtype.element_ty)
        tl.store(elements, zeros, mask=(rows < seqlen_q)[:, None] & (keys < seqlen_k)[None, :])


class ZeroHidden:
    """Launch that zeroes hidden blocks of contiguous gradients of one signature."""

    def __init__(self, problem: Problem) -> None:
        mask = problem.for_kernels(problem.seqlen_q, problem.seqlen_k)
        row_blocks = triton.cdiv(problem.seqlen_q, ZERO_BLOCK)
        self._kernel = CachedLaunch(
            zero_hidden_kernel,
            problem.batch * problem.num_heads_q * row_blocks,
            (problem.seqlen_q, problem.seqlen_k, row_blocks, mask),
            (MaskConstants(**mask.constants), ZERO_BLOCK),
            None,
        )

    def __call__(self, dbias: Tensor) -> None:
        self._kernel(dbias.device, dbias)


# The launch.


GRADIENT_STAGES = {64: 5, 128: 3}
"""Stages of ``gradient_kernel``, by the number of columns of its operands: as many as shared memory holds.
Each product has a slot, so the number need not be even. The backward takes no bias for wider heads."""


def writes_ds(problem: Problem, bias: Tensor) -> bool:
    """Return whether the backward kernel writes the gradient of the bias, by storing dS.

    This gradient must be needed, and it must equal dS. The two are equal if each score has its own element of
    the bias and there is no soft-cap. With a soft-cap, dS also contains the derivative of the soft-cap, which
    the gradient of the bias does not. TMA requires that seqlen_k is a multiple of 8.
    """
    # As many elements as scores, so that none is the sum of several dS.
    scores = problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k
    dense = not (problem.varlen or problem.seqused_k) and own_sizes(bias) == scores
    return problem.bias_grad and dense and not problem.softcap and problem.seqlen_k % 8 == 0


def has_own_gradient(problem: Problem) -> bool:
    """Return whether ``gradient_kernel`` supports the shapes of a call. If not, the portable kernel runs."""
    # One ring holds q, k, dO and v, so all have the same number of columns.
    dense = not (problem.varlen or problem.seqused_k)
    return (
        dense
        and padded_columns(problem.head_dim) == padded_columns(problem.head_dim_v)
        and problem.seqlen_k % 8 == 0
    )


class BiasGradient:
    """Prepares and computes the gradient of the bias for calls of one signature.

    Call it after ``backward_kernel``, with ``(dbias, dout, q, k, v, statistics, extras)``.
    """

    def __init__(self, problem: Problem, variant: BackwardVariant) -> None:
        self._problem, self._variant = problem, variant
        self._kernel: CachedLaunch | None = None
        self._zero_hidden: ZeroHidden | None = None

    def allocate(self, bias: Tensor) -> Tensor:
        """Return memory for dbias.

        If the backward kernel writes dbias, blocks with hidden scores are zeroed here.
        """
        dbias = bias.new_empty(bias.shape)
        variant = self._variant
        # Only steps that are visited store dS, so what the mask hides must be 0 before. Without a mask all is
        # stored.
        if variant.STORES_DS and (variant.HAS_LEFT or variant.HAS_RIGHT):
            if self._zero_hidden is None:
                self._zero_hidden = ZeroHidden(self._problem)
            self._zero_hidden(dbias)
        return dbias

    def __call__(
        self, dbias: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, statistics: Tensor, extras: Any
    ) -> None:
        """Write ``dbias``, unless the backward kernel has written it.

        ``statistics`` starts with neg_lse and neg_delta.
        """
        problem, variant, bias = self._problem, self._variant, extras.bias
        if variant.STORES_DS:
            return
        heads, rows = statistics_shape(problem)
        neg_lse, neg_delta = statistics[: 2 * heads * rows].view(2, heads, rows)
        # The kernel has a tile of dbias for each tile of the bias. An expanded bias, of stride 0, has fewer
        # elements than its shape says.
        if has_own_gradient(problem) and own_sizes(bias) == bias.shape:
            if self._kernel is None:
                self._kernel = gradient_launch(problem, variant.SCALED_SCORES, q, k, v, bias)
            self._kernel(q.device, q, k, v, dout, neg_lse, neg_delta, bias, dbias)
            return
        from flashtile.backends.portable import configure_backward
        from flashtile.backends.portable.attention.launch import dbias_kernel_of, optional_pointers

        if self._kernel is None:
            config = configure_backward(problem)
            self._kernel = dbias_kernel_of(problem, config, (q, k, v), extras, rows)
        if not variant.SCALED_SCORES:  # neg_lse is in units of raw products
            neg_lse = neg_lse * (problem.softmax_scale * LOG2_E.value)
        tensors = q, k, v, dout, neg_lse, neg_delta, None  # no gradient of the entropy: Hopper refuses it
        self._kernel(q.device, *tensors, dbias, *optional_pointers(extras))


def gradient_launch(
    problem: Problem, scales_scores: bool, q: Tensor, k: Tensor, v: Tensor, bias: Tensor
) -> CachedLaunch:
    """Return the launch of ``gradient_kernel`` for tensors of one signature."""
    variant = gradient_variant_of(problem, scales_scores)
    sizes = gradient_sizes(problem, variant, bias)
    numbers = BackwardNumbers(scale=problem.softmax_scale, **score_numbers(problem), zero=0.0)
    lse_scale = 1.0 if scales_scores else problem.softmax_scale * LOG2_E.value
    return CachedLaunch(
        gradient_kernel,
        persistent_programs(sizes.num_tiles, q.device),
        (sizes, numbers, lse_scale),
        (variant,),
        None,
        tuple(gradient_views(problem, variant, q, k, v, bias).values()),
        maxnreg=LAUNCH_REGISTERS[2],
    )


def gradient_variant_of(problem: Problem, scales_scores: bool) -> BiasGradientVariant:
    """Return the compile-time parameters of ``gradient_kernel``.

    ``scales_scores`` is SCALED_SCORES of the backward kernel's variant.
    """
    columns = padded_columns(problem.head_dim)
    return BiasGradientVariant(
        **problem.for_kernels(problem.seqlen_q, problem.seqlen_k).constants,
        SOFTCAP=problem.softcap > 0,
        SCALED_SCORES=scales_scores,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=columns,
        STAGES=GRADIENT_STAGES[columns],
        PRODUCTS=count_products.fn(problem.head_dim_v),
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[2],
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
    )


def gradient_sizes(problem: Problem, variant: BiasGradientVariant, bias: Tensor) -> BiasGradientSizes:
    """Return the integer arguments of ``gradient_kernel``."""
    batch, heads, rows, keys = bias.shape
    blocks = math.ceil(rows / variant.BLOCK_M), math.ceil(keys / variant.BLOCK_N)
    return BiasGradientSizes(
        num_tiles=batch * heads * blocks[0] * blocks[1],
        row_blocks=blocks[0],
        key_blocks=blocks[1],
        batch=problem.batch,
        num_heads=problem.num_heads_q,
        group=problem.group_size,
        bias_batch=batch,
        bias_heads=heads,
        mask=problem.for_kernels(problem.seqlen_q, problem.seqlen_k),
        offset=problem.seqlen_k - problem.seqlen_q,
    )


def gradient_views(
    problem: Problem, variant: BiasGradientVariant, q: Tensor, k: Tensor, v: Tensor, bias: Tensor
) -> dict[str, View]:
    """Return the TMA view of each tensor. The keys are the names of ``gradient_kernel``'s parameters."""
    dtype, columns = problem.dtype, variant.BLOCK_D
    statistics = statistics_view(problem, variant.BLOCK_M)
    block = WARPGROUP_ROWS.value, variant.BLOCK_N
    return {
        "q_desc": dense_view(q.shape, q.stride(), variant.BLOCK_M, columns, dtype),
        "k_desc": dense_view(k.shape, k.stride(), variant.BLOCK_N, columns, dtype),
        "v_desc": dense_view(v.shape, v.stride(), variant.BLOCK_N, columns, dtype),
        "do_desc": dense_view(
            problem.out_shape, contiguous_strides(problem.out_shape), variant.BLOCK_M, columns, dtype
        ),
        "neg_lse_desc": statistics,
        "neg_delta_desc": statistics,
        "bias_desc": cells_view(bias.shape, bias.stride(), *block, dtype),
        "dbias_desc": cells_view(bias.shape, contiguous_strides(bias.shape), *block, dtype),
    }
