"""How the DTensors of an attention call may be sharded so that it needs no communication: by batch or by heads.

A rule says the placement of every result and of every tensor argument on one dimension of the mesh; DTensor
combines rules for meshes of several dimensions, and redistributes what comes otherwise, the way that costs
least.
"""

from __future__ import annotations

from typing import Any

import torch

from flashtile.attn.problem import Extras, Options

Rules = list[tuple[list[Any], list[Any]]]


def forward_shardings(q: Any, k: Any, v: Any, extras: Extras, options: Options) -> Rules:
    """(results, arguments) of ``flashtile::forward``. The tensors are DTensor's descriptions of them."""
    return [
        ([rows, lse], [rows, rows, rows, *of_extras, *(None,) * len(options)])
        for rows, lse, of_extras, _ in _placements(q, k, v, extras)
    ]


def backward_shardings(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, extras: Extras, options: Options
) -> Rules:
    """(results, arguments) of ``flashtile::backward``."""
    rules: Rules = []
    for rows, of_lse, of_extras, dsink in _placements(q, k, v, extras):
        gradients = [None if dout is None else rows, None if dlse is None else of_lse]
        arguments = [*gradients, rows, rows, rows, rows, of_lse, *of_extras, *(None,) * len(options)]
        rules.append(([rows, rows, rows, dsink], arguments))
    return rules


def _placements(q: Any, k: Any, v: Any, extras: Extras) -> list[tuple[Any, Any, Extras, Any]]:
    """The placements of q, k, v and out, of lse, of the extras and of dsink, for each way to share the work."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole = Replicate()
    ways: list[tuple[Any, Any, Extras, Any]] = [(whole, whole, Extras(*[whole] * len(extras)), whole)]
    packed = extras.cu_seqlens_q is not None
    slopes_by_batch = extras.alibi_slopes is not None and extras.alibi_slopes.ndim == 2
    if not packed:
        of_extras = Extras(None, None, Shard(0), Shard(0) if slopes_by_batch else whole, whole)
        ways.append((Shard(0), Shard(0), of_extras, Partial()))  # each has a term of a sink's gradient
    if _heads_can_be_shared(q, k, v):
        of_extras = Extras(whole, whole, whole, Shard(1 if slopes_by_batch else 0), Shard(0))
        ways.append((Shard(q.ndim - 2), Shard(q.ndim - 3), of_extras, Shard(0)))
    return [
        (
            rows,
            lse,
            Extras(*(None if t is None else p for t, p in zip(extras, of_extras, strict=True))),
            whole if extras.sink is None else dsink,
        )
        for rows, lse, of_extras, dsink in ways
    ]


def _heads_can_be_shared(q: Any, k: Any, v: Any) -> bool:
    """Whether every shard gets whole groups of query heads with the key/value head that they share.

    Where k has as many heads as q, shards of any sizes do. Else the shards must be equal: over the whole mesh,
    or over those of its dimensions over which heads already are shared.
    """
    if q.shape[-2] == k.shape[-2]:
        return True
    heads = q.ndim - 2
    shared = {
        i for t in (q, k, v) for i, placement in enumerate(t.placements) if placement.is_shard(heads)
    }
    parts = torch.Size(k.mesh.size(i) for i in shared).numel() if shared else k.mesh.size()
    return k.shape[-2] % parts == 0
