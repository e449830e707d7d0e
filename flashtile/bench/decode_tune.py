"""Offline search for the decoding kernels' tiles: ``python -m flashtile.bench.decode_tune -w decode-grid``.

Every candidate is timed as the benchmark times calls: cold, and in a graph over rotating caches. Rows that
win go into ``flashtile/backends/portable/decode/config.py``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from flashtile.backends.common.config import KernelConfig
from flashtile.backends.portable.decode.config import DecodeConfig, choose
from flashtile.backends.portable.decode.launch import DecodeLaunch
from flashtile.bench.gate import Oracle
from flashtile.bench.inputs import Inputs, make_inputs
from flashtile.bench.timing import capture, median_time, replay_time
from flashtile.bench.workloads import Workload, select
from flashtile.decode.problem import CacheTensors, DecodeOptions, DecodeProblem

SHARED_LIMIT = 227 * 1024


def describe(workload: Workload, inputs: Inputs) -> tuple[DecodeProblem, CacheTensors]:
    """The problem of a workload's call, and its tensors beside q and the caches."""
    tensors = CacheTensors(
        cache_seqlens=inputs.cache_seqlens,
        block_table=inputs.block_tables[0] if inputs.block_tables else None,
        **inputs.descales,
    )
    options = DecodeOptions(causal=workload.causal)
    return DecodeProblem.from_tensors(inputs.q, inputs.k, inputs.v, tensors, options), tensors


def candidates(workload: Workload, chosen: DecodeConfig) -> Iterator[DecodeConfig]:
    """The tile in the table, then others that about fit the shared memory of a multiprocessor."""
    yield chosen
    row_bytes = 2 * workload.head_dim * workload.cache_dtype.itemsize
    for BLOCK_N, num_warps, num_stages, programs_per_sm in itertools.product(
        (16, 32, 64, 128), (4, 8), (2, 3, 4, 5), (1, 2, 3)
    ):
        shared = BLOCK_N * row_bytes * (num_stages - 1) + 4096
        if shared * programs_per_sm > SHARED_LIMIT or shared * programs_per_sm < SHARED_LIMIT // 4:
            continue
        tile = KernelConfig(chosen.tile.BLOCK_M, BLOCK_N, num_warps, num_stages)
        candidate = DecodeConfig(tile, programs_per_sm, chosen.precision)
        if candidate.tile != chosen.tile or programs_per_sm != chosen.programs_per_sm:
            yield candidate


def time_candidate(workload: Workload, inputs: Inputs, config: DecodeConfig, rep: float) -> dict[str, Any]:
    """Microseconds of one candidate, or why it has none."""
    problem, tensors = describe(workload, inputs)
    launch = DecodeLaunch(problem, config)

    def call(table: Tensor | None) -> Tensor:
        return launch(inputs.q, inputs.k, inputs.v, tensors._replace(block_table=table))[0]

    calls = [partial(call, table) for table in inputs.block_tables or (None,)]
    try:
        (found,) = Oracle(workload, inputs, gradients=False).check({"out": calls[0]()})
        if not found.holds:
            return {"refused": str(found)}
        graph = capture(calls)
    except Exception as error:  # what does not fit this device
        return {"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    device = inputs.q.device
    return {
        "cold_us": median_time(calls[0], rep, device) * 1e3,
        "graph_us": replay_time(graph, rep) * 1e3 / len(calls),
    }


def main(
    workload: Annotated[list[str], typer.Option("-w", "--workload", help="Names or tags; repeatable.")],
    rep: Annotated[float, typer.Option(help="Milliseconds of calls for each measurement.")] = 20.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every number here.")] = None,
) -> None:
    """Time tiles of the decoding kernel on the GPU of this machine, the fastest first."""
    found: list[dict[str, Any]] = []
    for one in select(workload):
        inputs = make_inputs(one, "cuda")
        rows = []
        for config in candidates(one, choose(describe(one, inputs)[0])):
            tile = config.tile
            shape = (tile.BLOCK_M, tile.BLOCK_N, tile.num_warps, tile.num_stages, config.programs_per_sm)
            rows.append({"workload": one.name, "tile": shape} | time_candidate(one, inputs, config, rep))
        found += rows
        typer.echo(f"{one.name}: BLOCK_M, BLOCK_N, num_warps, num_stages, programs_per_sm")
        for row in sorted(rows, key=lambda row: row.get("graph_us", float("inf"))):
            if "refused" in row:
                typer.echo(f"  {row['tile']} {row['refused'][:100]}")
                continue
            speed = one.bytes() / row["graph_us"] / 1e6
            first = " (the table's)" if row is rows[0] else ""
            typer.echo(
                f"  {row['tile']} cold {row['cold_us']:.1f} us, graph {row['graph_us']:.1f} us, "
                f"{speed:.2f} TB/s{first}"
            )
        if json_path is not None:
            json_path.write_text(json.dumps(found, indent=1) + "\n")
        del inputs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
