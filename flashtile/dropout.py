"""Dropout that is computed, not stored: which probabilities are kept follows from a state of two numbers.

It takes two generators (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

Philox-4x32 with ten rounds makes four words for each sequence b and query head h. Its key is the state's
seed, its counter (b * heads_q + h, offset modulo 2^32, 0, 0).

Philox-2x32 with seven rounds makes two words for each four probabilities: those of queries i and i + 8 and
keys j and j + 8, where bit 3 of i and of j is 0. Seven rounds are the fewest that passed BigCrush. Its key
is the first of the four words. Its counter is (pair(i), pair(j)), combined by exclusive or with the second
and the third; pair(i) = i // 16 * 8 + i % 8 counts the pairs. The first word belongs to query i, the second
to query i + 8. Of each word the low half belongs to key j, the high half to key j + 8.

A probability is kept where its number, the low 15 bits of its half, is at least dropout_p in units of 2^-15:
a sum then has the answer in the bit above, for two numbers at once. The kernels compute the same: one thread
holds those four in a product on the tensor cores, and in its transpose.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNITS = 2**15
"""dropout_p is rounded to a multiple of 1 / UNITS."""
_WORD = 2**32 - 1
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_SMALL_MULTIPLIER = 0xD256D193


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
    """Numbers of 15 bits below this drop their probability. It is such a number itself."""
    return min(round(dropout_p * UNITS), UNITS - 1)


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Philox-4x32-10: four words, int64 from 0 to 2^32 - 1, of words that broadcast."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    a, b = _MULTIPLIERS
    for _ in range(10):
        c0, c1, c2, c3 = (
            _high_word(b, c2) ^ c1 ^ k0,
            b * c2 & _WORD,
            _high_word(a, c0) ^ c3 ^ k1,
            a * c0 & _WORD,
        )
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def small_philox(key: Tensor, counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Philox-2x32-7: two words."""
    c0, c1 = counter
    for _ in range(7):
        c0, c1 = _high_word(_SMALL_MULTIPLIER, c0) ^ key ^ c1, _SMALL_MULTIPLIER * c0 & _WORD
        key = key + _KEY_STEPS[0] & _WORD
    return c0, c1


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

    zero = torch.zeros_like(offset)
    counter = places(batch, 0) * heads_q + places(heads, 1), offset & _WORD, zero, zero
    key, first_row, first_key, _ = philox((seed & _WORD, seed >> 32 & _WORD), counter)
    row_pairs, key_pairs = _pairs(rows), _pairs(keys)
    words = small_philox(key, (places(row_pairs, 2) ^ first_row, places(key_pairs, 3) ^ first_key))
    numbers = torch.stack([half for word in words for half in (word & 0x7FFF, word >> 16 & 0x7FFF)])
    # [query of a pair, key of a pair, ..., eights of queries, 8, eights of keys, 8]
    numbers = numbers.view(2, 2, len(batch), len(heads), len(row_pairs) // 8, 8, len(key_pairs) // 8, 8)
    numbers = numbers.permute(2, 3, 4, 0, 5, 6, 1, 7).flatten(5).flatten(2, 4)
    own_rows = slice(rows.start % 16, rows.start % 16 + len(rows))
    own_keys = slice(keys.start % 16, keys.start % 16 + len(keys))
    return numbers[:, :, own_rows, own_keys] >= threshold(dropout_p)


def _pairs(extent: range) -> range:
    """Of positions i and i + 8, those of whole sixteens that cover ``extent``."""
    return range(extent.start // 16 * 8, -(-extent.stop // 16) * 8)
