"""Softmax of rows that do not fit into SRAM: four methods and the number of times that each reads its input.

naive    sum of exp(x), then exp(x) / sum                     2 reads, 1 write; exp overflows above 88
safe     maximum, then sum of exp(x - max), then the result   3 reads, 1 write
online   maximum and sum together, then the result            2 reads, 1 write
average  maximum, sum and the result's product with V         1 read

The online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867, Algorithm 3) sums before the maximum of the
row is known. Its sum l of exp(x - m) is relative to m, the maximum so far. When the maximum grows to m', the
sum becomes l exp(m - m'). The pairs (m, l) of two pieces of a row, in any order, combine to the pair of both
pieces:

    m = max(m1, m2)        l = l1 exp(m1 - m) + l2 exp(m2 - m)

FlashAttention also rescales the output row in this way, because it is a sum over the same terms
(:func:`average`). The probabilities are then never written, and one pass is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.learn.algorithms.call import blocks, chosen_blocks, lowest, nonzero, row_max, row_sum
from flashtile.learn.algorithms.memory import Array, Memory, Sram, Tile

NAIVE_TILES = {"l": Tile("l += sum exp(x)")}
SAFE_TILES = {"m": Tile("m = max"), "l": Tile("l += sum exp(x - m)")}
ONLINE_TILES = {
    "l": Tile("l = l exp(m - m') + sum exp(x - m')"),
    "m": Tile("m = m'"),
    "O": Tile("O = O exp(m - m') + exp(x - m') V"),
}
"""Tiles of each method, for the trace."""


def naive(x: Tensor, memory: Memory, *, block_m: int = 1, block_n: int = 1024) -> Tensor:
    """Return the softmax of each row of x (rows, cols), computed in tiles of (block_m, block_n).

    The maximum is not subtracted, so the result is inf / inf = NaN for large x.

    Examples:
        >>> from flashtile.algorithms import Memory, online_softmax
        >>> x = torch.randn(4, 1000)
        >>> torch.testing.assert_close(online_softmax.naive(x, Memory(), block_n=128), x.softmax(-1))
    """
    block_m, block_n = chosen_blocks(block_m, block_n, (1, 1))
    X, Y = memory.place("X", x), memory.empty("Y", x.shape[0], x.shape[1], like=x)
    for rows in blocks(X.rows, block_m):
        with memory.sram("naive softmax", NAIVE_TILES, rows=rows) as sram:
            sram.start(l=x.new_zeros(len(rows), 1))
            for cols in blocks(X.cols, block_n):
                sram.l = sram.l + row_sum(torch.exp(sram.load(X, rows, cols)))
            for cols in blocks(X.cols, block_n):
                sram.store(Y, torch.exp(sram.load(X, rows, cols)) / sram.l, rows, cols)
    return Y.tensor


def safe(x: Tensor, memory: Memory, *, block_m: int = 1, block_n: int = 1024) -> Tensor:
    """Return the softmax of each row of x (rows, cols), computed in tiles of (block_m, block_n).

    Three passes over x compute the maximum, the sum and the result.

    Examples:
        >>> from flashtile.algorithms import Memory, online_softmax
        >>> x = torch.randn(4, 1000)
        >>> torch.testing.assert_close(online_softmax.safe(x, Memory(), block_n=128), x.softmax(-1))
    """
    block_m, block_n = chosen_blocks(block_m, block_n, (1, 1))
    X, Y = memory.place("X", x), memory.empty("Y", x.shape[0], x.shape[1], like=x)
    for rows in blocks(X.rows, block_m):
        with memory.sram("safe softmax", SAFE_TILES, rows=rows) as sram:
            sram.start(m=lowest(len(rows), x))
            for cols in blocks(X.cols, block_n):
                sram.m = torch.maximum(sram.m, row_max(sram.load(X, rows, cols)))
            sram.start(l=x.new_zeros(len(rows), 1))
            for cols in blocks(X.cols, block_n):
                sram.l = sram.l + row_sum(torch.exp(sram.load(X, rows, cols) - sram.m))
            for cols in blocks(X.cols, block_n):
                sram.store(Y, torch.exp(sram.load(X, rows, cols) - sram.m) / nonzero(sram.l), rows, cols)
    return Y.tensor


def online(x: Tensor, memory: Memory, *, block_m: int = 1, block_n: int = 1024) -> Tensor:
    """Return the softmax of each row of x (rows, cols), computed in tiles of (block_m, block_n).

    One pass over x computes both the maximum and the sum. A second pass computes the result.

    Examples:
        >>> from flashtile.algorithms import Memory, online_softmax
        >>> x = torch.randn(4, 1000)
        >>> torch.testing.assert_close(online_softmax.online(x, Memory(), block_n=128), x.softmax(-1))
    """
    block_m, block_n = chosen_blocks(block_m, block_n, (1, 1))
    X, Y = memory.place("X", x), memory.empty("Y", x.shape[0], x.shape[1], like=x)
    for rows in blocks(X.rows, block_m):
        with memory.sram("online softmax", ONLINE_TILES, rows=rows) as sram:
            sram.start(m=lowest(len(rows), x), l=x.new_zeros(len(rows), 1))
            for cols in blocks(X.cols, block_n):
                update(sram, sram.load(X, rows, cols))
            for cols in blocks(X.cols, block_n):
                sram.store(Y, torch.exp(sram.load(X, rows, cols) - sram.m) / nonzero(sram.l), rows, cols)
    return Y.tensor


def average(x: Tensor, v: Tensor, memory: Memory, *, block_m: int = 1, block_n: int = 1024) -> Tensor:
    """Return softmax(x) v for x (rows, cols) and v (cols, d) in one pass, without storing the softmax.

    Raises:
        ValueError: v does not have one row per column of x.

    Examples:
        >>> from flashtile.algorithms import Memory, online_softmax
        >>> x, v = torch.randn(4, 1000), torch.randn(1000, 8)
        >>> out = online_softmax.average(x, v, Memory(), block_n=128)
        >>> torch.testing.assert_close(out, x.softmax(-1) @ v)
    """
    if v.dim() != 2 or v.shape[0] != x.shape[-1]:
        raise ValueError(f"v must have {x.shape[-1]} rows, the columns of x, got shape {tuple(v.shape)}")
    block_m, block_n = chosen_blocks(block_m, block_n, (1, 1))
    X, V = memory.place("X", x), memory.place("V", v)
    O = memory.empty("O", x.shape[0], v.shape[1], like=x)
    for rows in blocks(X.rows, block_m):
        with memory.sram("online softmax", ONLINE_TILES, rows=rows) as sram:
            sram.start(m=lowest(len(rows), x), l=x.new_zeros(len(rows), 1), O=x.new_zeros(len(rows), V.cols))
            for cols in blocks(X.cols, block_n):
                x_j, v_j, m_old = sram.load(X, rows, cols), sram.load(V, cols), sram.m
                update(sram, x_j)
                sram.O = torch.exp(m_old - sram.m) * sram.O + torch.exp(x_j - sram.m) @ v_j
            sram.store(O, sram.O / nonzero(sram.l), rows)
    return O.tensor


def update(sram: Sram, x: Tensor) -> None:
    """Update the running maximum m and sum l in SRAM with x (rows, cols), the next piece of the rows."""
    m_new = torch.maximum(sram.m, row_max(x))
    sram.l = sram.l * torch.exp(sram.m - m_new) + row_sum(torch.exp(x - m_new))
    sram.m = m_new


def write_softmax(memory: Memory, X: Array, Y: Array) -> None:
    """Write Y = softmax(X) for standard attention.

    Rows that fit into SRAM are read once, longer rows twice.
    """
    statistics = 2
    block_n = min(max(X.cols, 1), memory.sram_elements - statistics)
    block_m = memory.sram_elements // (block_n + statistics)
    fits = block_n >= X.cols
    for rows in blocks(X.rows, block_m):
        with memory.sram("softmax", ONLINE_TILES, rows=rows) as sram:
            sram.start(m=lowest(len(rows), X.tensor), l=X.tensor.new_zeros(len(rows), 1))
            for cols in blocks(X.cols, block_n):
                x = sram.load(X, rows, cols)
                update(sram, x)
            for cols in blocks(X.cols, block_n):
                x = x if fits else sram.load(X, rows, cols)
                sram.store(Y, torch.exp(x - sram.m) / nonzero(sram.l), rows, cols)


def write_softmax_gradient(memory: Memory, Y: Array, dY: Array, dX: Array) -> None:
    """Write dX = Y * (dY - rowsum(Y * dY)), the gradient of the softmax Y.

    Rows that fit into SRAM are read once, longer rows twice.
    """
    statistics = 1
    block_n = min(max(Y.cols, 1), (memory.sram_elements - statistics) // 2)
    block_m = memory.sram_elements // (2 * block_n + statistics)
    fits = block_n >= Y.cols
    for rows in blocks(Y.rows, block_m):
        with memory.sram("softmax gradient", rows=rows) as sram:
            sram.start(rowsum=Y.tensor.new_zeros(len(rows), 1))
            for cols in blocks(Y.cols, block_n):
                y, dy = sram.load(Y, rows, cols), sram.load(dY, rows, cols)
                sram.rowsum = sram.rowsum + row_sum(y * dy)
            for cols in blocks(Y.cols, block_n):
                if not fits:
                    y, dy = sram.load(Y, rows, cols), sram.load(dY, rows, cols)
                sram.store(dX, y * (dy - sram.rowsum), rows, cols)
