"""Train a small model like Gemma 4 on packed text and pictures that several processes share.

    torchrun --nproc-per-node 2 examples/train_pictures.py         # seconds on CPUs, over gloo
    torchrun --nproc-per-node 2 examples/train_pictures.py --tokens 131072 --hidden 2048 --heads 8 \
        --kv-heads 2 --layers 6 --window 1024 --longest 16384      # GPUs, over NCCL

Of the layers, every sixth is global: heads of 512, causal. The others are local: heads of 256, a window, and
the tokens of a picture see each other. Documents are packed into one sequence, and no document sees another.

The first step is also computed by each process alone, to compare losses and gradients, unless
``--no-comparison`` is given. The last lines have the median time of a step, its tokens per second and, on
GPUs, the memory of a process. What makes the training context parallel is marked with (1) to (4).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn import functional as F

import flashtile
from flashtile import masks
from flashtile.parallel import context_parallel_attention, shard, shard_mask

VOCABULARY = 512
"""Tokens below half of it are text, the others are of pictures."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Packed(NamedTuple):
    """Packed documents; all tensors are (tokens,)."""

    lengths: list[int]
    """Tokens of each document."""
    tokens: Tensor
    targets: Tensor
    """The next token; -100 at the end of a document and where a picture's token is next."""
    positions: Tensor
    documents: Tensor
    """Number of the document that a token belongs to."""
    pictures: Tensor
    """Number of the picture that a token belongs to. A token of text has a number of its own below 0."""


def draw(total: int, longest: int, picture: int, device: torch.device, seed: int) -> Packed:
    """Draw documents of up to ``longest`` tokens: text and pictures of ``picture`` tokens in turns."""
    rng = Random(seed)
    lengths: list[int] = []
    kinds: list[int] = []
    while (left := total - len(kinds)) > 0:
        lengths.append(min(left, rng.randint(1, longest)))
        document: list[int] = []
        while len(document) < lengths[-1]:
            number = len(lengths) * longest + len(document)  # of no other picture
            document += [-1] * rng.randint(1, 2 * picture) + [number] * picture
        kinds += document[: lengths[-1]]
    text, of = torch.tensor(kinds) < 0, torch.tensor(lengths)
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.where(text, -1 - torch.arange(total), torch.tensor(kinds))
    drawn = torch.randint(VOCABULARY // 2, (total,), generator=generator)
    tokens = torch.where(text, drawn, drawn + VOCABULARY // 2)
    starts = F.pad(of.cumsum(0), (1, 0))
    documents = torch.arange(len(of)).repeat_interleave(of)
    targets = tokens.roll(-1).masked_fill(~text.roll(-1), -100)
    targets[starts[1:] - 1] = -100
    positions = torch.arange(total) - starts[documents]
    made = (tensor.to(device) for tensor in (tokens, targets, positions, documents, numbers))
    return Packed(lengths, *made)


class Layer(nn.Module):
    """Attention and MLP, each after a norm. Heads have 512 in a global layer and 256 in a local one."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, is_global: bool) -> None:
        super().__init__()
        self.is_global, self.head_dim = is_global, 512 if is_global else 256
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.q = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.kv = nn.Linear(hidden, 2 * kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, hidden, bias=False)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        y = self.norms[0](x)
        q, kv = (project(y).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.kv))
        k, v = kv.chunk(2, dim=2)
        x = x + self.out(attend(rotated(q, positions), rotated(k, positions), v).flatten(2))
        return x + self.mlp(self.norms[1](x))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary embedding to (1, tokens, heads, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    rates = 10000 ** -torch.linspace(0, 1, first.shape[-1], device=x.device)
    angles = (positions[:, None] * rates)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Model(nn.Module):
    def __init__(self, hidden: int, layers: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        kinds = [(i + 1) % 6 == 0 or i + 1 == layers for i in range(layers)]
        self.layers = nn.ModuleList(Layer(hidden, heads, kv_heads, is_global) for is_global in kinds)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def loss(
        self, tokens: Tensor, targets: Tensor, positions: Tensor, *, attends: tuple[Attend, Attend]
    ) -> Tensor:
        """Return the sum over tokens. ``attends`` are the attention of local and of global layers."""
        x = self.embedding(tokens)[None]
        for layer in self.layers:
            x = layer(x, positions, attends[bool(layer.is_global)])
        return F.cross_entropy(self.head(x)[0].float(), targets, reduction="sum")


def mask_of(packed: Packed, window: int) -> masks.MaskMod:
    """The mask of local layers: causal, but a picture's tokens see each other; in documents and a window."""
    seen = masks.causal() | masks.document(packed.pictures)
    return masks.document(packed.documents) & seen & masks.window(window - 1, -1)


def alone(packed: Packed, window: int) -> tuple[Attend, Attend]:
    """Attention of local and of global layers on one device."""
    total, longest = len(packed.tokens), max(packed.lengths)
    block_mask = masks.create_block_mask(mask_of(packed, window), None, None, total, total)
    offsets = torch.tensor([0, *packed.lengths], device=packed.tokens.device).cumsum(0, dtype=torch.int32)

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, block_mask=block_mask)

    def of_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.flash_attn_varlen_func(
            q[0], k[0], v[0], offsets, offsets, longest, longest, causal=True
        )[None]

    return local, of_all


def shared(packed: Packed, window: int, group: Any = None) -> tuple[Attend, Attend]:
    """(3) Attention of local and of global layers over the tokens of all processes."""
    block_mask = shard_mask(mask_of(packed, window), len(packed.tokens), group)
    offsets = torch.tensor([0, *packed.lengths]).cumsum(0)

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(q, k, v, group=group, block_mask=block_mask)

    def of_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # All-gather merges no partial results, which Hopper's kernels do not have for heads over 128.
        return context_parallel_attention(
            q[0], k[0], v[0], group=group, cu_seqlens_q=offsets, causal=True, method="allgather"
        )[None]

    return local, of_all


def step(model: Model, packed: Packed, window: int, group: Any = None) -> float:
    """Compute the mean loss of all processes' tokens, and the gradients of the weights."""
    count = (packed.targets >= 0).sum()
    # (2) Each process has its own tokens, targets and positions.
    own = [shard(t, 0, group) for t in (packed.tokens, packed.targets, packed.positions)]
    loss = model.loss(*own, attends=shared(packed, window, group)) / count
    loss.backward()
    loss = loss.detach()
    # (4) Loss and gradients are sums over the processes.
    for tensor in (loss, *(weight.grad for weight in model.parameters())):
        dist.all_reduce(tensor, group=group)
    return loss.item()


def gradients_of(model: Model) -> list[Tensor]:
    """Take the gradients of the weights, which then have none."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return gradients


def compare(model: Model, packed: Packed, window: int, group: Any = None) -> tuple[float, float]:
    """Return the differences of losses and gradients of :func:`step` from those of one device.

    The difference of gradients is relative to the largest one.
    """
    found = step(model, packed, window, group)
    gradients = gradients_of(model)
    attends = alone(packed, window)
    loss = model.loss(packed.tokens, packed.targets, packed.positions, attends=attends)
    loss = loss / (packed.targets >= 0).sum()
    loss.backward()
    own = gradients_of(model)
    largest = max(float(gradient.abs().max()) for gradient in own)
    apart = max(float((one - other).abs().max()) for one, other in zip(gradients, own, strict=True))
    return abs(found - loss.item()), apart / largest


def timed_step(
    model: Model, optimizer: torch.optim.Optimizer, packed: Packed, window: int
) -> tuple[float, float]:
    """Update the weights, and return (loss, seconds): with the masks, both passes and the optimizer."""
    start = time.perf_counter()
    loss = step(model, packed, window)
    optimizer.step()
    optimizer.zero_grad()
    if packed.tokens.is_cuda:
        torch.cuda.synchronize()
    return loss, time.perf_counter() - start


def main(
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the whole sequence.")] = 768,
    longest: Annotated[int, typer.Option(min=1, help="Most tokens of a document.")] = 400,
    picture: Annotated[int, typer.Option(min=1, help="Tokens of a picture.")] = 64,
    window: Annotated[int, typer.Option(min=1, help="Tokens that a local layer sees.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers; every sixth and the last are global.")] = 2,
    hidden: Annotated[int, typer.Option(min=1, help="Width.")] = 64,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 2,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key heads.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps, all on the same documents.")] = 4,
    comparison: Annotated[
        bool, typer.Option(help="Compute the first step also on each device alone.")
    ] = True,
) -> None:
    """Train in bfloat16 on GPUs and in float32 on CPUs, and print losses, times and memory."""
    # (1) One process for each device.
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)  # the same weights on all processes
        model = Model(hidden, layers, heads, kv_heads).to(device, torch.bfloat16 if on_gpu else torch.float32)
        packed = draw(tokens, longest, picture, device, seed=0)
        say = print if dist.get_rank() == 0 else lambda _: None
        if comparison:
            of_loss, of_gradients = compare(model, packed, window)
            say(f"differences from one device: loss {of_loss:.1e}, gradients {of_gradients:.1e} (relative)")
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        times = []
        for n in range(steps):
            loss, seconds = timed_step(model, optimizer, packed, window)
            times.append(seconds)
            say(f"step {n}: loss {loss:.4f}, {1e3 * seconds:.1f} ms, {tokens / seconds:.0f} tokens/s")
        usual = median(times[1:] or times)  # the first step compiles kernels
        say(
            f"processes: {dist.get_world_size()}; median of {len(times[1:] or times)} steps: "
            f"{1e3 * usual:.1f} ms, {tokens / usual:.0f} tokens/s"
        )
        if on_gpu:
            say(f"peak memory of a process {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
