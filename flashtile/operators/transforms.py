"""The operators under transforms of ``torch.func`` (grad, vmap, jvp and combinations), and with tangents.

A transform needs its own form of ``autograd.Function`` and a batching rule. The rule puts all samples that
vmap maps over into the batch of one call, if that is possible.

Tangents of q, k and v that belong to the innermost transform, or to ``torch.autograd.forward_ad``, are inputs
of one operation, ``flashtile::tangents``, whose results are out, lse and their tangents. All other tangents
are those of standard attention: tangents of other tensors, those of a transform further out, as in the
forward derivative of a gradient, and tangents of tangents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashtile.checks.conversions import with_unit_stride
from flashtile.op.observers import tell_observers
from flashtile.op.refusals import (
    carries_tangents,
    functionalizing,
    mapping,
    refuse_functionalized,
    transforming,
)
from flashtile.op.registry import flat_fields
from flashtile.operators import derivatives
from flashtile.operators.attention import BACKWARD, FORWARD, TANGENTS
from flashtile.operators.functions import index_of_slopes, learning_slopes, pack, unpack
from flashtile.problems.attention import ModifiedExtras, OptionalTensors, Options, extras_of
from flashtile.problems.masks import CAPTURED
from flashtile.torch_private import is_mapped

_NUM_EXTRAS, _NUM_OPTIONS = len(OptionalTensors._fields), len(flat_fields(Options))
_WITHOUT_BATCH = OptionalTensors._fields.index("sink")
"""Index of the first field of OptionalTensors that need not have a batch dimension."""


def forward(
    tensors: tuple[Tensor, Tensor, Tensor], extras: Any, options: Any, has_tangents: bool
) -> tuple[Tensor, Tensor]:
    """Compute ``flashtile::forward`` under a transform of ``torch.func``, or with forward-mode tangents."""
    if transforming():
        # A dimension that vmap maps over may leave strides that the caller cannot see.
        extras = extras._make(map(with_unit_stride, extras))
    FORWARD.check(*tensors, extras, options)
    if has_tangents:
        if options.invariant:
            raise NotImplementedError(
                "invariant must be False in forward mode, whose sums have another order"
            )
        return _with_tangents(tensors, extras, options)
    if isinstance(extras, ModifiedExtras):
        raise NotImplementedError(
            "score_mod, mask_mod and block_mask must be None under transforms of torch.func that have no "
            "tangents: call flashtile.attention without them, or outside of the transform"
        )
    refuse_functionalized("q")
    return Forward.apply(*FORWARD.flat(tensors, extras, options))


def _with_tangents(
    tensors: tuple[Tensor, Tensor, Tensor], extras: Any, options: Any
) -> tuple[Tensor, Tensor]:
    """Compute ``flashtile::forward`` with forward-mode tangents."""
    if mapping():  # the tangents belong to a transform around vmap
        if extras.cu_seqlens_q is not None or isinstance(extras, ModifiedExtras):
            return _by_standard_attention(tensors, extras, options)
        return Forward.apply(*FORWARD.flat(tensors, extras, options))  # whose rule calls forward() again
    primals, tangents = zip(*map(forward_ad.unpack_dual, tensors), strict=True)
    given = [tangent for tangent in tangents if tangent is not None]
    if not given or functionalizing() or carries_tangents((*primals, *given, *extras)):
        return _by_standard_attention(tensors, extras, options)
    if isinstance(extras, ModifiedExtras):  # _learning says which captured tensors need a gradient
        options = options._replace(learned=0)
    arguments = TANGENTS.flat((*primals, *tangents), extras, options)
    out, lse, out_tangent, lse_tangent = ForwardWithTangents.apply(*arguments)
    if out.grad_fn is not None and not transforming():
        out.grad_fn.duals = tensors
    return forward_ad.make_dual(out, out_tangent), forward_ad.make_dual(lse, lse_tangent)


def _by_standard_attention(
    tensors: tuple[Tensor, Tensor, Tensor], extras: Any, options: Any
) -> tuple[Tensor, Tensor]:
    """Compute a call and its tangents in plain PyTorch, if the requested backend serves the call itself."""
    if options.backend is not None:
        FORWARD.refuse_unserved(tensors, extras, options)
    return derivatives.plain(*tensors, extras, options)


def backward(*arguments: Any) -> Any:
    """Compute ``flashtile::backward`` under a transform of ``torch.func``, or with forward-mode tangents."""
    (dout, dlse, q, k, v, _, _), extras, options = BACKWARD.split(arguments)
    if not carries_tangents((dout, dlse, q, k, v)):
        refuse_functionalized("dout")
        return _Backward.apply(*arguments)
    attend, learned = derivatives.of_call(extras, options)
    dq, dk, dv, *found = derivatives.gradients(attend, dout, dlse, (q, k, v, *learned.values()))
    of_learned = dict(zip(learned, found, strict=True))
    dsink, dbias = of_learned.pop("sink", None), of_learned.pop("bias", None)
    return dq, dk, dv, dsink, pack(of_learned.values()) if of_learned else dbias


def second_derivative(ctx: Any, needed: tuple[bool, ...], *cotangents: Any) -> tuple[Tensor | None, ...]:
    """Differentiate ``flashtile::backward``, and return the gradients of its arguments.

    ``needed`` has one entry per given argument: the dispatcher omits arguments that have their default.
    ``cotangents`` are the gradients of its results. The arguments out and lse get None. Their effect
    is included in the gradients of q, k, v and the other tensors, from which out and lse are computed.
    """
    tensors, extras, options = ctx.saved_tensors[:5], extras_of(ctx.saved_tensors[5:]), ctx.options
    attend, learned = derivatives.of_call(extras, options)
    own = {"sink": cotangents[3], "bias": cotangents[4] if options.bias_grad else None}
    own |= unpack(cotangents[4], extras, options)
    asked = [own[name] for name in learned]
    of_results, found = derivatives.of_pass(
        lambda given, inputs: derivatives.gradients(attend, given[0], given[1], inputs),
        [*cotangents[:3], *asked], tensors[:2], (*tensors[2:], *learned.values()),
    )  # fmt: skip
    of_name = dict(zip(("dout", "dlse", *"qkv", *learned), (*of_results, *found), strict=True))
    return tuple(of_name.get(name) for name, _ in zip(BACKWARD.arguments, needed, strict=False))


def save_for_second(ctx: Any, inputs: Any, output: Any) -> None:
    (dout, dlse, q, k, v, _, _), extras, options = BACKWARD.split(inputs)
    ctx.save_for_backward(dout, dlse, q, k, v, *extras)
    ctx.options = options
    ctx.set_materialize_grads(False)


class Forward(torch.autograd.Function):
    """Compute (out, lse) under a transform of ``torch.func``, from the arguments of the operator."""

    @staticmethod
    def forward(*arguments):
        tell_observers(FORWARD, arguments)
        return FORWARD.operator(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        (q, k, v), extras, ctx.options = FORWARD.split(inputs)
        ctx.save_for_backward(q, k, v, *output, *extras)

    @staticmethod
    def backward(ctx: Any, dout, dlse):
        saved, extras = ctx.saved_tensors[:5], extras_of(ctx.saved_tensors[5:])
        of_name = _gradients(_needing(ctx, FORWARD), dout, dlse, saved, extras, ctx.options)
        return _in_order(FORWARD, of_name, ctx)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap(_forward_again, len(FORWARD.tensors), info.batch_size, in_dims, arguments)


def _forward_again(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute ``flashtile::forward`` under the transforms around a vmap, from the operator's arguments."""
    tensors, extras, options = FORWARD.split(arguments)
    return forward(tensors, extras, options, carries_tangents((*tensors, *extras)))


class ForwardWithTangents(torch.autograd.Function):
    """Compute (out, lse) and their tangents, from the arguments of ``flashtile::tangents``."""

    @staticmethod
    def forward(*arguments):
        tell_observers(TANGENTS, arguments)
        return TANGENTS.operator(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        tensors, extras, ctx.options = TANGENTS.split(inputs)
        ctx.save_for_backward(*tensors, *output[:2], *extras)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout, dlse, dout_tangent, dlse_tangent):
        """Compute gradients, also those of the input tangents.

        If only out and lse have gradients, as in losses that detach the tangent, these are the gradients of
        a call without tangents, which kernels compute. All others are those of standard attention.
        """
        (q, k, v, *tangents), (out, lse) = ctx.saved_tensors[:6], ctx.saved_tensors[6:8]
        duals: Sequence[Tensor] = getattr(ctx, "duals", ())
        if carries_tangents(duals):  # within the dual level still, so the gradients have tangents
            q, k, v = duals
        extras, options = extras_of(ctx.saved_tensors[8:]), ctx.options
        cotangents = dout, dlse, dout_tangent, dlse_tangent
        needing = _needing(ctx, TANGENTS)
        # vmap has no rule for the backward pass of packed sequences.
        packed = extras.cu_seqlens_q is not None and any(t is not None and is_mapped(t) for t in cotangents)
        if dout_tangent is dlse_tangent is None and not packed:
            of_name = _gradients(needing, dout, dlse, (q, k, v, out, lse), extras, options)
            return _in_order(TANGENTS, of_name, ctx)
        extras, options = _learning((q, k), needing, extras, options)
        attend, learned = derivatives.of_call(extras, options)
        of_tangents, found = derivatives.of_pass(
            lambda directions, inputs: derivatives.along(attend, inputs, directions),
            cotangents, tangents, (q, k, v, *learned.values()),
        )  # fmt: skip
        names = *FORWARD.names[:3], *learned, *TANGENTS.names[3:6]
        of_name = dict(zip(names, (*found, *of_tangents), strict=True))
        return _in_order(TANGENTS, _with_slopes(of_name, needing, options), ctx)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        apply = ForwardWithTangents.apply
        if TANGENTS.split(arguments)[1].cu_seqlens_q is not None:
            return _one_by_one(apply, info.batch_size, in_dims, arguments)
        return _vmap(apply, len(TANGENTS.tensors), info.batch_size, in_dims, arguments)


def _in_order(operation: Any, of_name: dict[str, Any], ctx: Any) -> tuple:
    """Return gradients in the order of the operator's arguments, None for each that has none."""
    return tuple(map(of_name.get, operation.arguments[: len(ctx.needs_input_grad)]))


def _needing(ctx: Any, operation: Any) -> set[str]:
    """Return the names of the operator's arguments that need a gradient."""
    return {name for name, needed in zip(operation.arguments, ctx.needs_input_grad, strict=False) if needed}


def _learning(tensors: Sequence[Tensor], needing: set[str], extras: Any, options: Any) -> tuple[Any, Any]:
    """Return (extras, options) of a backward pass of q, k, ... that computes the gradients of ``needing``."""
    q, k = tensors[:2]
    options = options._replace(bias_grad="bias" in needing, invariant=False)
    if isinstance(extras, ModifiedExtras):
        learned = sum(1 << i for i, name in enumerate(CAPTURED) if name in needing)
        options = options._replace(learned=learned)
    if "alibi_slopes" in needing:
        return learning_slopes(q, k, extras, options)
    return extras, options


def _gradients(
    needing: set[str], dout: Any, dlse: Any, saved: Sequence[Tensor], extras: Any, options: Any
) -> dict[str, Any]:
    """Return the gradients of a call's tensors by name, given ``saved``: q, k, v, out and lse."""
    given, of_pass = _learning(saved, needing, extras, options)
    dq, dk, dv, dsink, dbias = backward(*BACKWARD.flat((dout, dlse, *saved), given, of_pass))
    found = unpack(dbias, given, of_pass) | {"q": dq, "k": dk, "v": dv}
    found["sink"] = None if extras.sink is None else dsink
    found["bias"] = dbias if of_pass.bias_grad else None
    return _with_slopes(found, needing, of_pass)


def _with_slopes(found: dict[str, Any], needing: set[str], options: Any) -> dict[str, Any]:
    """Rename the gradient of the slopes, which :func:`learning_slopes` made a captured tensor."""
    if "alibi_slopes" in needing:
        found["alibi_slopes"] = found.pop(CAPTURED[index_of_slopes(options)])
    return found


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments):
        tell_observers(BACKWARD, arguments)
        return BACKWARD.operator(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        save_for_second(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *cotangents):
        return second_derivative(ctx, ctx.needs_input_grad, *cotangents)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap(backward, len(BACKWARD.tensors), info.batch_size, in_dims, arguments)


def _vmap(
    operator: Callable[..., tuple[Tensor, ...]], num_tensors: int, samples: int, in_dims: Any, arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Apply ``operator`` to all samples of a vmap. Return its results, and the sample dimension of each.

    The dimension is None for a result that all samples share. ``arguments`` are ``num_tensors`` tensors with
    a batch dimension (or None), then the fields of OptionalTensors and the options. Calls with score or mask
    functions have more fields after these.
    """
    tensors, rest = arguments[:num_tensors], arguments[num_tensors:]
    extras, options = OptionalTensors(*rest[:_NUM_EXTRAS]), rest[_NUM_EXTRAS:]
    dims: tuple[int | None, ...] = in_dims[:num_tensors]
    dim_of = dict(zip(OptionalTensors._fields, in_dims[num_tensors:], strict=False))
    if extras.cu_seqlens_q is not None:
        raise NotImplementedError(
            "cu_seqlens_q must be None under vmap, got a tensor: put the sequences of all samples in one call"
        )
    if len(options) > _NUM_OPTIONS or any(extra is not None for extra in extras[_WITHOUT_BATCH:]):
        return _one_by_one(operator, samples, in_dims, arguments)
    flat = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if tensor is not None:
            tensor = _samples_first(tensor, dim, samples)
            batch = tensor.shape[1]
            tensor = tensor.flatten(0, 1)
        flat.append(tensor)
    used = extras.seqused_k
    if used is not None:
        used = _samples_first(used, dim_of["seqused_k"], samples).flatten().contiguous()
    slopes, dim = extras.alibi_slopes, dim_of["alibi_slopes"]
    if slopes is not None and not (dim is None and slopes.dim() == 1):  # else all samples share (heads,)
        slopes = _samples_first(slopes, dim, samples)
        if slopes.dim() == 2:
            slopes = slopes[:, None].expand(-1, batch, -1)
        slopes = slopes.flatten(0, 1)
    results = operator(*flat, *OptionalTensors(seqused_k=used, alibi_slopes=slopes), *options)
    # Without a sink, dsink is an empty vector that all samples share.
    out_dims = tuple(None if t.dim() == 1 else 0 for t in results)
    return tuple(t if t.dim() == 1 else t.unflatten(0, (samples, batch)) for t in results), out_dims


def _one_by_one(
    operator: Callable[..., tuple[Tensor, ...]], samples: int, in_dims: Any, arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Apply ``operator`` to each sample in a loop.

    This is for calls with score or mask functions, or with tensors that have no batch dimension. Their
    samples cannot be merged into one larger batch. For example, a sink has one gradient per call, but needs
    one per sample.
    """
    given = list(zip(arguments, in_dims, strict=True))
    if samples == 0:  # empty results, in the shapes of a sample's results
        shapes = operator(
            *(a if dim is None else a.new_zeros(a.movedim(dim, 0).shape[1:]) for a, dim in given)
        )
        return tuple(t.new_empty(0, *t.shape) for t in shapes), (0,) * len(shapes)
    results = [
        operator(*(a if dim is None else a.select(dim, i) for a, dim in given)) for i in range(samples)
    ]
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])


def _samples_first(tensor: Tensor, dim: int | None, samples: int) -> Tensor:
    """Move the mapped dimension to the front; a tensor that is not mapped is expanded to all samples."""
    return tensor.expand(samples, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
