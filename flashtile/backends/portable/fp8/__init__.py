"""FP8 in portable Triton: quantisation, and attention over e4m3, natively where the GPU has FP8 products."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.backends import portable
from flashtile.backends.common.device import Target, capability
from flashtile.problems.fp8 import Fp8Problem, QuantizeProblem

NATIVE_CAPABILITY = (8, 9)
"""Compute capability (Ada) from which GPUs convert to e4m3 and multiply it in hardware."""


def reason_against(problem: Fp8Problem | QuantizeProblem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    computed = problem.dtype if isinstance(problem, QuantizeProblem) else problem.out_dtype
    return portable.reason_of_device(problem.device, {computed}, explicit)


def is_native(device: torch.device | Target) -> bool:
    """Whether kernels for the device use FP8 instructions. Otherwise they emulate FP8."""
    return capability(device) >= NATIVE_CAPABILITY


def configure_fp8_quantize(problem: QuantizeProblem) -> bool:
    return is_native(problem.device)


def configure_fp8_attend(problem: Fp8Problem) -> Any:
    from flashtile.backends.portable.fp8.launch import choose

    return choose(problem, is_native(problem.device))


def prepare_fp8_attend(problem: Fp8Problem, config: Any) -> Any:
    from flashtile.backends.portable.fp8.launch import Fp8AttendLaunch

    return Fp8AttendLaunch(problem, config)


def prepare_fp8_quantize(problem: QuantizeProblem, config: bool) -> Any:
    from flashtile.backends.portable.fp8.launch import QuantizeLaunch

    return QuantizeLaunch(problem, config)
