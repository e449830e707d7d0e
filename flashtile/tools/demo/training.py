"""Training of a small byte-level model, and sampling from it, for ``flashtile demo`` and the example."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashtile.tools.demo.attention import ATTENTIONS
from flashtile.tools.demo.corpus import VOCABULARY, Corpus, sample_batch
from flashtile.tools.demo.llama import PRESETS, Llama, LlamaConfig

PLATEAU_ENDS = 0.7
"""Share of the run after which the learning rate falls linearly towards 0."""

FEWEST_STEPS = 60
"""Minimum number of steps of a run whose length is given in seconds."""


@dataclass
class TrainingSchedule:
    """The length of one run and its learning rate: warm-up, plateau, decay (Hu 2024, arXiv:2404.06395).

    A run has ``steps`` steps, or about as many as fit in ``seconds``. The learning rate rises for ``warm_up``
    steps, stays at ``peak`` on the plateau, and then falls. Warm-up and peak do not depend on the length of
    the run, so runs of different lengths make the same first steps. A run with ``seconds`` can therefore
    choose its number of steps at the end of the plateau.
    """

    peak: float
    warm_up: int
    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            given = f"steps={self.steps} and seconds={self.seconds}"
            raise ValueError(f"a run needs steps or seconds, got {given}")

    def finished(self, step: int, elapsed: float) -> bool:
        """Return whether the run ends after ``step`` steps in ``elapsed`` seconds. Call it before each step.

        A run with ``seconds`` fixes its number of steps when the learning rate begins to fall. If the machine
        becomes slower afterwards, the run takes longer, up to twice ``seconds``.
        """
        if self.seconds is not None and step >= FEWEST_STEPS:
            if self.steps is None and elapsed >= PLATEAU_ENDS * self.seconds:
                self.steps = math.ceil(step / PLATEAU_ENDS)
            if elapsed > 2 * self.seconds:
                return True
        return self.steps is not None and step >= self.steps

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warm_up:
            return self.peak * (step + 1) / self.warm_up
        if self.steps is None or step < PLATEAU_ENDS * self.steps:
            return self.peak
        return self.peak * (self.steps - step) / ((1 - PLATEAU_ENDS) * self.steps + 1)

    def share(self, step: int, elapsed: float) -> float:
        """Return the share of the run that is done, from 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        assert self.seconds is not None
        return min(PLATEAU_ENDS, elapsed / self.seconds if self.seconds else 1.0)


TRIAL_STEPS = 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainingConfig:
    """Settings that determine a run.

    ``dtype`` is the dtype of matrix products and attention, by autocast. Weights, gradients and the
    optimizer's state stay float32. ``steps`` or ``seconds`` is the length of the run. ``stop`` ends the run
    after this many steps without changing the learning rates.
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
    """Return a configuration with which the loss falls visibly in half a minute on this device."""
    if device.type == "cpu":
        return TrainingConfig()
    dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return TrainingConfig(
        PRESETS["small"], batch=16, seqlen=1024, learning_rate=6e-4, device=str(device), dtype=dtype
    )


@dataclass(frozen=True)
class TrainingResult:
    """Losses and times of a run.

    ``losses`` are in nats per byte, one per step. ``tokens_per_second`` is computed from the median time of a
    step, because the first step may compile kernels. ``seconds`` is the time of all steps.
    """

    losses: list[float]
    tokens_per_second: float
    seconds: float
    parameters: int


Progress = Callable[[int, float, float], Any]
"""Called after each step with its number (from 1), loss in nats per byte, and the share of the run done."""


def train(
    config: TrainingConfig, corpus: Corpus, progress: Progress | None = None
) -> tuple[Llama, TrainingResult]:
    """Train from scratch, and return (model, result). The length of a run does not change its first steps."""
    torch.manual_seed(config.seed)
    model = Llama(config.model, ATTENTIONS[config.attention]).to(config.device)
    return model, fit(model, config, corpus, progress)


def fit(
    model: nn.Module, config: TrainingConfig, corpus: Corpus, progress: Progress | None = None
) -> TrainingResult:
    """Train a model that maps tokens (batch, seqlen) to logits (batch, seqlen, 256) on ``config.device``."""
    forward: Callable[[Tensor], Tensor] = torch.compile(model) if config.compile else model
    optimizer = make_optimizer(model, config)
    schedule = TrainingSchedule(config.learning_rate, config.warm_up, config.steps, config.seconds)
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
        elapsed = clock[-1] - clock[1]  # without the first step, which may compile kernels
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
    """Use the number of threads that trains fastest inside the ``with`` block, and yield this number.

    A few steps are timed with each candidate, because a small model on a large or busy machine trains faster
    with a few threads than with one per core. On a GPU the number of threads is not changed.
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
    """Return AdamW, with weight decay for matrices but not for the weights of norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
    )


def loss_of(
    forward: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor, config: TrainingConfig
) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
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
    """Return the mean loss in nats per byte over about ``size`` held-out bytes, the same in each call."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(max(1, size // (config.batch * config.seqlen))):
        inputs, targets = sample_batch(corpus.validation, config.batch, config.seqlen, generator)
        losses.append(loss_of(model, inputs, targets, config).item())
    return statistics.fmean(losses)


def bits_per_byte(loss: float) -> float:
    """Convert a loss from nats per byte to bits per byte. A uniform guess has a loss of 8 bits."""
    return loss / math.log(2)


@torch.no_grad()
def generate(
    model: Llama, prompt: bytes, length: int, config: TrainingConfig, temperature: float = 0.8
) -> bytes:
    """Return ``prompt`` followed by ``length`` sampled bytes.

    Each byte is predicted from at most the latest ``config.seqlen`` bytes, the length of the training
    sequences. An empty prompt is replaced by a line break.
    """
    generator = torch.Generator().manual_seed(config.seed)
    device = model.embed_tokens.weight.device
    text = prompt or b"\n"
    for _ in range(length):
        with arithmetic(config):
            logits = model(torch.tensor([list(text[-config.seqlen :])], device=device))[0, -1]
        chances = torch.softmax(logits.double().cpu() / temperature, -1)
        text += bytes(torch.multinomial(chances, 1, generator=generator).tolist())
    return text


@dataclass(frozen=True)
class CurveTolerance:
    """Allowed differences between the losses of two runs at the same step, in nats per byte.

    Two implementations of exact attention differ only by rounding, but training amplifies the difference from
    step to step. The tolerance ``early`` applies to the first steps. It is tight and detects a gradient that
    is wrong by a few percent. The tolerance ``whole`` applies to all steps and is loose.
    """

    early: float
    whole: float


CURVE_TOLERANCES = {"float32": CurveTolerance(1e-5, 0.05), "bfloat16": CurveTolerance(0.01, 0.2)}
EARLY_STEPS = 20


@dataclass(frozen=True)
class Agreement:
    """Differences in nats per byte between two loss curves from the same weights and batches."""

    steps: int
    early_steps: int
    early_difference: float
    largest_difference: float
    tolerance: CurveTolerance

    @property
    def holds(self) -> bool:  # False for NaN
        allowed = self.tolerance
        return self.early_difference <= allowed.early and self.largest_difference <= allowed.whole


def agreement(losses: Sequence[float], twin: Sequence[float], dtype: str) -> Agreement:
    """Compare two loss curves over the steps that both have. Both must have at least one step."""
    differences = [abs(a - b) for a, b in zip(losses, twin, strict=False)]
    early = differences[:EARLY_STEPS]
    tolerance = CURVE_TOLERANCES[dtype]
    return Agreement(len(differences), len(early), _largest(early), _largest(differences), tolerance)


def _largest(differences: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, differences)) else max(differences)
