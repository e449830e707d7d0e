"""Groups of sequences whose block tables begin with the same blocks. A step reads these blocks once a group.

Answers of one prompt share its blocks, and so do prompts that found their beginning in the prefix cache. All
that counts is the block table, so forks and swapped sequences need no rules of their own. Only full blocks of
prompts are compared, since answers differ. Beams are the exception: they also share parts of their answers.

The sequences of a step are kept sorted by their first blocks, so that those with a common prefix are
adjacent, and the number of blocks that neighbours have in common is known. A group is a range whose
neighbours all have at least some number of blocks in common. Groups contain other groups: a system prompt,
then a question. At most ``MAX_LEVELS`` nested groups are chosen for each sequence, such that the fewest
tokens are read. Attention then is a cascade (:func:`flashtile.operators.decode.attend_shared`).

A sequence that comes or goes changes only its own place, and a step with the sequences of the last one reuses
its groups.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from flashtile.engine.speculation import MAX_GUESSES
from flashtile.kv_cache import BlockManager

if TYPE_CHECKING:
    from flashtile.engine.scheduler import Entry

MAX_LEVELS = 2
MIN_SAVED_BYTES = 2**27
"""For each level, a layer of a step must read this many fewer bytes. A level costs each layer up to two
launches, and a partial result for each query: on an H200, 12 us for 8 sequences and 20 us for 256. There,
steps of llama-3.2-1b that saved 59 MB took 1.09 times as long as without groups, 117 MB 1.01 to 1.02 times,
248 MB 0.93 times and 470 MB 0.74 times (benchmarks/results/experiments/models.json)."""
MAX_NEW_TOKENS = MAX_GUESSES + 2
"""Sequences with more new tokens in a step, which have no guesses, are in no group. Such chunks of prompts
are bound by products, not by reading, and Hopper's fast kernel for them continues no other softmax. They come
last in the step, and their attention is a call of its own, whose gain is not measured."""
MAX_NESTING = 8
"""Number of nested groups among which levels are chosen, which bounds the time to choose them."""
MIN_BOUND = 8
"""Groups with fewer new tokens are computed as if they could have this many, which a tile has room for."""
BYTES = array("i").itemsize


class Group(NamedTuple):
    """Sequences ``start`` to ``stop`` of a step, which share the keys at positions ``first`` to ``end``."""

    start: int
    stop: int
    first: int
    end: int


@dataclass(frozen=True, eq=False)
class Cascade:
    """The groups of a step.

    Attributes:
        levels: the groups of each level, in order. Those of level 1 begin with key 0, or where a window
            begins. Each group of level 2 is within one of level 1 or in none, and its keys follow.
        saved: number of tokens that are not read because others of their group read them.
    """

    levels: tuple[tuple[Group, ...], ...]
    saved: int

    def within(self, window: int, entries: list[Entry], least: int) -> Cascade | None:
        """Return the groups for layers in which a query sees ``window`` keys before its own; all if negative.

        ``entries`` are those of the step, in order. Returns None if a level would save fewer than ``least``
        tokens.

        The queries of a group attend together, without a mask, to keys that all of them see. A sequence's own
        keys are one range, so no other key that one of them sees may lie among the group's. So a group has
        the keys that its queries see if all see the same of them, as short contexts do, and answers that are
        at the same position. Otherwise each sequence reads its own.
        """
        if window < 0 or sum(max(map(itemgetter(i), entries)) for i in (1, 2)) <= window + 1:
            return self
        of_first = [start - window for _, start, *_ in entries]  # the first key that the first new token sees
        of_last = [seen + entry.num_tokens - 1 for seen, entry in zip(of_first, entries, strict=True)]
        ends, levels, saved = [0] * len(entries), list[tuple[Group, ...]](), 0
        for groups in self.levels:
            found = []
            for start, stop, _, end in groups:
                first = max(ends[start], *of_last[start:stop])
                if first < end and first == max(ends[start], min(of_first[start:stop])):
                    found.append(Group(start, stop, first, end))
                    ends[start:stop] = [end] * (stop - start)
                    saved += (stop - start - 1) * (end - first)
            if found:
                levels.append(tuple(found))
        return Cascade(tuple(levels), saved) if levels and saved >= least * len(levels) else None

    def longest(self, width: int, tokens: int) -> tuple[int, ...]:
        """Return a bound of the new tokens of each level's largest group.

        ``width`` is the largest number of new tokens of a sequence, ``tokens`` that of all sequences.
        """
        largest = (max(group.stop - group.start for group in groups) for groups in self.levels)
        return tuple(bound_of_group(count * width, tokens) for count in largest)

    def numbers(self, batch: int) -> array[int]:
        """Return what a step of ``batch`` sequences needs, in rows of :func:`row_length` numbers.

        The first row has for each sequence the end of the keys that it shares. For each level follow the
        offsets of the groups, and the first and the end of their keys. A sequence in no group is a group of
        its own without keys. Groups without sequences fill the rows.
        """
        length = row_length(batch)
        ends = [0] * length
        rows = [ends]
        for groups in self.levels:
            offsets: list[int] = []
            firsts, lasts, at = [0] * length, [0] * length, 0
            for start, stop, first, end in groups:
                offsets += range(at, start)
                firsts[len(offsets)], lasts[len(offsets)] = first, end
                offsets.append(start)
                ends[start:stop] = [end] * (stop - start)
                at = stop
            offsets += range(at, batch)
            offsets += [batch] * (length - len(offsets))
            rows += [offsets, firsts, lasts]
        return array("i", itertools.chain.from_iterable(rows))


Cascades = dict[Cascade, list[int]]
"""The groups of a step, and the windows of the layers that have them."""


def bound_of_group(queries: int, tokens: int) -> int:
    """Return a bound of the new tokens of a group: a power of two, or all ``tokens`` of the step.

    There are few bounds, because each has its own CUDA graphs.
    """
    return min(max(MIN_BOUND, 1 << (queries - 1).bit_length()), tokens)


def row_length(batch: int) -> int:
    """Return the length of the rows of :meth:`Cascade.numbers`, so that each row is aligned to 16 bytes."""
    return -(-(batch + 1) // 4) * 4


def numbers_of_levels(batch: int, levels: int) -> int:
    """Return the length of :meth:`Cascade.numbers`."""
    return (1 + 3 * levels) * row_length(batch)


class _Node(NamedTuple):
    """Sequences ``start`` to ``stop`` have ``depth`` tokens in common; the ranges within them have more."""

    start: int
    stop: int
    depth: int
    within: list[_Node]


class PrefixGroups:
    """Finds the groups of each step.

    Args:
        manager: the blocks of the sequences.
        windows: for each layer, the number of keys that a query sees before its own; negative for all.
        token_bytes: bytes of a token's keys and values in a layer.
        beside_chunks: whether there are groups in steps with chunks of more than MAX_NEW_TOKENS tokens.

    Attributes:
        num_read: number of tokens that sequences of all steps have read, as if each of them read its own.
            A token counts once for each layer.
        num_saved: number of these tokens that were not read because others of their group read them.
    """

    def __init__(
        self,
        manager: BlockManager,
        windows: tuple[int, ...] = (-1,),
        token_bytes: int = 1,
        beside_chunks: bool = True,
    ):
        self.manager, self.windows, self.token_bytes = manager, Counter(windows), token_bytes
        self.beside_chunks = beside_chunks
        self.num_read = self.num_saved = 0
        self._numbers: list[int | None] = []  # the manager's numbers of the last step's sequences
        self._blocks: dict[int, bytes] = {}  # the first blocks of each of them
        self._growing: set[int] = set()  # beams, and sequences whose prompt was not complete
        self._sorted: list[tuple[bytes, int]] = []  # (first blocks, number)
        self._common: list[int] = []  # blocks that each of these has in common with the one before it
        self._cascade: Cascade | None = None
        self._order: list[int] = []

    def __call__(self, entries: list[Entry]) -> tuple[list[Entry], Cascades]:
        """Return the entries of a step in the order of their groups, and the groups of layers by window.

        Returns the entries as they are, and no groups, if groups would save too little. Call it for every
        step: a sequence that was swapped out may return with other blocks, but not in the same step.
        """
        few = entries
        if max(map(itemgetter(2), entries), default=0) > MAX_NEW_TOKENS:
            few = [entry for entry in entries if entry.num_tokens <= MAX_NEW_TOKENS]
        numbers = [entry.sequence.block_sequence for entry in few]
        if numbers != self._numbers or self._growing:
            self._update(few, numbers)
        new, starts = sum(map(itemgetter(2), entries)), list(map(itemgetter(1), entries))
        for window, layers in self.windows.items():
            seen = starts if window < 0 else map(min, starts, itertools.repeat(window))
            self.num_read += layers * (new + sum(seen))
        if self._cascade is None or (few is not entries and not self.beside_chunks):
            return entries, {}
        found: Cascades = {}
        ordered = [few[i] for i in self._order]
        for window, layers in self.windows.items():
            cascade = self._cascade.within(window, ordered, self.least)
            if cascade is not None:
                found.setdefault(cascade, []).append(window)
                self.num_saved += layers * cascade.saved
        if not found:
            return entries, found
        return ordered + [entry for entry in entries if entry.num_tokens > MAX_NEW_TOKENS], found

    @property
    def least(self) -> int:
        """The fewest tokens that a level must save."""
        return -(-MIN_SAVED_BYTES // self.token_bytes)

    def _update(self, entries: list[Entry], numbers: list[int | None]) -> None:
        places = {number: i for i, number in enumerate(numbers) if number is not None}
        table = self.manager.table
        for number in self._blocks.keys() - places.keys():
            self._remove(number)
        for number in (places.keys() - self._blocks.keys()) | self._growing:
            entry = entries[places[number]]
            request, begin = entry.sequence.request, entry.row * table.max_blocks
            # Others can have the full blocks of the prompt as well, and other beams all full blocks.
            shared = entry.start if request.beam is not None else min(entry.start, request.num_prompt)
            blocks = table.slices[begin : begin + shared // self.manager.block_size].tobytes()
            if self._blocks.get(number) != blocks:
                self._remove(number)
                self._insert(number, blocks)
            if request.beam is not None or entry.start < request.num_prompt:
                self._growing.add(number)
            else:
                self._growing.discard(number)
        self._numbers = numbers
        self._cascade = self._choose()
        self._order = [] if self._cascade is None else [places[number] for _, number in self._sorted]

    def _insert(self, number: int, blocks: bytes) -> None:
        key, common = (blocks, number), self._common
        i = bisect_left(self._sorted, key)
        common.insert(i, common_blocks(self._sorted[i - 1][0], blocks) if i else 0)
        self._sorted.insert(i, key)
        if i + 1 < len(common):
            common[i + 1] = common_blocks(blocks, self._sorted[i + 1][0])
        self._blocks[number] = blocks

    def _remove(self, number: int) -> None:
        blocks = self._blocks.pop(number, None)
        self._growing.discard(number)
        if blocks is None:
            return
        i, common = bisect_left(self._sorted, (blocks, number)), self._common
        if i + 1 < len(common):
            common[i + 1] = min(common[i : i + 2])
        del self._sorted[i], common[i]

    def _choose(self) -> Cascade | None:
        nodes = self._nodes(0, len(self._sorted), 0, MAX_NESTING)
        saved, levels = 0, []
        for most in range(1, MAX_LEVELS + 1):
            more, found = _best(nodes, 0, most)
            if more - saved < self.least:
                break
            saved, levels = more, found
        return Cascade(tuple(map(tuple, levels)), saved) if levels else None

    def _nodes(self, start: int, stop: int, above: int, nesting: int) -> list[_Node]:
        """Return the largest ranges within ``start`` to ``stop`` with more than ``above`` common blocks."""
        found, common = [], self._common
        cuts = [i for i in range(start + 1, stop) if common[i] <= above]
        for begin, end in itertools.pairwise((start, *cuts, stop)):
            if end - begin > 1:
                between = common[begin + 1 : end]
                depth = min(between)
                deeper = nesting > 1 and max(between) > depth
                within = self._nodes(begin, end, depth, nesting - 1) if deeper else []
                found.append(_Node(begin, end, depth * self.manager.block_size, within))
        return found


def _best(nodes: list[_Node], base: int, levels: int) -> tuple[int, list[list[Group]]]:
    """Choose the groups that save the most, with at most ``levels`` of them nested.

    ``base`` is the number of tokens that a group around the nodes has read. Returns the number of tokens
    saved, and the groups of each level.
    """
    if not levels:
        return 0, []
    total = 0
    chosen: list[list[Group]] = [[] for _ in range(levels)]
    for start, stop, depth, within in nodes:
        saved, found = (stop - start - 1) * (depth - base), [[Group(start, stop, base, depth)]]
        if within:
            more, below = _best(within, depth, levels - 1)
            without = _best(within, base, levels)
            saved, found = max((saved + more, found + below), without, key=itemgetter(0))
        total += saved
        for level, groups in zip(chosen, found, strict=False):
            level += groups
    return total, chosen


def common_blocks(a: bytes, b: bytes) -> int:
    """Return the number of equal blocks at the start of two lists of blocks."""
    length = min(len(a), len(b))
    a, b = a[:length], b[:length]
    if a == b:
        return length // BYTES
    differing = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    lowest_bit = (differing & -differing).bit_length() - 1
    return lowest_bit // (8 * BYTES)
