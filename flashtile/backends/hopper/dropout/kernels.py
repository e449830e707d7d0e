"""The Hopper forward and backward with dropout: the kernels without it, entered with its state.

Beside queries and keys that are multiplied, a warpgroup makes the words that decide which probabilities are
dropped; the softmax sums all of them. ``1 / (1 - dropout_p)`` is a factor of results, not of probabilities:
of out and dV, and through the scale of dQ and dK, to which then ``(1 - dropout_p) * delta`` belongs.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.common.kernel_cache import gluon_kernel
from flashtile.backends.hopper.backward import kernel as backward
from flashtile.backends.hopper.backward.dq_accum import Sizes, accum_of
from flashtile.backends.hopper.backward.schedule import Schedule as BackwardSchedule
from flashtile.backends.hopper.dropout.cells import Dropout
from flashtile.backends.hopper.forward import kernel as forward
from flashtile.backends.hopper.forward.schedule import Schedule


class Pointers(NamedTuple):
    """Memory that the forward addresses itself. What a call has not is never followed."""

    lse: Any
    table: Any
    seqused_k: Any
    alibi_slopes: Any
    sink: Any
    dropout: Any


class Numbers(NamedTuple):
    """Floats of the forward, as without dropout but for the last."""

    scale_log2: Any
    softcap_rate: Any
    softcap_log2: Any
    keep_scale: Any
    """1 / (1 - dropout_p), with dropout_p as it is rounded."""


class BackwardPointers(NamedTuple):
    """Memory that the backward addresses itself."""

    table: Any
    seqused_k: Any
    alibi_slopes: Any
    next_tile: Any
    """The first work tile that no program has taken yet; 0 at the start."""
    dropout: Any


class BackwardNumbers(NamedTuple):
    """Floats of the backward, as without dropout but for the last."""

    scale: Any
    """softmax_scale * keep_scale."""
    scale_log2: Any
    softcap_rate: Any
    softcap_log2: Any
    zero: Any
    keep_scale: Any
    keep: Any
    """1 - dropout_p."""


@gluon_kernel(do_not_specialize=(*Schedule._fields, "drop_threshold"))
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, table, seqused_k, alibi_slopes, sink, rng_state,
    num_tiles, num_blocks, num_heads, swizzle, seqlen_q, seqlen_k, total_q, batch_rows_k, window_left,
    window_right, alibi_stride, drop_threshold, scale_log2, softcap_rate, softcap_log2, keep_scale,
    C: gl.constexpr,
):  # fmt: skip
    """Grid: one program for each multiprocessor at most, as without dropout."""
    pointers = Pointers(lse, table, seqused_k, alibi_slopes, sink, Dropout(rng_state, drop_threshold))
    schedule = Schedule(
        num_tiles, num_blocks, num_heads, swizzle, seqlen_q, seqlen_k, total_q, batch_rows_k, window_left,
        window_right, alibi_stride,
    )  # fmt: skip
    numbers = Numbers(scale_log2, softcap_rate, softcap_log2, keep_scale)
    forward.run_partitions(C, q_desc, k_desc, v_desc, o_desc, pointers, schedule, numbers)


@gluon_kernel(do_not_specialize=(*BackwardSchedule._fields, *Sizes._fields, "drop_threshold"))
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, dq_add_desc, dq_accum_desc, dk_desc,
    dv_desc, table, seqused_k, alibi_slopes, dq_semaphores, dq, counters, rng_state,
    num_tiles, num_blocks, num_heads, seqlen_q, seqlen_k, batch_rows_k, window_left, window_right,
    alibi_stride, swizzle, row_blocks, total_heads, resident_heads, row_vectors, drop_threshold, scale,
    scale_log2, softcap_rate, softcap_log2, zero, keep_scale, keep, C: gl.constexpr,
):  # fmt: skip
    """Grid and ``counters`` as without dropout."""
    backward.wait_for_preprocess()
    pointers = BackwardPointers(
        table, seqused_k, alibi_slopes, counters, Dropout(rng_state, drop_threshold)
    )  # fmt: skip
    schedule = BackwardSchedule(
        num_tiles, num_blocks, num_heads, seqlen_q, seqlen_k, batch_rows_k, window_left, window_right,
        alibi_stride, swizzle,
    )  # fmt: skip
    sizes = Sizes(row_blocks, total_heads, resident_heads, row_vectors)
    accum = accum_of(sizes, dq_semaphores, dq, counters)
    numbers = BackwardNumbers(scale, scale_log2, softcap_rate, softcap_log2, zero, keep_scale, keep)
    backward.run_partitions(
        C, q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, dq_add_desc, dq_accum_desc, dk_desc,
        dv_desc, pointers, schedule, accum, numbers,
    )  # fmt: skip
