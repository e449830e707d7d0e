"""The Hopper forward with functions of scores and masks, and along the lists of a block mask.

The kernel is that without functions (``forward.kernel``), whose steps call SCORE_MOD and MASK_MOD where they
modify and hide scores, and take the blocks of keys from ``visits``. The blocks of a block mask, full or under
its mask, share one loop, in which the softmax of one runs under the products of its neighbours. With
MASK_MOD alone all blocks are treated like those that an edge cuts. Sequences are dense.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.common.kernel_cache import gluon_kernel
from flashtile.backends.hopper.forward.kernel import run_partitions
from flashtile.backends.hopper.forward.schedule import Schedule
from flashtile.backends.portable.mods.arguments import SIZES, Captured, Lists

LISTS = ("partial_num_blocks", "partial_indices", "full_num_blocks", "full_indices")
"""The kernels' parameters for a block mask."""


class Pointers(NamedTuple):
    """Memory that the kernel addresses itself. What a call has not is never followed."""

    lse: Any
    table: Any
    """The header of a tile table, for the work queue."""
    alibi_slopes: Any
    sink: Any
    captured: Any
    lists: Any


class Numbers(NamedTuple):
    """Floats of the launch. With SCORE_MOD scores are in natural units, from which log2(e) as ``scale_log2``
    leads to log2 units."""

    scale_log2: Any
    softcap_rate: Any
    softcap_log2: Any
    scale: Any
    """softmax_scale."""


@gluon_kernel(do_not_specialize=(*Schedule._fields, "list_batch", "list_heads", *SIZES))
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, table, alibi_slopes, sink, captured_0, captured_1, captured_2,
    captured_3, captured_4, captured_5, captured_6, captured_7, partial_num_blocks, partial_indices,
    full_num_blocks, full_indices, num_tiles, num_blocks, num_heads, swizzle, seqlen_q, seqlen_k, total_q,
    batch_rows_k, window_left, window_right, alibi_stride, list_batch, list_heads, size_0, size_1, size_2,
    size_3, size_4, size_5, size_6, size_7, size_8, size_9, size_10, size_11, size_12, size_13, size_14,
    size_15, scale_log2, softcap_rate, softcap_log2, scale, C: gl.constexpr,
):  # fmt: skip
    """Grid: one program for each multiprocessor at most, as without functions."""
    captured = Captured(
        captured_0, captured_1, captured_2, captured_3, captured_4, captured_5, captured_6, captured_7,
        captured_0, captured_0, captured_0, captured_0, captured_0, captured_0, captured_0, captured_0,
        size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7, size_8, size_9, size_10, size_11,
        size_12, size_13, size_14, size_15,
    )  # fmt: skip
    lists = Lists(partial_num_blocks, partial_indices, full_num_blocks, full_indices, list_batch, list_heads)
    pointers = Pointers(lse, table, alibi_slopes, sink, captured, lists)
    schedule = Schedule(
        num_tiles, num_blocks, num_heads, swizzle, seqlen_q, seqlen_k, total_q, batch_rows_k, window_left,
        window_right, alibi_stride,
    )  # fmt: skip
    numbers = Numbers(scale_log2, softcap_rate, softcap_log2, scale)
    run_partitions(C, q_desc, k_desc, v_desc, o_desc, pointers, schedule, numbers)
