"""FP8 on the CPU: e4m3 emulated in torch with the numbers of the kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashtile.backends.cpu.fp8.attend import attend
from flashtile.problems.fp8 import Fp8Problem, QuantizeProblem
from flashtile.reference import fp8_emulation as emulation


def reason_against(problem: Fp8Problem | QuantizeProblem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    if problem.device.type != "cpu":
        return f"it computes on the CPU, the tensors are on {problem.device}"
    return None


def configure_fp8_attend(problem: Fp8Problem | QuantizeProblem) -> str:
    return "emulated in float32"


configure_fp8_quantize = configure_fp8_attend


def prepare_fp8_attend(problem: Fp8Problem, config: str) -> Any:
    return partial(attend, problem)


def prepare_fp8_quantize(problem: QuantizeProblem, config: str) -> Any:
    return partial(emulation.quantize, problem)
