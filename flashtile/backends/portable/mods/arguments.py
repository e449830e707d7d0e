"""Structures of a kernel's tensors for a user's functions and for a block mask."""

from typing import Any, NamedTuple

from flashtile.problems.masks import MAX_CAPTURED, MAX_SIZES

CAPTURED = tuple(f"captured_{i}" for i in range(MAX_CAPTURED))
SIZES = tuple(f"size_{i}" for i in range(MAX_SIZES))


class Captured(NamedTuple):
    """Contiguous tensors that functions read, their fp32 gradients, and the sizes of all their dimensions in
    order. The last sizes hold integer constants of the programs. Unused fields are None and 0."""

    tensor_0: Any
    tensor_1: Any
    tensor_2: Any
    tensor_3: Any
    tensor_4: Any
    tensor_5: Any
    tensor_6: Any
    tensor_7: Any
    gradient_0: Any
    gradient_1: Any
    gradient_2: Any
    gradient_3: Any
    gradient_4: Any
    gradient_5: Any
    gradient_6: Any
    gradient_7: Any
    size_0: Any
    size_1: Any
    size_2: Any
    size_3: Any
    size_4: Any
    size_5: Any
    size_6: Any
    size_7: Any
    size_8: Any
    size_9: Any
    size_10: Any
    size_11: Any
    size_12: Any
    size_13: Any
    size_14: Any
    size_15: Any


class Lists(NamedTuple):
    """Block lists of a block mask, by blocks of rows or of keys. ``batch`` and ``heads`` are the mask's own
    sizes: 1 if all sequences or heads share it."""

    num_blocks: Any
    indices: Any
    full_num_blocks: Any
    full_indices: Any
    batch: Any
    heads: Any
