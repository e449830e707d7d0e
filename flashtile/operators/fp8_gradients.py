"""Gradients of attention in FP8: a backward pass in 16 bits, and identity through the quantiser.

The forward pass keeps the e4m3 operands with their scales, out and lse. The backward pass dequantises the
operands, rounds them to the dtype of out, and calls the backward pass of attention with this out and lse.
NVIDIA's TransformerEngine divides the work in the same way under ``NVTE_FP8_DPA_BWD=0``.

Quantising counts as the identity (straight-through estimator, Bengio et al. 2013, arXiv:1308.3432). The
gradient of the dequantised numbers is therefore used as the gradient of the tensor before quantisation.
Rotary embedding is differentiated. The Hadamard transform cancels, because dequantising undoes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.checks.fp8 import check_attend
from flashtile.op.refusals import refuse_tangents, refuse_transformed_gradients, transforming
from flashtile.operators.attention import BACKWARD
from flashtile.operators.fp8 import ATTEND, NO_GRADIENT, refuse_gradient
from flashtile.operators.gradients import batched, forward
from flashtile.problems.attention import OptionalTensors, Options
from flashtile.problems.common import shared_fields
from flashtile.problems.fp8 import AttendOptions, AttendTensors, QuantizeOptions, QuantizeTensors
from flashtile.problems.quantized import Quantized
from flashtile.reference.decode import turn
from flashtile.reference.fp8 import descaled

Operand = Quantized | Tensor
"""A quantised operand, or row-major e4m3 values whose scales are among ``AttendTensors``."""


def attend(
    operands: tuple[Operand, Operand, Operand], tensors: AttendTensors, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of q, k and v in e4m3. The result is differentiable.

    The gradient of a Quantized ``x`` goes to the tensor ``x.source``. The gradient of an e4m3 tensor goes to
    the tensor itself. The sink also gets a gradient.
    """
    sources = tuple(x.source if isinstance(x, Quantized) else x for x in operands)
    refuse_tangents("qkv", sources)
    if torch.is_grad_enabled() and _learns((*sources, *tensors)):
        if transforming():
            refuse_transformed_gradients(NO_GRADIENT, (*"qkv", "sink"), (*sources, tensors.sink))
        for name, tensor in tensors._asdict().items():
            if name != "sink" and tensor is not None:
                refuse_gradient(name, tensor)
        given = tuple(x if isinstance(x, Quantized) else x.detach() for x in operands)
        return Fp8Attention.apply(given, tensors, options, *sources, tensors.sink)
    return ATTEND(tuple(map(_values_of, operands)), tensors, options)


def attend_descaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descales: tuple[Tensor | None, ...],
    extras: OptionalTensors,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) for row-major e4m3 tensors with FlashAttention-3's scales (batch, heads_kv).

    ``descales`` are those of q, k and v, or () if there are none.

    out is bfloat16. The gradients are those of the stored e4m3 numbers, before multiplication by their
    scales. Autograd rounds them to e4m3, unless the tensor's ``grad_dtype`` is another dtype.

    FP8 kernels hide keys only by a window, and have no ``seqused_q``. Other calls are computed in bfloat16,
    on the tensors multiplied by their scales.
    """
    descales = descales or (None, None, None)
    tensors = AttendTensors(*descales, **shared_fields(AttendTensors, extras))
    stored = AttendOptions(
        **shared_fields(AttendOptions, options), out_dtype=torch.bfloat16, head_dim=q.shape[-1]
    )
    if options.masking.beyond_window is None and extras.seqused_q is None:
        return attend((q, k, v), tensors, stored)
    check_attend(q, k, v, tensors, stored)
    ATTEND.check_values((q, k, v), tensors, stored)
    offsets = extras.cu_seqlens_q, extras.cu_seqlens_k, extras.cu_seqlens_k
    given = zip((q, k, v), descales, offsets, strict=True)
    q, k, v = (descaled(x.float(), descale, offset).to(torch.bfloat16) for x, descale, offset in given)
    return forward(q, k, v, extras, options)


def _learns(sources: tuple) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in sources)


def _values_of(operand: Operand) -> Tensor:
    return operand.values if isinstance(operand, Quantized) else operand


class Fp8Attention(torch.autograd.Function):
    """The autograd node of attention in FP8."""

    @staticmethod
    def forward(ctx: Any, operands, tensors, options, q_source, k_source, v_source, sink):
        """Compute (out, lse).

        ``operands`` and ``tensors`` also contain the source tensors and ``sink``. These are passed again as
        separate arguments, because autograd sees only tensors that are arguments themselves.
        """
        values = tuple(map(_values_of, operands))
        out, lse = ATTEND(values, tensors, options)
        scales = [
            x.scales if isinstance(x, Quantized) else descale
            for x, descale in zip(operands, tensors.scales, strict=True)
        ]
        ctx.save_for_backward(*values, *scales, out, lse, *tensors.extras)
        ctx.fields = [_fields_of(x) if isinstance(x, Quantized) else None for x in operands]
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout, dlse):
        compiling = torch.compiler.is_dynamo_compiling()
        if torch.is_grad_enabled() and not compiling:
            raise NotImplementedError(
                "create_graph must be False: gradients of attention in FP8 have no derivative (those of "
                "flashtile.attention have)"
            )
        if dout is None and dlse is None:
            return (None,) * 7
        saved = ctx.saved_tensors  # read once, as checkpointing requires
        values, scales, (out, lse), extras = saved[:3], saved[3:6], saved[6:8], OptionalTensors(*saved[8:])
        offsets = extras.cu_seqlens_q, extras.cu_seqlens_k, extras.cu_seqlens_k
        sink = extras.sink
        if sink is not None:
            extras = extras._replace(sink=sink.float())
        with torch.no_grad(), torch.autocast(out.device.type, enabled=False):
            operands = map(_dequantized, ctx.fields, values, scales, offsets)
            given = (dout, dlse, *(x.to(out.dtype).contiguous() for x in operands), out, lse)
        run = BACKWARD.traced if compiling or batched(dout) or batched(dlse) else BACKWARD
        gradients = run(given, extras, ctx.options.shared)
        found = [
            descaled(dx.float(), scale, offset) if fields is None else dx
            for dx, fields, scale, offset in zip(gradients, ctx.fields, scales, offsets, strict=False)
        ]
        found.append(gradients[3] if sink is None else gradients[3].to(sink.dtype))
        learns = ctx.needs_input_grad[3:]
        return None, None, None, *(dx if wanted else None for dx, wanted in zip(found, learns, strict=True))


def _fields_of(x: Quantized) -> tuple:
    """Return the fields of ``x`` from ``role`` to ``dtype``, which hold no tensor."""
    return x.role, x.method, x.seed, x.shape, x.dtype


def _dequantized(
    fields: tuple | None, values: Tensor, scales: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    if fields is None:
        return descaled(values.float(), scales, cu_seqlens)
    assert scales is not None
    return Quantized(values, scales, *fields, cu_seqlens).dequantize()  # type: ignore[call-arg]


class StraightThrough(torch.autograd.Function):
    """Return x, as the tensor that gets the gradient of a Quantized.

    This gradient is rotated back by the rotary embedding, and is 0 for unused rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensors: QuantizeTensors, options: QuantizeOptions) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.options = options
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx):
        tensors = QuantizeTensors(*ctx.saved_tensors)
        cu_seqlens, seqused, cos, sin, offsets, _ = tensors
        if seqused is None and cos is None:
            return dx, None, None
        rows = dx.shape[0] if cu_seqlens is not None else dx.shape[1]
        place = torch.arange(rows, device=dx.device)
        sequence = torch.arange(1 if cu_seqlens is not None else len(dx), device=dx.device)[:, None]
        if cu_seqlens is not None:
            sequence = torch.searchsorted(cu_seqlens[1:], place, right=True)
            sequence = sequence.clamp_max(max(cu_seqlens.shape[0] - 2, 0))
            place = place - cu_seqlens[sequence]
        if cos is not None and sin is not None:
            position = place + ctx.options.rotary_offset + (0 if offsets is None else offsets[sequence])
            at = position.clamp(0, cos.shape[0] - 1).expand(dx.shape[:-2])
            dx = turn(dx, cos[at].unsqueeze(-2), -sin[at].unsqueeze(-2), ctx.options.rotary_interleaved)
        if seqused is not None:
            dx = dx.masked_fill((place >= seqused[sequence]).expand(dx.shape[:-2])[..., None, None], 0.0)
        return dx, None, None
