"""Optional steps of the Hopper kernels on a tile of scores: soft-caps, block masks, dropout, functions.

The forward and the backward kernel have the steps that the flags of their variant name
(``config.ModifierFlags``); other steps are not compiled. The module has a part for each:

* **Soft-caps**: tanh.
* **Block lists**: the blocks that a block mask shows to a tile, in the order in which a kernel visits them.
  Each partition reads the lists of the block mask (``flashtile.masks.block_mask``) on the device. An *entry*
  of a list is a block of the block mask, which is TILES_PER_MASK_BLOCK adjacent blocks of the kernel. Partial
  entries, whose blocks need masking, come first, and full entries follow. Without a block mask the kernels
  have the same order: first the blocks at the edges of causality or a window, then the others.
* **Dropout**, with the random numbers of ``flashtile.dropout``. A thread holds rows r and r + 8 and columns
  c, c + 1, c + 8 and c + 9 of wgmma's accumulator: eight probabilities that share two random words. In S^T,
  where keys are rows, a warp computes the same words and transposes them as 8 x 8 matrices of 16-bit halves.
* **Functions**: SCORE_MOD and MASK_MOD. Rows of a tile are queries, as in the forward. For the backward,
  where rows are keys, see ``backward.kernel``.
* **Launch arguments** of both passes.

The bias has a module of its own (``bias``). Functions on integers can be called from Python through ``.fn``.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.layouts import WARPGROUP_ROWS, column_numbers, row_numbers
from flashtile.backends.portable.attention.functions import Lists
from flashtile.dropout import threshold
from flashtile.problems.attention import Problem
from flashtile.problems.masks import MAX_CAPTURED, MAX_SIZES, Mods


class Modifiers(NamedTuple):
    """Modifiers of a warpgroup's tile, as a kernel's functions take them. 0 stands for an absent modifier."""

    bias: Any
    """The channel that brings tiles of the bias, as :class:`~flashtile.backends.hopper.pipeline.Channel`."""
    dropout: Any
    """A :class:`~flashtile.backends.hopper.modifiers.Generator`."""
    functions: Any
    """:class:`~flashtile.backends.hopper.modifiers.FunctionArguments`."""
    blocks: Any
    """A :class:`~flashtile.backends.hopper.modifiers.BlockList`."""


# Soft-caps.

# The hardware's tanh is as fast as an exponential, but has a relative error of up to 2 ** -11. The forward
# uses it for bfloat16 operands, since PyTorch rounds their scores to 2 ** -9. FlashAttention-3 uses it
# everywhere. For float16 operands, whose scores are more exact, the forward computes tanh from an exponential
# and a reciprocal. The backward squares the tanh, so it uses this formula for both dtypes. The formula takes
# more instructions. Two of them run on the unit that also computes the hardware's tanh.
APPROXIMATE = gl.constexpr("{ .reg .f32 a; mul.ftz.f32 a, $1, $2; tanh.approx.f32 $0, a; }")
EXPONENTIAL = gl.constexpr(  # 1 - 2 / (1 + e^2x), exact also where e^2x is 0 or infinity
    "{ .reg .f32 a; mul.ftz.f32 $0, $1, $2; mul.ftz.f32 a, $0, 0f4038AA3B; ex2.approx.ftz.f32 a, a; "
    "add.ftz.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 a, a; fma.rn.ftz.f32 $0, a, 0fC0000000, 0f3F800000; }"
)


@gluon.jit
def tanh_of(s, rate, APPROX: gl.constexpr):
    """Return tanh(s * rate). With APPROX, use the hardware's tanh instruction."""
    if APPROX:
        return gl.inline_asm_elementwise(
            APPROXIMATE, "=f,f,f", [s, rate], dtype=gl.float32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            EXPONENTIAL, "=&f,f,f", [s, rate], dtype=gl.float32, is_pure=True, pack=1
        )


# Block lists.

SEARCHED = gl.constexpr(128)
"""Entries of a list that are compared at a time."""


class BlockList(NamedTuple):
    """The blocks that a tile visits: ``count`` of them, of which the first ``masked_count`` need a mask."""

    count: Any
    masked_count: Any
    partial: Any
    """Pointer to the list of partial entries, of which there are ``num_partial``."""
    full: Any
    """Pointer to the list of full entries."""
    num_partial: Any
    first_full: Any
    """Index, in the list of full entries, of the entry visited first. This is the entry in which the sequence
    ends, if listed, because that entry needs a mask; otherwise it is entry 0."""
    num_others: Any
    """Number of entries of the listed sequence (keys in the forward, queries in the backward). A list
    contains numbers from 0 to num_others - 1."""
    is_empty: Any
    """Whether no block is listed. A tile of queries then visits the block past the last key, which is masked
    as a whole."""


@gluon.jit
def list_index(lists, sequence, head, own, num_own):
    """Return the index of the list that belongs to block ``own``.

    Each head of each sequence has ``num_own`` lists: one per mask block of queries (forward) or of keys
    (backward). Sequences and heads may share lists.
    """
    return ((sequence % lists.batch) * lists.heads + head % lists.heads).to(gl.int64) * num_own + own


@gluon.jit
def index_of(listed, count, entry, WARPS: gl.constexpr):
    """Return the index of ``entry`` among the first ``count`` entries of a list; -1 if it is not there."""
    # Each warp has all entries, so the maximum below needs no exchange between warps.
    layout: gl.constexpr = gl.BlockedLayout([SEARCHED // 32], [32], [WARPS], [0])
    found = count * 0 - 1
    for first in range(0, count, SEARCHED):
        indices = first + gl.arange(0, SEARCHED, layout=layout)
        entries = gl.load(listed + indices, mask=indices < count, other=-1)
        found = gl.maximum(found, gl.max(gl.where(entries == entry, indices, -1), 0))
    return found


@gluon.jit
def read_lists(lists, index, num_others):
    """Return (pointer to partial entries, their number, pointer to full entries, their number).

    Numbers are clamped to the length of a list.
    """
    num_partial = min(max(gl.load(lists.num_blocks + index), 0), num_others)
    num_full = min(max(gl.load(lists.full_num_blocks + index), 0), num_others)
    return lists.indices + index * num_others, num_partial, lists.full_indices + index * num_others, num_full


@gluon.jit
def listed_keys(C: gl.constexpr, WARPS: gl.constexpr, work, block, lists):
    """Return the :class:`BlockList` of keys for a block of query rows; it has at least one block.

    The calling partition has WARPS warps.
    """
    ENTRY: gl.constexpr = C.BLOCK_N * C.TILES_PER_MASK_BLOCK
    num_others = (work.seqlen_k + ENTRY - 1) // ENTRY
    num_own = (work.seqlen_q + C.MASK_BLOCK - 1) // C.MASK_BLOCK
    index = list_index(lists, work.sequence, work.head, block * C.BLOCK_M // C.MASK_BLOCK, num_own)
    partial, num_partial, full, num_full = read_lists(lists, index, num_others)
    ends_full = num_partial * 0  # a number of the kernel like the results below, not a constant
    first_full = ends_full
    if not C.EVEN_N:  # the block in which the sequence ends is masked, even if it is listed as full
        found = index_of(full, num_full, num_others - 1, WARPS)
        ends_full = 1 if found >= 0 else 0
        first_full = max(found, 0)
    # At least one, so that the loops need no case for none: see is_empty.
    count = max((num_partial + num_full) * C.TILES_PER_MASK_BLOCK, 1)
    masked = (num_partial + ends_full) * C.TILES_PER_MASK_BLOCK
    is_empty = num_partial + num_full == 0
    return BlockList(count, masked, partial, full, num_partial, first_full, num_others, is_empty)


@gluon.jit
def listed_rows(C: gl.constexpr, work, head, lists):
    """Return the :class:`BlockList` of query rows for a block of keys; it may be empty.

    ``head`` is a query head of the key head. They all have the same list.
    """
    ENTRY: gl.constexpr = C.BLOCK_M * C.TILES_PER_MASK_BLOCK
    num_others = (work.seqlen_q + ENTRY - 1) // ENTRY
    num_own = (work.seqlen_k + C.MASK_BLOCK - 1) // C.MASK_BLOCK
    own = work.tile_in_head * C.BLOCK_N // C.MASK_BLOCK
    index = list_index(lists, work.sequence, head, own, num_own)
    partial, num_partial, full, num_full = read_lists(lists, index, num_others)
    count = (num_partial + num_full) * C.TILES_PER_MASK_BLOCK
    masked = num_partial * C.TILES_PER_MASK_BLOCK
    if not C.EVEN_N:  # the block of keys in which the sequence ends is masked for all rows
        masked = count if (work.tile_in_head + 1) * C.BLOCK_N > work.seqlen_k else masked
    # Nothing changes places, and an empty list stays empty (num_partial < 0 is never true).
    return BlockList(count, masked, partial, full, num_partial, num_partial * 0, num_others, num_partial < 0)


@gluon.jit
def entry_of_visit(listed, i, TILES: gl.constexpr):
    """Return the list entry of the ``i``-th visit: (is_full, index in its list, block within the entry).

    A visit processes one block of the kernel, and an entry consists of TILES blocks. The full entry in which
    the sequence ends changes places with the first full entry, so it is visited before the other full
    entries.
    """
    entry = i // TILES
    index = entry - listed.num_partial
    is_full = index >= 0
    # Masked blocks are then the first ones, so that the others have a loop without a mask.
    swapped = listed.first_full if index == 0 else (0 if index == listed.first_full else index)
    return is_full, swapped if is_full else entry, i % TILES


@gluon.jit
def visited_block(C: gl.constexpr, listed, i):
    """Return (index of the ``i``-th block to visit, whether its index comes from the list of full blocks).

    Blocks in the list of full blocks need no masking. The index is clamped to the sequence.
    """
    is_full, index, part = entry_of_visit(listed, i, C.TILES_PER_MASK_BLOCK)
    entry = gl.load((listed.full if is_full else listed.partial) + index)
    # Clamped: the lists are the caller's, and no index may lead out of the tensors.
    block = min(max(entry, 0), listed.num_others - 1) * C.TILES_PER_MASK_BLOCK + part
    return listed.num_others * C.TILES_PER_MASK_BLOCK if listed.is_empty else block, is_full


@gluon.jit
def key_block(C: gl.constexpr, listed, n):
    """Return :func:`visited_block` for the forward, whose loop index ``n`` counts down to 0."""
    return visited_block(C, listed, listed.count - 1 - n)


# Dropout.

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
    for _ in gl.static_range(10):  # all rounds: this runs once for a head of a work tile
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
    limit = schedule.drop_threshold.to(gl.uint32) * 0x10001  # in both halves: one comparison for two numbers
    return Generator(key, first_query, first_key, start, limit)


@gluon.jit
def two_words(key, word, other):
    """Return the two words of Philox-2x32-7 for a key and the counter (word, other)."""
    for _ in gl.static_range(7):  # the fewest rounds that passed BigCrush; they run for every eight scores
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


# Functions of scores and masks.

CapturedTensors = namedtuple(  # type: ignore[misc]
    "CapturedTensors",
    [f"tensor_{i}" for i in range(MAX_CAPTURED)] + [f"size_{i}" for i in range(MAX_SIZES)],
)
"""Contiguous tensors that functions read (0 for those that a call lacks), then the sizes of all their
dimensions in order. The last fields hold the integers of ``numbers_of`` instead of sizes."""


class FunctionArguments(NamedTuple):
    """Arguments of score_mod and mask_mod in addition to scores, queries and keys."""

    sequence: Any
    head: Any
    """The query head."""
    offset: Any
    """Position of the first query among the keys."""
    captured: Any
    first: Any
    """In the forward, the warpgroup's first query."""


class Distances(NamedTuple):
    """Distances of the queries and keys of a tile, q - kv, as the sum of two numbers. Threads have both parts
    of a distance in common with other scores, so they compute some distances once for two scores."""

    threads: Any
    """int32, one number for all registers of a thread."""
    registers: Any
    """int32, a constant of each register."""


@gluon.jit
def function_arguments(work, head, captured, first=0):
    """Return the :class:`FunctionArguments` of a query head and the warpgroup's rows from ``first`` on."""
    return FunctionArguments(work.sequence, head, work.seqlen_k - work.seqlen_q, captured, first)


@gluon.jit
def distances_of(between, N: gl.constexpr, layout: gl.constexpr):
    """Return the :class:`Distances` of a tile of queries by keys.

    ``between`` is the first query minus the first key. ``layout`` is that of the tile, [64, N].
    """
    keys_of_threads, keys_of_registers = column_numbers(N, layout, gl.int32)
    threads, registers = row_numbers(layout)
    threads = between + (threads[:, None] - keys_of_threads[None, :])
    return Distances(threads, registers[:, None] - keys_of_registers[None, :])


@gluon.jit
def modify_scores(C: gl.constexpr, s, n, rows, s_layout: gl.constexpr):
    """Return (SCORE_MOD of the scores of key block ``n``, its derivative).

    Scores and results are in natural units, not log2.
    """
    own = rows.modifiers.functions
    keys = n * C.BLOCK_N + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s_layout))
    queries = rows.positions - own.offset
    distances = distances_of(own.first - n * C.BLOCK_N, s.shape[1], s_layout)
    return C.SCORE_MOD(
        s, own.sequence, own.head, queries[:, None], keys[None, :], own.captured, distances
    )  # fmt: skip


@gluon.jit
def load_columns(C: gl.constexpr, n, rows, WIDTH: gl.constexpr):
    """Load what MASK_MOD needs for each key of block ``n``, with MASK_COLUMNS. Return a tuple of [WIDTH].

    Each thread loads the values of other keys. Callers load early, so that a product hides the latency.
    """
    own = rows.modifiers.functions
    # One load for a key. In the layout of the scores, threads that share a column would repeat it.
    keys = n * C.BLOCK_N + gl.arange(0, WIDTH, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return C.MASK_COLUMNS(own.sequence, own.head, keys, own.captured)


@gluon.jit
def convert_columns(columns, layout: gl.constexpr):
    """Return the values of :func:`load_columns` as a tuple of [1, N] for a tile of this layout."""
    own = (gl.convert_layout(columns[0], gl.SliceLayout(0, layout))[None, :],)
    if len(columns) > 1:
        return own + convert_columns(columns[1:], layout)
    else:
        return own


@gluon.jit
def hide_scores(
    C: gl.constexpr, s, n, is_full, rows, columns, s_layout: gl.constexpr, PARTIAL: gl.constexpr
):  # fmt: skip
    """Return the scores with -inf for keys of block ``n`` that MASK_MOD hides, unless the block is full.

    ``columns`` is the result of :func:`load_columns`. With PARTIAL, the block is known to be partial.
    Otherwise the list of the block mask may also be empty, which hides all keys.
    """
    own = rows.modifiers.functions
    queries = rows.positions - own.offset
    keys = n * C.BLOCK_N + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s_layout))
    distances = distances_of(own.first - n * C.BLOCK_N, s.shape[1], s_layout)
    if C.MASK_COLUMNS is not None:
        columns = convert_columns(columns, s_layout)
    seen = C.MASK_MOD(
        own.sequence, own.head, queries[:, None], keys[None, :], own.captured, distances, columns
    )  # fmt: skip
    if C.LISTED and not PARTIAL:
        s = gl.where(seen | is_full, s, float("-inf"))
        return gl.where(rows.modifiers.blocks.is_empty, float("-inf"), s)
    else:
        return gl.where(seen, s, float("-inf"))


# Launch arguments of both passes.


def modifier_flags(problem: Problem, fixed: bool) -> dict[str, Any]:
    """Return fields of :class:`ModifierFlags` for either pass.

    If ``fixed``, as in the backward, functions take few registers: integers in a mask_mod are compiled as
    literals, and threads keep nothing for several scores. Integers in a score_mod are always compiled as
    literals, because a score_mod leaves no registers free.
    """
    mods = problem.mods
    flags = {"HAS_BIAS": problem.bias, "HAS_DROPOUT": problem.dropout_p > 0}
    if mods is None:
        return flags
    from flashtile.backends.portable.attention import functions

    shared = not fixed
    mask, listed = functions.mask_function(mods, fixed, shared), mods.block_size is not None
    return {
        **flags,
        "HAS_MODS": True,
        "HAS_CUTS": mask is not None or listed,
        "SCORE_MOD": functions.score_function(mods, True, fixed=True, shared=shared),
        "MASK_MOD": mask,
        "MASK_COLUMNS": functions.column_function(mods) if shared else None,
        "LISTED": listed,
        **functions.guards(mods),
    }


def modifier_integers(problem: Problem, bias: Tensor | None) -> dict[str, int]:
    """Return the fields of the kernels' ``schedule`` that dropout and the bias read.

    They are the same for the forward and the backward.
    """
    integers = {}
    if problem.dropout_p:
        integers["drop_threshold"] = threshold(problem.dropout_p)
    if bias is not None:
        integers["bias_batch"], integers["bias_heads"], _, _ = own_sizes(bias)
    return integers


def own_sizes(bias: Tensor) -> tuple[int, ...]:
    """Return the shape of ``bias``, with 1 for dimensions that it is expanded along (stride 0)."""
    return tuple(size if step else 1 for size, step in zip(bias.shape, bias.stride(), strict=True))


def is_shared(problem: Problem, bias: Tensor | None) -> bool:
    """Whether several sequences share the bias of a head."""
    return bias is not None and own_sizes(bias)[0] == 1 < problem.batch


class FunctionTensors:
    """Turns the tensors of a call's score and mask functions, and of its block mask, into kernel arguments.

    One object serves the calls of one signature. ``by_keys``: whether each block of keys has a list;
    otherwise each block of query rows has one.
    """

    def __init__(self, mods: Mods, extras: Any, by_keys: bool) -> None:
        from flashtile.backends.portable.attention.functions import (
            captured_of,
            kv_lists_of,
            q_lists_of,
        )
        from flashtile.masks.program import kernel_sizes, numbers_of

        captured = captured_of(extras)
        self._captured_of, self._lists_of = captured_of, q_lists_of if by_keys else kv_lists_of
        self._sizes = kernel_sizes(mods, captured)
        self._list_sizes = None if mods.block_size is None else extras.kv_num_blocks.shape[:2]
        self._has_captured = any(tensor is not None for tensor in captured)
        self._without_captured: Any = 0
        if numbers_of(mods):
            self._without_captured = CapturedTensors(*(0,) * len(captured), *self._sizes)

    def __call__(self, extras: Any, missing: Tensor, by_address: bool) -> tuple[Any, Any, list]:
        """Return (lists, captured, tensors that must live until the launch).

        With ``by_address``, lists and captured have addresses instead of tensors. ``lists`` is None without a
        block mask; ``missing`` replaces lists that the block mask lacks. Captured tensors that a call lacks
        are 0. If a call has neither captured tensors nor numbers, ``captured`` itself is 0. It is not None,
        because jit functions of Triton 3.6 cannot return a structure that contains None.
        """
        lists, captured, tensors = None, self._without_captured, []
        if self._has_captured:
            tensors = self._captured_of(extras)
            given = [0 if t is None else t.data_ptr() if by_address else t for t in tensors]
            captured = CapturedTensors(*given, *self._sizes)
        if self._list_sizes is not None:
            listed: list[Any] = [missing if t is None else t for t in self._lists_of(extras)]
            tensors = [*tensors, *listed]
            if by_address:
                listed = [t.data_ptr() for t in listed]
            lists = Lists(*listed, *self._list_sizes)
        return lists, captured, tensors
