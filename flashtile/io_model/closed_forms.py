"""What the papers' algorithms move between HBM and SRAM, in closed form.

The machine is that of the papers: no cache between the two, an SRAM that holds the tiles of one program, all
loads and stores counted (Dao et al. 2022, arXiv:2205.14135, theorem 2; Dao 2023, arXiv:2307.08691). They are
the counts of the algorithms in ``flashtile.algorithms``, which count as they run, summed over sequences and
heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.io_model.calls import Call
from flashtile.io_model.kernels import reach

STATISTIC_BYTES = 4
"""Of a running maximum, sum or log-sum-exp: fp32."""


@dataclass(frozen=True)
class Cost:
    """Bytes between HBM and SRAM, FLOPs of matrix products, and bytes of HBM beyond inputs and results."""

    hbm_read: int = 0
    hbm_written: int = 0
    matmul_flops: int = 0
    extra_bytes: int = 0

    @property
    def hbm_bytes(self) -> int:
        return self.hbm_read + self.hbm_written


def standard_forward(call: Call) -> Cost:
    """S = Q K^T, P = softmax(S), O = P V, each written out and read back (Dao et al. 2022, algorithm 0).

    The mask hides scores, but all of them are computed and stored.
    """
    scores = call.score_pairs * call.element_bytes
    keys, values = _per_query_head(call)
    return Cost(
        hbm_read=call.q_bytes + keys + values + 2 * scores,
        hbm_written=2 * scores + call.out_bytes,
        matmul_flops=2 * call.score_pairs * (call.head_dim + call.width_v),
        extra_bytes=2 * scores,
    )


def standard_backward(call: Call) -> Cost:
    """dV = P^T dO, dP = dO V^T, dS = P (dP - D), dQ = dS K, dK = dS^T Q with P kept from the forward pass
    (Dao et al. 2022, algorithm 3)."""
    scores = call.score_pairs * call.element_bytes
    keys, values = _per_query_head(call)
    return Cost(
        hbm_read=5 * scores + 2 * call.out_bytes + call.q_bytes + keys + values,
        hbm_written=2 * scores + call.q_bytes + keys + values,
        matmul_flops=4 * call.score_pairs * (call.head_dim + call.width_v),
        extra_bytes=3 * scores,
    )


def flash1_blocks(head_dim: int, sram_elements: int) -> tuple[int, int]:
    """(B_r, B_c) of FlashAttention 1, algorithm 1, line 1, for an SRAM of so many elements.

    Raises:
        ValueError: SRAM does not hold one row of q, k, v and out.
    """
    if sram_elements < 4 * head_dim:
        raise ValueError(f"sram_elements must be at least 4 * head_dim = {4 * head_dim}, got {sram_elements}")
    columns = -(-sram_elements // (4 * head_dim))
    return min(columns, head_dim), columns


def flash1_forward(call: Call, sram_bytes: int) -> Cost:
    """FlashAttention 1, algorithm 1: keys and values outside, queries inside, so that O, l and m go to HBM
    and back once for every block of keys. Theta(N^2 d^2 / M)."""
    _, columns = flash1_blocks(max(call.head_dim, call.width_v), sram_bytes // call.element_bytes)
    statistics = 2 * STATISTIC_BYTES * call.rows_q
    keys, values = _per_query_head(call)
    passes = [(seqlen_q * call.num_heads_q, -(-seqlen_k // columns)) for seqlen_q, seqlen_k in call.sequences]
    q = sum(rows * count for rows, count in passes) * call.head_dim * call.element_bytes
    out = sum(rows * count for rows, count in passes) * call.width_v * call.element_bytes
    running = 2 * STATISTIC_BYTES * sum(rows * count for rows, count in passes)
    return Cost(
        hbm_read=keys + values + q + out + running,
        hbm_written=call.out_bytes + statistics + out + running,
        matmul_flops=2 * call.score_pairs * (call.head_dim + call.width_v),
        extra_bytes=statistics,
    )


def flash2_forward(call: Call, block_m: int, block_n: int) -> Cost:
    """FlashAttention 2, algorithm 1: queries outside, keys and values inside; O and the log-sum-exp are
    written once, and blocks that the mask hides whole are skipped."""
    keys_read, pairs = _walked(call, block_m, block_n)
    return Cost(
        hbm_read=call.q_bytes + keys_read * (call.head_dim + call.width_v) * call.element_bytes,
        hbm_written=call.out_bytes + call.rows_q * STATISTIC_BYTES,
        matmul_flops=2 * pairs * (call.head_dim + call.width_v),
        extra_bytes=call.rows_q * STATISTIC_BYTES,
    )


def flash_decoding(call: Call, splits: int, block_n: int) -> Cost:
    """Flash-Decoding: the keys of each head in ``splits`` parts, the rows of a group of query heads together,
    and a second kernel that merges the partial results (fp32) by their log-sum-exp."""
    parts = min(splits, max(1, -(-call.seqlen_k // block_n)))
    partial = parts * call.rows_q * (call.width_v + 1) * STATISTIC_BYTES
    merged = parts > 1
    return Cost(
        hbm_read=call.q_bytes * parts + call.k_bytes + call.v_bytes + (partial if merged else 0),
        hbm_written=call.out_bytes + call.lse_bytes + (partial if merged else 0),
        matmul_flops=2 * call.score_pairs * (call.head_dim + call.width_v),
        extra_bytes=call.lse_bytes + (partial if merged else 0),
    )


def paged_decoding(call: Call, splits: int, block_n: int, page_size: int) -> Cost:
    """Flash-Decoding over a paged cache: as :func:`flash_decoding`, and the int32 block table read for each
    key/value head."""
    cost = flash_decoding(call, splits, block_n)
    table = 4 * call.num_heads_kv * sum(-(-seqlen_k // page_size) for _, seqlen_k in call.sequences)
    return Cost(cost.hbm_read + table, cost.hbm_written, cost.matmul_flops, cost.extra_bytes)


def _per_query_head(call: Call) -> tuple[int, int]:
    """Bytes of k and v where each query head reads its own."""
    return call.k_bytes * call.group_size, call.v_bytes * call.group_size


def _walked(call: Call, block_m: int, block_n: int) -> tuple[int, int]:
    """(rows of k that blocks of queries load, scores that they compute) over sequences and query heads."""
    keys = pairs = 0
    for seqlen_q, seqlen_k in call.sequences:
        for start in range(0, seqlen_q, block_m):
            end = min(start + block_m, seqlen_q)
            window = (call.window_left, call.window_right)
            blocks = reach(start, end, seqlen_k - seqlen_q, seqlen_k, *window, block_n)
            loaded = max(0, min(blocks.stop * block_n, seqlen_k) - blocks.start * block_n)
            keys += loaded
            pairs += (end - start) * loaded
    return keys * call.num_heads_q, pairs * call.num_heads_q
