"""The Hopper backward with an additive bias.

The kernel is that without (``backward.kernel``), whose producer brings a tile of the bias with each step, and
whose consumers add it to the scores (``tiles``). Where each cell of the bias belongs to one score, dS is its
gradient and is written here, by the warp that adds dQ; else a kernel of its own sums it (``gradient``).
"""

from triton.experimental.gluon import language as gl

from flashtile.backends.common.kernel_cache import gluon_kernel
from flashtile.backends.hopper.backward.dq_accum import Sizes, accum_of
from flashtile.backends.hopper.backward.kernel import run_partitions, wait_for_preprocess
from flashtile.backends.hopper.backward.schedule import Schedule
from flashtile.backends.hopper.backward.scores import Numbers
from flashtile.backends.hopper.bias.tiles import BackwardPointers, Bias


@gluon_kernel(do_not_specialize=(*Schedule._fields, *Sizes._fields, "bias_batch", "bias_heads"))
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, dq_add_desc, dq_accum_desc, dk_desc,
    dv_desc, bias_desc, dbias_desc, table, seqused_k, alibi_slopes, dq_semaphores, dq, counters, num_tiles,
    num_blocks, num_heads, seqlen_q, seqlen_k, batch_rows_k, window_left, window_right, alibi_stride,
    swizzle, row_blocks, total_heads, resident_heads, row_vectors, bias_batch, bias_heads, scale,
    scale_log2, softcap_rate, softcap_log2, zero, C: gl.constexpr,
):  # fmt: skip
    """Grid and ``counters`` as without a bias, beside which there are no ``alibi_slopes``. ``dbias_desc`` is
    the bias itself without STORES_DS."""
    wait_for_preprocess()
    bias = Bias(bias_desc, dbias_desc, bias_batch, bias_heads, 0)
    pointers = BackwardPointers(table, seqused_k, counters, bias)
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
