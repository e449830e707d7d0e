"""Attention by torch's flash kernel: one call, or one per block of rows if the kernel lacks the mask."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flashtile.backends.cpu import banded
from flashtile.backends.cpu.config import Fused
from flashtile.backends.cpu.flash import attend, differentiate
from flashtile.backends.cpu.parts import OptionalInputs
from flashtile.problems.attention import Problem
from flashtile.problems.common import UNLIMITED


def prepare_dense_forward(problem: Problem, config: Fused) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function ``(q, k, v, extras) -> (out, lse)`` for tensors with the lengths of ``problem``.

    Decisions that depend on the lengths are made here, not in each call.
    """
    causal = _kernel_mask(problem, problem.batch, problem.seqlen_q, problem.seqlen_k)
    if causal is None or (problem.seqlen_q == 1 and problem.group_size > 1):
        return lambda q, k, v, extras: forward(problem, config, q, k, v, OptionalInputs.of(problem, extras))
    dtype, scale = config.compute_dtype, problem.softmax_scale
    return lambda q, k, v, extras: attend(dtype, q, k, v, causal, scale)


def forward(
    problem: Problem, config: Fused, q: Tensor, k: Tensor, v: Tensor, optional: OptionalInputs
) -> tuple[Tensor, Tensor]:
    """Return (out, lse); q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, ...)."""
    causal = _kernel_mask(problem, q.shape[0], q.shape[1], k.shape[1])
    if causal is None:
        return banded.forward(problem, config, q, k, v, optional.alibi_slopes)
    if q.shape[1] == 1 and problem.group_size > 1:
        return _attend_by_groups(problem, config, q, k, v)
    return attend(config.compute_dtype, q, k, v, causal, problem.softmax_scale)


def backward(
    problem: Problem,
    config: Fused,
    dout: Tensor,
    dlse: None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    optional: OptionalInputs,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), contiguous, from the gradient of out."""
    causal = _kernel_mask(problem, q.shape[0], q.shape[1], k.shape[1])
    if causal is None:
        return banded.backward(problem, config, dout, q, k, v, out, lse, optional.alibi_slopes)
    scale = problem.softmax_scale
    dq, dk, dv = differentiate(config.compute_dtype, dout, q, k, v, out, lse, causal, scale)
    if q.dtype == config.compute_dtype == dk.dtype:
        return dq, dk, dv
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _kernel_mask(problem: Problem, batch: int, seqlen_q: int, seqlen_k: int) -> bool | None:
    """Return the kernel's ``is_causal``; None if a length is 0 or the kernel does not support the mask."""
    if problem.alibi or batch == 0 or seqlen_q == 0 or seqlen_k == 0:
        return None
    left, right = problem.effective_window(seqlen_q, seqlen_k)
    if left != UNLIMITED:
        return None
    if right == UNLIMITED:
        return False
    return True if right == 0 and seqlen_q == seqlen_k else None


def _attend_by_groups(
    problem: Problem, config: Fused, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute attention of one query per sequence. The query heads of a group become queries of one head."""
    heads_kv = k.shape[2]
    by_groups = q[:, 0].unflatten(1, (heads_kv, problem.group_size)).transpose(1, 2)
    out, lse = attend(config.compute_dtype, by_groups, k, v, False, problem.softmax_scale)
    return out.transpose(1, 2).reshape(q.shape).detach(), lse.flatten(1)[:, :, None].detach()
