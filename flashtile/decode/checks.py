"""Every check of the decoding functions' arguments that looks at types and shapes, never at data.

What needs data is in :mod:`flashtile.decode.values`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.decode.problem import (
    FP8,
    MAX_HEAD_DIM,
    MAX_SPLITS,
    AppendOptions,
    AppendTensors,
    CacheTensors,
    DecodeOptions,
)
from flashtile.problem import (
    DEVICE_TYPES,
    DTYPES,
    FLOAT32_MAX,
    MAX_LENGTH,
    PREFERENCE,
    UNLIMITED,
    check_dense,
)

DENSE_CACHE = "(batch, seqlen_cache, heads_kv, head_dim)"
PAGED_CACHE = "(num_blocks, page_size, heads_kv, head_dim)"


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
    _check_tokens("q", q, varlen, "total_q", "seqlen_q", q)
    _check_dtype("q", q)
    batch = _batch_of_queries(q, tensors.cu_seqlens_q, options.max_seqlen_q)
    _check_cache(q, k_cache, v_cache, tensors.block_table)
    if q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(
            f"k_cache has head_dim {k_cache.shape[-1]}, but q has {q.shape[-1]}: they must be equal"
        )
    heads_q, heads_kv = q.shape[-2], k_cache.shape[-2]
    if heads_q == 0 or heads_q % heads_kv != 0:
        raise ValueError(
            f"q has {heads_q} heads, which must be a multiple of the {heads_kv} heads of k_cache"
        )
    _check_addresses(k_cache, batch, tensors.cache_batch_idx, tensors.block_table)
    for name in ("cache_seqlens", "cache_leftpad"):
        _check_int32(name, getattr(tensors, name), (batch,), "(batch,)", q)
    if tensors.cu_seqlens_k_new is not None:
        _check_int32("cu_seqlens_k_new", tensors.cu_seqlens_k_new, (batch + 1,), "(batch + 1,)", q)
    _check_floats(
        "alibi_slopes", tensors.alibi_slopes, ((heads_q,), (batch, heads_q)), "(heads,) or (batch, heads)", q
    )
    _check_floats("sink", tensors.sink, ((heads_q,),), "(heads,)", q)
    _check_descales(k_cache, tensors.k_descale, tensors.v_descale)
    _check_options(options)
    if tensors.tree_mask is not None:
        seqlen_q = options.max_seqlen_q if varlen else q.shape[1]
        _check_tree(tensors, batch, seqlen_q, options, q)


def check_append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors, options: AppendOptions
) -> None:
    """Raise for an append that no backend could do; the errors are those of :func:`check_decode`."""
    slots, varlen = tensors.slot_mapping is not None, tensors.cu_seqlens_k_new is not None
    for name, new in (("k", k), ("v", v)):
        _check_tokens(name, new, slots or varlen, "total_new", "seqlen_new", k)
        _check_dtype(name, new)
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"v has shape {tuple(v.shape)}, which must be that of k, {tuple(k.shape)}, but for head_dim"
        )
    _check_cache(k, k_cache, v_cache, tensors.block_table)
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
    _check_descales(k_cache, tensors.k_descale, tensors.v_descale)
    _check_backend(options.backend)
    if slots:
        _check_slots(k, tensors)
        return
    if tensors.cache_seqlens is None:
        raise ValueError("cache_seqlens must say where k and v are appended, got None")
    if varlen:
        _check_offsets("cu_seqlens_k_new", tensors.cu_seqlens_k_new, k)
        _check_int("max_seqlen_k_new", options.max_seqlen_k_new or 0, 0, MAX_LENGTH)
        batch = tensors.cu_seqlens_k_new.shape[0] - 1  # type: ignore[union-attr]
    else:
        batch = k.shape[0]
    _check_int32("cache_seqlens", tensors.cache_seqlens, (batch,), "(batch,)", k)
    _check_addresses(k_cache, batch, tensors.cache_batch_idx, tensors.block_table)
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
        _check_device(name, cache, k_cache)
        _check_last_stride(name, cache)
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
    _check_device("block_pairs", block_pairs, k_cache)
    expected = (*k_cache.shape[:-3], k_cache.shape[-2])
    layout = "(num_blocks, heads_kv), with num_layers in front where the caches have it"
    for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
        _check_floats(name, descale, (expected,), layout, k_cache, contiguous=False)
    _check_pair("k_descale", k_descale, "v_descale", v_descale)


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
    _check_device("out_partial", out_partial, out_partial)
    _check_device("lse_partial", lse_partial, out_partial)
    _check_last_stride("out_partial", out_partial)
    if dtype not in DTYPES:
        raise TypeError(f"out_dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    if out is None:
        return
    check_dense("out", out)
    _check_device("out", out, out_partial)
    if out.shape != out_partial.shape[1:]:
        raise ValueError(f"out must have shape {tuple(out_partial.shape[1:])}, got {tuple(out.shape)}")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, but out_dtype is {dtype}: they must be equal")


def _check_tokens(name: str, tensor: Tensor, varlen: bool, total: str, seqlen: str, q: Tensor) -> None:
    """(total, heads, head_dim) if ``varlen``, else (batch, seqlen, heads, head_dim)."""
    check_dense(name, tensor)
    rank, layout = (
        (3, f"({total}, heads, head_dim)") if varlen else (4, f"(batch, {seqlen}, heads, head_dim)")
    )
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimensions {layout}, got shape {tuple(tensor.shape)}")
    _check_device(name, tensor, q)
    _check_head_dim(name, tensor)
    _check_last_stride(name, tensor)


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")


def _check_head_dim(name: str, tensor: Tensor) -> None:
    head_dim = tensor.shape[-1]
    if head_dim == 0:
        raise ValueError(f"{name} has head_dim 0: it must be from 1 to {MAX_HEAD_DIM}")
    if head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(f"{name} has head_dim {head_dim}: it must be from 1 to {MAX_HEAD_DIM}")


def _check_last_stride(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must have stride 1 in its last dimension, got strides {tuple(tensor.stride())}: "
            f"call {name}.contiguous()"
        )


def _check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device.type not in (*DEVICE_TYPES, "meta"):
        raise NotImplementedError(f"{name} is on {tensor.device}: flashtile serves cuda and cpu tensors")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, not on {q.device}: all must be on one device")


def _batch_of_queries(q: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None) -> int:
    if cu_seqlens_q is None:
        if max_seqlen_q is not None:
            raise ValueError(f"max_seqlen_q must be None without cu_seqlens_q, got {max_seqlen_q}")
        return q.shape[0]
    _check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    if max_seqlen_q is None:
        raise TypeError("max_seqlen_q must be an int beside cu_seqlens_q, got None")
    _check_int("max_seqlen_q", max_seqlen_q, 0, MAX_LENGTH)
    return cu_seqlens_q.shape[0] - 1


def _check_offsets(name: str, offsets: Any, q: Tensor) -> None:
    check_dense(name, offsets)
    if offsets.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {offsets.dtype}")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name} must have shape (batch + 1,), got {tuple(offsets.shape)}")
    _check_device(name, offsets, q)
    _check_last_stride(name, offsets)


def _check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> None:
    layout = DENSE_CACHE if block_table is None else PAGED_CACHE
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dense(name, cache)
        if cache.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions {layout}, got shape {tuple(cache.shape)}")
        if cache.dtype not in (q.dtype, FP8):
            raise TypeError(
                f"{name} has dtype {cache.dtype}: it must be {q.dtype}, like queries and new keys, or {FP8}"
            )
        _check_device(name, cache, q)
        _check_head_dim(name, cache)
        _check_last_stride(name, cache)
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(
            f"v_cache has dtype {v_cache.dtype}, but k_cache has {k_cache.dtype}: they must be equal"
        )
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"v_cache has shape {tuple(v_cache.shape)}, which must be that of k_cache, "
            f"{tuple(k_cache.shape)}, but for head_dim"
        )
    if k_cache.shape[2] == 0:
        raise ValueError("k_cache has 0 heads: it must have at least one")
    if block_table is not None and k_cache.shape[1] == 0:
        raise ValueError("k_cache has page_size 0: a page must hold at least one token")


def _check_addresses(
    k_cache: Tensor, batch: int, cache_batch_idx: Tensor | None, block_table: Tensor | None
) -> None:
    """Where the sequences lie: pages by the block table, or rows of a dense cache."""
    if block_table is not None:
        check_dense("block_table", block_table)
        if block_table.dtype != torch.int32:
            raise TypeError(f"block_table must be int32, got {block_table.dtype}")
        if block_table.dim() != 2 or block_table.shape[0] != batch:
            raise ValueError(
                f"block_table must have shape (batch, max_blocks) with batch = {batch}, "
                f"got {tuple(block_table.shape)}"
            )
        _check_device("block_table", block_table, k_cache)
        _check_last_stride("block_table", block_table)
        if cache_batch_idx is not None:
            raise ValueError(
                "cache_batch_idx must be None beside block_table: choose rows of the table instead, "
                "block_table[cache_batch_idx]"
            )
        return
    _check_int32("cache_batch_idx", cache_batch_idx, (batch,), "(batch,)", k_cache)
    if cache_batch_idx is None and k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache has {k_cache.shape[0]} rows, but there are {batch} sequences: they must be equal, or "
            "cache_batch_idx must choose rows"
        )


def _check_int32(name: str, tensor: Any, shape: tuple[int, ...], layout: str, q: Tensor) -> None:
    """An int32 tensor of this shape, or None."""
    if tensor is None:
        return
    check_dense(name, tensor)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {layout} = {shape}, got {tuple(tensor.shape)}")
    _check_device(name, tensor, q)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tuple(tensor.stride())}")


def _check_floats(
    name: str,
    tensor: Any,
    shapes: tuple[tuple[int, ...], ...],
    layout: str,
    q: Tensor,
    contiguous: bool = True,
) -> None:
    """A float32 tensor of one of these shapes, or None."""
    if tensor is None:
        return
    check_dense(name, tensor)
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {tensor.dtype}")
    if tuple(tensor.shape) not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {layout} = {allowed}, got {tuple(tensor.shape)}")
    _check_device(name, tensor, q)
    if contiguous:
        _check_last_stride(name, tensor)


def _check_descales(cache: Tensor, k_descale: Tensor | None, v_descale: Tensor | None) -> None:
    if k_descale is None and v_descale is None:
        return
    if cache.dtype != FP8:
        name = "v_descale" if k_descale is None else "k_descale"
        raise ValueError(f"{name} must be None: the cache is {cache.dtype}, only {FP8} is scaled")
    _check_pair("k_descale", k_descale, "v_descale", v_descale)
    heads = cache.shape[2]
    shapes = ((heads,), (cache.shape[0], heads))
    for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
        _check_floats(name, descale, shapes, "(heads_kv,) or (cache.shape[0], heads_kv)", cache)
    assert k_descale is not None
    assert v_descale is not None
    if k_descale.dim() != v_descale.dim():
        raise ValueError(
            f"v_descale has shape {tuple(v_descale.shape)}, but k_descale has {tuple(k_descale.shape)}: "
            "they must be equal"
        )


def _check_pair(name_a: str, a: Any, name_b: str, b: Any) -> None:
    if (a is None) != (b is None):
        missing, given = (name_a, name_b) if a is None else (name_b, name_a)
        raise ValueError(f"{missing} must be given beside {given}, got None")


def _check_options(options: DecodeOptions) -> None:
    scale, softcap = options.softmax_scale, options.softcap
    if scale is not None and not abs(scale) <= FLOAT32_MAX:  # so written, it refuses NaN too
        raise ValueError(f"softmax_scale must be finite in float32, got {scale}")
    if not 0 <= softcap <= FLOAT32_MAX:
        raise ValueError(f"softcap must be finite in float32 and at least 0 (0 turns it off), got {softcap}")
    _check_int("window_size[0]", options.window_left, UNLIMITED, MAX_LENGTH)
    _check_int("window_size[1]", options.window_right, UNLIMITED, MAX_LENGTH)
    _check_int("num_splits", options.num_splits, 0, MAX_SPLITS)
    _check_int("split_size", options.split_size, 0, MAX_LENGTH)
    if options.num_splits > 0 and options.split_size > 0:
        raise ValueError(
            f"split_size must be None beside num_splits = {options.num_splits}, got {options.split_size}"
        )
    _check_backend(options.backend)


def _check_int(name: str, value: int, least: int, most: int) -> None:
    """Under tracing, a number that comes from data (``.item()``) is checked when the graph runs."""
    if isinstance(value, torch.SymInt):
        torch._check(value >= least, lambda: f"{name} must be from {least} to {most}")
    elif not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {value}")


def _check_backend(backend: str | None) -> None:
    if backend is not None and backend not in PREFERENCE:
        raise ValueError(f"backend must be None or one of {', '.join(PREFERENCE)}, got {backend!r}")


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
    _check_device("tree_mask", mask, q)
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
    _check_device("slot_mapping", slot_mapping, k)
    _check_last_stride("slot_mapping", slot_mapping)
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
    _check_pair("rotary_cos", cos, "rotary_sin", sin)
    _check_int32("rotary_seqlens", tensors.rotary_seqlens, (batch,), "(batch,)", k)
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
        _check_device(name, table, k)
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
