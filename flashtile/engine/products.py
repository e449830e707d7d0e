"""Products with weights, and what stands around them in a layer: the one place that the models call."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

SWIGLU = "silu_and_mul"


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """RMSNorm of x (tokens, K), the product with weight (N, K), bias, activation, residual, in this order.

    Args:
        activation: "silu_and_mul": silu of the first half of the columns times the second half.
    """
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps)
    out = F.linear(x, weight, bias)
    if activation is not None:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    return out if residual is None else out + residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32, rounded once."""
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
