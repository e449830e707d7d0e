"""FlashAttention-2: the same tiles in a better order (Dao 2023, arXiv:2307.08691).

Outer loop over queries. A block of rows stays in SRAM with its output until all keys are processed, so O is
written once and m and l stay in SRAM. Blocks of rows are independent: each is a thread block of its own, and
even a single long sequence fills a GPU.

Fewer operations outside of matrix products. The accumulator is divided by l only at the end. Instead of m and
l only lse = m + log(l) is kept, which is enough for the backward pass: P = exp(S - lse).

Blocks that a mask hides entirely are skipped: causal attention does about half of the work. Among the others,
only blocks on the mask's edge are masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from flashtile.learn.algorithms.call import (
    LOWEST,
    Head,
    block_size,
    blocks,
    chosen_blocks,
    place,
    row_max,
    row_sum,
    start_softmax,
    store_results,
)
from flashtile.learn.algorithms.memory import Memory, Sram, Tile

TILES = {
    "S": Tile("S = Q K^T", "rows", "keys"),
    "P": Tile("P = exp(S - m)", "rows", "keys", name="S"),  # in the place of S
    "l": Tile("l = l exp(m - m') + rowsum P"),
    "O": Tile("O = exp(m - m') O + P V"),
    "m": Tile("m = max"),
}
"""Tiles of the forward pass, for the trace."""

BACKWARD_TILES = {
    "P": Tile("P = exp(S - lse)", "rows", "keys", name="S"),
    "dV": Tile("dV += P^T dO", "keys"),
    "dP": Tile("dP = dO V^T", "rows", "keys", name="dS"),
    "dS": Tile("dS = P (dP - D)", "rows", "keys"),
    "dQ": Tile("dQ += dS K"),
    "dK": Tile("dK += dS^T Q", "keys"),
}
"""Tiles of the backward pass, for the trace."""


def block_sizes(memory: Memory, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Return (Br, Bc). Br, the number of query rows of a block in the outer loop, is as large as possible.

    SRAM holds Q (Br, d), the accumulator, S, m, l, and K and V (Bc, d), where Bc = min(Br, d). FlashAttention
    1 has key blocks in its outer loop, so it makes Bc large instead.
    """
    block_m = block_size(memory, 3 * head_dim + 2 * head_dim_v + 2)
    return block_m, min(block_m, head_dim)


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
    """Return (out, lse) by Algorithm 1: out (seqlen_q, head_dim_v), lse (seqlen_q, 1).

    The arguments are those of :func:`flashtile.algorithms.call.place`; block_m (Br) and block_n (Bc)
    default to :func:`block_sizes`.

    Examples:
        >>> from flashtile.algorithms import Memory, flash2
        >>> q, k, v = torch.randn(3, 256, 32).unbind()  # one head, (seqlen, head_dim)
        >>> memory = Memory(sram_bytes=16 * 1024)
        >>> out, lse = flash2.forward(q, k, v, memory, causal=True)
        >>> heads = [t[None, :, None] for t in (q, k, v)]
        >>> torch.testing.assert_close(out, flashtile.attention(*heads, causal=True)[0, :, 0])
        >>> memory.sram_peak <= memory.sram_bytes
        True
    """
    call = place(memory, q, k, v, causal, window_size, softmax_scale)
    Q, K, V = call.Q, call.K, call.V
    Br, Bc = chosen_blocks(block_m, block_n, block_sizes(memory, Q.cols, V.cols))
    O, LSE = call.empty_results(memory)

    for rows in blocks(Q.rows, Br):
        with memory.sram("attention", TILES, rows=rows) as sram:
            attend(sram, call, rows, blocks(K.rows, Bc))
            store_results(sram, O, LSE, rows)
    return O.tensor, LSE.tensor


def attend(
    sram: Sram,
    call: Head,
    rows: range,
    key_blocks: Iterable[range],
    load_keys: Callable[[Sram, range], tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Compute attention of one block of rows over blocks of keys (Algorithm 1, lines 4 to 11).

    The results m, l and O stay in SRAM. O is the sum of exp(S - m) V; it is not divided by l yet.
    ``load_keys`` loads K and V of a block; None loads them from contiguous memory.
    """
    load_keys = load_keys or call.load_keys
    q_i = sram.load(call.Q, rows)
    start_softmax(sram, len(rows), call.V.cols, like=q_i)
    for keys in call.visible_keys(sram, rows, key_blocks):
        with sram.scope(keys=keys):
            k_j, v_j = load_keys(sram, keys)
            sram.S = call.mask.hide(q_i @ k_j.T * call.scale, rows, keys)
            m_new = torch.maximum(sram.m, row_max(sram.S))
            sram.P = torch.exp(sram.S - m_new)
            correction = torch.exp(sram.m - m_new)
            sram.l = correction * sram.l + row_sum(sram.P)
            sram.O = correction * sram.O + sram.P @ v_j
            sram.m = m_new


def backward_block_sizes(memory: Memory, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Return (Br, Bc) of Algorithm 2. SRAM holds tiles of K, V, dK, dV, Q, dQ, dO, P, dS, lse and D."""
    block_n = block_size(memory, 4 * head_dim + 2 * head_dim + 3 * head_dim_v + 2)
    return min(block_n, head_dim), block_n


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    memory: Memory,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) by Algorithm 2 from the results of :func:`forward`.

    The outer loop is over keys: a block of keys owns its rows of dK and dV, and blocks run in parallel. Each
    block adds its part to dQ in HBM (with atomic additions on a GPU).

    Examples:
        >>> from flashtile.algorithms import Memory, flash2
        >>> q, k, v, dout = torch.randn(4, 256, 32).unbind()
        >>> memory = Memory()
        >>> out, lse = flash2.forward(q, k, v, memory)
        >>> dq, dk, dv = flash2.backward(q, k, v, out, lse, dout, memory)
        >>> torch.testing.assert_close(dv, torch.softmax(q @ k.T * 32**-0.5, -1).T @ dout)
    """
    call = place(memory, q, k, v, causal, window_size, softmax_scale)
    Q, K, V = call.Q, call.K, call.V
    O, dO, LSE = memory.place("O", out), memory.place("dO", dout), memory.place("lse", lse)
    Br, Bc = chosen_blocks(block_m, block_n, backward_block_sizes(memory, Q.cols, V.cols))
    D = memory.empty("D", Q.rows, 1, like=q)
    dQ = memory.empty("dQ", Q.rows, Q.cols, like=q)
    dK = memory.empty("dK", K.rows, K.cols, like=q)
    dV = memory.empty("dV", V.rows, V.cols, like=q)
    for rows in blocks(Q.rows, Br):
        with memory.sram(kernel="rowsum dO * O") as sram:
            sram.store(D, row_sum(sram.load(dO, rows) * sram.load(O, rows)), rows)
            sram.store(dQ, q.new_zeros(len(rows), Q.cols), rows)

    for keys in blocks(K.rows, Bc):
        with memory.sram("gradients", BACKWARD_TILES, keys=keys) as sram:
            k_j, v_j = sram.load(K, keys), sram.load(V, keys)
            sram.start(dK=q.new_zeros(len(keys), K.cols), dV=q.new_zeros(len(keys), V.cols))
            for rows in blocks(Q.rows, Br):
                if not call.mask.sees_any(rows, keys):
                    sram.skip("S", rows, keys)
                    continue
                with sram.scope(rows=rows):
                    q_i, do_i, dq_i = sram.load(Q, rows), sram.load(dO, rows), sram.load(dQ, rows)
                    lse_i, d_i = sram.load(LSE, rows), sram.load(D, rows)
                    s = call.mask.hide(q_i @ k_j.T * call.scale, rows, keys)
                    # In a row without visible keys, lse and all scores are -inf. With a finite lse, P is 0.
                    sram.P = torch.exp(s - lse_i.clamp(min=LOWEST))
                    sram.dV = sram.dV + sram.P.T @ do_i
                    sram.dP = do_i @ v_j.T
                    sram.dS = sram.P * (sram.dP - d_i)
                    sram.dQ = dq_i + call.scale * (sram.dS @ k_j)
                    sram.store(dQ, sram.dQ, rows)
                    sram.dK = sram.dK + call.scale * (sram.dS.T @ q_i)
            sram.store(dK, sram.dK, keys)
            sram.store(dV, sram.dV, keys)
    return dQ.tensor, dK.tensor, dV.tensor
