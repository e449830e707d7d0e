"""``flex_attention``: PyTorch's FlexAttention interface on flashtile's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashtile.api.attention import attention
from flashtile.checks.arguments import ERRORS, check_dense, named, renamed
from flashtile.checks.conversions import check_flag

KERNEL_OPTIONS = frozenset(
    (
        "BACKEND", "BLOCKS_ARE_CONTIGUOUS", "BLOCK_M", "BLOCK_M1", "BLOCK_M2", "BLOCK_N", "BLOCK_N1",
        "BLOCK_N2", "FORCE_USE_FLEX_ATTENTION", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "USE_TMA", "WRITE_DQ",
        "kpack", "matrix_instr_nonkdim", "num_stages", "num_warps", "waves_per_eu",
    )
)  # fmt: skip
"""Options of FlexAttention's kernels. The prefix ``fwd_`` or ``bwd_`` restricts an option to one pass."""

_ONE_BLOCK = (1 << 30, 1 << 30)
"""BLOCK_SIZE of FlexAttention's default block mask, which hides nothing and fits all lengths."""
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
    return_aux: Any = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Any]:
    """Compute ``torch.nn.attention.flex_attention.flex_attention`` with flashtile's kernels.

    ``torch.compile`` is not needed.

    Args:
        query: (batch, heads, seqlen_q, head_dim), any strides.
        key: (batch or 1, heads_kv, seqlen_k, head_dim). With batch 1, all sequences share keys and values.
        value: as key; its head_dim may differ.
        score_mod: ``score_mod(score, batch, head, q_idx, kv_idx)``; None leaves scores unchanged.
        block_mask: made by FlexAttention's or :func:`flashtile.masks.create_block_mask`; None hides nothing.
        scale: factor of the scores; None means ``head_dim ** -0.5``.
        enable_gqa: allow more query heads than key/value heads. The number of query heads must be a multiple
            of the number of key/value heads.
        return_lse: also return the natural log-sum-exp, (batch, heads, seqlen_q) float32.
        kernel_options: tuning options of FlexAttention's kernels, which are ignored.
        return_aux: an ``AuxRequest`` of FlexAttention. Only its ``lse`` is supported.
        backend: as for :func:`flashtile.attention`.

    Returns:
        out (batch, heads, seqlen_q, head_dim of value). With ``return_lse``, (out, lse). With ``return_aux``,
        (out, FlexAttention's ``AuxOutput``).

    Raises:
        TypeError, ValueError: an argument is invalid as in :func:`flashtile.attention`, the numbers of heads
            differ without ``enable_gqa``, or ``return_lse`` and ``return_aux`` are both given.
        NotImplementedError: an argument is not supported by :func:`flashtile.attention`, ``kernel_options``
            has an option that FlexAttention does not have, or ``return_aux`` requests ``max_scores``.

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
    _check_kernel_options(kernel_options)
    _check_return_aux(return_aux, return_lse)
    if key.shape[0] == value.shape[0] == 1:
        key, value = (tensor.expand(query.shape[0], -1, -1, -1) for tensor in (key, value))
    if getattr(block_mask, "BLOCK_SIZE", None) == _ONE_BLOCK:
        block_mask = None
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
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _check_kernel_options(options: Any) -> None:
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"kernel_options must be a dict or None, got {named(options)}")
    for option in options or ():
        if str(option).removeprefix("fwd_").removeprefix("bwd_") not in KERNEL_OPTIONS:
            raise NotImplementedError(f"kernel_options must be options of FlexAttention, got {option!r}")


def _check_return_aux(request: Any, return_lse: bool) -> None:
    if request is None:
        return
    if not hasattr(request, "lse") or not hasattr(request, "max_scores"):
        raise TypeError(f"return_aux must be an AuxRequest of FlexAttention or None, got {named(request)}")
    if return_lse:
        raise ValueError("return_lse must be False with return_aux, got True")
    if request.max_scores:
        raise NotImplementedError("return_aux must not request max_scores, got max_scores=True")
