"""What the kernels with functions take beside what those without take."""

from typing import Any, NamedTuple

from flashtile.problems.masks import MAX_CAPTURED, MAX_SIZES

CAPTURED = tuple(f"captured_{i}" for i in range(MAX_CAPTURED))
GRADIENTS = tuple(f"gradient_{i}" for i in range(MAX_CAPTURED))
LISTS = ("num_blocks", "indices", "full_num_blocks", "full_indices")
SIZES = tuple(f"size_{i}" for i in range(MAX_SIZES))
INTEGERS = (
    "list_batch", "list_heads", *SIZES, "alibi_stride", "num_heads_q", "group_size", "seqlen_q", "seqlen_k",
    "window_left", "window_right",
)  # fmt: skip
"""Arguments whose value must not lead to another compilation."""


class Captured(NamedTuple):
    """Tensors that functions read, contiguous, their gradients in fp32, and the sizes of all their dimensions
    in turn; from the last size on, numbers of the programs. None and 0 stand for those that there are not."""

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
    """Of a block mask, for blocks of rows or of keys. ``batch`` and ``heads`` are its own, 1 if all share
    it."""

    num_blocks: Any
    indices: Any
    full_num_blocks: Any
    full_indices: Any
    batch: Any
    heads: Any
