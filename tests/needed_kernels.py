"""Which kernels calls need, found without compiling any, and traffic for an engine in this process."""

from __future__ import annotations

import random

import pytest
import triton

import flashtile
from flashtile.backends.common.device import Target
from flashtile.backends.compat import compiling_driver
from flashtile.compilation.compiling import _wanted as wanted
from flashtile.compilation.compiling import launches
from flashtile.engine.sampling_params import BeamSearchParams

H200 = Target("H200", (9, 0), 132)


def traffic(llm: flashtile.LLM, count: int, kinds: tuple = ({},)) -> None:
    """Ask for answers to many random prompts at once, as the server's soak test does: some are searched."""
    draw = random.Random(1)
    prompts, params = [], []
    for _ in range(count):
        first, length = draw.randrange(40), draw.randrange(1, 20)
        prompts.append({"prompt_token_ids": [(first + i) % 99 for i in range(length)]})
        tokens = draw.randrange(1, 40)
        if draw.random() < 0.1:
            params.append(BeamSearchParams(beam_width=2, max_tokens=tokens))
        else:
            n = draw.choice((1, 1, 1, 2, 4))
            given = {"n": n, "temperature": 0.5, "seed": 1, "max_tokens": tokens, **draw.choice(kinds)}
            params.append(flashtile.SamplingParams(**given))
    llm._run(prompts, params, [draw.randrange(3) for _ in prompts])


class KeyFoundError(Exception):
    """Ends a compilation before it begins; ``args`` identify the kernel."""


def find_key(src, target=None, options=None, **more):
    """Stands in for ``triton.compile``."""
    raise KeyFoundError(src.name, src.hash(), str(sorted(options.items(), key=str)))


def kernels(calls: list, target: Target, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str, str]]:
    """The kernels that Triton would compile for calls: name, digest of source and signature, options."""
    monkeypatch.setattr(triton, "compile", find_key)
    found = set()
    tasks, failures = wanted(calls, [target])
    assert failures == []
    for task in tasks:
        launch, tensors = launches(task.call, target)[task.index]
        launch.kernel.device_caches.clear()
        with compiling_driver(target.capability):
            try:
                launch.compile_ahead(tensors)
            except KeyFoundError as key:
                found.add(key.args)
    return found
