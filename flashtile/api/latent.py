"""The ``qv`` argument of multi-head latent attention: queries for v, appended to q as further columns."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.checks.arguments import check_qv
from flashtile.checks.attention import check_call, check_types
from flashtile.checks.conversions import under_autocast
from flashtile.problems.attention import OptionalTensors, Options
from flashtile.problems.common import MAX_HEAD_DIM


def join_qv(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor, extras: OptionalTensors, options: Options
) -> tuple[Tensor, Tensor]:
    """Return q and k with the columns of qv and v appended. Their product is ``q k^T + qv v^T``.

    Both results are differentiable.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`flashtile.attention`.
    """
    if isinstance(q, Tensor) and q.dtype == torch.float8_e4m3fn:
        raise NotImplementedError("qv must be None for q, k and v of float8_e4m3fn, got a tensor")
    (qv,) = under_autocast(qv)
    if torch.compiler.is_dynamo_compiling():  # Dynamo cannot trace the check of strides
        check_types(q, k, v, extras, options)
    else:
        check_call(q, k, v, extras, options)
    check_qv(q, v, "v", qv)
    columns = q.shape[-1] + v.shape[-1]
    if columns > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"qv needs head_dims of q and v that add up to at most {MAX_HEAD_DIM}, got {q.shape[-1]} and "
            f"{v.shape[-1]}: flash_attn_with_kvcache takes up to 512 each, without a backward pass"
        )
    return torch.cat([q, qv], -1), torch.cat([k, v], -1)
