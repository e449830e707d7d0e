"""Cost of a product with a weight, y [M, N] = x [M, K] W [N, K]^T, and the resource that bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.hardware.cards import Card

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Product:
    """A product, given by its sizes and the names of its dtypes.

    Examples:
        >>> from flashtile.io_model import Product, find_card
        >>> product = Product(1, 4096, 4096)
        >>> product.bytes, product.flops
        (33570816, 33554432)
        >>> product.bound(find_card("h200")), Product(512, 4096, 4096).bound(find_card("h200"))
        ('memory', 'arithmetic')
    """

    M: int
    N: int
    K: int
    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"

    @property
    def bytes(self) -> int:
        """Least traffic: x and the weight are read once, y is written once."""
        rows = (self.M * self.K + self.M * self.N) * BYTES[self.dtype]
        return rows + self.N * self.K * BYTES[self.weight_dtype]

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.K

    def floor_seconds(self, card: Card) -> float:
        """Lower bound for any kernel on the card: the longer of moving the bytes and multiplying in
        ``dtype``."""
        return max(self.bytes / card.bandwidth_gbps * 1e-9, self._arithmetic_seconds(card))

    def bound(self, card: Card) -> str:
        """Resource that sets the floor: "memory" or "arithmetic"."""
        return "arithmetic" if self._arithmetic_seconds(card) == self.floor_seconds(card) else "memory"

    def intensity(self, block_n: int) -> float:
        """FLOPs per element read or written, if programs of ``block_n`` columns each read x once
        (FlashDecoding++, Hong et al. 2023, arXiv:2311.01282, section 4)."""
        return 2 * self.M * self.K / (self.K + self.M * self.K / block_n + self.M)

    def _arithmetic_seconds(self, card: Card) -> float:
        return self.flops / card.peak_tflops(self.dtype) * 1e-12
