"""Reads, appends (with rotary embedding and quantisation) and copies of a cache on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.problems.addresses import descales_of, destinations, new_tokens, sequence_lengths
from flashtile.problems.decode import (
    FP8,
    AppendProblem,
    AppendTensors,
    CacheTensors,
    CopyTensors,
    DecodeProblem,
)
from flashtile.reference.decode import quantized, rotate_appended


def tokens_of_row(cache: Tensor, row: int, keys: range, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the tokens at positions ``keys`` in one row of a dense cache, multiplied by their scales.

    The result has shape (keys, heads_kv, head_dim) and dtype ``dtype``.
    """
    tokens = cache[row, keys.start : keys.stop].to(dtype, memory_format=torch.contiguous_format)
    if descale is not None:
        tokens *= (descale if descale.dim() == 1 else descale[row]).to(dtype).unsqueeze(-1)
    return tokens


def tokens_of_pages(cache: Tensor, pages: Tensor, descale: Tensor | None, memory: Tensor) -> Tensor:
    """Write the tokens of ``pages`` to ``memory``, multiplied by their scales, and return them.

    The result has shape (pages * page_size, heads_kv, head_dim). ``memory`` has the dtype of computation and
    room for at least ``len(pages)`` pages. Callers reuse ``memory``, because allocating it each time costs
    more than the copy.
    """
    tokens = memory[: len(pages)]
    if cache.dtype == memory.dtype:
        torch.index_select(cache, 0, pages, out=tokens)
    elif cache.itemsize == 1:  # torch cannot index FP8 tensors on the CPU
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


@torch.inference_mode()  # so that caches made in inference mode can be written outside of it
def append(
    problem: AppendProblem, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, given: AppendTensors
) -> None:
    """Write k and v into the caches, and the rotated queries to ``q_rotated``."""
    token, row, offset = destinations(k_cache, k, given)
    k_rows, v_rows = (t.detach().flatten(0, -3)[token] for t in (k, v))
    if given.rotary_cos is not None:
        k_rows = rotate_appended(k.detach(), given.cu_seqlens_k_new, given, problem.rotary_interleaved)
        if given.q is not None and given.q_rotated is not None:
            by_token = problem.rotate_q_by_token
            q_rows = rotate_appended(
                given.q.detach(), given.cu_seqlens_q, given, problem.rotary_interleaved, by_token
            )
            given.q_rotated.view(-1, *q_rows.shape[1:])[: len(q_rows)] = q_rows
    sequence = new_tokens(k, given.cu_seqlens_k_new)[0] if problem.descale == "sequence" else row
    for cache, new, descale in ((k_cache, k_rows, given.k_descale), (v_cache, v_rows, given.v_descale)):
        factor = None if descale is None else descales_of(descale, sequence, row)
        _indexable(cache)[row, offset] = _indexable(quantized(new, factor, cache.dtype))


@torch.inference_mode()
def copy_blocks(k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor, given: CopyTensors) -> None:
    """Copy blocks onto others, in all layers, for each (source, destination) of ``block_pairs``.

    The first dimension of all tensors is the layer.
    """
    sources, destinations = block_pairs[block_pairs[:, 0] >= 0].long().unbind(1)
    for tensor in (k_cache, v_cache, *given):
        if tensor is not None:
            data = _indexable(tensor)
            data[:, destinations] = data[:, sources]


def _indexable(tensor: Tensor) -> Tensor:
    """Return a view that torch can index on the CPU: FP8 tensors as uint8."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
