"""The backward pass of attention as a function, for callers that keep out and lse, such as ring attention."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.checks.attention import check_call, check_results
from flashtile.checks.conversions import as_masking, as_offset_pair, make_options
from flashtile.operators.attention import BACKWARD, FORWARD
from flashtile.problems.attention import NO_EXTRAS, OptionalTensors


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
