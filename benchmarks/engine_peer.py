"""nano-vllm's design on this library's functions, to compare the engine with.

    python benchmarks/engine_peer.py                                     # both engines, new tokens a second
    python benchmarks/engine_peer.py --model ci --requests 5 --device cpu    # and both give the same tokens

The design (GeeeekExplorer/nano-vllm; the idea, in words of our own) has phases. As long as a prompt waits
and fits, a step computes whole prompts, one packed behind another; otherwise each running sequence gets a
token. The host waits for a step's tokens before it plans the next one. Single tokens replay CUDA graphs,
one for each padded batch size, captured when the model is loaded. Products are the library's (cuBLAS);
norms, rotary embedding, SwiGLU and the draw are kernels of their own, which ``torch.compile`` writes. Pages
have 256 tokens. Attention is ``flash_attn_varlen_func`` for prompts and ``flash_attn_with_kvcache`` for
single tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile import append_kvcache, flash_attn_varlen_func, flash_attn_with_kvcache
from flashtile.engine.config import ModelConfig, read_config
from flashtile.engine.rotary import rotary_tables
from flashtile.engine.weights import Weights, open_weights, random_weights
from flashtile.hardware import machine, timing
from flashtile.tools.bench.engine_bench import EngineWorkload, measure
from flashtile.tools.bench.engine_models import SERVED, write_model
from flashtile.tools.bench.engine_peers import Contender, Flashtile, Prompts
from flashtile.tools.bench.workloads import SMALL_MODEL

PAGE = 256
LONGEST = 4096
"""Tokens of a sequence."""
BUDGET = 16384
"""Tokens of prompts in a step."""


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm of x + residual, x + residual)."""
    total = x.float() + residual.float()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight, total.to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """x (tokens, heads, head_dim) at its positions."""
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def draw(logits: Tensor, temperature: float) -> Tensor:
    """Of the softmax over exponential noise the largest is a draw; at temperature 0 the likeliest token."""
    if temperature == 0:
        return logits.argmax(-1)
    shares = (logits.float() / temperature).softmax(-1)
    return (shares / torch.empty_like(shares).exponential_(1).clamp_min_(1e-10)).argmax(-1)


@dataclass
class Step:
    """What a step computes: single tokens where there is a block table, else whole prompts."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    block_table: Tensor | None = None
    longest: int = 1


class Model:
    """A Llama of plain products; what is elementwise goes through ``compiled``."""

    def __init__(self, config: ModelConfig, weights: Weights, compiled: Callable[[Any], Any]):
        self.config, self.embedding = config, weights("model.embed_tokens.weight")
        self.layers = []
        for i in range(config.num_layers):
            name = f"model.layers.{i}"
            qkv = torch.cat([weights(f"{name}.self_attn.{part}_proj.weight") for part in "qkv"])
            gate_up = torch.cat([weights(f"{name}.mlp.{part}_proj.weight") for part in ("gate", "up")])
            norms = [weights(f"{name}.{part}_layernorm.weight") for part in ("input", "post_attention")]
            o, down = weights(f"{name}.self_attn.o_proj.weight"), weights(f"{name}.mlp.down_proj.weight")
            self.layers.append((*norms, qkv, o, gate_up, down))
        self.norm = weights("model.norm.weight")
        self.head = self.embedding if config.tie_word_embeddings else weights("lm_head.weight")
        tables = rotary_tables(config.rope, config.head_dim, LONGEST)
        self.cos, self.sin = (table.to(self.embedding.device) for table in tables)
        self.add_norm, self.rotated, self.swiglu = (compiled(f) for f in (add_norm, rotated, swiglu))

    def hidden(self, step: Step, caches: Tensor) -> Tensor:
        """(tokens, hidden_size), normalised."""
        c = self.config
        heads, eps = (c.num_heads, c.num_kv_heads, c.num_kv_heads), c.norm_eps
        x = F.embedding(step.tokens, self.embedding)
        residual = torch.zeros_like(x)
        for (before, after, qkv, o, gate_up, down), k_cache, v_cache in zip(
            self.layers, *caches, strict=True
        ):
            x, residual = self.add_norm(x, residual, before, eps)
            q, k, v = F.linear(x, qkv).unflatten(-1, (-1, c.head_dim)).split(heads, dim=1)
            q, k = (self.rotated(t, self.cos, self.sin, step.positions) for t in (q, k))
            append_kvcache(k_cache, v_cache, k, v, slot_mapping=step.slots)
            x = F.linear(self._attend(q, k, v, step, k_cache, v_cache).flatten(-2), o)
            x, residual = self.add_norm(x, residual, after, eps)
            x = F.linear(self.swiglu(F.linear(x, gate_up)), down)
        return self.add_norm(x, residual, self.norm, eps)[0]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, step: Step, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        scale = self.config.softmax_scale
        if step.block_table is None:
            cu_seqlens, longest = step.lengths, step.longest
            return flash_attn_varlen_func(
                q, k, v, cu_seqlens, cu_seqlens, longest, longest, softmax_scale=scale, causal=True
            )
        return flash_attn_with_kvcache(
            q.unsqueeze(1), k_cache, v_cache, cache_seqlens=step.lengths, block_table=step.block_table,
            softmax_scale=scale, causal=True,
        ).squeeze(1)  # fmt: skip


@dataclass
class Request:
    tokens: list[int]
    wanted: int
    pages: list[int] = field(default_factory=list)

    def slot(self, i: int) -> int:
        return self.pages[i // PAGE] * PAGE + i % PAGE


class Phases(Contender):
    """The design as an engine.

    Args:
        temperature: of the draws; 0 takes the likeliest tokens.
        max_num_seqs: sequences that decode together.
        pages: of the cache.
        compiles: whether torch.compile writes what is elementwise.
    """

    name = "phases"

    def __init__(
        self, temperature: float = 1.0, max_num_seqs: int = 512, pages: int = 2048, compiles: bool = True
    ):
        self.temperature, self.max_num_seqs, self.num_pages = temperature, max_num_seqs, pages
        self.compiles = compiles

    def load(self, folder: Path, model: str, device: torch.device, most_tokens: int) -> None:
        config, self.device = read_config(folder), device
        on_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        stored = model == SMALL_MODEL
        weights = (open_weights if stored else _random)(folder, config, device, dtype)

        def compiled(function: Any) -> Any:
            return torch.compile(function, dynamic=True) if on_gpu and self.compiles else function

        with torch.inference_mode():
            self.model = Model(config, weights, compiled)
            shape = (2, config.num_layers, self.num_pages, PAGE, config.num_kv_heads, config.head_dim)
            self.caches = torch.zeros(shape, dtype=dtype, device=device)
            self.draw = compiled(draw)
            self.graphs = self._capture() if on_gpu else {}

    def generate(self, prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        free = deque(range(self.num_pages))
        requests = [Request(list(one), len(one) + n) for one, n in zip(prompts, lengths, strict=True)]
        waiting, running = deque(requests), deque[Request]()
        self.steps = 0
        while waiting or running:
            batch: list[Request] = []
            count = 0
            while waiting and len(running) < self.max_num_seqs:
                one = waiting[0]
                needed = -(-len(one.tokens) // PAGE)
                if count + len(one.tokens) > BUDGET or needed > len(free):
                    break
                one.pages = [free.popleft() for _ in range(needed)]
                count += len(one.tokens)
                batch.append(waiting.popleft())
                running.append(one)
            prefill = bool(batch)
            if not prefill:
                batch = list(running)
                for one in batch:
                    if len(one.tokens) > len(one.pages) * PAGE:
                        one.pages.append(free.popleft())
            with torch.inference_mode():
                chosen = self._prefill(batch) if prefill else self._decode(batch)
            self.steps += 1
            for one, token in zip(batch, chosen, strict=True):
                one.tokens.append(token)
                if len(one.tokens) >= one.wanted:
                    free.extend(one.pages)
            running = deque(one for one in running if len(one.tokens) < one.wanted)
        return [one.tokens[-length:] for one, length in zip(requests, lengths, strict=True)]

    def numbers(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def _prefill(self, batch: list[Request]) -> list[int]:
        lengths = [len(one.tokens) for one in batch]
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        step = Step(
            self._sent([token for one in batch for token in one.tokens]),
            self._sent([i for length in lengths for i in range(length)]),
            self._sent([one.slot(i) for one in batch for i in range(len(one.tokens))]),
            self._sent(offsets, torch.int32), None, max(lengths),
        )  # fmt: skip
        last = step.lengths[1:] - 1
        return self._drawn(self.model.hidden(step, self.caches).index_select(0, last))

    def _decode(self, batch: list[Request]) -> list[int]:
        places = [len(one.tokens) - 1 for one in batch]
        most = max(len(one.pages) for one in batch)
        step = Step(
            self._sent([one.tokens[-1] for one in batch]),
            self._sent(places),
            self._sent([one.slot(i) for one, i in zip(batch, places, strict=True)]),
            self._sent([i + 1 for i in places], torch.int32),
            self._sent([one.pages + [-1] * (most - len(one.pages)) for one in batch], torch.int32),
        )
        if not self.graphs:
            return self._drawn(self.model.hidden(step, self.caches))
        count, own = len(batch), self.static
        size = next(size for size in self.graphs if size >= count)
        own.slots.fill_(-1)
        own.lengths.zero_()
        assert own.block_table is not None
        assert step.block_table is not None
        for name in ("tokens", "positions", "slots", "lengths"):
            getattr(own, name)[:count] = getattr(step, name)
        own.block_table[:count, :most] = step.block_table
        self.graphs[size].replay()
        return self._drawn(self.hidden[:count])

    def _drawn(self, hidden: Tensor) -> list[int]:
        return self.draw(F.linear(hidden, self.model.head), self.temperature).tolist()  # type: ignore[no-any-return]

    def _sent(self, numbers: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        tensor = torch.tensor(numbers, dtype=dtype, pin_memory=self.device.type == "cuda")
        return tensor.to(self.device, non_blocking=True)

    def _capture(self) -> dict[int, torch.cuda.CUDAGraph]:
        """By batch size, the smallest first."""
        most = self.max_num_seqs
        sizes = [n for n in (1, 2, 4, 8, *range(16, most + 1, 16)) if n <= most]
        self.static = Step(
            *(torch.zeros(most, dtype=torch.int64, device=self.device) for _ in range(3)),
            torch.zeros(most, dtype=torch.int32, device=self.device),
            torch.zeros(most, LONGEST // PAGE, dtype=torch.int32, device=self.device),
        )
        self.hidden = self.model.embedding.new_zeros(most, self.model.config.hidden_size)
        own, graphs, pool = self.static, {}, None
        own.slots.fill_(-1)
        assert own.block_table is not None
        for size in reversed(sizes):
            step = Step(own.tokens[:size], own.positions[:size], own.slots[:size], own.lengths[:size])
            step.block_table = own.block_table[:size]
            self.hidden[:size] = self.model.hidden(step, self.caches)  # compiles
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.hidden[:size] = self.model.hidden(step, self.caches)
            graphs[size] = graph
            pool = pool or graph.pool()
        return dict(reversed(graphs.items()))


def _random(folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    return random_weights(config, device, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", help=f"of {', '.join(SERVED)}")
    parser.add_argument("--device", default=None)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seqs", type=int, default=512, help="sequences computed at a time")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the peer; ours is greedy")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, small = machine.find_device(options.device), options.model == SMALL_MODEL
    found: dict[str, Any] = {}
    for which in (Phases, Flashtile):  # one is in memory at a time
        contender: Contender = Flashtile(max_num_seqs=options.seqs)
        if which is Phases:
            contender = Phases(0.0 if small else options.temperature, options.seqs, 64 if small else 2048)
        workload = EngineWorkload(options.model, options.requests, 0, 5 if small else 0)
        with tempfile.TemporaryDirectory() as place:
            contender.load(write_model(options.model, Path(place)), options.model, device, 0)
        if small:
            given, lengths = workload.requests(256)
            found[f"{contender.name}, tokens"] = contender.generate(given, lengths)
        found[contender.name] = measure(contender, workload, device, 1)
        print(contender.name, json.dumps(found[contender.name]), flush=True)
        del contender
        gc.collect()
        timing.release_memory(device)
    if small and found[f"{Phases.name}, tokens"] != found[f"{Flashtile.name}, tokens"]:
        raise SystemExit("the engines' tokens differ")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
