"""Sequence and position of each new token, and the address of a position in the cache, in plain torch.

The CPU backend and the checks of values use these functions. Kernels compute the same addresses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.problems.decode import AppendTensors, CacheTensors


def new_tokens(k: Tensor, cu_seqlens_k_new: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (sequence, index within the sequence) of each token of k, both (tokens,) int64.

    ``k`` holds new keys, or queries. If k is packed, ``cu_seqlens_k_new`` are the offsets of its sequences.
    Tokens after the last offset belong to no sequence and are left out.
    """
    if cu_seqlens_k_new is None:
        batch, seqlen = k.shape[:2]
        sequence, number = (torch.arange(size, device=k.device) for size in (batch, seqlen))
        return sequence.unsqueeze(1).expand(-1, seqlen).flatten(), number.expand(batch, -1).flatten()
    starts = cu_seqlens_k_new.long()
    sequence = torch.arange(starts.shape[0] - 1, device=k.device).repeat_interleave(starts.diff())
    return sequence, torch.arange(sequence.shape[0], device=k.device) - starts[sequence]


def sequence_lengths(
    batch: int, capacity: int, tensors: CacheTensors | AppendTensors, seqlen_new: int
) -> Tensor | None:
    """Return each sequence's number of keys, new ones included, (batch,) int64.

    The result is None if ``cache_seqlens`` is None, because every sequence then fills the whole capacity.
    """
    if tensors.cache_seqlens is None:
        return None
    lengths = tensors.cache_seqlens.long() + seqlen_new
    if tensors.cu_seqlens_k_new is not None:
        lengths = lengths + tensors.cu_seqlens_k_new.long().diff()
    return lengths


def locate(
    sequence: Tensor, position: Tensor, k_cache: Tensor, tensors: CacheTensors | AppendTensors
) -> tuple[Tensor, Tensor]:
    """Return where positions are in the cache: (page, offset in the page), or (row, position) if dense.

    Sequences and positions are (n,), or broadcast against each other. The results are int64.
    """
    if tensors.block_table is not None:
        page_size = k_cache.shape[1]
        return tensors.block_table[sequence, position // page_size].long(), position % page_size
    if tensors.cache_batch_idx is not None:
        return tensors.cache_batch_idx.long()[sequence], position
    return sequence, position


def descales_of(descale: Tensor, sequence: Tensor | int, row: Tensor | int) -> Tensor:
    """Return the scales of tokens, given their sequences and the pages or rows that hold them.

    Args:
        descale: (heads_kv,), (pages or rows, heads_kv) or (batch, 1, heads_kv).
        sequence: sequences of the tokens.
        row: pages that hold the tokens, or their rows in a dense cache.

    Returns:
        (heads_kv,), or (..., heads_kv) with the dimensions of ``sequence`` or ``row`` if scales depend on
        them.
    """
    if descale.dim() == 1:
        return descale
    return descale[row] if descale.dim() == 2 else descale[sequence, 0]


def destinations(k_cache: Tensor, k: Tensor, tensors: AppendTensors) -> tuple[Tensor | slice, Tensor, Tensor]:
    """Return the places of the n tokens of an append: where they are in k, and where they go in the cache.

    Returns:
        (token, row, offset). ``token`` has the row in k of each token, (n,) int64, or is a slice if these are
        the first n rows. ``row`` is the page, or the row of a dense cache, and ``offset`` is the position in
        this page or row. Both are (n,) int64.
    """
    if tensors.slot_mapping is not None:
        token = (tensors.slot_mapping >= 0).nonzero().squeeze(1)
        slots = tensors.slot_mapping[token]
        return token, slots // k_cache.shape[1], slots % k_cache.shape[1]
    assert tensors.cache_seqlens is not None
    before = tensors.cache_seqlens.long()
    if tensors.cu_seqlens_k_new is None:  # faster than new_tokens(), for decoding steps
        batch, seqlen = k.shape[:2]
        position = before.unsqueeze(1)  # (batch, seqlen)
        if seqlen != 1:
            position = position + torch.arange(seqlen, device=k.device)
        if tensors.block_table is not None:
            page_size = k_cache.shape[1]
            page = tensors.block_table.gather(1, position // page_size).long()
            return slice(batch * seqlen), page.flatten(), (position % page_size).flatten()
        row = tensors.cache_batch_idx
        row = torch.arange(batch, device=k.device) if row is None else row.long()
        return slice(batch * seqlen), row.unsqueeze(1).expand_as(position).flatten(), position.flatten()
    sequence, number = new_tokens(k, tensors.cu_seqlens_k_new)
    return slice(len(sequence)), *locate(sequence, before[sequence] + number, k_cache, tensors)
