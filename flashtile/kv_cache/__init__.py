"""Paged KV cache: blocks on demand, sharing, copy-on-write, prefix caching, swapping to the host."""

from flashtile.kv_cache.integrity import IntegrityError, Invariant, Usage
from flashtile.kv_cache.manager import BlockManager
from flashtile.kv_cache.paged import PagedKVCache, Step
from flashtile.kv_cache.pool import BlockPool, CacheFullError, OutOfBlocksError, OutOfSequencesError
from flashtile.kv_cache.table import Batch

__all__ = [
    "Batch",
    "BlockManager",
    "BlockPool",
    "CacheFullError",
    "IntegrityError",
    "Invariant",
    "OutOfBlocksError",
    "OutOfSequencesError",
    "PagedKVCache",
    "Step",
    "Usage",
]
