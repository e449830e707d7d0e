"""Is FP8 attention right on this machine? The error rule of :mod:`flashtile.testing`, over what is stored.

    from flashtile.fp8 import testing
    print(testing.check(q, k, v, causal=True))

The reference is standard attention in float64 over the numbers that the e4m3 tensors and their scales stand
for, so that what is judged is attention; how far those numbers are from what was quantised is another matter.
Plain PyTorch in the same dtype rounds its probabilities to e4m3, too, and here times 2**8, as we do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from flashtile import reference as standard
from flashtile.attn import functional
from flashtile.fp8 import reference
from flashtile.fp8.functional import attention
from flashtile.fp8.layout import E4M3, P_EXPONENT
from flashtile.fp8.quantized import Quantized
from flashtile.rounding import finite, largest, rms
from flashtile.testing import Report, compare, poisoned_memory

P_ROUNDING = 2.0**-5
"""Typical relative error of a probability in e4m3: a quarter of the distance between neighbours."""

SCORE_ERROR = 2.0**-20
"""Rounding of a score, of the largest that the lengths of q and k allow."""

SCORE_ERROR_ON_GPU = 2.0**-13
"""The same where tensor cores sum products of e4m3 in fewer bits than float32 has."""


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
    """Raise AssertionError unless FP8 attention over q, k and v meets the error rule; return every number.

    Args:
        q, k, v: as for :func:`flashtile.fp8.attention`, or float8_e4m3fn as for
            :func:`flashtile.flash_attn_func`.
        method, hadamard, seed: as for :func:`flashtile.fp8.attention`.
        poison: run under :func:`flashtile.testing.poisoned_memory`.
        backend: which to insist on; one that cannot quantise computes on what the default one quantised.
        function: what is measured in place of :func:`flashtile.fp8.attention`, or :func:`flashtile.attention`
            for q of float8_e4m3fn; it gets what the former gets of those that are quantised.
        arguments: the others of :func:`flashtile.fp8.attention`, or of :func:`flashtile.attention` with its
            descales, but for rotary embedding.

    Costs the memory of standard attention in float64.
    """
    parts: tuple[Any, Any, Any] = (q, k, v)
    with poisoned_memory() if poison else nullcontext():
        if isinstance(q, Tensor) and q.dtype == E4M3:
            function = function or functional.attention
        else:
            function = function or attention
            parts = reference.quantize_call(
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
    """What rounding of P may leave in out, (largest, rms), if errors are unrelated; and of scores in lse."""
    scales = [arguments.pop(f"{name}_descale", None) for name in "qkv"]
    (q, k, v), arguments = reference.dequantize(*parts, tuple(scales), torch.float64, arguments)
    squares, _ = standard.attention(q, k, v.square(), round_p=torch.square, **arguments)
    sizes = squares.sqrt().nan_to_num(0.0, 0.0) * P_ROUNDING
    score = abs(arguments["softmax_scale"])
    for x in (q, k):
        score *= largest(finite(torch.linalg.vector_norm(x, dim=-1)))
    return (largest(sizes), rms(sizes)), (SCORE_ERROR_ON_GPU if on_gpu else SCORE_ERROR) * max(score, 1.0)
