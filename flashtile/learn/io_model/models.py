"""Known decoder models: numbers that determine their weights, caches, products and memory of a prompt."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from flashtile.hardware.calls import ELEMENT_BYTES, Call
from flashtile.hardware.cards import Card
from flashtile.learn.io_model.memory import attention_memory


@dataclass(frozen=True)
class Model:
    """A decoder's published numbers.

    Args:
        intermediate: width between the feed-forward products.
        parameters: number of parameters of the whole model.
        longest: longest sequence that the model was trained for, in tokens.
        gated: whether the feed-forward layer has a gate next to its first product.

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
        """(N, K) of a layer's products: queries, keys and values; output; first feed-forward product with its
        gate; second feed-forward product."""
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
    for model in MODELS:
        if model.name.lower() == name.lower():
            return model
    names = ", ".join(model.name.lower() for model in MODELS)
    raise ValueError(f"model must be one of {names}, got {name!r}")


@dataclass(frozen=True)
class PromptMemory:
    """Bytes that a model holds while it reads prompts.

    ``weights`` and ``cache`` count all layers. The other fields count the attention of one layer, because
    layers run one after the other: q and out (``rows``; k and v are in the cache), and what standard and
    flash attention hold in addition. Other activations are left out because both algorithms have the same.
    """

    seqlen: int
    weights: int
    cache: int
    rows: int
    standard: int
    flash: int

    @property
    def total_standard(self) -> int:
        return self.weights + self.cache + self.rows + self.standard

    @property
    def total_flash(self) -> int:
        return self.weights + self.cache + self.rows + self.flash


def prompt_memory(model: Model, batch: int, seqlen: int, dtype: str = "float16") -> PromptMemory:
    """Memory of ``model`` while it reads ``batch`` prompts of ``seqlen`` tokens, weights and cache in
    ``dtype``.

    Examples:
        >>> from flashtile.io_model import find_model, prompt_memory
        >>> memory = prompt_memory(find_model("llama-2-7b"), 1, 8192)
        >>> memory.standard / 2**30, memory.cache / 2**30  # GiB
        (8.0, 4.0)
    """
    call = model.call(batch, seqlen, dtype)
    beyond = attention_memory(call)
    return PromptMemory(
        seqlen,
        model.weight_bytes(dtype),
        batch * seqlen * model.kv_bytes_per_token(dtype),
        call.q_bytes + call.out_bytes,
        beyond.standard,
        beyond.flash,
    )


def cached_tokens(model: Model, card: Card, dtype: str = "float16", cards: int = 1) -> int:
    """Tokens whose keys and values fit on ``cards`` cards next to the weights; 0 if the weights do not fit.

    Examples:
        >>> from flashtile.io_model import MODELS, cached_tokens, find_card
        >>> cached_tokens(MODELS[0], find_card("a100"))
        73485
    """
    room = cards * card.memory_bytes - model.weight_bytes(dtype)
    return max(0, room // model.kv_bytes_per_token(dtype))


def longest_prompt(model: Model, batch: int, card: Card, dtype: str = "float16", *, standard: bool) -> int:
    """Longest prompt, in tokens, that ``model`` can read on ``card``, ``batch`` of them at once; 0 if none.

    Examples:
        >>> from flashtile.io_model import find_card, find_model
        >>> from flashtile.learn.io_model.models import longest_prompt
        >>> model, card = find_model("llama-2-7b"), find_card("a100")
        >>> longest_prompt(model, 1, card, standard=True) < longest_prompt(model, 1, card, standard=False) / 5
        True
    """

    def is_too_long(seqlen: int) -> bool:
        needed = prompt_memory(model, batch, seqlen, dtype)
        return (needed.total_standard if standard else needed.total_flash) > card.memory_bytes

    return bisect_left(range(1, 2**60), True, key=is_too_long)
