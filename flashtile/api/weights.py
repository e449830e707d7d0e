"""Attention weights for inspection, from q, k and the log-sum-exp of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

from torch import Tensor

from flashtile.checks.attention import check_with_functions
from flashtile.checks.conversions import (
    as_form,
    as_masking,
    as_operands,
    make_options,
    optional_tensors,
    refuse_unknown,
)
from flashtile.operators.weights import weights_of


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    form: Literal["full", "columns"] | int = "full",
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | Any:
    """Return the weights of :func:`flashtile.attention`, their column sums, or the largest of each row.

    Weights are the probabilities that multiply v, before dropout. They have no gradient: a backward pass
    through them raises NotImplementedError. With a sink, which ``lse`` includes, a row sums to less than 1.

    Args:
        q, k: as for :func:`flashtile.attention`.
        lse: the log-sum-exp that a call of :func:`flashtile.attention` returned (``return_lse=True``).
        form: "full" for every weight; "columns" for the sum of each key's weights over all rows of a head,
            which cache eviction policies use (H2O, Zhang et al. 2023, arXiv:2306.14048); an int from 1 to 128
            for that many of the largest in each row. The memory for "columns" or an int grows only linearly
            with the sequence lengths.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k: those of the call that
            gave lse.
        softmax_scale, causal, window_size, attention_chunk, softcap, alibi_slopes: those of that call.
        mask, key_padding_mask, bias, score_mod, mask_mod, block_mask, backend: those of that call.

    Returns:
        "full": (batch, heads_q, seqlen_q, seqlen_k) in q's dtype; packed sequences are padded with zeros to
        the longest. "columns": (batch, heads_q, seqlen_k), or (heads_q, total_k) with cu_seqlens, float32
        (float64 for float64 inputs). An int: :class:`flashtile.operators.weights.TopWeights`. A key that a
        row does not see has weight 0.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`flashtile.attention`; for an unknown ``form``;
            for an ``lse`` of another shape or dtype.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 128, 4, 64).unbind()  # each (batch, seqlen, heads, head_dim)
        >>> out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
        >>> weights = flashtile.attention_weights(q, k, lse, causal=True)
        >>> weights.shape
        torch.Size([1, 4, 128, 128])
        >>> torch.testing.assert_close((weights @ v.transpose(1, 2)).transpose(1, 2), out)
        >>> flashtile.attention_weights(q, k, lse, 8, causal=True).indices.shape
        torch.Size([1, 4, 128, 8])
    """
    if unknown:
        refuse_unknown("attention_weights", unknown)
    normalised = as_form("form", form)
    options = make_options(
        as_masking(causal, window_size, attention_chunk=attention_chunk),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        backend=backend,
    )
    extras = optional_tensors(
        q, k, options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
        seqused_k=seqused_k, alibi_slopes=alibi_slopes, mask=mask, key_padding_mask=key_padding_mask,
        bias=bias,
    )  # fmt: skip
    q, k = as_operands(q, k)
    if score_mod is not None or mask_mod is not None or block_mask is not None:
        from flashtile.api import masks

        check_with_functions(extras, options)
        extras, options = masks.with_functions(q, k, extras, options, score_mod, mask_mod, block_mask)
    return weights_of(q, k, lse, extras, options, normalised)
