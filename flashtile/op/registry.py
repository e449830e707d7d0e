"""``torch.ops.flashtile``: operator definitions that outlive the modules that made them.

A module that is dropped from ``sys.modules`` and imported again must not define its operators twice. It must
also not break functions of its first import that are still in use. Therefore torch gets functions that look
up the current implementation of an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from flashtile.problems.masking import Masking

_TYPES = {
    "Tensor": "Tensor",
    "int": "SymInt",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "torch.dtype": "ScalarType",
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
    """Return a schema like ``forward(Tensor q, ..., Tensor? sink, ..., str? backend) -> (Tensor, Tensor)``.

    The fields that the types in ``extended_to`` add to ``optional`` and ``options`` come last, with defaults.
    """
    kinds = {n.rstrip("?"): "Tensor?" if n.endswith("?") else "Tensor" for n in tensors}
    kinds |= {n: _schema_type(kind) for n, kind in optional.__annotations__.items()}
    for i, written in enumerate(mutates):
        kinds[written] = kinds[written].replace("Tensor", f"Tensor({chr(ord('a') + i)}!)")
    for n, kind in options.__annotations__.items():
        if n == MASKING:
            kinds |= {name: _schema_type(kind) for name, kind in Masking.__annotations__.items()}
        else:
            kinds[n] = _schema_type(kind)
    arguments = [f"{kind} {n}" for n, kind in kinds.items()]
    for wide in extended_to:
        for n, kind in wide.__annotations__.items():
            if n not in kinds and n != MASKING:
                arguments.append(f"{_schema_type(kind)} {n}={wide._field_defaults[n]!r}".replace("'", '"'))
    returned = ", ".join(["Tensor"] * results)
    return f"{name}({', '.join(arguments)}) -> ({returned})"


def _schema_type(annotation: Any) -> str:
    """Return the name that schemas use for a type.

    ``annotation`` is text such as "Tensor | None". It is not evaluated, because evaluating is slow.
    """
    kind, *none = str(getattr(annotation, "__forward_arg__", annotation)).split(" | ")
    return _TYPES[kind] + "?" * len(none)


MASKING = "masking"
"""The field of options that holds a :class:`Masking`. An operator has the fields of the Masking instead."""
MASKING_FIELDS = tuple(field.name for field in fields(Masking))


def flat_fields(options: type[Any]) -> tuple[str, ...]:
    """Return the names of the operator's arguments that the fields of ``options`` become."""
    return tuple(n for name in options._fields for n in (MASKING_FIELDS if name == MASKING else (name,)))


def flat(options: Any) -> tuple:
    """Return the values of :func:`flat_fields`."""
    values: list[Any] = []
    for field, value in zip(options._fields, options, strict=True):
        if field == MASKING:  # not by its type, because the module may have been imported again
            values += [getattr(value, name) for name in MASKING_FIELDS]
        else:
            values.append(value)
    return tuple(values)


def gathered(options: type[Any], values: tuple) -> Any:
    """Return the ``options`` whose :func:`flat` values are ``values``."""
    named = dict(zip(flat_fields(options), values, strict=True))
    if MASKING in options._fields:
        masking = {name: named.pop(name) for name in MASKING_FIELDS}
        named[MASKING] = Masking(**masking)
    return options(**named)


_NAMESPACE = "flashtile"
_serving: dict[Any, Any] = vars(getattr(torch.ops, _NAMESPACE)).setdefault("_serving", {})
"""Current implementations by (operator, purpose), and the library. Stored in torch, to survive reloads."""


def define(operator: str, text: str, tags: tuple[torch.Tag, ...] = ()) -> Any:
    """Define the operator ``torch.ops.flashtile.<operator>`` with the schema ``text`` and return it.

    Raises:
        RuntimeError: another version of flashtile has defined the operator with another schema in this
            process.
    """
    known = _serving.setdefault((operator, "schema"), text)
    if known != text:
        raise RuntimeError(
            f"torch.ops.{_NAMESPACE}.{operator} has been defined by another version of flashtile, imported "
            "before in this process: start Python again"
        )
    packet = getattr(torch.ops, _NAMESPACE)
    if not hasattr(packet, operator):
        _library().define(text, tags=tags)
    return getattr(packet, operator).default


def implement(operator: str, device: str, kernel: Callable[..., Any]) -> None:
    """Register ``kernel`` as the operator's implementation for a device, or another dispatch key of torch."""
    library = _library()
    _serve(operator, device, kernel, lambda looked_up: library.impl(operator, looked_up, device))


def register_fake(operator: str, fake: Callable[..., Any]) -> None:
    """Register ``fake``, which returns empty tensors with the shapes and dtypes of the operator's results."""
    register = partial(torch.library.register_fake, f"{_NAMESPACE}::{operator}", lib=_library())
    _serve(operator, "fake", fake, register)


def register_autograd(
    operator: str, backward: Callable[..., Any], setup_context: Callable[..., Any] | None = None
) -> None:
    """Register ``backward`` as the operator's derivative. ``setup_context`` saves what ``backward`` needs."""
    keywords: dict[str, Any] = {"lib": _library()}
    if setup_context is not None:
        _serving[operator, "setup_context"] = setup_context
        keywords["setup_context"] = _looked_up((operator, "setup_context"))
    register = partial(torch.library.register_autograd, f"{_NAMESPACE}::{operator}", **keywords)
    _serve(operator, "backward", backward, register)


def _library() -> Any:
    if "library" not in _serving:
        _serving["library"] = torch.library.Library(_NAMESPACE, "DEF")
    return _serving["library"]


def _serve(operator: str, purpose: str, function: Callable[..., Any], register: Callable[..., Any]) -> None:
    """Make ``function`` the implementation of an operator for one purpose, such as "CPU" or "backward".

    It replaces an earlier implementation. torch can register an implementation only once, so the first call
    registers a function that looks up the current implementation.
    """
    key = operator, purpose
    if key not in _serving:
        register(_looked_up(key))
    _serving[key] = function


def _looked_up(key: tuple[str, str]) -> Callable[..., Any]:
    return lambda *arguments, **named: _serving[key](*arguments, **named)
