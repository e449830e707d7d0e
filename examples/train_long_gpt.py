"""Train a small byte-level GPT on one long sequence that several processes share.

    torchrun --nproc-per-node 2 examples/train_long_gpt.py                # 131072 bytes; CPUs over gloo
    torchrun --nproc-per-node 2 examples/train_long_gpt.py --window -1    # every byte sees all before
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_long_gpt.py --checkpoint long.pt

The default of 100 steps takes minutes on CPUs; ``--steps 10`` is enough to see the loss fall.

With GPUs each process uses one, over NCCL. With ``--checkpoint`` a run that is started again, by hand or by
torchrun after a process has died, goes on from the last checkpoint, with any number of processes.

What makes it context parallel is marked with (1) to (4).
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.nn import functional as F

from flashtile.parallel import context_parallel_attention, shard
from flashtile.tools.demo.corpus import Corpus, python_library, sample_batch
from flashtile.tools.demo.llama import Llama, sized


def main(
    seqlen: Annotated[int, typer.Option(min=1, help="Bytes of the whole sequence.")] = 131072,
    steps: Annotated[int, typer.Option(min=1, help="Steps in all, including those before a restart.")] = 100,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 2,
    embed: Annotated[int, typer.Option(min=1, help="Width.")] = 64,
    window: Annotated[
        int, typer.Option(help="Bytes before its own position that a byte sees; -1: all.")
    ] = 512,
    method: Annotated[str, typer.Option(help="auto, ring, ulysses or allgather.")] = "auto",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="Resume from this file, and write it.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps from one checkpoint to the next.")] = 10,
    text: Annotated[Path | None, typer.Option(exists=True, help="Read the .py files of this folder.")] = None,
) -> None:
    """Train, and print the loss of each step and the bytes per second."""
    device = join_group()
    try:
        corpus = python_library(text)
        torch.manual_seed(seed)  # the same weights on all processes
        model = Llama(sized(layers, heads, embed))
        attend = partial(attention, method=method, window=window)
        train(model.to(device), corpus, attend, seqlen, steps, lr, seed, checkpoint, every)
    finally:
        dist.destroy_process_group()


def join_group() -> torch.device:
    """Join the process group of torchrun, or create one of this process alone, and return the device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return device


def attention(q: Tensor, k: Tensor, v: Tensor, group: Any, method: str, window: int) -> Tensor:
    """(3) Queries see the keys of all processes. Everything else in the model treats bytes one by one."""
    return context_parallel_attention(
        q, k, v, group=group, method=method, causal=True, window_size=(window, 0)
    )


def train(
    model: Llama,
    corpus: Corpus,
    attend: Any,
    seqlen: int,
    steps: int,
    lr: float,
    seed: int,
    checkpoint: Path | None = None,
    every: int = 10,
    group: Any = None,
) -> list[float]:
    """Train, and return the loss of each step made here, in nats per byte."""
    model.attention = partial(attend, group=group)
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    done, losses, began = load(checkpoint, model, optimizer, device), [], time.perf_counter()
    # (1) Each process has its own bytes of the sequence, and their positions in it.
    positions = shard(torch.arange(seqlen, device=device), 0, group)
    for step in range(done, steps):
        batches = torch.Generator().manual_seed(
            seed * 2**20 + step
        )  # any process draws the same bytes for a step
        excerpt = [t.to(device) for t in sample_batch(corpus.train, 1, seqlen, batches)]
        inputs, targets = (shard(t, 1, group) for t in excerpt)  # (2) every process shards the same excerpt
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(inputs, positions.unsqueeze(0))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / seqlen
        loss.backward()
        # (4) Each process has the gradients of its own bytes; their sum is the sequence's.
        for tensor in (loss.detach(), *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor, group=group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if dist.get_rank(group) == 0:
            speed = seqlen * len(losses) / (time.perf_counter() - began)
            print(f"step {step + 1:6d}  loss {losses[-1]:.4f} nats a byte  {speed:,.0f} bytes/s", flush=True)
            if checkpoint is not None and ((step + 1) % every == 0 or step + 1 == steps):
                save(checkpoint, model, optimizer, step + 1)
    return losses


def save(checkpoint: Path, model: Llama, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Replace the checkpoint atomically: a process that dies while writing leaves the last one intact."""
    unfinished = checkpoint.with_suffix(".unfinished")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
    os.replace(unfinished, checkpoint)


def load(
    checkpoint: Path | None, model: Llama, optimizer: torch.optim.Optimizer, device: torch.device
) -> int:
    """Load the checkpoint, if there is one, and return the number of steps made before."""
    if checkpoint is None or not checkpoint.exists():
        return 0
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


if __name__ == "__main__":
    typer.run(main)
