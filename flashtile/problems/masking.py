"""Which keys a row sees by its position: the one description of a mask.

The options of a call hold a :class:`Masking`, and its problem is one. The arguments ``causal``,
``window_size`` and ``attention_chunk`` of public functions become one by
:func:`flashtile.checks.conversions.as_masking`.

A position is the index of a key within its sequence. Row i of ``seqlen_q`` rows over ``seqlen_k`` keys is at
position ``i + seqlen_k - seqlen_q`` (alignment to the bottom right). The first rows may be at negative
positions.

To add an option, add a field to :class:`Masking`, its range to :data:`RANGES`, and its rule to
:meth:`Masking.visible`, :meth:`Masking.sees_all` and :meth:`Masking.key_range`. Schemas of operators, checks
of ranges, the reference, the CPU backend, and refusals by what supports only windows follow from these.
:class:`KernelMask` and :class:`MaskConstants` are the same options as kernels take them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.problems.common import UNLIMITED


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Which keys a row sees by its position. All options must allow a key.

    Attributes:
        window_left: number of keys before its own position that a row sees; -1 is unlimited.
        window_right: number of keys after its own position; -1 is unlimited. ``causal`` means 0.
        attention_chunk: if above 0, positions are divided into chunks of this size, and a row sees only keys
            of its own chunk. A cache's first chunk begins after ``cache_leftpad``.
    """

    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    attention_chunk: int = 0

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of public functions that give this masking."""
        window_size = self.window_left, self.window_right
        return {"window_size": window_size, **{name: getattr(self, name) for name in BEYOND_WINDOW}}

    @property
    def beyond_window(self) -> str | None:
        """Name of the first option, other than the window, that the mask has; None if there is none.

        The effect of such an option depends on more than the distance between row and key.
        """
        return self.beyond(())

    def beyond(self, known: Collection[str]) -> str | None:
        """Name of the first option that is neither the window nor ``known``; None if there is none."""
        for name in BEYOND_WINDOW:
            if getattr(self, name) and name not in known:
                return name
        return None

    @property
    def has_window(self) -> bool:
        return self.window_left != UNLIMITED or self.window_right != UNLIMITED

    @property
    def hides_by_position(self) -> bool:
        """Whether any option may hide a key."""
        return self.has_window or self.beyond_window is not None

    @property
    def in_one_range(self) -> bool:
        """Whether the keys that a row sees are adjacent."""
        return self.beyond(ADJACENT) is None

    def effective_window(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """Return the window's (left, right), with -1 for a side that hides no key at these lengths."""
        mask = self.for_kernels(seqlen_q, seqlen_k)
        return mask.window_left, mask.window_right

    def for_kernels(self, seqlen_q: int, seqlen_k: int) -> KernelMask:
        """Return the options as kernels take them, without those that hide no key at these lengths.

        The lengths are those of the longest sequence. Chunks also limit the window: no row sees a key that is
        a chunk away.
        """
        left, right, chunk, most = self.window_left, self.window_right, self.attention_chunk, max(seqlen_k, 1)
        # If there are more queries than keys, the first queries come before all keys, and no key is in their
        # chunk. So a chunk that covers all keys may still hide them from these queries. It hides none if
        # there is one query, or if the window hides all keys after a query.
        if chunk == 0 or (chunk >= most and (right == 0 or seqlen_q == 1)):
            return KernelMask(
                UNLIMITED if left >= seqlen_k - 1 else left,
                UNLIMITED if right >= seqlen_q - 1 else right,
            )
        chunk = min(chunk, most)
        left, right = (chunk - 1 if side == UNLIMITED else min(side, chunk - 1) for side in (left, right))
        return KernelMask(left, UNLIMITED if seqlen_q == 1 else right, chunk)

    def visible(self, rows: range, keys: range, device: Any = "cpu") -> Tensor:
        """Return (rows, keys) bool, True where a row sees a key. Rows and keys are ranges of positions.

        Nothing is changed in place, which ``torch.func.functionalize`` cannot transform for booleans.
        """
        own = torch.arange(rows.start, rows.stop, device=device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=device)
        seen = torch.ones((len(rows), len(keys)), dtype=torch.bool, device=device)
        if self.window_left != UNLIMITED:
            seen = seen & (key >= own - self.window_left)
        if self.window_right != UNLIMITED:
            seen = seen & (key <= own + self.window_right)
        if self.attention_chunk:
            seen = seen & (key // self.attention_chunk == own // self.attention_chunk)
        return seen

    def sees_all(self, rows: range, keys: range) -> bool:
        """Whether each of ``rows`` sees each of ``keys``, so that their tile needs no mask."""
        if not (rows and keys):
            return True
        chunk = self.attention_chunk
        return (
            (self.window_left == UNLIMITED or keys.start >= rows.stop - 1 - self.window_left)
            and (self.window_right == UNLIMITED or keys.stop - 1 <= rows.start + self.window_right)
            and (not chunk or len({at // chunk for at in (rows[0], rows[-1], keys[0], keys[-1])}) == 1)
        )

    def key_range(self, rows: range, keys: range) -> range:
        """Return the smallest range that has all those of ``keys`` that at least one of ``rows`` sees.

        An empty range may stop before its start.
        """
        start, stop, chunk = keys.start, keys.stop if rows else keys.start, self.attention_chunk
        if self.window_left != UNLIMITED:
            start = max(start, rows.start - self.window_left)
        if self.window_right != UNLIMITED:
            stop = min(stop, rows.stop + self.window_right)
        if chunk:
            start = max(start, rows.start // chunk * chunk)
            stop = min(stop, ((rows.stop - 1) // chunk + 1) * chunk)
        return range(start, stop)

    def row_range(self, rows: range, keys: range) -> range:
        """Return a range that has all those of ``rows`` that see at least one of ``keys``."""
        options = {name: getattr(self, name) for name in RANGES}
        options |= {"window_left": self.window_right, "window_right": self.window_left}
        return Masking(**options).key_range(keys, rows)


class Range(NamedTuple):
    """The range of an option, up to the largest length: its argument, its least value and what that means."""

    argument: str
    least: int
    meaning: str


RANGES = {
    "window_left": Range("window_size[0]", UNLIMITED, "-1 (unlimited)"),
    "window_right": Range("window_size[1]", UNLIMITED, "-1 (unlimited)"),
    "attention_chunk": Range("attention_chunk", 0, "0 (off)"),
}
"""The range of each field of :class:`Masking`."""

BEYOND_WINDOW = tuple(name for name in RANGES if not name.startswith("window_"))
"""Options whose effect depends on more than the distance between row and key. 0 turns each of them off."""

ADJACENT = ("attention_chunk",)
"""Those of :data:`BEYOND_WINDOW` with which the keys that a row sees are adjacent, as with a window."""


class KernelMask(NamedTuple):
    """The options of a :class:`Masking` as kernels take them. Kernels are not specialized on their values."""

    window_left: Any
    """-1 if the left side hides no key (HAS_LEFT is False). Chunks limit both sides."""
    window_right: Any
    attention_chunk: Any = None
    """None without chunks: such kernels have no parameter for it."""

    @property
    def constants(self) -> dict[str, Any]:
        """The fields of :class:`MaskConstants`."""
        return {
            "HAS_LEFT": self.window_left != UNLIMITED,
            "HAS_RIGHT": self.window_right != UNLIMITED,
            "HAS_CHUNK": self.attention_chunk is not None,
        }

    def cuts_every_tile(self, rows: int, keys: int) -> bool:
        """Whether every tile of ``rows`` x ``keys`` scores has hidden ones, wherever it lies.

        The distances between its keys and its rows are ``rows + keys - 1`` successive numbers, and the window
        must have all of them. Chunks may hide more.
        """
        left, right = self.window_left, self.window_right
        return UNLIMITED not in (left, right) and left + right + 1 < rows + keys - 1


@dataclass(frozen=True)
class MaskConstants:
    """Which options of :class:`KernelMask` hide keys: constants that a kernel is compiled for."""

    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_CHUNK: bool


EVERYTHING = Masking()
CAUSAL = Masking(window_right=0)


def positions(seqlen_q: int, seqlen_k: int) -> range:
    """Return the positions of the rows of a sequence, which are aligned with its last keys."""
    return range(seqlen_k - seqlen_q, seqlen_k)


def split(extent: range, size: int) -> Iterator[range]:
    """Split rows or keys into blocks of ``size``; the last one may be shorter."""
    for start in range(extent.start, extent.stop, size):
        yield range(start, min(start + size, extent.stop))
