"""The Hopper forward with an additive bias.

The kernel is that without (``forward.kernel``), whose producer brings a tile of the bias with each block of
keys, and whose consumers add it to the scores (``tiles``).
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.common.kernel_cache import gluon_kernel
from flashtile.backends.hopper.bias.tiles import Bias
from flashtile.backends.hopper.channels import make_channel
from flashtile.backends.hopper.forward.kernel import run_partitions
from flashtile.backends.hopper.forward.schedule import Schedule


class Pointers(NamedTuple):
    """Memory that the kernel addresses itself, and the bias. What a call has not is never followed."""

    lse: Any
    table: Any
    seqused_k: Any
    sink: Any
    bias: Any


class Numbers(NamedTuple):
    """Floats of the launch. Scores are in natural units, from which log2(e) as ``scale_log2`` leads to log2
    units."""

    scale_log2: Any
    softcap_rate: Any
    scale: Any
    """softmax_scale, or the soft-cap: what leads from raw products, or their tanh, to scores."""


@gluon_kernel(do_not_specialize=(*Schedule._fields, "bias_batch", "bias_heads"))
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, bias_desc, lse, table, seqused_k, alibi_slopes, sink, num_tiles,
    num_blocks, num_heads, swizzle, seqlen_q, seqlen_k, total_q, batch_rows_k, window_left, window_right,
    alibi_stride, bias_batch, bias_heads, scale_log2, softcap_rate, scale, C: gl.constexpr,
):  # fmt: skip
    """Grid: one program for each multiprocessor at most, as without a bias, beside which there are no
    ``alibi_slopes``."""
    tiles = make_channel(bias_desc, C.BIAS_STAGES, C.WARPGROUPS, C.WARPGROUPS)
    pointers = Pointers(lse, table, seqused_k, sink, Bias(bias_desc, 0, bias_batch, bias_heads, tiles))
    schedule = Schedule(
        num_tiles, num_blocks, num_heads, swizzle, seqlen_q, seqlen_k, total_q, batch_rows_k, window_left,
        window_right, alibi_stride,
    )  # fmt: skip
    numbers = Numbers(scale_log2, softcap_rate, scale)
    run_partitions(C, q_desc, k_desc, v_desc, o_desc, pointers, schedule, numbers)
