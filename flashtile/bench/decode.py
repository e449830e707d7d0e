"""Decoding calls timed side by side: ``python -m flashtile.bench.decode -w grid``.

What counts is the bytes of the cache over time. Two times are taken of each contestant, in rotation: one
call after the L2 cache was overwritten (CUDA events), and a call of a captured CUDA graph that rotates over
so many caches that none is in the L2 cache when its turn comes, replayed back to back. The first holds more
than the call: the L2 cache, full of what overwrote it, is written back while the call reads
(docs/measured/decoding.md). Every result is first held to the error rule on some of its sequences.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import flashtile
from flashtile import machine
from flashtile.bench.decode_workloads import (
    DECODE_WORKLOADS,
    DecodeInputs,
    DecodeWorkload,
    make_inputs,
    select,
)
from flashtile.bench.runner import time_call
from flashtile.decode import reference
from flashtile.testing import compare

Call = Callable[[Tensor | None], Tensor]
"""Attention over the cache that a block table (None: the dense cache) names."""

CHECKED_SEQUENCES = 2
HOST_CALLS = 200


def flashtile_call(workload: DecodeWorkload, inputs: DecodeInputs, **options: Any) -> Call:
    causal = workload.seqlen_q > 1

    def call(table: Tensor | None) -> Tensor:
        return flashtile.flash_attn_with_kvcache(
            inputs.q, inputs.k_cache, inputs.v_cache, cache_seqlens=inputs.cache_seqlens, block_table=table,
            causal=causal, **inputs.descales, **options,
        )  # fmt: skip

    return call


def shared_prefix_call(workload: DecodeWorkload, inputs: DecodeInputs, **options: Any) -> Call:
    def call(table: Tensor | None) -> Tensor:
        assert table is not None
        return flashtile.flash_attn_with_shared_prefix(
            inputs.q, inputs.k_cache, inputs.v_cache, table, inputs.cache_seqlens, workload.prefix, **options
        )

    return call


def flash_attention_3_call(workload: DecodeWorkload, inputs: DecodeInputs) -> Call:
    """FlashAttention-3's interface, in the arguments that its builds have in common.

    Raises:
        ImportError: it is not installed.
        NotImplementedError: it does not take the workload.
    """
    import flash_attn_interface

    if workload.page_size == 0 or workload.cache_dtype != "bfloat16" or workload.head_dim > 256:
        raise NotImplementedError("only bfloat16 caches in pages, heads of up to 256")

    def call(table: Tensor | None) -> Tensor:
        return flash_attn_interface.flash_attn_with_kvcache(
            inputs.q, inputs.k_cache, inputs.v_cache, cache_seqlens=inputs.cache_seqlens, page_table=table,
            causal=workload.seqlen_q > 1,
        )  # fmt: skip

    return call


CONTESTANTS: dict[str, Callable[..., Call]] = {
    "flashtile": flashtile_call,
    "flashtile-prefix": shared_prefix_call,
    "fa3": flash_attention_3_call,
}


def prepare(workload: DecodeWorkload, inputs: DecodeInputs, names: list[str]) -> dict[str, Call | str]:
    """Each contestant's call, or why it has none."""
    calls: dict[str, Call | str] = {}
    for name in names:
        if name == "flashtile-prefix" and not workload.prefix:
            continue
        try:
            calls[name] = CONTESTANTS[name](workload, inputs)
        except (ImportError, NotImplementedError) as reason:
            calls[name] = str(reason)
    return calls


def check(workload: DecodeWorkload, inputs: DecodeInputs, table: Tensor | None, out: Tensor) -> str | None:
    """What is wrong with the longest and the last sequences of ``out``; None if nothing is."""
    longest = max(range(len(workload.contexts)), key=workload.contexts.__getitem__)
    chosen = list(dict.fromkeys((longest, len(workload.contexts) - 1)))[:CHECKED_SEQUENCES]
    for b in chosen:
        arguments: dict[str, Any] = {"cache_seqlens": inputs.cache_seqlens[b : b + 1], **inputs.descales}
        k_cache, v_cache = inputs.k_cache, inputs.v_cache
        if table is not None:
            used = -(-workload.contexts[b] // workload.page_size)
            blocks = table[b, :used].long()
            k_cache, v_cache = k_cache[blocks], v_cache[blocks]
            arguments["block_table"] = torch.arange(used, dtype=torch.int32, device=out.device)[None]
        else:
            k_cache, v_cache = k_cache[b : b + 1], v_cache[b : b + 1]
        call = (inputs.q[b : b + 1], k_cache, v_cache)
        arguments["causal"] = workload.seqlen_q > 1
        exact = reference.attention_with_kvcache(*call, upcast=torch.float32, **arguments)[0]
        plain = reference.attention_with_kvcache(*call, **arguments)[0]
        found = compare(f"sequence {b}", out[b : b + 1], exact, plain)
        if not found.holds:
            return str(found)
    return None if bool(out.isfinite().all()) else "not all of out is finite"


def capture(call: Call, tables: list[Tensor | None]) -> torch.cuda.CUDAGraph:
    """A graph of one call for each table."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(tables[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for table in tables:
            call(table)
    return graph


def time_replays(graph: torch.cuda.CUDAGraph, rep: float) -> float:
    """Milliseconds of a replay among others, over about ``rep`` milliseconds of them."""

    def spent(replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / replays

    spent(1)
    return spent(max(1, math.ceil(rep / spent(2))))


def host_microseconds(call: Call, table: Tensor | None) -> float:
    """Time of the host to issue a call, while the GPU has work enough not to be waited for."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call(table)
        times.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
        torch.cuda.synchronize()
    return min(times)


def measure(
    workload: DecodeWorkload, names: list[str], device: torch.device, rounds: int, rep: float
) -> dict[str, Any]:
    """One cell: milliseconds of each contestant, cold and in a graph, or why there are none."""
    copies = workload.copies if device.type == "cuda" and workload.page_size else 1
    inputs = make_inputs(workload, device, copies)
    tables: list[Tensor | None] = list(inputs.block_tables) or [None]
    results: dict[str, dict[str, Any]] = {}
    timers: dict[str, dict[str, Callable[[], float]]] = {}
    for name, call in prepare(workload, inputs, names).items():
        if isinstance(call, str):
            results[name] = {"refused": call}
            continue
        wrong = check(workload, inputs, tables[0], call(tables[0]))
        if wrong:
            results[name] = {"wrong": wrong}
            continue
        results[name] = {"cold_ms": []}
        timers[name] = {"cold_ms": partial(time_call, partial(call, tables[0]), rep, device)}
        if device.type == "cuda":
            timers[name]["graph_ms"] = partial(time_replays, capture(call, tables), rep)
            results[name]["graph_ms"] = []
    for turn in range(rounds):
        order = list(timers)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            for kind, timer in timers[name].items():
                results[name][kind].append(timer() / (copies if kind == "graph_ms" else 1))
    return {"workload": workload.name, "bytes": workload.bytes, "copies": copies, "results": results}


def terabytes_per_second(cell: dict[str, Any], name: str, kind: str) -> float | None:
    times = cell["results"].get(name, {}).get(kind)
    return cell["bytes"] / statistics.median(times) / 1e9 if times else None


def table_of(document: dict[str, Any]) -> Table:
    table = Table(title="bytes of the cache over time, TB/s (microseconds)", title_justify="left")
    table.add_column("workload")
    kinds = {"cold_ms": "cold", "graph_ms": "graph"}
    for name in document["contestants"]:
        for kind in kinds.values():
            table.add_column(f"{name} {kind}", justify="right")
    for cell in document["cells"]:
        row = [cell["workload"]]
        for name in document["contestants"]:
            result = cell["results"].get(name, {})
            for kind in kinds:
                speed = terabytes_per_second(cell, name, kind)
                if speed is None:
                    row.append("wrong" if "wrong" in result else "-")
                else:
                    row.append(f"{speed:.2f} ({statistics.median(result[kind]) * 1e3:.1f})")
        table.add_row(*row)
    return table


def main(
    workload: Annotated[list[str], typer.Option("-w", "--workload", help="Names or tags; repeatable.")],
    peers: Annotated[str, typer.Option(help="Contestants, by commas.")] = ",".join(CONTESTANTS),
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    rep: Annotated[float, typer.Option(help="Milliseconds of calls for each measurement.")] = 60.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every number here.")] = None,
    device: Annotated[str, typer.Option(help="Where.")] = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Time decoding calls and print bytes of the cache over time."""
    names = peers.split(",")
    if not set(names) <= set(CONTESTANTS):
        raise typer.BadParameter(f"peers must be among {', '.join(CONTESTANTS)}, got {peers}")
    try:
        chosen = select(workload)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    where = torch.device(device)
    console = Console(width=160)
    document: dict[str, Any] = {
        "versions": machine.versions(),
        "device": machine.describe_device(where),
        "source": machine.source_commit(),
        "contestants": names,
        "cells": [],
    }
    for one in chosen:
        document["cells"].append(measure(one, names, where, rounds, rep))
        if where.type == "cuda":
            torch.cuda.empty_cache()
        for name, result in document["cells"][-1]["results"].items():
            if "wrong" in result:
                console.print(f"{one.name} {name}: {result['wrong']}", style="red", markup=False)
        if json_path is not None:
            json_path.write_text(json.dumps(document, indent=1) + "\n")
    if where.type == "cuda":
        inputs = make_inputs(DECODE_WORKLOADS[0], where)
        document["host_us"] = {
            name: host_microseconds(call, inputs.block_tables[0])
            for name, call in prepare(DECODE_WORKLOADS[0], inputs, names).items()
            if not isinstance(call, str)
        }
        spent = ", ".join(f"{name} {microseconds:.1f}" for name, microseconds in document["host_us"].items())
        console.print(f"microseconds of the host for a call: {spent}")
        if json_path is not None:
            json_path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(table_of(document))


if __name__ == "__main__":
    typer.run(main)
