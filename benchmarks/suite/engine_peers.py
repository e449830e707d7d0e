"""Inference engines to compare: flashtile's, and Transformers' in three modes."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite.model_bench import SMALL_MODEL
from flashtile.hardware import timing

Prompts = Sequence[list[int]]


class Contender:
    """Adapter of an engine, which loads one model and is measured on all of its workloads.

    Attributes:
        name: name in tables.
        package: package that the engine needs, or "".
        needs_gpu: whether the engine needs a CUDA device.
        steps: whether the engine runs workloads that measure decoding steps.
        requests: whether the engine runs workloads of requests with different lengths.
    """

    name = package = ""
    needs_gpu = False
    steps = requests = True

    def unavailable(self, device: torch.device) -> str | None:
        """Return why the engine cannot run here; None if it can."""
        if self.package and not importlib.util.find_spec(self.package):
            return f"{self.package} is not installed"
        return "needs a CUDA device" if self.needs_gpu and device.type != "cuda" else None

    def load(self, folder: Path, model: str, device: torch.device, most_tokens: int) -> None:
        """Load a model from ``folder``.

        ``most_tokens`` is the largest number of tokens that a workload has in all of its sequences together.
        """
        raise NotImplementedError

    def generate(self, prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        """Decode greedily, and return the new tokens of each prompt: ``lengths[i]`` tokens for prompt i."""
        raise NotImplementedError

    def numbers(self) -> dict[str, Any]:
        """Return statistics of the last call of :meth:`generate`, by name, for the JSON document."""
        return {}


class Flashtile(Contender):
    """flashtile's engine; ``options`` are arguments of :class:`flashtile.LLM`."""

    name = "flashtile"

    def __init__(self, **options: Any):
        self.options = options

    def load(self, folder: Path, model: str, device: torch.device, most_tokens: int) -> None:
        from flashtile.engine import LLM

        self.llm = LLM(
            folder, load_format="auto" if model == SMALL_MODEL else "dummy", skip_tokenizer_init=True,
            device=device, enable_prefix_caching=False, **{"warmup": False, **self.options},
        )  # fmt: skip

    def generate(self, prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        from flashtile.engine import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        with host_waits() as waits:
            begun = time.perf_counter()
            outputs = self.llm.generate(list(prompts), params)
            seconds = time.perf_counter() - begun
        self._waited, self._steps = sum(waits) / seconds, len(waits)
        return [output.outputs[0].token_ids for output in outputs]

    def numbers(self) -> dict[str, Any]:
        preemptions = self.llm.get_metrics().num_preemptions
        return {"host_waits": self._waited, "steps": self._steps, "preemptions": preemptions}


class Transformers(Contender):
    """Transformers' ``generate`` with its defaults: a growing cache and no compilation."""

    name = package = "transformers"
    requests = False

    def load(self, folder: Path, model: str, device: torch.device, most_tokens: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        kind: Any = torch.float32 if device.type == "cpu" else torch.bfloat16
        if model == SMALL_MODEL:
            found: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
            self.model = found.to(device).eval()
        else:
            with device:
                config = AutoConfig.from_pretrained(folder)
                self.model = AutoModelForCausalLM.from_config(config, dtype=kind).eval()
        self.most_tokens = most_tokens

    def generate(self, prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        ids = torch.tensor(list(prompts), device=self.model.device)
        (length,) = set(lengths)
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, min_new_tokens=length,
                do_sample=False, pad_token_id=0, **self.options(),
            )  # fmt: skip
        return out[:, ids.shape[1] :].tolist()

    def options(self) -> dict[str, Any]:
        return {}


class TransformersCompiled(Transformers):
    """Transformers' ``generate`` compiled for a static cache."""

    name, needs_gpu = "transformers-compile", True

    def options(self) -> dict[str, Any]:
        return {"cache_implementation": "static"}


class TransformersBatching(Transformers):
    """Transformers' continuous batching, ``generate_batch``, with torch's attention over pages."""

    name, needs_gpu = "transformers-batching", True
    steps, requests = False, True

    def generate(self, prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        from transformers import GenerationConfig

        self.model.set_attn_implementation("paged|sdpa")
        # generate_batch takes one length for all requests, so all requests get the mean of the lengths.
        length = round(sum(lengths) / len(lengths))
        config = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0)
        with torch.inference_mode():
            found = self.model.generate_batch(inputs=list(prompts), generation_config=config)
        return [list(output.generated_tokens) for output in found.values()]


CONTENDERS: dict[str, type[Contender]] = {
    kind.name: kind for kind in (Flashtile, Transformers, TransformersCompiled, TransformersBatching)
}


@contextmanager
def host_waits() -> Iterator[list[float]]:
    """Measure how long the host waits for the GPU inside the ``with`` block.

    Yields a list. Whenever the engine waits for the tokens of a step, the seconds of the wait are appended.
    """
    from flashtile.engine.runner import InFlight

    waits: list[float] = []
    plain = InFlight.wait

    def timed(self: InFlight) -> list[int]:
        begun = time.perf_counter()
        tokens = plain(self)
        waits.append(time.perf_counter() - begun)
        return tokens

    InFlight.wait = timed  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        InFlight.wait = plain  # type: ignore[method-assign]


def seconds_of(contender: Contender, prompts: Prompts, lengths: Sequence[int], device: torch.device) -> float:
    """Return the seconds of a call of ``generate``, including all its work on the device."""
    timing.synchronize(device)
    begun = time.perf_counter()
    contender.generate(prompts, lengths)
    timing.synchronize(device)
    return time.perf_counter() - begun
