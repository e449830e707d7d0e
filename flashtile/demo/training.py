"""Training a small model of bytes, and sampling from it: for ``flashtile demo`` and the example."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashtile.demo.attention import ATTENTIONS
from flashtile.demo.corpus import VOCABULARY, Corpus, sample_batch
from flashtile.demo.generation import DenseDecoder, draw
from flashtile.demo.llama import PRESETS, Llama, LlamaConfig
from flashtile.demo.schedule import Schedule

TRIAL_STEPS = 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides a run.

    ``dtype`` is that of the arithmetic: weights, their gradients and the optimizer stay float32, and autocast
    rounds what goes into matrix products and attention. ``steps`` or ``seconds`` is the length of the run;
    ``stop`` ends it after so many steps without another schedule.
    """

    model: LlamaConfig = PRESETS["tiny"]
    attention: str = "flashtile"
    steps: int | None = None
    seconds: float | None = None
    stop: int | None = None
    batch: int = 1
    seqlen: int = 256
    learning_rate: float = 2e-3
    warm_up: int = 40
    weight_decay: float = 0.1
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "stop", "batch", "seqlen"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, allowed in (("attention", ATTENTIONS), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")


def default_config(device: torch.device) -> TrainingConfig:
    """A size that learns something visible on the device in half a minute."""
    if device.type == "cpu":
        return TrainingConfig()
    dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return TrainingConfig(
        PRESETS["small"], batch=16, seqlen=1024, learning_rate=6e-4, device=str(device), dtype=dtype
    )


@dataclass(frozen=True)
class TrainingResult:
    """``losses`` are in nats a byte, one a step. ``tokens_per_second`` is by the median step, as the first
    may compile kernels; ``seconds`` is the time of all steps."""

    losses: list[float]
    tokens_per_second: float
    seconds: float
    parameters: int


Progress = Callable[[int, float, float], Any]
"""Called after each step with its number (from 1), its loss in nats a byte, and the share of the run done."""


def train(
    config: TrainingConfig, corpus: Corpus, progress: Progress | None = None
) -> tuple[Llama, TrainingResult]:
    """Train from scratch. Configs that differ in length only make the same first steps."""
    torch.manual_seed(config.seed)
    model = Llama(config.model, ATTENTIONS[config.attention]).to(config.device)
    return model, fit(model, config, corpus, progress)


def fit(
    model: nn.Module, config: TrainingConfig, corpus: Corpus, progress: Progress | None = None
) -> TrainingResult:
    """Train any model of bytes, tokens (batch, seqlen) -> logits (batch, seqlen, 256), on its device."""
    forward: Callable[[Tensor], Tensor] = torch.compile(model) if config.compile else model
    optimizer = make_optimizer(model, config)
    schedule = Schedule(config.learning_rate, config.warm_up, config.steps, config.seconds)
    batches = torch.Generator().manual_seed(config.seed)
    losses: list[float] = []
    clock = [time.perf_counter()]
    elapsed = 0.0
    while len(losses) != config.stop and not schedule.finished(len(losses), elapsed):
        inputs, targets = sample_batch(corpus.train, config.batch, config.seqlen, batches)
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(len(losses))
        loss = loss_of(forward, inputs, targets, config)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the device
        clock.append(time.perf_counter())
        elapsed = clock[-1] - clock[1]  # the first step may compile kernels
        if progress is not None:
            progress(len(losses), losses[-1], schedule.share(len(losses), elapsed))
    step_seconds = [end - start for start, end in itertools.pairwise(clock)]
    return TrainingResult(
        losses=losses,
        tokens_per_second=config.batch * config.seqlen / statistics.median(step_seconds),
        seconds=sum(step_seconds),
        parameters=sum(p.numel() for p in model.parameters()),
    )


@contextmanager
def fastest_threads(config: TrainingConfig, corpus: Corpus) -> Iterator[int]:
    """Compute inside with the number of threads that trains fastest here, found by a few steps with each.

    All cores are too many for a small model on a large machine, or on one that is busy with something else.
    """
    before = torch.get_num_threads()
    if torch.device(config.device).type != "cpu":
        yield before
        return
    trial = replace(config, steps=TRIAL_STEPS, seconds=None, compile=False)
    speeds = {}
    try:
        for threads in sorted({1, 2, 4, 8, before}):
            if threads <= before:
                torch.set_num_threads(threads)
                speeds[threads] = train(trial, corpus)[1].tokens_per_second
        fastest = max(speeds, key=lambda threads: speeds[threads])
        torch.set_num_threads(fastest)
        yield fastest
    finally:
        torch.set_num_threads(before)


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW, which decays matrices but no gain of a norm."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
    )


def loss_of(
    forward: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor, config: TrainingConfig
) -> Tensor:
    """Mean cross-entropy in nats a byte."""
    inputs, targets = inputs.to(config.device), targets.to(config.device)
    with arithmetic(config):
        logits = forward(inputs)
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))


def arithmetic(config: TrainingConfig) -> AbstractContextManager[Any]:
    lower = config.dtype != "float32"
    return torch.autocast(torch.device(config.device).type, DTYPES[config.dtype], enabled=lower)


@torch.no_grad()
def validate(
    model: Callable[[Tensor], Tensor], corpus: Corpus, config: TrainingConfig, size: int = 2**16
) -> float:
    """Mean loss in nats a byte over about ``size`` bytes of the held-out files, the same on each call."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(max(1, size // (config.batch * config.seqlen))):
        inputs, targets = sample_batch(corpus.validation, config.batch, config.seqlen, generator)
        losses.append(loss_of(model, inputs, targets, config).item())
    return statistics.fmean(losses)


def bits_per_byte(loss: float) -> float:
    """Of a loss in nats a byte. 8 is to know nothing."""
    return loss / math.log(2)


def generate(
    model: Llama, prompt: bytes, length: int, config: TrainingConfig, temperature: float = 0.8
) -> bytes:
    """``prompt`` and ``length`` sampled bytes.

    Positions beyond the ``seqlen`` of the training are new to the model: when they are used up, the latest
    half of the text is read again from position 0.
    """
    generator = torch.Generator().manual_seed(config.seed)
    decoder, text = DenseDecoder(model), prompt or b"\n"
    window, restart = text[-config.seqlen :], True
    for _ in range(length):
        with arithmetic(config):
            logits = decoder.start([window]) if restart else decoder.extend(window[-1:])
        drawn = bytes(draw(logits, temperature, generator))
        text, window = text + drawn, window + drawn
        restart = len(window) > config.seqlen
        if restart:
            window = window[-max(1, config.seqlen // 2) :]
    return text
