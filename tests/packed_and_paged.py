"""Packed sequences, and a paged cache that holds the same keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashtile

LENGTHS = (70, 1, 20, 41)
PAGE = 16


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.itemsize == 4 else torch.int16)


class Sequences:
    """Packed queries, keys and values, and the cache. ``times``: factor of all lengths and positions."""

    def __init__(
        self,
        dtype: torch.dtype,
        heads: int,
        heads_kv: int,
        head_dim: int,
        device: str = "cpu",
        times: int = 1,
    ):
        torch.manual_seed(0)
        self.times = times
        self.lengths = [length * self.times for length in LENGTHS]
        total = sum(self.lengths)
        self.q = torch.randn(total, heads, head_dim).to(dtype)
        self.k, self.v = (torch.randn(total, heads_kv, head_dim).to(dtype) for _ in "kv")
        self.starts = torch.tensor([0, *self.lengths]).cumsum(0).int()
        columns = -(-max(self.lengths) // PAGE)
        self.table = torch.randperm(len(LENGTHS) * columns).int().view(len(LENGTHS), columns)
        self.k_cache, self.v_cache = torch.zeros(2, self.table.numel(), PAGE, heads_kv, head_dim, dtype=dtype)
        for b, length in enumerate(self.lengths):
            position = torch.arange(length)
            where = self.table[b, position // PAGE].long(), position % PAGE
            for cache, packed in ((self.k_cache, self.k), (self.v_cache, self.v)):
                cache[where] = packed[self.starts[b] : self.starts[b + 1]]
        for name in ("q", "k", "v", "starts", "table", "k_cache", "v_cache"):
            setattr(self, name, getattr(self, name).to(device))

    def whole(self, **options: Any) -> Tensor:
        most = max(self.lengths)
        offsets = self.starts, self.starts, most, most
        return flashtile.flash_attn_varlen_func(self.q, self.k, self.v, *offsets, causal=True, **options)

    def over_cache(self, sequences: list[int], first: int, tokens: int, **options: Any) -> tuple:
        """Attend with ``tokens`` tokens of each sequence, from position ``first`` on, over the cache.

        Returns (out, the rows of packed tensors that it corresponds to).
        """
        first, tokens = first * self.times, tokens * self.times if tokens > 1 else 1
        device = self.q.device
        rows = torch.cat([self.starts[b] + first + torch.arange(tokens, device=device) for b in sequences])
        lengths = torch.full((len(sequences),), first + tokens, dtype=torch.int32, device=device)
        given = {"cache_seqlens": lengths, "block_table": self.table[sequences], "causal": True}
        given |= {"invariant": True, **options}
        q = self.q[rows].unflatten(0, (len(sequences), tokens))
        return flashtile.flash_attn_with_kvcache(q, self.k_cache, self.v_cache, **given).flatten(0, 1), rows


CALLS = [
    ([0], 0, 70),
    ([3, 0], 11, 30),
    ([0], 63, 7),
    ([2], 19, 1),
    ([1, 0, 3, 2], 0, 1),
    ([0, 3], 40, 1),
]
"""Arguments of :meth:`Sequences.over_cache`: the sequences, the first position, the tokens of each."""
