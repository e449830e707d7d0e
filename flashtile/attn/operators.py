"""``torch.library`` operators: ``flashtile::forward`` and ``flashtile::backward``.

They give the functions a fake kernel (``torch.compile``, ``torch.export``) and an autograd formula. An eager
call that nobody watches skips the dispatcher, whose host time exceeds the launch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from flashtile import launches
from flashtile.attn import transforms
from flashtile.problem import NO_EXTRAS, Extras, Options, check_call, check_types

_ARGUMENTS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? alibi_slopes, Tensor? sink, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? softmax_scale, bool causal, "
    "SymInt window_left, SymInt window_right, float softcap, bool deterministic, str? backend"
)
"""The fields of Extras and of Options, in their order."""
_NUM_EXTRAS = len(Extras._fields)

_library = torch.library.Library("flashtile", "DEF")
_library.define(f"forward(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)")
# The last result is dsink, without elements where there is no sink.
_library.define(
    "backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call, by the shortest path that is right for it."""
    if torch.compiler.is_dynamo_compiling():
        # What no graph can hold; the fake kernel checks the rest.
        check_types(q, k, v, extras)
        _refuse_forward_mode(q, k, v, extras.sink)
        return torch.ops.flashtile.forward(q, k, v, *extras, *options)
    if _is_plain(q, k, v, extras):
        if torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad or _learns(extras.sink)
        ):
            return FlashAttention.apply(q, k, v, extras.sink, extras, options)
        return launches.forward(q, k, v, extras, options)
    check_call(q, k, v, extras, options)
    _refuse_forward_mode(q, k, v, extras.sink)
    return transforms.forward(q, k, v, *extras, *options)


def _is_plain(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> bool:
    """Nothing but this call would see the operator: no trace, mode, transform, tangent or subclass."""
    return (
        type(q) is type(k) is type(v) is Tensor
        and (q.is_cuda or q.is_cpu)
        and (extras is NO_EXTRAS or _are_plain(extras))
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


def _are_plain(extras: Extras) -> bool:
    for tensor in extras:
        if tensor is not None and type(tensor) is not Tensor and type(tensor) is not Parameter:
            return False
    return extras.alibi_slopes is None or not extras.alibi_slopes.requires_grad


def _learns(sink: Tensor | None) -> bool:
    return sink is not None and sink.requires_grad


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Without a rule for tangents the dispatcher would drop them, as if the derivative were zero."""
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    ):
        raise NotImplementedError("q, k, v and sink must carry no tangents: forward mode is not implemented")


class FlashAttention(torch.autograd.Function):
    """The autograd node of a plain eager call: the operator's own formula at an eighth of its host time."""

    @staticmethod
    def forward(ctx: Any, q, k, v, sink, extras, options):
        """``sink`` is that of ``extras``, where autograd does not look."""
        out, lse = launches.forward(q, k, v, extras, options)
        _save(ctx, q, k, v, out, lse, extras, options)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout, dlse):
        return (*_gradients(ctx, dout, dlse), None, None)


def _split(arguments: Sequence[Any]) -> tuple[Extras, Options]:
    """The last arguments of the operators by name."""
    extras, options = arguments[:_NUM_EXTRAS], arguments[_NUM_EXTRAS:]
    given = any(tensor is not None for tensor in extras)
    return Extras(*extras) if given else NO_EXTRAS, Options(*options)


def _setup_context(ctx, inputs, output):
    q, k, v, *rest = inputs
    out, lse = output
    extras, options = _split(rest)
    _save(ctx, q, k, v, out, lse, extras, options)


def _operator_backward(ctx, dout, dlse):
    dq, dk, dv, dsink = _gradients(ctx, dout, dlse)
    return dq, dk, dv, *Extras(sink=dsink), *(None,) * len(ctx.options)


def _save(ctx, q, k, v, out, lse, extras, options):
    if extras is NO_EXTRAS:
        ctx.save_for_backward(q, k, v, out, lse)
    else:
        ctx.save_for_backward(q, k, v, out, lse, *extras)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse):
    if dout is None and dlse is None:
        return None, None, None, None
    q, k, v, out, lse, *extras = ctx.saved_tensors
    extras = Extras(*extras) if extras else NO_EXTRAS
    if (
        not torch.compiler.is_dynamo_compiling()
        and not torch.is_grad_enabled()
        and all(gradient is None or type(gradient) is Tensor for gradient in (dout, dlse))
        and _is_plain(q, k, v, extras)
    ):
        return launches.backward(dout, dlse, q, k, v, out, lse, extras, ctx.options)
    # With create_graph this leaves a node, which says that there is no second derivative.
    *gradients, dsink = transforms.backward(dout, dlse, q, k, v, out, lse, *extras, *ctx.options)
    return *gradients, None if extras.sink is None else dsink


def _forward_kernel(q, k, v, *rest):
    return launches.forward(q, k, v, *_split(rest))


def _backward_kernel(dout, dlse, q, k, v, out, lse, *rest):
    *gradients, dsink = launches.backward(dout, dlse, q, k, v, out, lse, *_split(rest))
    return *gradients, q.new_empty(0) if dsink is None else dsink


def _forward_fake(q, k, v, *rest):
    extras, options = _split(rest)
    check_call(q, k, v, extras, options)
    *rows, heads, _ = q.shape
    lse_shape = (heads, *rows) if extras.cu_seqlens_q is not None else (rows[0], heads, rows[1])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*rows, heads, v.shape[-1])), q.new_empty(lse_shape, dtype=lse_dtype)


def _backward_fake(dout, dlse, q, k, v, out, lse, *rest):
    sink = _split(rest)[0].sink
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


for _device in ("CUDA", "CPU"):
    _library.impl("forward", _forward_kernel, _device)
    _library.impl("backward", _backward_kernel, _device)
torch.library.register_fake("flashtile::forward", _forward_fake, lib=_library)
torch.library.register_fake("flashtile::backward", _backward_fake, lib=_library)
torch.library.register_autograd(
    "flashtile::forward", _operator_backward, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd("flashtile::backward", transforms.refuse_second_derivative, lib=_library)
