"""Evaluation of programs by torch on tensors of indices, for the CPU backend and for block masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.masks.operations import OPERATIONS
from flashtile.masks.program import LOAD, Line, Name, Program
from flashtile.torch_private import is_mapped


def evaluate(
    program: Program,
    inputs: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    dtype: torch.dtype = torch.float32,
    kind: str = "mask_mod",
    check: bool | None = None,
    differentiable: bool = False,
) -> list[Any]:
    """Evaluate a program on tensors that broadcast against each other.

    Args:
        program: the program.
        inputs: int64 tensors ``b``, ``h``, ``q`` and ``kv`` (batch, head, query and key), and ``score`` for a
            score_mod.
        tensors: the captured tensors.
        dtype: dtype of all floats.
        kind: kind of the function, for error messages.
        check: whether a read outside of a tensor raises. False reads the nearest element instead. None checks
            only on the CPU, because on a GPU the check synchronises.
        differentiable: whether gradients of the results flow to ``tensors``.

    Returns:
        The program's results: tensors, or numbers for results that do not depend on an input.

    Raises:
        ValueError: the program reads outside of a captured tensor, and the message shows the user's line; or
            the program divides an int by 0.
    """
    known: dict[Any, Any] = {Name(name): value for name, value in inputs.items()}
    dtypes = {"float": dtype, "int": torch.int64, "bool": torch.bool}

    def value(operand: Any) -> Any:
        return known[operand] if isinstance(operand, Name) else operand

    for line in program.lines:
        operands = [value(operand) for operand in line.operands]
        if line.operation == LOAD:
            tensor = tensors[operands[0]]
            tensor = tensor if differentiable else tensor.detach()
            loaded = tensor[_inside(line, tensor, operands[1:], kind, check)]
            known[line.name] = loaded.to(dtypes[line.kind])
        else:
            try:
                computed = OPERATIONS[line.operation].evaluate(*_in_dtype(line, operands, dtype))
            except RuntimeError as error:
                if "ZeroDivisionError" not in str(error):
                    raise
                raise ValueError(f"{kind} divides an int by 0, which torch does not define") from None
            is_float = line.kind == "float" and isinstance(computed, Tensor)
            known[line.name] = computed.to(dtype) if is_float else computed
    return [value(result) for result in program.results]


def _in_dtype(line: Line, operands: list[Any], dtype: torch.dtype) -> list[Any]:
    """Convert int operands to ``dtype`` if another operand or the result is a float.

    torch would convert them to float32 even in a float64 call.
    """
    if line.kind != "float" and not any(map(_is_float, operands)):
        return operands
    return [
        operand.to(dtype) if isinstance(operand, Tensor) and operand.dtype != torch.bool else operand
        for operand in operands
    ]


def _is_float(operand: Any) -> bool:
    return operand.is_floating_point() if isinstance(operand, Tensor) else isinstance(operand, float)


def _inside(
    line: Line, tensor: Tensor, indices: list[Any], kind: str, check: bool | None
) -> tuple[Tensor, ...]:
    """Return the indices, clamped to the tensor's shape. Negative indices count from the end, as in torch.

    Raises:
        ValueError: an index is outside the tensor, and ``check`` is True (or None, on the CPU,
            outside of vmap).
    """
    inside = []
    for index, size in zip(indices, tensor.shape, strict=True):
        index = torch.as_tensor(index, dtype=torch.int64, device=tensor.device)  # uint8 would be a mask
        index = torch.where(index < 0, index + size, index)
        if check or (check is None and index.device.type == "cpu" and not is_mapped(index)):
            wrong = (index < 0) | (index >= size)
            if wrong.any():
                bad = int(index[wrong].reshape(-1)[0])
                raise ValueError(
                    f"{kind} reads element {bad if bad >= 0 else bad - size} of {size}, outside of a "
                    f"captured tensor of shape {tuple(tensor.shape)}\n  {line.where}"
                )
        inside.append(index.clamp(0, size - 1))
    return tuple(inside)
