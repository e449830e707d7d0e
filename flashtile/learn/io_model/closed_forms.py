"""Closed forms of the bytes that the papers' algorithms move between HBM and SRAM.

The papers' machine is assumed: no cache between HBM and SRAM, and an SRAM that holds the tiles of one
program. Every load and store counts (Dao et al. 2022, arXiv:2205.14135, theorem 2; Dao 2023,
arXiv:2307.08691). The results equal the counts that the algorithms in ``flashtile.algorithms`` make as they
run, summed over sequences and heads. Each query head reads its own keys and values, except in
:func:`flash_decoding`.

Block sizes are (rows of queries, rows of keys). The algorithms derive them from the size of SRAM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flashtile.hardware.calls import Call, walks
from flashtile.learn.algorithms import tiled_matmul
from flashtile.learn.algorithms.memory import Memory
from flashtile.learn.algorithms.paged import TABLE_ENTRY_BYTES
from flashtile.learn.io_model.kernels import STATISTIC_BYTES, counted


@dataclass(frozen=True)
class Cost:
    """Bytes moved between HBM and SRAM, FLOPs of matrix products, and extra bytes held in HBM.

    ``extra_bytes`` are held in addition to the inputs and results.
    """

    hbm_read: int
    hbm_written: int
    matmul_flops: int
    extra_bytes: int

    @property
    def hbm_bytes(self) -> int:
        return self.hbm_read + self.hbm_written


def standard_forward(call: Call, sram_bytes: int | None = None) -> Cost:
    """Cost of S = Q K^T, P = softmax(S), O = P V with S and P in HBM (Dao et al. 2022, algorithm 0).

    The mask hides scores, but all of them are computed and stored.

    Args:
        sram_bytes: size of the SRAM that tiles of the products and rows of the softmax must fit into. None
            means that each product and softmax reads its inputs once.
    """
    return _standard(call, sram_bytes, ("qdk", "qkv"), inputs=1, statistics=2, stored=2)


def standard_backward(call: Call, sram_bytes: int | None = None) -> Cost:
    """Cost of the backward pass with P kept from the forward pass (Dao et al. 2022, algorithm 3).

    dV = P^T dO, dP = dO V^T, dS = P (dP - D), dQ = dS K, dK = dS^T Q. ``sram_bytes`` is as for
    :func:`standard_forward`.
    """
    return _standard(call, sram_bytes, ("kqv", "qvk", "qkd", "kqd"), inputs=2, statistics=1, stored=3)


def _standard(
    call: Call, sram_bytes: int | None, products: Sequence[str], *, inputs: int, statistics: int, stored: int
) -> Cost:
    """Cost of matrix products and one softmax or softmax gradient.

    Each string of ``products`` gives the sizes (rows, depth, columns) of a product by three letters: q is
    seqlen_q, k is seqlen_k, d is head_dim and v is head_dim_v. "qdk" is Q K^T. The softmax reads ``inputs``
    score matrices and keeps ``statistics`` numbers per row in SRAM. ``stored`` score matrices are held in
    HBM.
    """
    read = written = flops = 0
    for seqlen_q, seqlen_k in call.sequences:
        sizes = {"q": seqlen_q, "k": seqlen_k, "d": call.head_dim, "v": call.width_v}
        read += _softmax_reads(call, seqlen_q, seqlen_k, sram_bytes, inputs, statistics)
        written += seqlen_q * seqlen_k
        for rows, depth, cols in ([sizes[letter] for letter in product] for product in products):
            read += _product_reads(call, rows, depth, cols, sram_bytes)
            written += rows * cols
            flops += 2 * rows * depth * cols
    elements = call.num_heads_q * call.element_bytes
    return Cost(
        hbm_read=read * elements,
        hbm_written=written * elements,
        matmul_flops=flops * call.num_heads_q,
        extra_bytes=stored * call.score_pairs * call.element_bytes,
    )


def flash1_forward(call: Call, blocks: tuple[int, int]) -> Cost:
    """Cost of FlashAttention 1, algorithm 1: an outer loop over keys and values, an inner loop over queries.

    O, l and m go to HBM and back once for every block of keys: Theta(N^2 d^2 / M) traffic. Blocks that a mask
    hides are not skipped.
    """
    passes = _passes(call, blocks[1])
    running = call.width_v * call.element_bytes + 2 * STATISTIC_BYTES  # bytes of O, l and m per row
    return Cost(
        hbm_read=_keys(call) + passes * (call.head_dim * call.element_bytes + running),
        hbm_written=(call.rows_q + passes) * running,  # initial values, then one write per pass
        matmul_flops=2 * call.score_pairs * (call.head_dim + call.width_v),
        extra_bytes=2 * STATISTIC_BYTES * call.rows_q,
    )


def flash1_backward(call: Call, blocks: tuple[int, int]) -> Cost:
    """Cost of FlashAttention 1, algorithm 4: an outer loop over keys and values, an inner loop over queries.

    Each block of keys reads all of Q, O, dO, dQ, l and m and writes dQ back.
    """
    passes = _passes(call, blocks[1])
    q, out = call.head_dim * call.element_bytes, call.width_v * call.element_bytes
    return Cost(
        hbm_read=_keys(call) + passes * (2 * q + 2 * out + 2 * STATISTIC_BYTES),
        hbm_written=call.q_bytes + passes * q + _keys(call),
        matmul_flops=2 * call.score_pairs * (3 * call.head_dim + 2 * call.width_v),
        extra_bytes=2 * STATISTIC_BYTES * call.rows_q,
    )


def flash2_forward(call: Call, blocks: tuple[int, int]) -> Cost:
    """Cost of FlashAttention 2, algorithm 1: an outer loop over queries, an inner loop over keys and values.

    O and the log-sum-exp are written once. Blocks that the mask hides entirely are skipped.
    """
    keys = pairs = 0
    for rows, seen, count in _visible_tiles(call, blocks):
        keys += seen * count
        pairs += rows * seen * count
    row_bytes = (call.head_dim + call.width_v) * call.element_bytes
    return Cost(
        hbm_read=call.q_bytes + keys * row_bytes,
        hbm_written=call.out_bytes + call.rows_q * STATISTIC_BYTES,
        matmul_flops=2 * pairs * (call.head_dim + call.width_v),
        extra_bytes=call.rows_q * STATISTIC_BYTES,
    )


def flash2_backward(call: Call, blocks: tuple[int, int]) -> Cost:
    """Cost of FlashAttention 2, algorithm 2: D of each row first, then an outer loop over blocks of keys.

    For each block of rows that attends to the keys, the inner loop reads Q, dO, dQ, the log-sum-exp and D,
    and writes dQ back.
    """
    rows_read = pairs = 0
    for keys, rows, count in _visible_tiles(call, blocks, by_keys=True):
        rows_read += rows * count
        pairs += rows * keys * count
    q, out = call.head_dim * call.element_bytes, call.width_v * call.element_bytes
    return Cost(
        hbm_read=2 * call.out_bytes + _keys(call) + rows_read * (2 * q + out + 2 * STATISTIC_BYTES),
        hbm_written=call.rows_q * STATISTIC_BYTES + call.q_bytes + rows_read * q + _keys(call),
        matmul_flops=2 * pairs * (3 * call.head_dim + 2 * call.width_v),
        extra_bytes=2 * STATISTIC_BYTES * call.rows_q,
    )


def flash_decoding(call: Call, splits: int) -> Cost:
    """Cost of Flash-Decoding without a mask: the keys of each head are cut into ``splits`` parts.

    The query heads of a group share a tile. A second kernel merges the partial results by their log-sum-exp.
    """
    partial = splits * call.rows_q * (call.width_v + 1) * STATISTIC_BYTES
    return Cost(
        hbm_read=splits * call.q_bytes + call.k_bytes + call.v_bytes + partial,
        hbm_written=partial + call.out_bytes + call.rows_q * STATISTIC_BYTES,
        matmul_flops=2 * call.score_pairs * (call.head_dim + call.width_v),
        extra_bytes=partial + call.rows_q * STATISTIC_BYTES,
    )


def paged(call: Call, page_size: int) -> Cost:
    """Cost of PagedAttention: FlashAttention 2 whose blocks of keys are pages, each with a block table entry.

    Each head has one block of query rows.
    """
    blocks = (max(1, call.seqlen_q), page_size)
    cost = flash2_forward(call, blocks)
    looked_up = sum(-(-seen // page_size) * count for _, seen, count in _visible_tiles(call, blocks))
    entries = sum(-(-seqlen_k // page_size) for _, seqlen_k in call.sequences)
    return replace(
        cost,
        hbm_read=cost.hbm_read + TABLE_ENTRY_BYTES * looked_up,
        extra_bytes=cost.extra_bytes + TABLE_ENTRY_BYTES * entries,
    )


def _product_reads(call: Call, rows: int, depth: int, cols: int, sram_bytes: int | None) -> int:
    """Return the number of elements that a tiled product of (rows, depth) by (depth, cols) reads."""
    block_m, block_n = max(1, rows), max(1, cols)
    if sram_bytes is not None:
        memory = Memory(sram_bytes, call.element_bytes)
        block_m, block_n = tiled_matmul.block_sizes(memory, max(1, cols))
    return rows * depth * -(-cols // block_n) + depth * cols * -(-rows // block_m)


def _softmax_reads(
    call: Call, rows: int, cols: int, sram_bytes: int | None, inputs: int, statistics: int
) -> int:
    """Return the number of elements that a softmax or its gradient reads.

    Rows that do not fit into SRAM are read twice.
    """
    fits = sram_bytes is None or inputs * cols + statistics <= sram_bytes // call.element_bytes
    return inputs * rows * cols * (1 if fits else 2)


def _keys(call: Call) -> int:
    """Return the number of bytes of k and v that are read if each query head reads its own copy."""
    return (call.k_bytes + call.v_bytes) * call.group_size


def _passes(call: Call, block_n: int) -> int:
    """Return the number of rows of q that are read if every block of keys reads all rows."""
    return call.num_heads_q * sum(seqlen_q * -(-seqlen_k // block_n) for seqlen_q, seqlen_k in call.sequences)


def _visible_tiles(
    call: Call, blocks: tuple[int, int], *, by_keys: bool = False
) -> Iterator[tuple[int, int, int]]:
    """Yield (rows, keys loaded, count) for the blocks of query rows of all sequences and heads.

    ``rows`` is the number of rows in a block. ``count`` is the number of times that the block occurs: in
    every head, and in each of several neighbouring sequences of equal lengths. With ``by_keys``, yield (keys,
    rows loaded, count) for the blocks of keys.
    """
    for lengths, count in counted(call.sequences):
        seen = walks(call, lengths, blocks, by_keys=by_keys)
        (own, other), (block, other_block) = (lengths[::-1], blocks[::-1]) if by_keys else (lengths, blocks)
        for start, part in zip(range(0, own, block), seen, strict=True):
            loaded = max(0, min(part.stop * other_block, other) - part.start * other_block)
            yield min(block, own - start), loaded, count * call.num_heads_q
