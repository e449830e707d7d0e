"""Checks of FP8 attention on this machine, by the error rule of :mod:`flashtile.testing`.

    from flashtile.fp8 import testing
    print(testing.check(q, k, v, causal=True))

The reference is standard attention in float64 over the dequantised e4m3 tensors, so the error of quantisation
is not counted. The limit is set by the error of attention in plain PyTorch, in which probabilities are
multiplied by 2**8 and rounded to e4m3, as in flashtile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from flashtile.api import attention as functional
from flashtile.api.fp8 import QUANTIZING, attention, quantize, shared_method
from flashtile.problems.fp8_layout import E4M3, P_EXPONENT
from flashtile.problems.quantized import Quantized
from flashtile.reference import attention as exact
from flashtile.reference import fp8 as reference
from flashtile.rounding import finite, largest, rms
from flashtile.testing import Report, compare, poisoned_memory

P_ROUNDING = 2.0**-5
"""Typical relative error of a probability in e4m3: a quarter of the distance between neighbouring values."""

SCORE_ERROR = 2.0**-20
"""Rounding error of a score, relative to the largest score that the norms of q and k allow."""

SCORE_ERROR_ON_GPU = 2.0**-12
"""Rounding error of a score on tensor cores, relative in the same way.

Tensor cores add 32 products of e4m3 to a sum at a time, and cut each term off 13 bits below the largest
(DeepSeek-V3, arXiv:2412.19437, section 3.3.2). In a model of this, errors of 3 million scores of random
numbers at head sizes from 64 to 256 are at most 1.4 * 2**-13.
"""


def check(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    method: str | None = None,
    hadamard: bool | None = None,
    seed: int | None = None,
    poison: bool = True,
    backend: str | None = None,
    function: Callable[..., Any] | None = None,
    **arguments: Any,
) -> Report:
    """Raise AssertionError unless FP8 attention over q, k and v is within the error rule; return the report.

    The rule is that of :mod:`flashtile.testing`. The check needs as much memory as standard
    attention in float64.

    Args:
        q, k, v: as for :func:`flashtile.fp8.attention`, or float8_e4m3fn tensors as for
            :func:`flashtile.flash_attn_func`.
        method, hadamard, seed: as for :func:`flashtile.fp8.attention`.
        poison: run under :func:`flashtile.testing.poisoned_memory`.
        backend: the required backend of attention. The default backend quantises if this one cannot.
        function: the function to measure. None: :func:`flashtile.attention` for q of float8_e4m3fn, otherwise
            :func:`flashtile.fp8.attention`, which gets quantised tensors.
        arguments: the other arguments of the measured function: those of :func:`flashtile.fp8.attention`
            without rotary embedding, or those of :func:`flashtile.attention` and the descales.
    """
    parts: tuple[Any, Any, Any] = (q, k, v)
    with poisoned_memory() if poison else nullcontext():
        if isinstance(q, Tensor) and q.dtype == E4M3:
            function = function or functional.attention
        else:
            function = function or attention
            parts = quantize_call(
                q, k, v, method=method, hadamard=hadamard, seed=seed, backend=backend, **arguments
            )
        out, lse = function(*parts, return_lse=True, backend=backend, **arguments)
    exact = reference.attention(*parts, **arguments)
    plain = reference.attention(*parts, p_scale=2.0**P_EXPONENT, upcast=torch.float32, **arguments)
    p_noise, lse_noise = _noise(parts, dict(arguments), out.is_cuda)
    return Report(
        f"FP8 attention of q {tuple(q.shape)}, k {tuple(k.shape)}, {', '.join(sorted(arguments))}",
        (
            compare("out", out, exact[0], plain[0].to(out.dtype), noise=p_noise),
            compare("lse", lse, exact[1], plain[1], noise=(lse_noise, lse_noise)),
        ),
    ).require()


def _noise(
    parts: tuple[Any, Any, Any], arguments: dict[str, Any], on_gpu: bool
) -> tuple[tuple[float, float], float]:
    """Return (out_noise, lse_noise), the errors that rounding may cause.

    ``out_noise`` is the (largest, rms) error of out when P is rounded to e4m3. The rounding errors of
    different probabilities are assumed to be independent. ``lse_noise`` is the error of lse that is caused by
    rounding errors of the scores.
    """
    scales = [arguments.pop(f"{name}_descale", None) for name in "qkv"]
    (q, k, v), arguments = reference.dequantize(*parts, tuple(scales), torch.float64, arguments)
    squares, _ = exact.attention(q, k, v.square(), round_p=torch.square, **arguments)
    sizes = squares.sqrt().nan_to_num(0.0, 0.0) * P_ROUNDING
    score = abs(arguments["softmax_scale"])
    for x in (q, k):
        score *= largest(finite(torch.linalg.vector_norm(x, dim=-1)))
    return (largest(sizes), rms(sizes)), (SCORE_ERROR_ON_GPU if on_gpu else SCORE_ERROR) * max(score, 1.0)


def standard(
    q: Tensor, k: Tensor, v: Tensor, *, p_scale: float | None = 1.0, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of standard attention in FP8, the baseline of FlashAttention-3's section 4.3.

    Each tensor has one scale. Products, softmax and out are in float32. The paper reports an rms error of
    2.4e-2 for its baseline, on data with outliers. This function has an error of 2.5e-2 with ``p_scale=1`` on
    such data with 4 heads, 4096 tokens and head_dim 128. With ``p_scale=None`` the error is 1.7e-2.

    Args:
        q, k, v: float16 or bfloat16, as for :func:`flashtile.attention`.
        p_scale: as for :func:`flashtile.reference.fp8.attention`. With 1, probabilities are rounded to e4m3
            without scaling.
        arguments: the other arguments of :func:`flashtile.reference.attention.attention`.
    """
    parts = quantize_call(q, k, v, method="tensor", hadamard=False, **arguments)
    return reference.attention(*parts, p_scale=p_scale, upcast=torch.float32, **arguments)


def quantize_call(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    method: str | None = None,
    hadamard: bool | None = None,
    seed: int | None = None,
    backend: str | None = None,
    **arguments: Any,
) -> tuple[Quantized, Quantized, Quantized]:
    """Quantise those of q, k and v that are not yet quantised, as :func:`flashtile.fp8.attention` does."""
    method, seed = shared_method({"q": q, "k": k, "v": v}, method, hadamard, seed)
    quantized = (
        x
        if isinstance(x, Quantized)
        else quantize(
            x,
            role,
            method=method,
            hadamard=seed is not None,
            seed=seed or 0,
            cu_seqlens=arguments.get(f"cu_seqlens_{side}"),
            max_seqlen=arguments.get(f"max_seqlen_{side}"),
            seqused=arguments.get(f"seqused_{side}"),
            backend=backend if backend in QUANTIZING else None,
        )
        for x, role, side in zip((q, k, v), "qkv", "qkk", strict=True)
    )
    return next(quantized), next(quantized), next(quantized)
