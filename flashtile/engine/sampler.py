"""Sampling of the next tokens from logits, on the device of the logits.

Every draw is an argmax: of the logits at temperature 0, otherwise of logits plus Gumbel noise, which samples
from their softmax (Maddison et al. 2014, arXiv:1411.0030, section 2). The noise of a token is a hash of the
request's seed, the position and the token, so it does not depend on the batch.

Top-k and top-p keep the logits above some threshold. Tokens that tie with the last one kept are also kept.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.engine.adjust import Adjusted, bans_ends, needs_adjusting
from flashtile.engine.device import on_device
from flashtile.engine.request import Sequence

GOLDEN = 0x9E3779B97F4A7C15


class Choice(NamedTuple):
    """Sampling parameters of each row.

    Attributes:
        temperature: (rows,) float32 on the device, 0 for the likeliest token.
        top_k: (rows,) int64, 0 for all tokens.
        top_p, min_p: (rows,) float32.
        seed: (rows,) int64.
        greedy: whether every row has temperature 0, known on the host.
        any_top_k, any_top_p, any_min_p: whether some row uses that filter.
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


class Scores(NamedTuple):
    """Log-probabilities of tokens.

    Attributes:
        chosen: log-probabilities of the tokens, (rows,) float32.
        ranks: their ranks from 1 on, (rows,) int64.
        best: log-probabilities of the likeliest tokens, (rows, count) float32.
        tokens: these tokens, (rows, count) int64.
    """

    chosen: Tensor
    ranks: Tensor
    best: Tensor
    tokens: Tensor


class Draw(NamedTuple):
    """How the tokens of one batch are chosen.

    Attributes:
        choice: sampling parameters of the rows on the device.
        adjusted: rows of which some logits may have to be changed before the draw.
        processed: rows with logits processors.
        scored: (row, number of log-probabilities) of the rows for which they were requested.
        structured: rows whose tokens a structure restricts.
    """

    choice: Choice
    adjusted: list[int]
    processed: list[int]
    scored: list[tuple[int, int]]
    structured: list[int]


def read_parameters(device: torch.device, samples: tuple[Sequence, ...]) -> Draw:
    """Return the parameters of a draw. ``samples`` has one sequence for each row of the logits."""
    rows = [_parameters(sample) for sample in samples]
    temperature, top_k, top_p, min_p, seed = (list(column) for column in zip(*rows, strict=True))
    floats = on_device([temperature, top_p, min_p], torch.float32, device)
    integers = on_device([top_k, seed], torch.int64, device)
    choice = Choice(
        floats[0], integers[0], floats[1], floats[2], integers[1],
        greedy=not any(temperature), any_top_k=any(top_k), any_top_p=any(p < 1 for p in top_p),
        any_min_p=any(min_p),
    )  # fmt: skip
    counts = [(i, sample.request.params.logprobs) for i, sample in enumerate(samples)]
    return Draw(
        choice,
        [i for i, sample in enumerate(samples) if needs_adjusting(sample)],
        [i for i, sample in enumerate(samples) if sample.request.params.logits_processors],
        [(i, count) for i, count in counts if count is not None],
        [i for i, sample in enumerate(samples) if sample.matcher is not None],
    )


def choose(
    logits: Tensor, choice: Choice, positions: Tensor, adjusted: Adjusted | None = None
) -> tuple[Tensor, Tensor]:
    """Choose a token for each row of logits (rows, vocab_size).

    Args:
        logits, choice: the logits, and the parameters of each row.
        positions: (rows,) positions of the new tokens in their sequences.
        adjusted: changes of the logits, which only the kernel for GPUs takes.

    Returns:
        The tokens (rows,) int64, and a number for each that is finite if the draw is valid: -inf if all
        tokens are excluded, NaN or inf if the row has such a logit.
    """
    if has_kernel(logits) and not (choice.greedy and adjusted is None):
        from flashtile.engine.sampling import sample

        filtered = choice.any_top_k or choice.any_top_p or choice.any_min_p
        return sample(logits, *choice[:5], positions, filtered, adjusted)
    scores = logits if choice.greedy else noisy_scores(logits, choice, positions)
    tokens = scores.argmax(-1)
    return tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1)


def has_kernel(logits: Tensor) -> bool:
    """Whether the tokens of these logits are drawn by a kernel (:mod:`flashtile.engine.sampling`)."""
    return logits.is_cuda


def candidates(logits: Tensor, choice: Choice, positions: Tensor, count: int) -> Tensor:
    """Return the ``count`` best tokens of each row, (rows, count) int64.

    The first of them is the token that :func:`choose` returns.
    """
    if count == 1:
        return choose(logits, choice, positions)[0].unsqueeze(1)
    if choice.greedy:
        return logits.topk(count).indices
    return noisy_scores(logits, choice, positions).topk(count).indices


def noisy_scores(logits: Tensor, choice: Choice, positions: Tensor) -> Tensor:
    """Return filtered logits with Gumbel noise, (rows, vocab_size) float32.

    The argmax of a row is the row's drawn token.
    """
    greedy = (choice.temperature == 0).unsqueeze(1)
    noise = gumbel(choice.seed, positions, logits.shape[1])
    return processed(logits, choice).add_(noise.masked_fill_(greedy, 0.0))


def processed(logits: Tensor, choice: Choice, chosen: Tensor | None = None) -> Tensor:
    """Return logits (rows, vocab_size) after temperature and filters, float32. Greedy rows have neither.

    ``chosen`` (rows,) are drawn tokens, which no filter drops: the kernel that drew them rounds the sum of
    their probabilities in another way.
    """
    temperature = choice.temperature.masked_fill(choice.temperature == 0, 1.0)
    scores = logits.float() * temperature.reciprocal().unsqueeze(1)
    kept = keep(scores, choice)
    if chosen is None:
        return kept
    return kept.scatter(1, chosen.unsqueeze(1), scores.gather(1, chosen.unsqueeze(1)))


def keep(scores: Tensor, choice: Choice) -> Tensor:
    """Apply min-p, top-k and top-p in this order. Scores of tokens that are filtered out become -inf."""
    if choice.any_min_p:
        least = scores.amax(-1, keepdim=True) + choice.min_p.log().unsqueeze(1)
        scores = scores.masked_fill(scores < least, -torch.inf)
    if not (choice.any_top_k or choice.any_top_p):
        return scores
    best = scores.sort(-1, descending=True).values  # NaN comes first, and no threshold drops it
    count = scores.shape[1]
    top_k, top_p = choice.top_k.unsqueeze(1), choice.top_p.unsqueeze(1)
    threshold = best.gather(1, torch.where(top_k == 0, count, top_k.clamp(max=count)) - 1)
    if choice.any_top_p:
        weights = torch.exp(best - best[:, :1]).masked_fill_(best < threshold, 0.0)
        unreached = weights.cumsum(-1) < weights.sum(-1, keepdim=True) * top_p
        last = unreached.sum(-1, keepdim=True).clamp_(max=count - 1)
        threshold = torch.where(top_p >= 1, threshold, best.gather(1, last))
    return scores.masked_fill(scores < threshold, -torch.inf)


def gumbel(seed: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return Gumbel noise -log(-log(u)), (rows, vocab_size) float32, from a hash u of (seed, position,
    token)."""
    key = mix64(seed + positions.long() * _signed(GOLDEN)).unsqueeze(1)
    bits = torch.arange(vocab_size, dtype=torch.int32, device=seed.device) ^ key.int()
    uniform = mix32_(bits, (key >> 32).int()).view(torch.uint32).to(torch.float32).add_(0.5).mul_(2.0**-32)
    # Use 1 - u, which has the same distribution. Large noise then comes from u near 0, where floats are
    # dense.
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def mix64(x: Tensor) -> Tensor:
    """Hash int64 numbers (SplitMix64's finaliser, Steele, Lea and Flood 2014)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & (2**33 - 1))


def mix32_(x: Tensor, key: Tensor) -> Tensor:
    """Hash int32 numbers in place, by a second number (after lowbias32, Wellons 2018, which has no key)."""
    x.bitwise_xor_((x >> 16).bitwise_and_(2**16 - 1)).mul_(0x7FEB352D).add_(key)
    x.bitwise_xor_((x >> 15).bitwise_and_(2**17 - 1)).mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(2**16 - 1))


@functools.lru_cache(1024)  # all seeds of a batch are wanted again whenever one of its sequences ends
def stream_seed(seed: int, index: int) -> int:
    """Return the seed of answer ``index`` of a request, a signed 64-bit integer.

    The seed is hashed as by :func:`mix64`, because :func:`gumbel` adds ``position * GOLDEN`` to it. Without
    the hash, answer i + 1 would have the noise of answer i, shifted by one position.
    """
    # Plain integers: a batch has hundreds of seeds, and torch takes 15 us for each.
    x = (seed + index * GOLDEN) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ x >> shift) * factor % 2**64
    return _signed(x)


def log_probabilities(logits: Tensor, tokens: Tensor, count: int, normalise: bool = True) -> Scores:
    """Return log-probabilities of ``tokens`` (rows,) and of each row's ``count`` likeliest tokens.

    Without ``normalise``, the logits themselves are returned in their place.
    """
    logprobs = torch.log_softmax(logits.float(), -1) if normalise else logits.float()
    chosen = logprobs.gather(1, tokens.long().unsqueeze(1))
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
    return Scores(chosen.squeeze(1), ranks, best.values, best.indices)


def process(logits: Tensor, sample: Sequence) -> None:
    """Apply a request's logits processors to its logits (vocab_size,), float32, in place.

    Raises:
        ValueError: a logits processor returned something other than logits.
    """
    params = sample.request.params
    for processor in params.logits_processors or ():
        changed = processor(sample.outputs, logits)
        if not isinstance(changed, Tensor) or changed.shape != logits.shape:
            got = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(
                f"logits_processors must return logits of shape {tuple(logits.shape)}, got {got}"
            )
        logits.copy_(changed)
    if bans_ends(sample):
        logits[on_device(list(sample.request.ends), torch.int64, logits.device)] = -torch.inf


def _parameters(sample: Sequence) -> tuple[float, int, float, float, int]:
    """Return (temperature, top_k, top_p, min_p, seed) of a sample."""
    params = sample.request.params
    if params.greedy:
        return 0.0, 0, 1.0, 0.0, 0
    seed = stream_seed(sample.request.seed, sample.index)
    return params.temperature, params.top_k, params.top_p, params.min_p, seed


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
