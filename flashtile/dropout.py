"""Dropout whose mask is computed instead of stored: it follows from a state of two numbers, seed and offset.

Two Philox generators are used (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

Philox-4x32 with ten rounds makes four words for each sequence b and query head h. Its key is the state's
seed; its counter is (b * heads_q + h, offset modulo 2^32, 0, 0).

Philox-2x32 with seven rounds, the fewest that passed BigCrush, makes two words for each group of eight
probabilities: those of queries i and i + 8 and of keys j, j + 1, j + 8 and j + 9, where bit 3 of i and bits 0
and 3 of j are 0. Its key is the first of the four words. Its counter is (pair(i), four(j)), XORed with the
second and the third of the four words, where pair(i) = i // 16 * 8 + i % 8 and
four(j) = j // 16 * 4 + j % 8 // 2.

The first word belongs to query i, the second to query i + 8. The bytes of a word, from the lowest on, belong
to keys j + 8, j, j + 9 and j + 1.

Each probability has a number of 15 bits. The upper seven are the low seven bits of its own byte. The lower
eight are the other byte of the same half word: that of key j + 8 for key j, and that of key j for key j + 8.
A probability is dropped if its number is below dropout_p * 2^15, rounded to an integer. This changes the
share of dropped probabilities by at most 2^-16. Only below 2^-16 and above 1 - 2^-16, where the integer is
at least 1 and at most 2^15 - 1, does it change it by up to 2^-15. Kept probabilities are divided by exactly
1 - dropout_p.

Keys j and j + 8 of one query have numbers made of the same 16 bits, so their drops are slightly correlated.
The correlation coefficient is at most 0.01 for dropout_p from 1/128 to 127/128, and at most 0.031 from 1/2048
to 2047/2048. Nearer to 0 and 1 it rises to 0.5. Any other two probabilities share no bits.

In a product on the tensor cores, one thread holds the eight probabilities of a group. In the transposed
product two threads hold four each; a warp then computes the same words and transposes them as 8 x 8 matrices
of 16-bit elements. Numbers of 15 bits are ordered like the fp16 numbers with the same bits, so one
instruction compares two of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.checks.arguments import as_float, check_dense, check_share

UNITS = 2**15
"""The share of dropped probabilities is a multiple of 1 / UNITS."""
_WORD = 2**32 - 1
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
SMALL_MULTIPLIER = 0xD256D193
SERIAL_ELEMENTS = 32768
"""Up to this many elements, torch computes an operation on the CPU in the calling thread."""


def threshold(dropout_p: float) -> int:
    """Return dropout_p in units of 1 / UNITS, rounded, from 1 to UNITS - 1.

    A probability whose number is below this threshold is dropped. Numbers are uniform from 0 to UNITS - 1.
    """
    return min(max(round(dropout_p * UNITS), 1), UNITS - 1)


def keep_share(dropout_p: float) -> float:
    """Return 1 - dropout_p, the share of probabilities that is kept. Kept ones are divided by it.

    Raises:
        TypeError: dropout_p is not a number.
        ValueError: dropout_p is negative, 1 or more, or NaN.

    Examples:
        >>> from flashtile.dropout import keep_share
        >>> keep_share(0.1), keep_share(0.5)
        (0.9, 0.5)
    """
    check_share("dropout_p", as_float("dropout_p", dropout_p, "a number"))
    return 1 - dropout_p


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Return the four words of Philox-4x32-10. All words are int64 from 0 to 2^32 - 1.

    The tensors of the key and the counter are broadcast.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        # int64 keeps the low 64 bits of a product, which are all bits of the unsigned product.
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> 32) & _WORD ^ c1 ^ k0, b & _WORD, (a >> 32) & _WORD ^ c3 ^ k1, a & _WORD
        k0, k1 = k0 + KEY_STEPS[0] & _WORD, k1 + KEY_STEPS[1] & _WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def small_philox(key: Tensor, counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the two words of Philox-2x32-7, int64 from 0 to 2^32 - 1."""
    c0, c1 = counter
    for _ in range(7):
        product = c0 * SMALL_MULTIPLIER
        # c1 still has high bits here. The mask of the next c0 clears them, and the return does at the end.
        c0, c1 = ((product >> 32) ^ c1).bitwise_xor_(key).bitwise_and_(_WORD), product
        key = key + KEY_STEPS[0] & _WORD
    return c0, c1 & _WORD


def kept(
    rng_state: Tensor, dropout_p: float, heads_q: int, batch: range, heads: range, rows: range, keys: range
) -> Tensor:
    """Return which probabilities dropout keeps, (batch, heads, rows, keys) bool.

    The result for a probability does not depend on the ranges, so any part of the mask can be computed alone.

    Args:
        heads_q: number of query heads of the call.

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
    check_dense("rng_state", rng_state)
    if tuple(rng_state.shape) != (2,) or rng_state.dtype != torch.int64:
        raise ValueError(
            f"rng_state must be int64 of shape (2,), got {rng_state.dtype} of {tuple(rng_state.shape)}"
        )
    check_share("dropout_p", as_float("dropout_p", dropout_p, "a number"))
    seed, offset = rng_state.unbind()

    def places(extent: range, dim: int) -> Tensor:
        shape = [1] * 4
        shape[dim] = -1
        return torch.arange(extent.start, extent.stop, device=rng_state.device).view(shape)

    zero = torch.zeros_like(offset)
    counter = places(batch, 0) * heads_q + places(heads, 1), offset & _WORD, zero, zero
    key, first_row, first_key, _ = philox((seed & _WORD, seed >> 32 & _WORD), counter)
    pairs, fours = _units(rows, 8), _units(keys, 4)
    pair, four = places(pairs, 2) ^ first_row, places(fours, 3) ^ first_key
    # Torch starts its threads for each operation on more elements than SERIAL_ELEMENTS. That costs more than
    # the dozens of short operations of a generator if other processes use the cores.
    together = max(1, SERIAL_ELEMENTS // max(1, len(pairs) * len(fours)))
    parts = zip(*(t.flatten(0, 1).split(together) for t in (key, pair, four)), strict=True)
    words = [small_philox(own_key, (pair, four)) for own_key, pair, four in parts]
    shape = (len(batch), len(heads), len(pairs), len(fours))
    first, second = (torch.cat(word).view(shape) for word in zip(*words, strict=True))
    numbers = numbers_of((first, second))
    own_rows = slice(rows.start % 16, rows.start % 16 + len(rows))
    own_keys = slice(keys.start % 16, keys.start % 16 + len(keys))
    # In place, the comparison stays in int16. That and the conversion are faster than a comparison to bool.
    return numbers[:, :, own_rows, own_keys].ge_(threshold(dropout_p)).to(torch.bool)


def numbers_of(words: tuple[Tensor, Tensor]) -> Tensor:
    """Return the numbers of probabilities, (batch, heads, 2 * pairs, 4 * fours) int16, from 0 to UNITS - 1.

    Args:
        words: the words of Philox-2x32, two tensors (batch, heads, pairs, fours).
    """
    batch, heads, pairs, fours = words[0].shape
    low_bits = [word.to(torch.int32).view(batch, heads, pairs // 8, 8, fours) for word in words]
    # A block of 16 keys has eight half words: as they are for the first eight keys, and with their bytes
    # exchanged for the others. A half times 2^8 loses its upper byte, because int16 wraps around.
    halves = torch.stack(low_bits, 3).view(torch.int16).view(batch, heads, 2 * pairs, fours // 4, 8)
    exchanged = (halves >> 8).bitwise_and_(0xFF).add_(halves, alpha=2**8)
    return torch.stack((halves, exchanged), -2).flatten(3).bitwise_and_(UNITS - 1)


def _units(extent: range, per_sixteen: int) -> range:
    """Return the range of the groups of queries or keys that cover the positions ``extent``.

    It is extended to whole blocks of 16 positions. A block has ``per_sixteen`` groups: 8 pairs of queries, or
    4 fours of keys.
    """
    return range(extent.start // 16 * per_sixteen, -(-extent.stop // 16) * per_sixteen)
