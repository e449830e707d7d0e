"""torch's flash kernel for the CPU in this library's layout, on transposed views of q, k, v and out.

The kernel's causal mask is aligned to the top left. This equals bottom-right alignment only if there are as
many queries as keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.cpu.blocks import split
from flashtile.torch_private import cpu_flash_backward, cpu_flash_forward

CONVERTED_ELEMENTS = 2 * 1024 * 1024
"""Elements of k that are converted to another dtype at a time, 8 MiB in float32. The allocator then reuses
memory, which makes one bfloat16 query over 4096 keys 3x as fast (Zen 4)."""

NARROW_TILE = 64
"""At least twice the elements of a vector register. Rows that see as many keys never lose NaN."""


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
        q, k, v = _converted(dtype, q, k, v)
    # The kernel allocates out with the order of q's strides, so a contiguous q makes out contiguous. Rows of
    # q that overlap would even give out a last stride that the kernel ignores.
    q, k, v = q.contiguous().transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = _forward(q, k, v, causal, scale, bias)
    # It is detached because autograd forbids in-place changes of a result that is a view.
    out = out.transpose(1, 2).detach()
    return (out if given == dtype else out.to(given)), lse.contiguous()


def attend_by_heads(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out, lse) without a mask; all tensors are (batch, heads, seqlen, head_dim) of one dtype."""
    return _forward(q, k, v, False, scale)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Call the kernel. All tensors are (batch, heads, seqlen, head_dim) of one dtype."""
    out, lse = cpu_flash_forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if (causal or bias is not None or k.shape[2] < NARROW_TILE) and not lse.all():
        _restore(out, lse, q, k, causal, scale, bias)
    return out, lse


def _restore(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, causal: bool, scale: float, bias: Tensor | None
) -> None:
    """Correct the rows, in place, in which the kernel found no score above -inf.

    When the kernel looks for the largest score, it leaves out NaN in what is left over after the last full
    vector register. A row of NaN then gets out and lse 0, as a row without visible keys does. A row whose lse
    is 0 for another reason stays.
    """
    group = q.shape[1] // k.shape[1]
    for b, h in (lse == 0).any(-1).nonzero().tolist():
        rows = (lse[b, h] == 0).nonzero()[:, 0]
        scores = (q[b, h, rows].to(lse.dtype) @ k[b, h // group].to(lse.dtype).mT) * scale
        if bias is not None:
            scores += bias[0, h % bias.shape[1], rows]
        if causal:
            scores.masked_fill_(torch.arange(k.shape[2], device=rows.device) > rows[:, None], -torch.inf)
        exact = scores.logsumexp(-1)
        lse[b, h, rows] = torch.where(exact.isfinite(), 0.0, exact)
        out[b, h, rows] = torch.where(exact.isnan()[:, None], exact[:, None].to(out.dtype), out[b, h, rows])


def _converted(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Return contiguous copies in ``dtype``.

    Copies that keep the order of strides would not have stride 1 in the last dimension if rows overlap.
    """
    return [t.to(dtype, memory_format=torch.contiguous_format) for t in tensors]


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
        dout, q, k, v, out = _converted(dtype, dout, q, k, v, out)
    group = q.shape[2] // k.shape[2]
    if group == 1 or dtype.itemsize > 2:
        return _one_backward(dout, q, k, v, out, lse, causal, scale, bias)
    # The kernel sums dk and dv over the heads of a group in its own dtype, which is too coarse in 16 bits.
    # One call per head of a group costs as much in total, and the sums here are float32.
    dq = q.new_empty(q.shape)
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
    dq, dk, dv = cpu_flash_backward(*by_heads, lse, 0.0, causal, attn_mask=bias, scale=scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
