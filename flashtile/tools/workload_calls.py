"""Calls of typical programs: training of attention layers, and the steps of an engine that serves a model.

They are made by the functions that programs call, with fake tensors: nothing is computed, and no memory is
needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile.compilation.calls import Call, calls_of
from flashtile.engine.config import ModelConfig
from flashtile.engine.device import MAX_GRAPH_BATCH, graph_batch
from flashtile.engine.model import Model, StepInput
from flashtile.engine.weights import parameters
from flashtile.op.operation import remembering

SEQLENS = (128, 512, 1000, 1024, 2048, 4096, 8192, 16384)
"""Lengths of training sequences. Kernels are chosen by length, in ranges; 1000 is no multiple of a tile."""
BATCHES = (1, 8)
BLOCK_SIZE = 16
CHUNKS = (512, 2048, 8192)
"""Tokens of a chunk of prompts in a step of an engine."""
CACHE_BLOCKS = 4096


@dataclass(frozen=True)
class Heads:
    """Heads of an attention layer: numbers of query and key heads, sizes, dtype, and the left window."""

    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    window: int = -1

    def tensors(self, batch: int, seqlen: int) -> tuple[torch.Tensor, ...]:
        """Return q, k and v, which require gradients."""
        sizes = (
            (self.num_heads, self.head_dim), (self.num_heads_kv, self.head_dim),
            (self.num_heads_kv, self.head_dim_v),
        )  # fmt: skip
        dtype = getattr(torch, self.dtype)
        return tuple(torch.empty(batch, seqlen, *size, dtype=dtype, requires_grad=True) for size in sizes)


DOCUMENTED = tuple(
    Heads(16, heads_kv, head_dim, head_dim_v, dtype)
    for dtype in ("bfloat16", "float16")
    for head_dim, head_dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    for heads_kv in (16, 4)
)
"""Heads that presets compile for."""


def training_calls(layers: Iterable[Heads], features: bool = False) -> list[Call]:
    """Return the calls of forward and backward passes.

    Args:
        layers: heads of the layers.
        features: also dropout, soft caps, ALiBi, windows, biases and the predefined masks.
    """
    with remembering() as remembered, FakeTensorMode():
        for layer in layers:
            for batch, seqlen in product(BATCHES, SEQLENS):
                for arguments in _training_arguments(layer, batch, seqlen, features):
                    out = flashtile.attention(*layer.tensors(batch, seqlen), **arguments)
                    out.sum().backward()
    return calls_of(remembered)


def _training_arguments(layer: Heads, batch: int, seqlen: int, features: bool) -> Iterator[dict[str, Any]]:
    yield {"causal": True, "window_size": (layer.window, -1)}
    yield {}
    if not features:
        return
    heads = layer.num_heads
    documents = torch.zeros(batch, seqlen, dtype=torch.int32)
    yield {"dropout_p": 0.1, "causal": True, "rng_state": torch.zeros(2, dtype=torch.int64)}
    yield {"dropout_p": 0.1, "rng_state": torch.zeros(2, dtype=torch.int64)}
    yield {"softcap": 30.0, "causal": True}
    yield {"alibi_slopes": torch.zeros(heads), "causal": True}
    yield {"window_size": (256, 0)}
    yield {"bias": torch.zeros(1, heads, seqlen, seqlen, dtype=getattr(torch, layer.dtype))}
    yield {"mask_mod": flashtile.masks.document(documents), "causal": True}
    yield {"mask_mod": flashtile.masks.prefix_lm(64)}


def serving_calls(config: ModelConfig, max_model_len: int | None = None, fp8: bool = False) -> list[Call]:
    """Return the calls of an engine's steps: chunks of prompts, and one token of each of many sequences.

    Args:
        config: the model. One layer for each of its windows is enough, since layers differ only in them.
        max_model_len: longest sequence in tokens. Default: the model's.
        fp8: weights and KV cache are rounded to e4m3.
    """
    windows = tuple(dict.fromkeys(config.windows))
    shorter = replace(config, num_layers=len(windows) + 1, windows=(*windows, windows[0]))
    columns = -(-(max_model_len or config.longest_sequence) // BLOCK_SIZE)
    with remembering() as remembered, FakeTensorMode(), torch.no_grad():
        dtype = getattr(torch, config.dtype)
        shapes = parameters(shorter)
        model = Model(shorter, lambda name: torch.empty(shapes[name].shape, dtype=dtype), 2048, fp8=fp8)
        cache_dtype = torch.float8_e4m3fn if fp8 else dtype
        shape = len(model.layers), CACHE_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim
        k_cache, v_cache = (torch.empty(shape, dtype=cache_dtype) for _ in range(2))
        for step in _steps(columns):
            hidden = model.hidden(step, k_cache, v_cache)
            model.logits(hidden[: len(step.cache_seqlens)])
    return calls_of(remembered)


def _steps(columns: int) -> Iterator[StepInput]:
    """Yield steps with one new token of each sequence, then steps with chunks of prompts among them."""
    batches = dict.fromkeys(graph_batch(batch) for batch in range(1, MAX_GRAPH_BATCH + 1))
    for batch in batches:
        numbers = torch.zeros(batch, dtype=torch.int32)
        yield StepInput(numbers, numbers, torch.zeros(batch, columns, dtype=torch.int32), None, 1)
    for tokens in CHUNKS:
        for batch in (1, 8, 64):
            table = torch.zeros(batch, columns, dtype=torch.int32)
            offsets = torch.zeros(batch + 1, dtype=torch.int32)
            zeros = torch.zeros(tokens, dtype=torch.int32)
            yield StepInput(zeros, torch.zeros(batch, dtype=torch.int32), table, offsets, tokens - batch + 1)


def heads_of(config: ModelConfig) -> list[Heads]:
    """Return the heads of a model's layers, each kind once."""
    dtype = config.dtype if config.dtype in ("bfloat16", "float16") else "bfloat16"
    sizes = config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim
    return [Heads(*sizes, dtype, window) for window in dict.fromkeys(config.windows)]
