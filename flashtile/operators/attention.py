"""Attention as operations: forward pass, backward pass, and the autograd formula that connects them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flashtile.checks.attention import check_forward, check_learned_slopes, check_traced
from flashtile.checks.conversions import with_unit_stride
from flashtile.op.into import Into, Result
from flashtile.op.observers import backward_flops, count_scores, forward_flops, tell_observers
from flashtile.op.operation import Operation, any_learns, is_plain, on_meta, signatures
from flashtile.op.refusals import carries_tangents, transforming
from flashtile.op.registry import register_autograd
from flashtile.operators import functions
from flashtile.operators.functions import SignedExtras
from flashtile.operators.shardings import backward_shardings, forward_shardings
from flashtile.problems.attention import (
    CAPTURED,
    NO_EXTRAS,
    ModifiedExtras,
    ModifiedOptions,
    OptionalTensors,
    Options,
    Problem,
    captured_of,
    extras_of,
    learned_of,
)
from flashtile.torch_private import is_batched_gradient

_LEARNING = ("q", "k", "v", "sink", "bias", "alibi_slopes", *CAPTURED)
"""The tensors that may have gradients."""


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
        if _learns(extras.bias):
            options = options._replace(bias_grad=True)
        if _learns(extras.alibi_slopes):
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
        *gradients, dbias = results[:5]
        return super().returned((*gradients, functions.pack(results[5:]) if results[5:] else dbias), tensors)


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


def forward(
    q: Tensor, k: Tensor, v: Tensor, extras: Any, options: Any, buffers: tuple[Tensor | None, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse).

    A plain call (:func:`is_plain`) is launched directly, under an autograd node if it needs gradients. Other
    calls go through the torch operator, or have a formula of their own under transforms of ``torch.func``.

    Args:
        extras, options: OptionalTensors and Options; with score or mask functions, ModifiedExtras and
            ModifiedOptions.
        buffers: (out, lse), which receive the results; None, or (): new memory. Not with functions.
    """
    tensors = (q, k, v)
    if buffers:
        return FORWARD_INTO.write(tensors, extras, options, buffers)  # type: ignore[return-value]
    # The lists of a block mask that was signed are plain, and integers.
    unsigned = extras.captured if type(extras) is SignedExtras else extras
    if is_plain(tensors, unsigned):
        if torch.is_grad_enabled() and any_learns(tensors, unsigned):
            if _learns(extras.alibi_slopes):
                if isinstance(extras, ModifiedExtras):
                    # Kernels serve more calls with one program than with a program and ALiBi of their own.
                    extras, options = functions.learning_slopes(q, k, extras, options)
                else:
                    check_learned_slopes(extras, options)
            learning = extras.sink, extras.bias, extras.alibi_slopes, *captured_of(extras)
            return FlashAttention.apply(extras, options, q, k, v, *learning)
        if type(extras) is not OptionalTensors:
            extras = functions.without_backward_lists(extras)
        return FORWARD.launch(tensors, extras, options)

    is_transformed = transforming()
    if is_transformed:  # a dimension that vmap maps over may leave strides that the caller cannot see
        extras = extras._make(map(with_unit_stride, extras))
    has_tangents = carries_tangents((*tensors, *extras))
    if not (is_transformed or has_tangents):
        return FORWARD.traced(tensors, extras, options)
    FORWARD.check(*tensors, extras, options)
    if has_tangents:
        from flashtile.operators import derivatives

        return derivatives.plain(*tensors, extras, options)
    if isinstance(extras, ModifiedExtras):
        raise NotImplementedError(
            "score_mod, mask_mod and block_mask must be None under transforms of torch.func that have no "
            "tangents: call flashtile.attention without them, or outside of the transform"
        )
    from flashtile.operators import transforms

    for operation in (FORWARD, BACKWARD):
        tell_observers(operation, (*tensors, *extras))
    return transforms.Forward.apply(BACKWARD, *FORWARD.flat(tensors, extras, options))


def _learns(extra: Tensor | None) -> bool:
    return extra is not None and extra.requires_grad


class FlashAttention(torch.autograd.Function):
    """The autograd node of a plain call: it takes an eighth of the host time of the operator's own node."""

    @staticmethod
    def forward(ctx: Any, extras, options, q, k, v, *learning):
        """Compute (out, lse).

        ``learning`` repeats sink, bias, slopes and the captured tensors of ``extras``, because autograd sees
        only tensors that are arguments.
        """
        out, lse = FORWARD.launch((q, k, v), extras, options)
        _save(ctx, q, k, v, out, lse, extras, options)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout, dlse):
        return (None, None, *_gradients(ctx, dout, dlse, 6, 7))


def batched(gradient: Tensor | None) -> bool:
    """Whether the gradient stands for several vector-Jacobian products (``is_grads_batched=True``)."""
    return gradient is not None and is_batched_gradient(gradient)


def _setup_context(ctx, inputs, output):
    (q, k, v), extras, options = FORWARD.split(inputs)
    out, lse = output
    _save(ctx, q, k, v, out, lse, extras, options)


def _operator_backward(ctx, dout, dlse):
    found = _gradients(ctx, dout, dlse, *map(FORWARD.arguments.index, ("bias", "alibi_slopes")))
    of_name = dict(zip(_LEARNING, found, strict=False))
    return tuple(of_name.get(name) for name in FORWARD.arguments)


def _save(ctx, q, k, v, out, lse, extras, options):
    if extras is NO_EXTRAS:
        ctx.save_for_backward(q, k, v, out, lse)
    else:
        ctx.save_for_backward(q, k, v, out, lse, *extras)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse, bias, slopes):
    """Return the gradients of ``_LEARNING``, of captured tensors at least of those that need one.

    ``bias`` and ``slopes`` are indices among the inputs of the autograd node.
    """
    if dout is None and dlse is None:
        return (None,) * len(_LEARNING)
    tensors = ctx.saved_tensors
    saved, extras = tensors[:5], NO_EXTRAS if len(tensors) == 5 else extras_of(tensors[5:])
    bias_grad = extras.bias is not None and ctx.needs_input_grad[bias]
    options = ctx.options._replace(bias_grad=True) if bias_grad else ctx.options
    learns_slopes = extras.alibi_slopes is not None and ctx.needs_input_grad[slopes]
    if learns_slopes:
        extras, options = functions.learning_slopes(saved[0], saved[1], extras, options)
    plain = is_plain(saved, extras, (dout, dlse)) and not torch.is_grad_enabled()
    if plain and not batched(dout) and not batched(dlse):
        results = BACKWARD.launch((dout, dlse, *saved), extras, options)
        if learns_slopes:
            last = 5 + learned_of(options)[-1]
            return *results[:5], results[last], *results[5:last]
        return *results[:5], None, *results[5:]
    given = (dout, dlse, *saved)
    if transforming() or carries_tangents((dout, dlse)):
        from flashtile.operators import transforms

        arguments = BACKWARD.flat(given, extras, options)
        *gradients, dsink, dbias = transforms.backward(BACKWARD, *arguments)
    else:
        # With create_graph=True, BACKWARD.traced records a node for the second derivative.
        *gradients, dsink, dbias = BACKWARD.traced(given, extras, options)
    of_captured = functions.unpack(dbias, extras, options)
    dslopes = of_captured.popitem()[1] if learns_slopes else None
    dsink = None if extras.sink is None else dsink
    return *gradients, dsink, dbias if bias_grad else None, dslopes, *map(of_captured.get, CAPTURED)


def _second_derivative(ctx, *cotangents):
    from flashtile.operators import transforms

    return transforms.second_derivative(BACKWARD, ctx, ctx.needs_input_grad, *cotangents)


def _save_for_second(ctx, inputs, output):
    from flashtile.operators import transforms

    transforms.save_for_second(BACKWARD, ctx, inputs, output)


register_autograd("forward", _operator_backward, _setup_context)
register_autograd("backward", _second_derivative, _save_for_second)
