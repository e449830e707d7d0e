"""``flash_attn.flash_attn_interface``: the public functions, and FlashAttention's functions without autograd.

ring-flash-attention and other libraries for context parallelism call the functions without autograd. The lse
of a row without keys is -inf, as in FlashAttention-3.

S_dmask is exp(score - maximum of the row), negative for dropped probabilities. FlashAttention-2 returns the
same, and its tests normalise it. The functions of ``flashtile`` return normalised probabilities instead.
FlashAttention-2 subtracts the maximum of a block of keys, whose size its :func:`_get_block_size_n` returns.
Here the block is the whole row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.api import attention as functions
from flashtile.api.decode import flash_attn_with_kvcache
from flashtile.api.probabilities import signed_probabilities
from flashtile.checks.arguments import check_dense
from flashtile.checks.conversions import as_int, as_masking, as_offset_pair, make_options
from flashtile.operators.dropout import draw_state
from flashtile.operators.gradients import attention_backward
from flashtile.problems.attention import OptionalTensors
from flashtile.problems.common import MAX_LENGTH

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

USE_TRITON_ROCM = False
"""Whether FlashAttention-2 would call its Triton kernels for AMD's GPUs."""


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Return the number of keys over which FlashAttention-2 takes the maximum that S_dmask subtracts.

    flashtile takes the maximum of the whole row, so the result is the maximum length of a row.
    """
    return MAX_LENGTH


def _unnormalised(signed: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide each row of signed probabilities by its largest magnitude, and round to ``dtype``.

    The result is exp(score - maximum of the row), negative where dropout drops the probability.
    """
    largest = signed.abs().amax(-1, keepdim=True) if signed.shape[-1] else signed
    return torch.where(largest > 0, signed / largest, 0.0).to(dtype)


def _with_unnormalised(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` and applies :func:`_unnormalised` to its S_dmask."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        results = function(*arguments, **named)
        if isinstance(results, tuple) and len(results) == 3 and results[2] is not None:
            return *results[:2], _unnormalised(results[2], results[0].dtype)
        return results

    call.__module__ = __name__
    return call


flash_attn_func = _with_unnormalised(functions.flash_attn_func)
flash_attn_kvpacked_func = _with_unnormalised(functions.flash_attn_kvpacked_func)
flash_attn_qkvpacked_func = _with_unnormalised(functions.flash_attn_qkvpacked_func)
flash_attn_varlen_func = _with_unnormalised(functions.flash_attn_varlen_func)
flash_attn_varlen_kvpacked_func = _with_unnormalised(functions.flash_attn_varlen_kvpacked_func)
flash_attn_varlen_qkvpacked_func = _with_unnormalised(functions.flash_attn_varlen_qkvpacked_func)

Results = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""(out, softmax_lse, S_dmask, rng_state). S_dmask and rng_state are None without dropout.

S_dmask is also None unless it is requested.
"""


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> Results:
    return _forward(
        q, k, v, return_softmax, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Results:
    """Compute attention over packed sequences, or over the pages of a KV cache if ``block_table`` is given.

    Raises:
        RuntimeError: ``num_splits`` is above 1. FlashAttention-2 raises the same error.
    """
    if as_int("num_splits", num_splits) > 1:
        raise RuntimeError(f"num_splits > 1 is not supported: expected 0 or 1, got {num_splits}")
    if leftpad_k is not None:
        raise NotImplementedError(
            "leftpad_k must be None, got a tensor: use cache_leftpad of flash_attn_with_kvcache"
        )
    window_size = (window_size_left, window_size_right)
    if block_table is None:
        return _forward(
            q, k, v, return_softmax, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_k=seqused_k, dropout_p=dropout_p,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes,
        )  # fmt: skip
    with torch.no_grad():
        out, lse = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes, block_table=block_table, seqused_k=seqused_k, return_lse=True,
        )  # fmt: skip
    return out, lse, None, None


@torch.no_grad()
def _forward(q: Tensor, k: Tensor, v: Tensor, return_softmax: bool, **named: Any) -> Results:
    """Call :func:`flashtile.attention` with the arguments ``named``, for dense or packed sequences.

    With dropout, the results include the seed and offset of the dropout mask, and S_dmask if
    ``return_softmax`` is True.
    """
    rng_state = draw_state(q) if named["dropout_p"] else None
    out, lse = functions.attention(q, k, v, **named, rng_state=rng_state, return_lse=True)
    if not return_softmax or rng_state is None:
        return out, lse, None, rng_state
    names = "max_seqlen_q", "max_seqlen_k", "softmax_scale", "softcap", "dropout_p"
    own: dict[str, Any] = {name: named.get(name) for name in names}
    options = make_options(as_masking(named["causal"], named["window_size"]), **own)
    cu_seqlens_q, cu_seqlens_k = as_offset_pair(named.get("cu_seqlens_q"), named.get("cu_seqlens_k"))
    extras = OptionalTensors(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=named.get("seqused_k"),
        alibi_slopes=named["alibi_slopes"],
        rng_state=rng_state,
    )
    signed = signed_probabilities(q, k, v, extras, options)
    return out, lse, _unnormalised(signed, out.dtype), rng_state


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:
    """Write the gradients into dq, dk and dv. Pass None for a gradient that is not needed.

    Unlike FlashAttention's function, this one does not return ``softmax_d``.
    """
    _backward(
        (dq, dk, dv), dout, q, k, v, out, softmax_lse, softmax_scale=softmax_scale, causal=causal,
        window_size=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
        dropout_p=dropout_p, rng_state=rng_state, deterministic=deterministic,
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    """Write the gradients of packed sequences into dq, dk and dv, as :func:`_flash_attn_backward`."""
    _backward(
        (dq, dk, dv), dout, q, k, v, out, softmax_lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale, causal=causal,
        window_size=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
        dropout_p=dropout_p, rng_state=rng_state, deterministic=deterministic,
    )  # fmt: skip


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _backward(
    buffers: tuple[Tensor | None, ...],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *saved: Tensor,
    **named: Any,
) -> None:
    for name, tensor, buffer in zip("qkv", (q, k, v), buffers, strict=True):
        if buffer is None:
            continue
        check_dense(name, tensor)
        check_dense(f"d{name}", buffer)
        if buffer.shape != tensor.shape:
            raise ValueError(
                f"d{name} must have the shape of {name}, {tuple(tensor.shape)}, got {tuple(buffer.shape)}"
            )
    gradients: tuple[Any, ...] = attention_backward(dout, q, k, v, *saved, **named)
    for gradient, buffer in zip(gradients, buffers, strict=False):
        if buffer is not None:
            buffer.copy_(gradient)
