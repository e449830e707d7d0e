"""Sampling of the next tokens from logits, on the device of the logits.

Every draw is an argmax: of the logits at temperature 0, otherwise of logits plus Gumbel noise, which samples
from their softmax (Maddison et al. 2014, arXiv:1411.0030, section 2). The noise of a token is a hash of the
request's seed, the position and the token, so it does not depend on the batch.

Top-k and top-p keep the logits above some threshold. Tokens that tie with the last one kept are also kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

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

    def to_host(self) -> Scores:
        """Start copies to the host, for which torch allocates pinned memory."""
        return Scores(*(tensor.to("cpu", non_blocking=True) for tensor in self))


class Draw(NamedTuple):
    """How the tokens of one batch are chosen.

    Attributes:
        choice: sampling parameters of the rows on the device.
        adjusted: rows whose logits may have to be changed before the draw.
        scored: (row, number of log-probabilities) of the rows for which they were requested.
        structured: rows whose tokens a structure restricts.
    """

    choice: Choice
    adjusted: list[int]
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
        [(i, count) for i, count in counts if count is not None],
        [i for i, sample in enumerate(samples) if sample.matcher is not None],
    )


def choose(logits: Tensor, choice: Choice, positions: Tensor) -> Tensor:
    """Choose a token for each row of logits (rows, vocab_size). Return the tokens (rows,) int64.

    ``positions`` (rows,) are the positions of the new tokens in their sequences. In a row with NaN or
    infinity, such an element is chosen, so the chosen token's logit tells whether the draw is valid.
    """
    if choice.greedy:
        return logits.argmax(-1)
    if logits.is_cuda:
        from flashtile.engine.sampling import sample

        filtered = choice.any_top_k or choice.any_top_p or choice.any_min_p
        return sample(logits, *choice[:5], positions, filtered)
    return noisy_scores(logits, choice, positions).argmax(-1)


def candidates(logits: Tensor, choice: Choice, positions: Tensor, count: int) -> Tensor:
    """Return the ``count`` best tokens of each row, (rows, count) int64.

    The first of them is the token that :func:`choose` returns.
    """
    if count == 1:
        return choose(logits, choice, positions).unsqueeze(1)
    if choice.greedy:
        return logits.topk(count).indices
    return noisy_scores(logits, choice, positions).topk(count).indices


def noisy_scores(logits: Tensor, choice: Choice, positions: Tensor) -> Tensor:
    """Return filtered logits with Gumbel noise, (rows, vocab_size) float32.

    The argmax of a row is the row's drawn token.
    """
    greedy = (choice.temperature == 0).unsqueeze(1)
    scores = logits.float() / choice.temperature.masked_fill(choice.temperature == 0, 1.0).unsqueeze(1)
    kept = keep(scores, choice)
    noise = gumbel(choice.seed, positions, scores.shape[1])
    return kept.add_(noise.masked_fill_(greedy, 0.0))


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
    bits = mix32_(torch.arange(vocab_size, dtype=torch.int32, device=seed.device) ^ key.int())
    bits = mix32_(bits.add_((key >> 32).int())).view(torch.uint32)
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-32)
    # Use 1 - u, which has the same distribution. Large noise then comes from u near 0, where floats are
    # dense.
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def mix64(x: Tensor) -> Tensor:
    """Hash int64 numbers (SplitMix64's finaliser, Steele, Lea and Flood 2014)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & (2**33 - 1))


def mix32_(x: Tensor) -> Tensor:
    """Hash int32 numbers in place (MurmurHash3's finaliser)."""
    x.bitwise_xor_((x >> 16).bitwise_and_(2**16 - 1)).mul_(0x85EBCA6B - 2**32)
    x.bitwise_xor_((x >> 13).bitwise_and_(2**19 - 1)).mul_(0xC2B2AE35 - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(2**16 - 1))


def stream_seed(seed: int, index: int) -> int:
    """Return the seed of answer ``index`` of a request, a signed 64-bit integer.

    The seed is hashed because :func:`gumbel` adds ``position * GOLDEN`` to it. Without the hash, answer i + 1
    would have the noise of answer i, shifted by one position.
    """
    return int(mix64(torch.tensor(_signed((seed + index * GOLDEN) & (2**64 - 1)), device="cpu")))


def log_probabilities(logits: Tensor, tokens: Tensor, count: int) -> Scores:
    """Return log-probabilities of ``tokens`` (rows,) and of each row's ``count`` likeliest tokens."""
    logprobs = torch.log_softmax(logits.float(), -1)
    chosen = logprobs.gather(1, tokens.long().unsqueeze(1))
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
    return Scores(chosen.squeeze(1), ranks, best.values, best.indices)


def penalise(
    logits: Tensor, prompt: Tensor, answer: Tensor, repetition: float, presence: float, frequency: float
) -> None:
    """Apply penalties for the tokens of prompt and answer to one row of logits (vocab_size,), in place."""
    seen = torch.cat([prompt, answer])  # a token that occurs twice gets the same logit twice
    values = logits[seen]
    logits[seen] = torch.where(values > 0, values / repetition, values * repetition)
    # unique() would be shorter, but on a GPU the host would wait for its size.
    counts = torch.zeros_like(logits).index_add_(0, answer, torch.ones_like(answer, dtype=logits.dtype))
    logits -= presence * (counts > 0) + frequency * counts


def adjust(logits: Tensor, sample: Sequence, unread: Tensor) -> None:
    """Apply a request's parameters to its logits (vocab_size,), float32, in place.

    These are ``allowed_token_ids``, penalties, ``logit_bias``, logits processors and ``min_tokens``, in this
    order.

    Args:
        unread: tokens of the answer on the device, which follow those that the host knows: the token of the
            step in flight, or guesses.

    Raises:
        ValueError: a logits processor returned something other than logits.
    """
    request, device = sample.request, logits.device
    params = request.params

    def kept(name: str, values: Iterable[float], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return numbers of the request on the device, where they stay: there may be many thousands."""
        if name not in request.on_device:
            request.on_device[name] = on_device(list(values), dtype, device)
        return request.on_device[name]

    if params.allowed_token_ids:
        tokens = kept("allowed tokens", params.allowed_token_ids)
        allowed = logits[tokens]
        logits.fill_(-torch.inf)[tokens] = allowed
    if params.penalises:
        prompt = kept("prompt", set(request.prompt_token_ids))
        answer = torch.cat([on_device(sample.outputs, torch.int64, device), unread])
        penalise(
            logits, prompt, answer, params.repetition_penalty, params.presence_penalty,
            params.frequency_penalty,
        )  # fmt: skip
    if params.logit_bias:
        tokens = kept("biased tokens", params.logit_bias)
        logits[tokens] += kept("biases", params.logit_bias.values(), torch.float32)
    for process in params.logits_processors or ():
        changed = process(sample.outputs, logits)
        if not isinstance(changed, Tensor) or changed.shape != logits.shape:
            got = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(
                f"logits_processors must return logits of shape {tuple(logits.shape)}, got {got}"
            )
        logits.copy_(changed)
    if sample.num_outputs - 1 < params.min_tokens and request.ends:
        logits[kept("ends", request.ends)] = -torch.inf


def needs_adjusting(sample: Sequence) -> bool:
    """Whether the sample's logits are changed before the draw."""
    params = sample.request.params
    return bool(
        params.penalises
        or params.logits_processors
        or params.logit_bias
        or params.allowed_token_ids
        or sample.num_outputs - 1 < params.min_tokens
    )


def _parameters(sample: Sequence) -> tuple[float, int, float, float, int]:
    """Return (temperature, top_k, top_p, min_p, seed) of a sample."""
    params = sample.request.params
    if params.greedy:
        return 0.0, 0, 1.0, 0.0, 0
    seed = stream_seed(sample.request.seed, sample.index)
    return params.temperature, params.top_k, params.top_p, params.min_p, seed


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
