"""Functions of kernels run as Python, without the compiler and the interpreter."""

from __future__ import annotations

from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any


def functions_of(*modules: ModuleType, **instead: Any) -> dict[str, Any]:
    """What the modules define, by name: functions that call one another, constants as their values, and
    ``instead`` in place of what only the compiler has. Later modules win."""
    names: dict[str, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            if hasattr(value, "fn"):
                names[name] = FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
            else:
                names[name] = getattr(value, "value", value)  # of a constexpr
    names.update(instead)
    return names


def make_work_tile(
    sequence: int, head: int, tile_in_head: int, start_q: int, start_k: int, seqlen_q: int, seqlen_k: int
) -> SimpleNamespace:
    """In place of the Hopper kernels' ``WorkTile``."""
    return SimpleNamespace(**locals())
