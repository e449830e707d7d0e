"""The tiled matrix product: the first place where blocks save memory traffic.

Computed an element at a time, C = A B of (m, k) by (k, n) reads a row of A and a column of B for each of its
m n elements: 2 m n k reads. A block of C needs the same rows of A for all of its columns, and the same
columns of B for all of its rows. So hold a (block_m, block_n) tile of C in SRAM while strips of A and B
stream by:

    reads of A: m k * ceil(n / block_n)      reads of B: k n * ceil(m / block_m)      writes of C: m n

The width of the strips does not appear: they may be narrow, and SRAM belongs to C. With square tiles of
sqrt(M) numbers a side the traffic is about 2 m n k / sqrt(M), which no order of operations can beat by more
than a constant factor (Hong and Kung, "I/O complexity: the red-blue pebble game", 1981).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from flashtile.algorithms.call import blocks, chosen_blocks, zeros
from flashtile.algorithms.memory import Array, Memory, SramExceededError

MAX_BLOCK_K = 16


def strip_width(memory: Memory) -> int:
    """block_k: narrow beside a tile of C."""
    return max(1, min(math.isqrt(memory.sram_elements) // 4, MAX_BLOCK_K))


def block_sizes(memory: Memory, cols: int) -> tuple[int, int]:
    """(block_m, block_n): the largest square tile of C beside two strips, taller if C has few columns."""
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
    """a (m, k) times b (k, n); block sizes default to what SRAM allows.

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
    """C = finish(A B), where A is stored transposed if ``transpose_a``, B if ``transpose_b``.

    ``finish`` gets a tile of the product and its place, before it is stored.
    """
    block_m, block_n = chosen_blocks(block_m, block_n, block_sizes(memory, max(C.cols, 1)))
    depth = A.rows if transpose_a else A.cols
    op = f"{C.name} += {A.name}{'^T' if transpose_a else ''} {B.name}{'^T' if transpose_b else ''}"
    for rows in blocks(C.rows, block_m):
        for cols in blocks(C.cols, block_n):
            with memory.sram(kernel=C.name) as sram:  # a GPU's thread block
                c = sram.compute(C.name, zeros(len(rows), len(cols), C.tensor), rows, cols)
                for strip in blocks(depth, strip_width(memory)):
                    a = sram.load(A, strip, rows).T if transpose_a else sram.load(A, rows, strip)
                    b = sram.load(B, cols, strip).T if transpose_b else sram.load(B, strip, cols)
                    c = sram.compute(C.name, c + a @ b, rows, cols, op=op)
                sram.store(C, finish(c, rows, cols), rows, cols)
