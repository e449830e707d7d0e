"""CPU backend: torch's flash kernel if it covers the call, otherwise a tiled online softmax in torch.

A call is split into dense calls where it has to be (``parts``), and each of them goes to torch's kernel
(``flash``) or to tiles (``tiled``, with score and mask functions ``functions``), as ``config`` decides. Sinks
are added to the finished result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.cpu import flash, parts, tiled
from flashtile.backends.cpu.config import Config, Fused, Tiled
from flashtile.backends.cpu.config import configure as configure_forward
from flashtile.backends.cpu.config import tiled_config as configure_tangents
from flashtile.backends.cpu.functions import optional_inputs
from flashtile.backends.cpu.parts import OptionalInputs
from flashtile.problems.attention import OptionalTensors, Problem
from flashtile.reference.attention import sink_gradient
from flashtile.torch_private import matmul_precision, set_matmul_precision

__all__ = [
    "NAME",
    "Config",
    "configure_backward",
    "configure_forward",
    "configure_tangents",
    "prepare_backward",
    "prepare_forward",
    "prepare_tangents",
    "reason_against",
    "with_exact_products",
]

NAME = "cpu"
EXACT = "ieee"
configure_backward = configure_forward


def reason_against(problem: Any, explicit: bool) -> str | None:
    """Why this backend does not serve a problem of any operation; None if it does."""
    if problem.device.type != "cpu":
        return f"it computes on the CPU, the tensors are on {problem.device}"
    return None


def reason_against_forward(problem: Problem, explicit: bool) -> str | None:
    """Why the forward pass does not serve a problem; None if it does."""
    if problem.invariant:
        return "the order of sums depends on the block of queries, and over a cache it has another size"
    return reason_against(problem, explicit)


def prepare_forward(problem: Problem, config: Config) -> Any:
    """Return a function ``(q, k, v, extras) -> (out, lse)``."""
    if problem.out_dtype != problem.dtype:
        return _in_float32(problem, prepare_forward, configure_forward)
    attend = with_exact_products(_prepare_attend(problem, config))
    if not problem.sink:
        return attend

    def launch(q: Tensor, k: Tensor, v: Tensor, extras: OptionalTensors) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, extras)
        own, *more = lse.unbind(-1) if problem.statistics else (lse,)
        _join_sink(out, own, extras, more[-1] if problem.entropy else None)
        return out, lse

    return launch


def prepare_tangents(problem: Problem, config: Tiled) -> Any:
    """Return a function ``(q, k, v, their tangents, extras) -> (out, lse, their tangents)``.

    The tangents of q, k and v may be None.
    """
    if problem.out_dtype != problem.dtype:
        return _in_float32(problem, prepare_tangents, configure_tangents)

    def dense(own: Problem, *arguments: Any) -> Any:
        q, k, v, of_q, of_k, of_v, optional = arguments
        return tiled.forward(own, config, q, k, v, optional, (of_q, of_k, of_v))

    parts_of = _parts_of(problem, config)

    def launch(*arguments: Any) -> Any:
        tensors, given, extras = arguments[:3], arguments[3:6], arguments[6]
        moving = (torch.zeros_like(x) if t is None else t for x, t in zip(tensors, given, strict=True))
        if parts_of is None:
            results = dense(problem, *tensors, *moving, optional_inputs(problem, extras, with_gradients=True))
        else:
            results = parts.forward(dense, parts_of, problem, *tensors, *moving, extras)
        if problem.sink:
            out, lse, *tangents = results
            _join_sink(out, lse, extras, None, tangents)
        return results

    return with_exact_products(launch)


def _prepare_attend(problem: Problem, config: Config) -> Any:
    """Return a function ``(q, k, v, extras) -> (out, lse)`` that ignores the sink."""

    def dense(own: Problem, q: Tensor, k: Tensor, v: Tensor, optional: OptionalInputs) -> Any:
        chosen = config.backward_lse if optional.masks else config.forward  # a part may need a mask
        return _module(chosen).forward(own, chosen, q, k, v, optional)

    parts_of = _parts_of(problem, config.forward)
    if parts_of is not None:
        return partial(parts.forward, dense, parts_of, problem)
    if isinstance(config.forward, Fused):
        return flash.prepare_dense_forward(problem, config.forward)  # decides once, as most calls come here
    return lambda q, k, v, extras: dense(problem, q, k, v, optional_inputs(problem, extras))


def _parts_of(problem: Problem, config: Fused | Tiled) -> Any:
    """Return the function that splits a call into dense calls, or None if the call is dense."""
    if parts.has_only_padding(problem) and isinstance(config, Fused):
        return parts.without_padding
    return parts.sequences if problem.varlen or problem.seqused_q or problem.seqused_k else None


def _join_sink(
    out: Tensor, lse: Tensor, extras: OptionalTensors, entropy: Tensor | None, tangents: Sequence[Tensor] = ()
) -> None:
    """Add the sink to out (..., heads, head_dim), and to lse and entropy (..., heads, rows), in place.

    A sink is one score per head without a value: ``lse' = log(exp(lse) + exp(sink))`` and
    ``out' = out exp(lse - lse')``. In terms of out' and lse', the gradients of q, k and v have the same form
    as without a sink, so neither kernel needs to know of it. Rows that belong to no sequence or are unused
    have no sink: out stays 0 and lse stays -inf. The sink's probability adds its own -P log P to the entropy,
    and the others shrink by the ``weight``. ``tangents`` are those of out and lse; that of the weight is
    ``weight (1 - weight) lse_tangent``.
    """
    assert extras.sink is not None
    joined = torch.logaddexp(lse, extras.sink.to(lse.dtype)[:, None])
    used, offsets = extras.seqused_q, extras.cu_seqlens_q
    if used is not None or offsets is not None:
        rows = torch.arange(lse.shape[-1], device="cpu")
        if offsets is not None:
            ends = offsets[1:] if used is None else offsets[:-1] + used
            unused = ~((rows >= offsets[:-1, None]) & (rows < ends[:, None])).any(0)
        else:
            assert used is not None
            unused = (rows >= used[:, None])[:, None]
        joined.masked_fill_(unused, -torch.inf)
    weight = torch.exp(lse - joined).masked_fill_(joined == -torch.inf, 0.0)
    if tangents:
        out_tangent, lse_tangent = tangents
        of_weight = -torch.expm1(lse - joined) * lse_tangent
        out_tangent.addcmul_(out, of_weight.masked_fill_(weight == 0, 0.0).mT[..., None].to(out.dtype))
        out_tangent *= weight.mT[..., None]
        lse_tangent *= weight
    out *= weight.mT[..., None]
    if entropy is not None:
        entropy *= weight
        entropy += torch.special.entr(weight)
        p = torch.exp(extras.sink.to(lse.dtype)[:, None] - joined).masked_fill_(joined == -torch.inf, 0.0)
        entropy += torch.special.entr(p)
    lse.copy_(joined)


def prepare_backward(problem: Problem, config: Config) -> Any:
    """Return a function ``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink, dbias)``.

    ``dlse`` may be None. With score or mask functions, the gradients of the captured tensors follow.
    """
    if problem.out_dtype != problem.dtype:
        return _in_float32(problem, prepare_backward, configure_backward)
    parts_of = _parts_of(problem, config.forward)

    def dense(own: Problem, dout: Tensor, dlse: Tensor | None, *tensors: Any) -> Any:
        *_, optional = tensors
        # torch's kernel has no argument for the gradient of lse.
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
        dsink = None
        if extras.sink is not None:
            of_lse = dlse[..., 0] if problem.entropy and dlse is not None else dlse
            dsink = sink_gradient(dout, of_lse, out, lse, extras.sink)
        return *gradients, dsink, None if dbias is None else dbias.to(bias.dtype), *captured

    return with_exact_products(launch)


def _in_float32(problem: Problem, prepare: Callable[..., Any], configure: Callable[..., Any]) -> Any:
    """Return a launch of 16-bit tensors that computes in float32, so that results are float32.

    Partial results are merged later. If they were rounded to 16 bits before, the merged one would be rounded
    twice.
    """
    wide = replace(problem, dtype=problem.out_dtype)
    launch = prepare(wide, configure(wide))

    def widened(*arguments: Any) -> Any:
        *tensors, extras = arguments
        return launch(*(None if t is None else t.float() for t in tensors), extras)

    return widened


def _module(config: Fused | Tiled) -> Any:
    return flash if isinstance(config, Fused) else tiled


_lock = threading.Lock()
_running = 0
_before = EXACT


def with_exact_products(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``launch``, run with exact products of float32. The setting of the process is restored after it.

    ``torch.set_float32_matmul_precision("medium")`` rounds the factors of such products to bfloat16. They
    also occur in calls of 16-bit tensors, whose bounds of error assume exact factors. Threads share the
    setting, so the last of the launches that run at the same time restores it.
    """

    def run(*arguments: Any) -> Any:
        global _running, _before
        with _lock:  # setting it costs more than asking, so most calls only ask
            if _running == 0:
                _before = matmul_precision()
                if _before != EXACT:
                    set_matmul_precision(EXACT)
            _running += 1
        try:
            return launch(*arguments)
        finally:
            with _lock:
                _running -= 1
                if _running == 0 and _before != EXACT:
                    set_matmul_precision(_before)

    return run
