"""Known decoder models and the products of their layers, with the resource that bounds a product."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.hardware.calls import ELEMENT_BYTES, Call
from flashtile.hardware.cards import Card


@dataclass(frozen=True)
class Model:
    """A decoder's published numbers.

    Args:
        intermediate: hidden width of the feed-forward layers.
        parameters: number of parameters of the whole model.
        longest: longest sequence that the model was trained for, in tokens.
        gated: whether the first feed-forward product has a gate projection.

    Examples:
        >>> from flashtile.io_model import MODELS
        >>> MODELS[0].name, MODELS[0].kv_bytes_per_token()
        ('OPT-13B', 819200)
    """

    name: str
    layers: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    intermediate: int
    parameters: float
    longest: int
    source: str
    gated: bool = True

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Sizes (N, K) of the matrix products of a layer.

        There are four products: the joint projection to q, k and v, the output projection, the first
        feed-forward product with its gate, and the second feed-forward product.
        """
        hidden = self.num_heads_q * self.head_dim
        qkv = (self.num_heads_q + 2 * self.num_heads_kv) * self.head_dim
        first = (2 if self.gated else 1) * self.intermediate
        return (qkv, hidden), (hidden, hidden), (first, hidden), (hidden, self.intermediate)

    def kv_bytes_per_token(self, dtype: str = "float16") -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.layers * self.num_heads_kv * self.head_dim * ELEMENT_BYTES[dtype]

    def weight_bytes(self, dtype: str = "float16") -> int:
        return round(self.parameters * ELEMENT_BYTES[dtype])

    def call(self, batch: int, seqlen: int, dtype: str = "float16") -> Call:
        """Return the causal attention call of one layer over prompts of ``seqlen`` tokens."""
        heads = self.num_heads_q, self.num_heads_kv, self.head_dim
        return Call(batch, seqlen, seqlen, *heads, dtype=dtype, window_right=0)


MODELS = (
    Model("OPT-13B", 40, 40, 40, 128, 20480, 12.85e9, 2048, "Zhang et al. 2022, arXiv:2205.01068", False),
    Model("LLaMA-7B", 32, 32, 32, 128, 11008, 6.74e9, 2048, "Touvron et al. 2023, arXiv:2302.13971"),
    Model("LLaMA-13B", 40, 40, 40, 128, 13824, 13.02e9, 2048, "Touvron et al. 2023, arXiv:2302.13971"),
    Model("LLaMA-65B", 80, 64, 64, 128, 22016, 65.29e9, 2048, "Touvron et al. 2023, arXiv:2302.13971"),
    Model("Llama-2-7B", 32, 32, 32, 128, 11008, 6.74e9, 4096, "Touvron et al. 2023, arXiv:2307.09288"),
    Model("Llama-2-13B", 40, 40, 40, 128, 13824, 13.02e9, 4096, "Touvron et al. 2023, arXiv:2307.09288"),
    Model("Llama-2-70B", 80, 64, 8, 128, 28672, 68.98e9, 4096, "Touvron et al. 2023, arXiv:2307.09288"),
    Model("Llama-3-8B", 32, 32, 8, 128, 14336, 8.03e9, 8192, "Grattafiori et al. 2024, arXiv:2407.21783"),
    Model("Mistral-7B", 32, 32, 8, 128, 14336, 7.24e9, 32768, "Jiang et al. 2023, arXiv:2310.06825"),
    Model("Qwen2.5-7B", 28, 28, 4, 128, 18944, 7.62e9, 32768, "Qwen team 2024, arXiv:2412.15115"),
)


def find_model(name: str) -> Model:
    """Return the model of that name in :data:`MODELS`, ignoring case.

    Raises:
        ValueError: no model has that name.

    Examples:
        >>> from flashtile.io_model import find_model
        >>> find_model("llama-3-8b").products
        ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    """
    models = {model.name.lower(): model for model in MODELS}
    if name.lower() not in models:
        raise ValueError(f"model must be one of {', '.join(models)}, got {name!r}")
    return models[name.lower()]


@dataclass(frozen=True)
class Product:
    """A product with a weight, y [M, N] = x [M, K] W [N, K]^T, by its sizes and the names of its dtypes.

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
        """Minimum number of bytes moved: x and the weight are read once, y is written once."""
        rows = (self.M * self.K + self.M * self.N) * ELEMENT_BYTES[self.dtype]
        return rows + self.N * self.K * ELEMENT_BYTES[self.weight_dtype]

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.K

    def floor_seconds(self, card: Card) -> float:
        """Lower bound of any kernel's time: the time of its traffic or its FLOPs, whichever is longer."""
        return max(self.bytes / card.bandwidth_gbps * 1e-9, self._arithmetic_seconds(card))

    def bound(self, card: Card) -> str:
        """Resource that takes the longer time on the card: "memory" or "arithmetic"."""
        return "arithmetic" if self._arithmetic_seconds(card) == self.floor_seconds(card) else "memory"

    def intensity(self, block_n: int) -> float:
        """FLOPs per element read or written, if each program computes ``block_n`` columns and reads x once.

        FlashDecoding++, Hong et al. 2023, arXiv:2311.01282, section 4.
        """
        return 2 * self.M * self.K / (self.K + self.M * self.K / block_n + self.M)

    def _arithmetic_seconds(self, card: Card) -> float:
        return self.flops / card.peak_tflops(self.dtype) * 1e-12
