"""What those who watch operators ask: how many FLOPs a call has, and how its DTensors may be sharded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from flashtile.op.operation import Operation


def tell_observers(operation: Operation, tensors: tuple[Any, ...]) -> None:
    """Tell counters of FLOPs what a call costs, and DTensors how it shards: both ask by operator."""
    if operation.flops is not None and torch._C._len_torch_dispatch_stack():
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        for mode in _get_current_dispatch_mode_stack():
            registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
            if registry is not None:
                registry.setdefault(operation.operator.overloadpacket, partial(_count_flops, operation))
    if operation.shardings is not None and any(type(t).__name__ == "DTensor" for t in tensors):
        _register_sharding(operation)


def _count_flops(operation: Operation, *arguments: Any, **unused: Any) -> int:
    tensors, beside, options = operation.split(arguments)
    assert operation.flops is not None
    return operation.flops(*tensors, beside, options)


_sharded: set[str] = set()


def _register_sharding(operation: Operation) -> None:
    """Once: DTensor's rules cost half a second of imports, which only its users should pay."""
    if operation.name in _sharded:
        return
    from torch.distributed.tensor.experimental import register_sharding

    def rules(*arguments: Any) -> list:
        tensors, beside, options = operation.split(arguments)
        assert operation.shardings is not None
        return operation.shardings(*tensors, beside, options)

    register_sharding(operation.operator)(rules)
    _sharded.add(operation.name)
