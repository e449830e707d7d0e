"""Training the small GPT, and sampling from it: one implementation for ``flashtile demo`` and the example."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashtile.demo.attention import ATTENTIONS
from flashtile.demo.corpus import VOCABULARY, Corpus, sample_batch
from flashtile.demo.model import GPT, PRESETS, GPTConfig, KeyValue

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides a run.

    ``dtype`` is that of the arithmetic: weights, their gradients and the optimizer stay float32, and autocast
    rounds what goes into matrix products and attention. ``stop`` ends a run early without a new schedule.
    """

    model: GPTConfig = GPTConfig()  # noqa: RUF009 - immutable
    attention: str = "flashtile"
    steps: int = 200
    stop: int | None = None
    batch: int = 2
    seqlen: int = 512
    learning_rate: float = 6e-3
    weight_decay: float = 0.1
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "seqlen"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, allowed in (("attention", ATTENTIONS), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    @property
    def last_step(self) -> int:
        return self.steps if self.stop is None else min(self.stop, self.steps)


def default_config(device: torch.device) -> TrainingConfig:
    """A size that learns something visible on the device in half a minute."""
    if device.type == "cpu":
        return TrainingConfig()
    dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return TrainingConfig(
        PRESETS["small"], batch=16, seqlen=1024, learning_rate=2e-3, device=str(device), dtype=dtype
    )


@dataclass(frozen=True)
class TrainingResult:
    """Losses are in nats a byte, ``losses`` one a step. ``tokens_per_second`` is by the median step, as the
    first may compile kernels. ``seconds`` is the time of all steps, without validation."""

    losses: list[float]
    validation_loss: float
    tokens_per_second: float
    seconds: float
    parameters: int

    @property
    def bits_per_byte(self) -> float:
        return self.validation_loss / math.log(2)


Progress = Callable[[int, float], Any]
"""Called after each step with its number (from 1) and its loss in nats a byte."""


def train(
    config: TrainingConfig, corpus: Corpus, progress: Progress | None = None, time_limit: float = math.inf
) -> tuple[GPT, TrainingResult]:
    """Train from scratch. The same config gives the same weights at the start and the same batches.

    Args:
        time_limit: seconds after which no further step starts, for machines slower than expected.
    """
    torch.manual_seed(config.seed)
    model = GPT(config.model, ATTENTIONS[config.attention]).to(config.device)
    forward: Callable[[Tensor], Tensor] = torch.compile(model) if config.compile else model
    optimizer = make_optimizer(model, config)
    batches = torch.Generator().manual_seed(config.seed)
    losses: list[float] = []
    clock = [time.perf_counter()]
    for step in range(config.last_step):
        inputs, targets = sample_batch(corpus.train, config.batch, config.seqlen, batches)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        loss = loss_of(forward, inputs, targets, config)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the device
        clock.append(time.perf_counter())
        if progress is not None:
            progress(step + 1, losses[-1])
        if clock[-1] - clock[0] > time_limit:
            break
    step_seconds = [end - start for start, end in itertools.pairwise(clock)]
    return model, TrainingResult(
        losses=losses,
        validation_loss=validate(model, corpus, config),
        tokens_per_second=config.batch * config.seqlen / statistics.median(step_seconds),
        seconds=sum(step_seconds),
        parameters=sum(p.numel() for p in model.parameters()),
    )


def steps_within(seconds: float, config: TrainingConfig, corpus: Corpus, trial_steps: int = 7) -> int:
    """How many steps of ``config`` fit in ``seconds`` here, judged by a short trial; at least 20."""
    _, trial = train(replace(config, stop=trial_steps), corpus)
    return max(20, int(seconds * trial.tokens_per_second / (config.batch * config.seqlen)))


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW, which decays matrices but no gain of a norm."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
    )


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Linear warm-up over the first tenth (at most 100 steps), then linearly towards 0."""
    warm_up = min(100, max(1, config.steps // 10))
    if step < warm_up:
        return config.learning_rate * (step + 1) / warm_up
    return config.learning_rate * (config.steps - step) / (config.steps - warm_up + 1)


def loss_of(
    forward: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor, config: TrainingConfig
) -> Tensor:
    """Mean cross-entropy in nats a byte."""
    inputs, targets = inputs.to(config.device), targets.to(config.device)
    with arithmetic(config):
        logits = forward(inputs)
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))


def arithmetic(config: TrainingConfig) -> AbstractContextManager[Any]:
    if config.dtype == "float32":
        return nullcontext()
    return torch.autocast(torch.device(config.device).type, dtype=DTYPES[config.dtype])


@dataclass(frozen=True)
class Agreement:
    """Two loss curves, in nats a byte, from the same start and batches, over the steps that both made."""

    steps: int
    largest_difference: float
    mean_difference: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.largest_difference <= self.tolerance  # False for NaN


CURVE_TOLERANCE = {"float32": 0.02, "bfloat16": 0.1}
"""How far apart the losses of one step may be, in nats a byte. Rounding differs between two exact attentions,
and training amplifies the difference from step to step."""


def agreement(losses: Sequence[float], twin: Sequence[float], dtype: str) -> Agreement:
    """Compare two curves over their common steps, of which there must be at least one."""
    differences = [abs(a - b) for a, b in zip(losses, twin, strict=False)]
    largest = math.nan if any(map(math.isnan, differences)) else max(differences)
    return Agreement(len(differences), largest, statistics.fmean(differences), CURVE_TOLERANCE[dtype])


@torch.no_grad()
def validate(model: nn.Module, corpus: Corpus, config: TrainingConfig, batches: int = 8) -> float:
    """Mean loss in nats a byte over excerpts of the held-out files, the same on each call."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(batches):
        inputs, targets = sample_batch(corpus.validation, config.batch, config.seqlen, generator)
        losses.append(loss_of(model, inputs, targets, config).item())
    return statistics.fmean(losses)


@torch.no_grad()
def generate(
    model: GPT, prompt: bytes, length: int, config: TrainingConfig, temperature: float = 0.7
) -> bytes:
    """``prompt`` and ``length`` sampled bytes. Keys and values are kept: one query attends to all of them.

    Positions beyond the ``seqlen`` of the training are new to the model: when they are used up, the latest
    half of the text is read again from position 0.
    """
    generator = torch.Generator().manual_seed(config.seed)
    text = bytearray(prompt or b"\n")
    unread: bytes = bytes(text[-config.seqlen :])
    past: list[KeyValue] = []
    for _ in range(length):
        tokens = torch.tensor([list(unread)], device=config.device)
        with arithmetic(config):
            logits, past = model.extend(tokens, past)
        probabilities = torch.softmax(logits[0, -1].double().cpu() / temperature, dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        unread = bytes(text[-1:])
        if past[0][0].shape[1] >= config.seqlen:
            past, unread = [], bytes(text[-max(1, config.seqlen // 2) :])
    return bytes(text)
