"""Builds an operator's schema from the fields of its named tuples."""

from __future__ import annotations

import types
import typing
from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

_TYPES = {
    Tensor: "Tensor",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}


def schema(
    name: str,
    tensors: tuple[str, ...],
    optional: Any,
    options: Any,
    results: int,
    mutates: tuple[str, ...],
    extended_to: tuple[Any, Any],
) -> str:
    """Return ``forward(Tensor q, ..., Tensor? sink, ..., str? backend) -> (Tensor, Tensor)`` or the like.

    Fields that only the types in ``extended_to`` have come last, with defaults.
    """
    kinds = {n.rstrip("?"): "Tensor?" if n.endswith("?") else "Tensor" for n in tensors}
    kinds |= {n: _schema_type(kind) for n, kind in typing.get_type_hints(optional).items()}
    for i, written in enumerate(mutates):
        kinds[written] = kinds[written].replace("Tensor", f"Tensor({chr(ord('a') + i)}!)")
    kinds |= {n: _schema_type(kind) for n, kind in typing.get_type_hints(options).items()}
    arguments = [f"{kind} {n}" for n, kind in kinds.items()]
    for fields in extended_to:
        for n, kind in typing.get_type_hints(fields).items():
            if n not in kinds:
                arguments.append(f"{_schema_type(kind)} {n}={fields._field_defaults[n]!r}".replace("'", '"'))
    returned = ", ".join(["Tensor"] * results)
    return f"{name}({', '.join(arguments)}) -> ({returned})"


def _schema_type(annotation: Any) -> str:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        (kind,) = (t for t in typing.get_args(annotation) if t is not types.NoneType)
        return f"{_TYPES[kind]}?"
    return _TYPES[annotation]


def extended(name: str, base: Any, more: dict[str, Any], defaults: tuple[Any, ...] = ()) -> Any:
    """Return a NamedTuple with the fields of ``base`` and of ``more``; the last have ``defaults``."""
    made: Any = namedtuple(name, (*base._fields, *more), defaults=defaults)  # type: ignore[misc]
    made.__annotations__ = typing.get_type_hints(base) | more
    return made
