"""Compiles and loads the kernels of all steps when vLLM starts, before its monitor of compilations does.

vLLM knows every number on which the choice of a kernel depends when it makes a metadata builder. Its own
warm-up reaches only short prompts and decoding steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType

from flashtile.compilation.calls import Call
from flashtile.compilation.compiling import Source
from flashtile.integrations import paged_calls
from flashtile.integrations.paged_calls import StepLimits, calls_in, group_calls, prompt_calls, step_calls
from flashtile.integrations.paged_groups import largest_group
from flashtile.integrations.vllm import releases
from flashtile.operators.decode import SharedKeys

logger = logging.getLogger("flashtile.vllm")

LONG_CACHE = 2**30
"""Elements of a layer's cache from which on kernels may need 64-bit offsets. The number of blocks is then
that of vLLM. For all smaller caches it is FEW_BLOCKS, so that servers with other caches share the kernels."""
FEW_BLOCKS = 64
TABLE_TOKENS = 128
"""vLLM's Model Runner V2 rounds the tokens of a row of the block table up to a multiple of this number."""


class Group(NamedTuple):
    """A group of layers that share a metadata builder."""

    build: Callable[[Any], Any]
    """Returns the metadata of a batch."""
    min_queries: int
    spec: Any
    """vLLM's description of the layers' cache."""
    config: Any
    """vLLM's configuration."""
    device: torch.device
    groups: bool = False
    """Whether steps have groups of sequences that share blocks."""


def impls_of(config: Any, layer_names: Iterable[str]) -> list[Any]:
    """Return the layers with these names, as the builder's backend has made them."""
    layers = config.compilation_config.static_forward_context
    return [layers[name].impl for name in layer_names]


def warm_up(group: Group, layer_names: list[str]) -> None:
    """Compile and load the kernels of the layers of a group (:func:`paged_calls.warm_up`)."""
    paged_calls.warm_up(
        lambda: calls_of_layers(group, impls_of(group.config, layer_names)), group.device, logger
    )


def calls_of_layers(group: Group, impls: Iterable[Any]) -> list[Source]:
    """Return the calls of layers in all steps, as far as these need other kernels."""
    ones: dict[Call, None] = {}
    chunks: dict[Call, None] = {}
    prompts: dict[Call, None] = {}
    shared: dict[Call, None] = {}
    limits = limits_of(group)
    for impl in {_kind(impl): impl for impl in impls}.values():
        # Strides of other heads are multiples of 16 in any case.
        forms = (False, True) if impl.head_size % 16 else (False,)
        for columns, is_joint in product(_tables(group), forms):
            run = partial(_run, group, impl, columns, is_joint)
            ones |= dict.fromkeys(calls_in(partial(run, 2, 2, 1)))
            chunks |= dict.fromkeys(calls_in(partial(run, 2, 4, 2)))
            if impl.takes_new:
                chunks |= dict.fromkeys(calls_in(partial(run, 2, 4, 2, is_all_new=True)))
                prompts |= dict.fromkeys(calls_in(partial(run, 1, 2, 2, is_all_new=True)))
            if group.groups and impl.takes_groups:
                shared |= dict.fromkeys(calls_in(partial(run, 2, 2, 1, in_groups=True)))
                shared |= dict.fromkeys(calls_in(partial(run, 2, 4, 2, in_groups=True)))
    listed = [*step_calls(ones, chunks, limits), *prompt_calls(prompts, limits)]
    return [*listed, *group_calls(shared, limits)]


def _kind(impl: Any) -> tuple:
    """Return what the calls of a layer depend on, in addition to the step."""
    sinks = impl.sinks
    return (
        impl.options, impl.sizes, impl.num_kv_heads, impl.kv_cache_dtype, impl.attn_type, impl.takes_new,
        impl.alibi_slopes is None, sinks is None or (sinks.dtype, sinks.shape, sinks.stride()),
    )  # fmt: skip


def limits_of(group: Group) -> StepLimits:
    """Return the limits of the batches that the builder sees."""
    config, scheduler = group.config, group.config.scheduler_config
    seqs, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    chunk = getattr(group.spec, "attention_chunk_size", None)
    if chunk:  # vLLM cuts sequences into chunks, each of which is a sequence of the builder's batch
        seqs = min(2 * seqs + tokens // chunk, tokens)
    guesses = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
    return StepLimits(seqs, tokens, 1 + (guesses or 0), group.min_queries)


def _tables(group: Group) -> list[int]:
    """Return the possible numbers of columns of the block table, which differ between vLLM's runners."""
    spec = group.spec
    longest = getattr(spec, "attention_chunk_size", None) or group.config.model_config.max_model_len
    rounded = -(-longest // TABLE_TOKENS) * TABLE_TOKENS
    return sorted({-(-tokens // spec.block_size) for tokens in (longest, rounded)})


def _cache(group: Group, impl: Any) -> Tensor:
    """Return a tensor with the strides of a layer's cache, without its memory if tensors are fake."""
    spec, device = group.spec, group.device
    of_block = 2 * spec.block_size * impl.num_kv_heads * impl.head_size
    blocks = group.config.cache_config.num_gpu_blocks or FEW_BLOCKS
    if blocks * of_block < LONG_CACHE:
        blocks = FEW_BLOCKS
    shape = releases.cache_shape(blocks, spec.block_size, impl.num_kv_heads, impl.head_size)
    order = releases.stride_order(False)
    memory = torch.empty([shape[dim] for dim in order], dtype=spec.dtype, device=device)
    padded = getattr(spec, "page_size_padded", None)
    if padded and order[0] == 0:
        strides = padded // spec.dtype.itemsize, *memory.stride()[1:]
        memory = torch.empty_strided(memory.shape, strides, dtype=spec.dtype, device=device)
    return memory.permute([order.index(dim) for dim in range(len(shape))])


def _run(
    group: Group,
    impl: Any,
    columns: int,
    is_joint: bool,
    batch: int,
    tokens: int,
    longest: int,
    is_all_new: bool = False,
    in_groups: bool = False,
) -> None:
    """Make a layer's calls in a step, on tensors whose contents are not used.

    Args:
        columns: columns of the block table.
        is_joint: whether q, k and v are parts of one tensor, as after a projection without rotary embedding.
        batch, tokens, longest: numbers of sequences, of tokens, and of tokens of the longest sequence.
        is_all_new: whether all keys are tokens of the step.
        in_groups: whether sequences may share keys.
    """
    heads = impl.num_heads, impl.num_kv_heads, impl.num_kv_heads
    dtype, size, device = group.config.model_config.dtype, impl.head_size, group.device
    joint = torch.empty(tokens, sum(heads), size, dtype=dtype, device=device)
    q, k, v = (t if is_joint else torch.empty_like(t.contiguous()) for t in joint.split(heads, 1))
    numbers = partial(torch.zeros, dtype=torch.int32, device=device)
    common = SimpleNamespace(
        query_start_loc=numbers(batch + 1), query_start_loc_cpu=None, seq_lens=numbers(batch),
        seq_lens_cpu_upper_bound=None, num_reqs=batch, num_actual_tokens=tokens, max_query_len=longest,
        max_seq_len=0, block_table_tensor=numbers(batch, columns),
        causal=impl.attn_type == AttentionType.DECODER,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
    )  # fmt: skip
    step = group.build(common)
    step.is_all_new = is_all_new
    shared = SharedKeys(step.block_table, numbers(batch), None, numbers(batch + 1), largest_group(tokens))
    step.groups = shared if in_groups else None
    scales = torch.ones(2, impl.num_kv_heads, dtype=torch.float32, device=device)
    layer = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])  # used only with FP8
    cache = _cache(group, impl) if impl.has_cache else None
    impl.do_kv_cache_update(layer, k, v, cache, step.slot_mapping)
    impl.forward(layer, q, k, v, cache, step, torch.empty(tokens, heads[0], size, dtype=dtype, device=device))
