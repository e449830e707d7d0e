"""Context parallelism for DTensors, whose placements define how sequence, batch and heads are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

SEQUENCE, HEADS = 1, 2


def attend_local(attend: Callable[..., Any], q: Any, k: Any, v: Any, return_lse: bool, layout: str) -> Any:
    """Call ``attend(q, k, v, group)`` on the local tensors of DTensors (batch, seqlen, heads, head_dim).

    Exactly one dimension of the mesh must shard the sequence; its group is passed to ``attend``. The other
    dimensions may shard batch or heads, which needs no communication, or replicate.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, DTensor):
            raise TypeError(f"{name} must be a DTensor if q is one, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise NotImplementedError(
                f"{name} must be (batch, seqlen, heads, head_dim) as a DTensor, got {tuple(tensor.shape)}"
            )
        if tensor.device_mesh != q.device_mesh or tensor.placements != q.placements:
            raise ValueError(
                f"{name} must be placed as q, {q.placements} on {q.device_mesh}, got {tensor.placements} on "
                f"{tensor.device_mesh}: redistribute it"
            )
    mesh, over = q.device_mesh, []
    for dim, placement in enumerate(q.placements):
        if placement.is_partial() or (placement.is_shard() and placement.dim not in (0, SEQUENCE, HEADS)):
            raise ValueError(f"q must be sharded by batch, sequence or heads, or replicated, got {placement}")
        if placement.is_shard(SEQUENCE):
            over.append(dim)
    if len(over) != 1:
        raise NotImplementedError(
            f"q must have its sequence sharded on one dimension of its mesh, got {q.placements}: "
            "flashtile.attention takes DTensors sharded only by batch or heads"
        )
    if layout != "contiguous":
        raise ValueError(
            f"layout must be 'contiguous' for DTensors, whose shards are consecutive, got {layout!r}"
        )
    heads_parts = [mesh.size(dim) for dim, placement in enumerate(q.placements) if placement.is_shard(HEADS)]
    for parts in heads_parts:
        if q.shape[HEADS] % parts or k.shape[HEADS] % parts:
            raise ValueError(f"k must have heads for {parts} equal shards, got {k.shape[HEADS]}")
    local = [t.to_local() for t in (q, k, v)]
    out, lse = attend(*local, mesh.get_group(over[0]))
    placed = _placed(out, q, (*q.shape[:3], v.shape[3]), q.placements)
    if not return_lse:
        return placed
    of_lse = [Shard({0: 0, SEQUENCE: 2, HEADS: 1}[p.dim]) if p.is_shard() else p for p in q.placements]
    return placed, _placed(lse, q, (q.shape[0], q.shape[2], q.shape[1]), of_lse)


def _placed(local: Tensor, like: Any, shape: tuple[int, ...], placements: Any) -> Any:
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
