"""FlashAttention-2's backward pass (Dao 2023, arXiv:2307.08691, Algorithm 2) in portable Triton.

``common.preprocess`` runs first and leaves two floats per row, which the loops add instead of subtract::

    neg_lse   = -lse log2(e)              P  = 2^(S + neg_lse)
    neg_delta = dlse - rowsum(dO * O)     dS = P * (dP + neg_delta)      dlse minus the paper's D

dlse is the gradient of lse. It enters here because d lse / d S = P, so it costs no pass of its own. If the
entropy H of a row has a gradient, dH, dlse includes -dH H, and dS = P * (dP + neg_delta - dH log P). Scores
are in log2 units in every call. In calls with a bias or score_mod, rows with an lse of 2^24 or more have P 0,
because such an lse may err by 1 (``preprocess.LARGE_LSE``).

dkdv_kernel, one program per BLOCK_N keys of a key/value head::

    load K, V;  dK = dV = 0
    for each query head of the group:     GQA: the gradients of the group are summed in registers
        for each row block:               dkdv_blocks; everything transposed
            load Q, neg_lse     S^T = K Q^T -> P^T
            load dO             dV += P^T dO
            load neg_delta      dP^T = V dO^T;   dS^T = P^T * (dP^T + neg_delta);   dK += dS^T Q
    store scale dK, dV

dq_kernel, one program per BLOCK_M rows of a query head::

    load Q, dO, neg_lse, neg_delta;  dQ = 0
    for each key block:                   dq_blocks
            load K, V           S = Q K^T -> P;   dP = dO V^T;   dS = P * (dP + neg_delta);   dQ += dS K
    store scale dQ

Algorithm 2 adds to dQ in memory, from programs that own keys: five products. Two kernels recompute S and dP,
which makes seven. In return there are no atomics and no fp32 buffer of dQ; one program sums each gradient in
one order, so results are the same bits in every run; and each loop has its own tile.

Transposed, P^T and dS^T are the left operands of dV and dK. They stay in the registers in which the products
left them, and never pass through shared memory.

dbias_kernel, one program per BLOCK_M by BLOCK_N elements of the bias: dS, summed over all sequences, heads
and (if the bias is the same for all rows) rows that share the elements. It recomputes P and dP, two products
more than the gradients of q, k and v alone. In return each sum has one order, and dS is never in memory.
"""

from typing import Any, NamedTuple

import triton.language as tl

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.preprocess import statistics_offset
from flashtile.backends.common.tiles import LN_2, Matrix, load_tile, row_of_head, row_of_token
from flashtile.backends.portable.attention.arguments import (
    AttentionCall,
    AttentionSequence,
    ScoreIndices,
    attention_pointers,
)
from flashtile.backends.portable.attention.steps import (
    block_at,
    dropout_mask,
    find_sequence,
    kept_or_zero,
    keys_of,
    load_broadcast,
    load_state,
    modify_scores,
    own_keys,
    own_rows,
    queries_of,
    reached_keys,
    reaching_rows,
    score_indices,
    values_of,
    visible_scores,
    walk,
    walked_block,
)
from flashtile.backends.portable.masking import window_at
from flashtile.backends.portable.tiles import first_token, softcap_and_alibi, store_tile

DkdvPointers = attention_pointers("DkdvPointers", "q k v dout neg_lse neg_delta dentropy dk dv", __name__)


@kernel(do_not_specialize=("pointers", "padded_rows", "lengths"))
def dkdv_kernel(pointers, padded_rows, strides, lengths, numbers, C: tl.constexpr):
    """Compute dk and dv of BLOCK_N keys of a head per program.

    Grid: (blocks of keys * key/value heads * batch,). Shapes are those of the forward kernel. dout, dk and dv
    are contiguous. ``common.preprocess`` has written neg_lse and neg_delta. dk and dv of keys that
    ``seqused_k`` excludes are not written. A block mask has a list of row blocks for each key block.
    """
    seed, rng_offset = load_state(pointers.rng_state, C)
    call = AttentionCall(pointers, strides, lengths, numbers, seed, rng_offset)
    sequence, head_kv, start = own_keys(call, C)
    if start >= sequence.len_k:
        return
    num_heads_q, num_heads_kv = lengths.num_heads_q, lengths.num_heads_q // lengths.group_size

    # Prologue. Of q and dout only the first token's address: the head changes in the loop.
    q_token = first_token(pointers.q, strides.q, sequence.b, sequence.start_q)
    k = keys_of(sequence, head_kv, call)
    v = values_of(sequence, head_kv, call)
    row = row_of_token(sequence.b, sequence.start_q, num_heads_q, lengths.seqlen_q, C.VARLEN)
    dout_row = pointers.dout + row * C.HEAD_DIM_V
    key = row_of_token(sequence.b, sequence.start_k, num_heads_kv, lengths.seqlen_k, C.VARLEN) + head_kv
    BLOCK_N: tl.constexpr = C.BLOCK_N  # Triton does not accept a field of C in a shape
    BLOCK_D: tl.constexpr = C.BLOCK_D
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    k_tile = load_tile(k, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_N, C.WIDE)
    v_tile = load_tile(v, start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_N, C.WIDE)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # Main loop, once for each query head that shares these keys. Which rows reach them is the same for all.
    reaching = reaching_rows(start, sequence, call, C)
    for g in range(lengths.group_size):
        head = head_kv * lengths.group_size + g
        block = block_at(start, sequence, head, call, C)
        q = Matrix(q_token + head.to(tl.int64) * strides.q.head, strides.q.token, sequence.len_q)
        dout = Matrix(dout_row + head * C.HEAD_DIM_V, num_heads_q * C.HEAD_DIM_V, sequence.len_q)
        statistics = statistics_offset(
            sequence.b, head, sequence.start_q, num_heads_q, padded_rows, C.VARLEN
        )  # fmt: skip
        neg_lse, neg_delta = pointers.neg_lse + statistics, pointers.neg_delta + statistics
        if pointers.dentropy is None:
            inputs = (k_tile, v_tile, q, dout, neg_lse, neg_delta)
        else:
            of_entropy = entropy_gradient(sequence, head, call, C)
            inputs = (k_tile, v_tile, q, dout, neg_lse, neg_delta, of_entropy)  # type: ignore[assignment]
        dk, dv = walk(dkdv_blocks, (dk, dv), inputs, reaching, block, call, OWNS_KEYS=True, C=C)

    # Epilogue. Factors that are the same for all terms multiply the sums once.
    if C.HAS_DROPOUT:
        dv = dv * numbers.keep_scale
    store_tile(
        pointers.dk + key * C.HEAD_DIM, start, sequence.len_k, num_heads_kv * C.HEAD_DIM,
        dk * numbers.softmax_scale, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D,
    )  # fmt: skip
    store_tile(
        pointers.dv + key * C.HEAD_DIM_V, start, sequence.len_k, num_heads_kv * C.HEAD_DIM_V, dv, C.BLOCK_N,
        C.HEAD_DIM_V, C.BLOCK_DV,
    )  # fmt: skip


@triton.jit
def dkdv_blocks(
    state, inputs, first, last, listed, block, call, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Add row blocks ``first`` to ``last`` (exclusive) of one query head to dk, dv of the keys of ``block``.

    ``inputs``: tiles of k and v, a :class:`Matrix` for each of q and dout, and pointers to neg_lse and
    neg_delta of the first row. Scores are MASKED only for a window or a general mask: rows past the end have
    neg_lse -inf and so probability 0, and dk and dv of keys past the end are not stored.
    """
    dk, dv = state
    k, v, q, dout, neg_lse, neg_delta = inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], inputs[5]
    HAS_DENTROPY: tl.constexpr = call.pointers.dentropy is not None
    for m in range(first, last):
        start = walked_block(listed, m, q.length, C.BLOCK_M, C) * C.BLOCK_M
        q_tile = load_tile(q, start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
        neg_lse_rows = load_statistics(neg_lse, start, q.length, -float("inf"), listed, C)
        scores = tl.dot(k, tl.trans(q_tile), input_precision=C.PRECISION)  # S^T [BLOCK_N, BLOCK_M]
        if C.SCALED_SCORES or MASKED:
            keys = block.start + tl.arange(0, C.BLOCK_N)
            rows = start + tl.arange(0, C.BLOCK_M)
            at = score_indices(block, rows, keys, KEYS_FIRST=True)
        # P needs no maximum: lse is known, and no score exceeds it. neg_lse is added here. As the initial
        # accumulator of the product it would save the addition, but its loads were scattered in the machine
        # code.
        if C.SCALED_SCORES:
            scores, score_grad = modify_scores(scores, at, block, call, C)
            log_p = scores + neg_lse_rows[None, :]
        else:
            log_p = scores * call.numbers.scale_log2 + neg_lse_rows[None, :]
        p = tl.exp2(log_p)
        if MASKED:
            p = tl.where(visible_scores(at, call, C), p, 0.0)
        if C.GUARD_SCORES:  # SCORE_MOD may return NaN for rows past the end: NaN + -inf is NaN
            p = tl.where(neg_lse_rows[None, :] == -float("inf"), 0.0, p)
        # dout is contiguous, so offsets within its tile have 32 bits (WIDE False).
        dout_tile = load_tile(dout, start, C.BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_M, False)
        kept_p = p  # what multiplied V in the forward pass; dS needs P without dropout
        if C.HAS_DROPOUT:
            kept = dropout_mask(block, start, block.start, call, KEYS_FIRST=True, C=C)
            kept_p = kept_or_zero(p, kept, call)
        kept_p = kept_p.to(dout_tile.dtype)
        dv = tl.dot(kept_p, dout_tile, dv, input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_DV]
        # neg_delta is loaded late: it broadcasts along columns, so each thread holds many of its values.
        neg_delta_rows = load_statistics(neg_delta, start, q.length, 0.0, listed, C)
        dp = tl.dot(v, tl.trans(dout_tile), input_precision=C.PRECISION)  # dP^T [BLOCK_N, BLOCK_M]
        if C.HAS_DROPOUT:
            dp = tl.where(kept, dp * call.numbers.keep_scale, 0.0)
        dp = dp + neg_delta_rows[None, :]
        if HAS_DENTROPY:
            dp -= load_entropy_gradient(inputs[6], start, q.length, C)[None, :] * finite(log_p)
        ds = p * dp
        if C.HAS_SOFTCAP or C.SCORE_MOD is not None:
            ds = ds * score_grad
        if C.GUARD_FACTORS:  # score_grad need not be finite where a score is hidden, and 0 * inf is NaN
            ds = tl.where(p == 0.0, 0.0, ds)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_D]
    return dk, dv


@triton.jit
def entropy_gradient(sequence, head, call, C: tl.constexpr):
    """Return a pointer to the gradient of the entropy of a sequence's first row."""
    lengths = call.lengths
    return call.pointers.dentropy + row_of_head(
        sequence.b, head, sequence.start_q, lengths.num_heads_q, lengths.seqlen_q, lengths.total_q, C.VARLEN
    )


@triton.jit
def load_entropy_gradient(pointer, start, length, C: tl.constexpr):
    """Load dH of BLOCK_M rows, times log(2): it multiplies log2 P."""
    rows = start + tl.arange(0, C.BLOCK_M)
    return tl.load(pointer + rows, mask=rows < length, other=0.0) * LN_2


@triton.jit
def finite(log_p):
    """Return log2 P, or -1000 in place of less, -inf among it: P is 0 there, and 0 times -inf is NaN."""
    return tl.maximum(log_p, -1000.0)


@triton.jit
def load_statistics(pointer, start, length, other, listed, C: tl.constexpr):
    """Load neg_lse or neg_delta of BLOCK_M rows from ``start`` on.

    Blocks that a block mask lists may extend past the end of the statistics. Rows from ``length`` on then get
    ``other``.
    """
    if listed is None:
        # One wide address. With the start added to the rows instead, as below, Triton 3.6 spilled 776 instead
        # of 68 bytes in dkdv_kernel.
        return tl.load(pointer + start + tl.arange(0, C.BLOCK_M))
    else:
        rows = start + tl.arange(0, C.BLOCK_M)
        return tl.load(pointer + rows, mask=rows < length, other=other)


DqPointers = attention_pointers("DqPointers", "q k v dout neg_lse neg_delta dentropy dq", __name__)


@kernel(do_not_specialize=("pointers", "padded_rows", "lengths"))
def dq_kernel(pointers, padded_rows, strides, lengths, numbers, C: tl.constexpr):
    """Compute dq of BLOCK_M rows of a head per program.

    Grid: (blocks of rows * heads * batch,). Shapes are those of the forward kernel. dout and dq are
    contiguous. ``common.preprocess`` has written neg_lse and neg_delta. With C.ADD_GRADIENTS, the kernel also
    adds to the fp32 gradients of captured tensors.
    """
    seed, rng_offset = load_state(pointers.rng_state, C)
    call = AttentionCall(pointers, strides, lengths, numbers, seed, rng_offset)
    sequence, head, head_kv, start = own_rows(call, C)
    if start >= sequence.len_q:
        return

    # Prologue.
    q = queries_of(sequence, head, call)
    k = keys_of(sequence, head_kv, call)
    v = values_of(sequence, head_kv, call)
    row = row_of_token(sequence.b, sequence.start_q, lengths.num_heads_q, lengths.seqlen_q, C.VARLEN) + head
    block = block_at(start, sequence, head, call, C)
    BLOCK_M: tl.constexpr = C.BLOCK_M  # Triton does not accept a field of C in a shape
    BLOCK_D: tl.constexpr = C.BLOCK_D
    q_tile = load_tile(q, start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
    dout = Matrix(pointers.dout + row * C.HEAD_DIM_V, lengths.num_heads_q * C.HEAD_DIM_V, sequence.len_q)
    dout_tile = load_tile(dout, start, C.BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_M, False)
    statistics = statistics_offset(
        sequence.b, head, sequence.start_q, lengths.num_heads_q, padded_rows, C.VARLEN
    )  # fmt: skip
    statistics += start + tl.arange(0, C.BLOCK_M)
    # No mask: statistics are padded to whole blocks, with neg_lse -inf past the end. With that, and without
    # masks where lengths divide, dkdv_kernel reaches 527 to 569 instead of 406 to 445 TFLOP/s (H100, D 128).
    neg_lse = tl.load(pointers.neg_lse + statistics)
    neg_delta = tl.load(pointers.neg_delta + statistics)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Main loop and epilogue.
    reached = reached_keys(start, sequence, call, C)
    if pointers.dentropy is None:
        inputs = (q_tile, dout_tile, neg_lse, neg_delta, k, v)
    else:
        of_entropy = entropy_gradient(sequence, head, call, C)
        of_entropy = load_entropy_gradient(of_entropy, start, sequence.len_q, C)
        inputs = (q_tile, dout_tile, neg_lse, neg_delta, k, v, of_entropy)  # type: ignore[assignment]
    dq = walk(dq_blocks, dq, inputs, reached, block, call, OWNS_KEYS=False, C=C)
    store_tile(
        pointers.dq + row * C.HEAD_DIM, start, sequence.len_q,
        lengths.num_heads_q * C.HEAD_DIM, dq * numbers.softmax_scale, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D,
    )  # fmt: skip


@triton.jit
def dq_blocks(
    dq, inputs, first, last, listed, block, call, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Add key blocks ``first`` to ``last`` (exclusive) to dq of the rows of ``block``.

    ``inputs``: tiles of q and dout, neg_lse and neg_delta [BLOCK_M], and a :class:`Matrix` for each of k and
    v.
    """
    q, dout, neg_lse, neg_delta, k, v = inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], inputs[5]
    HAS_DENTROPY: tl.constexpr = call.pointers.dentropy is not None
    # Unlike rows, keys past the end have no statistics that make P 0, so a partial last block is masked.
    PAST_END: tl.constexpr = MASKED and not C.EVEN_N
    for n in range(first, last):
        start = walked_block(listed, n, k.length, C.BLOCK_N, C) * C.BLOCK_N
        k_tile = load_tile(k, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, PAST_END, C.WIDE)
        v_tile = load_tile(v, start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, PAST_END, C.WIDE)
        products = tl.dot(q, tl.trans(k_tile), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        dp = tl.dot(dout, tl.trans(v_tile), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        if C.SCALED_SCORES or MASKED:
            keys = start + tl.arange(0, C.BLOCK_N)
            rows = block.start + tl.arange(0, C.BLOCK_M)
            at = score_indices(block, rows, keys, KEYS_FIRST=False)
        if C.SCALED_SCORES:
            scores, score_grad = modify_scores(products, at, block, call, C)
            log_p = scores + neg_lse[:, None]
        else:
            log_p = products * call.numbers.scale_log2 + neg_lse[:, None]
        p = tl.exp2(log_p)
        if MASKED:
            seen = visible_scores(at, call, C)
            if PAST_END:
                seen = seen & (keys < k.length)[None, :]
            p = tl.where(seen, p, 0.0)
        if C.GUARD_SCORES:  # SCORE_MOD may return NaN for rows past the end
            p = tl.where(neg_lse[:, None] == -float("inf"), 0.0, p)
        if C.HAS_DROPOUT:
            kept = dropout_mask(block, block.start, start, call, KEYS_FIRST=False, C=C)
            dp = tl.where(kept, dp * call.numbers.keep_scale, 0.0)
        dp = dp + neg_delta[:, None]
        if HAS_DENTROPY:
            dp -= inputs[6][:, None] * finite(log_p)
        ds = p * dp
        if C.ADD_GRADIENTS is not None:
            # The function takes scores as SCORE_MOD does, so they are computed from the products again.
            # dkdv_kernel visits the same scores and must not add them a second time.
            unmodified, _ = softcap_and_alibi(
                products, at.distance, block.slope, call.numbers.softmax_scale, call.numbers.softcap,
                C.HAS_SOFTCAP, C.HAS_ALIBI,
            )  # fmt: skip
            C.ADD_GRADIENTS(ds, unmodified, at.b, at.head, at.rows, at.keys, call.pointers.captured)
        if C.HAS_SOFTCAP or C.SCORE_MOD is not None:
            ds = ds * score_grad
        if C.GUARD_FACTORS:  # score_grad need not be finite where a score is hidden
            ds = tl.where(p == 0.0, 0.0, ds)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_D]
    return dq


DbiasPointers = attention_pointers("DbiasPointers", "q k v dout neg_lse neg_delta dentropy dbias", __name__)


class BiasSizes(NamedTuple):
    """Batch size of the call, and the sizes of the bias, which are 1 where the bias broadcasts."""

    batch: Any
    bias_batch: Any
    bias_heads: Any
    bias_rows: Any


@kernel(do_not_specialize=("pointers", "sizes", "padded_rows", "lengths"))
def dbias_kernel(pointers, sizes, padded_rows, strides, lengths, numbers, C: tl.constexpr):
    """Compute the gradient of the bias, BLOCK_M by BLOCK_N elements per program.

    Grid: (blocks of keys * blocks of rows * bias_heads * bias_batch,). dbias [bias_batch, bias_heads,
    bias_rows, seqlen_k] is contiguous. Other arguments are those of ``dq_kernel``.
    """
    seed, rng_offset = load_state(pointers.rng_state, C)
    call = AttentionCall(pointers, strides, lengths, numbers, seed, rng_offset)
    BLOCK_M: tl.constexpr = C.BLOCK_M  # Triton does not accept a field of C in a shape
    BLOCK_N: tl.constexpr = C.BLOCK_N
    key_blocks = tl.cdiv(lengths.seqlen_k, BLOCK_N)
    row_blocks = tl.cdiv(sizes.bias_rows, BLOCK_M)
    pid = tl.program_id(0)
    key_start = (pid % key_blocks) * BLOCK_N
    # Block of rows, head and sequence *of the bias*: each is 0 where the bias broadcasts.
    own_block = (pid // key_blocks) % row_blocks
    own_head = (pid // (key_blocks * row_blocks)) % sizes.bias_heads
    own_sequence = pid // (key_blocks * row_blocks * sizes.bias_heads)
    # The program sums over all sequences, heads and row blocks that share its elements of the bias.
    sequences = sizes.batch // sizes.bias_batch
    heads = lengths.num_heads_q // sizes.bias_heads
    blocks = 1
    if not C.BIAS_HAS_ROWS:
        blocks = tl.cdiv(lengths.seqlen_q, BLOCK_M)

    # If all sequences have the same length, one loop of ``rounds`` covers sequences and heads, so its loads
    # pipeline: 5078 instead of 6054 us for a bias (1, heads, S, S) at S 2048, D 64 on an H200. The outer loop
    # over sequences then has one round.
    ALIKE: tl.constexpr = not C.VARLEN and pointers.seqused_q is None and pointers.seqused_k is None
    rounds = heads
    if ALIKE:
        rounds = heads * sequences
        sequences = 1

    ds = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    keys = key_start + tl.arange(0, BLOCK_N)
    bias_rows = own_block * BLOCK_M + tl.arange(0, BLOCK_M)
    # Loaded once: all scores that are summed over share these elements. 0, 0: a bias needs no positions.
    elements_at = ScoreIndices(own_sequence, own_head, bias_rows[:, None], keys[None, :], 0, 0)
    bias = load_broadcast(pointers.bias, strides.bias, elements_at, lengths, C.BIAS_HAS_ROWS, 0.0, C)
    for i in range(sequences):
        first = find_sequence(own_sequence + i, call, C)
        for m in range(blocks):
            row_start = (own_block + m) * BLOCK_M
            # Whether any row of the tile may see any of its keys, by lengths and positions.
            offset = first.len_k - first.len_q
            reached = (row_start < first.len_q) & (key_start < first.len_k)
            if C.HAS_RIGHT:
                position = row_start + C.BLOCK_M - 1 + offset
                _, right = window_at(position, 0, lengths.mask, C)
                reached = reached & (key_start <= position + right)
            if C.HAS_LEFT:
                position = row_start + offset
                left, _ = window_at(position, 0, lengths.mask, C)
                reached = reached & (key_start + C.BLOCK_N > position - left)
            # A loop of zero rounds instead of a branch: the accumulator stays in its registers.
            for n in range(tl.where(reached, rounds, 0)):
                b = own_sequence + i + n // heads
                sequence = AttentionSequence(b, first.start_q, first.start_k, first.len_q, first.len_k)
                ds += bias_gradient(
                    bias, row_start, key_start, sequence, own_head + n % heads, padded_rows, call, C
                )

    row_stride = lengths.seqlen_k
    if C.EVEN_N:  # lengths are not specialized, so Triton does not know that rows are aligned
        row_stride = tl.multiple_of(row_stride, 16)
    first_row = (own_sequence.to(tl.int64) * sizes.bias_heads + own_head) * sizes.bias_rows
    elements = pointers.dbias + first_row * row_stride + keys
    dtype: tl.constexpr = pointers.dbias.dtype.element_ty
    if C.BIAS_HAS_ROWS:
        inside = (bias_rows < sizes.bias_rows)[:, None] & (keys < lengths.seqlen_k)[None, :]
        addresses = elements[None, :] + bias_rows.to(tl.int64)[:, None] * row_stride
        tl.store(addresses, ds.to(dtype), mask=inside)
    else:
        tl.store(elements, tl.sum(ds, 0).to(dtype), mask=keys < lengths.seqlen_k)


@triton.jit
def bias_gradient(bias, row_start, key_start, sequence, head, padded_rows, call, C: tl.constexpr):
    """Return dS [BLOCK_M, BLOCK_N] of one head. ``bias``: the tile of the bias, [BLOCK_M, BLOCK_N]."""
    head_kv = head // call.lengths.group_size
    block = block_at(row_start, sequence, head, call, C)
    rows = row_start + tl.arange(0, C.BLOCK_M)
    keys = key_start + tl.arange(0, C.BLOCK_N)
    q = queries_of(sequence, head, call)
    num_heads_q, seqlen_q = call.lengths.num_heads_q, call.lengths.seqlen_q
    row = row_of_token(sequence.b, sequence.start_q, num_heads_q, seqlen_q, C.VARLEN) + head
    dout = Matrix(call.pointers.dout + row * C.HEAD_DIM_V, num_heads_q * C.HEAD_DIM_V, sequence.len_q)
    k, v = keys_of(sequence, head_kv, call), values_of(sequence, head_kv, call)
    statistics = statistics_offset(sequence.b, head, sequence.start_q, num_heads_q, padded_rows, C.VARLEN)
    statistics += rows
    q_tile = load_tile(q, row_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
    k_tile = load_tile(k, key_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_N, C.WIDE)
    v_tile = load_tile(v, key_start, C.BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_N, C.WIDE)
    dout_tile = load_tile(dout, row_start, C.BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_M, False)
    neg_lse = tl.load(call.pointers.neg_lse + statistics)
    neg_delta = tl.load(call.pointers.neg_delta + statistics)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=C.PRECISION)
    at = score_indices(block, rows, keys, KEYS_FIRST=False)
    scores, _ = modify_scores(scores, at, block, call, C, bias)
    log_p = scores + neg_lse[:, None]
    p = tl.exp2(log_p)
    # Masked in every tile: one loop visits edges and inner tiles of the window alike.
    p = tl.where(visible_scores(at, call, C), p, 0.0)
    if C.HAS_DROPOUT:
        kept = dropout_mask(block, row_start, key_start, call, KEYS_FIRST=False, C=C)
        dp = tl.where(kept, dp * call.numbers.keep_scale, 0.0)
    # No GUARD_SCORES or GUARD_FACTORS: a call with a score_mod has no bias.
    dp = dp + neg_delta[:, None]
    if call.pointers.dentropy is not None:
        of_entropy = entropy_gradient(sequence, head, call, C)
        dp -= load_entropy_gradient(of_entropy, row_start, sequence.len_q, C)[:, None] * finite(log_p)
    ds = p * dp
    if not C.EVEN_N:  # the last tile of keys; rows past the end have P 0
        ds = tl.where((keys < sequence.len_k)[None, :], ds, 0.0)
    return ds
