"""Decoding in Triton: attention over a cache, parts combined, appending to the cache, copying its blocks."""

from __future__ import annotations

import importlib.util

import torch

from flashtile.backends import portable
from flashtile.decode.problem import FP8, AppendProblem, CombineProblem, CopyProblem, DecodeProblem

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def reason_against(
    problem: DecodeProblem | AppendProblem | CombineProblem | CopyProblem, explicit: bool
) -> str | None:
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
    dtypes = {getattr(problem, name, problem.dtype) for name in ("dtype", "cache_dtype")}
    if device.type == "cpu" and torch.bfloat16 in dtypes and not isinstance(problem, CopyProblem):
        return "Triton's interpreter cannot compute in bfloat16: it takes the bits for integers"
    for dtype in dtypes:
        if dtype not in (*DTYPES, FP8):
            return f"it computes in float16, bfloat16 or float32, not {dtype}"
    return None


def configure_decode(problem: DecodeProblem):
    from flashtile.backends.portable.decode.config import choose

    return choose(problem)


def prepare_decode(problem: DecodeProblem, config):
    from flashtile.backends.portable.decode.launch import DecodeLaunch

    return DecodeLaunch(problem, config)


def prepare_append_kvcache(problem: AppendProblem, config: None):
    from flashtile.backends.portable.decode.append_launch import AppendLaunch

    return AppendLaunch(problem)


def prepare_combine(problem: CombineProblem, config: None):
    from flashtile.backends.portable.decode.launch import CombineLaunch

    return CombineLaunch(problem)


def prepare_copy_blocks(problem: CopyProblem, config: None):
    from flashtile.backends.portable.decode.append_launch import CopyLaunch

    return CopyLaunch(problem)
