"""What those who watch operators ask: how many FLOPs a call has, and how its DTensors may be sharded."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch


class Observed(Protocol):
    """The parts of an :class:`flashtile.op.operation.Operation` that its observers read."""

    name: str
    operator: Any
    flops: Any
    shardings: Any

    def split(self, arguments: tuple[Any, ...]) -> tuple[Any, Any, Any]: ...


_sharded: dict[str, Observed] = {}
"""Operations with rules for DTensors, by name, until DTensor knows the rules."""


def tell_observers(operation: Observed, tensors: tuple[Any, ...]) -> None:
    """Tell counters of FLOPs what a call costs, and DTensors how it shards: both ask by operator."""
    if torch.compiler.is_dynamo_compiling():  # counters watch the graph when it is traced
        tell_dtensors(operation, tensors)
        return
    if operation.flops is not None and torch._C._len_torch_dispatch_stack():
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        for mode in _get_current_dispatch_mode_stack():
            registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
            if registry is not None:
                registry.setdefault(operation.operator.overloadpacket, partial(_count_flops, operation))
    tell_dtensors(operation, tensors)


def tell_dtensors(operation: Observed, tensors: tuple[Any, ...]) -> None:
    if operation.shardings is not None and any(type(t).__name__ == "DTensor" for t in tensors):
        _register_sharding(operation.name)


def remember_shardings(operation: Observed) -> None:
    """What :func:`tell_dtensors` will tell once there are DTensors."""
    _sharded[operation.name] = operation


def _count_flops(operation: Observed, *arguments: Any, **unused: Any) -> int:
    tensors, beside, options = operation.split(arguments)
    assert operation.flops is not None
    return operation.flops(*tensors, beside, options)


def _register_sharding(name: str) -> None:
    """Once: DTensor's rules cost half a second of imports, which only its users should pay."""
    operation = _sharded.get(name)
    if operation is None:
        return
    from torch.distributed.tensor.experimental import register_sharding

    def rules(*arguments: Any) -> list:
        tensors, beside, options = operation.split(arguments)
        assert operation.shardings is not None
        return operation.shardings(*tensors, beside, options)

    register_sharding(operation.operator)(rules)
    _sharded.pop(name, None)


# A function that torch.compile runs when it traces instead of tracing it. This is all that
# torch.compiler.assume_constant_result does, without the seconds that it takes to import the compiler.
_register_sharding._dynamo_marked_constant = True  # type: ignore[attr-defined]
