"""CPU backend: torch's flash kernel if it covers the call, otherwise a tiled online softmax in torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from flashtile.backends.cpu import fused, parts, sink, tiled
from flashtile.backends.cpu.config import Config, Fused, Tiled
from flashtile.backends.cpu.config import configure as configure_forward
from flashtile.backends.cpu.functions import optional_inputs
from flashtile.backends.cpu.parts import OptionalInputs
from flashtile.backends.cpu.precision import with_exact_products
from flashtile.problems.attention import OptionalTensors, Problem
from flashtile.reference.attention import sink_gradient

__all__ = [
    "NAME",
    "Config",
    "configure_backward",
    "configure_forward",
    "prepare_backward",
    "prepare_forward",
    "reason_against",
]

NAME = "cpu"
configure_backward = configure_forward


def reason_against(problem: Problem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    if problem.device.type != "cpu":
        return f"it computes on the CPU, q is on {problem.device}"
    return None


def prepare_forward(problem: Problem, config: Config) -> Any:
    """Return a function ``(q, k, v, extras) -> (out, lse)``."""
    if problem.partial and problem.out_dtype != problem.dtype:
        return _wide(prepare_forward(*_widened(problem)))
    attend = with_exact_products(_prepare_attend(problem, config))
    if not problem.sink:
        return attend

    def launch(q: Tensor, k: Tensor, v: Tensor, extras: OptionalTensors) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, extras)
        sink.join(out, lse, extras)
        return out, lse

    return launch


def _prepare_attend(problem: Problem, config: Config) -> Any:
    """Return a function ``(q, k, v, extras) -> (out, lse)`` that ignores the sink."""

    def dense(own: Problem, q: Tensor, k: Tensor, v: Tensor, optional: OptionalInputs) -> Any:
        chosen = config.backward_lse if optional.masks else config.forward
        return _module(chosen).forward(own, chosen, q, k, v, optional)

    parts_of = _parts_of(problem, config)
    if parts_of is not None:
        return partial(parts.forward, dense, parts_of, problem)
    if isinstance(config.forward, Fused):
        return fused.prepare_dense_forward(problem, config.forward)
    return lambda q, k, v, extras: dense(problem, q, k, v, optional_inputs(problem, extras))


def _parts_of(problem: Problem, config: Config) -> Any:
    """Return the function that splits a call into dense calls, or None if the call is dense."""
    if parts.has_only_padding(problem) and isinstance(config.forward, Fused):
        return parts.without_padding
    return parts.sequences if problem.varlen or problem.seqused_q or problem.seqused_k else None


def prepare_backward(problem: Problem, config: Config) -> Any:
    """Return a function ``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink, dbias)``.

    ``dlse`` may be None. With score or mask functions, the gradients of the captured tensors follow.
    """
    if problem.partial and problem.out_dtype != problem.dtype:
        return _wide(prepare_backward(*_widened(problem)))
    parts_of = _parts_of(problem, config)

    def dense(own: Problem, dout: Tensor, dlse: Tensor | None, *tensors: Any) -> Any:
        *_, optional = tensors
        chosen = config.backward if dlse is None and not optional.masks else config.backward_lse
        return _module(chosen).backward(own, chosen, dout, dlse, *tensors)

    def launch(dout: Tensor, dlse: Tensor | None, *tensors: Any) -> tuple[Tensor | None, ...]:
        *_, out, lse, extras = tensors
        bias, dbias, captured = extras.bias, None, ()
        if problem.bias_grad and bias is not None:
            dbias = bias.new_zeros(bias.shape, dtype=problem.lse_dtype)
        if parts_of is None:
            optional = optional_inputs(problem, extras, dbias, with_gradients=True)
            gradients = dense(problem, dout, dlse, *tensors[:-1], optional)
            captured = () if optional.functions is None else optional.functions.of_captured()
        else:
            split = parts_of if dbias is None else partial(parts_of, dbias=dbias)
            gradients = parts.backward(dense, split, problem, dout, dlse, *tensors)
        dsink = None if extras.sink is None else sink_gradient(dout, dlse, out, lse, extras.sink)
        return *gradients, dsink, None if dbias is None else dbias.to(bias.dtype), *captured

    return with_exact_products(launch)


def _widened(problem: Problem) -> tuple[Problem, Config]:
    wide = replace(problem, dtype=problem.out_dtype)
    return wide, configure_forward(wide)


def _wide(launch: Any) -> Any:
    """Return ``launch`` with all tensors before ``extras`` cast to float32, so that results are float32."""

    def widened(*arguments: Any) -> Any:
        *tensors, extras = arguments
        return launch(*(None if t is None else t.float() for t in tensors), extras)

    return widened


def _module(config: Fused | Tiled) -> Any:
    return fused if isinstance(config, Fused) else tiled
