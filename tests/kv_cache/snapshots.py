"""Everything that a manager knows, as plain values, to see whether an operation has changed it."""

from __future__ import annotations

from typing import Any

from flashtile.kv_cache import BlockManager


def snapshot(manager: BlockManager) -> Any:
    table = manager.table
    return (
        [_of_pool(pool) for pool in (manager.pool, manager.host_pool)],
        [list(part) for part in (table.lengths, table.evicted, table.entries, table.owners, table.free_rows)],
        list(table.rows.items()),
        dict(table.changed_from),
    )


def _of_pool(pool: Any) -> Any:
    return list(pool.refs), list(pool.free), list(pool.kept), dict(pool.digest_of), dict(pool.block_of)
