"""FlashAttention: exact attention that never writes the score matrix (Dao et al. 2022, arXiv:2205.14135).

Tiling. Softmax couples all keys of a row, but the online softmax processes them block by block, and the row's
output is updated with each block. Let O be the softmax over the keys so far times their V, with maximum m and
sum l. A further block with scores S gives

    m' = max(m, rowmax S)     P = exp(S - rowmax S)     l' = l exp(m - m') + rowsum(P) exp(rowmax S - m')
    O' = (l exp(m - m') O + exp(rowmax S - m') P V) / l'

Recomputation. The backward pass needs P. Instead of N^2 probabilities the forward pass keeps m and l, 2 N
numbers, and the backward pass recomputes each tile of P from Q and K: more operations, but less traffic and
less time.

Traffic. K and V are read once. For each of their Tc = N / Bc blocks, all of Q, O, m and l are moved. Bc is
proportional to M / d, so Theta(N^2 d^2 / M) numbers are moved (Theorem 2), compared with Theta(N d + N^2) in
standard attention. No exact algorithm does better for all M from d to N d (Proposition 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.learn.algorithms.call import (
    LOWEST,
    block_size,
    blocks,
    chosen_blocks,
    nonzero,
    place,
    row_max,
    row_sum,
)
from flashtile.learn.algorithms.memory import Memory, Tile

TILES = {
    "S": Tile("S = Q K^T", "rows", "keys"),
    "m_ij": Tile("rowmax S"),
    "P": Tile("P = exp(S - m)", "rows", "keys", name="S"),  # in the place of S
    "l_ij": Tile("rowsum P"),
    "l": Tile("l = l exp(m - m') + rowsum P"),
    "O": Tile("O = rescaled O + P V"),
    "m": Tile("m = max"),
}
"""Tiles of the forward pass, for the trace."""

BACKWARD_TILES = {
    "P": Tile("P = exp(S - m) / l", "rows", "keys", name="S"),
    "dV": Tile("dV += P^T dO", "keys"),
    "dP": Tile("dP = dO V^T", "rows", "keys", name="dS"),
    "D": Tile(),
    "dS": Tile("dS = P (dP - D)", "rows", "keys"),
    "dQ": Tile("dQ += dS K"),
    "dK": Tile("dK += dS^T Q", "keys"),
}
"""Tiles of the backward pass, for the trace."""


def block_sizes(memory: Memory, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Return (Br, Bc) for line 1 of Algorithm 1: Br = min(Bc, d), and Bc somewhat below ceil(M / 4d).

    With Bc = M / 4d, the blocks of Q, K, V and O would fill SRAM. A smaller Bc leaves space for S
    (Br * Bc <= d Bc), the old and new m and l, and the contribution of a block to O.
    """
    block_n = block_size(memory, 3 * head_dim + 2 * head_dim_v + 6)
    return min(block_n, head_dim), block_n


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Memory,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, m, l) by Algorithm 1: out (seqlen_q, head_dim_v); m and l (seqlen_q, 1).

    m is the maximum of each row of scores, and l is the row's sum of exp(S - m). The arguments are those of
    :func:`flashtile.algorithms.call.place`; block_m (Br) and block_n (Bc) default to :func:`block_sizes`.
    Tiles that the mask hides entirely are computed like all others. Skipping them came with FlashAttention-2.

    Examples:
        >>> from flashtile.algorithms import Memory, flash1
        >>> q, k, v = torch.randn(3, 256, 32).unbind()  # one head, (seqlen, head_dim)
        >>> memory = Memory(sram_bytes=16 * 1024)
        >>> out, m, l = flash1.forward(q, k, v, memory, causal=True)
        >>> heads = [t[None, :, None] for t in (q, k, v)]
        >>> torch.testing.assert_close(out, flashtile.attention(*heads, causal=True)[0, :, 0])
        >>> memory.sram_peak <= memory.sram_bytes
        True
    """
    call = place(memory, q, k, v, causal, window_size, softmax_scale)
    Q, K, V = call.Q, call.K, call.V
    Br, Bc = chosen_blocks(block_m, block_n, block_sizes(memory, Q.cols, V.cols))  # line 1
    O = memory.empty("O", Q.rows, V.cols, like=q)
    l = memory.empty("l", Q.rows, 1, like=q)
    m = memory.empty("m", Q.rows, 1, like=q)
    for rows in blocks(Q.rows, Br):
        with memory.sram(kernel="initialise") as sram:  # line 2
            sram.store(O, q.new_zeros(len(rows), V.cols), rows)
            sram.store(l, q.new_zeros(len(rows), 1), rows)
            sram.store(m, q.new_zeros(len(rows), 1) + LOWEST, rows)

    for keys in blocks(K.rows, Bc):  # lines 3 to 5
        with memory.sram("attention", TILES, keys=keys) as sram:
            k_j, v_j = sram.load(K, keys), sram.load(V, keys)  # line 6
            for rows in blocks(Q.rows, Br):  # line 7
                with sram.scope(rows=rows):
                    q_i, o_i = sram.load(Q, rows), sram.load(O, rows)  # line 8
                    l_i, m_i = sram.load(l, rows), sram.load(m, rows)
                    sram.S = call.mask.hide(q_i @ k_j.T * call.scale, rows, keys)  # line 9
                    sram.m_ij = row_max(sram.S)  # line 10
                    sram.P = torch.exp(sram.S - sram.m_ij)
                    sram.l_ij = row_sum(sram.P)
                    m_new = torch.maximum(m_i, sram.m_ij)  # line 11
                    old, new = torch.exp(m_i - m_new), torch.exp(sram.m_ij - m_new)
                    sram.l = old * l_i + new * sram.l_ij
                    sram.O = (l_i * old * o_i + new * (sram.P @ v_j)) / nonzero(sram.l)  # line 12
                    sram.store(O, sram.O, rows)
                    sram.store(l, sram.l, rows)  # line 13
                    sram.m = m_new
                    sram.store(m, sram.m, rows)
    return O.tensor, m.tensor, l.tensor


def backward_block_sizes(memory: Memory, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Return (Br, Bc) of Algorithm 4. SRAM holds tiles of K, V, dK, dV, Q, dQ, O, dO, P, dS, m, l and D."""
    block_n = block_size(memory, 4 * head_dim + 2 * head_dim + 4 * head_dim_v + 3)
    return min(block_n, head_dim), block_n


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    m: Tensor,
    l: Tensor,
    dout: Tensor,
    memory: Memory,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) by Algorithm 4 from the results of :func:`forward`, recomputing P tile by tile.

    dS needs rowsum(P * dP), a sum over all keys. It equals rowsum(dO * O) (appendix B.2), a sum over head_dim
    numbers. So each tile is computed independently of the others.

    Examples:
        >>> from flashtile.algorithms import Memory, flash1
        >>> q, k, v, dout = torch.randn(4, 256, 32).unbind()
        >>> memory = Memory()
        >>> out, m, l = flash1.forward(q, k, v, memory)
        >>> dq, dk, dv = flash1.backward(q, k, v, out, m, l, dout, memory)
        >>> torch.testing.assert_close(dv, torch.softmax(q @ k.T * 32**-0.5, -1).T @ dout)
    """
    call = place(memory, q, k, v, causal, window_size, softmax_scale)
    Q, K, V = call.Q, call.K, call.V
    O, dO = memory.place("O", out), memory.place("dO", dout)
    M, L = memory.place("m", m), memory.place("l", l)
    Br, Bc = chosen_blocks(block_m, block_n, backward_block_sizes(memory, Q.cols, V.cols))
    dQ = memory.empty("dQ", Q.rows, Q.cols, like=q)
    dK = memory.empty("dK", K.rows, K.cols, like=q)
    dV = memory.empty("dV", V.rows, V.cols, like=q)
    for rows in blocks(Q.rows, Br):
        with memory.sram(kernel="initialise") as sram:  # line 5
            sram.store(dQ, q.new_zeros(len(rows), Q.cols), rows)

    for keys in blocks(K.rows, Bc):
        with memory.sram("gradients", BACKWARD_TILES, keys=keys) as sram:
            k_j, v_j = sram.load(K, keys), sram.load(V, keys)  # line 7
            sram.start(dK=q.new_zeros(len(keys), K.cols), dV=q.new_zeros(len(keys), V.cols))  # line 8
            for rows in blocks(Q.rows, Br):
                with sram.scope(rows=rows):
                    q_i, o_i, do_i = sram.load(Q, rows), sram.load(O, rows), sram.load(dO, rows)  # line 10
                    dq_i, m_i, l_i = sram.load(dQ, rows), sram.load(M, rows), sram.load(L, rows)
                    s = call.mask.hide(q_i @ k_j.T * call.scale, rows, keys)  # lines 11, 12
                    sram.P = torch.exp(s - m_i) / nonzero(l_i)  # line 13
                    sram.dV = sram.dV + sram.P.T @ do_i  # line 16
                    sram.dP = do_i @ v_j.T  # line 17
                    sram.D = row_sum(do_i * o_i)  # line 19
                    sram.dS = sram.P * (sram.dP - sram.D)  # line 20
                    sram.dQ = dq_i + call.scale * (sram.dS @ k_j)  # line 21
                    sram.store(dQ, sram.dQ, rows)
                    sram.dK = sram.dK + call.scale * (sram.dS.T @ q_i)  # line 22
            sram.store(dK, sram.dK, keys)  # line 24
            sram.store(dV, sram.dV, keys)
    return dQ.tensor, dK.tensor, dV.tensor
