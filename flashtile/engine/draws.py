"""Sampling parameters of a batch on the device, and the per-request changes of logits before the draw."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.engine.request import Sequence
from flashtile.engine.sampler import Choice, penalise, stream_seed
from flashtile.engine.sampling_params import BeamSearchParams, SamplingParams
from flashtile.engine.transfer import on_device


@dataclass(frozen=True)
class Draw:
    """How the tokens of one batch are chosen.

    Attributes:
        samples: one sequence for each row of the logits.
        choice: their sampling parameters on the device.
        shaped: rows whose logits may have to be changed before the draw.
        scored: (row, number of log-probabilities) of the rows for which they were requested.
    """

    samples: tuple[Sequence, ...]
    choice: Choice
    shaped: list[int]
    scored: list[tuple[int, int]]


class Draws:
    """Caches the parameters of a draw while the batch stays the same."""

    def __init__(self, device: torch.device):
        self.device = device
        self._last: Draw | None = None

    def of(self, samples: Listing[Sequence]) -> Draw:
        """Return the parameters of the draw, one sequence for each row."""
        key = tuple(samples)
        if self._last is not None and self._last.samples == key:
            return self._last
        rows = [_parameters(sample) for sample in samples]
        temperature, top_k, top_p, min_p, seed = (list(column) for column in zip(*rows, strict=True))
        floats = on_device([temperature, top_p, min_p], torch.float32, self.device)
        integers = on_device([top_k, seed], torch.int64, self.device)
        choice = Choice(
            floats[0], integers[0], floats[1], floats[2], integers[1],
            greedy=not any(temperature), any_top_k=any(top_k), any_top_p=any(p < 1 for p in top_p),
            any_min_p=any(min_p),
        )  # fmt: skip
        counts = [(i, _num_logprobs(sample)) for i, sample in enumerate(samples)]
        self._last = Draw(
            key,
            choice,
            [i for i, sample in enumerate(samples) if is_special(sample)],
            [(i, count) for i, count in counts if count is not None],
        )
        return self._last


def shape(logits: Tensor, sample: Sequence) -> None:
    """Apply penalties, biases and processors of a request to its logits (vocab_size,), float32, in place."""
    request, device = sample.request, logits.device
    params = request.params
    if isinstance(params, BeamSearchParams):
        return
    if params.allowed_token_ids:
        tokens = on_device(params.allowed_token_ids, torch.int64, device)
        allowed = logits[tokens]
        logits.fill_(-torch.inf)[tokens] = allowed
    if params.penalises:
        tokens = on_device(sample.tokens, torch.int64, device)
        split = request.num_prompt
        penalise(
            logits, tokens[:split], tokens[split:], params.repetition_penalty, params.presence_penalty,
            params.frequency_penalty,
        )  # fmt: skip
    if params.logit_bias:
        tokens = on_device(list(params.logit_bias), torch.int64, device)
        logits[tokens] += on_device(list(params.logit_bias.values()), torch.float32, device)
    for process in params.logits_processors or ():
        changed = process(sample.outputs, logits)
        if not isinstance(changed, Tensor) or changed.shape != logits.shape:
            got = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(
                f"logits_processors must return logits of shape {tuple(logits.shape)}, got {got}"
            )
        logits.copy_(changed)
    if sample.num_outputs - 1 < params.min_tokens and request.ends:
        logits[on_device(list(request.ends), torch.int64, device)] = -torch.inf


def is_special(sample: Sequence) -> bool:
    """Whether the sample's logits are changed before the draw."""
    params = sample.request.params
    return isinstance(params, SamplingParams) and bool(
        params.reads_tokens
        or params.logit_bias
        or params.allowed_token_ids
        or sample.num_outputs - 1 < params.min_tokens
    )


def _num_logprobs(sample: Sequence) -> int | None:
    """Return how many log-probabilities of a sample are needed, or None if none are.

    A beam needs so many that ``beam_width`` remain without the end tokens.
    """
    params = sample.request.params
    if isinstance(params, BeamSearchParams):
        return (len(sample.request.ends) + 1) * params.beam_width
    return params.logprobs


def _parameters(sample: Sequence) -> tuple[float, int, float, float, int]:
    """Return (temperature, top_k, top_p, min_p, seed). Beams ignore the draw, so theirs is greedy."""
    params = sample.request.params
    if isinstance(params, BeamSearchParams) or params.greedy:
        return 0.0, 0, 1.0, 0.0, 0
    seed = stream_seed(sample.request.seed, sample.index)
    return params.temperature, params.top_k, params.top_p, params.min_p, seed
