"""From the arguments that callers of the decoding functions may pass to exact types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.arguments import AUTOCAST_DTYPES, as_int
from flashtile.decode.problem import FP8
from flashtile.problem import MAX_LENGTH, check_dense


def check_flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")


def lengths_tensor(length: Any, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """``cache_seqlens`` for sequences that are all equally long; ``tokens`` are their q or k."""
    length = as_int("cache_seqlens", length)
    if not 0 <= length <= MAX_LENGTH:
        raise ValueError(f"cache_seqlens must be from 0 to {MAX_LENGTH}, got {length}")
    check_dense("q", tokens)
    batch = tokens.shape[:1].numel() if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return torch.full((batch,), length, dtype=torch.int32, device=tokens.device)


def split_arguments(num_splits: Any, split_size: Any) -> tuple[int, int]:
    """(num_splits, split_size) as ints, 0 for a split_size of None."""
    if type(num_splits) is not int:
        num_splits = as_int("num_splits", num_splits)
    if split_size is None:
        return num_splits, 0
    split_size = as_int("split_size", split_size)
    if split_size < 1:
        raise ValueError(f"split_size must be None or at least 1, got {split_size}")
    return num_splits, split_size


def dense_tree(tree_mask: Tensor) -> Tensor:
    """(batch or 1, seqlen_q, seqlen_q), contiguous."""
    check_dense("tree_mask", tree_mask)
    if tree_mask.dim() == 2:
        tree_mask = tree_mask.unsqueeze(0)
    return tree_mask.contiguous()


def cast_for_autocast(k_cache: Tensor, *tensors: Any) -> list[Any]:
    """Queries and new keys in the dtype of the cache where autocast is on, in autocast's for an FP8 cache."""
    if not isinstance(k_cache, Tensor) or k_cache.device.type not in ("cuda", "cpu"):
        return list(tensors)
    device_type = k_cache.device.type
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type) if k_cache.dtype == FP8 else k_cache.dtype
    if dtype not in AUTOCAST_DTYPES:
        return list(tensors)
    return [t.to(dtype) if isinstance(t, Tensor) and t.dtype in AUTOCAST_DTYPES else t for t in tensors]
