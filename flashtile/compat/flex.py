"""``flex_attention``: PyTorch's FlexAttention interface on flashtile's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashtile.api.attention import attention
from flashtile.checks.arguments import ERRORS, check_dense, named, renamed
from flashtile.checks.conversions import check_flag

_OF_FLEX = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute ``torch.nn.attention.flex_attention.flex_attention`` with flashtile's kernels.

    ``torch.compile`` is not needed.

    Args:
        query: (batch, heads, seqlen_q, head_dim), any strides.
        key: (batch, heads_kv, seqlen_k, head_dim).
        value: as key; its head_dim may differ.
        score_mod: ``score_mod(score, batch, head, q_idx, kv_idx)``; None leaves scores unchanged.
        block_mask: made by FlexAttention's or :func:`flashtile.masks.create_block_mask`; None hides nothing.
        scale: factor of the scores; None means ``head_dim ** -0.5``.
        enable_gqa: allow more query heads than key/value heads, as a multiple.
        return_lse: also return the natural log-sum-exp, (batch, heads, seqlen_q) float32.
        kernel_options: must be None or empty.
        backend: as for :func:`flashtile.attention`.

    Returns:
        out (batch, heads, seqlen_q, head_dim of value). With ``return_lse``, (out, lse).

    Raises:
        TypeError, ValueError: as :func:`flashtile.attention`, or numbers of heads differ without
            ``enable_gqa``.
        NotImplementedError: as :func:`flashtile.attention`, or ``kernel_options`` is not empty.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 2, 128, 16).unbind()  # (batch, heads, seqlen, head_dim)
        >>> def relative(score, batch, head, q_idx, kv_idx):
        ...     return score + (q_idx - kv_idx)
        >>> flashtile.flex_attention(query, key, value, score_mod=relative).shape
        torch.Size([1, 2, 128, 16])
    """
    check_flag("enable_gqa", enable_gqa)
    check_flag("return_lse", return_lse)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_dense(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have shape (batch, heads, seqlen, head_dim), got {tuple(tensor.shape)}"
            )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"enable_gqa must be True for {query.shape[1]} query and {key.shape[1]} key heads, got False"
        )
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise TypeError(f"kernel_options must be a dict or None, got {named(kernel_options)}")
    if kernel_options:
        raise NotImplementedError(f"kernel_options must be None or empty, got {kernel_options}")
    try:
        out, lse = attention(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            softmax_scale=scale,
            score_mod=score_mod,
            block_mask=block_mask,
            return_lse=True,
            backend=backend,
        )
    except ERRORS as error:
        raise renamed(error, _OF_FLEX) from error.__cause__
    out = out.transpose(1, 2)
    return (out, lse) if return_lse else out
