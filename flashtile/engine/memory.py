"""Sizing of the KV cache: bytes of a block, and the memory that weights and the largest step leave free."""

from __future__ import annotations

import copy

import torch

from flashtile.engine.model import Experts, Model, StepInput
from flashtile.kv_cache import PagedKVCache

CPU_CACHE_BYTES = 2**30
"""Bytes of the KV cache on a CPU, unless ``kv_cache_memory_bytes`` is given."""
GRAPH_BYTES = 2**29
"""Bytes reserved for CUDA graphs."""


def bytes_of_block(model: Model, size: int, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of ``size`` tokens in all layers of this rank."""
    config = model.config
    return PagedKVCache.block_bytes(config.num_layers, size, model.kv_heads, config.head_dim, dtype=dtype)


def memory_left(model: Model, max_num_batched_tokens: int, block_size: int, utilization: float) -> int:
    """Return the bytes available for keys and values.

    On a GPU this is ``utilization`` times its memory, minus the weights, the temporary memory of the largest
    step, and ``GRAPH_BYTES``.
    """
    device = model.embedding.device
    if device.type == "cpu":
        return CPU_CACHE_BYTES
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    caches = run_one_layer(model, max_num_batched_tokens, block_size)
    torch.cuda.synchronize(device)
    work = torch.cuda.max_memory_allocated(device) - before - caches
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - utilization) * total - work - GRAPH_BYTES)


def bytes_of_tables(model: Model, length: int, seqs: int, block_size: int, blocks: int) -> int:
    """Return the size in bytes of the rotary tables and the block table, which are allocated after the cache.

    Returns 0 on a CPU, whose memory is not measured.
    """
    if model.embedding.device.type == "cpu":
        return 0
    positions = max(0, min(length, blocks * block_size))
    rows = seqs + 1  # the block table has one more row, for padding sequences
    tables = len(model.config.ropes) * model.config.head_dim
    return 4 * (positions * tables + rows * -(-positions // block_size))


@torch.inference_mode()
def run_one_layer(model: Model, tokens: int, block_size: int) -> int:
    """Run a step of one prompt of ``tokens`` tokens through one layer, so that memory can be measured.

    One layer suffices, because layers run one after another and need the same temporary memory. The
    prompt is limited to the positions of the rotary tables. Return the bytes of its keys and values.
    """
    config, device = model.config, model.embedding.device
    one = copy.copy(model)
    # Experts need more memory than an MLP. Layers before the last also prepare the next layer's input.
    with_experts = [layer for layer in model.layers if isinstance(layer.mlp, Experts)]
    one.layers = (with_experts or model.layers)[-1:]
    caches = torch.zeros(
        2, 1, -(-tokens // block_size), block_size, model.kv_heads, config.head_dim,
        dtype=model.embedding.dtype, device=device,
    )  # fmt: skip
    numbers = torch.arange(caches.shape[2], dtype=torch.int32, device=device)
    zeros = torch.zeros(tokens, dtype=torch.int32, device=device)
    length = min(tokens, model.rotary[0].shape[0])
    offsets = torch.tensor([0, length], dtype=torch.int32, device=device)
    step = StepInput(zeros[:length], zeros[:1], numbers.unsqueeze(0), offsets, length)
    hidden = one.hidden(step, caches[0], caches[1])
    one.logits(hidden[:512]).float()
    return caches.nbytes
