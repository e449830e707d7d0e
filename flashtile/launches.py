"""Launches kept per call signature, so that a repeated call costs a look-up, its outputs and the driver call.

A signature holds all that a launch was prepared for: shapes, strides, dtypes, devices and 16-byte alignment
of the tensors, and the options. Checks and dispatch run once per signature.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile.dispatch import BackwardLaunch, ForwardLaunch, select
from flashtile.problem import Options, Problem, check_call, check_cu_seqlens_values, debug_checks


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


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    alibi_slopes: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) with the launch that was prepared for this signature, preparing it if it is new."""
    try:
        # Written out for the three: a call for each would cost more than the look-up.
        key: tuple = (
            q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % 16 == 0,
            k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % 16 == 0,
            v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % 16 == 0,
            options,
        )  # fmt: skip
        if cu_seqlens_q is not None or cu_seqlens_k is not None or alibi_slopes is not None:
            key += (_signature(cu_seqlens_q), _signature(cu_seqlens_k), _signature(alibi_slopes))
    except Exception:  # not a tensor, or one without strides: the checks name it
        check_call(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options)
        raise
    launch: ForwardLaunch | None = _forward_launches.get(key)
    if launch is None:
        problem = Problem.from_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options)
        selection = select(problem, options.backend)
        launch = _forward_launches.keep(key, selection.backend.prepare_forward(problem, selection.config))
    if cu_seqlens_q is not None and (not q.is_cuda or debug_checks()):
        _check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, options)
    return launch(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes)


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    alibi_slopes: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv) from the gradients of out and lse, either of which may be None (zero)."""
    # Autograd hands over expanded gradients (out.sum()) and ones with any strides.
    dout = out.new_zeros(out.shape) if dout is None else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    tensors = (dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes)
    key = (options, *map(_signature, tensors))
    launch: BackwardLaunch | None = _backward_launches.get(key)
    if launch is None:
        problem = Problem.from_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options)
        selection = select(problem, options.backend)
        launch = _backward_launches.keep(key, selection.backend.prepare_backward(problem, selection.config))
    return launch(*tensors)


def _signature(tensor: Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0)


def _check_lengths(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Any, options: Options) -> None:
    assert options.max_seqlen_q is not None
    assert options.max_seqlen_k is not None
    check_cu_seqlens_values("cu_seqlens_q", cu_seqlens_q, q.shape[0], options.max_seqlen_q)
    check_cu_seqlens_values("cu_seqlens_k", cu_seqlens_k, k.shape[0], options.max_seqlen_k)
