"""A program's own rows or keys, where they lie in memory, and which blocks of the other sequence it visits.

A *row* is a query position and a *key* a key position within one sequence; ``offset = seqlen_k - seqlen_q``
aligns them at the bottom right: row ``i`` stands at key ``i + offset``.
"""

import triton.language as tl

from flashtile.backends.common.deferred import triton
from flashtile.backends.common.preprocess import statistics_offset
from flashtile.backends.common.tiles import row_of_token, sequence
from flashtile.backends.portable.attention.arguments import AttentionSequence, Block
from flashtile.backends.portable.tiles import (
    block_range,
    chunk_range,
    head_of,
    load_slope,
    row_block,
    sequence_and_head,
    used_length,
)


@triton.jit
def find_sequence(b, call, C: tl.constexpr):
    """Load sequence ``b`` of the batch; ``cu_seqlens`` and ``seqused_k`` are clamped to the tensors."""
    pointers, lengths = call.pointers, call.lengths
    start_q, len_q = sequence(pointers.cu_seqlens_q, b, lengths.seqlen_q, lengths.total_q, C.VARLEN)
    start_k, len_k = sequence(pointers.cu_seqlens_k, b, lengths.seqlen_k, lengths.total_k, C.VARLEN)
    len_q = used_length(pointers.seqused_q, b, len_q)
    len_k = used_length(pointers.seqused_k, b, len_k)
    return AttentionSequence(b, start_q, start_k, len_q, len_k)


@triton.jit
def own_rows(call, C: tl.constexpr):
    """Return (sequence, query head, its key/value head, first row) of a program.

    Grid: (blocks of rows * query heads * batch,).
    """
    lengths = call.lengths
    b, head, start = row_block(
        lengths.seqlen_q, lengths.num_heads_q, C.HAS_RIGHT, C.BLOCK_M, C.SEQUENCES_FIRST
    )  # fmt: skip
    head_kv = head // lengths.group_size
    return find_sequence(b, call, C), head, head_kv, start


@triton.jit
def own_keys(call, C: tl.constexpr):
    """Return (sequence, key/value head, first key) of a program.

    Grid: (blocks of keys * key/value heads * batch,).
    """
    num_blocks = tl.cdiv(call.lengths.seqlen_k, C.BLOCK_N)
    num_heads_kv = call.lengths.num_heads_q // call.lengths.group_size
    pid = tl.program_id(0)
    start = (pid % num_blocks) * C.BLOCK_N
    b, head_kv = sequence_and_head(pid // num_blocks, num_blocks, num_heads_kv, C.SEQUENCES_FIRST)
    return find_sequence(b, call, C), head_kv, start


@triton.jit
def block_at(start, sequence, head, call, C: tl.constexpr):
    """Return the :class:`Block` of the rows or keys from ``start`` on, for query head ``head``."""
    slope = load_slope(call.pointers.alibi_slopes, call.lengths.alibi_stride, sequence.b, head, C.HAS_ALIBI)
    return Block(sequence.b, head, start, sequence.len_k - sequence.len_q, slope)


@triton.jit
def queries_of(sequence, head, call):
    """Return the queries of ``head`` in a sequence, as a :class:`Matrix`."""
    return head_of(call.pointers.q, call.strides.q, sequence.b, sequence.start_q, head, sequence.len_q)


@triton.jit
def keys_of(sequence, head_kv, call):
    return head_of(call.pointers.k, call.strides.k, sequence.b, sequence.start_k, head_kv, sequence.len_k)


@triton.jit
def values_of(sequence, head_kv, call):
    return head_of(call.pointers.v, call.strides.v, sequence.b, sequence.start_k, head_kv, sequence.len_k)


@triton.jit
def own_row(sequence, call, C: tl.constexpr):
    """Return the index of the sequence's first row, for head 0, in contiguous tensors shaped like q."""
    lengths = call.lengths
    return row_of_token(sequence.b, sequence.start_q, lengths.num_heads_q, lengths.seqlen_q, C.VARLEN)


@triton.jit
def statistics_of(sequence, head, padded_rows, call, C: tl.constexpr):
    """Return the offset of the rows of ``head`` in the statistics that ``common.preprocess`` wrote."""
    return statistics_offset(
        sequence.b, head, sequence.start_q, call.lengths.num_heads_q, padded_rows, C.VARLEN
    )  # fmt: skip


@triton.jit
def within_chunks(first, last, start, end, offset, lengths, BLOCK: tl.constexpr, C: tl.constexpr):
    """Narrow key blocks ``first`` to ``last`` to those that share a chunk with rows ``start`` to ``end``."""
    if C.HAS_CHUNK:
        chunk_start, chunk_end = chunk_range(start + offset, end + offset, lengths.attention_chunk)
        first = max(first, chunk_start // BLOCK)
        last = min(last, (chunk_end + BLOCK - 1) // BLOCK)
    return first, last


@triton.jit
def clip_to_padding(first, last, call, b, BLOCK: tl.constexpr):
    """Narrow key blocks ``first`` to ``last`` to the range with keys that are not padding."""
    if call.pointers.key_bounds is not None:
        start = tl.load(call.pointers.key_bounds + 2 * b)
        end = tl.load(call.pointers.key_bounds + 2 * b + 1)
        first = max(first, start // BLOCK)
        last = min(last, (end + BLOCK - 1) // BLOCK)
    return first, last


@triton.jit
def reached_keys(start, sequence, call, C: tl.constexpr):
    """Return the key blocks that the rows from ``start`` on reach: (first, full_first, full_last, last).

    As in :func:`block_range`, these numbers divide the blocks into three ranges: one edge of the window,
    blocks within the window, the other edge. If C.MASKS_EVERY_BLOCK, the third range covers all blocks, and
    :func:`walk` uses only that range.
    """
    lengths = call.lengths
    offset = sequence.len_k - sequence.len_q
    first, full_first, full_last, last = block_range(
        start, min(start + C.BLOCK_M, sequence.len_q), offset, sequence.len_k, lengths.window_left,
        lengths.window_right, C.HAS_LEFT, C.HAS_RIGHT, C.BLOCK_N,
    )  # fmt: skip
    if C.MASKS_EVERY_BLOCK:
        first, last = clip_to_padding(first, last, call, sequence.b, C.BLOCK_N)
        first, last = within_chunks(
            first, last, start, start + C.BLOCK_M, offset, lengths, C.BLOCK_N, C
        )  # fmt: skip
        full_last = first
    return first, full_first, full_last, last


@triton.jit
def reaching_rows(start, sequence, call, C: tl.constexpr):
    """Return the row blocks that reach the keys from ``start`` on: (first, full_first, full_last, last).

    As in :func:`reached_keys`, these numbers divide the blocks into three ranges. Seen from the keys, the
    window is mirrored: a key reaches window_right rows back and window_left ahead. If C.MASKS_EVERY_BLOCK,
    the third range covers all blocks, and :func:`walk` uses only that range.
    """
    lengths = call.lengths
    offset = sequence.len_k - sequence.len_q
    end = min(start + C.BLOCK_N, sequence.len_k)
    first, full_first, full_last, last = block_range(
        start, end, -offset, sequence.len_q, lengths.window_right, lengths.window_left, C.HAS_RIGHT,
        C.HAS_LEFT, C.BLOCK_M,
    )  # fmt: skip
    if C.MASKS_EVERY_BLOCK:
        if C.HAS_CHUNK:
            chunk_start, chunk_end = chunk_range(start, end, lengths.attention_chunk)
            first = max(first, (chunk_start - offset) // C.BLOCK_M)
            last = min(last, (max(chunk_end - offset, 0) + C.BLOCK_M - 1) // C.BLOCK_M)
        full_last = first
        if call.pointers.key_bounds is not None:  # no row visits a block of padding
            own = start // C.BLOCK_N
            first_keys, last_keys = clip_to_padding(own, own + 1, call, sequence.b, C.BLOCK_N)
            last = first if first_keys >= last_keys else last
    elif not C.HAS_LEFT:  # rows past the end have probability 0, so they need no mask
        full_last = last
    return first, full_first, full_last, last


@triton.jit
def listed_blocks(block, call, IS_FULL: tl.constexpr, OWNS_KEYS: tl.constexpr, C: tl.constexpr):
    """Return (number of tiles that ``block`` visits, pointer to its list) for a block mask.

    The number is clamped to the length of the list.
    """
    lists, lengths = call.pointers.lists, call.lengths
    if OWNS_KEYS:
        num_own = tl.cdiv(lengths.seqlen_k, C.MASK_BLOCK)
        num_others = tl.cdiv(lengths.seqlen_q, C.BLOCK_M * C.TILES_PER_MASK_BLOCK)
    else:
        num_own = tl.cdiv(lengths.seqlen_q, C.MASK_BLOCK)
        num_others = tl.cdiv(lengths.seqlen_k, C.BLOCK_N * C.TILES_PER_MASK_BLOCK)
    of_head = ((block.b % lists.batch) * lists.heads + block.head % lists.heads).to(tl.int64)
    place = of_head * num_own + block.start // C.MASK_BLOCK
    if IS_FULL:
        count, listed = tl.load(lists.full_num_blocks + place), lists.full_indices
    else:
        count, listed = tl.load(lists.num_blocks + place), lists.indices
    return min(max(count, 0), num_others) * C.TILES_PER_MASK_BLOCK, listed + place * num_others


@triton.jit
def walked_block(listed, i, length, BLOCK: tl.constexpr, C: tl.constexpr):
    """Return the index of the ``i``-th tile to visit.

    It is ``i`` without a block mask (``listed`` is None), else a tile of a block in the list ``listed``.
    """
    if listed is None:
        return i
    else:
        most = tl.cdiv(length, BLOCK * C.TILES_PER_MASK_BLOCK) - 1
        return (
            min(max(tl.load(listed + i // C.TILES_PER_MASK_BLOCK), 0), most) * C.TILES_PER_MASK_BLOCK
            + i % C.TILES_PER_MASK_BLOCK
        )


@triton.jit
def walk(STEP: tl.constexpr, state, inputs, reached, block, call, OWNS_KEYS: tl.constexpr, C: tl.constexpr):
    """Apply ``STEP`` to all tiles that ``block`` visits, and return the final ``state``.

    ``STEP(state, inputs, first, last, listed, block, call, MASKED, C)`` processes tiles ``first`` to ``last``
    (exclusive), either of the range ``reached`` or of a block mask's list ``listed``. ``reached`` consists of
    three ranges: one edge of the window, tiles within the window, and the other edge or the end of the
    sequence. A block mask's full blocks are processed first, by a variant without MASK_MOD.
    """
    FIRST_EDGE: tl.constexpr = C.HAS_RIGHT if OWNS_KEYS else C.HAS_LEFT
    LAST_EDGE: tl.constexpr = C.HAS_LEFT if OWNS_KEYS else (C.HAS_RIGHT or not C.EVEN_N)
    if C.MASK_BLOCK > 0:
        FULL: tl.constexpr = C.FULL  # Triton 3.6 does not treat the field as a constant
        count, listed = listed_blocks(block, call, True, OWNS_KEYS, C)
        state = STEP(state, inputs, 0, count, listed, block, call, FIRST_EDGE or LAST_EDGE, FULL)
        count, listed = listed_blocks(block, call, False, OWNS_KEYS, C)
        state = STEP(state, inputs, 0, count, listed, block, call, True, C)
    else:
        first, full_first, full_last, last = reached
        for RUN in tl.static_range(3):
            if (
                (RUN == 0 and FIRST_EDGE and not C.MASKS_EVERY_BLOCK)
                or (RUN == 1 and not C.MASKS_EVERY_BLOCK)
                or (RUN == 2 and (LAST_EDGE or C.MASKS_EVERY_BLOCK))
            ):
                begin = first if RUN == 0 else (full_first if RUN == 1 else full_last)
                end = full_first if RUN == 0 else (full_last if RUN == 1 else last)
                state = STEP(state, inputs, begin, end, None, block, call, RUN != 1, C)
    return state
