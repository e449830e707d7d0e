"""From a call with dropout to the arguments of the Hopper kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile.backends.hopper.backward import launch as plain_backward
from flashtile.backends.hopper.backward.config import BackwardConfig
from flashtile.backends.hopper.dropout.config import (
    DropoutBackwardVariant,
    DropoutForwardConfig,
    DropoutForwardVariant,
)
from flashtile.backends.hopper.dropout.kernels import (
    BackwardNumbers,
    Numbers,
    backward_kernel,
    forward_kernel,
)
from flashtile.backends.hopper.forward import launch as plain_forward
from flashtile.backends.hopper.launch import score_numbers
from flashtile.dropout import is_fine, keep_share, threshold
from flashtile.problems.attention import Problem


def variant_of(problem: Problem, config: DropoutForwardConfig) -> DropoutForwardVariant:
    """What the forward kernel is compiled for. Query heads share no tile: each has words of its own."""
    fields = vars(plain_forward.variant_of(problem, config))
    fields |= {"PACK": 1, "KV_GROUP": problem.group_size}
    return DropoutForwardVariant(
        **fields, FINE_DROPOUT=is_fine(problem.dropout_p), LATE_WORDS=config.LATE_WORDS
    )


def backward_variant_of(problem: Problem, config: BackwardConfig) -> DropoutBackwardVariant:
    """What the backward kernel is compiled for."""
    fields = vars(plain_backward.variant_of(problem, config))
    return DropoutBackwardVariant(**fields, FINE_DROPOUT=is_fine(problem.dropout_p))


def numbers_of(problem: Problem) -> Numbers:
    """The floats of the forward."""
    return Numbers(**score_numbers(problem), keep_scale=1 / keep_share(problem.dropout_p))


def backward_numbers_of(problem: Problem) -> BackwardNumbers:
    """The floats of the backward."""
    numbers, keep = plain_backward.numbers_of(problem), keep_share(problem.dropout_p)
    numbers = numbers._replace(scale=numbers.scale / keep)
    return BackwardNumbers(*numbers, keep_scale=1 / keep, keep=keep)


class ForwardLaunch(plain_forward.ForwardLaunch):
    """``(q, k, v, extras[, out, lse]) -> (out, lse)`` for tensors of one signature."""

    kernel = forward_kernel
    _variant_of = staticmethod(variant_of)
    _numbers_of = staticmethod(numbers_of)

    def _more_integers(self, extras: Any) -> dict[str, int]:
        return {"drop_threshold": threshold(self._problem.dropout_p)}

    def _more_tensors(self, extras: Any) -> tuple:
        return (extras.rng_state,)


class BackwardLaunch(plain_backward.BackwardLaunch):
    """``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink, None)``, of one signature."""

    kernel = backward_kernel
    _variant_of = staticmethod(backward_variant_of)
    _numbers_of = staticmethod(backward_numbers_of)

    def _more_integers(self, extras: Any) -> dict[str, int]:
        return {"drop_threshold": threshold(self._problem.dropout_p)}

    def _more_tensors(self, extras: Any, lse: Tensor) -> tuple:
        return (extras.rng_state,)
