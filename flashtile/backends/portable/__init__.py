"""Triton kernels for every feature on any GPU that Triton supports, and for its interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import os

import torch

from flashtile.attn.problem import Problem
from flashtile.backends.common.device import capability, is_nvidia

NAME = "portable"


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def reason_against(problem: Problem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if problem.device.type != "cuda":
        if not interpreting():
            return f"its kernels run on GPUs, not on {problem.device} (TRITON_INTERPRET=1 interprets them)"
        if problem.device.type != "cpu":
            return f"Triton's interpreter takes CPU tensors, not tensors on {problem.device}"
        if not explicit:
            return "Triton's interpreter is used on CPU tensors only when backend='portable' asks for it"
    if problem.device.type == "cpu" and problem.dtype == torch.bfloat16:
        return "Triton's interpreter cannot multiply bfloat16: it takes the bits for integers"
    if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it computes in float16, bfloat16 or float32, not {problem.dtype}"
    if problem.dtype == torch.bfloat16 and is_nvidia(problem.device):
        major, minor = capability(problem.device)
        if major < 8:
            return f"bfloat16 needs compute capability 8.0, {problem.device} has {major}.{minor}"
    return None


def configure_forward(problem: Problem):
    from flashtile.backends.portable.config import choose

    return choose(problem)


configure_backward = configure_forward


def prepare_forward(problem: Problem, config):
    from flashtile.backends.portable.launch import ForwardLaunch

    return ForwardLaunch(problem, config)


def prepare_backward(problem: Problem, config):
    from flashtile.backends.portable.launch import BackwardLaunch

    return BackwardLaunch(problem, config)
