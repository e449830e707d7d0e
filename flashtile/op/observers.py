"""Registers the FLOP counts of operations with torch's FLOP counters, and sharding rules with DTensor."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from flashtile.torch_private import (
    FakeTensor,
    FunctionalTensor,
    dispatch_modes,
    num_dispatch_modes,
    run_at_trace_time,
)


def forward_flops(scores: int, num_heads_q: int, head_dim: int, head_dim_v: int) -> int:
    """Count the operations of Q K^T and P V, for ``scores`` pairs of a query and a key."""
    return 2 * scores * num_heads_q * (head_dim + head_dim_v)


def backward_flops(scores: int, num_heads_q: int, head_dim: int, head_dim_v: int) -> int:
    """Count the operations of Q K^T (recomputed), dO V^T, P^T dO, dS K and dS^T Q."""
    return 2 * scores * num_heads_q * (3 * head_dim + 2 * head_dim_v)


def count_scores(
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    seqlen_k: int,
    cu_seqlens_k: Tensor | None,
    max_seqlen_k: int | None,
) -> int:
    """Count the pairs of a query and a key of the same sequence, in the whole batch.

    ``seqlen_k``: keys per sequence without ``cu_seqlens``.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return q.shape[0] * q.shape[1] * seqlen_k
    lengths = lengths_of(cu_seqlens_q, max_seqlen_q or 0), lengths_of(cu_seqlens_k, max_seqlen_k or 0)
    return sum(rows * keys for rows, keys in zip(*lengths, strict=True))


def lengths_of(cu_seqlens: Tensor, longest: int) -> list[int]:
    """Return the length of each sequence, or ``longest`` for each if ``cu_seqlens`` has no data."""
    if not has_data(cu_seqlens):
        return [longest] * (cu_seqlens.shape[0] - 1)
    return cu_seqlens.diff().tolist()


def has_data(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` can be read; False for fake, functional and meta tensors."""
    return not isinstance(tensor, (FakeTensor, FunctionalTensor)) and not tensor.is_meta


class Observed(Protocol):
    """The parts of an :class:`flashtile.op.operation.Operation` that observers read."""

    name: str
    operator: Any
    flops: Any
    shardings: Any

    def split(self, arguments: tuple[Any, ...]) -> tuple[Any, Any, Any]: ...


_sharded: dict[str, Observed] = {}
"""Operations whose sharding rules are not yet registered with DTensor, by name."""


def tell_observers(operation: Observed, tensors: tuple[Any, ...]) -> None:
    """Register an operation's FLOP count with active FLOP counters, and its sharding rules with DTensor."""
    if torch.compiler.is_dynamo_compiling():  # counters observe the traced graph
        tell_dtensors(operation, tensors)
        return
    if operation.flops is not None and num_dispatch_modes():
        # A counter copies torch's registry when it is made, so a registration may come too late for it.
        for mode in dispatch_modes():
            registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
            if registry is not None:
                registry.setdefault(operation.operator.overloadpacket, partial(_count_flops, operation))
    tell_dtensors(operation, tensors)


def tell_dtensors(operation: Observed, tensors: tuple[Any, ...]) -> None:
    if operation.shardings is not None and any(type(t).__name__ == "DTensor" for t in tensors):
        _register_sharding(operation.name)


def remember_shardings(operation: Observed) -> None:
    """Store an operation's sharding rules. :func:`tell_dtensors` registers them for the first DTensor."""
    _sharded[operation.name] = operation


def _count_flops(operation: Observed, *arguments: Any, **unused: Any) -> int:
    tensors, optional, options = operation.split(arguments)
    assert operation.flops is not None
    return operation.flops(*tensors, optional, options)


@run_at_trace_time
def _register_sharding(name: str) -> None:
    """Register the sharding rules of an operation with DTensor, unless they are registered already.

    This is delayed until a call has a DTensor, because importing DTensor's rules takes half a second.
    """
    operation = _sharded.get(name)
    if operation is None:
        return
    from torch.distributed.tensor.experimental import register_sharding

    def rules(*arguments: Any) -> list:
        tensors, optional, options = operation.split(arguments)
        assert operation.shardings is not None
        return operation.shardings(*tensors, optional, options)

    register_sharding(operation.operator)(rules)
    _sharded.pop(name, None)
