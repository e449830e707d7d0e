"""Data of the page at /: blocks and running sequences between two steps."""

from __future__ import annotations

from typing import Any

from flashtile.engine.core import Engine
from flashtile.engine.request import Sequence

MAX_SEQUENCES = 64
MAX_BLOCKS = 4096
"""Largest numbers of sequences and blocks that the page shows. Its totals count all of them."""


def snapshot(engine: Engine) -> dict[str, Any]:
    """Describe blocks and sequences, without any text of a request. Call it on the engine's thread.

    ``refs`` has one digit for each block: its references, at most 9, the prefix cache's included.
    """
    scheduler, stats = engine.scheduler, engine.stats()
    manager, pool = scheduler.manager, scheduler.manager.pool
    shown = scheduler.running[:MAX_SEQUENCES]
    computed = {id(entry.sequence): entry.num_tokens for entry in engine.last_schedule.entries}
    return {
        "block_size": manager.block_size,
        "num_blocks": pool.num_blocks,
        "refs": "".join(str(min(9, count)) for count in pool.refs[:MAX_BLOCKS]),
        "cache_usage": stats.cache_usage,
        "num_running": stats.running,
        "num_waiting": stats.waiting,
        "num_preemptions": stats.num_preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "prefix_hits": stats.prefix_hits,
        "step_tokens": engine.last_schedule.num_tokens,
        "running": [_described(engine, one, computed.get(id(one), 0)) for one in shown],
    }


def _described(engine: Engine, sequence: Sequence, step_tokens: int) -> dict[str, Any]:
    number = sequence.block_sequence
    blocks = [] if number is None else engine.scheduler.manager.blocks(number)
    return {
        "request_id": sequence.request.request_id,
        "index": sequence.index,
        "prompt_tokens": sequence.request.num_prompt,
        "computed": sequence.num_computed,
        "tokens": sequence.num_tokens,
        "step_tokens": step_tokens,
        "blocks": blocks[:MAX_BLOCKS],
    }
