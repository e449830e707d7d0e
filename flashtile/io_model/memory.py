"""Memory by sequence length: what attention stores, the caches of known models, and when a card is full."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from flashtile.io_model.calls import ELEMENT_BYTES, Call
from flashtile.io_model.cards import Card
from flashtile.io_model.estimate import resident_bytes
from flashtile.io_model.kernels import STATISTICS_BYTES

SEQLENS = tuple(2**power for power in range(9, 21))


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of one attention layer at one sequence length.

    ``tensors`` are q, k, v, out (and their gradients in training); the rest is what each algorithm needs
    beyond. Standard attention holds S and P, in training P, dP and dS; flash attention keeps one fp32 a row,
    and two more in its backward pass.
    """

    seqlen: int
    tensors: int
    standard: int
    flash: int


@dataclass(frozen=True)
class Model:
    """A decoder's numbers that decide its weights and its cache.

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
    parameters: float
    longest: int
    source: str

    def kv_bytes_per_token(self, dtype: str = "float16") -> int:
        """Keys and values of one token in every layer."""
        return 2 * self.layers * self.num_heads_kv * self.head_dim * ELEMENT_BYTES[dtype]

    def weight_bytes(self, dtype: str = "float16") -> int:
        return round(self.parameters * ELEMENT_BYTES[dtype])


MODELS = (
    Model("OPT-13B", 40, 40, 40, 128, 12.85e9, 2048, "Zhang et al. 2022, arXiv:2205.01068"),
    Model("LLaMA-7B", 32, 32, 32, 128, 6.74e9, 2048, "Touvron et al. 2023, arXiv:2302.13971"),
    Model("LLaMA-13B", 40, 40, 40, 128, 13.02e9, 2048, "Touvron et al. 2023, arXiv:2302.13971"),
    Model("LLaMA-65B", 80, 64, 64, 128, 65.29e9, 2048, "Touvron et al. 2023, arXiv:2302.13971"),
    Model("Llama-2-70B", 80, 64, 8, 128, 68.98e9, 4096, "Touvron et al. 2023, arXiv:2307.09288"),
    Model("Llama-3-8B", 32, 32, 8, 128, 8.03e9, 8192, "Grattafiori et al. 2024, arXiv:2407.21783"),
    Model("Mistral-7B", 32, 32, 8, 128, 7.24e9, 32768, "Jiang et al. 2023, arXiv:2310.06825"),
    Model("Qwen2.5-7B", 28, 28, 4, 128, 7.62e9, 32768, "Qwen team 2024, arXiv:2412.15115"),
)


def attention_memory(call: Call, training: bool = False) -> AttentionMemory:
    """Memory of one layer's attention; ``training`` is that of the backward pass.

    Examples:
        >>> from flashtile.io_model import Call, attention_memory
        >>> memory = attention_memory(Call(1, 4096, 4096, 1, 1, 64))
        >>> memory.standard, memory.flash  # bytes beside q, k, v and out
        (67108864, 16384)
    """
    scores = call.score_pairs * call.element_bytes
    statistics = call.lse_bytes + (call.rows_q * STATISTICS_BYTES if training else 0)
    return AttentionMemory(
        seqlen=call.seqlen_q,
        tensors=resident_bytes(call, "backward" if training else "forward"),
        standard=(3 if training else 2) * scores,
        flash=statistics,
    )


def at_length(call: Call, seqlen: int) -> Call:
    """The same call over sequences of ``seqlen``."""
    return replace(call, seqlen_q=seqlen, seqlen_k=seqlen, lengths=None)


def longest_sequence(call: Call, card: Card, *, standard: bool, training: bool = False) -> int:
    """The most tokens of a sequence at which one layer's attention fits the card's memory; 0 if none does.

    Examples:
        >>> from flashtile.io_model import Call, find_card, longest_sequence
        >>> longest_sequence(Call(1, 1, 1, 1, 1, 64), find_card("h100"), standard=True)
        146478
    """

    def is_too_long(seqlen: int) -> bool:
        needed = attention_memory(at_length(call, seqlen), training)
        return needed.tensors + (needed.standard if standard else needed.flash) > card.memory_bytes

    return bisect_left(range(1, 2**60), True, key=is_too_long)


def cached_tokens(model: Model, card: Card, dtype: str = "float16", cards: int = 1) -> int:
    """Tokens whose keys and values fit beside the weights on ``cards`` cards; 0 if the weights do not.

    Examples:
        >>> from flashtile.io_model import MODELS, cached_tokens, find_card
        >>> cached_tokens(MODELS[0], find_card("a100"))
        73485
    """
    room = cards * card.memory_bytes - model.weight_bytes(dtype)
    return max(0, room // model.kv_bytes_per_token(dtype))
