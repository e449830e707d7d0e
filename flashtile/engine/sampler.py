"""The next tokens from logits, on their device.

Every draw is an argmax: of the logits alone where the temperature is 0, else of logits plus Gumbel noise,
which has the softmax's distribution (Maddison et al. 2014, arXiv:1411.0030, section 2). The noise of a token
is a hash of the request's seed, the position and the token, so that it depends on nothing else in the batch.

top-k and top-p need no sort: what they keep is everything from some logit on, and that threshold is found bit
by bit in 33 passes. Tokens that tie with the last one kept are kept, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
LOW = 0xFFFFFFFF


class Choice(NamedTuple):
    """How each row is chosen, all (rows,) on the device.

    Attributes:
        temperature: float32, 0 for the likeliest token.
        top_k: int64, 0 for all. top_p, min_p: float32.
        seed: int64.
        greedy, any_top_k, any_top_p, any_min_p: what the host knows of all rows.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool


def choose(logits: Tensor, choice: Choice, positions: Tensor) -> Tensor:
    """(rows,) int64: a token for each row of logits (rows, vocab_size).

    Args:
        positions: (rows,) integers, where in its sequence each token will stand.

    Returns:
        Where a row has NaN or infinity, the token of one: its logit tells whether the draw is valid.
    """
    if choice.greedy:
        return logits.argmax(-1)
    if logits.is_cuda:
        from flashtile.backends.portable.sampling import sample

        filtered = choice.any_top_k or choice.any_top_p or choice.any_min_p
        return sample(logits, *choice[:5], positions, filtered)
    return choose_in_torch(logits, choice, positions)


def candidates(logits: Tensor, choice: Choice, positions: Tensor, count: int) -> Tensor:
    """(rows, count) int64: the token that :func:`choose` takes, and those that come next."""
    if count == 1:
        return choose(logits, choice, positions).unsqueeze(1)
    if choice.greedy:
        return logits.topk(count).indices
    return noisy_scores(logits, choice, positions).topk(count).indices


def choose_in_torch(logits: Tensor, choice: Choice, positions: Tensor) -> Tensor:
    """:func:`choose` on any device, every step in torch."""
    return noisy_scores(logits, choice, positions).argmax(-1)


def noisy_scores(logits: Tensor, choice: Choice, positions: Tensor) -> Tensor:
    """(rows, vocab_size) float32, of which the largest is the draw."""
    greedy = (choice.temperature == 0).unsqueeze(1)
    scores = logits.float() / choice.temperature.masked_fill(choice.temperature == 0, 1.0).unsqueeze(1)
    kept = keep(scores, choice)
    noise = gumbel(choice.seed, positions, scores.shape[1])
    return kept.add_(noise.masked_fill_(greedy, 0.0))


def keep(scores: Tensor, choice: Choice) -> Tensor:
    """Scores (rows, vocab_size) float32, -inf where min-p, top-k and top-p, in this order, drop a token."""
    if choice.any_min_p:
        least = scores.amax(-1, keepdim=True) + choice.min_p.log().unsqueeze(1)
        scores = scores.masked_fill(scores < least, -torch.inf)
    if not (choice.any_top_k or choice.any_top_p):
        return scores
    keys = ordered(scores)
    if choice.any_top_k:
        wanted = choice.top_k.unsqueeze(1).to(torch.float32)
        threshold = largest_threshold(keys, torch.ones_like(scores), wanted)
        keys = torch.where((keys >= threshold) | (wanted == 0), keys, 0)
    if choice.any_top_p:
        weights = torch.exp(scores - scores.amax(-1, keepdim=True)).masked_fill_(keys == 0, 0.0)
        top_p = choice.top_p.unsqueeze(1)
        threshold = largest_threshold(keys, weights, weights.sum(-1, keepdim=True) * top_p)
        keys = torch.where((keys >= threshold) | (top_p >= 1), keys, 0)
    return scores.masked_fill(keys == 0, -torch.inf)


def ordered(scores: Tensor) -> Tensor:
    """Float32 numbers as int64 from 1 to 2^32 in the same order, NaN being the largest; -inf is 0."""
    bits = scores.contiguous().view(torch.int32).to(torch.int64) & LOW
    keys = torch.where(bits >= 2**31, LOW - bits, bits + 2**31)
    keys = torch.where(scores == -torch.inf, 0, keys + 1)
    return torch.where(scores.isnan(), LOW + 1, keys)  # whatever its sign, so that no filter drops it


def largest_threshold(keys: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """(rows, 1) int64: the largest number such that the weights of keys from it on are ``wanted`` or more.

    Args:
        keys: (rows, columns) int64 below 2^33.
        weights: the same shape, at least 0.
        wanted: (rows, 1).
    """
    threshold = torch.zeros_like(wanted, dtype=torch.int64)
    for bit in range(32, -1, -1):
        higher = threshold + (1 << bit)
        reached = weights.masked_fill(keys < higher, 0.0).sum(-1, keepdim=True) >= wanted
        threshold = torch.where(reached, higher, threshold)
    return threshold


def gumbel(seed: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """(rows, vocab_size) float32 noise, -log(-log(u)) of a hash u of (seed, position, token)."""
    key = mix64(seed + positions.long() * _signed(GOLDEN)).unsqueeze(1)
    tokens = torch.arange(vocab_size, device=seed.device)
    bits = mix32(mix32(tokens ^ (key & LOW)) + ((key >> 32) & LOW))
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-32
    # Large noise comes from u near 0 here, where floats are dense: of 1 - u the same.
    return -torch.log(-torch.log1p(-uniform.clamp_(max=1 - 2.0**-24)))


def mix64(x: Tensor) -> Tensor:
    """A hash of int64 numbers (Steele, Lea and Flood 2014, SplitMix64's finaliser)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & (2**33 - 1))


def mix32(x: Tensor) -> Tensor:
    """A hash of the low 32 bits of int64 numbers, from 0 to 2^32 - 1 (MurmurHash3's finaliser)."""
    x = x & LOW
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW
    return x ^ (x >> 16)


def stream_seed(seed: int, index: int) -> int:
    """The seed of a request's answer number ``index``, a signed 64-bit integer.

    It is a hash: positions are added to it, and neighbouring seeds would be each other's, one position on.
    """
    return int(mix64(torch.tensor(_signed((seed + index * GOLDEN) & (2**64 - 1)))))


def log_probabilities(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, ...]:
    """(of ``tokens``, their ranks, of the ``count`` likeliest, these), for each row of logits.

    (rows,) float32, (rows,) int64, (rows, count) float32 and int64; the rank of the likeliest is 1.
    """
    logprobs = torch.log_softmax(logits.float(), -1)
    chosen = logprobs.gather(1, tokens.long().unsqueeze(1))
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
    return chosen.squeeze(1), ranks, best.values, best.indices


def penalise(
    logits: Tensor, prompt: Tensor, answer: Tensor, repetition: float, presence: float, frequency: float
) -> None:
    """Lower one row of logits (vocab_size,), in place, by the tokens (n,) before it."""
    seen = torch.cat([prompt, answer]).unique()
    values = logits[seen]
    logits[seen] = torch.where(values > 0, values / repetition, values * repetition)
    tokens, counts = answer.unique(return_counts=True)
    logits[tokens] -= presence + frequency * counts.to(logits.dtype)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
