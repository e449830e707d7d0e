"""Tokens of a cache in the dtype of computation; tokens stored in FP8 are multiplied by their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.problems.addresses import sequence_lengths
from flashtile.problems.decode import CacheTensors, DecodeProblem


def tokens_of_row(cache: Tensor, row: int, keys: range, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return (keys, heads_kv, head_dim) of a dense cache."""
    tokens = cache[row, keys.start : keys.stop].to(dtype)
    if descale is not None:
        tokens *= (descale if descale.dim() == 1 else descale[row]).to(dtype).unsqueeze(-1)
    return tokens


def tokens_of_pages(cache: Tensor, pages: Tensor, descale: Tensor | None, memory: Tensor) -> Tensor:
    """Return (pages * page_size, heads_kv, head_dim) of a paged cache, written to ``memory``.

    ``memory`` holds at least as many pages, in the dtype of computation. It is reused from call to call,
    since allocating it each time costs more than the copy.
    """
    tokens = memory[: len(pages)]
    if cache.dtype == memory.dtype:
        torch.index_select(cache, 0, pages, out=tokens)
    elif cache.itemsize == 1:  # torch indexes no FP8 tensors on the CPU
        tokens.copy_(cache.view(torch.uint8).index_select(0, pages).view(cache.dtype))
    else:
        tokens.copy_(cache.index_select(0, pages))
    if descale is not None:
        factor = descale if descale.dim() == 1 else descale[pages].unsqueeze(1)
        tokens *= factor.to(tokens.dtype).unsqueeze(-1)
    return tokens.flatten(0, 1)


def pages_of(keys: range, page_size: int) -> range:
    """Return the columns of a block table that hold these keys."""
    return range(keys.start // page_size, -(-keys.stop // page_size))


def lengths_of(problem: DecodeProblem, given: CacheTensors) -> list[int]:
    """Return the number of keys of each sequence, including appended ones."""
    lengths = sequence_lengths(problem.batch, problem.capacity, given, problem.seqlen_new)
    return [problem.capacity] * problem.batch if lengths is None else lengths.tolist()
