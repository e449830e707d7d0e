"""Memory of attention and of models that read prompts, by sequence length, and what fits on a card."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from flashtile.hardware.calls import Call
from flashtile.hardware.cards import Card
from flashtile.learn.io_model.estimate import resident_bytes
from flashtile.learn.io_model.kernels import STATISTICS_BYTES
from flashtile.learn.io_model.models import Model

SEQLENS = tuple(2**power for power in range(9, 21))


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of one attention layer at one sequence length.

    ``tensors`` are q, k, v and out, and in training their gradients. ``standard`` and ``flash`` are the bytes
    that each algorithm needs in addition. Standard attention holds S and P, in training P, dP and dS. Flash
    attention keeps one fp32 per row, and two more in its backward pass.
    """

    seqlen: int
    tensors: int
    standard: int
    flash: int


def attention_memory(call: Call, training: bool = False) -> AttentionMemory:
    """Return the memory of one layer's attention. ``training`` means the memory in the backward pass.

    Examples:
        >>> from flashtile.io_model import Call, attention_memory
        >>> memory = attention_memory(Call(1, 4096, 4096, 1, 1, 64))
        >>> memory.standard, memory.flash  # bytes in addition to q, k, v and out
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
    """Return the call with all sequences of length ``seqlen``."""
    return replace(call, seqlen_q=seqlen, seqlen_k=seqlen, lengths=None)


def longest_sequence(call: Call, card: Card, *, standard: bool, training: bool = False) -> int:
    """Return the largest sequence length at which one layer's attention fits the card's memory.

    The result is 0 if not even one token fits.

    Examples:
        >>> from flashtile.io_model import Call, find_card, longest_sequence
        >>> longest_sequence(Call(1, 1, 1, 1, 1, 64), find_card("h100"), standard=True)
        146478
    """

    def needed(seqlen: int) -> int:
        found = attention_memory(at_length(call, seqlen), training)
        return found.tensors + (found.standard if standard else found.flash)

    return _longest(needed, card)


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
    """Return the memory of ``model`` while it reads ``batch`` prompts of ``seqlen`` tokens.

    ``dtype`` is the dtype of the weights, the cache and the attention.

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
    """Number of tokens whose keys and values fit on ``cards`` cards next to the weights.

    The result is 0 if the weights do not fit.

    Examples:
        >>> from flashtile.io_model import MODELS, cached_tokens, find_card
        >>> cached_tokens(MODELS[0], find_card("a100"))
        73485
    """
    room = cards * card.memory_bytes - model.weight_bytes(dtype)
    return max(0, room // model.kv_bytes_per_token(dtype))


def longest_prompt(model: Model, batch: int, card: Card, dtype: str = "float16", *, standard: bool) -> int:
    """Return the largest prompt length at which ``model`` can read ``batch`` prompts at once on ``card``.

    The result is 0 if not even one token per prompt fits.

    Examples:
        >>> from flashtile.io_model import find_card, find_model
        >>> from flashtile.learn.io_model.memory import longest_prompt
        >>> model, card = find_model("llama-2-7b"), find_card("a100")
        >>> longest_prompt(model, 1, card, standard=True) < longest_prompt(model, 1, card, standard=False) / 5
        True
    """

    def needed(seqlen: int) -> int:
        found = prompt_memory(model, batch, seqlen, dtype)
        return found.total_standard if standard else found.total_flash

    return _longest(needed, card)


def _longest(needed: Callable[[int], int], card: Card) -> int:
    """Return the largest length for which ``needed`` bytes fit on the card; 0 if none does."""
    return bisect_left(range(1, 2**60), True, key=lambda seqlen: needed(seqlen) > card.memory_bytes)
