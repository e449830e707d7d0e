"""``torch.ops.flashtile``: the definitions, which stay when the modules that made them go.

A module that is dropped from ``sys.modules`` and imported again must not define its operators twice, and
must not take them away from functions of its first import that somebody still holds. So torch gets functions
that look up what serves an operator now.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_NAMESPACE = "flashtile"
_serving: dict[Any, Any] = vars(getattr(torch.ops, _NAMESPACE)).setdefault("_serving", {})
"""What serves, by (operator, purpose), and the library: kept where modules come and go."""


def define(operator: str, text: str) -> Any:
    """The operator ``torch.ops.flashtile.<operator>`` with the schema ``text``.

    Raises:
        RuntimeError: another flashtile has defined it differently in this process.
    """
    known = _serving.setdefault((operator, "schema"), text)
    if known != text:
        raise RuntimeError(
            f"torch.ops.{_NAMESPACE}.{operator} has been defined by another version of flashtile, imported "
            "before in this process: start Python again"
        )
    packet = getattr(torch.ops, _NAMESPACE)
    if not hasattr(packet, operator):
        _library().define(text)
    return getattr(packet, operator).default


def implement(operator: str, device: str, kernel: Callable[..., Any]) -> None:
    """Let ``kernel`` compute the operator on tensors of a device, "CPU" or "CUDA"."""
    library = _library()
    _serve(operator, device, kernel, lambda looked_up: library.impl(operator, looked_up, device))


def register_fake(operator: str, fake: Callable[..., Any]) -> None:
    """Let ``fake`` say what results the operator has."""
    register = partial(torch.library.register_fake, f"{_NAMESPACE}::{operator}", lib=_library())
    _serve(operator, "fake", fake, register)


def register_autograd(
    operator: str, backward: Callable[..., Any], setup_context: Callable[..., Any] | None = None
) -> None:
    """Let ``backward`` differentiate the operator, and ``setup_context`` keep what it needs."""
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
    """Let ``function`` serve; ``register`` gets what looks it up, if torch has not got it yet."""
    key = operator, purpose
    if key not in _serving:
        register(_looked_up(key))
    _serving[key] = function


def _looked_up(key: tuple[str, str]) -> Callable[..., Any]:
    return lambda *arguments, **named: _serving[key](*arguments, **named)
