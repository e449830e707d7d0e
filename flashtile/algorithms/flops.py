"""Counts floating-point operations as torch executes them, so that no algorithm has to declare its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten

MATMULS = frozenset({_aten.mm, _aten.bmm, _aten.mv, _aten.dot})
ELEMENTWISE = frozenset(
    {
        _aten.add, _aten.sub, _aten.rsub, _aten.mul, _aten.div, _aten.neg, _aten.exp, _aten.log, _aten.tanh,
        _aten.maximum, _aten.reciprocal, _aten.abs,
    }
)  # fmt: skip
REDUCTIONS = frozenset({_aten.sum, _aten.amax, _aten.max})


class FlopCounter(TorchDispatchMode):
    """While active, adds up the operations of every torch call on floating-point tensors.

    A product of (m, k) and (k, n) is 2 m n k; arithmetic, comparisons of two numbers for their maximum, and
    each elementary function are 1 an element; a sum or maximum over a row is 1 an element read. Moving,
    masking and converting numbers is free. GPUs multiply matrices on their own units, many times faster
    than the rest (16 times on an A100, FlashAttention-2 paper, section 3.1), hence two counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.matmul = 0
        self.other = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        if operation in MATMULS:
            self.matmul += 2 * result.numel() * args[0].shape[-1]
        elif operation in ELEMENTWISE and result.is_floating_point():
            self.other += result.numel()
        elif operation in REDUCTIONS and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.other += args[0].numel()
        return result
