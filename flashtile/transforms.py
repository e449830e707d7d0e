"""The operators under ``torch.func``'s transforms (grad, vmap, jacrev and what is made of them).

A transform asks for its own form of ``autograd.Function`` and for a batching rule: the samples that vmap maps
over become batches of one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """``flashtile::forward``, under whatever transforms are active."""
    if not _transforming():
        return torch.ops.flashtile.forward(*arguments)
    return _Forward.apply(*arguments)


def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``flashtile::backward``, under whatever transforms are active."""
    if not _transforming():
        return torch.ops.flashtile.backward(*arguments)
    return _Backward.apply(*arguments)


def _transforming() -> bool:
    if torch.compiler.is_dynamo_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def refuse_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError("q, k and v have first derivatives only: the backward is not differentiable")


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments):
        return torch.ops.flashtile.forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *options = inputs
        ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, alibi_slopes)
        ctx.options = options

    @staticmethod
    def backward(ctx: Any, dout, dlse):
        no_gradients = (None,) * (3 + len(ctx.options))
        return (*backward(dout, dlse, *ctx.saved_tensors, *ctx.options), *no_gradients)

    @staticmethod
    def vmap(info, in_dims, q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *options):
        _refuse_varlen(cu_seqlens_q)
        samples = info.batch_size
        q, k, v = (_samples_first(t, dim, samples) for t, dim in zip((q, k, v), in_dims[:3], strict=True))
        batch = q.shape[1]
        slopes = _slopes_by_batch(alibi_slopes, in_dims[5], samples, batch)
        results = forward(*(t.flatten(0, 1) for t in (q, k, v)), None, None, slopes, *options)
        return tuple(t.unflatten(0, (samples, batch)) for t in results), (0, 0)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments):
        return torch.ops.flashtile.backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        """Nothing is kept: there is no second derivative."""

    backward = staticmethod(refuse_second_derivative)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        tensors, (cu_seqlens_q, _, alibi_slopes), options = arguments[:7], arguments[7:10], arguments[10:]
        _refuse_varlen(cu_seqlens_q)
        samples = info.batch_size
        flat = []
        for tensor, dim in zip(tensors, in_dims[:7], strict=True):
            if tensor is not None:  # dout or dlse may be
                tensor = _samples_first(tensor, dim, samples)
                batch = tensor.shape[1]
                tensor = tensor.flatten(0, 1)
            flat.append(tensor)
        slopes = _slopes_by_batch(alibi_slopes, in_dims[9], samples, batch)
        results = backward(*flat, None, None, slopes, *options)
        return tuple(t.unflatten(0, (samples, batch)) for t in results), (0, 0, 0)


def _refuse_varlen(cu_seqlens_q: Tensor | None) -> None:
    if cu_seqlens_q is not None:
        raise NotImplementedError(
            "cu_seqlens_q must be None under vmap, got a tensor: put the sequences of all samples in one call"
        )


def _samples_first(tensor: Tensor, dim: int | None, samples: int) -> Tensor:
    """The mapped dimension in front; a tensor that is not mapped is the same for each sample."""
    return tensor.expand(samples, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _slopes_by_batch(alibi_slopes: Tensor | None, dim: int | None, samples: int, batch: int) -> Tensor | None:
    """(heads,) as it is if all samples share it, else (samples * batch, heads)."""
    if alibi_slopes is None or (dim is None and alibi_slopes.dim() == 1):
        return alibi_slopes
    slopes = _samples_first(alibi_slopes, dim, samples)
    if slopes.dim() == 2:
        slopes = slopes[:, None].expand(-1, batch, -1)
    return slopes.flatten(0, 1)
