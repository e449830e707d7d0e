"""The chain O = Q K^T V without a softmax, in three orders: what tiling two products together would take.

    separate    S = Q K^T, then O = S V       S (N^2 numbers) goes to HBM and comes back
    fused       a tile of S at a time         S is never written; O is a sum over blocks of keys
    reordered   Q (K^T V)                     no S at all: d^2 numbers instead of N^2

A tile of S, once computed, is final: each of its numbers is a whole product of a row of Q and a row of K.
What it contributes to O is not: O's rows are sums over all keys, complete only after the last block of them.
So tiles of O are added up while tiles of S come and go.

A softmax between the products makes that harder: a tile of P needs its rows' maxima and sums, which no tile
has. The online softmax repairs ``fused``, and the result is FlashAttention. Nothing repairs ``reordered``:
brackets may be moved between products, not past a softmax. Linear attention leaves the softmax out for it.
"""

from __future__ import annotations

from torch import Tensor

from flashtile.algorithms.call import blocks, chosen_blocks, place, zeros
from flashtile.algorithms.flash2 import block_sizes
from flashtile.algorithms.memory import Memory
from flashtile.algorithms.tiled_matmul import product


def separate(
    q: Tensor, k: Tensor, v: Tensor, memory: Memory, *, block_m: int | None = None, block_n: int | None = None
) -> Tensor:
    """O (seqlen_q, head_dim_v) by two products; block_m and block_n are the tiles of S.

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
    """O (seqlen_q, head_dim_v), a tile of S at a time; blocks default to FlashAttention-2's.

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
        with memory.sram(kernel="O = Q K^T V") as outer:
            q_i = outer.load(Q, rows)
            acc = outer.compute("O", zeros(len(rows), V.cols, q), rows)
            for keys in blocks(K.rows, Bc):
                with memory.sram() as sram:
                    k_j, v_j = call.load_keys(sram, keys)
                    s = sram.compute("S", q_i @ k_j.T, rows, keys, op="S = Q K^T")
                    acc = outer.compute("O", acc + s @ v_j, rows, op="O += S V")
            outer.store(O, acc, rows)
    return O.tensor


def reordered(q: Tensor, k: Tensor, v: Tensor, memory: Memory) -> Tensor:
    """O (seqlen_q, head_dim_v) as Q (K^T V): exact without a softmax, and impossible with one.

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
