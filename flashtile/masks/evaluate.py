"""Programs evaluated by torch on tensors of indices: the CPU's own kernel, and the maker of block masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.masks.operations import OPERATIONS
from flashtile.masks.program import LOAD, Line, Name, Program


def evaluate(
    program: Program,
    inputs: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    dtype: torch.dtype = torch.float32,
    kind: str = "mask_mod",
) -> tuple[list[Any], Tensor | None]:
    """(results, outside) of a program on tensors that broadcast against each other.

    Args:
        inputs: int64 tensors ``b``, ``h``, ``q`` and ``kv``, and ``score``.
        tensors: the captured ones.
        dtype: of floats that are loaded.
        kind: of the function, for the error.

    Returns:
        Results are tensors or, where nothing depends on an input, numbers. ``outside`` is where something was
        read outside of a tensor, None for nowhere. On the CPU that is an error instead.

    Raises:
        ValueError: on the CPU, a read outside of a captured tensor; the text shows the user's line.
    """
    known: dict[Any, Any] = {Name(name): value for name, value in inputs.items()}
    outside: Tensor | None = None

    def value(operand: Any) -> Any:
        return known[operand] if isinstance(operand, Name) else operand

    for line in program.lines:
        if line.operation == LOAD:
            tensor = tensors[line.operands[0]]
            indices, wrong = _indices(line, tensor, [value(operand) for operand in line.operands[1:]], kind)
            loaded = tensor.detach()[indices]
            known[line.name] = loaded.to(dtype) if line.kind == "float" else loaded
            if wrong is not None:
                outside = wrong if outside is None else outside | wrong
        else:
            known[line.name] = OPERATIONS[line.operation].evaluate(*map(value, line.operands))
    return [value(result) for result in program.results], outside


def _indices(line: Line, tensor: Tensor, indices: list[Any], kind: str) -> tuple[tuple, Tensor | None]:
    """(indices within the tensor, where they were not). Negative ones count from the end, as torch's do."""
    inside, outside = [], None
    for index, size in zip(indices, tensor.shape, strict=True):
        index = torch.as_tensor(index, device=tensor.device)
        wrong = (index < -size) | (index >= size)
        if not wrong.is_cuda:
            if wrong.any():
                bad = int(index[wrong].reshape(-1)[0])
                raise ValueError(
                    f"{kind} reads element {bad} of {size}, outside of a captured tensor of shape "
                    f"{tuple(tensor.shape)}\n  {line.where}"
                )
        elif size:
            outside = wrong if outside is None else outside | wrong
        index = torch.where(index < 0, index + size, index)
        inside.append(index.clamp(0, max(size - 1, 0)) if wrong.is_cuda else index)
    return tuple(inside), outside
