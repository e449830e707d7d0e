"""Groups of a step's sequences that share blocks, found in an engine's block table without waiting for it.

Serving engines have the block table on the GPU only. Two small kernels find the groups there, once a step,
and attention reads them there. So the host never waits, and a captured CUDA graph serves all groups.

The engine has chosen the order of the sequences, so a group is a range of neighbours. A sequence joins the
one before it if both begin with at least as many equal blocks as a threshold. Of all thresholds, the step has
the one that saves the most tokens. The sequences of a group share what all of them have in common.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.api.cascade import MIN_SAVED_TOKENS
from flashtile.operators.decode import SharedKeys

MAX_GROUP_QUERIES = 64
"""Largest number of queries of a group: larger ranges are divided. CUDA graphs need a bound that no batch
changes. With it, common keys are read once for 64 sequences, and two or four tiles hold a group's rows."""
NOTHING = 2**31 - 1


class Groups(NamedTuple):
    """The groups of a step.

    Each sequence has a group of its own number. The queries of a range of sequences that share keys are all
    in the group of its first sequence, and the groups of the others are empty. So the groups' rows of the
    block table are those of the sequences.
    """

    cu_seqlens_q: Tensor
    """(num_reqs + 1,) int32: the first query of each group, and the end."""
    shared_keys: Tensor
    """(num_reqs,) int32: number of each sequence's first keys that its range shares."""
    max_seqlen_q: int

    def level(self, block_table: Tensor) -> SharedKeys:
        return SharedKeys(block_table, self.shared_keys, None, self.cu_seqlens_q, self.max_seqlen_q)


def largest_group(tokens: int) -> int:
    """Return the bound of a group's queries in a step: a power of two, as few launches have others."""
    return min(MAX_GROUP_QUERIES, 1 << (tokens - 1).bit_length())


class SharedBlocks:
    """Finds the groups of each step, and writes them where captured CUDA graphs read them.

    Args:
        max_num_seqs: largest number of sequences of a step.
        block_size: tokens of a block.
        device: the engine's device.
    """

    def __init__(self, max_num_seqs: int, block_size: int, device: torch.device) -> None:
        self.max_num_seqs, self.block_size = max_num_seqs, block_size
        self._common, self._offsets, self._shared = (
            torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device) for _ in range(3)
        )
        self._launches: dict[tuple[int, int, int], Any] = {}

    def find(
        self, block_table: Tensor, seq_lens: Tensor, starts: Tensor, tokens: int, longest: int
    ) -> Groups | None:
        """Return the groups of a step. None if it can have none, which only its sizes decide.

        Args:
            block_table, seq_lens: of the step's sequences, (num_reqs, max_blocks) and (num_reqs,) int32.
            starts: (num_reqs + 1,) int32, the first query of each sequence, and the end.
            tokens, longest: numbers of queries of the step, and of its longest sequence.
        """
        rows, most = len(seq_lens), MAX_GROUP_QUERIES // longest
        if most < 2 or not 2 <= rows <= self.max_num_seqs:
            return None
        offsets, shared = self._offsets[: rows + 1], self._shared[:rows]
        if block_table.is_cuda:
            key = rows, block_table.stride(0), most
            launch = self._launches.get(key) or self._launches.setdefault(key, self.launch(*key))
            launch(block_table, seq_lens, starts, self._common, offsets, shared)
        else:
            found = find_groups(block_table, seq_lens, starts, self.block_size, most, MIN_SAVED_TOKENS)
            offsets.copy_(found[0]), shared.copy_(found[1])
        return Groups(offsets, shared, largest_group(tokens))

    def launch(self, rows: int, table_stride: int, most: int) -> Any:
        """Return the launch for steps of these sizes."""
        from flashtile.backends.portable.decode.groups import GroupLaunch, GroupLengths

        lengths = GroupLengths(rows, table_stride, self.block_size, most, MIN_SAVED_TOKENS)
        return GroupLaunch(lengths, self.max_num_seqs)


def find_groups(
    block_table: Tensor, seq_lens: Tensor, starts: Tensor, block_size: int, most: int, least: int
) -> tuple[Tensor, Tensor]:
    """Return ``cu_seqlens_q`` and ``shared_keys`` of :class:`Groups`, in torch.

    Args:
        block_table, seq_lens, starts: as in :meth:`SharedBlocks.find`.
        block_size: tokens of a block.
        most: largest number of sequences of a range.
        least: number of tokens that the groups must save, or there are none.
    """
    rows = torch.arange(len(seq_lens))
    blocks = (seq_lens - starts.diff()).clamp(min=0) // block_size  # all keys in them are older than the step
    inside = torch.arange(block_table.shape[1]) < torch.minimum(blocks[1:], blocks[:-1])[:, None]
    equal = (block_table[1:] == block_table[:-1]) & inside
    common = torch.cat((blocks[:1] * 0, equal.cumprod(1).sum(1) * block_size))
    saved = common * (common >= common[:, None]).sum(1)
    # One maximum finds the most saved tokens, and of equal thresholds the largest.
    best = ((saved << 32) | common).max()
    joins = common >= torch.where(best >> 32 >= least, best & NOTHING, NOTHING)
    place = (rows - torch.where(joins, 0, rows).cummax(0).values) % most
    group = (place == 0).cumsum(0) - 1
    depth = torch.full_like(common, NOTHING)
    depth.scatter_reduce_(0, group, torch.where(place > 0, common, NOTHING), "amin")
    shared = depth[group]
    leader = torch.where(place == 0, rows, len(rows))
    offsets = leader.flip(0).cummin(0).values.flip(0)
    return torch.cat((starts[offsets], starts[-1:])), torch.where(shared == NOTHING, 0, shared).int()
