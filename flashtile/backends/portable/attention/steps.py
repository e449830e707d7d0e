"""Steps of all attention kernels: which tiles a program visits, and how products become scores.

Every program owns a tile of rows or of keys, loads it once, and *walks* the tiles of the other sequence::

    sequence, head, head_kv, start = own_rows(call, C)       or own_keys, for dk and dv
    block   = block_at(start, ...)                           what scores depend on: position, slope
    reached = reached_keys(start, ...)                       or reaching_rows
    state   = walk(STEP, state, ...)                         STEP is the kernel's inner loop

``call`` holds the arguments of the launch, ``C`` its constants (:mod:`arguments`). ``reached`` are four
numbers of tiles, between which lie the three runs of the walk::

            first    full_first           full_last    last
              | edge, masked | inside, unmasked | edge, masked |
                  run 0            run 1             run 2

Within STEP the order is that of the definition of attention, and each function is the only one of its kind:
raw products, :func:`modify_scores` (scale, soft-cap, ALiBi, bias, score_mod), :func:`visible_scores`
(position, mask, padding, mask_mod), the exponential of the kernel, :func:`dropout_mask`.

A *row* is a query position and a *key* a key position within one sequence; ``offset = seqlen_k - seqlen_q``
aligns them at the bottom right: row ``i`` stands at key ``i + offset``.
"""

import triton.language as tl

from flashtile.backends.common.jit import triton
from flashtile.backends.common.tiles import LOG2_E, sequence
from flashtile.backends.portable.attention.arguments import AttentionSequence, Block, ScoreIndices
from flashtile.backends.portable.masking import block_range, visible, window_at
from flashtile.backends.portable.tiles import (
    head_of,
    load_slope,
    row_block,
    sequence_and_head,
    softcap_and_alibi,
    used_length,
)
from flashtile.dropout import KEY_STEPS, SMALL_MULTIPLIER

MULTIPLIER, KEY_STEP = tl.constexpr(SMALL_MULTIPLIER), tl.constexpr(KEY_STEPS[0])
"""Constants of Philox-2x32 (Salmon et al. 2011)."""


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
    # Keys in their order: under a causal mask the first keys are seen by the most rows, so the longest
    # programs start first. own_rows counts from the other end for the same reason.
    start = (pid % num_blocks) * C.BLOCK_N
    b, head_kv = sequence_and_head(pid // num_blocks, num_blocks, num_heads_kv, C.SEQUENCES_FIRST)
    return find_sequence(b, call, C), head_kv, start


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
def queries_of(sequence, head, call):
    """Return the queries of ``head`` in a sequence, as a :class:`Matrix`."""
    return head_of(call.pointers.q, call.strides.q, sequence.b, sequence.start_q, head, sequence.len_q)


@triton.jit
def keys_of(sequence, head_kv, call):
    """Return the keys of a key/value head in a sequence, as a :class:`Matrix`."""
    return head_of(call.pointers.k, call.strides.k, sequence.b, sequence.start_k, head_kv, sequence.len_k)


@triton.jit
def values_of(sequence, head_kv, call):
    """Return the values of a key/value head in a sequence, as a :class:`Matrix`."""
    return head_of(call.pointers.v, call.strides.v, sequence.b, sequence.start_k, head_kv, sequence.len_k)


@triton.jit
def block_at(start, sequence, head, call, C: tl.constexpr):
    """Return the :class:`Block` of the rows or keys from ``start`` on, for query head ``head``."""
    slope = load_slope(call.pointers.alibi_slopes, call.lengths.alibi_stride, sequence.b, head, C.HAS_ALIBI)
    return Block(sequence.b, head, start, sequence.len_k - sequence.len_q, slope)


@triton.jit
def reached_keys(start, sequence, call, C: tl.constexpr):
    """Return the key blocks that the rows from ``start`` on reach: (first, full_first, full_last, last).

    As in :func:`block_range`, these numbers divide the blocks into three ranges: one edge of the window,
    blocks within the window, the other edge. If C.MASKS_EVERY_BLOCK, the third range covers all blocks, and
    :func:`walk` uses only that range.
    """
    lengths = call.lengths
    offset = sequence.len_k - sequence.len_q
    end = min(start + C.BLOCK_M, sequence.len_q)
    of_first = window_at(start + offset, 0, lengths.mask, C)
    of_last = window_at(end - 1 + offset, 0, lengths.mask, C)
    first, full_first, full_last, last = block_range(
        start, end, offset, sequence.len_k, of_first, of_last, C.HAS_LEFT, C.HAS_RIGHT, C.BLOCK_N
    )
    if C.MASKS_EVERY_BLOCK:
        first, last = clip_to_padding(first, last, call, sequence.b, C.BLOCK_N)
        full_last = first  # any block may have hidden keys: run 2 takes them all
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
    of_first = window_at(start, 0, lengths.mask, C, MIRRORED=True)
    of_last = window_at(end - 1, 0, lengths.mask, C, MIRRORED=True)
    first, full_first, full_last, last = block_range(
        start, end, -offset, sequence.len_q, of_first, of_last, C.HAS_RIGHT, C.HAS_LEFT, C.BLOCK_M
    )
    if C.MASKS_EVERY_BLOCK:
        full_last = first
        if call.pointers.key_bounds is not None:  # keys that are all padding: no row needs to be visited
            own = start // C.BLOCK_N
            first_keys, last_keys = clip_to_padding(own, own + 1, call, sequence.b, C.BLOCK_N)
            last = first if first_keys >= last_keys else last
    elif not C.HAS_LEFT:
        # Seen from keys, HAS_LEFT hides the last rows. Without it no edge follows: rows past the end have
        # probability 0 without a mask (their neg_lse is -inf), so run 1 goes through to the end and run 2 is
        # not compiled.
        full_last = last
    return first, full_first, full_last, last


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
def walk(STEP: tl.constexpr, state, inputs, reached, block, call, OWNS_KEYS: tl.constexpr, C: tl.constexpr):
    """Apply ``STEP`` to all tiles that ``block`` visits, and return the final ``state``.

    ``STEP(state, inputs, first, last, listed, block, call, MASKED, C)`` processes tiles ``first`` to ``last``
    (exclusive), either of the range ``reached`` or of a block mask's list ``listed``. ``reached`` consists of
    three ranges: one edge of the window, tiles within the window, and the other edge or the end of the
    sequence. A block mask's full blocks are processed first, by a variant without MASK_MOD.
    """
    # A partial last block is an edge only for rows: keys past the end need a mask, rows past the end do not.
    FIRST_EDGE: tl.constexpr = C.HAS_RIGHT if OWNS_KEYS else C.HAS_LEFT
    LAST_EDGE: tl.constexpr = C.HAS_LEFT if OWNS_KEYS else (C.HAS_RIGHT or not C.EVEN_N)
    if C.MASK_BLOCK > 0:
        FULL: tl.constexpr = C.FULL  # for Triton 3.6, which does not treat the field as a constant; 3.7 does
        # Two loops, because mask_mod is compiled into the second only: full blocks do not pay for it. A block
        # is full for mask_mod alone. A window, or the end of the keys, may hide scores of it, so it is masked
        # if the call has either.
        count, listed = listed_blocks(block, call, True, OWNS_KEYS, C)
        state = STEP(state, inputs, 0, count, listed, block, call, FIRST_EDGE or LAST_EDGE, FULL)
        count, listed = listed_blocks(block, call, False, OWNS_KEYS, C)
        state = STEP(state, inputs, 0, count, listed, block, call, True, C)
    else:
        first, full_first, full_last, last = reached
        # A run that is empty for every program of the call is not compiled. Without a window and with whole
        # blocks, only run 1 is left, and it has no mask. A run that is compiled may still be empty for a
        # program: its loop then has no iterations.
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


@triton.jit
def listed_blocks(block, call, IS_FULL: tl.constexpr, OWNS_KEYS: tl.constexpr, C: tl.constexpr):
    """Return (number of tiles that ``block`` visits, pointer to its list) for a block mask.

    The number is clamped to the length of the list.
    """
    lists, lengths = call.pointers.lists, call.lengths
    # ``others`` are mask blocks of the other sequence: a list has room for all of them.
    if OWNS_KEYS:
        num_own = tl.cdiv(lengths.seqlen_k, C.MASK_BLOCK)
        num_others = tl.cdiv(lengths.seqlen_q, C.BLOCK_M * C.TILES_PER_MASK_BLOCK)
    else:
        num_own = tl.cdiv(lengths.seqlen_q, C.MASK_BLOCK)
        num_others = tl.cdiv(lengths.seqlen_k, C.BLOCK_N * C.TILES_PER_MASK_BLOCK)
    # Modulo, because a mask of one sequence or head serves all of them.
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
        # The list is data on the device that no host has checked: an invalid entry must not leave the tensor.
        most = tl.cdiv(length, BLOCK * C.TILES_PER_MASK_BLOCK) - 1
        entry = min(max(tl.load(listed + i // C.TILES_PER_MASK_BLOCK), 0), most)
        return entry * C.TILES_PER_MASK_BLOCK + i % C.TILES_PER_MASK_BLOCK


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
    # A new score takes part in the derivative by the chain rule: soft-cap and SCORE_MOD are factors, what is
    # added (ALiBi, a bias) is none.
    numbers, pointers = call.numbers, call.pointers
    scores, score_grad = softcap_and_alibi(
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
    if TO_LOG2:  # exp2 is the instruction of the hardware; exp multiplies by log2(e) first
        scores = scores * LOG2_E
    return scores, score_grad


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
def visible_scores(at, call, C: tl.constexpr):
    """Return which scores of a tile are visible. The result is arbitrary for keys past the sequence's end."""
    pointers, strides, lengths = call.pointers, call.strides, call.lengths
    seen = visible(at.distance, window_at(at.positions, 0, lengths.mask, C), lengths.mask, C)
    if C.HAS_MASK:
        seen = seen & load_broadcast(pointers.mask, strides.mask, at, lengths, C.MASK_HAS_ROWS, False, C)
    if C.HAS_PADDING:
        keys = pointers.key_padding_mask + at.b.to(tl.int64) * strides.padding.batch
        keys += at.keys.to(tl.int64) * strides.padding.key
        # Without a mask on the load, it can be vectorized.
        if C.EVEN_N:
            seen = seen & tl.load(keys)
        else:
            seen = seen & tl.load(keys, mask=at.keys < lengths.seqlen_k, other=False)
    if C.MASK_MOD is not None:
        seen = seen & C.MASK_MOD(at.b, at.head, at.rows, at.keys, pointers.captured)
    return seen


@triton.jit
def load_state(rng_state, C: tl.constexpr):
    """Load (seed, offset) of dropout's generator; zeros without dropout."""
    if C.HAS_DROPOUT:
        return tl.load(rng_state), tl.load(rng_state + 1).to(tl.uint32)
    else:
        return 0, 0


@triton.jit
def dropout_mask(block, row_start, key_start, call, KEYS_FIRST: tl.constexpr, C: tl.constexpr):
    """Return which probabilities dropout keeps, [BLOCK_M, BLOCK_N], transposed with KEYS_FIRST.

    ``flashtile.dropout`` defines which probabilities are kept, given the seed and offset. The code computes
    random words for every probability, although eight probabilities share their words. In the layout of a
    matrix product, one thread holds all eight of them. In the layout of a transposed product, one thread
    holds four of them. So the compiler can compute a shared word once per thread.
    """
    # One call of Philox for the scores of a thread that share it, in both orders of the scores: the forward
    # pass with dropout takes 486 instead of 725 us (H200, S 2048, D 128, causal). The key depends only on the
    # sequence and head, so it is computed once.
    head = (block.b * call.lengths.num_heads_q + block.head).to(tl.uint32)
    zero = tl.full([], 0, tl.uint32)
    key, first_row, first_key, _ = tl.philox(call.seed, head, call.rng_offset, zero, zero)
    # Eight scores share a counter: rows i and i + 8 by keys j, j + 1, j + 8 and j + 9. Of 16 rows there are 8
    # such pairs, of 16 keys 4 such fours.
    rows, row = units_of(row_start, 8, C.BLOCK_M)
    keys, column = units_of(key_start, 4, C.BLOCK_N)
    # A key of Philox-2x32 has 32 bits. The other words of the head go into the counters.
    rows, keys = rows ^ first_row, keys ^ first_key
    if KEYS_FIRST:
        rows, row, keys, column = rows[None, :], row[None, :], keys[:, None], column[:, None]
    else:
        rows, row, keys, column = rows[:, None], row[:, None], keys[None, :], column[None, :]
    word = random_bits(key, rows, keys, row >= 8)
    # Keys j and j + 8 share a half word, whose bytes are exchanged for j + 8. The exchange makes numbers of
    # 15 bits, which cost 2 to 8 % over numbers of 7 (H200). Reversing whole words takes fewer instructions,
    # but spilled at D 128.
    exchanged = ((word & 0x00FF00FF) << 8) | ((word >> 8) & 0x00FF00FF)
    # An even key has bits 0 to 14, an odd one bits 16 to 30. They are shifted up to the highest bit. The bits
    # below them do not change the comparison.
    number = tl.where(column < 8, word, exchanged) << (17 - column % 2 * 16)
    return number >= (call.lengths.drop_threshold.to(tl.uint32) << 17)


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
    for _ in tl.static_range(7):  # the fewest rounds that passed BigCrush (Salmon et al. 2011)
        product = word.to(tl.uint64) * MULTIPLIER
        word, other = (product >> 32).to(tl.uint32) ^ key ^ other, product.to(tl.uint32)
        key = tl.add(key, KEY_STEP, sanitize_overflow=False)  # Philox's key wraps around by definition
    return tl.where(second, other, word)


@triton.jit
def kept_or_zero(p, kept, call):
    """Set probabilities that dropout does not keep to 0."""
    # With a literal 0, the compiler would round P first and then unpack the rounded pairs.
    zero = call.numbers.keep_scale * 0.0
    return tl.where(kept, p, zero)
