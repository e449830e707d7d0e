"""Where a warpgroup's rows go: to out and lse, or to a partial result."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.constants import LN_2
from flashtile.backends.portable.decode.schedule import sequence_of


@gluon.jit
def store_rows(C: gl.constexpr, base, rows, exists, o):
    """Rows of o to ``base``, where ``rows`` says, straight from the product's registers."""
    layout: gl.constexpr = o.type.layout
    columns = gl.arange(0, C.BLOCK_DV, layout=gl.SliceLayout(0, layout))
    offsets = gl.convert_layout(rows, gl.SliceLayout(1, layout)) * C.HEAD_DIM_V
    exists = gl.convert_layout(exists, gl.SliceLayout(1, layout))
    inside = exists[:, None] & (columns < C.HEAD_DIM_V)[None, :]
    gl.store(base + offsets[:, None] + columns[None, :], o.to(base.dtype.element_ty), mask=inside)


@gluon.jit
def store_whole(C: gl.constexpr, o, lse, work, rows, call):
    """Rows of out and of lse, in base 2, as the caller gets them."""
    lengths = call.lengths
    num_heads_q = lengths.num_heads_kv * C.PACK
    b, _ = sequence_of(work.m_block, lengths, C)
    if C.VARLEN:
        tokens = work.sequence.start_q.to(gl.int64) + rows.token
        lse_rows = rows.head.to(gl.int64) * lengths.total_q + tokens
    else:
        tokens = b.to(gl.int64) * lengths.seqlen_q + rows.token
        lse_rows = (b.to(gl.int64) * num_heads_q + rows.head) * lengths.seqlen_q + rows.token
    gl.store(call.pointers.lse + lse_rows, lse * LN_2, mask=rows.exists)
    store_rows(C, call.pointers.out, tokens * num_heads_q + rows.head, rows.exists, o)


@gluon.jit
def store_partial(C: gl.constexpr, o, lse, slot, rows, call):
    """A partial result, as ``portable.decode.combine`` has it."""
    splits = call.splits
    partial = call.pointers.partial
    partial_rows = slot.to(gl.int64) * splits.partial_rows + rows.index
    partial_lse = partial + splits.slots.to(gl.int64) * splits.partial_rows * C.HEAD_DIM_V
    gl.store(partial_lse + partial_rows, lse, mask=rows.exists)
    store_rows(C, partial, partial_rows, rows.exists, o)
