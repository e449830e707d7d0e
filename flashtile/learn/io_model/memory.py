"""Memory of attention by sequence length, and the length at which a card is full."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from flashtile.hardware.calls import Call
from flashtile.hardware.cards import Card
from flashtile.learn.io_model.estimate import resident_bytes
from flashtile.learn.io_model.kernels import STATISTICS_BYTES

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
    """Memory of one layer's attention; ``training`` gives the memory during the backward pass.

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
    """Longest sequence, in tokens, whose attention in one layer fits the card's memory; 0 if none does.

    Examples:
        >>> from flashtile.io_model import Call, find_card, longest_sequence
        >>> longest_sequence(Call(1, 1, 1, 1, 1, 64), find_card("h100"), standard=True)
        146478
    """

    def is_too_long(seqlen: int) -> bool:
        needed = attention_memory(at_length(call, seqlen), training)
        return needed.tensors + (needed.standard if standard else needed.flash) > card.memory_bytes

    return bisect_left(range(1, 2**60), True, key=is_too_long)
