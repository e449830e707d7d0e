"""Dropout on a warpgroup's tile of scores, with the random numbers of ``flashtile.dropout``.

A thread holds rows r and r + 8 and columns c, c + 1, c + 8 and c + 9 of wgmma's accumulator. These are eight
probabilities that share two random words. In S^T, where keys are rows, a warp computes the same words and
transposes them as 8 x 8 matrices of 16-bit halves.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.constants import WARPGROUP_ROWS

DROP = gl.constexpr(
    "{ .reg .b32 x<4>, a<4>, m<4>; "
    "prmt.b32 x2, $12, 0, 0x2301; prmt.b32 x3, $14, 0, 0x2301; "
    "abs.f16x2 a0, $8; abs.f16x2 a1, $10; abs.f16x2 a2, x2; abs.f16x2 a3, x3; "
    "set.lt.u32.f16x2 m0, a0, $16; set.lt.u32.f16x2 m1, a1, $16; "
    "set.lt.u32.f16x2 m2, a2, $16; set.lt.u32.f16x2 m3, a3, $16; "
    "lop3.b32 $0, $4, m0, 0, 0x30; lop3.b32 $1, $5, m1, 0, 0x30; "
    "lop3.b32 $2, $6, m2, 0, 0x30; lop3.b32 $3, $7, m3, 0, 0x30; }"
)
"""Inline assembly that sets dropped probabilities to 0. Its operands are four pairs of 16-bit probabilities,
at (row, column) (0, 0), (8, 0), (0, 8) and (8, 8), a random word for each pair, and the limit.

15-bit integers are ordered like the fp16 numbers with the same bits, so one fp16x2 instruction compares two
of them. ``abs`` clears the 16th bit. As an fp16 number, the limit is at most infinity. In a pair at column 8,
the lower byte of each half of the random word has the number's upper bits, so the bytes are exchanged first.
The table 0x30 of ``lop3`` is a & ~b."""
DROP_KEYS_FIRST = gl.constexpr(
    DROP.value.replace("x2, $12", "x2, $10").replace("a1, $10", "a1, x2").replace("a2, x2", "a2, $12")
)
"""DROP for a transposed tile, in which the bytes are exchanged at row 8 instead of column 8."""
DROP_CONSTRAINTS = gl.constexpr("=&r,=&r,=&r,=&r" + ",r" * 20)
BARRIER_PACK = gl.constexpr(32)


@gluon.constexpr_function
def barrier_asm(count):
    """Return PTX of a scheduling barrier, as in ``inline_asm.pin``.

    The barrier is for the random words of ``count`` probabilities.
    """
    words = [f"${count + 8 * (n // 2) + n % 2 * 2}" for n in range(count // 4)]
    either = [f"or.b32 all, {words[0]}, {words[1]};", *(f"or.b32 all, all, {word};" for word in words[2:])]
    outputs = [f"mov.b32 ${n}, 0;" for n in range(count)]
    head = "{ .reg .pred never; .reg .b32 all; " + " ".join(either)
    return head + " setp.eq.u32 never, all, 0; @never nanosleep.u32 0; " + " ".join(outputs) + " }"


@gluon.constexpr_function
def barrier_constraints(count):
    return ",".join(["=r"] * count + ["r"] * count)


class Generator(NamedTuple):
    """State of the random words of a warpgroup's rows, for a sequence and a query head."""

    key: Any
    first_query: Any
    first_key: Any
    """key, first_query and first_key are the words that :func:`philox` returns for a head. The counter of
    :func:`two_words` is (first_query XOR number of a pair of queries, first_key XOR number of a group of four
    keys)."""
    start: Any
    """The first of the warpgroup's rows: queries in the forward, keys in the backward."""
    limit: Any
    """The threshold in both halves of a word: a probability is dropped if its 15-bit number is below it."""


@gluon.jit
def wide_product(word, FACTOR: gl.constexpr):
    """Return (upper 32 bits, lower 32 bits) of word * FACTOR, uint32."""
    product = word.to(gl.uint64) * FACTOR
    return (product >> 32).to(gl.uint32), product.to(gl.uint32)


@gluon.jit
def philox(k0, k1, c0, c1):
    """Return the first three words, uint32, of Philox-4x32-10 for key (k0, k1) and counter (c0, c1, 0, 0)."""
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
def generator_of(head_of_batch, start, pointers, schedule):
    """Return the :class:`Generator` of query head ``head_of_batch``, for rows from ``start`` on."""
    seed = gl.load(pointers.rng_state)
    offset = gl.load(pointers.rng_state + 1)
    low, high = (seed & 0xFFFFFFFF).to(gl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(gl.uint32)
    counter = (offset & 0xFFFFFFFF).to(gl.uint32)
    key, first_query, first_key = philox(low, high, head_of_batch.to(gl.uint32), counter)
    limit = schedule.drop_threshold.to(gl.uint32) * 0x10001
    return Generator(key, first_query, first_key, start, limit)


@gluon.jit
def two_words(key, word, other):
    """Return the two words of Philox-2x32-7 for a key and the counter (word, other)."""
    for _ in gl.static_range(7):
        high, low = wide_product(word, 0xD256D193)
        word, other = high ^ key ^ other, low
        key = (key + 0x9E3779B9) & 0xFFFFFFFF
    return word, other


@gluon.jit
def random_bits(generator, start, N: gl.constexpr, KEYS_FIRST: gl.constexpr, s_layout: gl.constexpr):
    """Return random words for :func:`drop`, [64, N] uint32. ``start`` is the first column of the tile.

    The code computes the word of each probability separately, although several probabilities share a word.
    The compiler merges the equal computations.
    """
    rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, s_layout))[:, None]
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, s_layout))[None, :]
    # ``pair`` is the number of a pair of queries, and ``four`` that of a group of four keys. Both are first
    # counted from the start of the tile. Then the numbers at the start are added by XOR, because the two
    # terms have no bits in common. With keys as rows, each thread computes the same words as with queries as
    # rows, and the words are transposed at the end.
    if KEYS_FIRST:
        pair = (columns // 16 * 8).to(gl.uint32) ^ (rows % 8).to(gl.uint32)
        four = (rows // 16 * 4).to(gl.uint32) ^ (columns % 8 // 2).to(gl.uint32)
        pair_start, four_start = start // 2, generator.start // 4
        second_query = columns // 8 % 2
    else:
        pair = (rows // 16 * 8 + rows % 8).to(gl.uint32)
        four = (columns // 16 * 4 + columns % 8 // 2).to(gl.uint32)
        pair_start, four_start = generator.start // 2, start // 4
        second_query = rows // 8 % 2
    pair ^= pair_start.to(gl.uint32) ^ generator.first_query
    four ^= four_start.to(gl.uint32) ^ generator.first_key
    first, second = two_words(generator.key, pair, four)
    words = gl.where(second_query == 0, first, second)
    if KEYS_FIRST:
        words = gl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [words], dtype=gl.uint32, is_pure=True,
            pack=1,
        )  # fmt: skip
    return words


@gluon.jit
def schedule_barrier(words):
    """Make the assembler compute ``words`` before the code that follows.

    Without the barrier, the assembler would move this work behind the next wait for a product. The work
    should overlap with that wait.
    """
    gl.inline_asm_elementwise(
        barrier_asm(BARRIER_PACK), barrier_constraints(BARRIER_PACK), [words], dtype=gl.uint32, is_pure=False,
        pack=BARRIER_PACK,
    )  # fmt: skip


@gluon.jit
def drop(p, words, generator, KEYS_FIRST: gl.constexpr):
    """Return P (16 bits, [64, N]) with 0 where dropout drops it."""
    ASM: gl.constexpr = DROP_KEYS_FIRST if KEYS_FIRST else DROP
    return gl.inline_asm_elementwise(
        ASM, DROP_CONSTRAINTS, [p, words, generator.limit],
        dtype=p.dtype, is_pure=True, pack=8,
    )  # fmt: skip
