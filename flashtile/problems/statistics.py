"""The frozen description of a reduction of the rows' largest scores to those of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class MaxLogitsTensors(NamedTuple):
    """The optional tensor of a reduction; None if sequences are not packed."""

    cu_seqlens_q: Tensor | None = None


class MaxLogitsOptions(NamedTuple):
    """The argument of a reduction that is no tensor."""

    backend: str | None = None


@dataclass(frozen=True)
class MaxLogitsProblem:
    """Description of the largest number of each sequence and head, of one number for each row.

    Rows have the shape (batch, num_heads, length), or (num_heads, length) if sequences are packed.
    """

    batch: int
    """Number of sequences."""
    num_heads: int
    length: int
    """Rows of a head: of one sequence, or of all packed sequences."""
    varlen: bool
    strides: tuple[int, ...]
    """Strides of the rows between sequences (0 if they are packed), heads and rows, in elements."""
    dtype: torch.dtype
    device: Any

    @staticmethod
    def from_tensors(rows: Tensor, tensors: MaxLogitsTensors, options: MaxLogitsOptions) -> MaxLogitsProblem:
        batch, strides, offsets = rows.shape[0], rows.stride(), tensors.cu_seqlens_q
        if offsets is not None:
            batch, strides = offsets.shape[0] - 1, (0, *strides)
        *_, heads, length = rows.shape
        return MaxLogitsProblem(batch, heads, length, offsets is not None, strides, rows.dtype, rows.device)
