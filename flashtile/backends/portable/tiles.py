"""Step functions that the forward and backward kernels share: which blocks, which sequence, scores, mods.

A *row* is a query position and a *key* a key position within one sequence; ``offset = seqlen_k - seqlen_q``
aligns them at the bottom right: row ``i`` stands at key ``i + offset``.
"""

import triton
import triton.language as tl

from flashtile.backends.common.tiles import LOG2_E, Matrix, sequence
from flashtile.backends.portable.arguments import Cells, Sequence


@triton.jit
def block_range(
    start,
    end,
    offset,
    length,
    back,
    ahead,
    HAS_BACK: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blocks of the other sequence that positions ``start <= i < end`` reach, in three runs.

    Position ``i`` reaches from ``i + offset - back`` to ``i + offset + ahead`` of a sequence of ``length``.
    Returns block numbers ``first <= full_first <= full_last <= last``: blocks [full_first, full_last) are
    reached whole by every position and lie within the sequence; the rest of [first, last) needs a mask. Plain
    integers in, plain integers out: Python calls it as ``block_range.fn``.
    """
    reach_start = 0
    full_start = 0
    reach_end = length
    full_end = length
    if HAS_BACK:
        reach_start = max(0, start + offset - back)
        full_start = max(0, end - 1 + offset - back)
    if HAS_AHEAD:
        reach_end = min(length, max(0, end + offset + ahead))
        full_end = min(length, max(0, start + offset + ahead + 1))
    last = (reach_end + BLOCK - 1) // BLOCK
    full_first = min((full_start + BLOCK - 1) // BLOCK, last)
    first = min(reach_start // BLOCK, full_first)
    full_last = min(max(full_end // BLOCK, full_first), last)
    return first, full_first, full_last, last


@triton.jit
def chunk_range(start, end, attention_chunk):
    """Positions that share a chunk with ``start <= i < end``: the first, and the one behind the last."""
    first = max(start, 0)
    first -= first % attention_chunk
    last = max(end - 1, 0)
    last += attention_chunk - last % attention_chunk
    if end <= 0:
        last = first
    return first, last


@triton.jit
def used_length(seqused, b, length):
    """How many of the ``length`` tokens of sequence ``b`` are used; within it whatever ``seqused`` says."""
    if seqused is None:
        return length
    else:
        return min(max(tl.load(seqused + b), 0), length)


@triton.jit
def find_sequence(pointers, lengths, b, C: tl.constexpr):
    """Sequence ``b`` of the batch, within the tensors whatever ``cu_seqlens`` and ``seqused_k`` say."""
    start_q, len_q = sequence(pointers.cu_seqlens_q, b, lengths.seqlen_q, lengths.total_q, C.VARLEN)
    start_k, len_k = sequence(pointers.cu_seqlens_k, b, lengths.seqlen_k, lengths.total_k, C.VARLEN)
    len_q = used_length(pointers.seqused_q, b, len_q)
    len_k = used_length(pointers.seqused_k, b, len_k)
    return Sequence(b, start_q, start_k, len_q, len_k)


@triton.jit
def head_of(pointer, strides, b, start, head, length):
    """``head`` of the sequence whose ``length`` tokens lie from token ``start`` of batch entry ``b`` on."""
    base = pointer + b.to(tl.int64) * strides.batch + start * strides.token + head.to(tl.int64) * strides.head
    return Matrix(base, strides.token, length)


@triton.jit
def row_block(
    seqlen_q, num_heads_q, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
    SEQUENCES_FIRST: tl.constexpr = False,
):  # fmt: skip
    """(sequence, query head, first row) of a program in a grid of (blocks of rows * heads * batch,)."""
    num_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    # Under a causal mask the last rows reach the most keys: start them first.
    m_block = pid % num_blocks
    if HAS_RIGHT:
        m_block = num_blocks - 1 - m_block
    b, head = sequence_and_head(pid // num_blocks, num_blocks, num_heads_q, SEQUENCES_FIRST)
    return b, head, m_block * BLOCK_M


@triton.jit
def sequence_and_head(i, num_blocks, num_heads, SEQUENCES_FIRST: tl.constexpr):
    """Of the ``i``-th in a grid of (blocks * heads * batch,)."""
    if SEQUENCES_FIRST:
        batch = tl.num_programs(0) // (num_blocks * num_heads)
        return i % batch, i // batch
    else:
        return i // num_heads, i % num_heads


@triton.jit
def result_bases(
    out_ptr, lse_ptr, b, head, start_q, num_heads_q, seqlen_q, total_q, HEAD_DIM_V: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Where the sequence's first row of ``head`` lies in out and in lse."""
    if VARLEN:
        row = start_q * num_heads_q
        lse_row = head.to(tl.int64) * total_q + start_q
    else:
        row = b.to(tl.int64) * seqlen_q * num_heads_q
        lse_row = (b.to(tl.int64) * num_heads_q + head) * seqlen_q
    return out_ptr + (row + head) * HEAD_DIM_V, lse_ptr + lse_row


@triton.jit
def store_tile(
    base,
    start,
    length,
    stride,
    tile,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the rows of [BLOCK, BLOCK_D] that lie before ``length`` to a contiguous output."""
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    pointers = base + start.to(tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    inside = (start + rows < length)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def tanh(x):
    # Near zero 1 - 2 / (1 + e^2x) cancels. A polynomial in x^2, fitted by Chebyshev nodes to |x| < 0.6, is as
    # exact there as fp32 can be; both stay under 1.7e-7.
    square = x * x
    series = 0.021116216321754266 - square * 0.006276390510260175
    series = -0.05387513883149152 + square * series
    series = 0.13332924012835118 + square * series
    series = x + x * square * (-0.33333330431516917 + square * series)
    # e^2x may overflow to inf, which gives 1, or underflow to 0, which gives -1.
    return tl.where(square < 0.36, series, 1 - 2 / (1 + tl.exp2(x * (2 * LOG2_E))))


@triton.jit
def apply_score_mod(
    scores, distance, slope, softmax_scale, softcap, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr
):
    """Raw products -> (scores in log2 units, the soft-cap's derivative), with soft-cap and ALiBi.

    ``distance`` is key minus row position in the orientation of ``scores``.
    """
    scores, softcap_grad = cap_and_bias(
        scores, distance, slope, softmax_scale, softcap, HAS_SOFTCAP, HAS_ALIBI
    )
    return scores * LOG2_E, softcap_grad


@triton.jit
def cap_and_bias(
    scores, distance, slope, softmax_scale, softcap, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr
):
    """:func:`apply_score_mod`, in natural units."""
    scores = scores * softmax_scale
    if HAS_SOFTCAP:
        capped = tanh(scores / softcap)
        scores = softcap * capped
        softcap_grad = 1 - capped * capped
    else:
        softcap_grad = tl.full([], 1.0, tl.float32)
    if HAS_ALIBI:
        scores = scores - slope * tl.abs(distance).to(tl.float32)
    return scores, softcap_grad


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
def modify_scores(scores, cells, block, lengths, numbers, mods, C: tl.constexpr, bias=None):
    """Raw products -> (scores in log2 units, their derivative by the scaled product).

    ``bias`` is that of the cells where it is loaded already. Every kernel of the forward and backward pass
    modifies its scores here and nowhere else.
    """
    scores, score_grad = cap_and_bias(
        scores, cells.distance, block.slope, numbers.softmax_scale, numbers.softcap, C.HAS_SOFTCAP,
        C.HAS_ALIBI,
    )  # fmt: skip
    if C.HAS_BIAS:
        if bias is None:
            bias = load_cells(mods.bias, mods.bias_strides, cells, lengths, C.BIAS_HAS_ROWS, 0.0, C)
        scores = scores + bias.to(tl.float32)
    if C.SCORE_MOD is not None:
        scores, own_grad = C.SCORE_MOD(scores, cells.b, cells.head, cells.rows, cells.keys, block.captured)
        score_grad = score_grad * own_grad
    return scores * LOG2_E, score_grad


@triton.jit
def add_gradients(ds, scores, cells, block, numbers, C: tl.constexpr):
    """Add to the gradients of captured tensors: ``ds`` is that of the modified scores, ``scores`` raw."""
    scores, _ = cap_and_bias(
        scores, cells.distance, block.slope, numbers.softmax_scale, numbers.softcap, C.HAS_SOFTCAP,
        C.HAS_ALIBI,
    )  # fmt: skip
    C.ADD_GRADIENTS(ds, scores, cells.b, cells.head, cells.rows, cells.keys, block.captured)


@triton.jit
def walked_block(block, i, length, BLOCK: tl.constexpr, C: tl.constexpr):
    """Number of the block that is visited as ``i``-th, of those of the other sequence: all, or a list's."""
    if block.listed is None:
        return i
    else:
        most = tl.cdiv(length, BLOCK * C.PARTS) - 1
        return min(max(tl.load(block.listed + i // C.PARTS), 0), most) * C.PARTS + i % C.PARTS


@triton.jit
def seen_cells(cells, block, lengths, mods, C: tl.constexpr):
    """Which scores of a tile take part, as far as their sequence has them."""
    seen = visible(cells.distance, lengths.window_left, lengths.window_right, C.HAS_LEFT, C.HAS_RIGHT)
    if C.HAS_CHUNK:
        first = cells.positions - cells.positions % lengths.attention_chunk  # of those that are no key's, any
        seen = seen & (cells.positions >= 0) & (cells.keys >= first)
        seen = seen & (cells.keys - first < lengths.attention_chunk)
    if C.HAS_MASK:
        seen = seen & load_cells(mods.mask, mods.mask_strides, cells, lengths, C.MASK_HAS_ROWS, False, C)
    if C.HAS_PADDING:
        keys = mods.padding + cells.b.to(tl.int64) * mods.padding_stride_b
        keys += cells.keys.to(tl.int64) * mods.padding_stride_k
        if C.EVEN_N:
            seen = seen & tl.load(keys)
        else:
            seen = seen & tl.load(keys, mask=cells.keys < lengths.seqlen_k, other=False)
    if C.MASK_MOD is not None:
        seen = seen & C.MASK_MOD(cells.b, cells.head, cells.rows, cells.keys, block.captured)
    return seen


@triton.jit
def load_cells(pointer, strides, cells, lengths, HAS_ROWS: tl.constexpr, other, C: tl.constexpr):
    """What a tensor that broadcasts to all scores has for a tile; ``other`` beyond it."""
    base = pointer + cells.b.to(tl.int64) * strides.batch + cells.head.to(tl.int64) * strides.head
    rows, keys = cells.rows, cells.keys
    if C.WIDE_CELLS:
        rows, keys = rows.to(tl.int64), keys.to(tl.int64)
    place = keys * strides.key
    if HAS_ROWS:
        place = rows * strides.row + place
    # Whole blocks need no look at each element, so that several are loaded at once.
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
    """Of ``BLOCK`` positions from ``start``, a multiple of 16: the number of those that share words, counted
    PER_SIXTEEN, and the positions modulo 16."""
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
def kept_cells(block, row_start, key_start, lengths, mods, KEYS_FIRST: tl.constexpr, C: tl.constexpr):
    """[BLOCK_M, BLOCK_N], or transposed with KEYS_FIRST: which probabilities dropout keeps.

    ``flashtile.dropout`` says how they follow from the state. Each probability computes its words as if they
    were its own. But one thread holds all eight that share them, in the layout of a matrix product, and four
    of them in that of its transpose, and the compiler sees that they are the same.
    """
    # Of a sequence and head, so that it is computed once.
    head = (block.b * lengths.num_heads_q + block.head).to(tl.uint32)
    zero = tl.full([], 0, tl.uint32)
    key, first_row, first_key, _ = tl.philox(mods.seed, head, mods.offset, zero, zero)
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
    return number >= (lengths.drop_threshold.to(tl.uint32) << 17)


@triton.jit
def kept_or_zero(p, kept, numbers):
    """Probabilities, 0 where dropout does not keep them."""
    # The compiler must not know that it is 0: it would round first and take the packed pairs apart again.
    zero = numbers.keep_scale * 0.0
    return tl.where(kept, p, zero)


@triton.jit
def within_chunks(first, last, start, end, offset, lengths, BLOCK: tl.constexpr, C: tl.constexpr):
    """Of blocks of keys ``first`` to ``last``, those that share a chunk with rows ``start`` to ``end``."""
    if C.HAS_CHUNK:
        chunk_start, chunk_end = chunk_range(start + offset, end + offset, lengths.attention_chunk)
        first = max(first, chunk_start // BLOCK)
        last = min(last, (chunk_end + BLOCK - 1) // BLOCK)
    return first, last


@triton.jit
def bounded(first, last, mods, b, BLOCK: tl.constexpr, C: tl.constexpr):
    """Of blocks of keys from ``first`` to ``last``, those with keys that padding leaves."""
    if C.HAS_PADDING:
        start = tl.load(mods.key_bounds + 2 * b)
        end = tl.load(mods.key_bounds + 2 * b + 1)
        first = max(first, start // BLOCK)
        last = min(last, (end + BLOCK - 1) // BLOCK)
    return first, last


@triton.jit
def visible(distance, back, ahead, HAS_BACK: tl.constexpr, HAS_AHEAD: tl.constexpr):
    """Whether a window of ``back`` and ``ahead`` keys admits a key at ``distance`` from the row."""
    if HAS_BACK and HAS_AHEAD:
        return (distance >= -back) & (distance <= ahead)
    elif HAS_BACK:
        return distance >= -back
    elif HAS_AHEAD:
        return distance <= ahead
    else:
        return tl.full(distance.shape, True, tl.int1)


@triton.jit
def load_slope(alibi_slopes, alibi_stride_b, b, head, HAS_ALIBI: tl.constexpr):
    if HAS_ALIBI:
        return tl.load(alibi_slopes + b * alibi_stride_b + head)
    else:
        return 0.0
