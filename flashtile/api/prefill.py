"""Variable-length attention over a paged KV cache, used for prefill."""

from __future__ import annotations

from torch import Tensor

from flashtile.checks.arguments import ERRORS, check_dense, check_offset_pair, renamed
from flashtile.checks.attention import refuse_beyond
from flashtile.checks.conversions import as_operands, contiguous_qv
from flashtile.checks.values import check_offset_values
from flashtile.op.operation import is_plain, reads_values
from flashtile.operators.decode import decode
from flashtile.problems.attention import OptionalTensors, Options
from flashtile.problems.common import MAX_LENGTH, shared_fields
from flashtile.problems.decode import CacheTensors, DecodeOptions

TAKEN = (
    "cu_seqlens_k", "max_seqlen_k", "seqused_k", "deterministic", *CacheTensors._fields,
    *DecodeOptions._fields,
)  # fmt: skip
"""Optional tensors and options of attention that may be given with ``block_table``."""


def attention_over_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    extras: OptionalTensors,
    options: Options,
    buffers: tuple,
    qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of ``flash_attn_varlen_func`` with a ``block_table``."""
    cu_seqlens_q, cu_seqlens_k, seqused_k = extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_k
    refuse_beyond(extras, options, TAKEN, "with block_table")
    q, qv = as_operands(q, qv, cache=k)
    for name, tensor in (("q", q), ("block_table", block_table), ("cu_seqlens_q", cu_seqlens_q)):
        check_dense(name, tensor)
    lengths = seqused_k
    if lengths is None:
        if cu_seqlens_k is None:
            raise TypeError("cu_seqlens_k must be an int32 torch.Tensor (or seqused_k be given), got None")
        check_offset_pair(cu_seqlens_q, cu_seqlens_k, q)
        lengths = cu_seqlens_k.diff()
        if reads_values(q) and is_plain((q, cu_seqlens_k)):
            longest = MAX_LENGTH if options.max_seqlen_k is None else options.max_seqlen_k
            check_offset_values("cu_seqlens_k", cu_seqlens_k, MAX_LENGTH, longest)
    tensors = CacheTensors(
        cache_seqlens=lengths,
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        alibi_slopes=extras.alibi_slopes,
        sink=extras.sink,
        qv=None if qv is None else contiguous_qv(qv),
    )
    try:
        return decode((q, k, v), tensors, DecodeOptions(**shared_fields(DecodeOptions, options)), buffers)
    except ERRORS as error:
        of_lengths = "cu_seqlens_k" if seqused_k is None else "seqused_k"
        raise renamed(error, {"k_cache": "k", "v_cache": "v", "cache_seqlens": of_lengths}) from None
