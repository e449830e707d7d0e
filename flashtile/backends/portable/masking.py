"""Masks by position in Triton: the keys that a row sees, and the blocks that a program visits.

These functions are the rule of :class:`flashtile.problems.masking.Masking` for all kernels in Triton, and
:func:`window_at` also for the Hopper kernel of decoding. Each takes the launch's ``mask``, a
:class:`~flashtile.problems.masking.KernelMask`, and the kernel's constants ``C``, which extend
:class:`~flashtile.problems.masking.MaskConstants`::

    window = window_at(position, first_key, mask, C)     how far a row sees, before and after its position
    seen   = visible(distance, window, mask, C)          score by score
    blocks = block_range(start, end, ...)                the blocks to visit, and which of them need no mask

The window of a later position begins and ends no earlier. So the windows of the first and the last row of a
tile tell which keys some row sees, and which keys all rows see. An option that hides keys between others
needs its rule in :func:`visible` only.
"""

import triton.language as tl

from flashtile.backends.common.deferred import triton


@triton.jit
def window_at(position, first_key, mask, C: tl.constexpr, MIRRORED: tl.constexpr = False):
    """Return (left, right): how many keys before and after its own a row at ``position`` may see.

    Chunks are counted from position ``first_key``. With MIRRORED, ``position`` is that of a key, and the
    result is how many positions before and after it the rows have that may see the key.
    """
    left = mask.window_right if MIRRORED else mask.window_left
    right = mask.window_left if MIRRORED else mask.window_right
    if C.HAS_CHUNK:
        before = (position - first_key) % mask.attention_chunk
        # Positions are negative if there are more queries than keys.
        before = tl.where(before < 0, before + mask.attention_chunk, before)
        left = tl.minimum(left, before)
        right = tl.minimum(right, mask.attention_chunk - 1 - before)
    return left, right


@triton.jit
def visible(distance, window, mask, C: tl.constexpr):
    """Whether rows see keys. ``distance`` is the position of the key minus that of the row.

    ``window`` is the result of :func:`window_at` for the rows, and broadcasts to ``distance``.
    """
    left, right = window
    if C.HAS_LEFT and C.HAS_RIGHT:
        return (distance >= -left) & (distance <= right)
    elif C.HAS_LEFT:
        return distance >= -left
    elif C.HAS_RIGHT:
        return distance <= right
    else:
        return tl.full(distance.shape, True, tl.int1)


@triton.jit
def block_range(
    start,
    end,
    offset,
    length,
    of_first,
    of_last,
    HAS_BACK: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the key blocks that query positions ``start`` to ``end`` - 1 see, or vice versa.

    ``of_first`` is the window (back, ahead) of the first position, ``of_last`` that of the last
    (:func:`window_at`). The window of position i covers positions ``i + offset - back`` to
    ``i + offset + ahead`` of the other sequence (keys for a query, queries for a key), which has ``length``
    positions. Returns (first, full_first, full_last, last):

    - Blocks [first, last) are in the window of at least one position.
    - Blocks [full_first, full_last) are in the windows of all positions and within the sequence, so they need
      no mask.

    All arguments and results are integers, so Python can call this function as ``block_range.fn``.
    """
    reach_start = 0
    full_start = 0
    reach_end = length
    full_end = length
    if HAS_BACK:
        reach_start = max(0, start + offset - of_first[0])
        full_start = max(0, end - 1 + offset - of_last[0])
    if HAS_AHEAD:
        reach_end = min(length, max(0, end + offset + of_last[1]))
        full_end = min(length, max(0, start + offset + of_first[1] + 1))
    last = (reach_end + BLOCK - 1) // BLOCK
    full_first = min((full_start + BLOCK - 1) // BLOCK, last)
    first = min(reach_start // BLOCK, full_first)
    full_last = min(max(full_end // BLOCK, full_first), last)
    return first, full_first, full_last, last
