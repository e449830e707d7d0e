"""Generating from a model: greedily, by parallel samples, by beams; from a paged cache, or unpaged.

The strategies speak to a :class:`Decoder`, which holds a list of sequences. There are two:
:class:`PagedDecoder` computes all sequences in one batch over a :class:`flashtile.kv_cache.PagedKVCache`,
:class:`DenseDecoder` each one alone with its own contiguous keys and values. The same strategy on both must
give the same tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.demo.llama import Llama
from flashtile.kv_cache import PagedKVCache, Usage


class Decoder(ABC):
    """Sequences in a fixed order. Every method costs one pass through the model, but :meth:`select` none."""

    @abstractmethod
    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Replace all sequences by these prompts; the logits after each, (len(prompts), vocabulary)."""

    @abstractmethod
    def select(self, parents: Sequence[int]) -> None:
        """Let sequence i continue what is now ``parents[i]``: one once, another twice, a third not at all."""

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to each sequence; the logits after it, (sequences, vocabulary)."""
        return self._logits([[token] for token in tokens])

    @abstractmethod
    def _logits(self, new: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to each sequence, some at least; the logits after the last."""


class DenseDecoder(Decoder):
    """Each sequence has its own keys and values, and is computed alone."""

    def __init__(self, model: Llama):
        self.model = model
        # by sequence and layer: k and v, (1, seqlen, heads, head_dim)
        self.sequences: list[list[tuple[Tensor, Tensor]]] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self.sequences = [[] for _ in prompts]
        return self._logits(prompts)

    def select(self, parents: Sequence[int]) -> None:
        self.sequences = [list(self.sequences[parent]) for parent in parents]

    @torch.no_grad()
    def _logits(self, new: Sequence[Sequence[int]]) -> Tensor:
        return torch.cat(
            [self._advance(past, tokens) for past, tokens in zip(self.sequences, new, strict=True)]
        )

    def _advance(self, past: list[tuple[Tensor, Tensor]], tokens: Sequence[int]) -> Tensor:
        device = self.model.embed_tokens.weight.device
        earlier = past[0][0].shape[1] if past else 0

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer == len(past):
                past.append((k, v))
            else:
                past[layer] = (torch.cat([past[layer][0], k], 1), torch.cat([past[layer][1], v], 1))
            return self.model.attention(q, *past[layer])

        positions = torch.arange(earlier, earlier + len(tokens), device=device)
        hidden = self.model.hidden(torch.tensor([list(tokens)], device=device), positions, attend)
        return self.model.lm_head(hidden[:, -1])


@dataclass(frozen=True)
class Peak:
    """Memory at the fullest moment, and block copies of the whole run."""

    usage: Usage
    copied_blocks: int


class PagedDecoder(Decoder):
    """All sequences in one batch, their keys and values in blocks, shared where they are equal."""

    def __init__(self, model: Llama, cache: PagedKVCache):
        self.model, self.cache = model, cache
        self.sequences: list[int] = []
        self.peak = Peak(self.cache.usage(), 0)

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """As in the protocol; blocks that an earlier prompt filled with the same tokens are found again."""
        for sequence in self.sequences:
            self.cache.free(sequence)
        self.sequences = [self.cache.create(prompt) for prompt in prompts]
        new = [
            prompt[self.cache.length(sequence) :]
            for sequence, prompt in zip(self.sequences, prompts, strict=True)
        ]
        logits = self._logits(new)
        for sequence, prompt in zip(self.sequences, prompts, strict=True):
            self.cache.cache_blocks(sequence, prompt)
        return logits

    def select(self, parents: Sequence[int]) -> None:
        self.sequences = self.cache.select(self.sequences, parents)

    @torch.no_grad()
    def _logits(self, new: Sequence[Sequence[int]]) -> Tensor:
        batch = self.cache.batch(self.sequences)
        step = self.cache.reserve_step(batch, [len(tokens) for tokens in new])
        tokens = torch.tensor([token for tokens in new for token in tokens], device=self.cache.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.cache.attend(layer, q, k, v, step)

        hidden = self.model.hidden(tokens, step.positions, attend)
        usage = self.cache.usage()
        copied = self.peak.copied_blocks + step.copied_blocks
        self.peak = Peak(max(usage, self.peak.usage, key=lambda usage: usage.blocks), copied)
        return self.model.lm_head(hidden[step.cu_seqlens_q[1:].long() - 1])


def greedy(decoder: Decoder, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """The likeliest token at every step: ``length`` tokens for each prompt."""
    return _write(decoder, decoder.start(prompts), length, lambda logits: logits.argmax(-1).tolist())


def parallel_samples(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    length: int,
    samples: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[list[list[int]]]:
    """``samples`` random continuations of each prompt, whose keys and values they share."""
    generator = torch.Generator().manual_seed(seed)
    logits = decoder.start(prompts)
    parents = [i for i in range(len(prompts)) for _ in range(samples)]
    decoder.select(parents)
    written = _write(
        decoder, logits[parents], length, lambda logits: draw(logits, temperature, generator)
    )
    return [written[i : i + samples] for i in range(0, len(written), samples)]


def _write(
    decoder: Decoder, logits: Tensor, length: int, choose: Callable[[Tensor], list[int]]
) -> list[list[int]]:
    """``length`` tokens of each sequence, chosen from the logits after the last."""
    steps: list[list[int]] = []
    while len(steps) < length:
        steps.append(choose(logits if not steps else decoder.extend(steps[-1])))
    return [list(tokens) for tokens in zip(*steps, strict=True)]


def draw(logits: Tensor, temperature: float, generator: torch.Generator) -> list[int]:
    """A random token for each row of logits: where a number in [0, 1) falls in the distribution."""
    chances = torch.rand(len(logits), generator=generator, dtype=torch.float64)
    distribution = torch.softmax(logits.double().cpu() / temperature, -1).cumsum(-1)
    tokens = torch.searchsorted(distribution, chances[:, None]).flatten()
    return tokens.clamp_(max=logits.shape[-1] - 1).tolist()


@dataclass(frozen=True)
class Beam:
    """``score``: the sum of its tokens' log-probabilities, in nats."""

    score: float
    tokens: list[int]


def beam_search(
    decoder: Decoder, prompts: Sequence[Sequence[int]], length: int, width: int
) -> list[list[Beam]]:
    """The ``width`` likeliest continuations that are found by keeping as many at every step, best first."""
    logits = decoder.start(prompts)
    beams = [[Beam(0.0, [])] for _ in prompts]
    for i in range(length):
        parents, first = [], 0
        scores = torch.log_softmax(logits.double().cpu(), -1)
        for group, old in enumerate(beams):
            total = scores[first : first + len(old)] + torch.tensor([[beam.score] for beam in old])
            best = total.flatten().topk(min(width, total.numel()))
            origins, tokens = (
                (best.indices // total.shape[1]).tolist(),
                (best.indices % total.shape[1]).tolist(),
            )
            beams[group] = [
                Beam(score, [*old[origin].tokens, token])
                for score, origin, token in zip(best.values.tolist(), origins, tokens, strict=True)
            ]
            parents += [first + origin for origin in origins]
            first += len(old)
        decoder.select(parents)
        if i + 1 < length:
            logits = decoder.extend([beam.tokens[-1] for group in beams for beam in group])
    return beams
