"""The operator calls that an engine's steps make over a paged cache, listed before requests come.

A plug-in makes two or three steps on fake tensors, for which nothing is computed. Their calls are copied with
the sizes of other steps. Kernels are chosen by ranges of these sizes. All numbers of sequences are listed for
steps with equally many queries of each, and representative sizes for other steps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from flashtile.backends.common.device import is_nvidia
from flashtile.compilation.calls import Call, calls_of, resized, sizes_between
from flashtile.compilation.compiling import Source
from flashtile.integrations.paged import rounded_queries
from flashtile.integrations.paged_groups import MAX_GROUP_QUERIES, largest_group
from flashtile.op.operation import remembering
from flashtile.torch_private import FakeTensorMode

WARMUP = "FLASHTILE_WARMUP"
"""Environment variable: with 0, a plug-in compiles each kernel when a request first needs it."""
PARTS = 4
"""Sizes that are listed between two powers of two."""
PARTS_OF_PROMPTS = 16
"""Lengths of single prompts that are listed between two powers of two. Kernels are chosen by the number of
tiles, which have 64 rows or more."""
Sizes = tuple[int, int, int]
"""Numbers of a step: sequences, tokens, and tokens of the longest sequence."""


@dataclass(frozen=True)
class StepLimits:
    """The settings of an engine that decide which kernels its steps need.

    Attributes:
        max_num_seqs, max_num_batched_tokens: maximum numbers of sequences and of tokens of a step.
        verified: number of new tokens of a sequence in speculative decoding; 1 without it.
        min_queries: lower bound of ``Step.max_query_len``.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    verified: int = 1
    min_queries: int = 0


def warm_up(calls: Callable[[], Sequence[Source]], device: torch.device, logger: logging.Logger) -> None:
    """Compile the kernels of calls in parallel processes, and load them into this process.

    If that fails, a warning is logged, and kernels are compiled when requests need them. Without an NVIDIA
    GPU, or with ``FLASHTILE_WARMUP=0``, nothing is compiled.

    Args:
        calls: returns the calls.
        device: the engine's device.
        logger: the plug-in's logger.
    """
    if not is_nvidia(device) or os.environ.get(WARMUP) == "0":
        return
    from flashtile.compilation.ahead import compile_and_load

    try:
        compile_and_load(calls(), device, logger)
    except Exception as error:  # a server whose kernels are compiled later is better than none
        logger.warning("kernels are compiled when requests need them: %s: %s", type(error).__name__, error)


def calls_in(steps: Callable[[], None]) -> list[Call]:
    """Return the calls of a function, which are made on fake tensors. Real tensors may be among them."""
    with torch.no_grad(), remembering() as remembered, FakeTensorMode(allow_non_fake_inputs=True):
        steps()
    return calls_of(remembered)


def step_calls(ones: Iterable[Call], chunks: Iterable[Call], limits: StepLimits) -> list[Call]:
    """Return copies of calls with the sizes of all steps, as far as these need other kernels.

    Args:
        ones: calls of a step with one query of each sequence.
        chunks: calls of a step whose sequences have any number of queries.
        limits: the engine's settings.
    """
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    decoding = [resized(call, n, n, 1) for call in ones for n in range(1, most + 1)]
    mixed = [resized(call, *sizes) for sizes in chunk_sizes(limits) for call in chunks]
    return list(dict.fromkeys((*decoding, *mixed)))


def prompt_calls(calls: Iterable[Call], limits: StepLimits) -> list[Call]:
    """Return copies of calls for one sequence without offsets, (1, tokens, ...), with other lengths."""
    lengths = sizes_between(2, limits.max_num_batched_tokens, PARTS_OF_PROMPTS)
    return list(dict.fromkeys(_lengthened(call, tokens) for call in calls for tokens in lengths))


def group_calls(calls: Iterable[Call], limits: StepLimits) -> list[Source]:
    """Return copies of calls of steps with groups that share blocks, and the kernels that find the groups.

    ``calls``: those over keys that groups share, which return partial results, and those that continue them.
    """
    from flashtile.backends.portable.decode.groups import groups_ahead

    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    ones = [(batch, batch, 1) for batch in range(2, most + 1)]
    several = [sizes for sizes in chunk_sizes(limits) if 1 < sizes[2] <= MAX_GROUP_QUERIES // 2]
    found: dict[Call, None] = {}
    for call in calls:
        given = dict(call.arguments)
        if given.get("partial"):
            bounds = ((batch, tokens, largest_group(tokens)) for batch, tokens, _ in (*ones, *several))
            found |= dict.fromkeys(resized(call, *sizes) for sizes in bounds)
        elif "prior_out" in given:
            own = several if "cu_seqlens_q" in given else ones
            found |= dict.fromkeys(resized(call, *sizes) for sizes in own)
    return [*found, partial(groups_ahead, limits.max_num_seqs)] if found else []


def _lengthened(call: Call, tokens: int) -> Call:
    arguments = []
    for name, value in call.arguments:
        if name in ("q", "k", "v", "out"):
            value = replace(value, shape=(1, tokens, *value.shape[2:]))
        arguments.append((name, value))
    return Call(call.operation, tuple(arguments))


def chunk_sizes(limits: StepLimits) -> Iterator[Sizes]:
    """Yield the sizes of steps with chunks of prompts or with several tokens to verify.

    The tokens of the longest sequence are rounded as in :attr:`Step.max_query_len`.
    """
    budget, least = limits.max_num_batched_tokens, limits.min_queries
    for batch in range(1, min(limits.max_num_seqs, budget // limits.verified) + 1):
        yield batch, batch * limits.verified, rounded_queries(limits.verified, least)
    roundings = dict.fromkeys(rounded_queries(1 << i, least) for i in range(1, budget.bit_length() + 1))
    for longest in roundings:
        shortest = longest // 2 + 1 if longest > least else 1
        for batch in sizes_between(1, min(limits.max_num_seqs, budget - shortest + 1), PARTS):
            fewest, most = batch - 1 + shortest, min(batch * longest, budget)
            if fewest <= most:
                ratio = most / fewest
                for tokens in sorted({round(fewest * ratio ** (i / PARTS)) for i in range(PARTS + 1)}):
                    yield batch, tokens, longest
