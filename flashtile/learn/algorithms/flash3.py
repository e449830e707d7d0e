"""FlashAttention-3: FlashAttention-2 arranged for a GPU that works asynchronously (Shah et al. 2024).

arXiv:2407.08608, Algorithms 1 and 2. On Hopper, loads (TMA) and matrix products (WGMMA) are asynchronous: a
warp issues them and goes on. A thread block consists of a producer, which loads blocks of K and V into a ring
of stages, and two consumer warpgroups, which have half of the rows each and share the loaded blocks. This
saves time, not bytes: the exponentials, which tensor cores cannot compute, overlap with the products,

  between the warpgroups (ping-pong, section 3.1): one multiplies while the other computes its softmax;
  within a warpgroup (section 3.2): S of the next block is issued before P V of this one, and the softmax of
  the next block is computed while P V is still running.

:mod:`flash3_schedule` computes the timing, this module the values. In an iteration, a warpgroup holds P of
one block and computes S of the next. The accumulator is rescaled after the product with the earlier block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.learn.algorithms.call import (
    Head,
    block_size,
    blocks,
    chosen_blocks,
    log_sum_exp,
    lowest,
    nonzero,
    place,
    row_max,
    zeros,
)
from flashtile.learn.algorithms.memory import Array, Memory, Sram

WARPGROUPS = 2
STAGES = 2


def block_sizes(memory: Memory, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Return (rows of a warpgroup, Bc = min(rows, d)).

    SRAM holds Q, O, S, P, m and l of two warpgroups, and two stages of K and V.
    """
    of_warpgroups = WARPGROUPS * (3 * head_dim + head_dim_v + 2)
    block_m = block_size(memory, of_warpgroups + STAGES * (head_dim + head_dim_v))
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
    """Return (out, lse): out (seqlen_q, head_dim_v), lse (seqlen_q, 1).

    The arguments are those of :func:`flashtile.algorithms.call.place`; block_m counts the rows of one
    warpgroup. Tiles of one warpgroup or stage are named S.0, S.1, K.0, ...

    Examples:
        >>> from flashtile.algorithms import Memory, flash3
        >>> q, k, v = torch.randn(3, 256, 32).unbind()  # one head, (seqlen, head_dim)
        >>> out, lse = flash3.forward(q, k, v, Memory())
        >>> torch.testing.assert_close(out, torch.softmax(q @ k.T * 32**-0.5, -1) @ v)
    """
    call = place(memory, q, k, v, causal, window_size, softmax_scale)
    Q, K, V = call.Q, call.K, call.V
    Br, Bc = chosen_blocks(block_m, block_n, block_sizes(memory, Q.cols, V.cols))
    O = memory.empty("O", Q.rows, V.cols, like=q)
    LSE = memory.empty("lse", Q.rows, 1, like=q)
    for rows in blocks(Q.rows, WARPGROUPS * Br):
        with memory.sram(kernel="attention") as sram:
            halves = [range(first, min(first + Br, rows.stop)) for first in rows[::Br]]
            warpgroups = [Warpgroup(i, half, call, sram) for i, half in enumerate(halves)]
            previous: Tensor | None = None
            step = 0
            for keys in blocks(K.rows, Bc):
                if not call.mask.sees_any(rows, keys):
                    sram.skip("S", rows, keys)
                    continue
                k_j = sram.load(K, keys, name=f"K.{step % STAGES}")  # the producer, one stage ahead
                v_j = sram.load(V, keys, name=f"V.{step % STAGES}")
                for warpgroup in warpgroups:
                    warpgroup.step(k_j, previous, keys)
                previous, step = v_j, step + 1
            for warpgroup in warpgroups:
                warpgroup.finish(previous, O, LSE)
    return O.tensor, LSE.tensor


class Warpgroup:
    """A consumer warpgroup: Algorithm 2 for its rows of the thread block."""

    def __init__(self, index: int, rows: range, call: Head, sram: Sram):
        self.index, self.rows, self.call, self.sram = index, rows, call, sram
        self.q = sram.load(call.Q, rows, name=self._own("Q"))
        self.acc = self._keep("O", zeros(len(rows), call.V.cols, self.q))
        self.l = self._keep("l", zeros(len(rows), 1, self.q))
        self.m = self._keep("m", lowest(len(rows), self.q))
        self.p: Tensor | None = None  # of the previous block, not yet multiplied with its V

    def step(self, k_next: Tensor, v: Tensor | None, keys: range) -> None:
        """Issue S of the next block and O += P V of the previous one, then compute the next block's
        softmax."""
        s = self.call.mask.hide(self.q @ k_next.T * self.call.scale, self.rows, keys)
        s = self._keep("S", s, keys, op="S = Q K^T")
        self._multiply(v)
        m_new = torch.maximum(self.m, row_max(s))
        self.p = self._keep("P", torch.exp(s - m_new), keys, op="P = exp(S - m)")
        correction = torch.exp(self.m - m_new)
        l = correction * self.l + self.p.sum(-1, keepdim=True)
        self.l = self._keep("l", l, op="l = l exp(m - m') + rowsum P")
        self.m = self._keep("m", m_new, op="m = max")
        self.acc = self._keep("O", correction * self.acc, op="O = exp(m - m') O")

    def finish(self, v: Tensor | None, O: Array, LSE: Array) -> None:
        """Add P V of the last block and write the results."""
        self._multiply(v)
        self.sram.store(O, self.acc / nonzero(self.l), self.rows)
        self.sram.store(LSE, log_sum_exp(self.m, self.l), self.rows)

    def _multiply(self, v: Tensor | None) -> None:
        if self.p is not None and v is not None:
            self.acc = self._keep("O", self.acc + self.p @ v, op="O += P V")

    def _keep(self, name: str, value: Tensor, keys: range | None = None, op: str = "") -> Tensor:
        return self.sram.compute(self._own(name), value, self.rows, keys, op)

    def _own(self, name: str) -> str:
        return f"{name}.{self.index}"
