"""``torch.library`` operators: ``flashtile::forward`` and ``flashtile::backward``.

They give the functions a fake kernel (``torch.compile``, ``torch.export``), an autograd formula and a CUDA-graph
safe body. An eager call that needs no gradient skips the dispatcher: it costs more host time than the launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile import launches
from flashtile.problem import Options, check_call

_ARGUMENTS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? alibi_slopes, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "float? softmax_scale, bool causal, SymInt window_left, SymInt window_right, float softcap, bool deterministic, "
    "str? backend"
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
    if _is_plain_inference(q, k, v):
        return launches.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options)
    if not torch.compiler.is_compiling():
        check_call(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options)
    return torch.ops.flashtile.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *options)


def _is_plain_inference(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Nothing but this call would see the operator: no tracing, no mode, no tensor subclass, no gradient."""
    if torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    return (
        type(q) is type(k) is type(v) is Tensor
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _forward_kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *options):
    return launches.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, Options(*options))


def _backward_kernel(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *options):
    return launches.backward(
        dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, Options(*options)
    )


for _device in ("CUDA", "CPU"):
    _library.impl("forward", _forward_kernel, _device)
    _library.impl("backward", _backward_kernel, _device)


@torch.library.register_fake("flashtile::forward", lib=_library)
def _forward_fake(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *options):
    check_call(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, Options(*options))
    *rows, heads, _ = q.shape
    lse_shape = (heads, *rows) if cu_seqlens_q is not None else (rows[0], heads, rows[1])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*rows, heads, v.shape[-1])), q.new_empty(lse_shape, dtype=lse_dtype)


@torch.library.register_fake("flashtile::backward", lib=_library)
def _backward_fake(dout, dlse, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *options = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _autograd(ctx, dout, dlse):
    no_gradient = (None,) * (3 + len(ctx.options))
    if dout is None and dlse is None:
        return (None, None, None, *no_gradient)
    gradients = torch.ops.flashtile.backward(dout, dlse, *ctx.saved_tensors, *ctx.options)
    return (*gradients, *no_gradient)


torch.library.register_autograd("flashtile::forward", _autograd, setup_context=_setup_context, lib=_library)


