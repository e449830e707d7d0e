"""A pool of blocks with reference counts, and a prefix cache that finds full blocks by chained hashes.

Every block is in exactly one of three states:

* *free*: nothing refers to it, and its content is undefined;
* *used*: one or more sequences refer to it. ``refs`` counts them, and the prefix cache as one more;
* *cached*: only the prefix cache refers to it. Its content can be found by its hash until the block is
  evicted. The least recently used block is evicted first.

Allocating, acquiring and releasing a block take constant time.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from flashtile.checks.arguments import as_int_within

MAX_SIZE = 2**30
"""Largest allowed size, so that the sum of two lengths fits into an int32."""

HASH_BYTES = 16
"""Bytes of a hash. Two different prefixes share one with probability 2^-128, so contents are not compared."""

Copies = list[tuple[int, int]]
"""(source, destination) blocks. No destination is also a source, so the order of copies does not matter."""


def as_size(name: str, value: Any, least: int = 1, most: int = MAX_SIZE) -> int:
    """Return ``value`` as an int.

    Raises:
        TypeError, ValueError: ``value`` is not an int from ``least`` to ``most``; the message has ``name``.
    """
    size: int = as_int_within(name, value, least, most)
    return size


class CacheFullError(RuntimeError):
    """A resource of fixed size is exhausted. The operation that raised this has changed nothing."""


class OutOfBlocksError(CacheFullError):
    """An operation needs ``needed`` blocks, more than the ``available`` ones."""

    def __init__(self, what: str, sequences: int, needed: int, available: int, total: int):
        what = f"{what} {sequences} sequence{'s' * (sequences != 1)}"
        super().__init__(f"{what} needs {needed} blocks, but {available} of {total} are available")
        self.needed, self.available = needed, available


class OutOfSequencesError(CacheFullError):
    """All ``max_sequences`` sequences are in use."""


class ArraysWithViews:
    """Base of classes with Python arrays and tensor views of them. Copies and pickles make new views."""

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
    """A pool of ``num_blocks`` blocks, numbered from 0. Callers must not allocate more than ``available``.

    Args:
        num_blocks: blocks in the pool.
        null_blocks: number of blocks at the pool's start that are never allocated.

    Attributes:
        refs: number of references to each block, int32, including that of the prefix cache. A sequence may
            write to its block only while this number is 1.
        refs_tensor: (num_blocks,) int32, a view of ``refs``.
        free: free blocks; the next one to allocate is last.
        cached: blocks used only by the prefix cache, the least recently used first.
        hash_of, block_of: maps each block of the prefix cache to the hash of its content, and back.
    """

    def __init__(self, num_blocks: int, null_blocks: int = 0):
        num_blocks = as_size("num_blocks", num_blocks, 0)
        null_blocks = as_size("null_blocks", null_blocks, 0, num_blocks)
        self.num_blocks, self.null_blocks = num_blocks, null_blocks
        self.refs = array("i", [1] * null_blocks + [0] * (num_blocks - null_blocks))
        self.free = list(range(num_blocks - 1, null_blocks - 1, -1))  # the lowest number is allocated first
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.hash_of: dict[int, bytes] = {}
        self.block_of: dict[bytes, int] = {}
        self.make_views()

    def make_views(self) -> None:
        empty = torch.empty(0, dtype=torch.int32, device="cpu")
        self.refs_tensor = torch.frombuffer(self.refs, dtype=torch.int32) if self.refs else empty

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free ones and cached ones."""
        return len(self.free) + len(self.cached)

    def allocate(self) -> int:
        """Allocate a block and return it. It has one reference. Without a free block, evict a cached one."""
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            del self.block_of[self.hash_of.pop(block)]
        self.refs[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        self.refs[block] += 1
        self.cached.pop(block, None)

    def share(self, blocks: Iterable[int], count: int = 1) -> None:
        """Add ``count`` references to each of these used blocks."""
        refs = self.refs
        for block in blocks:
            refs[block] += count

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a reference from each block.

        A block without references becomes free. A block that only the prefix cache refers to becomes cached.
        """
        refs, hash_of, to_free = self.refs, self.hash_of, self.free.append
        for block in blocks:
            left = refs[block] - 1
            refs[block] = left
            if not left:
                to_free(block)
            elif left == 1 and block in hash_of:
                self.cached[block] = None

    def available_after(self, releases: dict[int, int]) -> int:
        """Return how many blocks would be available if each block were released ``releases[block]`` times."""
        refs, hash_of = self.refs, self.hash_of
        return self.available + sum(
            refs[block] - count == (block in hash_of) for block, count in releases.items()
        )

    def cache_block(self, block: int, block_hash: bytes) -> bool:
        """Add a used block to the prefix cache. The block must not be written to afterwards.

        Returns:
            False if the prefix cache has this content or this block already; nothing is changed then.
        """
        if block_hash in self.block_of or block in self.hash_of:
            return False
        self.block_of[block_hash] = block
        self.hash_of[block] = block_hash
        self.refs[block] += 1
        return True

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache, free blocks that no sequence uses, and return how many blocks it had."""
        blocks = list(self.hash_of)
        self.hash_of.clear()
        self.block_of.clear()
        self.cached.clear()
        self.release(blocks)
        return len(blocks)


def block_hashes(tokens: array[int], block_size: int, salt: bytes = b"") -> Iterator[bytes]:
    """Yield the hash of each full block of ``tokens``, in order. A partial last block has no hash.

    Keys and values of a token depend on every earlier token, so a block can be reused only if the whole
    prefix is equal: ``hash[j] = H(hash[j - 1] + tokens of block j)``.

    Args:
        tokens: the sequence's tokens.
        block_size: tokens per block.
        salt: bytes that enter every hash. They identify anything else that keys and values depend on (an
            adapter, an image), or the tenant.

    Raises:
        TypeError: ``salt`` is not bytes, even if there is no full block.
    """
    if not isinstance(salt, bytes):
        raise TypeError(f"salt must be bytes, got {type(salt).__name__}")
    block_hash = blake2b(salt, digest_size=HASH_BYTES).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        content = tokens[start : start + block_size].tobytes()
        block_hash = blake2b(block_hash + content, digest_size=HASH_BYTES).digest()
        yield block_hash
