"""Standard attention, which writes the score matrix to HBM and reads it back.

Algorithm 0 of the FlashAttention paper (Dao et al. 2022, arXiv:2205.14135).

Three kernels, each of which reads its inputs from HBM and writes its result there:

    S = Q K^T        reads Q, K       writes S
    P = softmax(S)   reads S          writes P
    O = P V          reads P, V       writes O

Together they move 4 N d + 4 N^2 numbers (Theta(N d + N^2), section 3.2) for 4 N^2 d operations in the
products: about d operations per number if N is much larger than d. A GPU can do hundreds of operations in the
time of one read, so attention is bound by memory. In addition, S and P, N^2 numbers each, must fit into HBM.

If the products' tiles are narrower than their matrices, an input is read more than once; see tiled_matmul.
The scale and the mask are applied before S is written: as a separate pass they would move another 2 N^2
numbers. A tile that a mask hides is computed like any other.
"""

from __future__ import annotations

from torch import Tensor

from flashtile.learn.algorithms.call import place
from flashtile.learn.algorithms.memory import Memory
from flashtile.learn.algorithms.online_softmax import write_softmax, write_softmax_gradient
from flashtile.learn.algorithms.tiled_matmul import product


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
) -> tuple[Tensor, Tensor]:
    """Return (out, P): out (seqlen_q, head_dim_v), and P (seqlen_q, seqlen_k), which the backward pass needs.

    The arguments are those of :func:`flashtile.algorithms.call.place`; block_m and block_n are the tile sizes
    of S, by default as large as SRAM allows.

    Examples:
        >>> from flashtile.algorithms import Memory, standard
        >>> q, k, v = torch.randn(3, 256, 32).unbind()  # one head, (seqlen, head_dim)
        >>> memory = Memory()
        >>> out, p = standard.forward(q, k, v, memory)
        >>> memory.traffic["S"].written == 2 * 256 * 256  # every score, two bytes each
        True
    """
    call = place(memory, q, k, v, causal, window_size, softmax_scale)
    Q, K, V = call.Q, call.K, call.V

    def scaled_and_masked(s: Tensor, rows: range, keys: range) -> Tensor:
        return call.mask.hide(s * call.scale, rows, keys)

    S = memory.empty("S", Q.rows, K.rows, like=q)
    product(memory, Q, K, S, transpose_b=True, finish=scaled_and_masked, block_m=block_m, block_n=block_n)
    P = memory.empty("P", Q.rows, K.rows, like=q)
    write_softmax(memory, S, P)
    memory.release(S)
    O = memory.empty("O", Q.rows, V.cols, like=q)
    product(memory, P, V, O)
    return O.tensor, P.tensor


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    dout: Tensor,
    memory: Memory,
    *,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) from the P that the forward pass kept (FlashAttention paper, Algorithm 3).

    dV = P^T dO, dP = dO V^T, dS = P * (dP - rowsum(P * dP)), dQ = dS K, dK = dS^T Q. In addition to P, the
    N^2 matrices dP and dS are written to HBM and read back. Hidden scores have P = 0, so the mask is not
    needed again.

    Examples:
        >>> from flashtile.algorithms import Memory, standard
        >>> q, k, v, dout = torch.randn(4, 256, 32).unbind()
        >>> memory = Memory()
        >>> out, p = standard.forward(q, k, v, memory)
        >>> dq, dk, dv = standard.backward(q, k, v, p, dout, memory)
        >>> torch.testing.assert_close(dv, p.T @ dout)
    """
    call = place(memory, q, k, v, softmax_scale=softmax_scale)
    Q, K, V = call.Q, call.K, call.V
    P, dO = memory.place("P", p), memory.place("dO", dout)

    dV = memory.empty("dV", V.rows, V.cols, like=q)
    product(memory, P, dO, dV, transpose_a=True)
    dP = memory.empty("dP", Q.rows, K.rows, like=q)
    product(memory, dO, V, dP, transpose_b=True)
    dS = memory.empty("dS", Q.rows, K.rows, like=q)
    write_softmax_gradient(memory, P, dP, dS)
    memory.release(dP)

    def scaled(tile: Tensor, rows: range, cols: range) -> Tensor:
        return tile * call.scale

    dQ = memory.empty("dQ", Q.rows, Q.cols, like=q)
    product(memory, dS, K, dQ, finish=scaled)
    dK = memory.empty("dK", K.rows, K.cols, like=q)
    product(memory, dS, Q, dK, transpose_a=True, finish=scaled)
    return dQ.tensor, dK.tensor, dV.tensor
