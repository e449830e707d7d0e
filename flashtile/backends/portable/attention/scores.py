"""Steps on tiles of scores, shared by all attention kernels: score modifications, masks and dropout.

A *row* is a query position and a *key* a key position within one sequence; row ``i`` stands at key ``i +
offset``.
"""

import triton
import triton.language as tl

from flashtile.backends.common.tiles import LOG2_E
from flashtile.backends.portable.attention.arguments import Cells
from flashtile.backends.portable.tiles import cap_and_bias, visible


@triton.jit
def cells_of(block, rows, keys, KEYS_FIRST: tl.constexpr):
    """Where the scores of ``rows`` by ``keys`` lie, or with KEYS_FIRST of ``keys`` by ``rows``."""
    if KEYS_FIRST:
        rows, keys = rows[None, :], keys[:, None]
    else:
        rows, keys = rows[:, None], keys[None, :]
    positions = rows + block.offset
    return Cells(block.b, block.head, rows, keys, positions, keys - positions)


@triton.jit
def modify_scores(scores, cells, block, call, C: tl.constexpr, bias=None):
    """Raw products -> (scores in log2 units, their derivative by the scaled product).

    ``bias`` is that of the cells where it is loaded already. Every kernel of the forward and backward pass
    modifies its scores here and nowhere else.
    """
    numbers, pointers = call.numbers, call.pointers
    scores, score_grad = cap_and_bias(
        scores, cells.distance, block.slope, numbers.softmax_scale, numbers.softcap, C.HAS_SOFTCAP,
        C.HAS_ALIBI,
    )  # fmt: skip
    if C.HAS_BIAS:
        if bias is None:
            bias = load_cells(pointers.bias, call.strides.bias, cells, call.lengths, C.BIAS_HAS_ROWS, 0.0, C)
        scores = scores + bias.to(tl.float32)
    if C.SCORE_MOD is not None:
        scores, own_grad = C.SCORE_MOD(
            scores, cells.b, cells.head, cells.rows, cells.keys, pointers.captured
        )  # fmt: skip
        score_grad = score_grad * own_grad
    return scores * LOG2_E, score_grad


@triton.jit
def add_gradients(ds, scores, cells, block, call, C: tl.constexpr):
    """Add to gradients of captured tensors; ``ds``: of the modified scores, ``scores``: raw products."""
    scores, _ = cap_and_bias(
        scores, cells.distance, block.slope, call.numbers.softmax_scale, call.numbers.softcap, C.HAS_SOFTCAP,
        C.HAS_ALIBI,
    )  # fmt: skip
    C.ADD_GRADIENTS(ds, scores, cells.b, cells.head, cells.rows, cells.keys, call.pointers.captured)


@triton.jit
def seen_cells(cells, call, C: tl.constexpr):
    """Which scores of a tile take part, as far as their sequence has them."""
    pointers, strides, lengths = call.pointers, call.strides, call.lengths
    seen = visible(cells.distance, lengths.window_left, lengths.window_right, C.HAS_LEFT, C.HAS_RIGHT)
    if C.HAS_CHUNK:
        first = cells.positions - cells.positions % lengths.attention_chunk  # of those that are no key's, any
        seen = seen & (cells.positions >= 0) & (cells.keys >= first)
        seen = seen & (cells.keys - first < lengths.attention_chunk)
    if C.HAS_MASK:
        seen = seen & load_cells(pointers.mask, strides.mask, cells, lengths, C.MASK_HAS_ROWS, False, C)
    if C.HAS_PADDING:
        keys = pointers.key_padding_mask + cells.b.to(tl.int64) * strides.padding.batch
        keys += cells.keys.to(tl.int64) * strides.padding.key
        if C.EVEN_N:
            seen = seen & tl.load(keys)
        else:
            seen = seen & tl.load(keys, mask=cells.keys < lengths.seqlen_k, other=False)
    if C.MASK_MOD is not None:
        seen = seen & C.MASK_MOD(cells.b, cells.head, cells.rows, cells.keys, pointers.captured)
    return seen


@triton.jit
def load_cells(pointer, strides, cells, lengths, HAS_ROWS: tl.constexpr, other, C: tl.constexpr):
    """Load a tile of a tensor that broadcasts to all scores; elements past its end are ``other``."""
    base = pointer + cells.b.to(tl.int64) * strides.batch + cells.head.to(tl.int64) * strides.head
    rows, keys = cells.rows, cells.keys
    if C.WIDE_CELLS:
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
    """(seed, offset) of dropout's generator."""
    if C.HAS_DROPOUT:
        return tl.load(rng_state), tl.load(rng_state + 1).to(tl.uint32)
    else:
        return 0, 0


@triton.jit
def units_of(start, PER_SIXTEEN: tl.constexpr, BLOCK: tl.constexpr):
    """Return, for ``BLOCK`` positions from ``start`` (a multiple of 16), the index of the random words each
    uses (PER_SIXTEEN of them per 16 positions), and the position modulo 16."""
    i = tl.arange(0, BLOCK)
    number = start // 16 * PER_SIXTEEN + i // 16 * PER_SIXTEEN + i % 8 * PER_SIXTEEN // 8
    return number.to(tl.uint32), i % 16


@triton.jit
def dropout_words(key, word, other, second):
    """Philox-2x32-7 of a key and a counter: its first word, or its second."""
    for _ in tl.static_range(7):
        product = word.to(tl.uint64) * 0xD256D193
        word, other = (product >> 32).to(tl.uint32) ^ key ^ other, product.to(tl.uint32)
        key = tl.add(key, 0x9E3779B9, sanitize_overflow=False)
    return tl.where(second, other, word)


@triton.jit
def kept_cells(block, row_start, key_start, call, KEYS_FIRST: tl.constexpr, C: tl.constexpr):
    """[BLOCK_M, BLOCK_N], or transposed with KEYS_FIRST: which probabilities dropout keeps.

    ``flashtile.dropout`` says how they follow from the state. Each probability computes its words as if they
    were its own. But one thread holds all eight that share them, in the layout of a matrix product, and four
    of them in that of its transpose, and the compiler sees that they are the same.
    """
    # Of a sequence and head, so that it is computed once.
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
    # A number's bits begin at the sign; without FINE_DROPOUT what lies below them makes no difference.
    to_sign = tl.where(column < 8, 17, 25) - column % 2 * 16
    number = dropout_words(key, rows, keys, row >= 8) << to_sign
    if C.FINE_DROPOUT:
        low_bits = dropout_words(key, rows, keys ^ 0x80000000, row >= 8)
        byte = tl.where(column < 8, 0, 8) + column % 2 * 16
        number = (number & 0xFE000000) | ((low_bits >> byte & 0xFF) << 17)
    return number >= (call.lengths.drop_threshold.to(tl.uint32) << 17)


@triton.jit
def kept_or_zero(p, kept, call):
    """Set probabilities that dropout does not keep to 0."""
    # The compiler must not know that it is 0: it would round first and take the packed pairs apart again.
    zero = call.numbers.keep_scale * 0.0
    return tl.where(kept, p, zero)
