"""flashtile as an implementation of torch's flash attention, below autograd, after :func:`register`.

torch keeps a registry of such implementations. An activated one replaces the ``aten`` kernels of
``torch.nn.attention.varlen`` and of the flash backend of ``scaled_dot_product_attention``, also within nested
tensors and torch's context parallelism. Autograd formulas, fake kernels for ``torch.compile`` and sharding
rules of DTensor remain torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.api.attention import attention
from flashtile.api.decode import flash_attn_with_kvcache
from flashtile.checks.arguments import ERRORS, renamed
from flashtile.checks.conversions import with_unit_stride
from flashtile.operators.dropout import draw_state
from flashtile.operators.gradients import attention_backward
from flashtile.torch_private import flash_implementations

NAMES = ("flashtile", "FA3", "FA4")
"""Names under which flashtile can be registered. The last two are those of torch's own implementations."""

_OF_ATEN = {
    "q": "query", "k": "key", "v": "value", "k_cache": "key", "v_cache": "value", "dout": "grad_out",
    "cu_seqlens_q": "cum_seq_q", "cu_seqlens_k": "cum_seq_k", "cache_seqlens": "seqused_k",
    "max_seqlen_q": "max_q", "max_seqlen_k": "max_k", "softmax_scale": "scale",
    "causal": "is_causal", "lse": "logsumexp",
}  # fmt: skip


def register(name: str = "flashtile") -> None:
    """Add flashtile to torch's registry of flash attention implementations. A second call changes nothing.

    After ``torch.nn.attention.activate_flash_attention_impl(name)``, flashtile computes
    ``F.scaled_dot_product_attention`` wherever torch chooses its flash backend (fp16 and bf16 on a GPU,
    without a mask). It also computes ``torch.nn.attention.varlen.varlen_attn``, including windows, dropout
    and paged keys and values. ``torch.nn.attention.restore_flash_attention_impl()`` deactivates it.

    Args:
        name: "flashtile". To replace one of torch's own implementations in code that activates it, use the
            name of that implementation, "FA3" or "FA4". Neither FlashAttention's package nor the GPU that it
            requires is needed then.

    Raises:
        ValueError: another ``name``.

    Examples:
        >>> import torch.nn.attention
        >>> from flashtile.integrations.torch import register, unregister
        >>> register()
        >>> "flashtile" in torch.nn.attention.list_flash_attention_impls()
        True
        >>> unregister()
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(map(repr, NAMES))}, got {name!r}")
    original = flash_implementations().get(name)
    if not isinstance(original, _Activation):
        torch.nn.attention.register_flash_attention_impl(name, register_fn=_Activation(original))


def unregister() -> None:
    """Undo :func:`register` for every name, and deactivate flashtile if it is active."""
    known = flash_implementations()
    active = torch.nn.attention.current_flash_attention_impl()
    for name, found in list(known.items()):
        if isinstance(found, _Activation):
            if name == active and found.is_active:
                torch.nn.attention.restore_flash_attention_impl()
            del known[name]
            if found.original is not None:
                known[name] = found.original


class _Activation:
    """The function that torch calls to activate flashtile.

    Attributes:
        original: the function registered before under the same name, or None. It may still be active.
        is_active: whether torch has called this function, and has not deactivated flashtile since.
    """

    def __init__(self, original: Callable[..., Any] | None) -> None:
        self.original = original
        self.is_active = False

    def __call__(self) -> _Activation:
        self._kernels, self.is_active = Kernels(), True
        return self

    def remove(self) -> None:
        """Restore torch's kernels. torch calls this method."""
        self._kernels.remove()
        self.is_active = False


class Kernels:
    """Registers flashtile's kernels for ``aten``'s operators, until :meth:`remove` is called.

    Args:
        dispatch_key: key of torch's dispatcher for which the kernels are registered.
    """

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        self._library: Any = torch.library.Library("aten", "IMPL", dispatch_key)
        for name, kernel in KERNELS.items():
            # torch 2.11 has no operator that writes into out.
            if hasattr(torch.ops.aten, name.partition(".")[0]):
                self._library.impl(name, kernel, dispatch_key)

    def remove(self) -> None:
        """Restore torch's kernels."""
        self._library = None


def _under_aten_names(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel, so that its errors name the arguments of ``aten``'s operators."""

    @functools.wraps(kernel)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return kernel(*arguments, **named)
        except ERRORS as error:
            raise renamed(error, _OF_ATEN) from None

    return call


@_under_aten_names
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``aten._flash_attention_forward``. Return (out, lse, rng_state); rng_state is (2,) int64.

    Masks are aligned to the bottom right, as in torch's own kernels.
    """
    if return_debug_mask:
        raise NotImplementedError(
            "return_debug_mask must be False while flashtile is the flash attention implementation: "
            "torch.nn.attention.restore_flash_attention_impl() restores torch's own"
        )
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    beyond = {"seqused_k": seqused_k, "alibi_slopes": alibi_slopes, "block_table": block_table}
    for name, given in beyond.items():
        if given is not None and learns:
            raise NotImplementedError(
                f"{name} must be None if query, key or value requires grad, got a tensor: "
                "aten._flash_attention_backward has no such argument"
            )
    options: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": _window(window_size_left, window_size_right),
        "alibi_slopes": alibi_slopes,
        "out": out,
    }
    drops = dropout_p > 0
    state = draw_state(query) if drops else query.new_empty(2, dtype=torch.int64)
    with torch.no_grad():  # torch handles autograd above this function
        if block_table is not None:
            if drops:
                raise NotImplementedError(f"dropout_p must be 0 with block_table, got {dropout_p}")
            if seqused_k is None and cum_seq_k is not None:
                seqused_k = cum_seq_k.diff()
            out, lse = flash_attn_with_kvcache(
                query, key, value, cache_seqlens=seqused_k, block_table=block_table, cu_seqlens_q=cum_seq_q,
                max_seqlen_q=max_q if cum_seq_q is not None else None, num_splits=num_splits or 0,
                return_softmax_lse=True, **options,
            )  # fmt: skip
        else:
            out, lse = attention(
                query, key, value, cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k,
                seqused_k=seqused_k, dropout_p=dropout_p, rng_state=state if drops else None,
                q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, return_lse=True,
                **options, **_longest(cum_seq_q, max_q, max_k),
            )  # fmt: skip
    return out, lse, state


def flash_forward(query: Tensor, *others: Any, **named: Any) -> tuple[Tensor, ...]:
    """Implement ``aten._flash_attention_forward`` and its overload ``quantized``.

    Tensors are (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with offsets.
    """
    out, lse, state = _attend(query, *others, **named)
    return _like(query, out), lse, *_states(query, state)


def flash_forward_into(out: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """Implement ``aten._flash_attention_forward_no_dropout_inplace``, which writes into ``out``."""
    dropout_p = arguments[7]
    if dropout_p:
        raise NotImplementedError(f"dropout_p must be 0 with out, got {dropout_p}")
    _, lse, _ = _attend(*arguments, **named, out=out)
    return lse


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    descales: tuple = (),
) -> tuple:
    """Implement ``aten._scaled_dot_product_flash_attention``.

    Tensors are (batch, heads, seqlen, head_dim).
    """
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    lengths = query.shape[2], key.shape[2]
    out, lse, state = _attend(
        q, k, v, None, None, *lengths, dropout_p, is_causal, return_debug_mask, *descales, scale=scale
    )
    return _like(query, out.transpose(1, 2)), lse, None, None, *lengths, *_states(query, state)


def sdpa_forward_quantized(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    *others: Any,
    **named: Any,
) -> tuple:
    """Implement ``aten._scaled_dot_product_flash_attention.quantized``."""
    return sdpa_forward(query, key, value, *others, **named, descales=(q_descale, k_descale, v_descale))


@_under_aten_names
def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """Implement ``aten._flash_attention_backward``."""
    q, k, v = (with_unit_stride(t) for t in (query, key, value))
    dq, dk, dv, _ = attention_backward(
        grad_out, q, k, v, out, logsumexp, cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k,
        softmax_scale=scale, causal=is_causal, window_size=_window(window_size_left, window_size_right),
        dropout_p=dropout_p, rng_state=rng_state.view(torch.int64) if dropout_p > 0 else None,
        **_longest(cum_seq_q, max_q, max_k),
    )  # fmt: skip
    return _like(query, dq), _like(key, dk), _like(value, dv)


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    *others: Any,
    **named: Any,
) -> tuple[Tensor, ...]:
    """Implement ``aten._scaled_dot_product_flash_attention_backward``."""
    transposed = [t.transpose(1, 2) for t in (grad_out, query, key, value, out)]
    gradients = flash_backward(*transposed, logsumexp, None, None, *others, **named)
    return tuple(_like(t, g.transpose(1, 2)) for t, g in zip((query, key, value), gradients, strict=True))


KERNELS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward.quantized": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention.quantized": sdpa_forward_quantized,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}
"""The kernel of each operator of ``aten``."""


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def _longest(cum_seq_q: Tensor | None, max_q: int, max_k: int) -> dict[str, Any]:
    """Return keywords with the maximum lengths for packed sequences, and no keywords for dense tensors."""
    return {} if cum_seq_q is None else {"max_seqlen_q": max_q, "max_seqlen_k": max_k}


def _states(query: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last three results of forward operators: rng_state, an unused tensor and a debug mask."""
    return state.view(torch.uint64), query.new_empty((), dtype=torch.uint64), query.new_empty(0)


def _like(given: Tensor, result: Tensor) -> Tensor:
    """Return ``result`` with the strides of ``torch.empty_like(given)``, which torch's compiler relies on.

    If the shapes differ, ``result`` is returned unchanged. This happens if values have another head size.
    """
    if result.shape != given.shape or result.stride() == given.stride():
        return result
    expected = torch.empty_like(given, dtype=result.dtype)
    return result if result.stride() == expected.stride() else expected.copy_(result)
