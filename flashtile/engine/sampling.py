"""Samples the next token of each row of logits in one kernel: temperature, min-p, top-k, top-p and the draw.

:mod:`flashtile.engine.sampler` computes the same in torch. One program reads its row several times, mostly
from the L2 cache. Each pass finds two bits of the lowest score that top-k or top-p keeps.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.launch import CachedLaunch, Launched

NUM_WARPS = 16
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SamplingVariant:
    """Constants of the kernel."""

    FILTERED: bool
    """False if no row has min-p, top-k or top-p."""
    BLOCK: int


class Row(NamedTuple):
    """A row of logits and its temperature. Scores below ``least`` are never sampled."""

    logits: tl.tensor
    vocab_size: tl.tensor
    temperature: tl.tensor
    least: tl.tensor


@triton.jit
def load_scores(row, first, C: tl.constexpr):
    """Return (scores [BLOCK] float32, keys [BLOCK] uint32). ``keys`` are integers that sort like the scores.

    Scores below ``row.least`` become -inf. NaN stays NaN.
    """
    column = first + tl.arange(0, C.BLOCK)
    logits = tl.load(row.logits + column, mask=column < row.vocab_size, other=-float("inf"))
    scores = logits.to(tl.float32) / row.temperature
    scores = tl.where(scores < row.least, -float("inf"), scores)
    bits = scores.to(tl.uint32, bitcast=True)
    keys = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return scores, keys


@triton.jit
def weights_of(scores, keys, lowest, row_max, BY_MASS: tl.constexpr):
    """Return the weight of each score: 1, or with BY_MASS the unnormalised probability.

    The weight is 0 for scores of -inf, and for scores with ``keys`` (:func:`load_scores`) below ``lowest``.
    """
    weights = tl.exp(scores - row_max) if BY_MASS else tl.full(scores.shape, 1.0, tl.float32)
    return tl.where((scores > -float("inf")) & (keys >= lowest), weights, 0.0)


@triton.jit
def total_weight(row, lowest, row_max, C: tl.constexpr):
    BLOCK: tl.constexpr = C.BLOCK
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, row.vocab_size, C.BLOCK):
        scores, keys = load_scores(row, first, C)
        total += weights_of(scores, keys, lowest, row_max, True)
    return tl.sum(total, 0)


@triton.jit
def largest_threshold(row, lowest, row_max, wanted, BY_MASS: tl.constexpr, C: tl.constexpr):
    """Return the largest threshold for which the kept scores have a total weight of at least ``wanted``.

    A score is kept if its key (:func:`load_scores`) is at least the threshold. The threshold is found two
    bits at a time, and is at least ``lowest``.
    """
    BLOCK: tl.constexpr = C.BLOCK
    threshold = tl.full([], 0, tl.uint32)
    for digit in range(16):
        unit = tl.full([], 1, tl.uint32) << (30 - 2 * digit)
        one = tl.zeros([BLOCK], tl.float32)
        two = tl.zeros([BLOCK], tl.float32)
        three = tl.zeros([BLOCK], tl.float32)
        for first in range(0, row.vocab_size, C.BLOCK):
            scores, keys = load_scores(row, first, C)
            weights = weights_of(scores, keys, lowest, row_max, BY_MASS)
            one += tl.where(keys >= threshold + unit, weights, 0.0)
            two += tl.where(keys >= threshold + unit * 2, weights, 0.0)
            three += tl.where(keys >= threshold + unit * 3, weights, 0.0)
        steps = (tl.sum(one, 0) >= wanted).to(tl.uint32) + (tl.sum(two, 0) >= wanted).to(tl.uint32)
        threshold += unit * (steps + (tl.sum(three, 0) >= wanted).to(tl.uint32))
    return tl.maximum(threshold, lowest)


@triton.jit
def mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def mix32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def gumbel(column, key):
    """Return Gumbel noise for the tokens ``column`` [BLOCK], drawn with a uint64 ``key``."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = mix32(mix32(column.to(tl.uint32) ^ low) + high)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1 - 1.0 / 16777216)
    # The largest noise comes from small u, where log(1 - u) would lose all digits.
    series = u * (1 + u * (0.5 + u * (1.0 / 3 + u * 0.25)))
    return -tl.log(tl.where(u < 0.00390625, series, -tl.log(1 - u)))


_PARAMETERS = ("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr")


# A program loads one number of each parameter, so the alignment of parameters does not matter.
@kernel(do_not_specialize=("vocab_size", "logits_stride"), do_not_specialize_on_alignment=_PARAMETERS)
def sample_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, out_ptr,
    logits_stride, vocab_size, C: tl.constexpr,
):  # fmt: skip
    """Sample a token for each row of logits (rows, vocab_size). Grid: (rows,).

    The other tensors have shape (rows,). The result is int64.
    """
    BLOCK: tl.constexpr = C.BLOCK
    at = tl.program_id(0)
    temperature = tl.load(temperature_ptr + at)
    greedy = temperature == 0
    minus_infinity = temperature * 0 - float("inf")
    row = Row(
        logits_ptr + at.to(tl.int64) * logits_stride, vocab_size, tl.where(greedy, 1.0, temperature),
        minus_infinity,
    )  # fmt: skip
    lowest = tl.full([], 0, tl.uint32)
    if C.FILTERED:
        top_k = tl.load(top_k_ptr + at).to(tl.float32)
        top_p = tl.load(top_p_ptr + at)
        min_p = tl.load(min_p_ptr + at)
        if (top_k > 0) | (top_p < 1) | (min_p > 0):
            most = tl.full([BLOCK], -float("inf"), tl.float32)
            for first in range(0, vocab_size, C.BLOCK):
                scores, keys = load_scores(row, first, C)
                most = tl.maximum(most, scores)
            row_max = tl.max(most, 0)
            row = Row(row.logits, vocab_size, row.temperature, row_max + tl.log(min_p))
            if top_k > 0:
                lowest = largest_threshold(row, lowest, row_max, top_k, False, C)
            if top_p < 1:
                wanted = total_weight(row, lowest, row_max, C) * top_p
                lowest = largest_threshold(row, lowest, row_max, wanted, True, C)
    seed = tl.load(seed_ptr + at).to(tl.uint64)
    position = tl.load(position_ptr + at).to(tl.uint64)
    key = mix64(seed + position * GOLDEN)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, C.BLOCK):
        column = first + tl.arange(0, C.BLOCK)
        scores, keys = load_scores(row, first, C)
        noisy = scores + tl.where(greedy, 0.0, gumbel(column, key))
        noisy = tl.where(keys >= lowest, noisy, -float("inf"))
        noisy = tl.where(scores == scores, noisy, float("inf"))  # NaN wins, so that the caller can detect it
        better = noisy > best
        best = tl.where(better, noisy, best)
        token = tl.where(better, column, token)
    winner = tl.min(tl.where(best == tl.max(best, 0), token, vocab_size), 0)
    tl.store(out_ptr + at, tl.minimum(winner, vocab_size - 1).to(tl.int64))


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor,
    positions: Tensor, filtered: bool,
) -> Tensor:  # fmt: skip
    """Sample a token for each row of logits (rows, vocab_size), which may have any strides.

    Args:
        temperature, top_p, min_p: (rows,) float32. top_k, seed: (rows,) int64. positions: (rows,) int32.
        filtered: False if no row has min-p, top-k or top-p.

    Returns:
        (rows,) int64.
    """
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    variant = _variant(filtered, vocab_size)
    sample_kernel[(rows,)](
        logits, temperature, top_k, top_p, min_p, seed, positions, out, logits.stride(0), vocab_size,
        C=variant, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def sampling_ahead(dtype: torch.dtype, vocab_size: int) -> list[Launched]:
    """Return the launches of all kernels of :func:`sample` for this dtype, to be compiled ahead of time."""
    meta = torch.device("meta")
    logits = torch.empty(1, vocab_size, dtype=dtype, device=meta)
    floats = torch.empty(1, device=meta)
    longs, positions = floats.long(), floats.int()
    tensors = logits, floats, longs, floats, floats, longs, positions, longs
    scalars = vocab_size, vocab_size
    return [
        (CachedLaunch(sample_kernel, 1, scalars, (variant,), None, num_warps=NUM_WARPS), tensors)
        for variant in (_variant(filtered, vocab_size) for filtered in (False, True))
    ]


def _variant(filtered: bool, vocab_size: int) -> SamplingVariant:
    return SamplingVariant(filtered, min(4096, triton.next_power_of_2(vocab_size)))
