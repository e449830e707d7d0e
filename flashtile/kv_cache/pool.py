"""The blocks of one memory: which are free, how many holders each has, and which outlive their holders.

Every block is in exactly one of three states:

* *free*: nobody holds it, its content means nothing;
* *held*: by one or more sequences (``refs`` counts them, and one more if the block is remembered);
* *kept*: only remembered. Its content can be found again by its digest until the block is needed elsewhere;
  the one that was let go longest ago is given away first.

Taking, holding and letting go of a block costs the same whatever the size of the pool.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable


class CacheFullError(RuntimeError):
    """Something of fixed size is used up. What raised it has changed nothing."""


class OutOfBlocksError(CacheFullError):
    """An operation needs more blocks than are available.

    Attributes:
        needed: blocks that the operation needs.
        available: blocks that it could have had.
    """

    def __init__(self, what: str, needed: int, available: int, total: int):
        super().__init__(f"{what} needs {needed} blocks, but {available} of {total} are available")
        self.needed, self.available = needed, available


class OutOfSequencesError(CacheFullError):
    """All ``max_sequences`` sequences are in use."""


class BlockPool:
    """``num_blocks`` blocks, numbered from 0. The caller asks for no more than ``available``.

    Attributes:
        refs: holders of each block, int32; being remembered counts as one. A block may be written to by the
            sequence that holds it while this is 1.
        free: blocks that mean nothing, the next one last.
        kept: blocks that are only remembered, the one let go longest ago first.
        digest_of, block_of: remembered blocks and the digests of their content, both ways.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.refs = array("i", bytes(4 * num_blocks))
        self.free = list(range(num_blocks - 1, -1, -1))  # the lowest number is taken first
        self.kept: OrderedDict[int, None] = OrderedDict()  # least recently let go first
        self.digest_of: dict[int, bytes] = {}
        self.block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that can be taken: free ones and kept ones."""
        return len(self.free) + len(self.kept)

    @property
    def num_kept(self) -> int:
        return len(self.kept)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.available

    def take(self) -> int:
        """A block for one holder."""
        block = self.free.pop() if self.free else self._forget_oldest()
        self.refs[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder of a block that is held or kept."""
        self.refs[block] += 1
        self.kept.pop(block, None)

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder of each of these blocks, which are held."""
        refs = self.refs
        for block in blocks:
            refs[block] += 1

    def let_go(self, blocks: Iterable[int]) -> None:
        """One holder less of each block; without any it is free, or kept if it is remembered."""
        refs, digest_of, to_free = self.refs, self.digest_of, self.free.append
        for block in blocks:
            left = refs[block] - 1
            refs[block] = left
            if not left:
                to_free(block)
            elif left == 1 and block in digest_of:
                self.kept[block] = None

    def available_after(self, releases: dict[int, int]) -> int:
        """Blocks that could be taken if each of these blocks lost so many holders."""
        refs, digest_of = self.refs, self.digest_of
        return self.available + sum(
            refs[block] - count == (block in digest_of) for block, count in releases.items()
        )

    def remember(self, block: int, digest: bytes) -> bool:
        """Make a held block findable by the digest of its content; it must not be written to from now on.

        Returns:
            False, and nothing is changed, if that content or that block is remembered already.
        """
        if digest in self.block_of or block in self.digest_of:
            return False
        self.block_of[digest] = block
        self.digest_of[block] = digest
        self.refs[block] += 1
        return True

    def find(self, digest: bytes) -> int | None:
        """The block with that content, if it is remembered."""
        return self.block_of.get(digest)

    def forget(self) -> int:
        """Forget every remembered block; what nobody holds is free then. Returns how many there were."""
        blocks = list(self.digest_of)
        self.digest_of.clear()
        self.block_of.clear()
        self.kept.clear()
        self.let_go(blocks)
        return len(blocks)

    def _forget_oldest(self) -> int:
        block, _ = self.kept.popitem(last=False)
        del self.block_of[self.digest_of.pop(block)]
        self.refs[block] = 0
        return block
