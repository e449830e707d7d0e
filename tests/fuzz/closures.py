"""Family of score and mask functions that read outside state, which changes between calls."""

from __future__ import annotations

from random import Random

import torch

import closures
from fuzz.prelude import Wrong
from fuzz.runner import Call

WEIGHTS = {"eager": 20, "compiled": 1, "fullgraph": 1, "exported": 1}
"""Relative frequency of each way to call; the compiled ways are rare because they take seconds."""


def follows(state: str, way: str, changes: int, seed: int, device: str) -> None:
    """Check that calls see the changes of outside state.

    Raises:
        Wrong: a call uses the old state.
    """
    try:
        closures.check(state, way, changes, seed, device)
    except AssertionError as error:
        raise Wrong(f"{state} is not seen ({way})", str(error)) from None
    finally:
        torch.compiler.reset()


def draw(rng: Random, device: str = "cpu") -> Call:
    way = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    state = rng.choice([name for name in closures.STATES if closures.allowed(name, way)])
    body = f"""from fuzz.closures import follows
follows({state!r}, {way!r}, changes, {rng.randrange(2**31)}, {device!r})"""
    return Call(body, {"changes": rng.randint(1, closures.MAX_CHANGES)})
