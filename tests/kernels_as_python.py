"""Runs functions of kernels as plain Python, without Triton's compiler or interpreter."""

from __future__ import annotations

from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any


def functions_of(*modules: ModuleType, **instead: Any) -> dict[str, Any]:
    """Return the functions and constants of modules by name, as plain Python.

    The functions call one another. Names of ``instead`` replace functions that only the compiler has. If
    modules share a name, the last module's is used.
    """
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
    sequence: int, head: int, head_kv: int, tile_in_head: int, start_q: int, start_k: int, seqlen_q: int,
    seqlen_k: int,
) -> SimpleNamespace:  # fmt: skip
    """Return a plain object with the fields of the Hopper kernels' ``WorkTile``."""
    return SimpleNamespace(**locals())
