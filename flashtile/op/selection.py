"""Selects the backend and configuration for a problem, with the reasons against the other backends.

A backend implements an operation in a module, which is ``flashtile.backends.<backend>`` or its subpackage
``part``. The module offers

* ``reason_against(problem, explicit)``: why the backend does not support the problem, or None if it does.
  ``explicit`` says whether the caller named the backend. If ``reason_against_<operation>`` exists, it is
  called instead.
* ``prepare_<operation>(problem, config)``: a launch, which is a function ``(*tensors, optional)`` for tensors
  with the shapes, strides and dtypes of the problem. It does not check its arguments. If it has the attribute
  ``writes_into``, it also takes buffers for its results (``op/into.py``).
* ``configure_<operation>(problem)``: the frozen configuration, if the operation has one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from flashtile.problems.common import PREFERENCE


class Served(Protocol):
    """The attributes of an operation that selection uses."""

    name: str
    part: str


@dataclass(frozen=True)
class Selection:
    """The backend selected for a problem, its configuration, and why preferred backends were rejected."""

    operation: Served = field(repr=False)
    problem: Any
    backend: str
    config: Any
    reasons_against: dict[str, str] = field(hash=False)

    def prepare(self) -> Callable[..., Any]:
        """Return the launch, a function ``(*tensors, optional)`` that does not check its arguments.

        The tensors must have the shapes, strides and dtypes of the problem.
        """
        part = load_part(self.backend, self.operation)
        return getattr(part, f"prepare_{self.operation.name}")(self.problem, self.config)


@dataclass(frozen=True)
class Choice:
    """The backend for an operation of a call. ``backend`` and ``config`` are None if no backend supports it.

    ``requested`` is the backend that the caller named, None if the caller named none.
    """

    operation: str
    problem: Any
    backend: str | None
    config: Any
    reasons_against: dict[str, str] = field(hash=False)
    requested: str | None = None

    def __str__(self) -> str:
        lines = [f"backend: {self.backend}", f"config: {self.config}"]
        lines += [f"not {name}: {reason}" for name, reason in self.reasons_against.items()]
        return "\n".join([*lines, f"problem: {self.problem}"])


def load_part(name: str, operation: Served) -> Any:
    """Return the backend's module for ``operation``, None if the backend does not implement it.

    The module is imported here, not with flashtile, because a backend may import triton.
    """
    module = f"flashtile.backends.{name}" + (f".{operation.part}" if operation.part else "")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:  # no such package, or a folder without code
        return None
    part = importlib.import_module(module)
    return part if hasattr(part, f"prepare_{operation.name}") else None


def _reason_against(name: str, operation: Served, problem: Any, explicit: bool) -> str | None:
    part = load_part(name, operation)
    if part is None:
        return f"it has no kernels for {operation.name}"
    reason_against = getattr(part, f"reason_against_{operation.name}", part.reason_against)
    return reason_against(problem, explicit=explicit)


def _configure(name: str, operation: Served, problem: Any) -> Any:
    configure = getattr(load_part(name, operation), f"configure_{operation.name}", None)
    return None if configure is None else configure(problem)


def on_target(problem: Any, target: Any) -> Any:
    """Return a copy of the problem for the GPU ``target``, as if TMA could load all of its tensors."""
    moved = {"device": target} | ({"tma_obstacle": None} if hasattr(problem, "tma_obstacle") else {})
    return problem._replace(**moved) if hasattr(problem, "_replace") else replace(problem, **moved)


def select(operation: Served, problem: Any, backend: str | None = None) -> Selection:
    """Select the first preferred backend that supports ``problem``, or ``backend`` if given.

    Raises:
        ValueError: ``backend`` is not a backend.
        NotImplementedError: the named backend, or every backend, does not support the problem. The message
            lists the reasons.
    """
    if backend is not None and backend not in PREFERENCE:
        raise ValueError(f"backend must be None or one of {', '.join(PREFERENCE)}, got {backend!r}")
    reasons: dict[str, str] = {}
    for name in PREFERENCE if backend is None else (backend,):
        reason = _reason_against(name, operation, problem, explicit=backend is not None)
        if reason is None:
            return Selection(operation, problem, name, _configure(name, operation, problem), reasons)
        reasons[name] = reason
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    asked = "no backend serves" if backend is None else f"backend={backend!r} does not serve"
    raise NotImplementedError(f"{asked} this call ({listed})")


def choose(operation: Served, problem: Any, backend: str | None = None) -> Choice:
    """Return the backend that :func:`select` selects, with the reasons against all other backends.

    If no backend supports the problem, ``backend`` of the result is None, and no error is raised.
    """
    chosen: str | None = None
    config: Any = None
    reasons: dict[str, str] = {}
    for name in PREFERENCE:
        reason = _reason_against(name, operation, problem, explicit=name == backend)
        if reason is not None:
            reasons[name] = reason
        elif backend is not None and name != backend:
            reasons[name] = f"it could serve the call, but backend={backend!r} was requested"
        elif chosen is not None:
            reasons[name] = f"it could serve the call, but {chosen} comes first"
        else:
            chosen, config = name, _configure(name, operation, problem)
    return Choice(operation.name, problem, chosen, config, reasons, backend)
