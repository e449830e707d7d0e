"""``torch.library`` operators: ``flashtile::forward`` and ``flashtile::backward``.

They give the functions a fake kernel (``torch.compile``, ``torch.export``) and an autograd formula. An eager
call that nobody watches skips the dispatcher, whose host time exceeds the launch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashtile import launches, transforms
from flashtile.problem import Options, check_call, check_types

_ARGUMENTS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? alibi_slopes, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? softmax_scale, bool causal, "
    "SymInt window_left, SymInt window_right, float softcap, bool deterministic, str? backend"
)

_library = torch.library.Library("flashtile", "DEF")
_library.define(f"forward(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(
    "backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    alibi_slopes: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call, by the shortest path that is right for it."""
    if torch.compiler.is_dynamo_compiling():
        # What no graph can hold; the fake kernel checks the rest.
        check_types(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes)
        _refuse_forward_mode(q, k, v)
        return torch.ops.flashtile.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *options)
    if _is_plain(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return FlashAttention.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options)
        return launches.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options)
    check_call(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options)
    _refuse_forward_mode(q, k, v)
    return transforms.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *options)


def _is_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    alibi_slopes: Tensor | None,
) -> bool:
    """Nothing but this call would see the operator: no trace, mode, transform, tangent or subclass."""
    return (
        type(q) is type(k) is type(v) is Tensor
        and (q.is_cuda or q.is_cpu)
        and (alibi_slopes is None or (type(alibi_slopes) is Tensor and not alibi_slopes.requires_grad))
        and (cu_seqlens_q is None or type(cu_seqlens_q) is type(cu_seqlens_k) is Tensor)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """Without a rule for tangents the dispatcher would drop them, as if the derivative were zero."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError("q, k and v must carry no tangents: forward-mode AD is not implemented")


class FlashAttention(torch.autograd.Function):
    """The autograd node of a plain eager call: the operator's own formula at an eighth of its host time."""

    @staticmethod
    def forward(ctx: Any, q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options):
        out, lse = launches.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options)
        _save(ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout, dlse):
        return (*_gradients(ctx, dout, dlse), None, None, None, None)


def _setup_context(ctx, inputs, output):
    q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *options = inputs
    _save(ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, Options(*options), *output)


def _operator_backward(ctx, dout, dlse):
    return (*_gradients(ctx, dout, dlse), *(None,) * (3 + len(ctx.options)))


def _save(ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options, out, lse):
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse):
    if dout is None and dlse is None:
        return None, None, None
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes = ctx.saved_tensors
    if (
        not torch.compiler.is_dynamo_compiling()
        and not torch.is_grad_enabled()
        and all(gradient is None or type(gradient) is Tensor for gradient in (dout, dlse))
        and _is_plain(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes)
    ):
        return launches.backward(
            dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, ctx.options
        )
    # With create_graph this leaves a node, which says that there is no second derivative.
    return transforms.backward(
        dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *ctx.options
    )


def _forward_kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *options):
    return launches.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, Options(*options))


def _backward_kernel(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *options):
    return launches.backward(
        dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, Options(*options)
    )


def _forward_fake(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *options):
    check_call(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, Options(*options))
    *rows, heads, _ = q.shape
    lse_shape = (heads, *rows) if cu_seqlens_q is not None else (rows[0], heads, rows[1])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*rows, heads, v.shape[-1])), q.new_empty(lse_shape, dtype=lse_dtype)


def _backward_fake(dout, dlse, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


for _device in ("CUDA", "CPU"):
    _library.impl("forward", _forward_kernel, _device)
    _library.impl("backward", _backward_kernel, _device)
torch.library.register_fake("flashtile::forward", _forward_fake, lib=_library)
torch.library.register_fake("flashtile::backward", _backward_fake, lib=_library)
torch.library.register_autograd(
    "flashtile::forward", _operator_backward, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd("flashtile::backward", transforms.refuse_second_derivative, lib=_library)
