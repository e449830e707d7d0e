"""Blocks of rows and keys."""

from __future__ import annotations

from collections.abc import Iterator


def split(extent: range, size: int) -> Iterator[range]:
    """Split ``extent`` into blocks of ``size``; the last one may be shorter."""
    for start in range(extent.start, extent.stop, size):
        yield range(start, min(start + size, extent.stop))
