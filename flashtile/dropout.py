"""Dropout that is computed, not stored: which probabilities are kept follows from a state of two numbers.

The generator is Philox-4x32 with ten rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
3"), which makes four words of a counter and a key. The key is the state's seed. The counter of query i and
key j in sequence b and query head h is (j // 8, i, b * heads_q + h, offset modulo 2^32). Its four words are
eight numbers of 16 bits, low half first, of which key j has number j % 8. The probability is kept where that
is at least dropout_p in units of 2^-16. Triton's kernels compute the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNITS = 2**16
"""dropout_p is rounded to a multiple of 1 / UNITS."""
KEYS_AT_ONCE = 8
"""Neighbouring keys that share a counter."""
_ROUNDS = 10
_WORD = 2**32 - 1
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def draw_state(q: Tensor) -> Tensor:
    """(2,) int64, seed and offset, from torch's generator of q's device.

    An operation like any other: each replay of a CUDA graph draws anew, and checkpointing, which puts the
    generator's state back, draws the same again.
    """
    if type(q).__name__ == "DTensor":
        raise NotImplementedError(
            "rng_state must be given beside dropout_p where q is a DTensor, replicated: each device would "
            "draw its own"
        )
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)


def threshold(dropout_p: float) -> int:
    """Numbers of 16 bits below this drop their probability."""
    return round(dropout_p * UNITS)


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Four words, int64 from 0 to 2^32 - 1, of words that broadcast."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    a, b = _MULTIPLIERS
    for _ in range(_ROUNDS):
        c0, c1, c2, c3 = (
            _high_word(b, c2) ^ c1 ^ k0,
            b * c2 & _WORD,
            _high_word(a, c0) ^ c3 ^ k1,
            a * c0 & _WORD,
        )
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def _high_word(factor: int, word: Tensor) -> Tensor:
    """The upper half of a product of 64 bits, which int64 cannot hold."""
    return (factor * (word >> 16) + (factor * (word & 0xFFFF) >> 16)) >> 16


def kept(
    rng_state: Tensor, dropout_p: float, heads_q: int, batch: range, heads: range, rows: range, keys: range
) -> Tensor:
    """(batch, heads, rows, keys) bool: which probabilities dropout keeps, by their places in the call.

    Args:
        heads_q: query heads of the call.

    Examples:
        >>> from flashtile.dropout import kept
        >>> state = torch.tensor([7, 0])  # seed, offset
        >>> mask = kept(state, 0.25, 4, range(2), range(4), range(100), range(80))
        >>> mask.shape, round(mask.double().mean().item(), 2)
        (torch.Size([2, 4, 100, 80]), 0.75)
        >>> part = kept(state, 0.25, 4, range(2), range(1, 3), range(5, 100), range(9, 80))
        >>> torch.equal(part, mask[:, 1:3, 5:, 9:])
        True
    """
    seed, offset = rng_state.unbind()

    def places(extent: range, dim: int) -> Tensor:
        shape = [1] * 4
        shape[dim] = -1
        return torch.arange(extent.start, extent.stop, device=rng_state.device).view(shape)

    groups = range(keys.start // KEYS_AT_ONCE, -(-keys.stop // KEYS_AT_ONCE))
    sequence_and_head = places(batch, 0) * heads_q + places(heads, 1)
    counter = places(groups, 3), places(rows, 2), sequence_and_head, offset & _WORD
    words = philox((seed & _WORD, seed >> 32 & _WORD), counter)
    numbers = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1).flatten(-2)
    first = keys.start - groups.start * KEYS_AT_ONCE
    return numbers[..., first : first + len(keys)] >= threshold(dropout_p)
