"""The Hopper backward with functions of scores and masks, and along the lists of a block mask.

The kernel is that without functions (``backward.kernel``). A block mask's lists of blocks of keys say which
blocks of rows a work tile meets; SCORE_MOD gives scores and their derivative together, as the soft-cap does.
Sequences are dense. Captured tensors get no gradients here.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.common.kernel_cache import gluon_kernel
from flashtile.backends.hopper.backward.dq_accum import Sizes, accum_of
from flashtile.backends.hopper.backward.kernel import run_partitions, wait_for_preprocess
from flashtile.backends.hopper.backward.schedule import Schedule
from flashtile.backends.hopper.backward.scores import Numbers
from flashtile.backends.portable.mods.arguments import SIZES, Captured, Lists


class Pointers(NamedTuple):
    """Memory that the kernel addresses itself. What a call has not is never followed."""

    table: Any
    seqused_k: Any
    alibi_slopes: Any
    next_tile: Any
    """The first work tile that no program has taken yet; 0 at the start."""
    captured: Any
    lists: Any


@gluon_kernel(do_not_specialize=(*Schedule._fields, *Sizes._fields, "list_batch", "list_heads", *SIZES))
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, dq_add_desc, dq_accum_desc, dk_desc,
    dv_desc, table, seqused_k, alibi_slopes, dq_semaphores, dq, counters, captured_0, captured_1, captured_2,
    captured_3, captured_4, captured_5, captured_6, captured_7, partial_num_blocks, partial_indices,
    full_num_blocks, full_indices, num_tiles, num_blocks, num_heads, seqlen_q, seqlen_k, batch_rows_k,
    window_left, window_right, alibi_stride, swizzle, row_blocks, total_heads, resident_heads, row_vectors,
    list_batch, list_heads, size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7, size_8, size_9,
    size_10, size_11, size_12, size_13, size_14, size_15, scale, scale_log2, softcap_rate, softcap_log2, zero,
    C: gl.constexpr,
):  # fmt: skip
    """Grid and ``counters`` as without functions. The lists are those of blocks of keys."""
    wait_for_preprocess()
    captured = Captured(
        captured_0, captured_1, captured_2, captured_3, captured_4, captured_5, captured_6, captured_7,
        captured_0, captured_0, captured_0, captured_0, captured_0, captured_0, captured_0, captured_0,
        size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7, size_8, size_9, size_10, size_11,
        size_12, size_13, size_14, size_15,
    )  # fmt: skip
    lists = Lists(partial_num_blocks, partial_indices, full_num_blocks, full_indices, list_batch, list_heads)
    pointers = Pointers(table, seqused_k, alibi_slopes, counters, captured, lists)
    schedule = Schedule(
        num_tiles, num_blocks, num_heads, seqlen_q, seqlen_k, batch_rows_k, window_left, window_right,
        alibi_stride, swizzle,
    )  # fmt: skip
    sizes = Sizes(row_blocks, total_heads, resident_heads, row_vectors)
    accum = accum_of(sizes, dq_semaphores, dq, counters)
    numbers = Numbers(scale, scale_log2, softcap_rate, softcap_log2, zero)
    run_partitions(
        C, q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, dq_add_desc, dq_accum_desc, dk_desc,
        dv_desc, pointers, schedule, accum, numbers,
    )  # fmt: skip
