"""Attention with q, k and v in e4m3 on NVIDIA's Hopper GPUs, by a Gluon kernel.

Tensors are quantised by the portable backend.
"""

from __future__ import annotations

from flashtile.backends import hopper
from flashtile.problems.fp8 import Fp8Problem


def reason_against(problem: Fp8Problem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    reason = hopper.reason_of_device(problem)
    if reason is not None:
        return reason
    if problem.alibi or problem.sink:
        return f"its FP8 kernel takes no {'alibi_slopes' if problem.alibi else 'sink'}"
    if problem.v_transposed and problem.seqused_k:
        return "its FP8 kernel takes seqused_k only with v row by row, not quantised: unused keys may be NaN"
    for name, size, multiple in (("head_dim", problem.head_dim, 16), ("head_dim_v", problem.head_dim_v, 8)):
        if size % multiple:
            return f"{name} must be a multiple of {multiple} for TMA, it is {size}"
    return hopper.reason_of_tensors(problem)


def configure_fp8_attend(problem: Fp8Problem):
    from flashtile.backends.hopper.fp8.config import choose

    return choose(problem)


def prepare_fp8_attend(problem: Fp8Problem, config):
    from flashtile.backends.hopper.fp8.launch import Fp8ForwardLaunch

    return Fp8ForwardLaunch(problem, config)
