"""Steps on tiles of scores, shared by all attention kernels: score modifications, masks and dropout.

A *row* is a query position and a *key* a key position within one sequence; row ``i`` stands at key ``i +
offset``.
"""

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.backends.common.tiles import LOG2_E
from flashtile.backends.portable.attention.arguments import ScoreIndices
from flashtile.backends.portable.tiles import cap_and_bias, visible
from flashtile.dropout import KEY_STEPS, SMALL_MULTIPLIER

MULTIPLIER, KEY_STEP = tl.constexpr(SMALL_MULTIPLIER), tl.constexpr(KEY_STEPS[0])
"""Constants of Philox-2x32."""


@triton.jit
def score_indices(block, rows, keys, KEYS_FIRST: tl.constexpr):
    """Return the :class:`ScoreIndices` of a tile of ``rows`` by ``keys``, transposed with KEYS_FIRST."""
    if KEYS_FIRST:
        rows, keys = rows[None, :], keys[:, None]
    else:
        rows, keys = rows[:, None], keys[None, :]
    positions = rows + block.offset
    return ScoreIndices(block.b, block.head, rows, keys, positions, keys - positions)


@triton.jit
def modify_scores(scores, at, block, call, C: tl.constexpr, bias=None, TO_LOG2: tl.constexpr = True):
    """Turn raw products into modified scores, and return (scores, derivative).

    The scores are in log2 units, or without TO_LOG2 in natural units. The derivative is d score / d
    (product * softmax_scale), in natural units.
    ``at``: the :class:`ScoreIndices` of the tile. ``bias``: the tile of the bias; if None, it is loaded here.
    All kernels of the forward and backward pass modify their scores here and nowhere else.
    """
    numbers, pointers = call.numbers, call.pointers
    scores, score_grad = cap_and_bias(
        scores, at.distance, block.slope, numbers.softmax_scale, numbers.softcap, C.HAS_SOFTCAP,
        C.HAS_ALIBI,
    )  # fmt: skip
    if C.HAS_BIAS:
        if bias is None:
            bias = load_broadcast(pointers.bias, call.strides.bias, at, call.lengths, C.BIAS_HAS_ROWS, 0.0, C)
        scores = scores + bias.to(tl.float32)
    if C.SCORE_MOD is not None:
        scores, own_grad = C.SCORE_MOD(
            scores, at.b, at.head, at.rows, at.keys, pointers.captured
        )  # fmt: skip
        score_grad = score_grad * own_grad
    if TO_LOG2:
        scores = scores * LOG2_E
    return scores, score_grad


@triton.jit
def add_gradients(ds, scores, at, block, call, C: tl.constexpr):
    """Add a tile's terms to the gradients of captured tensors.

    ``ds``: the gradient of the modified scores. ``scores``: raw products.
    """
    scores, _ = cap_and_bias(
        scores, at.distance, block.slope, call.numbers.softmax_scale, call.numbers.softcap, C.HAS_SOFTCAP,
        C.HAS_ALIBI,
    )  # fmt: skip
    C.ADD_GRADIENTS(ds, scores, at.b, at.head, at.rows, at.keys, call.pointers.captured)


@triton.jit
def visible_scores(at, call, C: tl.constexpr):
    """Return which scores of a tile are visible. The result is arbitrary for keys past the sequence's end."""
    pointers, strides, lengths = call.pointers, call.strides, call.lengths
    seen = visible(at.distance, lengths.window_left, lengths.window_right, C.HAS_LEFT, C.HAS_RIGHT)
    if C.HAS_CHUNK:
        first = (
            at.positions - at.positions % lengths.attention_chunk
        )  # arbitrary for negative positions, which see no key
        seen = seen & (at.positions >= 0) & (at.keys >= first)
        seen = seen & (at.keys - first < lengths.attention_chunk)
    if C.HAS_MASK:
        seen = seen & load_broadcast(pointers.mask, strides.mask, at, lengths, C.MASK_HAS_ROWS, False, C)
    if C.HAS_PADDING:
        keys = pointers.key_padding_mask + at.b.to(tl.int64) * strides.padding.batch
        keys += at.keys.to(tl.int64) * strides.padding.key
        if C.EVEN_N:
            seen = seen & tl.load(keys)
        else:
            seen = seen & tl.load(keys, mask=at.keys < lengths.seqlen_k, other=False)
    if C.MASK_MOD is not None:
        seen = seen & C.MASK_MOD(at.b, at.head, at.rows, at.keys, pointers.captured)
    return seen


@triton.jit
def load_broadcast(pointer, strides, at, lengths, HAS_ROWS: tl.constexpr, other, C: tl.constexpr):
    """Load a tile of a tensor that broadcasts to all scores; elements past its end are ``other``."""
    base = pointer + at.b.to(tl.int64) * strides.batch + at.head.to(tl.int64) * strides.head
    rows, keys = at.rows, at.keys
    if C.WIDE_SCORES:
        rows, keys = rows.to(tl.int64), keys.to(tl.int64)
    place = keys * strides.key
    if HAS_ROWS:
        place = rows * strides.row + place
    # Whole blocks need no mask, so loads can be vectorized.
    if C.EVEN_N and (C.EVEN_M or not HAS_ROWS):
        return tl.load(base + place)
    inside = keys < lengths.seqlen_k
    if HAS_ROWS and not C.EVEN_M:
        inside = inside & (rows < lengths.seqlen_q)
    return tl.load(base + place, mask=inside, other=other)


@triton.jit
def load_state(rng_state, C: tl.constexpr):
    """Load (seed, offset) of dropout's generator; zeros without dropout."""
    if C.HAS_DROPOUT:
        return tl.load(rng_state), tl.load(rng_state + 1).to(tl.uint32)
    else:
        return 0, 0


@triton.jit
def units_of(start, PER_SIXTEEN: tl.constexpr, BLOCK: tl.constexpr):
    """Return (unit, position modulo 16) for each of BLOCK positions from ``start`` on, both [BLOCK].

    A unit is a group of positions that share random words; 16 positions form PER_SIXTEEN units. ``start`` is
    a multiple of 16.
    """
    i = tl.arange(0, BLOCK)
    number = start // 16 * PER_SIXTEEN + i // 16 * PER_SIXTEEN + i % 8 * PER_SIXTEEN // 8
    return number.to(tl.uint32), i % 16


@triton.jit
def random_bits(key, word, other, second):
    """Return the first word of Philox-2x32-7 for the counter (``word``, ``other``).

    Where ``second`` is True, return the second word instead.
    """
    for _ in tl.static_range(7):
        product = word.to(tl.uint64) * MULTIPLIER
        word, other = (product >> 32).to(tl.uint32) ^ key ^ other, product.to(tl.uint32)
        key = tl.add(key, KEY_STEP, sanitize_overflow=False)
    return tl.where(second, other, word)


@triton.jit
def dropout_mask(block, row_start, key_start, call, KEYS_FIRST: tl.constexpr, C: tl.constexpr):
    """Return which probabilities dropout keeps, [BLOCK_M, BLOCK_N], transposed with KEYS_FIRST.

    ``flashtile.dropout`` defines which probabilities are kept, given the seed and offset. The code computes
    random words for every probability, although eight probabilities share their words. In the layout of a
    matrix product, one thread holds all eight of them. In the layout of a transposed product, one thread
    holds four of them. So the compiler can compute a shared word once per thread.
    """
    # The key depends only on the sequence and head, so it is computed once.
    head = (block.b * call.lengths.num_heads_q + block.head).to(tl.uint32)
    zero = tl.full([], 0, tl.uint32)
    key, first_row, first_key, _ = tl.philox(call.seed, head, call.rng_offset, zero, zero)
    rows, row = units_of(row_start, 8, C.BLOCK_M)
    keys, column = units_of(key_start, 4, C.BLOCK_N)
    rows, keys = rows ^ first_row, keys ^ first_key
    if KEYS_FIRST:
        rows, row, keys, column = rows[None, :], row[None, :], keys[:, None], column[:, None]
    else:
        rows, row, keys, column = rows[:, None], row[:, None], keys[None, :], column[None, :]
    word = random_bits(key, rows, keys, row >= 8)
    exchanged = ((word & 0x00FF00FF) << 8) | ((word >> 8) & 0x00FF00FF)
    # Shift the number of 15 bits up to the highest bit. The bits below it do not change the comparison.
    number = tl.where(column < 8, word, exchanged) << (17 - column % 2 * 16)
    return number >= (call.lengths.drop_threshold.to(tl.uint32) << 17)


@triton.jit
def kept_or_zero(p, kept, call):
    """Set probabilities that dropout does not keep to 0."""
    # With a literal 0, the compiler would round P first and then unpack the rounded pairs.
    zero = call.numbers.keep_scale * 0.0
    return tl.where(kept, p, zero)
