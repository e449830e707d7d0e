"""FP8 in portable Triton: quantisation, and attention over e4m3, natively where the GPU has FP8 products."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from flashtile.backends import portable
from flashtile.backends.common.device import Target, capability
from flashtile.fp8.problem import Fp8Problem, QuantizeProblem

NATIVE_CAPABILITY = (8, 9)
"""From Ada on GPUs convert to e4m3 and multiply it."""


def reason_against(problem: Fp8Problem | QuantizeProblem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    device = problem.device
    if device.type != "cuda":
        if not portable.interpreting():
            return f"its kernels run on GPUs, not on {device} (TRITON_INTERPRET=1 interprets them)"
        if device.type != "cpu":
            return f"Triton's interpreter takes CPU tensors, not tensors on {device}"
        if not explicit:
            return "Triton's interpreter is used on CPU tensors only when backend='portable' asks for it"
        dtype = problem.dtype if isinstance(problem, QuantizeProblem) else problem.out_dtype
        if dtype == torch.bfloat16:
            return "Triton's interpreter cannot compute in bfloat16: it takes the bits for integers"
    return None


def is_native(device: torch.device | Target) -> bool:
    """Whether kernels for the device use FP8 instructions; the numbers are the same without."""
    return capability(device) >= NATIVE_CAPABILITY


def configure_fp8_quantize(problem: QuantizeProblem) -> bool:
    return is_native(problem.device)


def configure_fp8_attend(problem: Fp8Problem) -> Any:
    from flashtile.backends.portable.fp8.config import choose

    return choose(problem, is_native(problem.device))


def prepare_fp8_attend(problem: Fp8Problem, config: Any) -> Any:
    from flashtile.backends.portable.fp8.launch import AttendLaunch

    return AttendLaunch(problem, config)


def prepare_fp8_quantize(problem: QuantizeProblem, config: bool) -> Any:
    from flashtile.backends.portable.fp8.quantize_launch import QuantizeLaunch

    return QuantizeLaunch(problem, config)
