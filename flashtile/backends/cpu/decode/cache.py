"""Writing into a cache on the CPU: appended tokens, rotated and quantised on the way, and copied blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.decode.addresses import destinations, new_tokens
from flashtile.decode.problem import FP8, FP8_MAX, AppendProblem, AppendTensors, CopyTensors
from flashtile.decode.rotary import rotate


@torch.inference_mode()  # so that caches made under it can be written outside of it, too
def append(
    problem: AppendProblem, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, given: AppendTensors
) -> None:
    """Write k and v to their places in the caches, and the rotated queries to ``q_rotated``."""
    token, row, offset = destinations(k_cache, k, given)
    k_rows, v_rows = (t.detach().flatten(0, -3)[token] for t in (k, v))
    if given.rotary_cos is not None and given.rotary_sin is not None:
        first = given.cache_seqlens if given.rotary_seqlens is None else given.rotary_seqlens
        assert first is not None
        sequence, number = new_tokens(k, given.cu_seqlens_k_new)
        tables = (given.rotary_cos, given.rotary_sin)
        k_rows = rotate(k_rows, *tables, first.long()[sequence] + number, problem.rotary_interleaved)
        if given.q is not None and given.q_rotated is not None:
            sequence, number = new_tokens(given.q, given.cu_seqlens_q)
            position = first.long()[sequence] + (number if problem.rotate_q_by_token else 0)
            used = sequence.shape[0]  # rows behind them belong to no sequence
            q_rows = given.q.detach().flatten(0, -3)[:used]
            q_rows = rotate(q_rows, *tables, position, problem.rotary_interleaved)
            given.q_rotated.view(-1, *q_rows.shape[1:])[:used] = q_rows
    _write(k_cache, row, offset, k_rows, given.k_descale)
    _write(v_cache, row, offset, v_rows, given.v_descale)


@torch.inference_mode()
def copy_blocks(k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor, given: CopyTensors) -> None:
    """Copy (source, destination) blocks in all layers; all tensors have the layers in front."""
    sources, destinations = block_pairs[block_pairs[:, 0] >= 0].long().unbind(1)
    for tensor in (k_cache, v_cache, *given):
        if tensor is not None:
            data = _indexable(tensor)
            data[:, destinations] = data[:, sources]


def _write(cache: Tensor, row: Tensor, offset: Tensor, new: Tensor, descale: Tensor | None) -> None:
    """new (tokens, heads_kv, head_dim) to its pages or rows, in the dtype of the cache."""
    if cache.dtype == FP8:
        wide = new.float()
        if descale is not None:
            wide = wide / (descale if descale.dim() == 1 else descale[row]).unsqueeze(-1)
        new = wide.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    _indexable(cache)[row, offset] = _indexable(new)


def _indexable(tensor: Tensor) -> Tensor:
    """A view that torch can index on the CPU, which it cannot do with FP8."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
