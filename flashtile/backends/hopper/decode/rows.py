"""A warpgroup's query rows in attention over a cache: tokens of PACK query heads that share a key head."""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.constants import WARPGROUP_ROWS
from flashtile.backends.hopper.forward.kernel import Rows, Tree
from flashtile.backends.hopper.forward.schedule import OwnBlocks, own_blocks
from flashtile.backends.portable.decode.schedule import sequence_of, window_at


class OwnRows(NamedTuple):
    """A warpgroup's rows; each field is [64]."""

    index: Any
    """Index of the row within the m_block."""
    token: Any
    """Query token within the sequence."""
    head: Any
    """Query head."""
    exists: Any
    """Whether the row is valid."""


@gluon.jit
def own_rows(C: gl.constexpr, W: gl.constexpr, work, lengths, layout: gl.constexpr):
    """Return the token, head and validity of each row of warpgroup W of a work tile, as :class:`OwnRows`."""
    index = W * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, layout=layout)
    _, m = sequence_of(work.m_block, lengths, C)
    row = m * C.BLOCK_M + index
    return OwnRows(index, row // C.PACK, work.head_kv * C.PACK + row % C.PACK, index < work.num_rows)


@gluon.jit
def own_range(C: gl.constexpr, W: gl.constexpr, work, n_begin, n_end, lengths):
    """Return the n_blocks in [n_begin, n_end) that the rows of warpgroup W see, as :class:`OwnBlocks`.

    A warpgroup without valid rows gets one masked n_block, so it needs no special case.
    """
    _, m = sequence_of(work.m_block, lengths, C)
    first_row = m * C.BLOCK_M + W * WARPGROUP_ROWS
    num_rows = work.num_rows - W * WARPGROUP_ROWS
    first = first_row // C.PACK
    last = (first_row + min(num_rows, WARPGROUP_ROWS) - 1) // C.PACK
    sequence = work.sequence
    begin, end, full_begin, full_end = own_blocks(
        first, last, n_begin, n_end, sequence.len_q, sequence.len_k, lengths.window_left,
        lengths.window_right, C.HAS_LEFT, C.HAS_RIGHT, C.BLOCK_N,
    )  # fmt: skip
    if C.HAS_LEFTPAD:
        padded = (sequence.leftpad + C.BLOCK_N - 1) // C.BLOCK_N
        full_begin = min(max(full_begin, padded), full_end)
    if lengths.attention_chunk is not None:  # edges of chunks cut blocks as well; own_blocks ignores them
        offset = sequence.len_k - sequence.len_q
        left, _ = window_at(last + offset, sequence.leftpad, lengths)
        _, right = window_at(first + offset, sequence.leftpad, lengths)
        full_end = min(full_end, max((first + offset + right + 1) // C.BLOCK_N, begin))
        full_begin = min(max(full_begin, (last + offset - left + C.BLOCK_N - 1) // C.BLOCK_N), full_end)
    if C.HAS_TREE:  # the tree mask applies from the first new token on
        full_end = min(full_end, max(max(sequence.len_k - sequence.len_q, 0) // C.BLOCK_N, begin))
        full_begin = min(full_begin, full_end)
    if num_rows <= 0:
        begin = end - 1
        full_begin = begin
        full_end = begin
    return OwnBlocks(begin, end, full_begin, full_end)


@gluon.jit
def mask_rows(C: gl.constexpr, work, own, slope, call):
    """Return a warpgroup's rows as ``forward.kernel.Rows``, with the ranges of keys that they see."""
    sequence, lengths = work.sequence, call.lengths
    offset = sequence.len_k - sequence.len_q
    in_keys = own.token + offset
    left, right = window_at(in_keys, sequence.leftpad, lengths)
    last_key = gl.full([WARPGROUP_ROWS], 0, gl.int32, in_keys.type.layout) + sequence.len_k - 1
    if C.HAS_RIGHT:
        last_key = gl.minimum(in_keys + right, last_key)
    tree = 0
    if C.HAS_TREE:
        b, _ = sequence_of(work.m_block, lengths, C)
        row = gl.where(own.exists, own.token * lengths.seqlen_q, -1)
        mask_of_sequence = call.pointers.tree_mask + b.to(gl.int64) * call.outer.tree_stride
        tree = Tree(mask_of_sequence, row, offset, sequence.len_q)  # type: ignore[assignment]
    first_key = in_keys - left
    if C.HAS_LEFTPAD:
        first_key = gl.maximum(first_key, sequence.leftpad)
    return Rows(in_keys, first_key, last_key, slope, tree, 0)
