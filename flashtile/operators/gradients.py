"""Attention with gradients: the forward pass, its autograd node, and the backward pass as a function.

A call takes the shortest valid path to the operations of :mod:`flashtile.operators.attention`:

    plain                        FORWARD.launch; under the node FlashAttention if a tensor requires grad
    traced, in modes, subclasses torch.ops.flashtile.forward, whose formulas are registered at the end
    transforms of torch.func,
    tangents                     transforms.forward
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.checks.attention import check_call, check_learned_slopes, check_results
from flashtile.checks.conversions import as_masking, as_offset_pair, make_options
from flashtile.op.operation import any_learns, is_plain
from flashtile.op.refusals import carries_tangents, transforming
from flashtile.op.registry import register_autograd
from flashtile.operators import functions
from flashtile.operators.attention import BACKWARD, FORWARD, FORWARD_INTO
from flashtile.operators.functions import SignedExtras
from flashtile.problems.attention import (
    NO_EXTRAS,
    ModifiedExtras,
    OptionalTensors,
    captured_of,
    extras_of,
)
from flashtile.problems.masks import CAPTURED
from flashtile.torch_private import is_batched_gradient

_LEARNING = ("q", "k", "v", "sink", "bias", "alibi_slopes", *CAPTURED)
"""The tensors that may have gradients, in the order of the inputs of :class:`FlashAttention`."""
_NUM_SAVED = len(("q", "k", "v", "out", "lse"))
"""Number of tensors that every call saves for the backward pass. Fields of extras follow, if any."""


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
    given = () if extras is NO_EXTRAS else extras  # all fields are None: nothing to look at
    if type(extras) is SignedExtras:  # the lists of its block mask are plain, and integers
        given = extras.captured
    if is_plain(tensors, given):
        if torch.is_grad_enabled() and any_learns(tensors, given):
            if any_learns([extras.alibi_slopes]):
                if isinstance(extras, ModifiedExtras):
                    # Kernels serve more calls with one program than with a program and ALiBi of their own.
                    extras, options = functions.learning_slopes(q, k, extras, options)
                else:
                    check_learned_slopes(extras, options)
            if extras is NO_EXTRAS:
                return FlashAttention.apply(extras, options, q, k, v)
            learning = extras.sink, extras.bias, extras.alibi_slopes, *captured_of(extras)
            return FlashAttention.apply(extras, options, q, k, v, *learning)
        if type(extras) is not OptionalTensors:
            extras = functions.without_backward_lists(extras)
        return FORWARD.launch(tensors, extras, options)

    has_tangents = carries_tangents((*tensors, *extras))
    if has_tangents or transforming():
        from flashtile.operators import transforms

        return transforms.forward(tensors, extras, options, has_tangents)
    return FORWARD.traced(tensors, extras, options)


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
    ctx.options = options._replace(invariant=False) if options.invariant else options
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse, bias, slopes):
    """Return the gradients of ``_LEARNING``, of captured tensors at least of those that need one.

    ``bias`` and ``slopes`` are indices among the inputs of the autograd node.
    """
    if dout is None and dlse is None:
        return (None,) * len(_LEARNING)
    tensors = ctx.saved_tensors
    if dlse is None and len(tensors) == _NUM_SAVED:  # without optional tensors
        launch = BACKWARD.repeated(dout, tensors, ctx.options)
        if launch is not None:
            return *launch(dout, None, *tensors, NO_EXTRAS), None
    saved, extras = tensors[:_NUM_SAVED], extras_of(tensors[_NUM_SAVED:])
    bias_grad = extras.bias is not None and ctx.needs_input_grad[bias]
    options = ctx.options._replace(bias_grad=True) if bias_grad else ctx.options
    learns_slopes = extras.alibi_slopes is not None and ctx.needs_input_grad[slopes]
    if learns_slopes:
        extras, options = functions.learning_slopes(saved[0], saved[1], extras, options)
    # With grad enabled (create_graph=True), the operator records how to differentiate the gradients.
    plain = is_plain(saved, extras, (dout, dlse)) and not torch.is_grad_enabled()
    if plain and not batched(dout) and not batched(dlse):
        results = BACKWARD.launch((dout, dlse, *saved), extras, options)
        # Gradients of q, k, v, sink and bias, then of captured tensors. Those of slopes come between them.
        first, of_captured = results[: BACKWARD.results], results[BACKWARD.results :]
        if not learns_slopes:
            return *first, None, *of_captured
        at = functions.index_of_slopes(options)
        return *first, of_captured[at], *of_captured[:at]
    given = (dout, dlse, *saved)
    if transforming() or carries_tangents((dout, dlse)):
        from flashtile.operators import transforms

        arguments = BACKWARD.flat(given, extras, options)
        *gradients, dsink, dbias = transforms.backward(*arguments)
    else:
        *gradients, dsink, dbias = BACKWARD.traced(given, extras, options)
    of_captured = functions.unpack(dbias, extras, options)
    dslopes = of_captured.pop(CAPTURED[functions.index_of_slopes(options)]) if learns_slopes else None
    # The operator returns an empty tensor for an absent result, but autograd wants None for an absent input.
    dsink = None if extras.sink is None else dsink
    return *gradients, dsink, dbias if bias_grad else None, dslopes, *map(of_captured.get, CAPTURED)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (dq, dk, dv, dsink) of a call ``attention(q, k, v, ..., return_lse=True)``.

    ``out`` and ``lse`` may cover more keys than k and v hold. The gradients are then the contribution of the
    keys in k and v. Ring attention sums such contributions over devices. Nothing is recorded for autograd.

    Args:
        dout: the gradient of out, in its shape.
        lse: (batch, heads_q, seqlen_q) or (heads_q, total_q), from the forward pass.
        q, k, v and the others: as passed to the forward pass.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`flashtile.attention`.

    Examples:
        >>> from flashtile.operators.gradients import attention_backward
        >>> q, k, v = (torch.randn(2, 64, 4, 32, requires_grad=True) for _ in range(3))
        >>> out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
        >>> out.sum().backward()
        >>> dq, dk, dv, _ = attention_backward(torch.ones_like(out), q, k, v, out, lse, causal=True)
        >>> torch.equal(dq, q.grad)
        True
    """
    options = make_options(
        as_masking(causal, window_size),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        backend=backend,
        dropout_p=dropout_p,
    )
    cu_seqlens_q, cu_seqlens_k = as_offset_pair(cu_seqlens_q, cu_seqlens_k)
    extras = OptionalTensors(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        sink=sink,
        rng_state=rng_state,
    )
    if all(extra is None for extra in extras):
        extras = NO_EXTRAS
    with torch.no_grad():
        check_call(q, k, v, extras, options)
        FORWARD.check_values((q, k, v), extras, options)
        check_results(dout, out, lse, q, v, cu_seqlens_q is not None)
        tensors = (dout, None, q, k, v, out.contiguous(), lse.contiguous())
        dq, dk, dv, dsink, _ = BACKWARD(tensors, extras, options)
        return dq, dk, dv, None if sink is None else dsink


def _second_derivative(ctx, *cotangents):
    from flashtile.operators import transforms

    return transforms.second_derivative(ctx, ctx.needs_input_grad, *cotangents)


def _save_for_second(ctx, inputs, output):
    from flashtile.operators import transforms

    transforms.save_for_second(ctx, inputs, output)


register_autograd("forward", _operator_backward, _setup_context)
register_autograd("backward", _second_derivative, _save_for_second)
