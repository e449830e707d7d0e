"""Parts of a tile's columns: stores of a few columns at a time through small shared memory, and products that
leave out columns of zeros."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.hopper.constants import WARPGROUP_ROWS, accumulator_layout, left_operand_layout

STEP = gl.constexpr(16)
"""Columns that one instruction of wgmma multiplies in 16 bits."""


@gluon.jit
def plus_columns(x, N: gl.constexpr, layout: gl.constexpr):
    """[rows, N] float32: x [rows] plus 0, 1, ..., as wgmma's accumulator in ``layout``.

    Column 8 a + 2 t + b belongs to thread t of a quad. With the thread's part added first, the rest is a
    constant of each register's own addition.
    """
    column: gl.constexpr = gl.SliceLayout(0, layout)
    parts: gl.constexpr = gl.arange(0, N, layout=column).reshape([N // 8, 4, 2]).type.layout
    a = gl.arange(0, N // 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, parts))).to(gl.float32)
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, parts))).to(gl.float32)
    b = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, parts))).to(gl.float32)
    zero = gl.full([N // 8, 4, 2], 0.0, gl.float32, parts)
    threads = gl.convert_layout((zero + 2 * t[None, :, None]).reshape([N]), column)
    registers = gl.convert_layout((zero + 8 * a[:, None, None] + b[None, None, :]).reshape([N]), column)
    return (x[:, None] + threads[None, :]) + registers[None, :]


@gluon.jit
def column_parts(x, PART: gl.constexpr):
    """x [64, n] of a warpgroup, n = PART times a power of two: a tuple of [64, PART] from left to right."""
    ROWS: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    if WIDTH == PART:
        return (x,)
    else:
        left, right = gl.split(x.reshape([ROWS, 2, WIDTH // 2]).permute((0, 2, 1)))
        return column_parts(left, PART) + column_parts(right, PART)


@gluon.jit
def store_part(part, tile):
    """One of :func:`column_parts` to the first columns of a tile, which TMA may read then."""
    ROWS: gl.constexpr = part.shape[0]
    PART: gl.constexpr = part.shape[1]
    layout: gl.constexpr = accumulator_layout(PART)
    part = gl.convert_layout(part.to(tile.dtype), layout, assert_trivial=True)
    tile = tile.reshape([ROWS, tile.shape[-1]])
    if tile.shape[-1] > PART:
        tile = tile.slice(0, PART, dim=1)
    tile.store(part)
    fence_async_shared()


@gluon.constexpr_function
def power_of_two_below(number):
    """The largest power of two that is at most ``number``."""
    return 1 << (number.bit_length() - 1)


@gluon.constexpr_function
def count_products(head_dim):
    """How many products :func:`product_of_rows` leaves in flight."""
    return (-(-head_dim // 16)).bit_count()


@gluon.jit
def product_of_rows(a, b, acc, HEAD_DIM: gl.constexpr, use_acc: gl.constexpr = True, START: gl.constexpr = 0):
    """acc + a b^T of tiles in shared memory, left in flight, or without ``use_acc`` a b^T alone.

    Of the tiles' columns the first HEAD_DIM count, from START on. TMA has filled the others with zeros; they
    are left out in steps of 16. Tensors have powers of two of columns, so that this takes some products.
    """
    COLUMNS: gl.constexpr = (HEAD_DIM + STEP - 1) // STEP * STEP - START
    WIDTH: gl.constexpr = power_of_two_below(COLUMNS)
    if a.shape[1] == WIDTH:
        return warpgroup_mma(a, b.permute((1, 0)), acc, use_acc=use_acc, is_async=True)
    else:
        left, right = a.slice(START, WIDTH, 1), b.slice(START, WIDTH, 1)
        acc = warpgroup_mma(left, right.permute((1, 0)), acc, use_acc=use_acc, is_async=True)
        if COLUMNS == WIDTH:
            return acc
        else:
            return product_of_rows(a, b, acc, HEAD_DIM, True, START + WIDTH)


@gluon.jit
def zero_sums(HEAD_DIM: gl.constexpr):
    """Accumulators of a warpgroup's 64 rows and HEAD_DIM columns, in steps of 64: a tuple of one [64, n], for
    192 columns of [64, 128] and [64, 64]."""
    COLUMNS: gl.constexpr = (HEAD_DIM + 63) // 64 * 64
    WIDTH: gl.constexpr = power_of_two_below(COLUMNS)
    layout: gl.constexpr = accumulator_layout(WIDTH)
    first = gl.full([WARPGROUP_ROWS, WIDTH], 0.0, gl.float32, layout)
    if COLUMNS == WIDTH:
        return (first,)
    else:
        return (first,) + zero_sums(COLUMNS - WIDTH)


@gluon.jit
def columns_of(tile, sums, n: gl.constexpr):
    """The columns of a tile that accumulator ``n`` of ``sums`` is of."""
    START: gl.constexpr = sums[0].shape[1] * n
    WIDTH: gl.constexpr = sums[n].shape[1]
    if tile.shape[1] == WIDTH:
        return tile
    else:
        return tile.slice(START, WIDTH, 1)


@gluon.jit
def add_product(sums, n: gl.constexpr, a, b):
    """Accumulator ``n`` of :func:`add_products`, left in flight."""
    operand: gl.constexpr = left_operand_layout(sums[n].type.layout)
    return warpgroup_mma(gl.convert_layout(a, operand), columns_of(b, sums, n), sums[n], is_async=True)


@gluon.jit
def add_products(sums, a, b):
    """sums + a b of :func:`zero_sums`, a left operand in registers and a tile in shared memory, complete."""
    first = add_product(sums, 0, a, b)
    if len(sums) == 1:
        return (warpgroup_mma_wait(0, deps=[first]),)
    else:
        return warpgroup_mma_wait(0, deps=[first, add_product(sums, 1, a, b)])
