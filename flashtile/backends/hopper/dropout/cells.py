"""Dropout on a warpgroup's tile of scores: the numbers of ``flashtile.dropout``, and what they drop.

Of wgmma's accumulator a thread holds rows r and r + 8 and columns c and c + 8: the four probabilities that
share two words, in S as in S^T. The forward has queries as rows of a tile, the backward keys.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.config import WARPGROUP_ROWS

ROWS = gl.constexpr(WARPGROUP_ROWS)
DROP = gl.constexpr(
    "{ .reg .b32 x<4>, m<4>; "
    "and.b32 x0, $8, 0x7FFF7FFF; and.b32 x1, $9, 0x7FFF7FFF; "
    "and.b32 x2, $10, 0x7FFF7FFF; and.b32 x3, $11, 0x7FFF7FFF; "
    "add.u32 x0, x0, $16; add.u32 x1, x1, $16; add.u32 x2, x2, $16; add.u32 x3, x3, $16; "
    "prmt.b32 m0, x0, x1, 0xDD99; prmt.b32 m1, x2, x3, 0xDD99; "
    "prmt.b32 m2, x0, x1, 0xFFBB; prmt.b32 m3, x2, x3, 0xFFBB; "
    "and.b32 $0, $4, m0; and.b32 $1, $5, m1; and.b32 $2, $6, m2; and.b32 $3, $7, m3; }"
)
"""Of pairs of probabilities in 16 bits, at (row, column) of (0, 0), (8, 0), (0, 8) and (8, 8), of their
words, one for each, and of a bias. A sum makes the sign of a column's half of its word say whether it is
kept, and ``prmt`` makes of the sign a mask of 16 bits. Columns 0 and 8 have the same words."""
DROP_KEYS_FIRST = gl.constexpr(
    "{ .reg .b32 x<4>, m<4>; "
    "and.b32 x0, $8, 0x7FFF7FFF; and.b32 x1, $9, 0x7FFF7FFF; "
    "and.b32 x2, $12, 0x7FFF7FFF; and.b32 x3, $13, 0x7FFF7FFF; "
    "add.u32 x0, x0, $16; add.u32 x1, x1, $16; add.u32 x2, x2, $16; add.u32 x3, x3, $16; "
    "prmt.b32 m0, x0, x1, 0xDD99; prmt.b32 m1, x0, x1, 0xFFBB; "
    "prmt.b32 m2, x2, x3, 0xDD99; prmt.b32 m3, x2, x3, 0xFFBB; "
    "and.b32 $0, $4, m0; and.b32 $1, $5, m1; and.b32 $2, $6, m2; and.b32 $3, $7, m3; }"
)
"""The same of a transposed tile. There the half of a word is a row's; rows 0 and 8 have the same words."""
MADE_TOGETHER = gl.constexpr(32)


@gluon.constexpr_function
def made_asm(count):
    """A scheduling barrier for the words of ``count`` probabilities of a thread; see ``inline_asm.pin``."""
    words = [f"${count + 8 * (n // 2) + n % 2}" for n in range(count // 4)]
    either = [f"or.b32 all, {words[0]}, {words[1]};", *(f"or.b32 all, all, {word};" for word in words[2:])]
    outputs = [f"mov.b32 ${n}, 0;" for n in range(count)]
    head = "{ .reg .pred never; .reg .b32 all; " + " ".join(either)
    return head + " setp.eq.u32 never, all, 0; @never nanosleep.u32 0; " + " ".join(outputs) + " }"


@gluon.constexpr_function
def made_constraints(count):
    return ",".join(["=r"] * count + ["r"] * count)


class Dropout(NamedTuple):
    """Memory and number that a launch with dropout has beside those of others."""

    rng_state: Any
    """Pointer to seed and offset, int64."""
    threshold: Any
    """Numbers of 15 bits below it drop their probability."""


class Generator(NamedTuple):
    """What makes the words of a warpgroup's tiles: of a sequence and head, and of the tiles' rows."""

    key: Any
    first_query: Any
    first_key: Any
    """What is combined with the pairs of queries and of keys."""
    start: Any
    """The first of the warpgroup's rows: queries in the forward, keys in the backward."""
    bias: Any
    """In both halves of a word: it makes the sign of a number of 15 bits say whether it is kept."""


@gluon.jit
def wide_product(word, FACTOR: gl.constexpr):
    """(upper, lower) 32 bits of a product."""
    product = word.to(gl.uint64) * FACTOR
    return (product >> 32).to(gl.uint32), product.to(gl.uint32)


@gluon.jit
def philox(k0, k1, c0, c1):
    """Philox-4x32-10 of a key and a counter (c0, c1, 0, 0): its first three words, uint32."""
    c2 = c0 * 0
    c3 = c0 * 0
    for _ in gl.static_range(10):
        high_0, low_0 = wide_product(c0, 0xD2511F53)
        high_2, low_2 = wide_product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2


@gluon.jit
def generator_of(head_of_batch, start, dropout):
    """The :class:`Generator` of a query head, counted through the batch, for rows from ``start`` on."""
    seed = gl.load(dropout.rng_state)
    offset = gl.load(dropout.rng_state + 1)
    low, high = (seed & 0xFFFFFFFF).to(gl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(gl.uint32)
    counter = (offset & 0xFFFFFFFF).to(gl.uint32)
    key, first_query, first_key = philox(low, high, head_of_batch.to(gl.uint32), counter)
    bias = (0x8000 - dropout.threshold).to(gl.uint32) * 0x10001
    return Generator(key, first_query, first_key, start, bias)


@gluon.jit
def pair_of(N: gl.constexpr, layout: gl.constexpr):
    """(number of its pair, which one of it) of positions 0 to N - 1: i and i + 8 are a pair."""
    i = gl.arange(0, N, layout=layout)
    return (i // 16 * 8 + i % 8).to(gl.uint32), i // 8 % 2


@gluon.jit
def words_of(generator, start, N: gl.constexpr, KEYS_FIRST: gl.constexpr, s_layout: gl.constexpr):
    """[64, N] uint32, the words of a tile with columns from ``start`` on, a multiple of N, ready for
    :func:`drop`.

    Each probability computes its word as if it were its own; the compiler sees which are the same.
    """
    rows, second_rows = pair_of(ROWS, gl.SliceLayout(1, s_layout))
    columns, second_columns = pair_of(N, gl.SliceLayout(0, s_layout))
    row_start, column_start = (generator.start // 2).to(gl.uint32), (start // 2).to(gl.uint32)
    key = generator.key
    # Numbers of pairs have no bits in common with their tile's. So all is combined by exclusive or, what more
    # words share first.
    if KEYS_FIRST:
        high, other = wide_product((columns ^ (column_start ^ generator.first_query))[None, :], 0xD256D193)
        word = (rows ^ (row_start ^ generator.first_key ^ key))[:, None] ^ high
        second = second_columns[None, :]
    else:
        high, other = wide_product((rows ^ (row_start ^ generator.first_query))[:, None], 0xD256D193)
        word = (high ^ (column_start ^ generator.first_key ^ key)) ^ columns[None, :]
        second = second_rows[:, None]
    for _ in gl.static_range(6):
        key = (key + 0x9E3779B9) & 0xFFFFFFFF
        high, low = wide_product(word, 0xD256D193)
        word, other = high ^ key ^ other, low
    return gl.where(second == 0, word, other)


@gluon.jit
def make_here(words):
    """Words are made before what needs nothing of them: the assembler would put them off until a wait for
    products is over, under which they are to be made."""
    gl.inline_asm_elementwise(
        made_asm(MADE_TOGETHER), made_constraints(MADE_TOGETHER), [words], dtype=gl.uint32, is_pure=False,
        pack=MADE_TOGETHER,
    )  # fmt: skip


@gluon.jit
def drop(p, words, generator, KEYS_FIRST: gl.constexpr):
    """P in 16 bits, [64, N], 0 where dropout drops it."""
    ASM: gl.constexpr = DROP_KEYS_FIRST if KEYS_FIRST else DROP
    return gl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [p, words, generator.bias],
        dtype=p.dtype, is_pure=True, pack=8,
    )  # fmt: skip
