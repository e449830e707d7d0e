"""The chain O = Q K^T V without a softmax, in three orders: when two products can share their tiles.

    separate    S = Q K^T, then O = S V       S (N^2 numbers) goes to HBM and comes back
    fused       a tile of S at a time         S is never written; O is a sum over blocks of keys
    reordered   Q (K^T V)                     no S at all: d^2 numbers instead of N^2

A tile of S, once computed, is final: each of its numbers is a complete product of a row of Q and a row of K.
Its contribution to O is partial: rows of O are sums over all keys, complete only after the last block of
keys. So tiles of O are accumulated while tiles of S are computed and dropped.

A softmax between the products makes fusion harder: a tile of P needs the maxima and sums of whole rows, which
one tile does not have. The online softmax makes ``fused`` possible; the result is FlashAttention. But
``reordered`` stays impossible: products can be regrouped, but not across a softmax. Linear attention drops
the softmax for that reason.
"""

from __future__ import annotations

from torch import Tensor

from flashtile.learn.algorithms.call import blocks, chosen_blocks, place
from flashtile.learn.algorithms.flash2 import block_sizes
from flashtile.learn.algorithms.memory import Memory, Tile
from flashtile.learn.algorithms.tiled_matmul import product

TILES = {"S": Tile("S = Q K^T", "rows", "keys"), "O": Tile("O += S V")}
"""Tiles of :func:`fused`, for the trace."""


def separate(
    q: Tensor, k: Tensor, v: Tensor, memory: Memory, *, block_m: int | None = None, block_n: int | None = None
) -> Tensor:
    """Return O (seqlen_q, head_dim_v), computed as two separate products.

    ``block_m`` and ``block_n`` are the sizes of a tile of S.

    Examples:
        >>> from flashtile.algorithms import Memory, product_chain
        >>> q, k, v = torch.randn(3, 64, 16, dtype=torch.float64).unbind()
        >>> memory = Memory(element_bytes=1)
        >>> torch.testing.assert_close(product_chain.separate(q, k, v, memory), q @ k.T @ v)
        >>> memory.traffic["S"].written
        4096
    """
    call = place(memory, q, k, v, softmax_scale=1.0)
    S = memory.empty("S", call.Q.rows, call.K.rows, like=q)
    product(memory, call.Q, call.K, S, transpose_b=True, block_m=block_m, block_n=block_n)
    O = memory.empty("O", call.Q.rows, call.V.cols, like=q)
    product(memory, S, call.V, O, block_m=block_m)
    return O.tensor


def fused(
    q: Tensor, k: Tensor, v: Tensor, memory: Memory, *, block_m: int | None = None, block_n: int | None = None
) -> Tensor:
    """Return O (seqlen_q, head_dim_v), computed one tile of S at a time.

    The block sizes default to those of FlashAttention-2.

    Examples:
        >>> from flashtile.algorithms import Memory, product_chain
        >>> q, k, v = torch.randn(3, 64, 16, dtype=torch.float64).unbind()
        >>> memory = Memory()
        >>> torch.testing.assert_close(product_chain.fused(q, k, v, memory), q @ k.T @ v)
        >>> "S" in memory.traffic
        False
    """
    call = place(memory, q, k, v, softmax_scale=1.0)
    Q, K, V = call.Q, call.K, call.V
    Br, Bc = chosen_blocks(block_m, block_n, block_sizes(memory, Q.cols, V.cols))
    O = memory.empty("O", Q.rows, V.cols, like=q)
    for rows in blocks(Q.rows, Br):
        with memory.sram("O = Q K^T V", TILES, rows=rows) as sram:
            q_i = sram.load(Q, rows)
            sram.start(O=q.new_zeros(len(rows), V.cols))
            for keys in blocks(K.rows, Bc):
                with sram.scope(keys=keys):
                    k_j, v_j = call.load_keys(sram, keys)
                    sram.S = q_i @ k_j.T
                    sram.O = sram.O + sram.S @ v_j
            sram.store(O, sram.O, rows)
    return O.tensor


def reordered(q: Tensor, k: Tensor, v: Tensor, memory: Memory) -> Tensor:
    """Return O (seqlen_q, head_dim_v), computed as Q (K^T V).

    Without a softmax, this order of products is exact. With a softmax between the products, it is impossible.

    Examples:
        >>> from flashtile.algorithms import Memory, product_chain
        >>> q, k, v = torch.randn(3, 64, 16, dtype=torch.float64).unbind()
        >>> memory = Memory()
        >>> torch.testing.assert_close(product_chain.reordered(q, k, v, memory), q @ k.T @ v)
        >>> memory.matmul_flops == 2 * 2 * 64 * 16 * 16
        True
    """
    call = place(memory, q, k, v, softmax_scale=1.0)
    KV = memory.empty("KV", call.K.cols, call.V.cols, like=q)
    product(memory, call.K, call.V, KV, transpose_a=True)
    O = memory.empty("O", call.Q.rows, call.V.cols, like=q)
    product(memory, call.Q, KV, O)
    return O.tensor
