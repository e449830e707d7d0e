"""Refuses derivatives that an operation lacks: tangents of forward mode, and gradients.

Without a derivative rule, torch's dispatcher drops tangents and gradients silently. Transforms of
``torch.func`` also wrap tensors: under ``grad`` inside ``jvp``, the tangents belong to the tensor inside
grad's wrapper. Therefore the tensors of every level are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashtile.torch_private import (
    Transform,
    TransformType,
    active_transforms,
    break_graph,
    in_forward_mode,
    innermost_transform,
    interpreter,
    is_mapped,
    unwrapped,
)

Named = list[tuple[str, Any]]


def transforming() -> bool:
    """Whether the innermost active transform of ``torch.func`` needs rules of ours.

    ``functionalize`` has its own for all operators.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    transform = innermost_transform()
    return transform is not None and transform.key() != TransformType.Functionalize


def mapping() -> bool:
    """Whether the innermost active transform of ``torch.func`` is vmap."""
    transform = innermost_transform()
    return transform is not None and transform.key() == TransformType.Vmap


def refuse_functionalized(name: str) -> None:
    """Raise NotImplementedError under ``functionalize``, which has no rule for an ``autograd.Function``.

    Other transforms need one, within ``functionalize`` and around it.
    """
    if functionalizing():
        raise NotImplementedError(
            f"{name} must not be differentiated or mapped by torch.func together with functionalize, for "
            "which torch has no rule: leave out functionalize, which changes nothing in such a call"
        )


def refuse_functionalized_gradients(names: Iterable[str], tensors: Iterable[Tensor | None]) -> None:
    """Raise NotImplementedError for a tensor that needs a gradient of a transform around ``functionalize``.

    That transform needs the operator's ``autograd.Function``. Plain ``.backward()`` works without a rule.
    """
    keys = [transform.key() for transform in active_transforms() or ()]
    if keys and keys[-1] == TransformType.Functionalize and TransformType.Grad in keys:
        name = _first(_requires_gradient, list(zip(names, tensors, strict=False)))
        if name is not None and torch.is_grad_enabled():
            refuse_functionalized(name)


def refuse_transformed_writes(names: Iterable[str], written: Iterable[int], tensors: tuple) -> None:
    """Raise NotImplementedError if tensors are written under ``functionalize``, or by a call that vmap maps.

    ``written`` are the indices of these among ``tensors``.
    """
    by_vmap = any(isinstance(t, Tensor) and is_mapped(t) for t in tensors)
    if by_vmap or functionalizing():
        name = next(name for i, name in enumerate(names) if i in written and tensors[i] is not None)
        transform = "vmap" if by_vmap else "functionalize"
        raise NotImplementedError(
            f"{name} must not be written under {transform}: call it outside of the transform"
        )


def functionalizing() -> bool:
    """Whether ``functionalize`` is among the active transforms of ``torch.func``."""
    return any(t.key() == TransformType.Functionalize for t in active_transforms() or ())


def leave_graph_of_gradients() -> None:
    """Break the graph while ``torch.compile`` traces a gradient of ``torch.func``.

    ``torch.func`` cannot differentiate custom operators within a graph. After the break, everything under the
    transform runs eagerly.
    """
    # While Dynamo traces this line, the transform is not None even if none is active.
    if isinstance(innermost_transform(), Transform):
        is_vmap = interpreter().key() == TransformType.Vmap  # Dynamo of torch 2.12 cannot trace !=
        if not is_vmap:
            break_graph("gradients by torch.func are computed outside of graphs")


def carries_tangents(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of ``tensors`` carries a tangent of forward-mode differentiation.

    If transforms of ``torch.func`` wrap a tensor, the tensors inside the wrappers are checked as well.
    """
    if not in_forward_mode() or torch.compiler.is_dynamo_compiling():
        return False
    return _first(_carries_tangent, [("", t) for t in tensors]) is not None


def refuse_tangents(names: Iterable[str], tensors: Iterable[Tensor | None]) -> None:
    """Raise NotImplementedError for the first of ``tensors`` that carries a tangent."""
    if not in_forward_mode():
        return
    name = _first(_carries_tangent, list(zip(names, tensors, strict=False)))
    if name is not None:
        raise NotImplementedError(f"{name} must carry no tangents: forward mode is not implemented")


def refuse_transformed_gradients(
    instead: str, names: Iterable[str], tensors: Iterable[Tensor | None]
) -> None:
    """Raise NotImplementedError for the first of ``tensors`` that requires a gradient.

    Outside of transforms, :func:`without_backward` raises this error in the backward pass instead. Under a
    transform of ``torch.func`` that is not possible.
    """
    name = _first(_requires_gradient, list(zip(names, tensors, strict=False)))
    if name is not None and torch.is_grad_enabled():
        raise NotImplementedError(f"{name} must not require a gradient: {instead}")


def without_backward(run: Callable[[], Any], instead: str, learning: list[tuple[str, Tensor]]) -> Any:
    """Return the results of ``run``, with a backward pass that raises NotImplementedError."""
    names, tensors = zip(*learning, strict=True)
    return _NoBackward.apply(run, f"{names[0]} must not require a gradient: {instead}", *tensors)


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any], text: str, *learning: Tensor) -> Any:
        ctx.text = text
        return run()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        raise NotImplementedError(ctx.text)


def _carries_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _requires_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad


def _first(holds: Callable[[Tensor], bool], named: Named) -> str | None:
    """Return the name of the first tensor for which ``holds(tensor)`` is True, or None.

    Each active transform of ``torch.func`` wraps the tensors once more. ``holds`` is called with the tensors
    at every level of wrapping, except the wrappers of vmap.
    """
    transform = None if torch.compiler.is_dynamo_compiling() else innermost_transform()
    if transform is None or transform.key() != TransformType.Vmap:
        for name, tensor in named:
            if isinstance(tensor, Tensor) and holds(tensor):
                return name
    if transform is None:
        return None
    level = transform.level()
    with interpreter().lower():
        return _first(holds, [(name, unwrapped(tensor, level)) for name, tensor in named])
