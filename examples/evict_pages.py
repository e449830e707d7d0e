"""Evict pages of a KV cache by attention mass: the keys that a model has read least.

    python examples/evict_pages.py                   # a second on two cores
    python examples/evict_pages.py --device cuda

H2O (Zhang et al. 2023, arXiv:2306.14048) keeps the keys that got the largest sums of probabilities. Here
``flash_attn_with_kvcache(mass=...)`` adds these sums up, step by step, and whole pages are evicted: those
with the least mass leave the block table and return to the pool. Queries and keys are random, but some pages
have keys that queries look for. The example compares the next steps with those over the whole cache, and with
what is left if the oldest or random pages are evicted.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from torch import Tensor

import flashtile
from flashtile.hardware.machine import find_device

HEADS, HEADS_KV, HEAD_DIM, PAGE_SIZE = 8, 2, 64, 16
SOUGHT = 6
"""Pages of each sequence that queries look for."""


class Cache:
    """Keys and values of one layer in pages, the pages of each sequence, and the mass of all keys."""

    def __init__(self, batch: int, pages: int, device: torch.device, dtype: torch.dtype):
        draw = torch.Generator(device=device).manual_seed(0)
        shape = (batch * pages, PAGE_SIZE, HEADS_KV, HEAD_DIM)
        keys, values = torch.randn(2, *shape, generator=draw, device=device)
        self.table = torch.randperm(batch * pages, generator=draw, device=device).int().view(batch, pages)
        self.direction = torch.randn(HEADS_KV, HEAD_DIM, generator=draw, device=device)
        sought = torch.rand(batch, pages, generator=draw, device=device).topk(SOUGHT).indices
        keys[self.table.gather(1, sought).long().flatten()] += 0.8 * self.direction
        self.k, self.v = keys.to(dtype), values.to(dtype)
        self.mass = torch.zeros(shape[:3], device=device)
        self._draw = draw

    def queries(self) -> Tensor:
        """Return the queries of a step, which look for the direction of some keys."""
        of_heads = self.direction.repeat_interleave(HEADS // HEADS_KV, 0)
        noise = torch.randn(len(self.table), 1, HEADS, HEAD_DIM, generator=self._draw, device=self.k.device)
        return (noise + of_heads).to(self.k.dtype)

    def attend(self, q: Tensor, table: Tensor, mass: Tensor | None = None) -> Tensor:
        lengths = torch.full((len(table),), table.shape[1] * PAGE_SIZE, dtype=torch.int32, device=q.device)
        return flashtile.flash_attn_with_kvcache(
            q, self.k, self.v, cache_seqlens=lengths, block_table=table, mass=mass
        )

    def by_mass(self, keep: int) -> Tensor:
        """Return the ``keep`` pages of each sequence that got the most mass, in the order of their tokens."""
        of_pages = self.mass.sum((1, 2))[self.table.long()]  # (batch, pages)
        return self.table.gather(1, of_pages.topk(keep).indices.sort().values)


def error(cache: Cache, queries: list[Tensor], table: Tensor) -> float:
    """Return the mean difference from attention over the whole cache, relative to the size of its results."""
    whole, left = (torch.stack([cache.attend(q, t).float() for q in queries]) for t in (cache.table, table))
    return float((left - whole).norm() / whole.norm())


def main(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; chosen if omitted")] = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences")] = 4,
    pages: Annotated[int, typer.Option(min=SOUGHT, help="pages of each sequence")] = 64,
    keep: Annotated[int, typer.Option(min=1, help="pages of each sequence that stay")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="steps whose mass decides")] = 8,
) -> None:
    if keep > pages:
        raise typer.BadParameter(f"--keep must be at most --pages, which is {pages}, got {keep}")
    on = find_device(device)
    cache = Cache(batch, pages, on, torch.float32 if on.type == "cpu" else torch.bfloat16)
    for _ in range(steps):
        cache.attend(cache.queries(), cache.table, cache.mass)
    kept = cache.by_mass(keep)
    share = float(cache.mass[kept.long()].sum() / cache.mass.sum())
    print(f"{keep} of {pages} pages stay, with {share:.1%} of the mass of {steps} steps")
    queries = [cache.queries() for _ in range(steps)]
    shuffled = torch.rand(batch, pages, device=on).topk(keep).indices.sort().values
    for name, table in (
        ("least mass", kept),
        ("oldest", cache.table[:, pages - keep :].contiguous()),
        ("random", cache.table.gather(1, shuffled)),
    ):
        print(f"evicted by {name}: {error(cache, queries, table):.3f} relative error of the next steps")
    evicted = cache.table[~torch.isin(cache.table, kept)].long()
    cache.mass[evicted] = 0.0  # the pool's next owner begins at 0
    cache.table = kept
    print(f"{len(evicted)} pages are free")


if __name__ == "__main__":
    typer.run(main)
