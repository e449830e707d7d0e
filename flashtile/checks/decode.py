"""Every check of the decoding functions' arguments that looks at types and shapes, never at data.

What needs data is in :mod:`flashtile.checks.values`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.checks.arguments import (
    PAGED_CACHE,
    check_addresses,
    check_backend,
    check_cache,
    check_descales,
    check_device,
    check_dtype,
    check_floats,
    check_int,
    check_int32,
    check_last_stride,
    check_offsets,
    check_pair,
    check_tokens,
)
from flashtile.decode.problem import (
    FP8,
    MAX_SPLITS,
    AppendOptions,
    AppendTensors,
    CacheTensors,
    DecodeOptions,
)
from flashtile.problem import DTYPES, FLOAT32_MAX, MAX_LENGTH, UNLIMITED, check_dense


def check_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors, options: DecodeOptions
) -> None:
    """Raise for an attention call over a cache that no backend could compute.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, stride, device or number is not allowed, or arguments exclude each other.
        NotImplementedError: a device or head size that flashtile does not serve.
    """
    varlen = tensors.cu_seqlens_q is not None
    check_tokens("q", q, varlen, "total_q", "seqlen_q", q)
    check_dtype("q", q)
    batch = _batch_of_queries(q, tensors.cu_seqlens_q, options.max_seqlen_q)
    check_cache(q, k_cache, v_cache, tensors.block_table)
    if q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(
            f"k_cache has head_dim {k_cache.shape[-1]}, but q has {q.shape[-1]}: they must be equal"
        )
    heads_q, heads_kv = q.shape[-2], k_cache.shape[-2]
    if heads_q == 0 or heads_q % heads_kv != 0:
        raise ValueError(
            f"q has {heads_q} heads, which must be a multiple of the {heads_kv} heads of k_cache"
        )
    check_addresses(k_cache, batch, tensors.cache_batch_idx, tensors.block_table)
    for name in ("cache_seqlens", "cache_leftpad"):
        check_int32(name, getattr(tensors, name), (batch,), "(batch,)", q)
    if tensors.cu_seqlens_k_new is not None:
        check_int32("cu_seqlens_k_new", tensors.cu_seqlens_k_new, (batch + 1,), "(batch + 1,)", q)
    check_floats(
        "alibi_slopes", tensors.alibi_slopes, ((heads_q,), (batch, heads_q)), "(heads,) or (batch, heads)", q
    )
    check_floats("sink", tensors.sink, ((heads_q,),), "(heads,)", q, dtypes=(torch.float32, q.dtype))
    check_descales(k_cache, tensors.k_descale, tensors.v_descale)
    check_pair("prior_out", tensors.prior_out, "prior_lse", tensors.prior_lse)
    if tensors.prior_out is not None:
        _check_prior(q, v_cache, tensors)
    _check_options(options)
    if tensors.tree_mask is not None:
        seqlen_q = options.max_seqlen_q if varlen else q.shape[1]
        _check_tree(tensors, batch, seqlen_q, options, q)


def _check_prior(q: Tensor, v_cache: Tensor, tensors: CacheTensors) -> None:
    tokens, heads = q.shape[:-2].numel(), q.shape[-2]
    dtypes = (torch.float64 if q.dtype == torch.float64 else torch.float32,)
    shape = (tokens, heads, v_cache.shape[-1])
    check_floats("prior_out", tensors.prior_out, (shape,), "(tokens, heads, head_dim_v)", q, dtypes)
    check_floats("prior_lse", tensors.prior_lse, ((heads, tokens),), "(heads, tokens)", q, dtypes)


def check_append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors, options: AppendOptions
) -> None:
    """Raise for an append that no backend could do; the errors are those of :func:`check_decode`."""
    slots, varlen = tensors.slot_mapping is not None, tensors.cu_seqlens_k_new is not None
    for name, new in (("k", k), ("v", v)):
        check_tokens(name, new, slots or varlen, "total_new", "seqlen_new", k)
        check_dtype(name, new)
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"v has shape {tuple(v.shape)}, which must be that of k, {tuple(k.shape)}, but for head_dim"
        )
    check_cache(k, k_cache, v_cache, tensors.block_table)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new.shape[-2:] != cache.shape[-2:]:
            raise ValueError(
                f"{name} has (heads, head_dim) = {tuple(new.shape[-2:])}, but {name}_cache has "
                f"{tuple(cache.shape[-2:])}: they must be equal"
            )
        if cache.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}_cache requires grad, but is written in place: it must be detached")
    if v.dtype != k.dtype:
        raise TypeError(f"v has dtype {v.dtype}, but k has {k.dtype}: they must be equal")
    check_descales(k_cache, tensors.k_descale, tensors.v_descale)
    check_backend(options.backend)
    if slots:
        _check_slots(k, tensors)
        return
    if tensors.cache_seqlens is None:
        raise ValueError("cache_seqlens must say where k and v are appended, got None")
    if varlen:
        check_offsets("cu_seqlens_k_new", tensors.cu_seqlens_k_new, k)
        check_int("max_seqlen_k_new", options.max_seqlen_k_new or 0, 0, MAX_LENGTH)
        batch = tensors.cu_seqlens_k_new.shape[0] - 1  # type: ignore[union-attr]
    else:
        batch = k.shape[0]
    check_int32("cache_seqlens", tensors.cache_seqlens, (batch,), "(batch,)", k)
    check_addresses(k_cache, batch, tensors.cache_batch_idx, tensors.block_table)
    _check_rotary(k, batch, tensors)


def check_copy(
    k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor, k_descale: Tensor | None, v_descale: Tensor | None
) -> None:
    """Raise for a copy that no backend could do; the caches have a dimension of layers in front."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dense(name, cache)
        if cache.dim() not in (4, 5):
            raise ValueError(
                f"{name} must have shape {PAGED_CACHE} or (num_layers, num_blocks, page_size, heads_kv, "
                f"head_dim), got {tuple(cache.shape)}"
            )
        if cache.dtype not in (*DTYPES, FP8):
            raise TypeError(f"{name} must be a floating dtype that caches have, got {cache.dtype}")
        check_device(name, cache, k_cache)
        check_last_stride(name, cache)
    if k_cache.shape[:-1] != v_cache.shape[:-1]:
        raise ValueError(
            f"v_cache has shape {tuple(v_cache.shape)}, which must be that of k_cache, "
            f"{tuple(k_cache.shape)}, but for head_dim"
        )
    check_dense("block_pairs", block_pairs)
    if block_pairs.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"block_pairs must be int32 or int64, got {block_pairs.dtype}")
    if block_pairs.dim() != 2 or block_pairs.shape[1] != 2:
        raise ValueError(
            f"block_pairs must have shape (n, 2) of (source, destination), got {tuple(block_pairs.shape)}"
        )
    check_device("block_pairs", block_pairs, k_cache)
    expected = (*k_cache.shape[:-3], k_cache.shape[-2])
    layout = "(num_blocks, heads_kv), with num_layers in front where the caches have it"
    for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
        check_floats(name, descale, (expected,), layout, k_cache)
    check_pair("k_descale", k_descale, "v_descale", v_descale)


def check_combine(out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, dtype: torch.dtype) -> None:
    """Raise for partial results that do not fit together."""
    check_dense("out_partial", out_partial)
    check_dense("lse_partial", lse_partial)
    if out_partial.dim() not in (4, 5):
        raise ValueError(
            "out_partial must have shape (num_splits, batch, seqlen, heads, head_dim) or "
            f"(num_splits, total, heads, head_dim), got {tuple(out_partial.shape)}"
        )
    if out_partial.dtype not in DTYPES:
        raise TypeError(f"out_partial must be float16, bfloat16, float32 or float64, got {out_partial.dtype}")
    wide = torch.float64 if out_partial.dtype == torch.float64 else torch.float32
    if lse_partial.dtype != wide:
        raise TypeError(f"lse_partial must be {wide} beside {out_partial.dtype}, got {lse_partial.dtype}")
    if out_partial.shape[0] == 0:
        raise ValueError("out_partial has no split: it must have at least one")
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"lse_partial must have the shape of out_partial without head_dim, "
            f"{tuple(out_partial.shape[:-1])}, got {tuple(lse_partial.shape)}"
        )
    check_device("out_partial", out_partial, out_partial)
    check_device("lse_partial", lse_partial, out_partial)
    check_last_stride("out_partial", out_partial)
    if dtype not in DTYPES:
        raise TypeError(f"out_dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    if out is None:
        return
    check_dense("out", out)
    check_device("out", out, out_partial)
    if out.shape != out_partial.shape[1:]:
        raise ValueError(f"out must have shape {tuple(out_partial.shape[1:])}, got {tuple(out.shape)}")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, but out_dtype is {dtype}: they must be equal")


def _batch_of_queries(q: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None) -> int:
    if cu_seqlens_q is None:
        if max_seqlen_q is not None:
            raise ValueError(f"max_seqlen_q must be None without cu_seqlens_q, got {max_seqlen_q}")
        return q.shape[0]
    check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    if max_seqlen_q is None:
        raise TypeError("max_seqlen_q must be an int beside cu_seqlens_q, got None")
    check_int("max_seqlen_q", max_seqlen_q, 0, MAX_LENGTH)
    return cu_seqlens_q.shape[0] - 1


def _check_options(options: DecodeOptions) -> None:
    scale, softcap = options.softmax_scale, options.softcap
    if scale is not None and not abs(scale) <= FLOAT32_MAX:  # so written, it refuses NaN too
        raise ValueError(f"softmax_scale must be finite in float32, got {scale}")
    if not 0 <= softcap <= FLOAT32_MAX:
        raise ValueError(f"softcap must be finite in float32 and at least 0 (0 turns it off), got {softcap}")
    check_int("window_size[0]", options.window_left, UNLIMITED, MAX_LENGTH)
    check_int("window_size[1]", options.window_right, UNLIMITED, MAX_LENGTH)
    check_int("num_splits", options.num_splits, 0, MAX_SPLITS)
    check_int("split_size", options.split_size, 0, MAX_LENGTH)
    if options.num_splits > 0 and options.split_size > 0:
        raise ValueError(
            f"split_size must be None beside num_splits = {options.num_splits}, got {options.split_size}"
        )
    check_backend(options.backend)


def _check_tree(
    tensors: CacheTensors, batch: int, seqlen_q: int | None, options: DecodeOptions, q: Tensor
) -> None:
    mask = tensors.tree_mask
    assert mask is not None
    check_dense("tree_mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"tree_mask must be bool, got {mask.dtype}")
    shapes = ((1, seqlen_q, seqlen_q), (batch, seqlen_q, seqlen_q))
    if tuple(mask.shape) not in shapes:
        raise ValueError(
            f"tree_mask must have shape (seqlen_q, seqlen_q) = {shapes[0][1:]} or "
            f"(batch, seqlen_q, seqlen_q) = {shapes[1]}, got {tuple(mask.shape)}"
        )
    check_device("tree_mask", mask, q)
    if not mask.is_contiguous():
        raise ValueError(f"tree_mask must be contiguous, got strides {tuple(mask.stride())}")
    window = (options.window_left, options.window_right)
    if options.causal or window != (UNLIMITED, UNLIMITED):
        given = "causal=True" if options.causal else f"window_size={window}"
        raise ValueError(
            f"tree_mask says what every query sees: it excludes causal and window_size, got {given}"
        )
    if tensors.alibi_slopes is not None:
        raise ValueError(
            "alibi_slopes must be None beside tree_mask: a node's place in the cache is not its depth"
        )


def _check_slots(k: Tensor, tensors: AppendTensors) -> None:
    slot_mapping = tensors.slot_mapping
    assert slot_mapping is not None
    check_dense("slot_mapping", slot_mapping)
    if slot_mapping.dtype != torch.int64:
        raise TypeError(f"slot_mapping must be int64, got {slot_mapping.dtype}")
    if tuple(slot_mapping.shape) != (k.shape[0],):
        raise ValueError(
            f"slot_mapping must have shape (total_new,) = {(k.shape[0],)}, got {tuple(slot_mapping.shape)}"
        )
    check_device("slot_mapping", slot_mapping, k)
    check_last_stride("slot_mapping", slot_mapping)
    excluded = (
        "cache_seqlens",
        "cache_batch_idx",
        "block_table",
        "cu_seqlens_k_new",
        "rotary_cos",
        "rotary_sin",
    )
    for name in excluded:
        if getattr(tensors, name) is not None:
            raise ValueError(f"{name} must be None beside slot_mapping, which says where every token goes")


def _check_rotary(k: Tensor, batch: int, tensors: AppendTensors) -> None:
    cos, sin = tensors.rotary_cos, tensors.rotary_sin
    check_pair("rotary_cos", cos, "rotary_sin", sin)
    check_int32("rotary_seqlens", tensors.rotary_seqlens, (batch,), "(batch,)", k)
    if cos is None or sin is None:
        if tensors.rotary_seqlens is not None:
            raise ValueError("rotary_seqlens must be None without rotary_cos and rotary_sin")
        return
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_dense(name, table)
        if table.dtype not in (k.dtype, torch.float32):
            raise TypeError(f"{name} must be {k.dtype} like k, or float32, got {table.dtype}")
        if table.dim() != 2 or not 1 <= table.shape[1] <= k.shape[-1] // 2:
            raise ValueError(
                f"{name} must have shape (positions, rotary_dim / 2) with rotary_dim from 2 to head_dim = "
                f"{k.shape[-1]}, got {tuple(table.shape)}"
            )
        check_device(name, table, k)
        if not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tuple(table.stride())}")
    if cos.shape != sin.shape:
        raise ValueError(
            f"rotary_sin has shape {tuple(sin.shape)}, but rotary_cos has {tuple(cos.shape)}: "
            "they must be equal"
        )
    if cos.dtype != sin.dtype:
        raise TypeError(
            f"rotary_sin has dtype {sin.dtype}, but rotary_cos has {cos.dtype}: they must be equal"
        )
