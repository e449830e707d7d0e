"""Checks of one tensor or number of a decoding call; each raises an error that names it.

:mod:`flashtile.checks.decode` puts them together for whole calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.decode.problem import FP8, MAX_HEAD_DIM
from flashtile.problem import DEVICE_TYPES, DTYPES, PREFERENCE, check_dense

DENSE_CACHE = "(batch, seqlen_cache, heads_kv, head_dim)"
PAGED_CACHE = "(num_blocks, page_size, heads_kv, head_dim)"


def check_tokens(name: str, tensor: Tensor, varlen: bool, total: str, seqlen: str, q: Tensor) -> None:
    """(total, heads, head_dim) if ``varlen``, else (batch, seqlen, heads, head_dim)."""
    check_dense(name, tensor)
    rank, layout = (
        (3, f"({total}, heads, head_dim)") if varlen else (4, f"(batch, {seqlen}, heads, head_dim)")
    )
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimensions {layout}, got shape {tuple(tensor.shape)}")
    check_device(name, tensor, q)
    check_head_dim(name, tensor)
    check_last_stride(name, tensor)


def check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")


def check_head_dim(name: str, tensor: Tensor) -> None:
    head_dim = tensor.shape[-1]
    if head_dim == 0:
        raise ValueError(f"{name} has head_dim 0: it must be from 1 to {MAX_HEAD_DIM}")
    if head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(f"{name} has head_dim {head_dim}: it must be from 1 to {MAX_HEAD_DIM}")


def check_last_stride(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must have stride 1 in its last dimension, got strides {tuple(tensor.stride())}: "
            f"call {name}.contiguous()"
        )


def check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device.type not in (*DEVICE_TYPES, "meta"):
        raise NotImplementedError(f"{name} is on {tensor.device}: flashtile serves cuda and cpu tensors")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, not on {q.device}: all must be on one device")


def check_offsets(name: str, offsets: Any, q: Tensor) -> None:
    check_dense(name, offsets)
    if offsets.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {offsets.dtype}")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name} must have shape (batch + 1,), got {tuple(offsets.shape)}")
    check_device(name, offsets, q)
    check_last_stride(name, offsets)


def check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> None:
    layout = DENSE_CACHE if block_table is None else PAGED_CACHE
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dense(name, cache)
        if cache.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions {layout}, got shape {tuple(cache.shape)}")
        if cache.dtype not in (q.dtype, FP8):
            raise TypeError(
                f"{name} has dtype {cache.dtype}: it must be {q.dtype}, like queries and new keys, or {FP8}"
            )
        check_device(name, cache, q)
        check_head_dim(name, cache)
        check_last_stride(name, cache)
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


def check_addresses(
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
        check_device("block_table", block_table, k_cache)
        check_last_stride("block_table", block_table)
        if cache_batch_idx is not None:
            raise ValueError(
                "cache_batch_idx must be None beside block_table: choose rows of the table instead, "
                "block_table[cache_batch_idx]"
            )
        return
    check_int32("cache_batch_idx", cache_batch_idx, (batch,), "(batch,)", k_cache)
    if cache_batch_idx is None and k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache has {k_cache.shape[0]} rows, but there are {batch} sequences: they must be equal, or "
            "cache_batch_idx must choose rows"
        )


def check_int32(name: str, tensor: Any, shape: tuple[int, ...], layout: str, q: Tensor) -> None:
    """An int32 tensor of this shape, or None."""
    if tensor is None:
        return
    check_dense(name, tensor)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {layout} = {shape}, got {tuple(tensor.shape)}")
    check_device(name, tensor, q)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tuple(tensor.stride())}")


def check_floats(
    name: str,
    tensor: Any,
    shapes: tuple[tuple[int, ...], ...],
    layout: str,
    q: Tensor,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
) -> None:
    """A tensor of one of these dtypes and shapes, or None."""
    if tensor is None:
        return
    check_dense(name, tensor)
    if tensor.dtype not in dtypes:
        allowed = " or ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise TypeError(f"{name} must be {allowed}, got {tensor.dtype}")
    if tuple(tensor.shape) not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {layout} = {allowed}, got {tuple(tensor.shape)}")
    check_device(name, tensor, q)
    check_last_stride(name, tensor)


def check_descales(cache: Tensor, k_descale: Tensor | None, v_descale: Tensor | None) -> None:
    if k_descale is None and v_descale is None:
        return
    if cache.dtype != FP8:
        name = "v_descale" if k_descale is None else "k_descale"
        raise ValueError(f"{name} must be None: the cache is {cache.dtype}, only {FP8} is scaled")
    check_pair("k_descale", k_descale, "v_descale", v_descale)
    heads = cache.shape[2]
    shapes = ((heads,), (cache.shape[0], heads))
    for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
        check_floats(name, descale, shapes, "(heads_kv,) or (cache.shape[0], heads_kv)", cache)
    assert k_descale is not None
    assert v_descale is not None
    if k_descale.dim() != v_descale.dim():
        raise ValueError(
            f"v_descale has shape {tuple(v_descale.shape)}, but k_descale has {tuple(k_descale.shape)}: "
            "they must be equal"
        )


def check_pair(name_a: str, a: Any, name_b: str, b: Any) -> None:
    if (a is None) != (b is None):
        missing, given = (name_a, name_b) if a is None else (name_b, name_a)
        raise ValueError(f"{missing} must be given beside {given}, got None")


def check_int(name: str, value: int, least: int, most: int) -> None:
    """Under tracing, a number that comes from data (``.item()``) is checked when the graph runs."""
    if isinstance(value, torch.SymInt):
        torch._check(value >= least, lambda: f"{name} must be from {least} to {most}")
    elif not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {value}")


def check_backend(backend: str | None) -> None:
    if backend is not None and backend not in PREFERENCE:
        raise ValueError(f"backend must be None or one of {', '.join(PREFERENCE)}, got {backend!r}")
