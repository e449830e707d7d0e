"""Measures context parallelism, compared with one GPU and torch's context_parallel.

    torchrun --nproc-per-node 2 -m benchmarks.parallel --json parallel.json
    torchrun --nproc-per-node 2 -m benchmarks.parallel --device cpu --seqlens 256 --steps 1   # without peers

The calls are causal attention and attention with a window, both forward and backward, and decoding.
``of_linear`` is the speed-up over one GPU, divided by the number of GPUs. ``extra_bytes`` is the peak memory
in addition to the inputs, and ``model_ms`` the prediction of the I/O model. If a contestant fails, its row
has the error.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

import flashtile
from flashtile.hardware.machine import find_device
from flashtile.io_model import Call
from flashtile.parallel import Sharing, context_parallel_attention, context_parallel_decode, explain, shard

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
DECODED = 262144
LONG = 2e14
"""FLOPs of both passes above which a call takes one GPU more than about 0.3 s; it then has fewer steps."""
SPIN = 5_000_000
"""Cycles for which a GPU waits with ``--ahead``: about 2.7 ms. The host takes 2.2 to 3.4 for both passes."""
SHOWN = ("ms", "tflops", "of_linear", "extra_bytes", "model_ms", "model_extra_bytes")


def main(
    seqlens: Annotated[
        str, typer.Option(help="Lengths of the whole sequence.")
    ] = "32768,65536,131072,262144",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 10,
    long_steps: Annotated[
        int, typer.Option(min=1, help="Timed steps of calls that take one GPU more than 0.3 s.")
    ] = 2,
    peers: Annotated[str, typer.Option(help="Lengths at which peers are measured; none on a CPU.")] = (
        "32768,131072"
    ),
    parts: Annotated[
        str, typer.Option(help="Parts to run: causal, window, decoding.")
    ] = "causal,window,decoding",
    window: Annotated[int, typer.Option(help="Window of the call at half of the longest length.")] = 4096,
    ahead: Annotated[
        bool,
        typer.Option(help="Launch each step while the GPUs wait, as in training."),
    ] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every row here.")] = None,
) -> None:
    """Print a row for each contestant and length: milliseconds, TFLOP/s of all ranks, and share of linear."""
    where = find_device(device)
    if where.type == "cuda":
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    lengths, with_peers = ([int(length) for length in of.split(",") if length] for of in (seqlens, peers))
    calls = [(length, -1) for length in lengths if "causal" in parts]
    if "window" in parts:
        calls.append((max(lengths) // 2, min(window, max(lengths) // 4)))
    rows: list[dict[str, Any]] = []
    for seqlen, width in sorted(calls):  # the longest last: they may run out of memory or time
        for row in measured(seqlen, width, steps, long_steps, seqlen in with_peers, where, ahead):
            report(row, rows, json_file, where)
    if "decoding" in parts:
        for row in decoding(DECODED if where.type == "cuda" else 1024, steps, where):
            report(row, rows, json_file, where)
    dist.destroy_process_group()


def report(
    row: dict[str, Any], rows: list[dict[str, Any]], json_file: Path | None, where: torch.device
) -> None:
    """Add a row with its share of linear speed-up; rank 0 prints it and writes all rows so far."""
    alone = next((r for r in rows if (r["call"], r["seqlen"]) == (row["call"], row["seqlen"])), {}).get("ms")
    if alone and "ms" in row:
        row["of_linear"] = alone / row["ms"] / dist.get_world_size()
    rows.append(row)
    if dist.get_rank() != 0:
        return
    numbers = [f"{name} {row[name]:.4g}" for name in SHOWN if name in row]
    print(row["call"], row["seqlen"], row["name"], *numbers, row.get("error", ""), flush=True)
    write(rows, json_file, where)


def write(rows: list[dict[str, Any]], json_file: Path | None, where: torch.device) -> None:
    if json_file is None:
        return
    name = torch.cuda.get_device_name() if where.type == "cuda" else "cpu"
    record = {"device": name, "ranks": dist.get_world_size(), "torch": torch.__version__, "rows": rows}
    json_file.write_text(json.dumps(record, indent=2) + "\n")


def measured(
    seqlen: int,
    window: int,
    steps: int,
    long_steps: int,
    peers: bool,
    where: torch.device,
    ahead: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each contestant at one sequence length; ``window`` -1 means no window."""
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    torch.manual_seed(0)
    shapes = [(1, seqlen, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
    whole = [torch.randn(shape, device=where, dtype=dtype) for shape in shapes]
    # Causal work is equal in a zigzag. Under a window it is equal anyway, and a zigzag has more boundaries.
    layout = "zigzag" if window < 0 else "contiguous"
    sharing = Sharing(1, seqlen, HEADS, HEADS_KV, HEAD_DIM, HEAD_DIM, left=window, right=0, layout=layout)
    model = {row.method: row for row in explain(sharing, dist.get_world_size()).rows}
    pairs = Call(
        1, seqlen, seqlen, HEADS, HEADS_KV, HEAD_DIM, window_left=window, window_right=0
    ).visible_pairs
    flops = 14 * pairs * HEAD_DIM  # two products forward, five backward
    contestants: dict[str, Callable[[], Any]] = {"one GPU": one_gpu(whole, window)}
    for method in ("ring", "ulysses", "allgather"):
        contestants[method] = ours(whole, window, method, layout)
    if window < 0 and peers and where.type == "cuda":
        for rotation in ("allgather", "alltoall"):
            contestants[f"torch, {rotation}"] = torchs(whole, rotation, where)
    for name, prepare in contestants.items():
        row: dict[str, Any] = {
            "call": "causal" if window < 0 else f"window {window}",
            "seqlen": seqlen,
            "name": name,
        }
        try:
            run = prepare()
            before = torch.cuda.memory_allocated() if where.type == "cuda" else 0
            if where.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = timed(run, long_steps if flops > LONG else steps, where, ahead)
            row |= {"ms": seconds * 1e3, "tflops": flops / seconds / 1e12}
            if where.type == "cuda":
                row["extra_bytes"] = torch.cuda.max_memory_allocated() - before
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if name in model:
            row |= {"model_ms": model[name].seconds * 1e3, "model_extra_bytes": model[name].extra_bytes}
        yield row


def timed(run: Callable[[], Any], steps: int, where: torch.device, ahead: bool = False) -> float:
    """Return the median time of a step in seconds, on the rank where it is the longest.

    With ``ahead``, a GPU spins for some milliseconds before the step, while the host launches it.
    """
    for _ in range(min(3, steps)):
        run()
    times = []
    for _ in range(steps):
        dist.barrier()
        if where.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if ahead:
                torch.cuda._sleep(SPIN)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        else:
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(times), device=where)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def both_passes(attend: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], Any]:
    *inputs, dout = tensors
    leaves = [t.clone().requires_grad_() for t in inputs]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, dout)


def one_gpu(whole: list[Tensor], window: int) -> Callable[[], Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, causal=True, window_size=(window, 0))

    return lambda: both_passes(attend, whole)


def ours(whole: list[Tensor], window: int, method: str, layout: str) -> Callable[[], Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(
            q, k, v, method=method, layout=layout, causal=True, window_size=(window, 0)
        )

    return lambda: both_passes(attend, [shard(t, 1, layout=layout) for t in whole])


def torchs(whole: list[Tensor], rotation: str, where: torch.device) -> Callable[[], Any]:
    """Return a function that prepares torch's experimental ``context_parallel``, with its load balancing."""

    def prepare() -> Callable[[], Any]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method
        from torch.nn.attention import SDPBackend, sdpa_kernel

        mesh = dist.init_device_mesh(where.type, (dist.get_world_size(),))
        set_rotate_method(rotation)
        group = HEADS // HEADS_KV
        by_heads = [t.transpose(1, 2).contiguous() for t in whole]
        by_heads[1:3] = [t.repeat_interleave(group, dim=1) for t in by_heads[1:3]]
        leaves = [t.clone() for t in by_heads]

        def run() -> None:
            buffers = [t.clone() for t in leaves]
            shared = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4)
            with shared, sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
                q, k, v = (t.detach().requires_grad_() for t in buffers[:3])
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                torch.autograd.grad(out, (q, k, v), buffers[3])

        return run

    return prepare


def decoding(length: int, steps: int, where: torch.device) -> Iterator[dict[str, Any]]:
    """Yield rows of decoding one sequence whose cache is on one GPU or distributed over all of them.

    On GPUs the calls are replayed CUDA graphs.
    """
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    torch.manual_seed(0)
    size = dist.get_world_size()
    q = torch.randn(1, 1, HEADS, HEAD_DIM, device=where, dtype=dtype)
    cache = torch.randn(2, 1, length, HEADS_KV, HEAD_DIM, device=where, dtype=dtype)
    own = cache[:, :, dist.get_rank() :: size].contiguous()
    lengths = torch.tensor([length], dtype=torch.int32, device=where)
    calls: dict[str, Callable[[], Any]] = {
        "one GPU": lambda: flashtile.flash_attn_with_kvcache(q, cache[0], cache[1], cache_seqlens=lengths),
    }
    for merge in ("allgather", "reduce_scatter", "symmetric"):
        calls[merge] = partial(context_parallel_decode, q, *own, cache_seqlens=lengths, merge=merge)
    for name, call in calls.items():
        row: dict[str, Any] = {"call": "decoding", "seqlen": length, "name": name}
        try:
            row["ms"] = timed(captured(call) if where.type == "cuda" else call, steps, where) * 1e3
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        yield row


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Capture ``call`` in a CUDA graph and return the graph's replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


if __name__ == "__main__":
    typer.run(main)
