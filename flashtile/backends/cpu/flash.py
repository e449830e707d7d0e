"""torch's flash kernel for the CPU in this library's layout, on transposed views of q, k, v and out.

The kernel's causal mask is aligned to the top left. This equals bottom-right alignment only if there are as
many queries as keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.cpu.blocks import split

_forward = torch._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

CONVERTED_ELEMENTS = 2 * 1024 * 1024
"""Elements of k that are converted to another dtype at a time, 8 MiB in float32. The allocator then reuses
memory, which makes one bfloat16 query over 4096 keys 3x as fast (Zen 4)."""


def attend(
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse); q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, ...).

    Computes in ``dtype``; ``bias`` (1, heads_q or 1, seqlen_q, seqlen_k) of that dtype is added to scores.
    """
    given = q.dtype
    if given != dtype:
        batch, seqlen_k, heads_kv, head_dim = k.shape
        pairs = max(CONVERTED_ELEMENTS // (seqlen_k * head_dim), torch.get_num_threads())
        if batch * heads_kv > pairs:
            return _attend_by_pairs(pairs, dtype, q, k, v, causal, scale, bias)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out, lse = _forward(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, attn_mask=bias, scale=scale
    )
    # The kernel's layout makes the transposed result contiguous. It is detached because autograd forbids
    # in-place changes of a result that is a view.
    out = out.transpose(1, 2).detach()
    return (out if given == dtype else out.to(given)), lse.contiguous()


def attend_by_heads(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out, lse) without a mask; all tensors are (batch, heads, seqlen, head_dim) of one dtype."""
    out, lse = _forward(q, k, v, 0.0, False, scale=scale)
    return out, lse


def _attend_by_pairs(
    pairs: int,
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`attend` in several calls.

    Each call has at most ``pairs`` pairs of a sequence and a key/value head.
    """
    batch, seqlen_q, heads_q, _ = q.shape
    heads_kv = k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device="cpu")
    lse = torch.empty((batch, heads_q, seqlen_q), dtype=dtype, device="cpu")
    for b in split(range(batch), max(1, pairs // heads_kv)):
        for h in split(range(heads_kv), min(pairs, heads_kv)):
            sequences, heads = slice(b.start, b.stop), slice(h.start, h.stop)
            of_group = slice(h.start * heads_q // heads_kv, h.stop * heads_q // heads_kv)
            out[sequences, :, of_group], lse[sequences, of_group] = attend(
                dtype,
                q[sequences, :, of_group],
                k[sequences, :, heads],
                v[sequences, :, heads],
                causal,
                scale,
                bias if bias is None or bias.shape[1] == 1 else bias[:, of_group],
            )
    return out, lse


def differentiate(
    dtype: torch.dtype,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) from the inputs and results of :func:`attend`.

    The gradients are contiguous, in ``dtype`` or wider.
    """
    if q.dtype != dtype:
        dout, q, k, v, out = (t.to(dtype) for t in (dout, q, k, v, out))
    group = q.shape[2] // k.shape[2]
    if group == 1 or dtype.itemsize > 2:
        return _one_backward(dout, q, k, v, out, lse, causal, scale, bias)
    # The kernel sums dk and dv over the heads of a group in its own dtype, which is too coarse in 16 bits.
    # One call per head of a group costs as much in total, and the sums here are float32.
    dq = torch.empty_like(q)
    dk, dv = (t.new_zeros(t.shape, dtype=torch.float32) for t in (k, v))
    for head in range(group):
        of_head = slice(head, None, group)
        bias_of_head = bias if bias is None or bias.shape[1] == 1 else bias[:, of_head]
        dq[:, :, of_head], dk_term, dv_term = _one_backward(
            dout[:, :, of_head],
            q[:, :, of_head],
            k,
            v,
            out[:, :, of_head],
            lse[:, of_head],
            causal,
            scale,
            bias_of_head,
        )
        dk += dk_term
        dv += dv_term
    return dq, dk, dv


def _one_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    by_heads = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dq, dk, dv = _backward(*by_heads, lse, 0.0, causal, attn_mask=bias, scale=scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
