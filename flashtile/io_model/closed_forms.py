"""What the papers' algorithms move between HBM and SRAM, in closed form.

The machine is that of the papers: no cache between the two, an SRAM that holds the tiles of one program, all
loads and stores counted (Dao et al. 2022, arXiv:2205.14135, theorem 2; Dao 2023, arXiv:2307.08691). They are
the counts of the algorithms in ``flashtile.algorithms``, which count as they run, summed over sequences and
heads; each query head reads keys and values of its own, but in :func:`flash_decoding`.

Block sizes are (rows of queries, rows of keys); the algorithms' own come from an SRAM's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flashtile.algorithms import tiled_matmul
from flashtile.algorithms.memory import Memory
from flashtile.hardware.calls import Call
from flashtile.io_model.kernels import counted, walks

STATISTIC_BYTES = 4
"""Of a running maximum, a sum or a log-sum-exp, and of partial results: fp32."""

TABLE_ENTRY_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """Bytes between HBM and SRAM, FLOPs of matrix products, and bytes of HBM beyond inputs and results."""

    hbm_read: int
    hbm_written: int
    matmul_flops: int
    extra_bytes: int

    @property
    def hbm_bytes(self) -> int:
        return self.hbm_read + self.hbm_written


def standard_forward(call: Call, sram_bytes: int | None = None) -> Cost:
    """S = Q K^T, P = softmax(S), O = P V, each written out and read back (Dao et al. 2022, algorithm 0).

    The mask hides scores, but all of them are computed and stored.

    Args:
        sram_bytes: what tiles of the products and rows of the softmax have to fit into; None is an SRAM in
            which each product reads its inputs once.
    """
    return _standard(call, sram_bytes, ("qdk", "qkv"), inputs=1, statistics=2, stored=2)


def standard_backward(call: Call, sram_bytes: int | None = None) -> Cost:
    """dV = P^T dO, dP = dO V^T, dS = P (dP - D), dQ = dS K, dK = dS^T Q with P kept from the forward pass
    (Dao et al. 2022, algorithm 3); ``sram_bytes`` as for :func:`standard_forward`."""
    return _standard(call, sram_bytes, ("kqv", "qvk", "qkd", "kqd"), inputs=2, statistics=1, stored=3)


def _standard(
    call: Call, sram_bytes: int | None, products: Sequence[str], *, inputs: int, statistics: int, stored: int
) -> Cost:
    """The cost of matrix products, a softmax of ``inputs`` and ``statistics``, and ``stored`` score matrices.

    A product is (rows, depth, columns): q is seqlen_q, k seqlen_k, d head_dim, v head_dim_v.
    """
    read = written = flops = 0
    for seqlen_q, seqlen_k in call.sequences:
        sizes = {"q": seqlen_q, "k": seqlen_k, "d": call.head_dim, "v": call.width_v}
        moved = [_softmax(call, seqlen_q, seqlen_k, sram_bytes, inputs, statistics)]
        for rows, depth, cols in ([sizes[letter] for letter in product] for product in products):
            moved.append(_product(call, rows, depth, cols, sram_bytes))
            flops += 2 * rows * depth * cols
        read += sum(step[0] for step in moved)
        written += sum(step[1] for step in moved)
    elements = call.num_heads_q * call.element_bytes
    return Cost(
        hbm_read=read * elements,
        hbm_written=written * elements,
        matmul_flops=flops * call.num_heads_q,
        extra_bytes=stored * call.score_pairs * call.element_bytes,
    )


def flash1_forward(call: Call, blocks: tuple[int, int]) -> Cost:
    """FlashAttention 1, algorithm 1: keys and values outside, queries inside, so that O, l and m go to HBM
    and back once for every block of keys. Theta(N^2 d^2 / M). Blocks that a mask hides are not skipped."""
    passes = _passes(call, blocks[1])
    running = call.width_v * call.element_bytes + 2 * STATISTIC_BYTES  # of a row: O, l, m
    return Cost(
        hbm_read=_keys(call) + passes * (call.head_dim * call.element_bytes + running),
        hbm_written=(call.rows_q + passes) * running,  # the first are zeros
        matmul_flops=2 * call.score_pairs * (call.head_dim + call.width_v),
        extra_bytes=2 * STATISTIC_BYTES * call.rows_q,
    )


def flash1_backward(call: Call, blocks: tuple[int, int]) -> Cost:
    """FlashAttention 1, algorithm 4: for each block of keys all of Q, O, dO, dQ, l and m, and dQ back."""
    passes = _passes(call, blocks[1])
    q, out = call.head_dim * call.element_bytes, call.width_v * call.element_bytes
    return Cost(
        hbm_read=_keys(call) + passes * (2 * q + 2 * out + 2 * STATISTIC_BYTES),
        hbm_written=call.q_bytes + passes * q + _keys(call),
        matmul_flops=2 * call.score_pairs * (3 * call.head_dim + 2 * call.width_v),
        extra_bytes=2 * STATISTIC_BYTES * call.rows_q,
    )


def flash2_forward(call: Call, blocks: tuple[int, int]) -> Cost:
    """FlashAttention 2, algorithm 1: queries outside, keys and values inside; O and the log-sum-exp are
    written once, and blocks that the mask hides whole are skipped."""
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
    """FlashAttention 2, algorithm 2: D of each row first; then keys outside, and for each block of rows that
    sees them Q, dO, dQ, the log-sum-exp and D, and dQ back."""
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
    """Flash-Decoding: the keys of each head in ``splits`` parts, the rows of a group of query heads together,
    and a second kernel that merges the partial results by their log-sum-exp. No mask."""
    partial = splits * call.rows_q * (call.width_v + 1) * STATISTIC_BYTES
    return Cost(
        hbm_read=splits * call.q_bytes + call.k_bytes + call.v_bytes + partial,
        hbm_written=partial + call.out_bytes + call.rows_q * STATISTIC_BYTES,
        matmul_flops=2 * call.score_pairs * (call.head_dim + call.width_v),
        extra_bytes=partial + call.rows_q * STATISTIC_BYTES,
    )


def paged(call: Call, page_size: int) -> Cost:
    """PagedAttention: FlashAttention 2 with a page for a block of keys, and its entry in the block table. One
    block of rows a head."""
    blocks = (max(1, call.seqlen_q), page_size)
    cost = flash2_forward(call, blocks)
    looked_up = sum(-(-seen // page_size) * count for _, seen, count in _visible_tiles(call, blocks))
    entries = sum(-(-seqlen_k // page_size) for _, seqlen_k in call.sequences)
    return replace(
        cost,
        hbm_read=cost.hbm_read + TABLE_ENTRY_BYTES * looked_up,
        extra_bytes=cost.extra_bytes + TABLE_ENTRY_BYTES * entries,
    )


def _product(call: Call, rows: int, depth: int, cols: int, sram_bytes: int | None) -> tuple[int, int]:
    """Elements that (rows, depth) times (depth, cols) reads and writes, tile by tile."""
    block_m, block_n = max(1, rows), max(1, cols)
    if sram_bytes is not None:
        memory = Memory(sram_bytes, call.element_bytes)
        block_m, block_n = tiled_matmul.block_sizes(memory, max(1, cols))
    read = rows * depth * -(-cols // block_n) + depth * cols * -(-rows // block_m)
    return read, rows * cols


def _softmax(
    call: Call, rows: int, cols: int, sram_bytes: int | None, inputs: int, statistics: int
) -> tuple[int, int]:
    """Elements that a softmax (or its gradient) reads and writes: rows longer than SRAM are read twice."""
    fits = sram_bytes is None or inputs * cols + statistics <= sram_bytes // call.element_bytes
    return inputs * rows * cols * (1 if fits else 2), rows * cols


def _keys(call: Call) -> int:
    """Bytes of k and v where each query head has its own."""
    return (call.k_bytes + call.v_bytes) * call.group_size


def _passes(call: Call, block_n: int) -> int:
    """Rows of q that are read if all are read for each block of keys."""
    return call.num_heads_q * sum(seqlen_q * -(-seqlen_k // block_n) for seqlen_q, seqlen_k in call.sequences)


def _visible_tiles(
    call: Call, blocks: tuple[int, int], *, by_keys: bool = False
) -> Iterator[tuple[int, int, int]]:
    """(rows, keys that they load, count of such blocks) of the blocks of rows, over sequences and heads;
    ``by_keys``: (keys, rows that they load, count) of the blocks of keys."""
    for lengths, count in counted(call.sequences):
        seen = walks(call, lengths, blocks, by_keys=by_keys)
        (own, other), (block, other_block) = (lengths[::-1], blocks[::-1]) if by_keys else (lengths, blocks)
        for start, part in zip(range(0, own, block), seen, strict=True):
            loaded = max(0, min(part.stop * other_block, other) - part.start * other_block)
            yield min(block, own - start), loaded, count * call.num_heads_q
