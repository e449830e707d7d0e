"""The operator calls that an engine's steps make. Their kernels are compiled before requests come.

The calls are found by running steps on fake tensors: nothing is computed, and no memory is needed. Kernels
are chosen by ranges of the numbers of sequences and tokens, mostly between powers of two. Therefore a few
sizes between each two powers of two represent all steps.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from flashtile.api.decode import copy_blocks
from flashtile.backends.common.device import is_nvidia
from flashtile.compilation.calls import Call, calls_of, resized, sizes_between
from flashtile.engine.config import ModelConfig
from flashtile.engine.device import MAX_GRAPH_BATCH, graph_batch
from flashtile.engine.groups import MAX_LEVELS, MAX_NEW_TOKENS, bound_of_group
from flashtile.engine.model import FEW_ROWS, Experts, Groups, Model, StepInput
from flashtile.engine.parallel import Ranks
from flashtile.engine.weights import random_weights
from flashtile.op.operation import remembering
from flashtile.operators.decode import SharedKeys
from flashtile.torch_private import FakeTensorMode

if TYPE_CHECKING:  # an engine that compiles nothing, as on a CPU, starts without the modules that compile
    from flashtile.compilation.compiling import Source

logger = logging.getLogger("flashtile.engine")

LOGITS_ROWS = 512
"""Largest number of rows of logits computed together for the log-probabilities of prompt tokens."""


@dataclass(frozen=True)
class Limits:
    """The settings of an engine that decide which kernels its steps need.

    Attributes:
        max_model_len, max_num_seqs, max_num_batched_tokens, block_size: as in :class:`flashtile.engine.LLM`.
        num_blocks: number of blocks in the KV cache.
        cache_dtype: dtype of keys and values. None: the dtype of the weights.
        fp8: whether the layers' matrices are rounded to e4m3.
        captured: whether steps without prompts run as CUDA graphs, so that their batches are padded.
        verified: maximum number of new tokens of a sequence with guesses; 1 without speculative decoding.
        siblings: whether guesses form a tree rather than a chain. Steps then have a tree mask.
        world: number of processes that compute the model together.
        grouped: whether steps may have groups of sequences that share keys.
        invariant: whether results must not depend on the rest of the batch.
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    num_blocks: int = 4096
    cache_dtype: torch.dtype | None = None
    fp8: bool = False
    captured: bool = True
    verified: int = 1
    siblings: bool = False
    world: int = 1
    grouped: bool = False
    invariant: bool = False


def warm_up(device: torch.device, models: Sequence[tuple[ModelConfig, Limits, bool]]) -> None:
    """Compile the kernels of an engine's steps in parallel processes, and log the number of kernels.

    ``models`` are the arguments of :func:`step_calls` for each model of the engine. If the compilation fails,
    a warning is logged, and kernels are compiled when they are needed. Only NVIDIA GPUs have a warm-up.
    """
    if is_nvidia(device):
        from flashtile.compilation.ahead import compile_for_engine

        compile_for_engine(functools.partial(calls_of_all, models), device, logger)


def calls_of_all(models: Sequence[tuple[ModelConfig, Limits, bool]]) -> list[Source]:
    """Return the results of :func:`step_calls` for all models, in one list."""
    return [call for model in models for call in step_calls(*model)]


def step_calls(config: ModelConfig, limits: Limits, drafts: bool = False) -> list[Source]:
    """Return the operator calls that the steps of an engine make, so that their kernels can be compiled.

    Args:
        config: the model. Layers differ only in their attention windows, and in whether they have experts, so
            only a few layers are run, at least one of each kind.
        limits: the engine's settings.
        drafts: whether the model is a draft model, which guesses tokens for another model.
    """
    from flashtile.engine.sampling import sampling_ahead

    kinds = list(dict.fromkeys((window, config.has_experts(i)) for i, window in enumerate(config.windows)))
    kinds.append(kinds[0])
    dense = frozenset(i for i, (_, has_experts) in enumerate(kinds) if not has_experts)
    windows = tuple(window for window, _ in kinds)
    shorter = replace(config, num_layers=len(kinds), windows=windows, dense_layers=dense)
    dtype, ranks = getattr(torch, config.dtype), Ranks(0, limits.world)
    with remembering() as remembered, FakeTensorMode(), torch.no_grad():
        weights = random_weights(shorter, torch.device("cpu"), dtype, ranks=ranks)
        model = Model(shorter, weights, 2048, ranks, limits.fp8, limits.invariant)
        layers = len(model.layers)
        shape = layers, limits.num_blocks, limits.block_size, model.kv_heads, config.head_dim
        k_cache, v_cache = (
            torch.empty(shape, dtype=limits.cache_dtype or dtype, device="cpu") for _ in range(2)
        )
        for step in _steps(limits, config.windows, drafts, model.may_be_short):
            model.hidden(step, k_cache, v_cache)
        most = max(LOGITS_ROWS, limits.max_num_seqs * limits.verified)
        for rows in {*range(1, FEW_ROWS + 1), *sizes_between(1, most)}:
            model.own_logits(torch.empty(rows, config.hidden_size, dtype=dtype, device="cpu"))
        # One kernel copies any number of pairs.
        copy_blocks(k_cache, v_cache, torch.zeros(1, 2, dtype=torch.int64, device="cpu"))
    found = calls_of(remembered)
    # Calls over several queries of a sequence without a tree of guesses, and the largest number of queries.
    chunks: dict[Call, int] = {}
    levels: dict[Call, None] = {}  # calls over keys that groups share
    for call in found:
        given = dict(call.arguments)
        if given.get("partial"):
            levels[resized(call, 1, 2, 2)] = None
        elif "cu_seqlens_q" in given and "tree_mask" not in given:
            chunks[resized(call, 1, 2, 2)] = MAX_NEW_TOKENS if "prior_out" in given else limits.max_model_len
    further = [
        resized(call, *sizes)
        for call, most in chunks.items()
        for sizes in _chunks(limits)
        if sizes[2] <= most
    ]
    further += [resized(call, *sizes) for call in levels for sizes in _levels(limits)]
    logits = dict.fromkeys((dtype, torch.float32))  # float32 after logits processors, which see all changes
    sampling = [functools.partial(sampling_ahead, one, config.vocab_size, one is dtype) for one in logits]
    return [*dict.fromkeys((*found, *further)), *sampling, *_expert_products(model, dtype)]


def _expert_products(model: Model, dtype: torch.dtype) -> list[Source]:
    """Return functions that list the launches of the products of the model's experts."""
    from flashtile.backends.portable.linear.kernel import grouped_ahead

    experts = next((layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)), None)
    if experts is None or dtype == torch.float32:
        return []
    return [
        functools.partial(
            grouped_ahead, torch.device("meta"), dtype, tuple(one.weight.shape), gather=gather,
            bias=one.bias is not None, scales=0 if one.scale is None else one.scale.dim() - 1,
        )
        for one, gather in ((experts.gate_up, True), (experts.down, False))
    ]  # fmt: skip


def _chunks(limits: Limits) -> Iterator[tuple[int, int, int]]:
    """Yield the sizes of steps that contain chunks of prompts.

    Each item is (number of sequences, number of tokens, largest number of tokens of a sequence).
    """
    budget = limits.max_num_batched_tokens
    for batch in sizes_between(1, min(limits.max_num_seqs, budget - 1), parts=4):
        for longest in sizes_between(2, min(limits.max_model_len, budget - batch + 1)):
            fewest, most = batch - 1 + longest, min(batch * longest, budget)
            for tokens in sorted({fewest, int((fewest * most) ** 0.5), most}):
                yield batch, tokens, longest


def _levels(limits: Limits) -> Iterator[tuple[int, int, int]]:
    """Yield the sizes of calls over keys that groups share.

    Each item is (number of groups, number of tokens, largest number of tokens of a group).
    """
    few = (
        (-(-tokens // width), tokens) for width in {1, limits.verified} for tokens in _sizes(limits, width)
    )
    chunks = (
        (batch, tokens)
        for batch in sizes_between(2, limits.max_num_seqs)
        for tokens in sizes_between(batch + 1, min(batch * MAX_NEW_TOKENS, limits.max_num_batched_tokens), 1)
    )
    for batch, tokens in dict.fromkeys((*few, *chunks)):
        for longest in {bound_of_group(1 << i, tokens) for i in range(tokens.bit_length() + 1)}:
            yield batch, tokens, longest


def _steps(
    limits: Limits, windows: tuple[int, ...], drafts: bool, may_be_short: Callable[[int], bool]
) -> Iterator[StepInput]:
    """Yield steps of every kind: one token per sequence, guesses (draft tokens), and chunks of prompts."""
    step = functools.partial(_step, limits, windows)
    batches = _sizes(limits, 1)
    guesses = functools.partial(step, width=limits.verified, slots=True, tree=limits.siblings)
    for levels in range(1 + MAX_LEVELS * limits.grouped):
        for batch in batches:
            yield step(batch, batch, 1, levels=levels)
            if limits.captured and may_be_short(batch):
                yield step(batch, batch, 1, levels=levels)._replace(short=True)
        for tokens in _sizes(limits, limits.verified) if limits.verified > 1 else ():
            yield guesses(-(-tokens // limits.verified), tokens, levels=levels)
    if limits.grouped and limits.max_num_seqs > 1:
        yield step(2, 3, 2, levels=MAX_LEVELS)
        for batch in batches:  # with a chunk that has too many tokens for groups
            parts = step(batch, batch, 1, levels=MAX_LEVELS), step(1, 2, 2)
            yield step(batch + 1, batch + 2, 2)._replace(parts=parts)
    for batch, width in product(batches if drafts else (), (1, 2)):
        yield step(batch, batch * width, width, slots=True)
    budget = limits.max_num_batched_tokens
    few = range(2, min(FEW_ROWS, budget) + 1)
    for tokens in sorted({*few, *sizes_between(2, budget), min(budget, limits.max_model_len)}):
        yield step(1, tokens, tokens)
        if limits.max_num_seqs > 1 and tokens > 2:
            yield step(2, tokens, tokens - 1)


def _sizes(limits: Limits, width: int) -> list[int]:
    """Return the sizes, in tokens, of the steps with at most ``width`` tokens per sequence to compile for.

    Other such steps are expected to need no other kernels. With CUDA graphs, the sizes are those of the
    padded batches of the graphs, and larger sizes, which run without a graph.
    """
    most = limits.max_num_seqs * width
    least = min(width, 2)  # steps with guesses (draft tokens) have at least 2 tokens
    free = {*range(least, min(FEW_ROWS, most) + 1), *sizes_between(least, most)}
    if not limits.captured:
        return sorted(free)
    largest = min(limits.max_num_seqs, MAX_GRAPH_BATCH)
    padded = {width * graph_batch(batch) for batch in range(1, largest + 1)}
    return sorted({*padded, *(tokens for tokens in free if tokens > MAX_GRAPH_BATCH)})


def _step(
    limits: Limits, windows: tuple[int, ...], batch: int, tokens: int, width: int, slots: bool = False,
    tree: bool = False, levels: int = 0,
) -> StepInput:  # fmt: skip
    numbers = torch.zeros(batch, dtype=torch.int32, device="cpu")
    columns = -(-limits.max_model_len // limits.block_size)
    table = torch.zeros(batch, columns, dtype=torch.int32, device="cpu")
    new = torch.zeros(tokens, dtype=torch.int32, device="cpu")
    groups = torch.zeros(batch + 1, dtype=torch.int32, device="cpu")
    offsets = None if width == 1 else groups
    step = StepInput(new, numbers, table, offsets, width)
    if slots:
        step = step._replace(positions=new, slots=torch.zeros(tokens, dtype=torch.int64, device="cpu"))
    if tree:
        step = step._replace(tree_mask=torch.zeros(batch, width, width, dtype=torch.bool, device="cpu"))
    if not levels:
        return step
    shared = [SharedKeys(table, numbers, numbers, groups, tokens) for _ in range(levels)]
    within = Groups(tuple(shared), numbers)  # a window
    whole = Groups((shared[0]._replace(first=None), *shared[1:]), numbers)
    return step._replace(groups={window: whole if window < 0 else within for window in windows})
