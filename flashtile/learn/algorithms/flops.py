"""Counts floating-point operations as torch executes them, so that algorithms need not declare theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.torch_private import UNNAMED_MOVES, TorchDispatchMode

_aten = torch.ops.aten

MATMULS = frozenset({_aten.mm, _aten.bmm, _aten.mv, _aten.dot})
ELEMENTWISE = frozenset(
    {
        _aten.add, _aten.sub, _aten.rsub, _aten.mul, _aten.div, _aten.neg, _aten.abs, _aten.reciprocal,
        _aten.maximum, _aten.minimum, _aten.clamp, _aten.exp, _aten.log, _aten.tanh,
    }
)  # fmt: skip
REDUCTIONS = frozenset({_aten.sum, _aten.amax})
MOVES = frozenset(
    {
        *UNNAMED_MOVES, _aten.alias, _aten.cat, _aten.clone, _aten.copy_, _aten.detach,
        _aten.empty, _aten.expand, _aten.full, _aten.index, _aten.masked_fill, _aten.new_full,
        _aten.new_zeros, _aten.permute, _aten.scalar_tensor, _aten.select, _aten.slice, _aten.squeeze,
        _aten.stack, _aten.t, _aten.transpose, _aten.unsqueeze, _aten.view, _aten.where, _aten.zeros,
        _aten.zeros_like,
    }
)  # fmt: skip
"""Operations without cost: creating, copying, selecting and converting numbers."""


class FlopCounter(TorchDispatchMode):
    """While active, adds up the operations of every torch call that returns floating-point numbers.

    A product of (m, k) and (k, n) counts 2 m n k. Everything else counts one operation for each number that
    is computed, or that a sum or maximum reads; moves are free. Matrix products are counted separately,
    because GPUs compute them on units that are much faster than the rest (16 times on an A100,
    FlashAttention-2 paper, section 3.1).

    Raises:
        NotImplementedError: the cost of an operation is not known here, so the count would be too low.
    """

    def __init__(self) -> None:
        super().__init__()
        self.matmul = 0
        self.other = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (isinstance(result, Tensor) and result.is_floating_point()):
            return result
        operation = func.overloadpacket
        if operation in MATMULS:
            self.matmul += 2 * result.numel() * args[0].shape[-1]
        elif operation in ELEMENTWISE:
            self.other += result.numel()
        elif operation in REDUCTIONS:
            self.other += args[0].numel()
        elif operation not in MOVES:
            raise NotImplementedError(f"the operations of {operation} are not counted on chip")
        return result
