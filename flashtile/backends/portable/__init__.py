"""Triton kernels for every feature on any GPU that Triton supports, and for its interpreter on the CPU."""

from __future__ import annotations

import os

import torch

from flashtile.backends.common.device import Target, capability, is_nvidia
from flashtile.backends.common.releases import reason_of_releases
from flashtile.problems.attention import Problem
from flashtile.problems.masking import KernelMask, Masking

NAME = "portable"
LARGE_SHARED_MEMORY = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))
"""Compute capabilities with at least 160 KiB of shared memory per block; others have at most 99 KiB."""


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def reason_against(problem: Problem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does.

    ``explicit``: whether the call names the backend.
    """
    reason = reason_of_device(problem.device, {problem.dtype}, explicit) or reason_of_dtypes({problem.dtype})
    if reason is None:
        reason = reason_of_masking(problem) or _reason_of_width(problem)
    if reason is None and problem.mods is not None and problem.mods.learned and problem.deterministic:
        return "it adds to the gradients of captured tensors in any order, not deterministically"
    size = None if problem.mods is None else problem.mods.block_size
    if reason is None and size is not None and (size[0] % 16 or size[1] % 16):
        return (
            f"blocks of block_mask must be multiples of 16 queries and keys, they are {size[0]} by {size[1]}"
        )
    return reason


def reason_of_masking(problem: Masking) -> str | None:
    """Why the kernels do not hide the keys that a problem hides by position; None if they do."""
    unknown = problem.beyond(KernelMask._fields)
    return None if unknown is None else f"it has no {unknown}"


def fits(gpu: tuple[int, int], element_bytes: int, head_dim: int) -> bool:
    """Whether tiles of this head size fit into shared memory on GPUs of compute capability ``gpu``."""
    if head_dim > 512:
        return element_bytes == 2 and gpu in LARGE_SHARED_MEMORY
    return head_dim <= 256 or (gpu >= (8, 0) if element_bytes == 2 else gpu in LARGE_SHARED_MEMORY)


def _reason_of_width(problem: Problem) -> str | None:
    width, device = max(problem.head_dim, problem.head_dim_v), problem.device
    if device.type != "cuda" or fits(capability(device), problem.dtype.itemsize, width):
        return None
    return f"heads of {width} in {problem.dtype} need more shared memory than this GPU has for a block"


def reason_of_device(device: torch.device | Target, computed: set[torch.dtype], explicit: bool) -> str | None:
    """Why kernels that compute in these dtypes do not run on the device; None if they do."""
    reason = reason_of_releases(device)
    if reason is not None:
        return reason
    if device.type != "cuda":
        if not interpreting():
            return f"its kernels run on GPUs, not on {device} (TRITON_INTERPRET=1 interprets them)"
        if device.type != "cpu":
            return f"Triton's interpreter takes CPU tensors, not tensors on {device}"
        if not explicit:
            return "Triton's interpreter is used on CPU tensors only with backend='portable'"
        if torch.bfloat16 in computed:
            return "Triton's interpreter cannot multiply bfloat16: it takes the bits for integers"
    elif torch.bfloat16 in computed and is_nvidia(device):
        major, minor = capability(device)
        if major < 8:
            return f"bfloat16 needs compute capability 8.0, {device} has {major}.{minor}"
    return None


def reason_of_dtypes(dtypes: set[torch.dtype]) -> str | None:
    """Why this backend does not take one of these dtypes; None if it takes all."""
    for dtype in dtypes - {torch.float16, torch.bfloat16, torch.float32}:
        return f"it computes in float16, bfloat16 or float32, not {dtype}"
    return None


def reason_against_forward(problem: Problem, explicit: bool) -> str | None:
    """Why the forward kernel does not serve a problem; None if it does."""
    if problem.invariant:
        return "the order of sums depends on the tile, and single tokens over a cache have another one"
    return reason_against(problem, explicit)


def configure_forward(problem: Problem):
    from flashtile.backends.portable.config import choose

    return choose(problem)


configure_backward = configure_forward


def prepare_forward(problem: Problem, config):
    from flashtile.backends.portable.attention.launch import PortableForwardLaunch

    return PortableForwardLaunch(problem, config)


def reason_against_tangents(problem: Problem, explicit: bool) -> str | None:
    """Why this backend does not serve a problem in forward mode; None if it does."""
    from flashtile.backends.portable.config import has_tangents

    reason, width = reason_against(problem, explicit), max(problem.head_dim, problem.head_dim_v)
    if reason is None and problem.device.type == "cuda" and not has_tangents(problem.dtype.itemsize, width):
        return f"heads of {width} in {problem.dtype} and their tangents need more registers than a GPU has"
    return reason


def configure_tangents(problem: Problem):
    from flashtile.backends.portable.config import choose_tangents

    return choose_tangents(problem)


def prepare_tangents(problem: Problem, config):
    from flashtile.backends.portable.attention.launch import PortableTangentsLaunch

    return PortableTangentsLaunch(problem, config)


def prepare_backward(problem: Problem, config):
    from flashtile.backends.portable.attention.launch import PortableBackwardLaunch

    return PortableBackwardLaunch(problem, config)
