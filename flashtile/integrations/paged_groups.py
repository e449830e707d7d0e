"""Groups of a step's sequences that share blocks, found in an engine's block table without waiting for it.

Serving engines have the block table on the GPU only. Two small kernels find the groups there, once a step,
and attention reads them there. So the host never waits, and a captured CUDA graph serves all groups.

The engine has chosen the order of the sequences, so a group is a range of neighbours. A sequence joins the
one before it if both begin with at least as many equal blocks as a threshold. Of all thresholds, the step has
the one that saves the most tokens. The sequences of a group share what all of them have in common.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.integrations.paged import Step, rounded_queries
from flashtile.operators.decode import SharedKeys

MAX_GROUP_QUERIES = 64
"""Largest number of queries of a group: larger ranges are divided. CUDA graphs need a bound that no batch
changes."""
MIN_SAVED_TOKENS = 8192
"""Groups must save the reading of this many tokens. The launches are made in any case. Estimated, not
measured: a query's partial results in 32 heads have the bytes of 8 tokens of 8 key heads of size 128."""
NOTHING = 2**31 - 1


def largest_group(tokens: int) -> int:
    """Return the bound of a group's queries: a power of two, so that steps of similar sizes share kernels."""
    return min(MAX_GROUP_QUERIES, rounded_queries(tokens))


class SharedBlocks:
    """Finds the groups of each step, and writes them where captured CUDA graphs read them."""

    def __init__(self, max_num_seqs: int, block_size: int, device: torch.device) -> None:
        self.max_num_seqs, self.block_size = max_num_seqs, block_size
        self._numbers = torch.zeros(3, -(-(max_num_seqs + 1) // 4) * 4, dtype=torch.int32, device=device)
        self._launches: dict[tuple[int, ...], Any] = {}

    def find(self, step: Step) -> SharedKeys | None:
        """Return the groups of a step. None if it can have none, which only its sizes decide.

        Each sequence has a group of its own number. The group of a range's first sequence has the queries of
        the whole range; the groups of the others are empty. ``end`` is what each sequence shares.
        """
        block_table, given = step.block_table, (step.block_table, step.seq_lens, step.query_start_loc)
        rows, most = len(step.seq_lens), MAX_GROUP_QUERIES // step.max_query_len
        if most < 2 or not 2 <= rows <= self.max_num_seqs:
            return None
        common, offsets, shared = self._numbers.unbind()
        sizes = rows, block_table.stride(0), self.block_size, most, MIN_SAVED_TOKENS
        if block_table.is_cuda:
            if sizes not in self._launches:
                from flashtile.backends.portable.decode.groups import GroupLaunch

                self._launches[sizes] = GroupLaunch(self.max_num_seqs, *sizes)
            self._launches[sizes](*given, common, offsets, shared)
        else:
            offsets[: rows + 1], shared[:rows] = find_groups(*given, *sizes[2:])
        bound = largest_group(step.num_actual_tokens)
        return SharedKeys(block_table, shared[:rows], None, offsets[: rows + 1], bound)


def find_groups(
    block_table: Tensor, seq_lens: Tensor, starts: Tensor, block_size: int, most: int, least: int
) -> tuple[Tensor, Tensor]:
    """Return ``cu_seqlens_q`` and ``end`` of :meth:`SharedBlocks.find`, in torch, as the kernels find them.

    ``most`` is the largest number of sequences of a group, ``least`` the fewest tokens to save.
    """
    row, rows = torch.arange(len(seq_lens), device=seq_lens.device), len(seq_lens)
    blocks = (seq_lens - starts.diff()).clamp(min=0) // block_size  # all keys in them are older than the step
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    inside = columns < torch.minimum(blocks[1:], blocks[:-1])[:, None]
    equal = (block_table[1:] == block_table[:-1]) & inside
    common = torch.cat((blocks[:1] * 0, equal.cumprod(1).sum(1) * block_size))
    best = (((common * (common >= common[:, None]).sum(1)) << 32) | common).max()
    begins = common < torch.where(best >> 32 >= least, best & NOTHING, NOTHING)
    place = (row - torch.where(begins, row, 0).cummax(0).values) % most
    group = (place == 0).cumsum(0) - 1
    depths = torch.full_like(common, NOTHING)
    depths.scatter_reduce_(0, group, torch.where(place > 0, common, NOTHING), "amin")
    end = torch.where(place == 0, row, rows).flip(0).cummin(0).values.flip(0)
    shared = torch.where(depths == NOTHING, 0, depths)[group]
    return torch.cat((starts[end], starts[-1:])), shared.int()
