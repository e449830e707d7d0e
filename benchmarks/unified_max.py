"""Decoding with a unified maximum (``softmax_max``) beside the online softmax, in turns.

    python benchmarks/unified_max.py --json benchmarks/results/DATE-DEVICE-unified-max.json

Each cell is a CUDA graph of calls over caches that rotate through more than the L2 cache holds: with the
online softmax, with a number near the scores, with one a head, and with a number so far off that every work
tile is computed twice. Ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import flashtile

CELLS = (
    # batch, context, query heads, key heads, tokens, head_dim, dtype, dtype of the cache
    (1, 8192, 32, 8, 1, 128, "bfloat16", None),
    (8, 8192, 32, 8, 1, 128, "bfloat16", None),
    (32, 4096, 32, 8, 1, 128, "bfloat16", None),
    (128, 1024, 32, 8, 1, 128, "bfloat16", None),
    (8, 8192, 32, 32, 1, 128, "bfloat16", None),
    (32, 4096, 64, 8, 1, 128, "bfloat16", None),
    (1, 131072, 32, 8, 1, 128, "bfloat16", None),
    (64, 512, 32, 8, 1, 128, "bfloat16", None),
    (256, 128, 32, 8, 1, 128, "bfloat16", None),
    (32, 4096, 32, 8, 1, 64, "bfloat16", None),
    (32, 4096, 32, 8, 1, 256, "bfloat16", None),
    (32, 4096, 32, 8, 1, 128, "float16", None),
    (32, 4096, 32, 8, 1, 128, "bfloat16", "float8_e4m3fn"),
    (32, 4096, 32, 8, 2, 128, "bfloat16", None),
    (32, 4096, 32, 8, 4, 128, "bfloat16", None),
    (32, 4096, 32, 8, 8, 128, "bfloat16", None),
    (32, 4096, 32, 8, 16, 128, "bfloat16", None),
    (8, 8192, 32, 8, 16, 128, "bfloat16", None),
    (8, 8192, 32, 8, 64, 128, "bfloat16", None),
    (32, 4096, 32, 8, 16, 64, "bfloat16", None),
)
L2_BYTES = 60 * 2**20
PAGE = 16


def calls_of(cell: tuple) -> tuple[Any, int]:
    """One step over every cache of the rotation."""
    batch, context, heads, heads_kv, tokens, head_dim, dtype, cache_dtype = cell
    kind = getattr(torch, dtype)
    kept = kind if cache_dtype is None else getattr(torch, cache_dtype)
    pages = batch * context // PAGE
    size = 2 * batch * context * heads_kv * head_dim * kept.itemsize
    copies = min(max(1, -(-2 * L2_BYTES // size)) + 1, 12)
    with torch.device("cuda"):
        torch.manual_seed(0)
        q = torch.randn(batch, tokens, heads, head_dim, dtype=kind)
        shape = (2, pages, PAGE, heads_kv, head_dim)
        caches = [torch.randn(shape, dtype=kind).to(kept).unbind() for _ in range(copies)]
        table = torch.randperm(pages).view(batch, -1).int()
        lengths = torch.full((batch,), context, dtype=torch.int32)
    buffers = {"out": torch.empty_like(q)}
    arguments = {"cache_seqlens": lengths, "block_table": table, "causal": tokens > 1, "backend": "portable"}

    def step(phi: Any) -> None:
        for k_cache, v_cache in caches:
            flashtile.flash_attn_with_kvcache(q, k_cache, v_cache, softmax_max=phi, **arguments, **buffers)

    return step, copies


def graph_of(step: Any, phi: Any) -> torch.cuda.CUDAGraph:
    step(phi)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(phi)
    return graph


def measure(cell: tuple, rounds: int) -> dict[str, Any]:
    step, copies = calls_of(cell)
    heads = cell[2]
    numbers = {
        "online": None,
        "number": 2.0,
        "by head": torch.full((heads,), 2.0, device="cuda"),
        "all again": 900.0,
    }
    if not rounds:  # to compile
        for phi in numbers.values():
            step(phi)
        return {"cell": cell, "us": dict.fromkeys(numbers, 0.0), "speedup": dict.fromkeys(numbers, 0.0)}
    graphs = {name: graph_of(step, phi) for name, phi in numbers.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    repeats = 3
    for i in range(rounds + 1):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            if i:
                times[name].append(1e3 * start.elapsed_time(end) / repeats / copies)
    online = times["online"]
    ratios = {
        name: statistics.median(a / b for a, b in zip(online, t, strict=True)) for name, t in times.items()
    }
    microseconds = {name: round(statistics.median(t), 2) for name, t in times.items()}
    return {"cell": cell, "us": microseconds, "speedup": ratios}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cells", type=int, nargs="*", default=range(len(CELLS)))
    arguments = parser.parse_args()
    results = []
    print(f"{'cell':58} {'online us':>10} {'number':>7} {'by head':>7} {'again':>7}")
    for cell in (CELLS[i] for i in arguments.cells):
        result = measure(cell, arguments.rounds)
        results.append(result)
        speedup = result["speedup"]
        print(
            f"{'x'.join(map(str, cell)):58} {result['us']['online']:10.2f} {speedup['number']:7.3f} "
            f"{speedup['by head']:7.3f} {speedup['all again']:7.3f}",
            flush=True,
        )
        if arguments.json:  # at every cell: what was measured is kept
            device = torch.cuda.get_device_name()
            arguments.json.write_text(json.dumps({"device": device, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
