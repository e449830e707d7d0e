"""Named decoding calls: batch, contexts, heads and cache, with the bytes that they must read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashtile.decode.problem import FP8

L2_BYTES = 1e9
"""Calls that rotate over about so many bytes of cache find none of them in any L2 cache of today, whatever it
keeps."""
MOST_COPIES = 16


@dataclass(frozen=True)
class DecodeWorkload:
    """Attention of ``seqlen_q`` new tokens of each sequence over its keys in a cache.

    Args:
        name: unique.
        contexts: keys of each sequence.
        page_size: tokens of a page; 0 is a dense cache.
        cache_dtype: "bfloat16" or "float8_e4m3fn".
        prefix: first tokens that all sequences share.
        tags: names of the sets that it belongs to.
    """

    name: str
    contexts: tuple[int, ...]
    num_heads_q: int
    num_heads_kv: int
    head_dim: int = 128
    seqlen_q: int = 1
    page_size: int = 16
    cache_dtype: str = "bfloat16"
    prefix: int = 0
    tags: tuple[str, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_heads_kv * self.head_dim * getattr(torch, self.cache_dtype).itemsize

    @property
    def bytes(self) -> int:
        """Keys and values, each read once; a shared prefix once for all."""
        own = sum(context - self.prefix for context in self.contexts)
        return (own + self.prefix) * self.bytes_per_token

    @property
    def copies(self) -> int:
        """Caches to rotate over, so that none is in the L2 cache when its turn comes."""
        return max(1, min(MOST_COPIES, round(L2_BYTES / self.bytes)))


@dataclass(frozen=True)
class DecodeInputs:
    """Data of a workload; caches hold ``copies`` of what a call reads, and as many block tables name them."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_tables: tuple[Tensor, ...]
    """Empty for a dense cache, whose first rows are then the only copy."""
    descales: dict[str, Any]


def make_inputs(workload: DecodeWorkload, device: torch.device | str, copies: int = 1) -> DecodeInputs:
    """Standard normal q, keys and values, from a fixed seed, in pages scattered over the cache."""
    generator = torch.Generator(device=device).manual_seed(0)
    batch, longest = len(workload.contexts), max(workload.contexts)
    page_size = workload.page_size or longest
    own = [-(-(context - workload.prefix) // page_size) for context in workload.contexts]
    shared = workload.prefix // page_size
    blocks = (sum(own) + shared) * copies if workload.page_size else batch
    shape = (blocks, page_size, workload.num_heads_kv, workload.head_dim)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.bfloat16, device=device)

    def cache() -> Tensor:
        filled = torch.empty(shape, dtype=getattr(torch, workload.cache_dtype), device=device)
        for part in filled.split(max(1, 2**27 // max(filled[0].numel(), 1))):
            part.copy_(normal(*part.shape))
        return filled

    order = torch.randperm(blocks, generator=generator, device=device).int()
    tables = []
    for copy in range(copies if workload.page_size else 0):
        mine = order[copy * (blocks // copies) : (copy + 1) * (blocks // copies)]
        table = torch.zeros((batch, -(-longest // page_size)), dtype=torch.int32, device=device)
        start = shared
        for b, count in enumerate(own):
            table[b, :shared] = mine[:shared]
            table[b, shared : shared + count] = mine[start : start + count]
            start += count
        tables.append(table)
    descales: dict[str, Any] = {}
    if getattr(torch, workload.cache_dtype) == FP8:
        ones = torch.ones(workload.num_heads_kv, device=device)
        descales = {"k_descale": ones, "v_descale": ones}
    return DecodeInputs(
        q=normal(batch, workload.seqlen_q, workload.num_heads_q, workload.head_dim),
        k_cache=cache(),
        v_cache=cache(),
        cache_seqlens=torch.tensor(workload.contexts, dtype=torch.int32, device=device),
        block_tables=tuple(tables),
        descales=descales,
    )


def select(names: Sequence[str]) -> tuple[DecodeWorkload, ...]:
    """Workloads whose name or tag is among ``names``, in order of definition.

    Raises:
        ValueError: a name that nothing has.
    """
    for name in names:
        if not any(name in (w.name, *w.tags) for w in DECODE_WORKLOADS):
            raise ValueError(
                f"workload must be a name or one of the tags {', '.join(DECODE_TAGS)}, got {name!r}"
            )
    return tuple(w for w in DECODE_WORKLOADS if not set(names).isdisjoint((w.name, *w.tags)))


def _grid() -> list[DecodeWorkload]:
    return [
        DecodeWorkload(f"{b}x{s}-{q}/{kv}", (s,) * b, q, kv, tags=("grid", f"heads-{q}/{kv}"))
        for q, kv in ((32, 8), (32, 32), (64, 8))
        for b, s in ((1, 8192), (1, 131072), (8, 8192), (8, 65536), (32, 4096), (128, 1024), (128, 4096))
    ]


def _pages() -> list[DecodeWorkload]:
    base = DecodeWorkload("pages", (4096,) * 32, 32, 8, tags=("pages",))
    paged = [replace(base, name=f"32x4096-page-{size}", page_size=size) for size in (1, 16, 64, 256)]
    return [*paged, replace(base, name="32x4096-dense", page_size=0)]


def _others() -> list[DecodeWorkload]:
    ragged = (131072, *(512,) * 63)
    fp8: dict[str, Any] = {"cache_dtype": "float8_e4m3fn", "tags": ("fp8",)}
    return [
        DecodeWorkload("ragged-131072-63x512", ragged, 32, 8, tags=("ragged",)),
        DecodeWorkload("64x512", (512,) * 64, 32, 8, tags=("ragged",)),
        *(
            DecodeWorkload(f"{b}x{s}-32/8-fp8", (s,) * b, 32, 8, **fp8)
            for b, s in ((1, 8192), (8, 65536), (32, 4096), (128, 4096))
        ),
        *(
            DecodeWorkload(f"32x4096-32/8-q{n}", (4096,) * 32, 32, 8, seqlen_q=n, tags=("tokens",))
            for n in (4, 16, 64)
        ),
        *(
            DecodeWorkload(f"32x4096-d{d}", (4096,) * 32, 32, 8, head_dim=d, tags=("head-dims",))
            for d in (64, 256, 512)
        ),
        DecodeWorkload("cascade-64x32768", (32768 + 128,) * 64, 32, 8, prefix=32768, tags=("cascade",)),
        DecodeWorkload("ci-decode", (70, 9, 130), 4, 2, head_dim=32, tags=("ci",)),
        DecodeWorkload("ci-decode-prefix", (80, 70), 4, 2, head_dim=32, prefix=64, tags=("ci",)),
    ]


DECODE_WORKLOADS: tuple[DecodeWorkload, ...] = (*_grid(), *_pages(), *_others())
DECODE_TAGS: tuple[str, ...] = tuple(dict.fromkeys(tag for w in DECODE_WORKLOADS for tag in w.tags))
