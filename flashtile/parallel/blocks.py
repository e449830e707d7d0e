"""Blocks of visible scores between the queries of one rank and the keys of another.

A block is a rectangle around the visible band of scores. Its rows and keys are indices into the two ranks'
own tensors. A block is computed by one attention call, alone or packed with other blocks. Keys outside of all
blocks are not sent, and scores outside are not computed. Everything here is integer arithmetic on the host.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from flashtile.caches import BoundedCache, outlives_modes
from flashtile.hardware.calls import visible_pairs
from flashtile.parallel.layout import Piece, tokens_of
from flashtile.problems.common import UNLIMITED


@dataclass(frozen=True)
class Mask:
    """Mask of the whole sequence, or of the documents packed in it.

    Args:
        left, right: sizes of the window; -1 is unlimited, and causal is ``right = 0``.
        starts_q, starts_k: the first token of each document, and the number of tokens (as ``cu_seqlens``).
            A query sees only keys of its own document. The mask is aligned at the document's bottom right.
    """

    left: int
    right: int
    starts_q: tuple[int, ...]
    starts_k: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """Scores of queries ``q_start`` to ``q_stop`` and keys ``k_start`` to ``k_stop``, under a window.

    The window is aligned at the bottom right of this rectangle. Every row and every key has a visible score.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    left: int = UNLIMITED
    right: int = UNLIMITED

    @property
    def whole(self) -> bool:
        """Whether every query sees every key."""
        rows, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        return (self.left == UNLIMITED or self.left >= keys - 1) and (
            self.right == UNLIMITED or self.right >= rows - 1
        )

    @property
    def pairs(self) -> int:
        """Number of visible scores."""
        rows, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        return visible_pairs(rows, keys, self.left, self.right)


@dataclass(frozen=True)
class Packed:
    """Blocks with equal windows, computed as one call for packed sequences.

    The call has the queries ``q_start`` to ``q_stop``, and all ``tokens_k`` keys. Tokens between the blocks
    become sequences of queries without keys, or of keys without queries.
    """

    blocks: tuple[Block, ...]
    q_start: int
    q_stop: int
    tokens_k: int

    @cached_property
    def _offsets(self) -> tuple[list[int], list[int]]:
        q, k = [0], [0]
        for block in (*self.blocks, None):
            start_q = (self.q_stop if block is None else block.q_start) - self.q_start
            start_k = self.tokens_k if block is None else block.k_start
            # Queries before the block form a sequence without keys. Keys before it form one without queries.
            if start_q > q[-1]:
                q, k = [*q, start_q], [*k, k[-1]]
            if start_k > k[-1]:
                q, k = [*q, q[-1]], [*k, start_k]
            if block is not None:
                q, k = [*q, block.q_stop - self.q_start], [*k, block.k_stop]
        return q, k

    @cached_property
    def longest(self) -> tuple[int, int]:
        """``max_seqlen_q`` and ``max_seqlen_k`` of the call."""
        q, k = (max(b - a for a, b in pairwise(of)) for of in self._offsets)
        return q, k

    @cached_property
    def _identity(self) -> object:
        """Key of this object, which is compared faster than its blocks."""
        return object()

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the call's ``cu_seqlens_q`` and ``cu_seqlens_k`` on a device."""
        key = self._identity, device
        found: tuple[Tensor, Tensor] | None = _on_devices.get(key)
        if found is None:
            with torch.inference_mode(False):  # later calls may save them for their backward pass
                q, k = (torch.tensor(of, dtype=torch.int32, device=device) for of in self._offsets)
            found = q, k
            if outlives_modes(q):
                _on_devices.store(key, found, sum(-(-t.nbytes // ALLOCATED) * ALLOCATED for t in found))
        return found


ALLOCATED = 512
"""torch allocates multiples of this many bytes on a GPU."""
OFFSETS_BYTES = 4 * 2**20
"""Bytes of offsets that are kept on devices. Training on packed documents has other offsets in each step."""
_on_devices: BoundedCache = BoundedCache(OFFSETS_BYTES)


Ranges = tuple[tuple[int, int], ...]
"""(start, stop) of ranges of one rank's queries or keys, ascending and disjoint."""


@dataclass(frozen=True)
class Pair:
    """The attention calls of one rank's queries over another rank's keys.

    The calls need only the keys in ``ranges``. Their key indices refer to the concatenation of these ranges.
    """

    ranges: Ranges
    calls: tuple[Block | Packed, ...]

    @property
    def tokens(self) -> int:
        """Number of keys that the calls need."""
        return sum(stop - start for start, stop in self.ranges)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(
            block for call in self.calls for block in (call.blocks if isinstance(call, Packed) else (call,))
        )

    @cached_property
    def disjoint(self) -> bool:
        """Whether each query is in at most one call, so that no partial results have to be merged."""
        return are_disjoint([(call.q_start, call.q_stop) for call in self.calls])

    @cached_property
    def pairs(self) -> int:
        """Number of visible scores of one head."""
        return sum(block.pairs for block in self.blocks)

    @cached_property
    def in_two(self) -> tuple[Pair, Pair]:
        """These calls in two parts: an eighth of the queries of the first call, and the others."""
        first, *others = self.calls
        if isinstance(first, Packed):
            return replace(self, calls=()), self
        cut = first.q_start + (first.q_stop - first.q_start) // 8
        parts = _limited(first, first.q_start, cut), _limited(first, cut, first.q_stop)
        begin, rest = (() if part is None else (part,) for part in parts)
        return replace(self, calls=begin), replace(self, calls=(*rest, *others))


@lru_cache(maxsize=4096)
def pair_of(
    queries: tuple[Piece, ...], keys: tuple[Piece, ...], mask: Mask, rows: Ranges | None = None
) -> Pair:
    """Return the attention calls of one rank's queries over another rank's keys.

    With ``rows``, the calls are limited to these queries, and each call is within one of the ranges.
    """
    length = tokens_of(queries)
    rows = ((0, length),) if rows is None else rows
    one_document = len(mask.starts_q) == 2
    if one_document and rows == ((0, length),) and _own_causal(queries, keys, mask):
        return Pair(rows, (Block(0, length, 0, length, UNLIMITED, 0),))
    blocks = _merged(list(_blocks(queries, keys, mask)))
    found = [part for of_rows in rows for block in blocks if (part := _limited(block, *of_rows))]
    ranges = union([(block.k_start, block.k_stop) for block in found])
    compact = [_counted_through(ranges, block) for block in found]
    if one_document:
        return Pair(ranges, tuple(compact))
    tokens_k = sum(stop - start for start, stop in ranges)
    calls: list[Block | Packed] = []
    for start, stop in rows:
        within = [block for block in compact if start <= block.q_start < stop]
        calls += _packed(within, start, stop, tokens_k)
    return Pair(ranges, tuple(calls))


def outside(ranges: Ranges, total: int) -> Ranges:
    """Return the tokens from 0 to ``total`` that are not in ``ranges``."""
    bounds = [0, *(bound for of_range in ranges for bound in of_range), total]
    return tuple((a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b)


def are_disjoint(ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether no token is in two of the ranges, which may be in any order."""
    return all(a[1] <= b[0] for a, b in pairwise(sorted(ranges)))


def _limited(block: Block, start: int, stop: int) -> Block | None:
    """Return the part of ``block`` with queries ``start`` to ``stop``; None if there is none."""
    first, last = max(start, block.q_start), min(stop, block.q_stop)
    if first >= last:
        return None
    if (first, last) == (block.q_start, block.q_stop):
        return block
    # A query has the position of the key with which it is aligned, so the last ones have the same.
    position = first + block.k_stop - block.q_stop
    rows, keys = Piece(position, last - first), Piece(block.k_start, block.k_stop - block.k_start)
    return _block(first, rows, block.k_start, keys, Mask(block.left, block.right, (), ()))


def _own_causal(queries: tuple[Piece, ...], keys: tuple[Piece, ...], mask: Mask) -> bool:
    """Whether attention of these queries over these keys is a single causal call.

    It is if both are the same tokens in ascending order, and the mask is causal without a window.
    """
    causal = mask.right == 0 and mask.left == UNLIMITED and mask.starts_q == mask.starts_k
    ordered = all(a.stop - a.step < b.start for a, b in pairwise(queries))
    return causal and queries == keys and ordered and tokens_of(queries) > 0


def _blocks(queries: tuple[Piece, ...], keys: tuple[Piece, ...], mask: Mask) -> Iterator[Block]:
    row = 0
    for of_q in queries:
        column = 0
        for of_k in keys:
            if of_q.step != of_k.step and of_q.length > 1 and of_k.length > 1:
                raise ValueError(f"pieces must have equal steps, got {of_q} and {of_k}")
            for document in _documents(of_q, of_k, mask):
                block = _block(*document, mask)
                if block is not None:
                    yield _moved(block, row, column)
            column += of_k.length
        row += of_q.length


def _documents(of_q: Piece, of_k: Piece, mask: Mask) -> Iterator[tuple[int, Piece, int, Piece]]:
    """Yield (row, queries, column, keys) for each document that has tokens in both pieces.

    ``queries`` and ``keys`` are the document's tokens in ``of_q`` and ``of_k``. The first of them have the
    indices ``row`` and ``column`` there. Each query gets the position of the key with which it is aligned.
    """
    first = max(0, bisect_right(mask.starts_q, of_q.start) - 1)
    for d in range(first, len(mask.starts_q) - 1):
        if mask.starts_q[d] >= of_q.stop:
            break
        row, rows = _cut(of_q, mask.starts_q[d], mask.starts_q[d + 1])
        column, keys = _cut(of_k, mask.starts_k[d], mask.starts_k[d + 1])
        if rows.length and keys.length:
            aligned = rows.start - mask.starts_q[d + 1] + mask.starts_k[d + 1]
            yield row, rows._replace(start=aligned), column, keys


def _cut(piece: Piece, start: int, stop: int) -> tuple[int, Piece]:
    """Cut ``piece`` to positions [start, stop). Return (index of the first kept token, new piece)."""
    first = min(piece.length, max(0, -((piece.start - start) // piece.step)))
    last = min(piece.length, max(0, -((piece.start - stop) // piece.step)))
    return first, Piece(piece.start + first * piece.step, max(0, last - first), piece.step)


def _block(row: int, queries: Piece, column: int, keys: Piece, mask: Mask) -> Block | None:
    """Return the smallest rectangle that contains all visible scores, or None if no score is visible.

    ``row`` and ``column`` are added to the rectangle's indices. Query i of ``queries`` sees key j of ``keys``
    where ``low <= j - i <= high``.
    """
    step = queries.step if queries.length > 1 else keys.step  # that of one token means nothing
    apart = keys.start - queries.start
    q_start, q_stop, k_start, k_stop = 0, queries.length, 0, keys.length
    high = keys.length - 1 if mask.right == UNLIMITED else (mask.right - apart) // step
    low = 1 - queries.length if mask.left == UNLIMITED else -((mask.left + apart) // step)
    if low > high:  # the window contains none of ``keys``
        return None
    if mask.right != UNLIMITED:
        q_start = max(q_start, -high)
    if mask.left != UNLIMITED:
        q_stop = min(q_stop, keys.length - low)
    k_start = max(k_start, q_start + low)
    k_stop = min(k_stop, q_stop + high)
    if q_start >= q_stop or k_start >= k_stop:
        return None
    shift = (k_stop - k_start) - (q_stop - q_start) - (q_start - k_start)
    return Block(
        row + q_start, row + q_stop, column + k_start, column + k_stop,
        UNLIMITED if mask.left == UNLIMITED else shift - low,
        UNLIMITED if mask.right == UNLIMITED else high - shift,
    )  # fmt: skip


def _moved(block: Block, rows: int, keys: int) -> Block:
    return replace(
        block,
        q_start=block.q_start + rows, q_stop=block.q_stop + rows,
        k_start=block.k_start + keys, k_stop=block.k_stop + keys,
    )  # fmt: skip


def _merged(blocks: list[Block]) -> list[Block]:
    """Merge adjacent blocks that contain no masked scores."""
    merged: list[Block] = []
    for block in blocks:
        last = merged[-1] if merged else None
        if last is not None and last.whole and block.whole:
            same_rows = (last.q_start, last.q_stop) == (block.q_start, block.q_stop)
            same_keys = (last.k_start, last.k_stop) == (block.k_start, block.k_stop)
            if (same_rows and last.k_stop == block.k_start) or (same_keys and last.q_stop == block.q_start):
                merged[-1] = Block(last.q_start, block.q_stop, last.k_start, block.k_stop)
                continue
        merged.append(block)
    return merged


def union(ranges: list[tuple[int, int]]) -> Ranges:
    """Merge ranges that overlap or touch."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def _counted_through(ranges: Ranges, block: Block) -> Block:
    """Return ``block`` with its keys counted within the concatenation of ``ranges``.

    All keys of the block lie in one of the ranges.
    """
    before = 0
    for start, stop in ranges:
        if start <= block.k_start < stop:
            return _moved(block, 0, before - start)
        before += stop - start
    raise AssertionError(f"{block} is in none of {ranges}")


def _packed(blocks: list[Block], q_start: int, q_stop: int, tokens_k: int) -> Iterator[Block | Packed]:
    """Group the blocks of packed documents into attention calls of queries ``q_start`` to ``q_stop``.

    The blocks of one call have equal windows. Queries and keys of each block come after those of the previous
    block.
    """
    waiting = sorted(blocks, key=lambda block: (block.q_start, block.k_start))
    while waiting:
        taken: list[Block] = []
        left: list[Block] = []
        for block in waiting:
            fits = not taken or (
                (block.left, block.right) == (taken[0].left, taken[0].right)
                and block.q_start >= taken[-1].q_stop
                and block.k_start >= taken[-1].k_stop
            )
            (taken if fits else left).append(block)
        yield taken[0] if len(taken) == 1 else Packed(tuple(taken), q_start, q_stop, tokens_k)
        waiting = left
