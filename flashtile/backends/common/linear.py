"""Epilogues of a product y = x W^T, applied to its float32 sums and shared by all kernels of products.

A *place* is an output column, or a pair of output columns. The plain epilogue has one sum per place, from one
row of W. SwiGLU has two sums per place, because gate and up give one output. Rotary embedding also has two
sums per place, because it rotates a pair of columns. The program then computes both and ``HALVES`` is 2.

The order is that of the device functions: scale, factor of the norm, bias (:func:`scale_sums`); then the
residual, or SwiGLU, or rotary embedding and the cache; one rounding; the store. They create no tensors. Gluon
kernels, whose tensors have layouts, can therefore call them as Triton kernels do.

The functions from :func:`epilogue_variant` on convert a call's tensors to the arguments of a product's
kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.jit import triton
from flashtile.problems import linear as kinds
from flashtile.problems.linear import LinearProblem

PLAIN, SWIGLU, ROTARY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of epilogue. ROTARY serves queries, keys and values: rotary embedding (if ROTARY_DIM > 0) and the
append to a cache."""


@dataclass(frozen=True)
class EpilogueVariant:
    """Constants of an epilogue."""

    EPILOGUE: int
    NORM: bool
    BIAS: bool
    RESIDUAL: bool
    CHANNEL_SCALES: bool
    """Whether each row of W has a scale."""
    HEAD_DIM: int = 0
    ROTARY_DIM: int = 0
    INTERLEAVED: bool = False
    PAGE_SIZE: int = 0
    HEAD_NORM: bool = False
    """Whether queries and keys are normalised. A tile then has whole heads."""
    HAS_SLOTS: bool = False
    """Whether positions in the cache come from a slot mapping, not from a block table."""
    X_SCALES: bool = False
    NEXT_NORM: bool = False
    """Whether the result is prepared for the norm that follows; EPILOGUE is then PLAIN."""


class ProductPointers(NamedTuple):
    """Tensors of a product and of its epilogue; None for each that a call does not use."""

    x: Any
    """The input. If torch.mm has computed the product, x is the product, to which the epilogue is applied."""
    w: Any
    y: Any
    norm_weight: Any
    block_scale: Any
    partial: Any
    arrived: Any
    bias: Any
    residual: Any
    scales: Any
    cos: Any
    sin: Any
    q_norm_weight: Any
    k_norm_weight: Any
    positions: Any
    slots: Any
    block_table: Any
    k_cache: Any
    v_cache: Any
    x_scale: Any
    next_norm_weight: Any
    scaled: Any
    """y times next_norm_weight, in the layout of y."""
    squares: Any
    """float32 (programs, rows of a tile): each program's sums of squares of y, over its columns."""
    next_factor: Any


class ProductDepth(NamedTuple):
    """Integers of a product: columns of x and W, and their row strides in elements."""

    K: Any
    x_stride: Any
    w_stride: Any


class EpilogueStrides(NamedTuple):
    """Row strides, in elements."""

    y: Any
    residual: Any


class EpilogueCacheStrides(NamedTuple):
    """Strides of the caches between pages, tokens and heads, in elements."""

    k_block: Any
    k_token: Any
    k_head: Any
    v_block: Any
    v_token: Any
    v_head: Any


class EpilogueSizes(NamedTuple):
    """Integers and ``eps`` of an epilogue. Kernels are not specialized on their values."""

    M: Any
    """Rows of x."""
    heads_q: Any
    heads_kv: Any
    angles: Any
    """Rows of the tables of cos and sin."""
    num_blocks: Any
    table_width: Any
    """Pages per row of the block table."""
    eps: Any
    """Epsilon of the norm that follows, or of the norm of queries and keys."""


class EpilogueCall(NamedTuple):
    """Arguments of an epilogue, which its step functions hand to each other as one structure."""

    pointers: Any
    places: Any
    """Places per row of the output: N, or N / 2 where a place has two rows of W."""
    strides: Any
    cache_strides: Any
    sizes: Any


@triton.jit
def column_of(within, half, E: tl.constexpr):
    """Return the column, within its head, of the first (``half`` 0) or second (1) element of pair ``within``.

    The elements of a rotated pair lie ROTARY_DIM / 2 apart, or are adjacent if INTERLEAVED. Columns that are
    not rotated are paired with the adjacent column.
    """
    HALF: tl.constexpr = E.ROTARY_DIM // 2
    if E.INTERLEAVED or HALF == 0:
        return 2 * within + half
    elif E.ROTARY_DIM == E.HEAD_DIM:
        return within + half * HALF
    else:
        return tl.where(within < HALF, within + half * HALF, 2 * within + half)


@triton.jit
def row_of(place, half, places, E: tl.constexpr):
    """Return the row of W that the first (``half`` 0) or second (``half`` 1) sum of a place belongs to.

    A place is an output column, or a pair of output columns that rotary embedding rotates. SwiGLU and rotary
    embedding compute each place from two sums.
    """
    if E.EPILOGUE == PLAIN:
        return place
    elif E.EPILOGUE == SWIGLU:  # W has all rows of gate, then all rows of up
        return place + half * places
    else:
        PAIRS: tl.constexpr = E.HEAD_DIM // 2
        head = place // PAIRS
        return head * E.HEAD_DIM + column_of(place - head * PAIRS, half, E)


@triton.jit
def scale_sums(sums, row, inside, factor, pointers, E: tl.constexpr):
    """Multiply each sum by the scale of its row of W and by the factor of its row of x, and add the bias."""
    if E.CHANNEL_SCALES:
        sums = sums * tl.load(pointers.scales + row, mask=inside, other=0.0)
    if E.NORM or E.X_SCALES:  # a factor per row of x commutes with the product, so it comes after it
        sums = sums * factor
    if E.BIAS:
        sums = sums + tl.load(pointers.bias + row, mask=inside, other=0.0).to(tl.float32)
    return sums


@triton.jit
def store_sums(sums, place, end, m, factor, call, E: tl.constexpr):
    """Apply the PLAIN epilogue, store the result, and return it in the dtype of the output.

    ``place`` [n, 1] has the output columns, which are also rows of W. Columns below ``end`` are valid. ``m``
    [1, rows] has the rows of x, and ``factor`` [1, rows] the factor of each row.
    """
    inside = place < end
    sums = scale_sums(sums, place, inside, factor, call.pointers, E)
    return store_places(sums, place, end, m, call, E)


@triton.jit
def store_scaled(y, place, end, m, call):
    """Store y times the weight of the following norm. Return the squares of y, 0 outside the output.

    y has already been rounded to the dtype of the output.
    """
    # Written here, where y is in registers. A product that multiplies its own x by the norm's weight does so
    # in every program and for every tile: a layer's products took 1.16 to 1.3 times as long at 32 and 64
    # rows.
    inside = (place < end) & (m < call.sizes.M)
    wide = y.to(tl.float32)
    weight = tl.load(call.pointers.next_norm_weight + place, mask=place < end, other=0.0)
    at = m.to(tl.int64) * call.strides.y + place
    tl.store(call.pointers.scaled + at, (wide * weight.to(tl.float32)).to(y.dtype), mask=inside)
    return tl.where(inside, wide * wide, 0.0)


@triton.jit
def load_squares(part, m, first, parts, rows, squares):
    """Load the sums of squares that other programs stored for rows ``m`` [1, rows] of a tile.

    ``first + part`` [n, 1] are the indices of those programs. For indices from ``parts`` on, the result is 0.
    """
    # .cg: other multiprocessors wrote them, and an L1 cache is not told.
    at = (first + part) * rows + m
    return tl.load(squares + at, mask=first + part < parts, other=0.0, cache_modifier=".cg")


@triton.jit
def store_factor(square, m, call):
    """Store the factor of each row for the RMSNorm that follows.

    ``square`` [rows] is the sum of the squares of y over all columns.
    """
    factor = tl.rsqrt(square / call.places + call.sizes.eps)
    tl.store(call.pointers.next_factor + m, factor, mask=m < call.sizes.M)


@triton.jit
def store_places(out, place, end, m, call, E: tl.constexpr):
    """Add the residual, store the result to the output, and return it as stored."""
    pointers, strides = call.pointers, call.strides
    inside = (place < end) & (m < call.sizes.M)
    if E.RESIDUAL:  # in float32, before the only rounding
        at = m.to(tl.int64) * strides.residual + place
        out = out + tl.load(pointers.residual + at, mask=inside, other=0.0).to(tl.float32)
    at = m.to(tl.int64) * strides.y + place
    y = out.to(pointers.y.dtype.element_ty)  # the following norm squares what is stored, as torch would
    tl.store(pointers.y + at, y, mask=inside)
    return y


class Destinations(NamedTuple):
    """The cache slot of each row of x (page, and token within the page) and its position in the sequence.

    Each field has shape [1, rows]. ``written`` is false for rows without a cache slot.
    """

    position: Any
    page: Any
    token: Any
    written: Any


@triton.jit
def load_destinations(m, pointers, sizes, E: tl.constexpr):
    """Load the :class:`Destinations` (cache slots and positions) of rows ``m`` of x."""
    position = m * 0
    if pointers.positions is not None:
        position = tl.load(pointers.positions + m, mask=m < sizes.M, other=-1)
    if E.EPILOGUE != ROTARY:  # SwiGLU reads no destinations; all branches return the same structure
        return Destinations(position, position, position, position)
    elif E.HAS_SLOTS:
        # Neither a negative slot is written, as in vLLM, nor one past the cache's pages: the host does not
        # read the slots.
        slot = tl.load(pointers.slots + m, mask=m < sizes.M, other=-1).to(tl.int64)
        written = slot >= 0
        page = slot // E.PAGE_SIZE
        token = slot % E.PAGE_SIZE
        return Destinations(position, page, token, written & (page < sizes.num_blocks))
    else:
        # int64 from the page on: a cache may have more elements than 32 bits count.
        at = position // E.PAGE_SIZE
        written = (position >= 0) & (at < sizes.table_width) & (m < sizes.M)
        table = pointers.block_table + m.to(tl.int64) * sizes.table_width
        page = tl.load(table + at, mask=written, other=-1).to(tl.int64)
        token = (position % E.PAGE_SIZE).to(tl.int64)
        return Destinations(position, page, token, written & (page >= 0) & (page < sizes.num_blocks))


@triton.jit
def store_pairs(first, second, place, end, m, factor, to, call, E: tl.constexpr):
    """Apply the SWIGLU or ROTARY epilogue to the sums ``first`` and ``second``, and store the results.

    ``first`` and ``second`` are SwiGLU's gate and up, or the two columns of a rotary pair. ``to`` has the
    :class:`Destinations` of ``m``. The other arguments are those of :func:`store_sums`.
    """
    pointers = call.pointers
    inside = place < end
    # Both rows of W have scales and biases of their own.
    first_row = row_of(place, 0, call.places, E)
    second_row = row_of(place, 1, call.places, E)
    first = scale_sums(first, first_row, inside, factor, pointers, E)
    second = scale_sums(second, second_row, inside, factor, pointers, E)
    if E.EPILOGUE == SWIGLU:
        store_places(first / (1.0 + tl.exp(-first)) * second, place, end, m, call, E)  # silu(gate) * up
    else:
        store_heads(first, second, place, end, m, to, call, E)


@triton.jit
def head_weight(column, is_q, is_k, pointers):
    """Return the weights of the norms of queries and keys for columns of a head; 1 for values."""
    of_q = tl.load(pointers.q_norm_weight + column, mask=is_q, other=1.0).to(tl.float32)
    return of_q * tl.load(pointers.k_norm_weight + column, mask=is_k, other=1.0).to(tl.float32)


@triton.jit
def store_heads(first, second, place, end, m, to, call, E: tl.constexpr):
    """Store both columns of each rotary pair: queries to the output, keys and values to the cache.

    Keys and values are stored only for rows with ``to.written``. ``first`` and ``second`` are the float32
    results of the matrix product. Rotary embedding (Su et al. 2021, arXiv:2104.09864) is applied before these
    results are rounded.
    """
    pointers, sizes, cache = call.pointers, call.sizes, call.cache_strides
    PAIRS: tl.constexpr = E.HEAD_DIM // 2
    HALF: tl.constexpr = E.ROTARY_DIM // 2
    # The output columns are all query heads, then all key heads, then all value heads.
    head = place // PAIRS
    within = place - head * PAIRS
    inside = (place < end) & (m < sizes.M)
    is_q = head < sizes.heads_q
    is_k = (head >= sizes.heads_q) & (head < sizes.heads_q + sizes.heads_kv)
    is_v = head >= sizes.heads_q + sizes.heads_kv
    if E.HEAD_NORM:
        # The pairs of a head are consecutive, and a tile begins with a head.
        HEADS: tl.constexpr = first.shape[0] // PAIRS
        ROWS: tl.constexpr = first.shape[1]
        squares = tl.sum((first * first + second * second).reshape([HEADS, PAIRS, ROWS]), 1)
        root = tl.rsqrt(squares / E.HEAD_DIM + sizes.eps)
        root = tl.broadcast_to(root[:, None, :], [HEADS, PAIRS, ROWS]).reshape([HEADS * PAIRS, ROWS])
        root = tl.where(is_v, 1.0, root)
        first *= root * head_weight(column_of(within, 0, E), is_q, is_k, pointers)
        second *= root * head_weight(column_of(within, 1, E), is_q, is_k, pointers)
    if HALF > 0:
        # Values are not rotated, nor are columns behind ROTARY_DIM: cos 1, sin 0.
        # Nor rows whose position is outside of the tables, which the host does not read.
        seen = (to.position >= 0) & (to.position < sizes.angles)
        turned = inside & (is_q | is_k) & (within < HALF) & seen
        at = to.position.to(tl.int64) * HALF + within
        cos = tl.load(pointers.cos + at, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(pointers.sin + at, mask=turned, other=0.0).to(tl.float32)
        first, second = first * cos - second * sin, second * cos + first * sin
    # Three pairs of masked stores. A tile may hold heads of two kinds, so the kind is a mask, not a branch.
    first_column = column_of(within, 0, E)
    second_column = column_of(within, 1, E)
    dtype: tl.constexpr = pointers.y.dtype.element_ty
    first = first.to(dtype)  # the only rounding
    second = second.to(dtype)

    y = pointers.y + m.to(tl.int64) * call.strides.y + head * E.HEAD_DIM
    tl.store(y + first_column, first, mask=inside & is_q)
    tl.store(y + second_column, second, mask=inside & is_q)

    written = inside & to.written
    k = (
        pointers.k_cache
        + to.page * cache.k_block
        + to.token * cache.k_token
        + (head - sizes.heads_q) * cache.k_head
    )
    tl.store(k + first_column, first, mask=written & is_k)
    tl.store(k + second_column, second, mask=written & is_k)
    head_v = head - sizes.heads_q - sizes.heads_kv
    v = pointers.v_cache + to.page * cache.v_block + to.token * cache.v_token + head_v * cache.v_head
    tl.store(v + first_column, first, mask=written & is_v)
    tl.store(v + second_column, second, mask=written & is_v)


EPILOGUES = {kinds.PLAIN: PLAIN.value, kinds.SWIGLU: SWIGLU.value, kinds.QKV: ROTARY.value}


def epilogue_variant(problem: LinearProblem, norm: bool | None = None) -> EpilogueVariant:
    """Return the constants of the epilogue.

    ``norm``: whether the epilogue applies RMSNorm's factor. If None, this is ``problem.norm``.
    """
    heads = problem.heads
    fields: dict[str, Any] = {}
    if heads is not None:
        fields = {
            "HEAD_DIM": heads.head_dim,
            "ROTARY_DIM": heads.rotary_dim,
            "INTERLEAVED": heads.rotary_interleaved,
            "PAGE_SIZE": heads.page_size,
            "HEAD_NORM": heads.norm,
            "HAS_SLOTS": heads.table_width == 0,
        }
    return EpilogueVariant(
        EPILOGUE=EPILOGUES[problem.epilogue],
        NORM=problem.norm if norm is None else norm,
        BIAS=problem.bias,
        RESIDUAL=problem.residual,
        CHANNEL_SCALES=problem.scales == "channel",
        X_SCALES=problem.x_scale,
        NEXT_NORM=problem.next_norm,
        **fields,
    )


class NextNorm(NamedTuple):
    """Results of a product that the following norm uses. Each is None if no norm follows."""

    scaled: Tensor | None = None
    squares: Tensor | None = None
    factor: Tensor | None = None


NOTHING = NextNorm()


def new_next_norm(problem: LinearProblem, y: Tensor, parts: int) -> NextNorm:
    """Allocate the tensors for the norm that follows. ``parts`` is the number of float32 sums of squares."""
    if not problem.next_norm:
        return NOTHING
    squares, factor = (y.new_empty(size, dtype=torch.float32) for size in (parts, problem.M))
    return NextNorm(torch.empty_like(y), squares, factor)


def product_pointers(
    x: Any,
    weight: Any,
    y: Any,
    given: Any,
    caches: tuple[Tensor, ...] = (),
    following: NextNorm = NOTHING,
    block_scale: Any = None,
    partial: Any = None,
    arrived: Any = None,
) -> ProductPointers:
    """Return the :class:`ProductPointers` of a launch.

    ``given`` is a ``LinearTensors``, ``BeforeNormTensors`` or ``QkvTensors``.
    """
    k_cache, v_cache = caches or (None, None)
    return ProductPointers(
        x,
        weight,
        y,
        given.norm_weight,
        block_scale,
        partial,
        arrived,
        given.bias,
        getattr(given, "residual", None),
        given.weight_scale,
        getattr(given, "rotary_cos", None),
        getattr(given, "rotary_sin", None),
        getattr(given, "q_norm_weight", None),
        getattr(given, "k_norm_weight", None),
        getattr(given, "positions", None),
        getattr(given, "slot_mapping", None),
        getattr(given, "block_table", None),
        k_cache,
        v_cache,
        given.x_scale,
        getattr(given, "next_norm_weight", None),
        *following,
    )


def epilogue_scalars(
    problem: LinearProblem, given: Any, caches: tuple[Tensor, ...]
) -> tuple[int, EpilogueStrides, EpilogueCacheStrides, EpilogueSizes]:
    """Return an epilogue's scalars: (places, strides of y and residual, strides of the caches, sizes).

    ``places`` is the number of output columns, or of pairs of columns that the epilogue rotates. The kernel
    takes these scalars after the scalars of the product.
    """
    heads, residual = problem.heads, getattr(given, "residual", None)
    strides = [stride for cache in caches for stride in cache.stride()[:3]] or [0] * 6
    return (
        problem.places,
        EpilogueStrides(problem.out_columns, 0 if residual is None else residual.stride(0)),
        EpilogueCacheStrides(*strides),
        EpilogueSizes(
            problem.M,
            0 if heads is None else heads.num_heads_q,
            0 if heads is None else heads.num_heads_kv,
            0 if heads is None else heads.rotary_rows,
            0 if heads is None else heads.num_blocks,
            0 if heads is None else heads.table_width,
            problem.next_norm_eps if heads is None else problem.norm_eps,
        ),
    )


def new_output(problem: LinearProblem, x: Tensor) -> Tensor:
    if problem.heads is not None:
        return x.new_empty(problem.M, problem.heads.num_heads_q, problem.heads.head_dim)
    return x.new_empty(problem.M, problem.places)
