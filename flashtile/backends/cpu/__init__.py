"""CPU backend: torch's flash kernel where it covers the call, else tiled online softmax in torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from flashtile.backends.cpu import fused, mods, padded, sink, tiled, varlen
from flashtile.backends.cpu.config import Config, Fused, Tiled
from flashtile.backends.cpu.config import configure as configure_forward
from flashtile.backends.cpu.optional_inputs import OptionalInputs
from flashtile.problems.attention import OptionalTensors, Problem

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
    """Return a launch ``(q, k, v, extras) -> (out, lse)``."""
    if problem.partial and problem.out_dtype != problem.dtype:
        return _wide(prepare_forward(*_widened(problem)), 3)
    attend = _prepare_attend(problem, config)
    if not problem.sink:
        return attend

    def launch(q: Tensor, k: Tensor, v: Tensor, extras: OptionalTensors) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, extras)
        sink.join(out, lse, extras)
        return out, lse

    return launch


def _prepare_attend(problem: Problem, config: Config) -> Any:
    """Return a launch that ignores the sink."""
    if problem.mods is not None:
        return partial(mods.forward, problem, config.backward_lse)
    ragged = problem.varlen or problem.seqused_q or problem.seqused_k
    if padded.covers(problem) and isinstance(config.forward, Fused):
        of_parts = partial(_forward_part, config.forward), partial(_forward_part, config.backward_lse)
        return partial(padded.forward, *of_parts, problem)
    if isinstance(config.forward, Fused) and not ragged:
        return fused.prepare_dense_forward(problem, config.forward)
    dense = partial(_module(config.forward).forward, problem, config.forward)
    if ragged:
        return partial(varlen.forward, dense, problem)
    return lambda q, k, v, extras: dense(q, k, v, OptionalInputs.of(problem, extras))


def prepare_backward(problem: Problem, config: Config) -> Any:
    """Return ``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink, dbias)``; dlse may be None."""
    if problem.mods is not None:
        return partial(_backward_with_functions, problem, config)
    if problem.partial and problem.out_dtype != problem.dtype:
        return _wide(prepare_backward(*_widened(problem)), 7)

    def dense(dout: Tensor, dlse: Tensor | None, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        chosen = config.backward if dlse is None else config.backward_lse
        return _module(chosen).backward(problem, chosen, dout, dlse, *tensors)

    def launch(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        extras: OptionalTensors,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        bias, dbias = extras.bias, None
        if problem.bias_grad and bias is not None:
            dbias = bias.new_zeros(bias.shape, dtype=problem.lse_dtype)
        if padded.covers(problem) and isinstance(config.backward, Fused):
            chosen = config.backward if dlse is None else config.backward_lse
            part, fallback = (partial(_backward_part, one) for one in (chosen, config.backward_lse))
            gradients = padded.backward(
                part, fallback, problem, dout, dlse, q, k, v, out, lse, extras
            )  # fmt: skip
        elif problem.varlen or problem.seqused_q or problem.seqused_k:
            gradients = varlen.backward(
                dense, problem, dout, dlse, q, k, v, out, lse, extras, dbias
            )  # fmt: skip
        else:
            gradients = dense(dout, dlse, q, k, v, out, lse, OptionalInputs.of(problem, extras, dbias))
        dsink = None if extras.sink is None else sink.gradient(dout, dlse, out, lse, extras.sink)
        return *gradients, dsink, None if bias is None or dbias is None else dbias.to(bias.dtype)

    return launch


def _backward_with_functions(
    problem: Problem,
    config: Config,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Any,
) -> tuple[Tensor | None, ...]:
    """Return (dq, dk, dv, dsink, dbias, the gradients of the captured tensors)."""
    dsink = None if extras.sink is None else sink.gradient(dout, dlse, out, lse, extras.sink)
    gradients, of_captured = mods.backward(
        problem, config.backward_lse, dout, dlse, q, k, v, out, lse, extras
    )
    return *gradients, dsink, None, *of_captured


def _forward_part(config: Fused | Tiled, problem: Problem, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _module(config).forward(problem, config, *arguments)


def _backward_part(config: Fused | Tiled, problem: Problem, *arguments: Any) -> tuple[Tensor, ...]:
    return _module(config).backward(problem, config, *arguments)
def _widened(problem: Problem) -> tuple[Problem, Config]:
    wide = replace(problem, dtype=problem.out_dtype)
    return wide, configure_forward(wide)


def _wide(launch: Any, tensors: int) -> Any:
    """Return ``launch`` with inputs cast to float32 and float32 results, as torch's kernel has one dtype."""

    def widened(*arguments: Any) -> Any:
        given = (None if t is None else t.float() for t in arguments[:tensors])
        return launch(*given, *arguments[tensors:])

    return widened


def _module(config: Fused | Tiled) -> Any:
    return fused if isinstance(config, Fused) else tiled
