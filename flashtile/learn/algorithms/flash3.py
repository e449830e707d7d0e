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
    nonzero,
    place,
    row_max,
    row_sum,
    start_softmax,
)
from flashtile.learn.algorithms.memory import Array, Memory, Sram, Tile

WARPGROUPS = 2
STAGES = 2
TILES = {
    "S": Tile("S = Q K^T", "rows", "keys"),
    "PV": Tile("O += P V", name="O"),  # in the place of O
    "P": Tile("P = exp(S - m)", "rows", "keys"),
    "l": Tile("l = l exp(m - m') + rowsum P"),
    "m": Tile("m = max"),
    "O": Tile("O = exp(m - m') O"),
}
"""Tiles of a warpgroup, for the trace."""


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
    warpgroup. The names of tiles end with the number of the warpgroup or the stage: S.0, S.1, K.0, ...

    Examples:
        >>> from flashtile.algorithms import Memory, flash3
        >>> q, k, v = torch.randn(3, 256, 32).unbind()  # one head, (seqlen, head_dim)
        >>> out, lse = flash3.forward(q, k, v, Memory())
        >>> torch.testing.assert_close(out, torch.softmax(q @ k.T * 32**-0.5, -1) @ v)
    """
    call = place(memory, q, k, v, causal, window_size, softmax_scale)
    Q, K, V = call.Q, call.K, call.V
    Br, Bc = chosen_blocks(block_m, block_n, block_sizes(memory, Q.cols, V.cols))
    O, LSE = call.empty_results(memory)
    for rows in blocks(Q.rows, WARPGROUPS * Br):
        with memory.sram("attention", TILES) as sram:
            halves = [range(first, min(first + Br, rows.stop)) for first in rows[::Br]]
            warpgroups = [Warpgroup(sram.part(i, rows=half), call, half) for i, half in enumerate(halves)]
            previous: Tensor | None = None
            step = 0
            for keys in call.visible_keys(sram, rows, blocks(K.rows, Bc)):
                k_j = sram.load(K, keys, name=f"K.{step % STAGES}")  # by the producer, one stage ahead
                v_j = sram.load(V, keys, name=f"V.{step % STAGES}")
                for warpgroup in warpgroups:
                    warpgroup.step(k_j, previous, keys)
                previous, step = v_j, step + 1
            for warpgroup in warpgroups:
                warpgroup.finish(previous, O, LSE)
    return O.tensor, LSE.tensor


class Warpgroup:
    """A consumer warpgroup: Algorithm 2 for its rows of the thread block."""

    def __init__(self, sram: Sram, call: Head, rows: range):
        self.sram, self.call, self.rows = sram, call, rows
        self.q = sram.load(call.Q, rows)
        start_softmax(sram, len(rows), call.V.cols, like=self.q)

    def step(self, k_next: Tensor, v: Tensor | None, keys: range) -> None:
        """Issue S of the next block and O += P V of the previous block. Then compute the next softmax.

        ``v`` is V of the previous block, None in the first step.
        """
        sram = self.sram
        sram.move(keys=keys)
        sram.S = self.call.mask.hide(self.q @ k_next.T * self.call.scale, self.rows, keys)
        acc = self.multiply(v)
        m_new = torch.maximum(sram.m, row_max(sram.S))
        sram.P = torch.exp(sram.S - m_new)
        correction = torch.exp(sram.m - m_new)
        sram.l = correction * sram.l + row_sum(sram.P)
        sram.m = m_new
        sram.O = correction * acc

    def multiply(self, v: Tensor | None) -> Tensor:
        """Return O + P V, with P and V of the previous block. Return O in the first step (``v`` is None)."""
        if v is None:
            return self.sram.O
        self.sram.PV = self.sram.O + self.sram.P @ v
        return self.sram.PV

    def finish(self, v: Tensor | None, O: Array, LSE: Array) -> None:
        """Add P V of the last block and write the results."""
        sram = self.sram
        sram.store(O, self.multiply(v) / nonzero(sram.l), self.rows)
        sram.store(LSE, log_sum_exp(sram.m, sram.l), self.rows)
