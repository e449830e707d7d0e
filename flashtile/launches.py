"""Launches kept per call signature, so that a repeated call costs a look-up, its outputs and the driver call.

A signature holds all that a launch was prepared for: shapes, strides, dtypes, devices and 16-byte alignment
of the tensors, and the options. Checks and dispatch run once per signature.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from flashtile.dispatch import BackwardLaunch, ForwardLaunch, select
from flashtile.problem import NO_EXTRAS, Extras, Options, Problem, check_call, check_lengths, debug_checks


class LaunchCache(dict[tuple, Any]):
    """Prepared launches by signature. Emptied when full: a full cache means ever-changing shapes."""

    LIMIT = 4096

    def keep(self, key: tuple, launch: Any) -> Any:
        if len(self) >= self.LIMIT:
            self.clear()
        self[key] = launch
        return launch


_forward_launches = LaunchCache()
_backward_launches = LaunchCache()


def forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) with the launch that was prepared for this signature, preparing it if it is new."""
    try:
        # Written out for the three: a call for each would cost more than the look-up.
        key: tuple = (
            q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % 16 == 0,
            k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % 16 == 0,
            v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % 16 == 0,
            options,
        )  # fmt: skip
        if extras is not NO_EXTRAS:
            key += signatures(extras)
    except Exception:  # not a tensor, or one without strides: the checks name it
        check_call(q, k, v, extras, options)
        raise
    launch: ForwardLaunch | None = _forward_launches.get(key)
    if launch is None:
        problem = Problem.from_tensors(q, k, v, extras, options)
        selection = select(problem, options.backend)
        launch = _forward_launches.keep(key, selection.backend.prepare_forward(problem, selection.config))
    if (
        extras is not NO_EXTRAS
        and (extras.cu_seqlens_q is not None or extras.seqused_k is not None)
        and (not q.is_cuda or debug_checks())
    ):
        check_lengths(q, k, extras, options)
    return launch(q, k, v, extras)


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute (dq, dk, dv, dsink) from the gradients of out and lse, either of which may be None (zero).

    dsink is None without a sink.
    """
    # Autograd hands over expanded gradients (out.sum()) and ones with any strides.
    dout = out.new_zeros(out.shape) if dout is None else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    tensors = (dout, dlse, q, k, v, out, lse)
    key = (options, *signatures(tensors))
    if extras is not NO_EXTRAS:
        key += signatures(extras)
    launch: BackwardLaunch | None = _backward_launches.get(key)
    if launch is None:
        problem = Problem.from_tensors(q, k, v, extras, options)
        selection = select(problem, options.backend)
        launch = _backward_launches.keep(key, selection.backend.prepare_backward(problem, selection.config))
    return launch(*tensors, extras)


def signatures(tensors: Iterable[Tensor | None]) -> tuple:
    """What a launch was prepared for of each tensor."""
    return tuple(
        [
            None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16 == 0)
            for t in tensors
        ]
    )
