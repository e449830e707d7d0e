"""Device side of all Hopper kernels: constants, register layouts, parts of a tile's columns.

Products skip columns of zeros, and stores take a few columns at a time through a small tile of shared memory.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.common import config as common_config
from flashtile.backends.hopper import config
from flashtile.backends.hopper.compat import gluon
from flashtile.problems import common

WARPGROUP_ROWS = gl.constexpr(config.WARPGROUP_ROWS)
RAGGED_ROWS = gl.constexpr(common_config.RAGGED_ROWS)
LOG2_E = gl.constexpr(common.LOG2_E)
LN_2 = gl.constexpr(1 / common.LOG2_E)


@gluon.constexpr_function
def accumulator_layout(columns, k=16):
    """Return the layout of an accumulator [64, columns]; ``k`` is the K of one wgmma instruction."""
    # [3, 0] stands for wgmma. Four warps share the 64 rows, 16 each.
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, k])


@gluon.constexpr_function
def left_operand_layout(accumulator, k_width=2):
    """Return the layout of wgmma's left operand in registers; ``k_width`` of its columns share a register."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator, k_width=k_width)


STEP = gl.constexpr(16)
"""Columns of 16-bit operands that one wgmma instruction multiplies (its K)."""


@gluon.jit
def column_numbers(N: gl.constexpr, layout: gl.constexpr, dtype: gl.constexpr = gl.float32):
    """Return (threads, registers), both [N], whose sum is the number of each column, 0 to N - 1.

    ``layout`` is that of an accumulator: thread t of a quad holds columns 8 a + 2 t + b, for all a and for b
    of 0 and 1. ``threads`` is 2 t, equal for all registers of a thread. ``registers`` is 8 a + b, a constant
    of each register.
    """
    # Both are built with a, t and b as axes, from which the compiler sees what is equal in a thread or in a
    # register, and then flattened to columns.
    column: gl.constexpr = gl.SliceLayout(0, layout)
    parts: gl.constexpr = gl.arange(0, N, layout=column).reshape([N // 8, 4, 2]).type.layout
    a = gl.arange(0, N // 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, parts))).to(dtype)
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, parts))).to(dtype)
    b = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, parts))).to(dtype)
    zero = gl.full([N // 8, 4, 2], 0, dtype, parts)
    threads = gl.convert_layout((zero + 2 * t[None, :, None]).reshape([N]), column)
    registers = gl.convert_layout((zero + 8 * a[:, None, None] + b[None, None, :]).reshape([N]), column)
    return threads, registers


@gluon.jit
def row_numbers(layout: gl.constexpr):
    """Return (threads, registers), both int32 [64], whose sum is the number of each row, 0 to 63.

    ``layout`` is that of an accumulator: a thread holds rows r and r + 8. ``registers`` is 0 and 8.
    """
    row: gl.constexpr = gl.SliceLayout(1, layout)
    rows = gl.arange(0, WARPGROUP_ROWS, layout=row)
    parts: gl.constexpr = rows.reshape([4, 2, 8]).type.layout
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, parts)))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, parts)))
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, parts)))
    zero = gl.full([4, 2, 8], 0, gl.int32, parts)
    threads = (zero + 16 * warp[:, None, None] + lane[None, None, :]).reshape([WARPGROUP_ROWS])
    registers = (zero + 8 * half[None, :, None]).reshape([WARPGROUP_ROWS])
    return gl.convert_layout(threads, row), gl.convert_layout(registers, row)


@gluon.jit
def plus_columns(x, N: gl.constexpr, layout: gl.constexpr):
    """Return x [rows] plus the number of each column, 0 to N - 1, as float32 [rows, N].

    A thread adds its part of :func:`column_numbers` once, and each register its constant.
    """
    # Floats throughout: without conversions of integers, ALiBi was 1.04 times as fast at head_dim 128.
    threads, registers = column_numbers(N, layout)
    return (x[:, None] + threads[None, :]) + registers[None, :]


@gluon.jit
def column_parts(x, PART: gl.constexpr):
    """Split x [64, n] into a tuple of tensors [64, PART], from left to right.

    n is PART times a power of two.
    """
    ROWS: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    if WIDTH == PART:
        return (x,)
    else:
        # Both halves are whole registers of the same threads: nothing moves.
        left, right = gl.split(x.reshape([ROWS, 2, WIDTH // 2]).permute((0, 2, 1)))
        return column_parts(left, PART) + column_parts(right, PART)


@gluon.jit
def store_part(part, tile):
    """Store one of the :func:`column_parts` in a tile's first columns, and make it visible to TMA."""
    ROWS: gl.constexpr = part.shape[0]
    PART: gl.constexpr = part.shape[1]
    layout: gl.constexpr = accumulator_layout(PART)
    part = gl.convert_layout(part.to(tile.dtype), layout, assert_trivial=True)
    tile = tile.reshape([ROWS, tile.shape[-1]])
    if tile.shape[-1] > PART:
        tile = tile.slice(0, PART, dim=1)
    tile.store(part)
    fence_async_shared()  # TMA reads through the asynchronous proxy, which does not see plain stores


@gluon.constexpr_function
def power_of_two_below(number):
    """Return the largest power of two that is at most ``number``."""
    return 1 << (number.bit_length() - 1)


@gluon.constexpr_function
def count_products(head_dim):
    """Return the number of wgmma products that :func:`product_of_rows` starts."""
    # One for each power of two in the number of steps of 16 columns.
    return (-(-head_dim // 16)).bit_count()


@gluon.jit
def product_of_rows(a, b, acc, HEAD_DIM: gl.constexpr, use_acc: gl.constexpr = True, START: gl.constexpr = 0):
    """Start the product of two tiles in shared memory, and return acc + a b^T, or a b^T without ``use_acc``.

    The product is asynchronous: wait for it before the result is used. The sum is over columns from START to
    HEAD_DIM rounded up to 16. TMA has filled columns from HEAD_DIM on with zeros. One product can sum only
    over a power of two of columns, so there may be several products.
    """
    COLUMNS: gl.constexpr = (HEAD_DIM + STEP - 1) // STEP * STEP - START
    WIDTH: gl.constexpr = power_of_two_below(COLUMNS)
    if a.shape[1] == WIDTH:  # the whole tile: no views
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
    """Return a tuple of accumulators of a warpgroup, float32 and set to zero.

    There is one accumulator, [64, HEAD_DIM rounded up to 64]. For 192 columns there are two, [64, 128] and
    [64, 64].
    """
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
    """Return the columns of a tile that belong to accumulator ``n`` of ``sums``."""
    START: gl.constexpr = sums[0].shape[1] * n
    WIDTH: gl.constexpr = sums[n].shape[1]
    if tile.shape[1] == WIDTH:
        return tile
    else:
        return tile.slice(START, WIDTH, 1)


@gluon.jit
def add_product(sums, n: gl.constexpr, a, b):
    """Start the product a b that is added to accumulator ``n`` of ``sums``, and return this accumulator."""
    operand: gl.constexpr = left_operand_layout(sums[n].type.layout)
    return warpgroup_mma(gl.convert_layout(a, operand), columns_of(b, sums, n), sums[n], is_async=True)


@gluon.jit
def add_products(sums, a, b):
    """Add the product a b to ``sums``, wait for it, and return the new accumulators.

    ``sums`` is a tuple of accumulators, as from :func:`zero_sums`. a is in registers, b in shared memory.
    """
    first = add_product(sums, 0, a, b)
    if len(sums) == 1:
        return (warpgroup_mma_wait(0, deps=[first]),)
    else:
        return warpgroup_mma_wait(0, deps=[first, add_product(sums, 1, a, b)])
