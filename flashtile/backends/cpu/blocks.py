"""Functions that tell which rows, keys and tiles a window leaves visible, from lengths and ranges.

``offset`` is ``seqlen_k - seqlen_q``: query row i is aligned with key ``i + offset`` (bottom-right
alignment). A window side of -1 is unlimited.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashtile.problems.common import UNLIMITED


def split(extent: range, size: int) -> Iterator[range]:
    """Split ``extent`` into blocks of ``size``; the last one may be shorter."""
    for start in range(extent.start, extent.stop, size):
        yield range(start, min(start + size, extent.stop))


def visible_rows(seqlen_q: int, seqlen_k: int, window_left: int, window_right: int) -> range:
    """Return the rows that see at least one key."""
    if seqlen_k == 0:
        return range(0)
    offset = seqlen_k - seqlen_q
    start = 0 if window_right == UNLIMITED else max(0, -offset - window_right)
    stop = seqlen_q if window_left == UNLIMITED else min(seqlen_q, seqlen_k - offset + window_left)
    return range(start, max(start, stop))


def visible_keys(rows: range, seqlen_k: int, offset: int, window_left: int, window_right: int) -> range:
    """Return the keys that at least one of ``rows`` sees."""
    start = 0 if window_left == UNLIMITED else max(0, rows.start + offset - window_left)
    stop = seqlen_k if window_right == UNLIMITED else min(seqlen_k, rows.stop + offset + window_right)
    return range(start, max(start, stop))


def sees_all(rows: range, keys: range, offset: int, window_left: int, window_right: int) -> bool:
    """Whether every one of ``rows`` sees every one of ``keys``, so that their tile needs no mask."""
    left_free = window_left == UNLIMITED or keys.start >= rows.stop - 1 + offset - window_left
    right_free = window_right == UNLIMITED or keys.stop - 1 <= rows.start + offset + window_right
    return left_free and right_free


def hidden_keys(distance: Tensor, window_left: int, window_right: int) -> Tensor | None:
    """Return a bool mask that is True where the window hides a key; None without a window.

    ``distance`` is the position of each key minus that of its row.
    """
    if window_left == window_right == UNLIMITED:
        return None
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if window_left != UNLIMITED:
        hidden |= distance < -window_left
    if window_right != UNLIMITED:
        hidden |= distance > window_right
    return hidden


def chunks_of(rows: range, offset: int, attention_chunk: int) -> tuple[int, int]:
    """Return (start, end) of the chunks that contain the positions of ``rows``.

    A chunk has ``attention_chunk`` positions.
    """
    first, last = (row + offset for row in (rows.start, rows.stop - 1))
    return first // attention_chunk * attention_chunk, (last // attention_chunk + 1) * attention_chunk


def same_chunk(rows: range, keys: range, offset: int, attention_chunk: int) -> Tensor:
    """Return a bool mask (rows, keys), True where row and key lie in the same chunk.

    A chunk has ``attention_chunk`` positions.
    """
    own = torch.arange(rows.start + offset, rows.stop + offset, device="cpu") // attention_chunk
    return own[:, None] == torch.arange(keys.start, keys.stop, device="cpu") // attention_chunk
