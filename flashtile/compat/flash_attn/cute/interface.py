"""``flash_attn.cute.interface``: FlashAttention-4's functions, with its argument names, order and results.

``score_mod`` and ``mask_mod`` must be functions as for FlexAttention. In FlashAttention-4 they are CuTe
functions, which only its kernels can compile. Such functions raise a NotImplementedError, and so do the
arguments ``score_mod_bwd``, ``aux_tensors``, ``aux_scalars``, ``block_sparse_tensors`` and
``gather_kv_indices``.

Arguments that only tune FlashAttention-4's kernels are accepted and ignored: ``pack_gqa``, ``min_seqlen_k``,
``scheduler_metadata``, ``disable_scheduler_metadata``, ``seqlen_k_per_split``, and ``num_splits`` without a
``page_table``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.api import decode
from flashtile.api.attention import attention
from flashtile.checks.arguments import ERRORS, check_dense, check_int32, check_offsets, renamed
from flashtile.checks.conversions import as_int, check_flag, check_tuning
from flashtile.checks.decode import check_combined_into

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]

Window = tuple[int | None, int | None]
"""(left, right) as in FlashAttention-4: None means no limit. A negative limit excludes the nearest keys."""


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Call :func:`flashtile.attention` with ``learnable_sink`` as its ``sink``. Return (out, lse).

    lse has a gradient only with ``return_lse``. Its shape is (batch, heads, seqlen_q), or with ``qv``
    (batch, seqlen_q, heads).

    Examples:
        >>> from flashtile.compat.flash_attn.cute import flash_attn_func
        >>> q, k, v = torch.randn(3, 1, 128, 4, 64).unbind()
        >>> out, lse = flash_attn_func(q, k, v, causal=True, window_size=(64, None))
    """
    return flash_attn_varlen_func(
        q, k, v, qv, gather_kv_indices=gather_kv_indices, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, learnable_sink=learnable_sink, softcap=softcap, num_splits=num_splits,
        pack_gqa=pack_gqa, deterministic=deterministic, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors or block_sparse_tensors_bwd, return_lse=return_lse,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention over packed sequences, padded sequences or pages. Return (out, lse).

    q is packed if ``cu_seqlens_q`` is given, otherwise padded. k and v are packed if ``cu_seqlens_k`` is
    given. With ``page_table`` this calls :func:`flashtile.flash_attn_with_kvcache`, and no gradients are
    computed. ``mask_mod`` replaces ``causal`` and ``window_size``, as in FlashAttention-4. lse has a gradient
    only with ``return_lse``.

    Args:
        q, k: both None for scores ``qv @ v^T``, without the term ``q @ k^T``.
        max_seqlen_q, max_seqlen_k: the longest length. None means the total number of tokens, which is valid
            but slower.
        others: as for :func:`flashtile.attention`, where ``learnable_sink`` is called ``sink``.

    Raises:
        NotImplementedError: an argument is given that the module's docstring lists as not supported.
    """
    check_flag("return_lse", return_lse)
    check_flag("disable_scheduler_metadata", disable_scheduler_metadata)
    check_tuning(
        pack_gqa, num_splits=num_splits, min_seqlen_k=min_seqlen_k, seqlen_k_per_split=seqlen_k_per_split
    )
    _refuse(
        gather_kv_indices=gather_kv_indices, score_mod_bwd=score_mod_bwd, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    _refuse_cute("score_mod", score_mod, 5)
    _refuse_cute("mask_mod", mask_mod, 4)
    check_dense("v", v)
    by_latent = k is v and v.shape[-1] == 512
    heads_last = qv is not None or by_latent
    if q is None or by_latent:
        q, k, qv = q if qv is None else qv, v, None
    check_dense("q", q)
    check_dense("k", k)
    assert q is not None
    assert k is not None
    window, shifted = ((-1, -1), None) if mask_mod is not None else _window(causal, window_size)
    if shifted is not None and (
        other := "score_mod" if score_mod else "page_table" if page_table is not None else ""
    ):
        raise NotImplementedError(f"window_size must not be negative with {other}, got {tuple(window_size)}")
    if learnable_sink is not None:
        check_dense("learnable_sink", learnable_sink)
        learnable_sink = learnable_sink if learnable_sink.dtype == q.dtype else learnable_sink.float()
    named: dict[str, Any] = {"softmax_scale": softmax_scale, "window_size": window, "softcap": softcap}
    named |= {"qv": qv, "sink": learnable_sink}
    try:
        if page_table is not None:
            _refuse(score_mod=score_mod, mask_mod=mask_mod, seqused_q=seqused_q)
            longest = q.shape[0] if max_seqlen_q is None else max_seqlen_q
            out, lse = decode.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=seqused_k, block_table=page_table, num_splits=num_splits,
                cu_seqlens_q=cu_seqlens_q, max_seqlen_q=None if cu_seqlens_q is None else longest,
                return_softmax_lse=True, **named,
            )  # fmt: skip
        else:
            limits = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            if shifted is not None:
                named["mask"] = _shifted(shifted, q, k, limits, seqused_q, seqused_k)
            named |= {"score_mod": score_mod, "mask_mod": mask_mod, "deterministic": deterministic}
            named |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
            out, lse = _attention(q, k, v, limits, named)
    except ERRORS as error:
        raise renamed(error, {"block_table": "page_table", "sink": "learnable_sink"}) from None
    if heads_last:
        lse = lse.transpose(-1, -2)
    return out, lse if return_lse else lse.detach()


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Call :func:`flashtile.flash_attn_combine` for the rows that are used. Return (out, lse).

    Rows that ``cu_seqlens`` and ``seqused`` leave out keep what ``out`` had. In new memory they are 0, and
    their lse is -inf.

    Args:
        cu_seqlens: (batch + 1,) int32, where the sequences of packed partial results begin and end.
        seqused: (batch,) int32, how many rows of each sequence are used.
        virtual_batch_idx: ignored, because it only orders FlashAttention-4's work.
        return_lse: whether to return the lse; otherwise None takes its place.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what is allowed.

    Examples:
        >>> from flashtile.compat.flash_attn.cute.interface import flash_attn_combine
        >>> out_partial, lse_partial = torch.randn(2, 3, 128, 4, 64), torch.randn(2, 3, 128, 4)
        >>> used = torch.tensor([128, 5, 0], dtype=torch.int32)
        >>> out, lse = flash_attn_combine(out_partial, lse_partial, seqused=used)
        >>> bool((out[1, 5:] == 0).all())
        True
    """
    check_flag("return_lse", return_lse)
    if virtual_batch_idx is not None:
        check_dense("virtual_batch_idx", virtual_batch_idx)
    if cu_seqlens is None and seqused is None:
        result, lse = decode.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
        return result, lse if return_lse else None
    check_dense("out_partial", out_partial)
    used = _used_rows(out_partial, cu_seqlens, seqused)[..., None]
    if out is not None:
        check_dense("out", out)
        out_dtype = out_dtype or out.dtype
        check_combined_into(out_partial, out, out_dtype)
    result, lse = decode.flash_attn_combine(out_partial, lse_partial, None, out_dtype)
    result = result.where(used[..., None], 0 if out is None else out)
    lse = lse.where(used, -torch.inf)
    return result if out is None else out.copy_(result), lse if return_lse else None


def _used_rows(out_partial: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None) -> Tensor:
    """Return which rows of partial results are used: (batch, seqlen), or (total,) if they are packed."""
    if out_partial.dim() not in (4, 5):
        raise ValueError(f"out_partial must have 4 or 5 dimensions, got shape {tuple(out_partial.shape)}")
    packed = out_partial.dim() == 4
    if packed != (cu_seqlens is not None):
        raise ValueError(
            "cu_seqlens and out_partial of 4 dimensions must be given together, "
            f"got {out_partial.dim()} dimensions and {'no' if cu_seqlens is None else 'a'} cu_seqlens"
        )
    if cu_seqlens is not None:
        check_offsets("cu_seqlens", cu_seqlens, out_partial)
    batch = out_partial.shape[1] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_int32("seqused", seqused, (batch,), "(batch,)", out_partial)
    rows = torch.arange(out_partial.shape[-3], dtype=torch.int32, device=out_partial.device)
    if cu_seqlens is None:
        assert seqused is not None
        return rows < seqused[:, None]
    if batch == 0:
        return torch.zeros_like(rows, dtype=torch.bool)
    begins, ends = cu_seqlens[:-1], cu_seqlens[1:]
    if seqused is not None:
        ends = torch.minimum(begins + seqused, ends)
    sequence = torch.searchsorted(cu_seqlens[1:], rows, right=True).clamp_(max=batch - 1)
    return (rows >= begins[sequence]) & (rows < ends[sequence])


def get_scheduler_metadata(*others: Any, **named: Any) -> None:
    """Return None: flashtile's kernels need no metadata, because they read lengths on the device."""


def _attention(
    q: Tensor, k: Tensor, v: Tensor, limits: tuple, named: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of padded or packed tensors.

    ``limits`` is (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k). q is packed if cu_seqlens_q is not
    None, and k and v if cu_seqlens_k is not None. If only one side is packed, the other side is passed on as
    packed sequences of equal lengths.
    """
    of_q, of_k, longest_q, longest_k = limits
    if of_q is of_k is None:
        out, lse = attention(q, k, v, **named, return_lse=True)
        return out, lse
    shape = q.shape[:2]
    if of_q is None:
        of_q, longest_q = _even_offsets(q), shape[1]
        q, named["qv"] = q.flatten(0, 1), None if named["qv"] is None else named["qv"].flatten(0, 1)
    if of_k is None:
        of_k, longest_k = _even_offsets(k), k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    out, lse = attention(
        q, k, v, cu_seqlens_q=of_q, cu_seqlens_k=of_k,
        max_seqlen_q=q.shape[0] if longest_q is None else longest_q,
        max_seqlen_k=k.shape[0] if longest_k is None else longest_k, **named, return_lse=True,
    )  # fmt: skip
    if limits[0] is None:
        out, lse = out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)
    return out, lse


def _even_offsets(tensor: Tensor) -> Tensor:
    """Return the offsets (batch + 1,) of the sequences of a tensor (batch, seqlen, heads, head_dim)."""
    batch, seqlen = tensor.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=tensor.device) * seqlen


def _lengths(tensor: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None) -> Tensor:
    """Return the used lengths (batch,) int32 of the sequences of a padded or packed tensor."""
    if seqused is not None:
        return seqused
    return (_even_offsets(tensor) if cu_seqlens is None else cu_seqlens).diff()


def _window(causal: bool, window_size: Window) -> tuple[tuple[int, int], Window | None]:
    """Convert FlashAttention-4's window to flashtile's window, or to limits for a mask.

    As in FlashAttention-4, both limits are ignored if their sum is negative. With ``causal``, the right limit
    stays 0.

    Returns:
        (flashtile's window, None), or ((-1, -1), (left, right)) if a limit is negative. flashtile's window
        cannot express a negative limit, so the caller must apply these limits as a mask.
    """
    check_flag("causal", causal)
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be (left, right), ints or None, got {window_size!r}")
    left, right = (None if limit is None else as_int("window_size", limit) for limit in window_size)
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        left, right = None, 0 if causal else None
    if min(left or 0, right or 0) < 0:
        return (-1, -1), (left, right)
    return (-1 if left is None else left, -1 if right is None else right), None


def _shifted(
    window: Window, q: Tensor, k: Tensor, limits: tuple, seqused_q: Tensor | None, seqused_k: Tensor | None
) -> Tensor:
    """Return the mask (batch, 1, seqlen_q, seqlen_k) of a window whose limits may be negative."""
    of_q, of_k, longest_q, longest_k = limits
    ahead = _lengths(k, of_k, seqused_k) - _lengths(q, of_q, seqused_q)
    rows = q.shape[1] if of_q is None else longest_q or q.shape[0]
    columns = k.shape[1] if of_k is None else longest_k or k.shape[0]
    distance = torch.arange(columns, device=q.device) - torch.arange(rows, device=q.device)[:, None]
    distance = distance - ahead[:, None, None, None]
    left, right = window
    sees = torch.ones_like(distance, dtype=torch.bool) if left is None else distance >= -left
    return sees if right is None else sees & (distance <= right)


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} must be None, got {type(value).__name__}")


def _refuse_cute(name: str, function: Callable[..., Any] | None, count: int) -> None:
    """Raise NotImplementedError unless ``function`` takes ``count`` arguments, as in FlexAttention."""
    if function is None:
        return
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        raise NotImplementedError(
            f"{name} must be a function of {count} arguments as for flashtile.attention, got {function!r:.60}"
        ) from None
