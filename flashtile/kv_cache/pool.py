"""The blocks of one memory: which are free, how many references each has, and which outlive their users.

Every block is in exactly one of three states:

* *free*: nothing refers to it, its content means nothing;
* *used*: by one or more sequences (``refs`` counts them, and one more if the prefix cache has the block);
* *cached*: only the prefix cache has it. Its content is found by its hash until the block is needed
  elsewhere; the least recently used one is evicted first.

Allocating, acquiring and releasing a block costs the same whatever the size of the pool.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Copies = list[tuple[int, int]]
"""(source, destination) blocks. No destination is a source, too, so that they may be copied in any order."""


class CacheFullError(RuntimeError):
    """Something of fixed size is used up. What raised it has changed nothing."""


class OutOfBlocksError(CacheFullError):
    """An operation needs ``needed`` blocks, more than the ``available`` that it could have had."""

    def __init__(self, what: str, sequences: int, needed: int, available: int, total: int):
        what = f"{what} {sequences} sequence{'s' * (sequences != 1)}"
        super().__init__(f"{what} needs {needed} blocks, but {available} of {total} are available")
        self.needed, self.available = needed, available


class OutOfSequencesError(CacheFullError):
    """All ``max_sequences`` sequences are in use."""


class ArraysWithViews:
    """Python's arrays, and views of them for torch: a copy or pickle takes the arrays and views them anew."""

    def make_views(self) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if not isinstance(value, Tensor | memoryview)
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.make_views()


class BlockPool(ArraysWithViews):
    """``num_blocks`` blocks, numbered from 0. The caller asks for no more than ``available``.

    Args:
        num_blocks: blocks in the pool.
        null_blocks: blocks at its start that are never given out.

    Attributes:
        refs: references to each block, int32; the prefix cache's counts as one. A sequence may write to its
            block while this is 1.
        refs_tensor: (num_blocks,) int32, the same memory.
        free: free blocks, the next one last.
        cached: blocks that only the prefix cache has, the least recently used first.
        hash_of, block_of: from each block of the prefix cache to the hash of its content, and back.
    """

    def __init__(self, num_blocks: int, null_blocks: int = 0):
        self.num_blocks, self.null_blocks = num_blocks, null_blocks
        self.refs = array("i", [1] * null_blocks + [0] * (num_blocks - null_blocks))
        self.free = list(range(num_blocks - 1, null_blocks - 1, -1))  # the lowest number is allocated first
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.hash_of: dict[int, bytes] = {}
        self.block_of: dict[bytes, int] = {}
        self.make_views()

    def make_views(self) -> None:
        empty = torch.empty(0, dtype=torch.int32)
        self.refs_tensor = torch.frombuffer(self.refs, dtype=torch.int32) if self.refs else empty

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free ones and cached ones."""
        return len(self.free) + len(self.cached)

    def allocate(self) -> int:
        """A block with one reference."""
        block = self.free.pop() if self.free else self._evict()
        self.refs[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more reference to a used or cached block."""
        self.refs[block] += 1
        self.cached.pop(block, None)

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these used blocks."""
        refs = self.refs
        for block in blocks:
            refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each block; without any it is free, with the prefix cache's alone cached."""
        refs, hash_of, to_free = self.refs, self.hash_of, self.free.append
        for block in blocks:
            left = refs[block] - 1
            refs[block] = left
            if not left:
                to_free(block)
            elif left == 1 and block in hash_of:
                self.cached[block] = None

    def available_after(self, releases: dict[int, int]) -> int:
        """Blocks that could be allocated after this many releases of each block."""
        refs, hash_of = self.refs, self.hash_of
        return self.available + sum(
            refs[block] - count == (block in hash_of) for block, count in releases.items()
        )

    def cache_block(self, block: int, block_hash: bytes) -> bool:
        """Enter a used block into the prefix cache; it must not be written to from now on.

        Returns:
            False, and nothing is changed, if that content or that block is there already.
        """
        if block_hash in self.block_of or block in self.hash_of:
            return False
        self.block_of[block_hash] = block
        self.hash_of[block] = block_hash
        self.refs[block] += 1
        return True

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache; its blocks that no sequence uses are free then. Returns how many it had."""
        blocks = list(self.hash_of)
        self.hash_of.clear()
        self.block_of.clear()
        self.cached.clear()
        self.release(blocks)
        return len(blocks)

    def _evict(self) -> int:
        block, _ = self.cached.popitem(last=False)
        del self.block_of[self.hash_of.pop(block)]
        self.refs[block] = 0
        return block
