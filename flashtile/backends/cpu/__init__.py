"""The CPU: torch's fused flash kernel where it covers the call, tiled online softmax in torch elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from flashtile.backends.cpu import fused, tiled, varlen
from flashtile.backends.cpu.config import Config, Fused, Tiled, configure
from flashtile.problem import Extras, Problem

__all__ = ["NAME", "Config", "configure", "prepare_backward", "prepare_forward", "reason_against"]

NAME = "cpu"


def reason_against(problem: Problem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    if problem.device.type != "cpu":
        return f"it computes on the CPU, q is on {problem.device}"
    if problem.sink or problem.seqused_k:
        return "it takes neither sink nor seqused_k"
    return None


def prepare_forward(problem: Problem, config: Config) -> Any:
    """A launch ``(q, k, v, extras) -> (out, lse)``."""
    if isinstance(config.forward, Fused) and not problem.varlen:
        return fused.prepare_dense_forward(problem, config.forward)
    dense = partial(_module(config.forward).forward, problem, config.forward)
    if problem.varlen:
        return partial(varlen.forward, dense, problem)

    def launch(q: Tensor, k: Tensor, v: Tensor, extras: Extras):
        return dense(q, k, v, extras.alibi_slopes)

    return launch


def prepare_backward(problem: Problem, config: Config) -> Any:
    """A launch ``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink)``, dlse None for zero."""

    def dense(dout: Tensor, dlse: Tensor | None, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        chosen = config.backward if dlse is None else config.backward_lse
        return _module(chosen).backward(problem, chosen, dout, dlse, *tensors)

    if problem.varlen:
        return partial(varlen.backward, dense)

    def launch(dout: Tensor, dlse: Tensor | None, q, k, v, out, lse, extras: Extras):
        return *dense(dout, dlse, q, k, v, out, lse, extras.alibi_slopes), None

    return launch


def _module(config: Fused | Tiled) -> Any:
    return fused if isinstance(config, Fused) else tiled
