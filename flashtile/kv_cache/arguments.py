"""Conversion and validation of integer arguments (Python's, NumPy's, tensors)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flashtile.checks.conversions import as_int

MAX_SIZE = 2**30
"""Largest allowed size, so that the sum of two lengths fits into an int32."""


def as_size(name: str, value: Any, least: int = 1, most: int = MAX_SIZE) -> int:
    """Convert to an int from ``least`` to ``most``. Raise TypeError or ValueError naming the argument."""
    size: int = as_int(name, value)
    if not least <= size <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {size}")
    return size


def as_ints(name: str, values: Iterable[int] | Tensor) -> array[int]:
    """Convert to a one-dimensional array of int64. Raise TypeError or ValueError naming the argument."""
    if isinstance(values, Tensor):
        if values.dim() != 1:
            raise ValueError(f"{name} must be one-dimensional, got shape {tuple(values.shape)}")
        if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool:
            raise TypeError(f"{name} must be integers, got {values.dtype}")
        values = values.tolist()
    try:
        return array("q", [*values])
    except TypeError as error:
        raise TypeError(f"{name} must be integers in one dimension: {error}") from None
    except OverflowError:
        raise ValueError(f"{name} must be integers within int64") from None
