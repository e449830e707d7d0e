"""Shardings of an attention call's DTensors that need no communication: by batch or by heads.

A rule gives the placement of every result and every tensor argument on one dimension of the mesh. DTensor
combines the rules for meshes of several dimensions, and redistributes other placements in the cheapest way.
"""

from __future__ import annotations

from typing import Any

import torch

from flashtile.op.registry import flat
from flashtile.problems.attention import OptionalTensors, Options

Rules = list[tuple[list[Any], list[Any]]]


def forward_shardings(q: Any, k: Any, v: Any, extras: OptionalTensors, options: Options) -> Rules:
    """Return the sharding rules of ``flashtile::forward`` as pairs (placements of results, of arguments).

    q, k, v and ``extras`` (the optional tensors) are DTensor specs.
    """
    return [
        ([rows, lse], [rows, rows, rows, *of_extras, *(None,) * len(flat(options))])
        for rows, lse, of_extras, _, _ in _placements(q, k, v, extras)
    ]


def backward_shardings(
    dout: Any,
    dlse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    extras: OptionalTensors,
    options: Options,
) -> Rules:
    """Return the sharding rules of ``flashtile::backward`` as pairs (placements of results, of arguments)."""
    from torch.distributed.tensor import Replicate

    rules: Rules = []
    for rows, of_lse, of_extras, dsink, dbias in _placements(q, k, v, extras):
        gradients = [None if dout is None else rows, None if dlse is None else of_lse]
        arguments = [*gradients, rows, rows, rows, rows, of_lse, *of_extras, *(None,) * len(flat(options))]
        rules.append(([rows, rows, rows, dsink, dbias if options.bias_grad else Replicate()], arguments))
    return rules


def _placements(
    q: Any, k: Any, v: Any, extras: OptionalTensors
) -> list[tuple[Any, Any, list[Any], Any, Any]]:
    """Return the possible ways to divide the work over one dimension of a mesh.

    Each way is a tuple of placements: one for q, k, v and out, one for lse, a list for the optional tensors,
    one for dsink and one for dbias.
    """
    if len(extras) > len(OptionalTensors._fields):
        raise NotImplementedError("score_mod, mask_mod and block_mask must be None for DTensors")
    from torch.distributed.tensor import Partial, Replicate, Shard

    def way(rows: Any, lse: Any, dsink: Any, **sharded: Any) -> tuple[Any, Any, list[Any], Any, Any]:
        """Return the placements of one sharding. Extras that are not in ``sharded`` are replicated."""
        given = zip(OptionalTensors._fields, extras, strict=True)
        of_extras = [None if t is None else sharded.get(name, Replicate()) for name, t in given]
        whole = Replicate() if lse == Replicate() else Partial()  # each rank has one term of a sum
        dbias = sharded.get("bias", whole)
        return rows, lse, of_extras, Replicate() if extras.sink is None else dsink, dbias

    def along(dim: int) -> dict[str, Any]:
        """Shard mask and bias along ``dim`` unless they broadcast there."""
        given = {"mask": extras.mask, "bias": extras.bias}
        return {name: Shard(dim) for name, t in given.items() if t is not None and t.shape[dim] > 1}

    slopes_by_batch = extras.alibi_slopes is not None and extras.alibi_slopes.ndim == 2
    ways = [way(Replicate(), Replicate(), Replicate())]
    if extras.rng_state is not None:  # dropout depends on indices, which would start at 0 in each shard
        return ways
    if extras.cu_seqlens_q is None:
        by_batch = {"seqused_q": Shard(0), "seqused_k": Shard(0), "key_padding_mask": Shard(0)} | along(0)
        if slopes_by_batch:
            by_batch["alibi_slopes"] = Shard(0)
        ways.append(way(Shard(0), Shard(0), Partial(), **by_batch))  # dsink is a sum over sequences
    if _heads_can_be_shared(q, k, v):
        by_heads = {"alibi_slopes": Shard(1 if slopes_by_batch else 0), "sink": Shard(0)} | along(1)
        ways.append(way(Shard(q.ndim - 2), Shard(q.ndim - 3), Shard(0), **by_heads))
    return ways


def _heads_can_be_shared(q: Any, k: Any, v: Any) -> bool:
    """Whether heads can be sharded such that all query heads of a key/value head are in its shard.

    This is always possible if k has as many heads as q. Otherwise the number of key heads must be divisible
    by the number of shards: the size of the mesh, or of the mesh dimensions that already shard heads.
    """
    if q.shape[-2] == k.shape[-2]:
        return True
    heads = q.ndim - 2
    shared = {i for t in (q, k, v) for i, placement in enumerate(t.placements) if placement.is_shard(heads)}
    parts = torch.Size(k.mesh.size(i) for i in shared).numel() if shared else k.mesh.size()
    return k.shape[-2] % parts == 0
