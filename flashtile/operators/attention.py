"""Attention as operations: the forward and the backward pass.

:mod:`flashtile.operators.gradients` connects them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flashtile.checks.attention import check_forward, check_traced
from flashtile.op.into import Into, Result
from flashtile.op.observers import backward_flops, count_scores, forward_flops
from flashtile.op.operation import Operation, any_learns, on_meta, signatures
from flashtile.operators import functions
from flashtile.operators.functions import SignedExtras
from flashtile.operators.shardings import backward_shardings, forward_shardings
from flashtile.problems.attention import (
    NO_EXTRAS,
    ModifiedExtras,
    ModifiedOptions,
    OptionalTensors,
    Options,
    Problem,
    learned_of,
)
from flashtile.problems.masks import CAPTURED


def _forward_results(
    q: Tensor, k: Tensor, v: Tensor, extras: OptionalTensors, options: Options
) -> tuple[Result, Result]:
    *rows, heads, _ = q.shape
    lse_shape = (heads, *rows) if extras.cu_seqlens_q is not None else (rows[0], heads, rows[1])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out_dtype = lse_dtype if options.partial else q.dtype
    return ((*rows, heads, v.shape[-1]), out_dtype), (lse_shape, lse_dtype)


def _fake_forward(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    (out, dtype), (lse, lse_dtype) = _forward_results(q, *others)
    return q.new_empty(out, dtype=dtype), q.new_empty(lse, dtype=lse_dtype)


def of_forward(
    dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, *others: Any
) -> Any:
    """Return the arguments of the forward pass, given the arguments of its backward pass."""
    return q, k, v, *others


def _fake_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    q, k, v, extras, options = of_forward(*arguments)
    sink, bias = extras.sink, extras.bias
    dsink = None if sink is None else sink.new_empty(sink.shape)
    dbias = bias.new_empty(bias.shape) if options.bias_grad else None
    (_, dtype), _ = _forward_results(q, k, v, extras, options)
    of_captured = (t.new_empty(t.shape) for t in (getattr(extras, CAPTURED[i]) for i in learned_of(options)))
    return *(t.new_empty(t.shape, dtype=dtype) for t in (q, k, v)), dsink, dbias, *of_captured


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, extras: OptionalTensors, options: Options) -> int:
    return forward_flops(_count_scores(q, k, extras, options), q.shape[-2], q.shape[-1], v.shape[-1])


def _backward_flops(*arguments: Any) -> int:
    q, k, v, extras, options = of_forward(*arguments)
    return backward_flops(_count_scores(q, k, extras, options), q.shape[-2], q.shape[-1], v.shape[-1])


def _count_scores(q: Tensor, k: Tensor, extras: OptionalTensors, options: Options) -> int:
    of_q = extras.cu_seqlens_q, options.max_seqlen_q
    return count_scores(q, *of_q, k.shape[1], extras.cu_seqlens_k, options.max_seqlen_k)


class ForwardOperation(Operation):
    def check_values(self, tensors: tuple, extras: OptionalTensors, options: Options) -> None:
        """Check offsets and lengths, which are optional tensors. Calls without them have nothing to check."""
        if extras is not NO_EXTRAS:
            super().check_values(tensors, extras, options)

    @staticmethod
    def signature(optional: Any) -> tuple:
        return optional.signature() if type(optional) is SignedExtras else signatures(optional)

    def following(self, tensors: tuple, extras: Any, options: Any) -> Iterable[tuple]:
        """Return the backward pass, if a tensor requires grad."""
        if not any_learns(tensors, extras):
            return ()
        q, k, v = tensors
        out, lse = self.fake(*map(on_meta, tensors), extras, options)
        if any_learns([extras.bias]):
            options = options._replace(bias_grad=True)
        if any_learns([extras.alibi_slopes]):
            extras, options = functions.learning_slopes(q, k, extras, options)
        return ((BACKWARD, (out, None, q, k, v, out, lse), extras, options),)


class BackwardOperation(Operation):
    def launch(self, tensors: tuple, extras: OptionalTensors, options: Options) -> Any:
        """Return (dq, dk, dv, dsink, dbias) from dout and dlse. One of the two may be None, which means 0.

        With score or mask functions, the gradients of captured tensors follow. They are None for captured
        tensors that need no gradient.
        """
        return super().launch(self.normalized(tensors), extras, options)

    def normalized(self, tensors: tuple) -> tuple:
        """Return the tensors with contiguous dout and dlse, because autograd passes them with any strides.

        If dout is None, zeros replace it.
        """
        dout, dlse, q, k, v, out, lse = tensors
        dout = out.new_zeros(out.shape) if dout is None else dout.contiguous()
        return (dout, None if dlse is None else dlse.contiguous(), q, k, v, out, lse)

    def returned(self, results: Any, tensors: Any) -> Any:
        """Return the operator's five results: dq, dk, dv, dsink and dbias.

        With score or mask functions, one vector with the gradients of all captured tensors replaces dbias.
        """
        (*gradients, dbias), of_captured = results[: self.results], results[self.results :]
        return super().returned((*gradients, functions.pack(of_captured) if of_captured else dbias), tensors)


FORWARD = ForwardOperation(
    "forward",
    tensors=("q", "k", "v"),
    optional=NO_EXTRAS,
    options=Options,
    results=2,
    extended_to=(ModifiedExtras, ModifiedOptions),
    check=check_forward,
    describe=Problem.from_tensors,
    fake=_fake_forward,
    check_values=functions.check_values,
    check_traced=check_traced,
    flops=_forward_flops,
    shardings=forward_shardings,
)
FORWARD_INTO = Into(FORWARD, ("out", "lse"), _forward_results)
BACKWARD = BackwardOperation(
    "backward",
    tensors=("dout?", "dlse?", "q", "k", "v", "out", "lse"),
    optional=NO_EXTRAS,
    options=Options,
    extended_to=(ModifiedExtras, ModifiedOptions),
    results=5,
    check=lambda *arguments: None,  # the forward pass checked what it saved
    describe=lambda *arguments: Problem.from_tensors(*of_forward(*arguments)),
    fake=_fake_backward,
    flops=_backward_flops,
    shardings=backward_shardings,
)
