"""The tiled matrix product: the simplest example of blocks that save memory traffic.

Let A be (m, k), B (k, n) and C = A B. If each of the m n elements of C is computed on its own, it reads a row
of A and a column of B: 2 m n k reads. But all columns of a block of C need the same rows of A, and all rows
of the block need the same columns of B. So a (block_m, block_n) tile of C stays in SRAM while strips of A and
B are streamed:

    reads of A: m k * ceil(n / block_n)      reads of B: k n * ceil(m / block_m)      writes of C: m n

The width of the strips does not change this traffic. Narrow strips leave nearly all of SRAM to C. With square
tiles of side sqrt(M) the traffic is about 2 m n k / sqrt(M), which no order of operations can beat by more
than a constant factor (Hong and Kung, "I/O complexity: the red-blue pebble game", 1981).

The same idea works one level below (:func:`two_levels`): the tile of a thread block is cut into tiles of
warps, which stay in registers while the strips are read from shared memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from torch import Tensor

from flashtile.learn.algorithms.call import blocks, chosen_blocks
from flashtile.learn.algorithms.memory import Array, Memory, SramExceededError, Tile
from flashtile.learn.algorithms.warps import Warps
from flashtile.problems.masking import split

MAX_BLOCK_K = 16
WARP_TILES = {
    "A": Tile("", "rows", "strip"),
    "B": Tile("", "strip", "cols"),
    "C": Tile("C += A B", "rows", "cols"),
}
"""Tiles of a warp of :func:`two_levels`, for the trace."""


def strip_width(memory: Memory) -> int:
    """Return block_k, the width of the strips of A and B. It is small compared with a tile of C."""
    return max(1, min(math.isqrt(memory.sram_elements) // 4, MAX_BLOCK_K))


def block_sizes(memory: Memory, cols: int) -> tuple[int, int]:
    """Return (block_m, block_n) of the largest square tile of C that fits into SRAM.

    SRAM also holds a strip of A and a strip of B, which are multiplied into the tile.

    If C has fewer columns than this tile, the tile is narrower and taller.

    Raises:
        SramExceededError: SRAM cannot hold a tile of one element and its strips.
    """
    M, strip = memory.sram_elements, strip_width(memory)
    block_n = min(math.isqrt(strip**2 + M) - strip, cols)  # block_n^2 + 2 block_n strip <= M
    if block_n < 1:
        raise SramExceededError(
            f"sram_bytes must be at least {3 * memory.element_bytes}, got {memory.sram_bytes}"
        )
    return (M - strip * block_n) // (block_n + strip), block_n


def matmul(
    a: Tensor, b: Tensor, memory: Memory, *, block_m: int | None = None, block_n: int | None = None
) -> Tensor:
    """Multiply a (m, k) by b (k, n); block sizes default to the largest that fit into SRAM.

    Raises:
        ValueError: the inner lengths differ.

    Examples:
        >>> from flashtile.algorithms import Memory, tiled_matmul
        >>> a, b = torch.randn(64, 32), torch.randn(32, 48)
        >>> memory = Memory(sram_bytes=4096)
        >>> torch.testing.assert_close(tiled_matmul.matmul(a, b, memory), a @ b)
        >>> memory.matmul_flops
        196608
    """
    if a.shape[-1] != b.shape[0]:
        raise ValueError(f"b must have {a.shape[-1]} rows, the columns of a, got {b.shape[0]}")
    A, B = memory.place("A", a), memory.place("B", b)
    C = memory.empty("C", A.rows, B.cols, like=a)
    product(memory, A, B, C, block_m=block_m, block_n=block_n)
    return C.tensor


def product(
    memory: Memory,
    A: Array,
    B: Array,
    C: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    finish: Callable[[Tensor, range, range], Tensor] = lambda tile, rows, cols: tile,
    block_m: int | None = None,
    block_n: int | None = None,
) -> None:
    """Compute C = finish(A B), where A is stored transposed if ``transpose_a``, and B if ``transpose_b``.

    ``finish`` takes each tile of the product with its rows and columns, and returns the tile that is stored.
    """
    block_m, block_n = chosen_blocks(block_m, block_n, block_sizes(memory, max(C.cols, 1)))
    depth = A.rows if transpose_a else A.cols
    op = f"{C.name} += {A.name}{'^T' if transpose_a else ''} {B.name}{'^T' if transpose_b else ''}"
    tiles = {"c": Tile(op, "rows", "cols", name=C.name)}
    for rows in blocks(C.rows, block_m):
        for cols in blocks(C.cols, block_n):
            with memory.sram(C.name, tiles, rows=rows, cols=cols) as sram:  # a GPU's thread block
                sram.start(c=C.tensor.new_zeros(len(rows), len(cols)))
                for strip in blocks(depth, strip_width(memory)):
                    a = sram.load(A, strip, rows).T if transpose_a else sram.load(A, rows, strip)
                    b = sram.load(B, cols, strip).T if transpose_b else sram.load(B, strip, cols)
                    sram.c = sram.c + a @ b
                sram.store(C, finish(sram.c, rows, cols), rows, cols)


def two_levels(
    a: Tensor,
    b: Tensor,
    memory: Memory,
    *,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    block_m: int = 64,
    block_n: int = 64,
    block_k: int = 16,
    warp_m: int = 32,
    warp_n: int = 32,
) -> tuple[Tensor, Warps]:
    """Return (alpha a b + beta c, warps), computed by thread blocks and by the warps within them.

    ``warps`` contains the counters of shared-memory traffic.

    A thread block owns block_m x block_n elements of C and streams strips of A and B through shared memory. A
    warp owns warp_m x warp_n of these elements in its registers and reads its part of each strip from shared
    memory:

        from HBM             m n k (1 / block_n + 1 / block_m)
        from shared memory   m n k (1 / warp_n + 1 / warp_m)

    alpha is applied once to each finished element: m n multiplications instead of m n k. C is read once, and
    only if beta is not 0.

    Args:
        a, b: (m, k) and (k, n).
        memory: counts the HBM traffic.
        c: (m, n), required if beta is not 0.
        alpha, beta: factors of a b and of c.
        block_m, block_n, block_k: the tile of a thread block, and the width of a strip.
        warp_m, warp_n: the tile of a warp; they divide block_m and block_n.

    Raises:
        ValueError: the shapes do not match, or the tile of a warp does not divide that of a thread block.

    Examples:
        >>> from flashtile.algorithms import Memory, tiled_matmul
        >>> a, b, c = torch.randn(64, 32), torch.randn(32, 64), torch.randn(64, 64)
        >>> memory = Memory(element_bytes=1)
        >>> out, warps = tiled_matmul.two_levels(a, b, memory, c=c, alpha=2.0, beta=0.5)
        >>> torch.testing.assert_close(out, 2 * a @ b + 0.5 * c)
        >>> memory.traffic["A"].read, warps.read_bytes  # one block of 64 x 64, four warps of 32 x 32
        (2048, 8192)
    """
    if a.shape[-1] != b.shape[0]:
        raise ValueError(f"b must have {a.shape[-1]} rows, the columns of a, got {b.shape[0]}")
    shape = (a.shape[0], b.shape[1])
    if beta != 0 and (c is None or tuple(c.shape) != shape):
        got = None if c is None else tuple(c.shape)
        raise ValueError(f"c must have shape {shape} where beta is not 0, got {got}")
    for block, side, axis in ((block_m, warp_m, "m"), (block_n, warp_n, "n")):
        if side < 1 or block % side:
            raise ValueError(f"warp_{axis} must divide block_{axis} ({block}), got {side}")
    if block_k < 1:
        raise ValueError(f"block_k must be at least 1, got {block_k}")
    A, B = memory.place("A", a), memory.place("B", b)
    C = memory.empty("C", *shape, like=a) if c is None else memory.place("C", c.clone())
    warps = Warps(memory, (block_m // warp_m) * (block_n // warp_n), WARP_TILES)
    for rows in blocks(C.rows, block_m):
        for cols in blocks(C.cols, block_n):
            tiles = itertools.product(split(rows, warp_m), split(cols, warp_n))
            busy = list(zip(warps, tiles, strict=False))  # a block at the edge of C needs fewer warps
            with memory.sram(kernel="C = alpha A B + beta C") as sram:
                for warp, (r, s) in busy:
                    warp.take(rows=r, cols=s)
                    warp.start(C=a.new_zeros(len(r), len(s)))
                for strip in blocks(A.cols, block_k):
                    a_k, b_k = sram.load(A, rows, strip), sram.load(B, strip, cols)
                    warps.barrier("the strips are there")
                    for warp, (r, s) in busy:
                        warp.take(strip=strip)
                        a_w = warp.read("A", a_k[r.start - rows.start : r.stop - rows.start])
                        b_w = warp.read("B", b_k[:, s.start - cols.start : s.stop - cols.start])
                        warp.C = warp.C + a_w @ b_w
                    warps.barrier("the strips are used")
                for warp, (r, s) in busy:
                    out = alpha * warp.C
                    if beta != 0:
                        out = out + beta * sram.load(C, r, s)
                    sram.store(C, out, r, s)
    return C.tensor, warps
