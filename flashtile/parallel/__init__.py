"""Context parallelism: attention over sequences distributed over several GPUs, on torch.distributed."""

from flashtile.parallel.decode import context_parallel_decode, own_tokens
from flashtile.parallel.functional import context_parallel_attention
from flashtile.parallel.layout import shard, unshard
from flashtile.parallel.masked import ShardedMask, shard_mask
from flashtile.parallel.model import (
    LINKS,
    Link,
    ParallelEstimate,
    ParallelExplanation,
    Sharing,
    estimates,
    explain,
    two_dimensions,
)

__all__ = [
    "LINKS",
    "Link",
    "ParallelEstimate",
    "ParallelExplanation",
    "ShardedMask",
    "Sharing",
    "context_parallel_attention",
    "context_parallel_decode",
    "estimates",
    "explain",
    "own_tokens",
    "shard",
    "shard_mask",
    "two_dimensions",
    "unshard",
]
