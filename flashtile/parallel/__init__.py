"""Attention over sequences that lie on several GPUs, on torch.distributed: context parallelism."""

from flashtile.parallel.functional import context_parallel_attention
from flashtile.parallel.layout import shard, unshard
from flashtile.parallel.model import (
    LINKS,
    Link,
    ParallelEstimate,
    ParallelExplanation,
    Sharing,
    estimates,
    explain,
)

__all__ = [
    "LINKS",
    "Link",
    "ParallelEstimate",
    "ParallelExplanation",
    "Sharing",
    "context_parallel_attention",
    "estimates",
    "explain",
    "shard",
    "unshard",
]
