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

from flashtile.integrations.paged import Step, rounded_queries
from flashtile.operators.decode import SharedKeys

MAX_GROUP_QUERIES = 64
"""Largest number of queries of a group: larger ranges are divided. CUDA graphs need a bound that no batch
changes."""
MIN_SAVED_TOKENS = 8192
"""Groups must save the reading of this many tokens. The launches are made in any case. Estimated, not
measured: a query's partial results in 32 heads have the bytes of 8 tokens of 8 key heads of size 128."""


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
        if sizes not in self._launches:
            from flashtile.backends.portable.decode.groups import GroupLaunch

            self._launches[sizes] = GroupLaunch(self.max_num_seqs, *sizes)
        self._launches[sizes](*given, common, offsets, shared)
        bound = largest_group(step.num_actual_tokens)
        return SharedKeys(block_table, shared[:rows], None, offsets[: rows + 1], bound)
